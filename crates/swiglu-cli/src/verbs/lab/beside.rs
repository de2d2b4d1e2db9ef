//! What is measured beside the cases of a run: the machine's ceilings, and hardware counters.

use std::ffi::OsString;

use anyhow::Context;
use swiglu::{CpuOptions, Device};
use swiglu_lab::profile::{Ceiling, Ceilings, Ncu, NcuError, count};
use swiglu_lab::record::Store;
use swiglu_lab::{Case, CaseOp, DeviceKind, Experiment, Finished, Heat, Status};

use crate::table;
use crate::terminal::Terminal;

/// The peer that computes as this project does.
pub(super) const OWN: &str = "swiglu";
/// The peers that this program is.
pub(super) const OUR_PEERS: [&str; 3] = [OWN, "read", "blocks"];
/// Measurements of bandwidth, of which the best counts; a tenth of a second each.
const BANDWIDTHS: usize = 5;

/// The device that an experiment runs on.
fn device_of(experiment: &Experiment) -> swiglu::Result<Device> {
    match experiment.device {
        DeviceKind::Cpu => Device::cpu_with(CpuOptions::default()),
        DeviceKind::Cuda => Device::cuda(0),
    }
}

/// The ceilings that bind the cases of an experiment on a device, by so many measurements of bandwidth.
fn ceilings(
    experiment: &Experiment,
    device: &Device,
    bandwidths: usize,
) -> anyhow::Result<Ceilings> {
    let ceiling = |name: String, per_second| Ceiling { name, per_second };
    if let Device::Cuda(cuda) = device {
        let measured = swiglu_cuda::ceilings::measure(cuda)?;
        let gemm = |dtype| Some(ceiling(format!("{dtype} GEMM"), measured.gemm(dtype)?));
        let compute = swiglu::DType::ALL.into_iter().filter_map(gemm).collect();
        let memory = Some(ceiling("copy".into(), measured.copy));
        return Ok(Ceilings { memory, compute, ..Ceilings::default() });
    }
    let mut measured = crate::ceilings::measure(device)?;
    // A shared host gives now more, now less: the most that was seen is the limit.
    for _ in 1..bandwidths {
        measured.bandwidth = measured.bandwidth.best(crate::ceilings::bandwidth(device)?);
    }
    // Weights are read; an activation reads two matrices and writes a third.
    let memory = match experiment.cases.iter().any(|c| c.op.has_weights()) {
        true => ceiling("read".into(), measured.bandwidth.read),
        false if experiment.cases.iter().any(|c| c.op == CaseOp::Copy) => {
            ceiling("copy".into(), measured.bandwidth.copy_nt)
        }
        false => ceiling("two reads and a write".into(), measured.bandwidth.triad_nt),
    };
    // Multiply-adds in f32 serve every type that has no dot product of its own.
    let mut compute = vec![ceiling("multiply-adds in f32".into(), measured.fma_f32)];
    compute.extend(measured.dot_bf16.map(|rate| ceiling("bf16 dot products".into(), rate)));
    Ok(Ceilings { memory: Some(memory), compute, ..Ceilings::default() })
}

/// The ceilings that bind one case, with those that depend on its size and its activation.
pub(crate) fn ceilings_of_case(
    experiment: &Experiment,
    case: &Case,
    device: &Device,
) -> anyhow::Result<Ceilings> {
    let mut ceilings = ceilings(experiment, device, BANDWIDTHS)?;
    if case.heat == Heat::Hot {
        let bytes = case.compulsory_bytes();
        ceilings.cache = crate::ceilings::cached(device, bytes as usize, !case.op.has_weights())?
            .map(|rate| {
                let what = if case.op.has_weights() { "reads" } else { "two reads and a write" };
                let name = format!("{what} of {} MB in the caches", table::number(bytes / 1e6));
                Ceiling { name, per_second: rate }
            });
    }
    if case.op == CaseOp::Activation {
        let Case { activation, numerics, dtype, .. } = case;
        ceilings.activation = crate::ceilings::activation(device, activation, *numerics, *dtype)?
            .map(|rate| {
                let name = format!("{activation} {numerics} in {dtype} on data in a near cache");
                Ceiling { name, per_second: rate }
            });
    }
    Ok(ceilings)
}

/// Adds what is missing in the record of a run that has ended, which still holds the machine.
pub(super) fn complete(
    experiment: &Experiment,
    finished: &mut Finished,
    store: &Store,
    own: Option<&[OsString]>,
    terminal: &Terminal,
) -> anyhow::Result<()> {
    let Finished { path, record, .. } = finished;
    let mut changed = false;
    let measured = record.results.iter().any(|r| r.status == Status::Ok);
    if record.ceilings.is_none() && measured {
        // A device that peers can use and this program cannot has no ceilings; the run stands.
        // A quick look is none at the ceilings either.
        let bandwidths = if record.protocol.quick { 1 } else { BANDWIDTHS };
        record.ceilings =
            device_of(experiment).ok().and_then(|d| ceilings(experiment, &d, bandwidths).ok());
        changed = record.ceilings.is_some();
    }
    if let Some(own) = own {
        let known = |case: &str, id: &str| {
            record.profiling.iter().any(|p| p.case_key == case && p.profile == id)
        };
        let pairs: Vec<_> = record
            .results
            .iter()
            .filter(|r| r.status == Status::Ok && !known(&r.case_key, &r.profile))
            .filter_map(|r| {
                let profile = experiment.profile(&r.profile).filter(|p| p.peer == OWN)?;
                Some((record.case_of(r)?, profile))
            })
            .collect();
        let ncu = counters_of(experiment.device);
        let bar = terminal.bar(pairs.len() as u64);
        let mut counted = Vec::new();
        for (case, profile) in pairs {
            bar.set_message(format!("counting {} of {}", profile.id, case.key()));
            counted.push(count(&ncu, own, case, profile, record.protocol.seed));
            bar.inc(1);
        }
        bar.finish_and_clear();
        changed |= !counted.is_empty();
        record.profiling.extend(counted);
    }
    if changed {
        store.write(record, path).context("adding ceilings and counters to the record")?;
    }
    Ok(())
}

/// The profiler, if the device has one.
pub(crate) fn counters_of(device: DeviceKind) -> Result<Ncu, NcuError> {
    match device {
        DeviceKind::Cuda => Ncu::find(),
        DeviceKind::Cpu => Err(NcuError::NoDevice),
    }
}
