//! The kernels: one launcher per device file, and the list of all variants.

pub(crate) mod decode_mlp;
pub(crate) mod dgated_gemm;
pub(crate) mod down;
pub(crate) mod elementwise;
pub(crate) mod fill_rows;
pub(crate) mod gate;
pub(crate) mod gated_gemm;
mod mma_dgated_gemm;
mod mma_gated_gemm;
pub(crate) mod mma_gemm;
pub(crate) mod obstacle;
pub(crate) mod probe;
mod raster;
pub(crate) mod ring;
mod simt_gated_gemm;
pub(crate) mod sm90_dgated_gemm;
pub(crate) mod sm90_gated_gemm;
mod sm90_gemm;
pub(crate) mod sm90_register_gemm;
pub(crate) mod sm90_skinny_gated_gemm;
pub(crate) mod sm90_skinny_gemm;
pub(crate) mod sums;
pub(crate) mod tensor_map;
pub(crate) mod weights;

use swiglu_core::{Activation, DType, Numerics};

use crate::device::arch::Arch;
use crate::device::jit::Variant;
use gate::GateCode;

/// A variant with a name that people can read.
#[derive(Debug, Clone)]
pub struct NamedVariant {
    /// For example `bf16 silu fused+fast out-in h128`.
    pub name: String,
    /// What is compiled.
    pub variant: Variant,
}

/// SwiGLU in the element type's default numerics.
fn default_code(dtype: DType) -> GateCode {
    GateCode::new(&Activation::SWIGLU, Numerics::default_for(dtype), dtype)
}

/// What a name says of a variant whose rows have factors.
fn of_scaled(scaled: bool) -> &'static str {
    if scaled { " scaled" } else { "" }
}

/// Variants that devices of this architecture launch: every kernel, tile, layout, element type,
/// activation and numerics mode. Kinds that do not meet in the code (a tile and the layout of its
/// store, an activation and where its inputs come from) are not multiplied with each other.
pub fn registry(arch: Arch) -> Vec<NamedVariant> {
    let mut all: Vec<NamedVariant> =
        DType::ALL.into_iter().flat_map(elementwise::variants).collect();
    if arch == Arch::Sm90a {
        let halves = [DType::F16, DType::Bf16].into_iter();
        all.extend(halves.clone().flat_map(sm90_gated_gemm::variants));
        all.extend(halves.clone().flat_map(sm90_dgated_gemm::variants));
        all.extend(halves.clone().flat_map(sm90_skinny_gated_gemm::variants));
        all.extend(halves.clone().flat_map(sm90_skinny_gemm::variants));
        all.extend(halves.flat_map(sm90_register_gemm::variants));
        all.extend(DType::ALL.into_iter().flat_map(decode_mlp::sm90_variants));
    }
    all.extend(DType::ALL.into_iter().flat_map(mma_gated_gemm::variants));
    all.extend(DType::ALL.into_iter().flat_map(mma_dgated_gemm::variants));
    all.extend(simt_gated_gemm::variants());
    all.extend(DType::ALL.into_iter().flat_map(decode_mlp::variants));
    all.extend(DType::ALL.into_iter().flat_map(fill_rows::variants));
    all.extend(DType::ALL.into_iter().flat_map(sums::variants));
    all.extend(probe::variants());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hopper_has_the_hopper_kernel() {
        let files = |arch| {
            let mut files: Vec<_> =
                registry(arch).iter().map(|v| v.variant.file().name()).collect();
            files.dedup();
            files
        };
        assert!(files(Arch::Sm90a).contains(&"sm90_gated_gemm.cu"));
        assert!(!files(Arch::Sm80).contains(&"sm90_gated_gemm.cu"));
        for portable in ["mma_gated_gemm.cu", "mma_dgated_gemm.cu"] {
            assert!(files(Arch::Sm80).contains(&portable), "{portable}");
        }
    }
}
