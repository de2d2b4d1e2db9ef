//! What is measured.

use std::fmt;

use clap::ValueEnum;
use swiglu::{BlockType, DType, Op, QuantizedType};

use crate::args::LayerOp;
use crate::quantized::SyntheticBlocks;
use crate::timing::Heat;

/// Of the weights and inputs that are made up.
pub(super) const SEED: u64 = 1;

/// One problem to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Case {
    pub(super) op: Op,
    pub(super) m: usize,
    /// K; 0 for the activation.
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) dtype: DType,
    /// The type of the weights, where they are quantised.
    pub(super) weights: Option<QuantizedType>,
    pub(super) heat: Heat,
    /// Whether the activation's gate and up share a tensor.
    pub(super) packed: bool,
}

impl Case {
    pub(super) fn activation(m: usize, intermediate: usize, dtype: DType) -> Self {
        let heat = Heat::Cold;
        Self::layer(Op::Activation, [m, 0, intermediate], dtype, heat)
    }

    pub(super) fn layer(op: Op, shape: [usize; 3], dtype: DType, heat: Heat) -> Self {
        let [m, hidden, intermediate] = shape;
        Self { op, m, hidden, intermediate, dtype, weights: None, heat, packed: false }
    }
}

/// What of a case is measured.
pub(super) enum Subject {
    Activation,
    Layer(LayerOp),
    Blocks(Box<SyntheticBlocks>),
}

impl Case {
    pub(super) fn subject(&self) -> swiglu_core::Result<Subject> {
        let op = match self.op {
            Op::Activation => return Ok(Subject::Activation),
            Op::GatedLinear => LayerOp::GatedLinear,
            Op::Mlp => LayerOp::Mlp,
        };
        let Some(kind) = self.weights else { return Ok(Subject::Layer(op)) };
        let seeds = [0x67, 0x75, 0x64].map(|tag| SEED ^ tag);
        let extents = [self.hidden, self.intermediate];
        let blocks = SyntheticBlocks::random(seeds, op, kind, extents)?;
        Ok(Subject::Blocks(Box::new(blocks)))
    }
}

impl fmt::Display for Case {
    /// `mlp 1x896x4864 Q4_0 cold`: the case's name, without its element type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}x", self.op, self.m)?;
        if self.op != Op::Activation {
            write!(f, "{}x", self.hidden)?;
        }
        write!(f, "{}", self.intermediate)?;
        if self.packed {
            f.write_str(" packed")?;
        }
        if let Some(block) = self.weights {
            write!(f, " {block}")?;
        }
        f.write_str(if self.heat == Heat::Hot { " hot" } else { " cold" })
    }
}

/// A list of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Suite {
    /// One of each kind, in under a minute
    Quick,
    /// Every row of the project's goals; on the CPU with one thread and with all
    Goals,
    /// What the host spends on calls of a CUDA device: the first one, and enqueuing others
    Host,
}

const SMALL: [usize; 2] = [896, 4864];
const LARGE: [usize; 2] = [4096, 14336];

fn layers(
    op: Op,
    m: usize,
    [hidden, intermediate]: [usize; 2],
    heat: Heat,
    dtypes: &[DType],
) -> impl Iterator<Item = Case> {
    dtypes.iter().map(move |&dtype| Case::layer(op, [m, hidden, intermediate], dtype, heat))
}

/// Decoding with quantised weights, which are the bytes that a call reads. Those in blocks of 256 need
/// a hidden size that is whole blocks.
fn quantized_decode() -> impl Iterator<Item = Case> {
    use BlockType::{Q4_0, Q4_K, Q6_K, Q8_0};
    let case = |shape: [usize; 2], block: BlockType| Case {
        weights: Some(block.into()),
        ..Case::layer(Op::Mlp, [1, shape[0], shape[1]], DType::F32, Heat::Cold)
    };
    let small = [Q8_0, Q4_0].map(|block| case(SMALL, block));
    small.into_iter().chain([Q8_0, Q4_0, Q4_K, Q6_K].map(|block| case(LARGE, block)))
}

impl Suite {
    pub(super) fn cases(self) -> Vec<Case> {
        match self {
            Suite::Quick => quick(),
            Suite::Goals => goals(),
            Suite::Host => Vec::new(),
        }
    }

