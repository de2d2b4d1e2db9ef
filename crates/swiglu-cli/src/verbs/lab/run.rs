//! `swiglu lab run`: measure an experiment, with a record that grows case by case.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

use anyhow::{Context, Result};
use serde_json::json;
use swiglu::{CpuOptions, Device};
use swiglu_lab::executor::ExecutorKind;
use swiglu_lab::profile::{Ceilings, Ncu, NcuError, count};
use swiglu_lab::record::{Executed, Opened, QUICK, Record};
use swiglu_lab::{
    Case, CaseOp, DeviceKind, Experiment, Finished, ProfileDef, ResultEntry, Role, RunOptions,
    Status, Verdict as LabVerdict,
};

use super::on;
use super::places::OWN;
use super::request::{Asked, RunArgs};
use super::session::{Session, expect_optimised};
use crate::ceilings;
use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict, say, stop_on_signals};

pub(super) fn run(args: &RunArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let asked = Asked::of(args)?;
    let experiment = &asked.experiment;
    let (run_id, begun) = asked.named()?;
    let options = args.options(&run_id);
    options.validate(experiment)?;
    if !args.quick {
        let begun = begun.iter().flat_map(|opened| &opened.record.results);
        // What a case had is measured again beside what is missing.
        let had: BTreeSet<&str> = begun.map(|entry| entry.profile.as_str()).collect();
        let measured = |p: &&ProfileDef| {
            let asked = args.profiles.as_ref().is_none_or(|ids| ids.contains(&p.id));
            asked || had.contains(p.id.as_str())
        };
        expect_optimised(experiment.profiles.iter().filter(measured))?;
    }
    let opened = match asked.spec.kind {
        ExecutorKind::Local => here(&asked, options, terminal)?,
        _ => on::run(&asked, &run_id, terminal)?,
    };
    let Some(opened) = opened else { return Ok(Verdict::Unfinished) };
    let record = &opened.record;
    let verdict = LabVerdict::of(experiment, std::slice::from_ref(&opened));
    // What this process is has no name.
    let here = Executed { resumed: begun.is_some().into(), ..Executed::default() };
    let executor = record.executor.as_ref().unwrap_or(&here);
    let document = json!({ "record": record, "verdict": verdict, "executor": executor });
    terminal.print(&document, |_, terminal| show(experiment, &opened, &verdict, terminal))?;
    let ours = |entry: &&ResultEntry| {
        experiment.profile(&entry.profile).is_some_and(|p| p.role == Role::Ours)
    };
    let wrong =
        |entry: &ResultEntry| matches!(entry.status, Status::FailedVerification | Status::Failed);
    let wrong = record.results.iter().filter(ours).any(wrong);
    let measured = record.results.iter().any(|entry| entry.status == Status::Ok);
    Ok(Verdict::from_passed(!wrong && measured))
}

/// Runs in this process; none if it was asked to stop before the end.
fn here(asked: &Asked<'_>, mut options: RunOptions, terminal: &Terminal) -> Result<Option<Opened>> {
    let Asked { args, lab, experiment, machine, store, .. } = asked;
    options.executor = Executed::detect(lab)?;
    stop_on_signals(&options.stop, "this case, which is kept")?;
    let name = format!("{}-{}", experiment.id, options.run_id);
    let mut session = Session::begin(&name, experiment, store, machine, lab, &args.peers)?;
    let mut finished = session.shown(&options, terminal)?;
    if finished.stopped {
        say(format!("stopped: --run-id {} --resume goes on", options.run_id));
        return Ok(None);
    }
    complete(asked, &mut finished, &session.commands.own, terminal)?;
    Ok(Some(Opened { path: finished.path, record: finished.record }))
}

