//! Lists of cases: the quick ones and the project's goals.

use clap::ValueEnum;
use swiglu::{Arrangement, BlockType, DType, QuantizedType};
use swiglu_lab::{Case, CaseOp, DeviceKind, Heat};

use crate::inputs;

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

/// Cases of one shape (K, H): numbers of tokens × element types × types of quantised weights, if any.
struct Sweep {
    op: CaseOp,
    m: &'static [usize],
    shape: [usize; 2],
    dtypes: &'static [DType],
    weights: &'static [QuantizedType],
    heat: Heat,
    arrangement: Arrangement,
}

const SMALL: [usize; 2] = [896, 4864];
const MIDDLE: [usize; 2] = [2048, 4096];
const LARGE: [usize; 2] = [4096, 14336];

const F32: &[DType] = &[DType::F32];
const BF16: &[DType] = &[DType::Bf16];
const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const TWO: &[DType] = &[DType::F32, DType::Bf16];
const ALL: &[DType] = &DType::ALL;

use CaseOp::{GatedLinear, Mlp};
use Heat::{Cold, Hot};

const fn dense(
    op: CaseOp,
    m: &'static [usize],
    shape: [usize; 2],
    dtypes: &'static [DType],
    heat: Heat,
) -> Sweep {
    Sweep { op, m, shape, dtypes, weights: &[], heat, arrangement: Arrangement::Separate }
}

const ACTIVATION: Sweep = dense(CaseOp::Activation, &[4096], [0, 4096], ALL, Cold);

const fn packed(rows: &'static [usize], dtypes: &'static [DType]) -> Sweep {
    Sweep { m: rows, dtypes, arrangement: Arrangement::PackedGateFirst, ..ACTIVATION }
}

/// Decoding with quantised weights, which are the bytes that a call reads. Those in blocks of 256 need a
/// hidden size that is whole blocks.
const fn quantized(
    m: &'static [usize],
    shape: [usize; 2],
    dtypes: &'static [DType],
    weights: &'static [QuantizedType],
) -> Sweep {
    Sweep { weights, ..dense(Mlp, m, shape, dtypes, Cold) }
}

const Q8_0: QuantizedType = QuantizedType::Block(BlockType::Q8_0);
const Q4_0: QuantizedType = QuantizedType::Block(BlockType::Q4_0);
const Q4_K: QuantizedType = QuantizedType::Block(BlockType::Q4_K);
const Q6_K: QuantizedType = QuantizedType::Block(BlockType::Q6_K);
use QuantizedType::{F8E4m3, F8E4m3Blocks, I8};

const QUICK: &[Sweep] = &[
    ACTIVATION,
    dense(GatedLinear, &[1], SMALL, TWO, Cold),
    dense(GatedLinear, &[16], SMALL, TWO, Hot),
    dense(GatedLinear, &[128], SMALL, ALL, Hot),
    dense(Mlp, &[1], SMALL, TWO, Cold),
];

const GOALS: &[Sweep] = &[
    ACTIVATION,
    packed(&[4096], ALL),
    dense(GatedLinear, &[1], SMALL, TWO, Cold),
    dense(GatedLinear, &[1], LARGE, TWO, Cold),
    dense(GatedLinear, &[16], SMALL, TWO, Hot),
    dense(GatedLinear, &[16], SMALL, TWO, Cold),
    dense(GatedLinear, &[128], SMALL, TWO, Hot),
    dense(GatedLinear, &[512, 2048], MIDDLE, ALL, Hot),
    dense(Mlp, &[1], SMALL, TWO, Cold),
    dense(Mlp, &[1], LARGE, TWO, Cold),
    quantized(&[1], SMALL, F32, &[Q8_0, Q4_0]),
    quantized(&[1], LARGE, F32, &[Q8_0, Q4_0, Q4_K, Q6_K]),
];

/// What is long on a processor is short on a CUDA device.
const CUDA_QUICK: &[Sweep] = &[
    ACTIVATION,
    packed(&[16384], BF16),
    dense(GatedLinear, &[1, 128], LARGE, BF16, Cold),
    dense(GatedLinear, &[4096], LARGE, HALVES, Cold),
    dense(Mlp, &[1], SMALL, BF16, Cold),
    dense(Mlp, &[4096], LARGE, BF16, Cold),
    quantized(&[1], LARGE, BF16, &[Q8_0, F8E4m3]),
];

/// Beside the quick ones.
const CUDA_GOALS: &[Sweep] = &[
    dense(GatedLinear, &[16, 64, 512, 1024, 8192], LARGE, HALVES, Cold),
    dense(GatedLinear, &[1, 512], LARGE, F32, Cold),
    dense(Mlp, &[1, 16, 128], LARGE, BF16, Cold),
    dense(Mlp, &[1], SMALL, F32, Cold),
    quantized(&[1], SMALL, BF16, &[Q8_0, Q4_0, I8, F8E4m3, F8E4m3Blocks]),
    quantized(&[16], LARGE, BF16, &[Q8_0, Q4_0, I8, F8E4m3, F8E4m3Blocks]),
    quantized(&[1], LARGE, BF16, &[Q4_0, I8, F8E4m3Blocks]),
];

impl Sweep {
    fn cases(&self, device: DeviceKind) -> impl Iterator<Item = Case> {
        let weights: Vec<_> = match self.weights {
            [] => vec![None],
            some => some.iter().copied().map(Some).collect(),
        };
        let (heat, arrangement, [hidden, intermediate]) = (self.heat, self.arrangement, self.shape);
        let shapes = self.m.iter().flat_map(|&m| self.dtypes.iter().map(move |&dtype| (m, dtype)));
        shapes.flat_map(move |(m, dtype)| {
            let shape = [m, hidden, intermediate];
            let case = inputs::case(device, self.op, shape, dtype);
            let case = Case { heat, arrangement, ..case };
            weights.clone().into_iter().map(move |weights| Case { weights, ..case.clone() })
        })
    }
}

impl Suite {
    /// The cases for a device; none of what the host spends, which is measured otherwise.
    pub(super) fn cases(self, device: DeviceKind) -> Vec<Case> {
        let sweeps: &[&[Sweep]] = match (self, device) {
            (Suite::Quick, DeviceKind::Cpu) => &[QUICK],
            (Suite::Goals, DeviceKind::Cpu) => &[GOALS],
            (Suite::Quick, DeviceKind::Cuda) => &[CUDA_QUICK],
            (Suite::Goals, DeviceKind::Cuda) => &[CUDA_QUICK, CUDA_GOALS],
            (Suite::Host, _) => &[],
        };
        sweeps.iter().copied().flatten().flat_map(|sweep| sweep.cases(device)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_of_a_suite_differ_and_have_whole_blocks() {
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            for suite in [Suite::Quick, Suite::Goals] {
                let cases = suite.cases(device);
                let keys: std::collections::BTreeSet<String> =
                    cases.iter().map(Case::key).collect();
                assert_eq!((keys.len(), cases.is_empty()), (cases.len(), false));
                let whole = |c: &Case| {
                    c.weights
                        .is_none_or(|w| (c.hidden * c.intermediate).is_multiple_of(w.elements()))
                };
                assert!(cases.iter().all(whole));
            }
        }
    }
}
