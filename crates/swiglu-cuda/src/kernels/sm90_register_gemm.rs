//! Launches `device/decode/sm90_register_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::elementwise::Tensor;
use super::gate::element_define;
use super::gated_gemm::{Extents, Shape};
use super::obstacle::Obstacle;
use super::sm90_skinny_gated_gemm::even_share;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{Function, LaunchConfig, launch as enqueue};
use crate::device::lt::LinearWeights;
use crate::device::stream::Stream;

pub(super) static FILE: KernelFile = kernel_file!("decode", "sm90_register_gemm.cu");

/// Eight rows of a fragment.
pub(crate) const MOST_TOKENS: usize = 8;

/// Features of one fragment, of which a block has one or two.
const GROUP: usize = 8;
const MOST_FEATURES: usize = 2 * GROUP;
/// With a hundred registers for each thread four fifths of an SM's: two blocks never share one.
const WARPS: usize = 16;
/// Of k, that a warp multiplies at a time.
const SLICE: usize = 32;
/// Elements of an access.
const VECTOR: usize = 8;
/// Registers of a thread for what it multiplies; beside them it has room for sums and addresses, and an SM
/// for a block of the kernel before this one.
const MOST_REGISTERS: usize = 72;
/// Features that a block multiplies at most: its own, and those of the others of its cluster.
const MOST_MULTIPLIED: usize = 32;
/// The smallest cluster: SMs come in pairs.
const PAIR: usize = 2;
/// Bytes of the sums of a group, of one warp.
const SUMS: usize = MOST_TOKENS * GROUP * size_of::<f32>();
/// What a block takes of shared memory, at most: 17 KiB and a barrier, in whole KiB.
pub(super) const SHARED: usize = 18 * 1024;

/// One launch: y = x·W + b.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) dtype: DType,
    /// At most [`MOST_TOKENS`].
    pub(crate) m: usize,
    /// At a multiple of 16 bytes, with rows a multiple of 16 bytes apart.
    pub(crate) x: Tensor,
    /// `[out, in]`, as `x`.
    pub(crate) weights: LinearWeights,
    pub(crate) y: Tensor,
}

/// How a product is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    tile_h: usize,
    /// Blocks that share k and their features.
    cluster: usize,
    /// Slices of k that a warp has.
    steps: usize,
}

impl Tiling {
    /// Of a product with these features, on so many SMs: as many blocks share k as can, so that each reads
    /// little of the tokens.
    ///
    /// # Errors
    /// [`Obstacle::NotInRegisters`] where an SM's share does not fit, [`Obstacle::PartOfAnAccess`].
    pub(crate) fn new(
        [inputs, outputs]: [usize; 2],
        multiprocessors: usize,
    ) -> std::result::Result<Self, Obstacle> {
        if !inputs.is_multiple_of(VECTOR) {
            return Err(Obstacle::PartOfAnAccess { features: inputs, access: VECTOR });
        }
        let shape = Shape {
            tokens: MOST_TOKENS,
            features: outputs,
            orientation: Orientation::OutIn,
            multiprocessors,
        };
        let tile_h = even_share(shape, multiprocessors, MOST_FEATURES);
        let of =
            |cluster| Self { tile_h, cluster, steps: inputs.div_ceil(cluster * WARPS * SLICE) };
        let fits = |one: &Self| {
            // Larger clusters lie within a part of the device, and leave some of its SMs empty.
            let left = if one.cluster > PAIR { multiprocessors / 8 } else { 0 };
            one.blocks(outputs) <= multiprocessors - left && one.registers() <= MOST_REGISTERS
        };
        let clusters = [MOST_MULTIPLIED / tile_h, PAIR].map(of);
        clusters.into_iter().find(fits).ok_or(Obstacle::NotInRegisters)
    }

    /// Of a thread, for weights and tokens.
    fn registers(self) -> usize {
        self.steps * 4 * (self.groups() + 1)
    }

    /// Of eight features, that a block multiplies.
    fn groups(self) -> usize {
        self.cluster * self.tile_h / GROUP
    }

    /// Whole clusters.
    fn blocks(self, outputs: usize) -> usize {
        outputs.div_ceil(self.tile_h).next_multiple_of(self.cluster)
    }

    fn shared_bytes(self) -> usize {
        // Of each warp, of each block of the cluster for this one's features, and the barrier those come by.
        self.groups() * WARPS * SUMS + self.groups() * SUMS + 8
    }