    /// The cases for a CUDA device: what is long on a processor is short there.
    pub(super) fn cuda_cases(self) -> Vec<Case> {
        if self == Suite::Host {
            return Vec::new();
        }
        const HALVES: &[DType] = &[DType::Bf16, DType::F16];
        const ONE: &[DType] = &[DType::Bf16];
        let activations = DType::ALL.map(|dtype| Case::activation(4096, 4096, dtype));
        let packed = Case { packed: true, ..Case::activation(16384, 4096, DType::Bf16) };
        let gated = |m, dtypes| layers(Op::GatedLinear, m, LARGE, Heat::Cold, dtypes);
        let mlp = |m, shape, dtypes| layers(Op::Mlp, m, shape, Heat::Cold, dtypes);
        let mut cases: Vec<Case> = activations.into_iter().chain([packed]).collect();
        cases.extend(gated(1, ONE).chain(gated(128, ONE)).chain(gated(4096, HALVES)));
        cases.extend(mlp(1, SMALL, ONE).chain(mlp(4096, LARGE, ONE)));
        let quantized = |m, shape, kind| {
            mlp(m, shape, ONE).map(move |case| Case { weights: Some(kind), ..case })
        };
        let [q8, q4] = [BlockType::Q8_0, BlockType::Q4_0].map(QuantizedType::Block);
        cases.extend(quantized(1, LARGE, q8).chain(quantized(1, LARGE, QuantizedType::F8E4m3)));
        if self == Suite::Goals {
            cases.extend(gated(16, HALVES).chain(gated(64, HALVES)).chain(gated(512, HALVES)));
            cases.extend(gated(1024, HALVES).chain(gated(8192, HALVES)));
            cases.extend(gated(1, &[DType::F32]).chain(gated(512, &[DType::F32])));
            cases.extend(mlp(1, LARGE, ONE).chain(mlp(16, LARGE, ONE)).chain(mlp(128, LARGE, ONE)));
            cases.extend(mlp(1, SMALL, &[DType::F32]));
            let [i8, blocks] = [QuantizedType::I8, QuantizedType::F8E4m3Blocks];
            for kind in [q8, q4, i8, QuantizedType::F8E4m3, blocks] {
                cases.extend(quantized(1, SMALL, kind).chain(quantized(16, LARGE, kind)));
            }
            for kind in [q4, i8, blocks] {
                cases.extend(quantized(1, LARGE, kind));
            }
        }
        cases
    }
}

fn quick() -> Vec<Case> {
    const TWO: &[DType] = &[DType::F32, DType::Bf16];
    let activations = DType::ALL.map(|dtype| Case::activation(4096, 4096, dtype));
    activations
        .into_iter()
        .chain(layers(Op::GatedLinear, 1, SMALL, Heat::Cold, TWO))
        .chain(layers(Op::GatedLinear, 16, SMALL, Heat::Hot, TWO))
        .chain(layers(Op::GatedLinear, 128, SMALL, Heat::Hot, &DType::ALL))
        .chain(layers(Op::Mlp, 1, SMALL, Heat::Cold, TWO))
        .collect()
}

fn goals() -> Vec<Case> {
    const TWO: &[DType] = &[DType::F32, DType::Bf16];
    let activations = DType::ALL.map(|dtype| Case::activation(4096, 4096, dtype));
    let packed = activations.map(|case| Case { packed: true, ..case });
    let gated = |m, shape, heat, dtypes| layers(Op::GatedLinear, m, shape, heat, dtypes);
    activations
        .into_iter()
        .chain(packed)
        .chain(gated(1, SMALL, Heat::Cold, TWO))
        .chain(gated(1, LARGE, Heat::Cold, TWO))
        .chain(gated(16, SMALL, Heat::Hot, TWO))
        .chain(gated(16, SMALL, Heat::Cold, TWO))
        .chain(gated(128, SMALL, Heat::Hot, TWO))
        .chain(gated(512, [2048, 4096], Heat::Hot, &DType::ALL))
        .chain(gated(2048, [2048, 4096], Heat::Hot, &DType::ALL))
        .chain(layers(Op::Mlp, 1, SMALL, Heat::Cold, TWO))
        .chain(layers(Op::Mlp, 1, LARGE, Heat::Cold, TWO))
        .chain(quantized_decode())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_is_measured() {
        let case = Case::layer(Op::Mlp, [1, 896, 4864], DType::F32, Heat::Cold);
        assert_eq!(case.to_string(), "mlp 1x896x4864 cold");
        let case = Case { weights: Some(BlockType::Q4_0.into()), ..case };
        assert_eq!(case.to_string(), "mlp 1x896x4864 Q4_0 cold");
        let case = Case { packed: true, ..Case::activation(4096, 4096, DType::F16) };
        assert_eq!(case.to_string(), "activation 4096x4096 packed cold");
    }

    #[test]
    fn the_names_within_a_suite_differ() {
        for suite in [Suite::Quick, Suite::Goals] {
            for cases in [suite.cases(), suite.cuda_cases()] {
                let mut names: Vec<String> =
                    cases.iter().map(|c| format!("{c} {}", c.dtype)).collect();
                let all = names.len();
                names.sort();
                names.dedup();
                assert_eq!(names.len(), all);
            }
        }
    }
}
