//! What is measured beside the cases of a run: the machine's ceilings, and hardware counters.

use std::ffi::OsString;

use anyhow::Context;
use swiglu::{CpuOptions, Device};
use swiglu_lab::profile::{Ceilings, Ncu, NcuError, count};
use swiglu_lab::record::Store;
use swiglu_lab::{CaseOp, DeviceKind, Experiment, Finished, Status};

use crate::ceilings;
use crate::terminal::Terminal;

/// The peer that computes as this project does.
pub(crate) const OWN: &str = "swiglu";
/// The peers that this program is.
pub(super) const OUR_PEERS: [&str; 2] = [OWN, "read"];

/// The ceilings that bind the cases of an experiment; none of a device that peers can use and this program
/// cannot: the run stands without.
fn ceilings_of(experiment: &Experiment, quick: bool) -> Option<Ceilings> {
    let device = match experiment.device {
        DeviceKind::Cpu => Device::cpu_with(CpuOptions::default()),
        DeviceKind::Cuda => Device::cuda(0),
    };
    let ops = || experiment.cases.iter().map(|case| case.op);
    let copies = || ops().find(|op| *op == CaseOp::Copy);
    let op = ops().find(|op| op.has_weights()).or_else(copies).unwrap_or(CaseOp::Activation);
    ceilings::of(&device.ok()?, op, quick).ok()
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
    if record.ceilings.is_none() && measured && experiment.asks_for_rates() {
        record.ceilings = ceilings_of(experiment, record.protocol.quick);
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
