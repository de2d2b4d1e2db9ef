//! The floor under a problem's time: it is bound by memory or by arithmetic.

use serde::Serialize;
use swiglu::{DType, Op, Problem};

use crate::ceilings::{Bandwidth, Ceilings};
use crate::timing::Heat;

/// What limits a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Bound {
    Memory,
    Compute,
}

impl Bound {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Bound::Memory => "memory",
            Bound::Compute => "compute",
        }
    }
}

/// The least time a problem can take, and why.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Floor {
    pub(crate) bound: Bound,
    pub(crate) us: f64,
}

/// What the kind of work that a problem is can run at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    /// Operations per second; infinite where they are not known.
    flops: f64,
    /// Bytes per second.
    bytes: f64,
}

impl Rates {
    pub(crate) fn of_cpu(problem: &Problem, ceilings: &Ceilings, bandwidth: Bandwidth) -> Self {
        let flops = match (problem.dtype, ceilings.dot_bf16) {
            (DType::Bf16, Some(dot)) if problem.op != Op::Activation => dot,
            _ => ceilings.fma_f32,
        };
        let bytes = match problem.op {
            Op::Activation => bandwidth.triad_nt,
            Op::GatedLinear | Op::Mlp => bandwidth.read,
        };
        Self { flops, bytes }
    }

    /// A copy moves bytes both ways, as the activation does. Weights are only read, which a device
    /// may do a little faster: a fraction above 1 means that.
    pub(crate) fn of_cuda(problem: &Problem, ceilings: &swiglu_cuda::ceilings::Ceilings) -> Self {
        let flops = match problem.op {
            // No activation has operations enough to count.
            Op::Activation => None,
            Op::GatedLinear | Op::Mlp => ceilings.gemm(problem.dtype),
        };
        Self { flops: flops.unwrap_or(f64::INFINITY), bytes: ceilings.copy }
    }
}

impl Floor {
    /// The larger of bytes ÷ bandwidth and operations ÷ rate. Data that is in the caches need
    /// not come from memory: there only arithmetic counts.
    pub(crate) fn of(problem: &Problem, heat: Heat, rates: Rates) -> Self {
        let compute = problem.flops() / rates.flops;
        let memory = match heat {
            Heat::Cold => problem.compulsory_bytes() / rates.bytes,
            Heat::Hot => 0.0,
        };
        match memory > compute {
            true => Self { bound: Bound::Memory, us: memory * 1e6 },
            false => Self { bound: Bound::Compute, us: compute * 1e6 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swiglu::{Activation, Numerics, WeightLayout};

    const CEILINGS: Ceilings = Ceilings {
        fma_f32: 288e9,
        dot_bf16: Some(575e9),
        bandwidth: Bandwidth { read: 50e9, copy_nt: 58e9, triad_nt: 60e9 },
    };

    fn floor(m: usize, dtype: DType, heat: Heat) -> Floor {
        let problem = Problem {
            op: Op::GatedLinear,
            m,
            hidden: 1000,
            intermediate: 1000,
            dtype,
            activation: Activation::SWIGLU,
            numerics: Numerics::default(),
            layout: WeightLayout::HF,
            bias: false,
            quantized: None,
        };
        Floor::of(&problem, heat, Rates::of_cpu(&problem, &CEILINGS, CEILINGS.bandwidth))
    }

    #[test]
    fn one_token_is_bound_by_memory_and_many_by_arithmetic() {
        let one = floor(1, DType::F32, Heat::Cold);
        assert_eq!(one.bound, Bound::Memory);
        assert!((one.us - 8_008_000.0 / 50e3).abs() < 1e-9);
        let many = floor(512, DType::F32, Heat::Cold);
        assert_eq!(many.bound, Bound::Compute);
        assert!((many.us - 4.0 * 512.0 * 1e6 / 288e3).abs() < 1e-6);
        assert!(floor(512, DType::Bf16, Heat::Cold).us < many.us / 1.9);
        assert_eq!(floor(1, DType::F32, Heat::Hot).bound, Bound::Compute);
    }
}
