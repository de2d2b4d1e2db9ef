//! What this machine can do at most, measured beside the work by the device that does it.

use swiglu::{Activation, DType, Device, Numerics, Problem, with_dtype};
pub(crate) use swiglu_cpu::ceilings::{Bandwidth, Ceilings};
use swiglu_cpu::{Cpu, ceilings};

use crate::roofline::Rates;

fn with_cpu<R>(
    device: &Device,
    measure: impl FnOnce(&Cpu) -> swiglu_core::Result<R>,
) -> swiglu_core::Result<R> {
    match device {
        Device::Cpu(cpu) => measure(cpu),
        other => Err(swiglu::CoreError::Unsupported {
            what: format!("measuring the limits of {other}"),
            why: "these are limits of the CPU".into(),
        }),
    }
}

/// All limits of the CPU; a fraction of a second.
pub(crate) fn measure(device: &Device) -> swiglu_core::Result<Ceilings> {
    with_cpu(device, ceilings::measure)
}

/// Its memory bandwidth, which a shared host changes from one second to the next.
pub(crate) fn bandwidth(device: &Device) -> swiglu_core::Result<Bandwidth> {
    with_cpu(device, ceilings::bandwidth)
}

/// Bytes per second of the caches that `bytes` fit in, read, or read twice and written; none of a
/// device whose caches are not measured.
pub(crate) fn cached(
    device: &Device,
    bytes: usize,
    writes: bool,
) -> swiglu_core::Result<Option<f64>> {
    of_cpu(device, |cpu| ceilings::cached(cpu, bytes, writes))
}

/// Results per second of an activation on data in a near cache; likewise.
pub(crate) fn activation(
    device: &Device,
    act: &Activation,
    numerics: Numerics,
    dtype: DType,
) -> swiglu::Result<Option<f64>> {
    with_dtype!(dtype, T => {
        Ok(of_cpu(device, |cpu| ceilings::activation::<T>(cpu, act, numerics))?)
    })
}

fn of_cpu(
    device: &Device,
    measure: impl FnOnce(&Cpu) -> swiglu_core::Result<f64>,
) -> swiglu_core::Result<Option<f64>> {
    match device {
        Device::Cpu(cpu) => measure(cpu).map(Some),
        _ => Ok(None),
    }
}

/// What bounds a problem on any device.
pub(crate) fn rates(device: &Device, problem: &Problem) -> swiglu::Result<Rates> {
    match device {
        Device::Cuda(cuda) => Ok(Rates::of_cuda(problem, &swiglu_cuda::ceilings::measure(cuda)?)),
        _ => {
            let limits = measure(device)?;
            Ok(Rates::of_cpu(problem, &limits, limits.bandwidth))
        }
    }
}
