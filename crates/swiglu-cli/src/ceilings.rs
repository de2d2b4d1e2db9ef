//! What this machine can do at most, measured beside the work by the device that does it.

use swiglu::{Device, Problem};
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
