//! `swiglu lab run`: measure an experiment, with a record that grows case by case.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use anyhow::{Context, bail};
use clap::Args;
use comfy_table::{Attribute, Cell, Color};
use indicatif::ProgressBar;
use swiglu_lab::record::{Interval, Machine, Opened, QUICK, Record};
use swiglu_lab::{
    Code, Event, Experiment, Finished, Laboratory, ProfileDef, ResultEntry, Role, RunOptions,
    Status, Verdict as LabVerdict,
};

use super::beside;
use super::places::{self, Logs, MachineArgs, PeerArgs, PlaceArgs};
use crate::table::{self, row};
use crate::terminal::{Terminal, Verdict};

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The experiment's id
    experiment: String,
    /// Names the run; the same again goes on with it
    #[arg(long, value_name = "ID")]
    run_id: String,
    /// Only these profiles, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    profiles: Option<Vec<String>>,
    /// Only cases that have all these words, for example "m=1 bf16"
    #[arg(long, value_name = "WORDS")]
    cases: Option<String>,
    /// Few and short turns: a look that is no evidence, and never counts for a verdict
    #[arg(long)]
    quick: bool,
    /// How often every profile is prepared anew; fewer take less time and make intervals wider
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=5), conflicts_with = "quick")]
    preparations: Option<u64>,
    /// Count with Nsight Compute what the kernels of this program do, once per case, after the run
    #[arg(long)]
    with_profiling: bool,
    #[command(flatten)]
    places: PlaceArgs,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    peers: PeerArgs,
}

pub(super) fn run(args: &RunArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let lab = args.places.lab()?;
    let experiment = Experiment::find(&args.places.experiments()?, &args.experiment)?;
    let machine = Machine::detect(experiment.device, args.machine.machine.as_deref())?;
    let store = args.places.store()?;
    let mut options = RunOptions {
        profiles: args.profiles.clone(),
        cases: args.cases.clone(),
        ..RunOptions::new(&args.run_id, args.quick)
    };
    if let Some(preparations) = args.preparations {
        options.protocol.preparations = preparations as usize;
    }
    options.expect_name()?;
    let run_name = format!("{}-{}", experiment.id, args.run_id);
    let code = Code::detect(&lab);
    if !args.quick {
        let begun = store.find(&machine.name, &experiment.id, &args.run_id)?;
        let begun = begun.iter().flat_map(|opened| &opened.record.results);
        // What a case had is measured again beside what is missing.
        let had: BTreeSet<&str> = begun.map(|entry| entry.profile.as_str()).collect();
        let measured = |p: &&ProfileDef| {
            let asked = args.profiles.as_ref().is_none_or(|ids| ids.contains(&p.id));
            asked || had.contains(p.id.as_str())
        };
        expect_optimised(experiment.profiles.iter().filter(measured))?;
    }
    let lock = places::lock(&store, &experiment, &machine, &run_name)?;
    let logs = Logs::of(&run_name)?;
    let commands = args.peers.commands(&lab, logs.dir())?;
    let laboratory = Laboratory {
        store: &store,
        lock: &lock,
        commands: &commands,
        machine: &machine,
        code: &code,
    };
    let finished = watched(&laboratory, &experiment, &options, terminal);
    logs.close(&finished);
    let mut finished = finished?;
    let own = args.with_profiling.then_some(commands.own.as_slice());
    beside::complete(&experiment, &mut finished, &store, own, terminal)?;
    show(&experiment, &finished, terminal)?;
    let ours = |entry: &&ResultEntry| {
        experiment.profile(&entry.profile).is_some_and(|p| p.role == Role::Ours)
    };
    let wrong = finished
        .record
        .results
        .iter()
        .filter(ours)
        .any(|entry| matches!(entry.status, Status::FailedVerification | Status::Failed));
    let measured = finished.record.results.iter().any(|entry| entry.status == Status::Ok);
    Ok(Verdict::from_passed(!wrong && measured))
}

/// A program that is not optimised measures its compiler's settings, where it measures itself.
pub(super) fn expect_optimised<'a>(
    mut measured: impl Iterator<Item = &'a ProfileDef>,
) -> anyhow::Result<()> {
    if cfg!(debug_assertions) && measured.any(|p| beside::OUR_PEERS.contains(&p.peer.as_str())) {
        bail!(
            "this program is not optimised, so its times are no evidence: build it with --release, \
             or take a quick look with --quick"
        );
    }
    Ok(())
}