    /// Tile sizes and the like, by name.
    pub(crate) fn parameters(self) -> [(&'static str, usize); 3] {
        [("down_tile_h", self.tile_h), ("down_cluster", self.cluster), ("down_steps", self.steps)]
    }

    pub(super) fn named(self, dtype: DType) -> NamedVariant {
        let Tiling { tile_h, cluster, steps } = self;
        let name = format!("{dtype} 8x{tile_h} cluster{cluster} steps{steps} warps{WARPS}");
        NamedVariant { name, variant: self.variant(dtype) }
    }

    fn variant(self, dtype: DType) -> Variant {
        let tile = [
            ("TILE_H", self.tile_h),
            ("CLUSTER", self.cluster),
            ("WARPS", WARPS),
            ("STEPS", self.steps),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        let [a, b, c, d, e] = tile.map(|(name, value)| define(name, value));
        Variant::new(&FILE, [element_define(dtype), a, b, c, d, e])
    }
}

#[repr(C)]
struct Params {
    x: u64,
    weights: u64,
    y: u64,
    x_stride: i64,
    weights_stride: i64,
    y_stride: i64,
    extents: Extents,
    bias: u64,
}

pub(crate) fn function(cuda: &Cuda, tiling: Tiling, dtype: DType) -> Result<Function> {
    let shared = tiling.shared_bytes() as u32;
    let function = cuda.function(&tiling.variant(dtype), "sm90_register_gemm", shared)?;
    // The kernel before it has nearly all of it, on the same SM.
    function.keep_all_shared()?;
    Ok(function)
}

/// Enqueues y = x·W + b.
///
/// # Safety
/// The call's addresses are memory of the stream's device that stays valid until the kernel has run; y overlaps
/// nothing else, and its rows do not overlap. There are tokens, and features of both kinds, and the tiling is theirs. No
/// grid before this one on the stream writes the weights: they are read before it has ended.
/// That grid lets this one go only after its own wait, or not at all: this one lets the next grid go before its wait, and
/// what that reads before waiting must have been written.
pub(crate) unsafe fn launch(stream: &Stream, tiling: Tiling, call: &Call) -> Result<()> {
    let (cuda, w) = (stream.cuda(), &call.weights);
    let function = function(cuda, tiling, call.dtype)?;
    let params = Params {
        x: call.x.data,
        weights: w.ptr,
        y: call.y.data,
        x_stride: call.x.stride,
        weights_stride: Tensor::new(w.ptr, w.row_stride).stride,
        y_stride: call.y.stride,
        extents: Extents::new([call.m, w.out_features, w.in_features], 1),
        bias: w.bias.unwrap_or(0),
    };
    let launch = LaunchConfig {
        grid: [tiling.blocks(w.out_features) as u32, 1, 1],
        block: (WARPS * 32) as u32,
        dynamic_shared: tiling.shared_bytes() as u32,
        cluster: Some(tiling.cluster as u32),
        // It waits before it reads anything but weights, or writes. Graphs can hold such launches since then.
        programmatic: cuda.facts().driver_version >= (12, 3),
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Both widths with the fewest slices and the most, and pairs of the narrow one.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let forms = [(GROUP, 4), (GROUP, PAIR), (MOST_FEATURES, PAIR)];
    let tilings = forms.into_iter().flat_map(|(tile_h, cluster)| {
        let one = Tiling { tile_h, cluster, steps: 1 };
        [one, Tiling { steps: MOST_REGISTERS / one.registers(), ..one }]
    });
    tilings.map(|tiling| tiling.named(dtype)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_that_fit_have_a_register_for_each_weight() {
        let fitted = |product| Tiling::new(product, 132).map(|t| (t.tile_h, t.cluster, t.steps));
        assert_eq!(fitted([4864, 896]), Ok((8, 4, 3)));
        assert_eq!(fitted([768, 2048]), Ok((16, 2, 1)));
        assert_eq!(fitted([3072, 1024]), Ok((8, 2, 3)));
        assert_eq!(fitted([8, 1]), Ok((8, 4, 1)));
        assert_eq!(fitted([5120, 1056]), Ok((8, 2, 5)));
        for product in [[8192, 2048], [6152, 896], [3080, 2112], [64, 2113], [64, 65_536]] {
            assert_eq!(fitted(product), Err(Obstacle::NotInRegisters), "{product:?}");
        }
        assert!(matches!(fitted([4860, 896]), Err(Obstacle::PartOfAnAccess { .. })));
        for (inputs, outputs) in (8..9000).step_by(8).flat_map(|i| [1, 900, 2000].map(|o| (i, o))) {
            let Ok(tiling) = Tiling::new([inputs, outputs], 132) else { continue };
            let Tiling { tile_h, cluster, steps } = tiling;
            assert!(steps * cluster * WARPS * SLICE >= inputs, "{tiling:?}");
            assert!(tiling.shared_bytes() <= SHARED, "{tiling:?}");
            assert!((outputs.div_ceil(tile_h)..=132).contains(&tiling.blocks(outputs)));
        }
        assert_eq!(size_of::<Params>(), 72);
    }
}