fn show(
    experiment: &Experiment,
    Opened { path, record }: &Opened,
    verdict: &LabVerdict,
    terminal: &mut Terminal,
) -> Result<()> {
    let number = |x: Option<f64>| x.map(table::number).unwrap_or_default();
    let ratio = |entry: &ResultEntry| record.ratio_to_baseline(experiment, entry);
    let error = |entry: &ResultEntry| entry.error.and_then(|e| e.relative_frobenius);
    Table::of(&record.results)
        .group("case", |entry| &entry.case_key)
        .text("profile", |entry| &entry.profile)
        .text("status", |entry| match entry.status {
            Status::Ok => table::good(entry.status),
            Status::Failed | Status::FailedVerification => table::bad(entry.status),
            Status::NotAvailable | Status::Unsupported => entry.status.into(),
        })
        .number("median", |entry| entry.summary.map(|s| table::time(s.median)).unwrap_or_default())
        .number("GB/s", |entry| number(entry.gbps()))
        .number("GFLOP/s", |entry| number(entry.gflops()))
        .number("of baseline", |entry| ratio(entry).map(table::interval).unwrap_or_default())
        .number("error", |entry| error(entry).map(table::error).unwrap_or_default())
        .print(terminal)?;
    for ((profile, reason), cases) in reasons(record) {
        let more =
            if cases.len() > 1 { format!(" and {} more", cases.len() - 1) } else { String::new() };
        let first = cases.first().copied().unwrap_or_default();
        writeln!(terminal, "{profile} ({first}{more}): {reason}")?;
    }
    if record.protocol.quick {
        writeln!(terminal, "{QUICK}; no intervals, which takes more than one preparation")?;
    } else if !record.complete {
        writeln!(terminal, "not every case of every profile: no evidence for a verdict yet")?;
    } else {
        writeln!(terminal, "{}: {}", verdict.state, verdict.headline)?;
        for reason in verdict.machines.iter().flat_map(|m| &m.reasons) {
            writeln!(terminal, "  {reason}")?;
        }
    }
    if let Some(executed) = &record.executor {
        let job = executed.job_id.as_deref().map(|id| format!("job {id} on ")).unwrap_or_default();
        let times = executed.resumed;
        let resumed = if times > 0 { format!(", went on {times} times") } else { String::new() };
        writeln!(terminal, "{}: {job}{}{resumed}", executed.place, executed.nodes.join(", "))?;
    }
    writeln!(terminal, "record: {}", path.display())
}

fn reasons(record: &Record) -> BTreeMap<(&str, &str), Vec<&str>> {
    let mut reasons: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for entry in &record.results {
        if let Some(reason) = &entry.reason {
            reasons.entry((&entry.profile, reason)).or_default().push(&entry.case_key);
        }
    }
    reasons
}

/// The ceilings that bind the cases; none of a device that peers can use and this program cannot.
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

/// Adds what is missing in the record of a run that has ended, which still holds the machine. `own` starts this program.
fn complete(
    Asked { args, experiment, store, .. }: &Asked<'_>,
    Finished { path, record, .. }: &mut Finished,
    own: &[OsString],
    terminal: &Terminal,
) -> Result<()> {
    let had = (record.ceilings.is_some(), record.profiling.len());
    let is_measured = |r: &&ResultEntry| r.status == Status::Ok;
    if !had.0 && record.results.iter().any(|r| is_measured(&r)) && experiment.asks_for_rates() {
        record.ceilings = ceilings_of(experiment, record.protocol.quick);
    }
    if args.with_profiling {
        let known = |r: &ResultEntry| {
            record.profiling.iter().any(|p| p.case_key == r.case_key && p.profile == r.profile)
        };
        let pair = |r: &ResultEntry| {
            let profile = experiment.profile(&r.profile).filter(|p| p.peer == OWN && !known(r))?;
            Some((record.case_of(r)?, profile))
        };
        let pairs: Vec<_> = record.results.iter().filter(is_measured).filter_map(pair).collect();
        let ncu = counters_of(experiment.device);
        // The record says it of each case.
        if let (Err(why), false) = (&ncu, pairs.is_empty()) {
            say(format!("--with-profiling counts nothing: {why}"));
        }
        let message = |(case, profile): &(&Case, &ProfileDef)| {
            format!("counting {} of {}", profile.id, case.key())
        };
        let counted = terminal.each(pairs.into_iter(), message, |(case, profile)| {
            Ok(count(&ncu, own, case, profile, record.protocol.seed))
        })?;
        record.profiling.extend(counted);
    }
    if had != (record.ceilings.is_some(), record.profiling.len()) {
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