/// Runs with a progress bar; what goes wrong with a peer is told at once.
pub(super) fn watched(
    laboratory: &Laboratory<'_>,
    experiment: &Experiment,
    options: &RunOptions,
    terminal: &Terminal,
) -> anyhow::Result<Finished> {
    let mut bar = ProgressBar::hidden();
    let mut case = String::new();
    let mut told = BTreeSet::new();
    let finished = laboratory.run(experiment, options, &mut |event| match event {
        Event::Started { cases, kept, path } => {
            bar = terminal.bar(cases as u64);
            let kept = if kept > 0 { format!(", {kept} cases kept") } else { String::new() };
            tell(&bar, &format!("{cases} cases to measure{kept}: {}", path.display()));
        }
        Event::Case { case: next } => {
            case = next.key();
            bar.set_message(case.clone());
        }
        Event::Profile { id, what } => bar.set_message(format!("{case}: {what} {id}")),
        // What is missing is missing in every case: told once.
        Event::Trouble { profile, reason }
            if told.insert((profile.to_owned(), reason.to_owned())) =>
        {
            tell(&bar, &format!("{case}: {profile}: {reason}"));
        }
        Event::Done { .. } => bar.inc(1),
        _ => {}
    });
    bar.finish_and_clear();
    finished.with_context(|| format!("experiment {}", experiment.id))
}

/// A line on standard error that does not disturb the bar.
fn tell(bar: &ProgressBar, line: &str) {
    bar.suspend(|| {
        // Without a standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "{line}");
    });
}

fn show(
    experiment: &Experiment,
    finished: &Finished,
    terminal: &mut Terminal,
) -> anyhow::Result<()> {
    let Finished { path, record } = finished;
    if terminal.json() {
        return terminal.print_json(record);
    }
    let columns =
        ["case", "profile", "status", ">median", ">GB/s", ">GFLOP/s", ">of baseline", ">error"];
    let mut last = "";
    let rows = record.results.iter().map(|entry| {
        let case = if entry.case_key == last { "" } else { entry.case_key.as_str() };
        last = &entry.case_key;
        cells(case, entry, record.ratio_to_baseline(experiment, entry))
    });
    table::print(terminal, &columns, rows)?;
    for ((profile, reason), cases) in reasons(record) {
        let more =
            if cases.len() > 1 { format!(" and {} more", cases.len() - 1) } else { String::new() };
        let first = cases.first().copied().unwrap_or_default();
        writeln!(terminal, "{profile} ({first}{more}): {reason}")?;
    }
    if record.protocol.quick {
        writeln!(terminal, "{QUICK}")?;
    } else if !record.complete {
        writeln!(terminal, "not every case of every profile: no evidence for a verdict yet")?;
    } else {
        let opened = [Opened { path: path.clone(), record: record.clone() }];
        let verdict = LabVerdict::of(experiment, &opened);
        writeln!(terminal, "{}: {}", verdict.state, verdict.headline)?;
        for reason in verdict.machines.iter().flat_map(|m| &m.reasons) {
            writeln!(terminal, "  {reason}")?;
        }
    }
    writeln!(terminal, "record: {}", path.display())?;
    Ok(())
}

/// Why results are missing or wrong, each with its cases.
fn reasons(record: &Record) -> BTreeMap<(&str, &str), Vec<&str>> {
    let mut reasons: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for entry in &record.results {
        if let Some(reason) = &entry.reason {
            reasons.entry((&entry.profile, reason)).or_default().push(&entry.case_key);
        }
    }
    reasons
}

fn status_cell(status: Status) -> Cell {
    let cell = Cell::new(status);
    match status {
        Status::Ok => cell.fg(Color::Green),
        Status::Failed | Status::FailedVerification => {
            cell.fg(Color::Red).add_attribute(Attribute::Bold)
        }
        Status::NotAvailable | Status::Unsupported => cell,
    }
}

fn cells(case: &str, entry: &ResultEntry, ratio: Option<Interval>) -> Vec<Cell> {
    let number = |x: Option<f64>| x.map(table::number).unwrap_or_default();
    let ratio = ratio.map(|r| {
        let [low, high] = r.ci95;
        format!("{} [{low:.2}, {high:.2}]", table::ratio(r.value))
    });
    let error = entry.error.and_then(|e| e.relative_frobenius).map(table::error);
    row![
        case,
        &entry.profile,
        status_cell(entry.status),
        entry.summary.map(|s| table::time(s.median)).unwrap_or_default(),
        number(entry.gbps()),
        number(entry.gflops()),
        ratio.unwrap_or_default(),
        error.unwrap_or_default(),
    ]
}
