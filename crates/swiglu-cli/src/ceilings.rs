//! What this machine can do at most, measured beside the work by the device that does it, and the floor
//! under a problem's time that follows.

use serde::Serialize;
use swiglu::{DType, Device, Problem, Result, with_dtype};
use swiglu_cpu::ceilings as cpu;
use swiglu_cuda::ceilings as cuda;
use swiglu_lab::profile::{Ceiling, Ceilings, Class, Work, classify};
use swiglu_lab::{Case, CaseOp, Heat};

use crate::table::number;

/// Measurements of bandwidth, of which the best counts.
const BANDWIDTHS: usize = 5;

/// Whether measuring for so long is a quick look.
pub(crate) fn is_quick(seconds: f64) -> bool {
    seconds < 0.1
}

/// The ceilings that bind an operation on a device. A shared host gives now more bandwidth, now less: the
/// best of some measurements is the limit, but for a quick look, each of a tenth of a second.
pub(crate) fn of(device: &Device, op: CaseOp, quick: bool) -> Result<Ceilings> {
    let ceiling = |name: &str, per_second| Ceiling { name: name.into(), per_second };
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            let measured = cuda::measure(cuda)?;
            let gemm = |dtype| Some(ceiling(&format!("{dtype} GEMM"), measured.gemm(dtype)?));
            let compute = DType::ALL.into_iter().filter_map(gemm).collect();
            let memory = Some(ceiling("copy", measured.copy));
            return Ok(Ceilings { memory, compute, ..Ceilings::default() });
        }
        _ => return Ok(Ceilings::default()),
    };
    // Weights are read; an activation reads two matrices and writes a third.
    let (name, traffic) = match op {
        op if op.has_weights() => ("read", cpu::Traffic::Read),
        CaseOp::Copy => ("copy", cpu::Traffic::Copy),
        _ => ("two reads and a write", cpu::Traffic::Triad),
    };
    let mut memory = cpu::bandwidth(cpu, traffic)?;
    for _ in 1..if quick { 1 } else { BANDWIDTHS } {
        memory = memory.max(cpu::bandwidth(cpu, traffic)?);
    }
    let memory = ceiling(name, memory);
    // Multiply-adds in f32 serve every type that has no dot product of its own.
    let measured = cpu::compute(cpu);
    let mut compute = vec![ceiling("multiply-adds in f32", measured.fma_f32)];
    compute.extend(measured.dot_bf16.map(|rate| ceiling("bf16 dot products", rate)));
    Ok(Ceilings { memory: Some(memory), compute, ..Ceilings::default() })
}

/// The same with what depends on the size of a case and on its activation, on the CPU.
pub(crate) fn with_case(ceilings: Ceilings, device: &Device, case: &Case) -> Result<Ceilings> {
    let Device::Cpu(cpu) = device else { return Ok(ceilings) };
    let (mut ceilings, weights) = (ceilings, case.op.has_weights());
    if case.heat == Heat::Hot {
        let bytes = case.compulsory_bytes();
        let what = if weights { "reads" } else { "two reads and a write" };
        let name = format!("{what} of {} MB in the caches", number(bytes / 1e6));
        let per_second = cpu::cached(cpu, bytes as usize, !weights)?;
        ceilings.cache = Some(Ceiling { name, per_second });
    }
    if case.op == CaseOp::Activation {
        let name = format!(
            "{} {} in {} on data in a near cache",
            case.activation, case.numerics, case.dtype
        );
        let per_second = with_dtype!(case.dtype, T => {
            cpu::activation::<T>(cpu, &case.activation, case.numerics).map_err(swiglu::Error::from)
        })?;
        ceilings.activation = Some(Ceiling { name, per_second });
    }
    Ok(ceilings)
}

/// The least time a problem can take, and why.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Floor {
    pub(crate) bound: Class,
    pub(crate) us: f64,
}

impl Floor {
    /// The larger of bytes ÷ bandwidth and operations ÷ rate; none where no limit is known.
    pub(crate) fn of(
        problem: &Problem,
        [bytes, flops]: [f64; 2],
        heat: Heat,
        ceilings: &Ceilings,
    ) -> Option<Self> {
        let rate = |ceiling: Option<&Ceiling>| ceiling.map(|c| c.per_second);
        let (traffic, arithmetic) = (ceilings.traffic(heat), ceilings.arithmetic(problem));
        let work = Work { us: 0.0, bytes, flops };
        let at = classify(work, rate(traffic), rate(arithmetic));
        let us = at.floor_us()?;
        let bound = match heat {
            _ if at.memory_us != Some(us) => Class::Compute,
            Heat::Cold => Class::Memory,
            Heat::Hot => Class::Cache,
        };
        Some(Self { bound, us })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swiglu_lab::DeviceKind;

    #[test]
    fn one_token_is_bound_by_memory_and_many_by_arithmetic() {
        let rate = |name: &str, per_second| Ceiling { name: name.into(), per_second };
        let ceilings = Ceilings {
            memory: Some(rate("read", 50e9)),
            compute: vec![rate("multiply-adds in f32", 288e9), rate("bf16 dot products", 575e9)],
            ..Ceilings::default()
        };
        let floor = |m, dtype, heat| {
            let shape = [m, 1000, 1000];
            let case = Case::new(DeviceKind::Cpu, CaseOp::GatedLinear, shape, dtype);
            let work = [case.compulsory_bytes(), case.flops()];
            Floor::of(&case.problem().unwrap(), work, heat, &ceilings).unwrap()
        };
        let one = floor(1, DType::F32, Heat::Cold);
        assert_eq!(one.bound, Class::Memory);
        assert!((one.us - 8_008_000.0 / 50e3).abs() < 1e-9);
        let many = floor(512, DType::F32, Heat::Cold);
        assert_eq!(many.bound, Class::Compute);
        assert!((many.us - 4.0 * 512.0 * 1e6 / 288e3).abs() < 1e-6);
        assert!(floor(512, DType::Bf16, Heat::Cold).us < many.us / 1.9);
        assert_eq!(floor(1, DType::F32, Heat::Hot).bound, Class::Compute);
    }
}
