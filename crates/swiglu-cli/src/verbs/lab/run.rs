//! `swiglu lab run`: measure an experiment, with a record that grows case by case.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use comfy_table::{Attribute, Cell, Color};
use indicatif::ProgressBar;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use swiglu_lab::executor::{ExecutorKind, ExecutorSpec, Jobs};
use swiglu_lab::record::{Executed, Interval, Machine, Opened, QUICK, Record, Store};
use swiglu_lab::{
    Code, Event, Experiment, Finished, Laboratory, ProfileDef, ResultEntry, Role, RunOptions,
    Status, Verdict as LabVerdict,
};

use super::beside;
use super::on::{self, Named};
use super::places::{self, Logs, MachineArgs, PeerArgs, PlaceArgs};
use crate::table::{self, row};
use crate::terminal::{Terminal, Verdict};

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The experiment's id
    experiment: String,
    /// Names the run; the same again goes on with it [default: date, commit and place]
    #[arg(long, value_name = "ID")]
    pub(super) run_id: Option<String>,
    /// Go on with the newest incomplete run of this experiment and place, or with that of --run-id
    #[arg(long)]
    pub(super) resume: bool,
    /// Where it happens: local, ssh:HOST, slurm, slurm:PARTITION, 'command:… {script} …', or a name in
    /// executors.toml of the lab
    #[arg(long, value_name = "PLACE", default_value = "local")]
    on: String,
    /// Only these profiles, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub(super) profiles: Option<Vec<String>>,
    /// Only cases that have all these words, for example "m=1 bf16"
    #[arg(long, value_name = "WORDS")]
    pub(super) cases: Option<String>,
    /// Few and short turns: a look that is no evidence, and never counts for a verdict
    #[arg(long)]
    pub(super) quick: bool,
    /// How often every profile is prepared anew; fewer take less time and make intervals wider
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=5), conflicts_with = "quick")]
    pub(super) preparations: Option<u64>,
    /// Prepare profiles more often until noise no longer forbids an answer, for at most so many minutes
    /// after the run [default: 30]
    #[arg(long, value_name = "MINUTES", num_args = 0..=1, require_equals = true,
        default_missing_value = "30", value_parser = clap::value_parser!(u64).range(1..=600),
        conflicts_with_all = ["quick", "profiles", "cases"])]
    pub(super) until_decided: Option<u64>,
    /// Count with Nsight Compute what the kernels of this program do, once per case, after the run
    #[arg(long)]
    pub(super) with_profiling: bool,
    #[command(flatten)]
    pub(super) places: PlaceArgs,
    #[command(flatten)]
    pub(super) machine: MachineArgs,
    #[command(flatten)]
    pub(super) peers: PeerArgs,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Document<'a> {
    record: &'a Record,
    verdict: LabVerdict,
    executor: Where<'a>,
}

/// Where a run happened; what this process is has no name there.
#[derive(Debug, Serialize)]
struct Where<'a> {
    kind: ExecutorKind,
    job_id: Option<&'a str>,
    partition: Option<&'a str>,
    nodes: &'a [String],
    gres: Option<&'a str>,
    resumed: u32,
}

impl<'a> Where<'a> {
    fn of(record: &'a Record, resumed: bool) -> Self {
        match &record.executor {
            Some(executed) => Self {
                kind: executed.kind,
                job_id: executed.job_id.as_deref(),
                partition: executed.partition.as_deref(),
                nodes: &executed.nodes,
                gres: executed.gres.as_deref(),
                resumed: executed.resumed,
            },
            None => Self {
                kind: ExecutorKind::Local,
                job_id: None,
                partition: None,
                nodes: &[],
                gres: None,
                resumed: resumed.into(),
            },
        }
    }
}

pub(super) fn run(args: &RunArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let lab = args.places.lab()?;
    let experiment = Experiment::find(&args.places.experiments()?, &args.experiment)?;
    let machine = Machine::detect(experiment.device, args.machine.machine.as_deref())?;
    let store = args.places.store()?;
    let (jobs, spec) = (Jobs::new(&lab), ExecutorSpec::find(&args.on, &lab)?);
    let named = Named::find(args, &experiment, &store, &jobs, &spec, &machine.name)?;
    let options = options(args, &named)?;
    options.expect_selection(&experiment)?;
    if !args.quick {
        let begun = named.begun.iter().flat_map(|opened| &opened.record.results);
        // What a case had is measured again beside what is missing.
        let had: BTreeSet<&str> = begun.map(|entry| entry.profile.as_str()).collect();
        let measured = |p: &&ProfileDef| {
            let asked = args.profiles.as_ref().is_none_or(|ids| ids.contains(&p.id));
            asked || had.contains(p.id.as_str())
        };
        expect_optimised(experiment.profiles.iter().filter(measured))?;
    }
    let opened = match spec.kind {
        ExecutorKind::Local => here(args, &experiment, &store, &machine, options, terminal)?,
        _ => on::run(args, &experiment, &store, &jobs, &spec, &named, terminal)?,
    };
    let Some(opened) = opened else { return Ok(Verdict::Unfinished) };
    show(&experiment, &opened, named.begun.is_some(), terminal)?;
    let Opened { record, .. } = opened;
    let ours = |entry: &&ResultEntry| {
        experiment.profile(&entry.profile).is_some_and(|p| p.role == Role::Ours)
    };
    let wrong = record
        .results
        .iter()
        .filter(ours)
        .any(|entry| matches!(entry.status, Status::FailedVerification | Status::Failed));
    let measured = record.results.iter().any(|entry| entry.status == Status::Ok);
    Ok(Verdict::from_passed(!wrong && measured))
}

fn options(args: &RunArgs, named: &Named) -> anyhow::Result<RunOptions> {
    let mut options = RunOptions {
        profiles: args.profiles.clone(),
        cases: args.cases.clone(),
        ..RunOptions::new(&named.run_id, args.quick)
    };
    if let Some(preparations) = args.preparations {
        options.protocol.preparations = preparations as usize;
    }
    options.until_decided = args.until_decided.map(|minutes| Duration::from_secs(60 * minutes));
    options.expect_name()?;
    Ok(options)
}

/// Runs in this process; none if it was asked to stop before the end.
fn here(
    args: &RunArgs,
    experiment: &Experiment,
    store: &Store,
    machine: &Machine,
    mut options: RunOptions,
    terminal: &Terminal,
) -> anyhow::Result<Option<Opened>> {
    let lab = args.places.lab()?;
    options.executor = Executed::detect(&lab)?;
    // The second time it ends at once.
    let stop = &options.stop.0;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register_conditional_default(signal, stop.clone())
            .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
            .context("listening to SIGTERM and Ctrl-C")?;
    }
    let run_name = format!("{}-{}", experiment.id, options.run_id);
    let code = Code::detect(&lab);
    let lock = places::lock(store, experiment, machine, &run_name)?;
    let logs = Logs::of(&run_name)?;
    let commands = args.peers.commands(&lab, logs.dir())?;
    let laboratory = Laboratory { store, lock: &lock, commands: &commands, machine, code: &code };
    let finished = watched(&laboratory, experiment, &options, terminal);
    logs.close(&finished);
    let mut finished = finished?;
    if finished.stopped {
        let run = &options.run_id;
        // Without a standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "stopped: --run-id {run} --resume goes on");
        return Ok(None);
    }
    let own = args.with_profiling.then_some(commands.own.as_slice());
    beside::complete(experiment, &mut finished, store, own, terminal)?;
    Ok(Some(Opened { path: finished.path, record: finished.record }))
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
    let (mut begun, mut all) = (0, 0);
    let mut told = BTreeSet::new();
    let finished = laboratory.run(experiment, options, &mut |event| match event {
        Event::Started { cases, kept, path } => {
            bar = terminal.bar(cases as u64);
            all = cases;
            let kept = if kept > 0 { format!(", {kept} cases kept") } else { String::new() };
            tell(&bar, &format!("{cases} cases to measure{kept}: {}", path.display()));
        }
        Event::Case { case: next } => {
            case = next.key();
            bar.set_message(case.clone());
            begun += 1;
            // Whoever waits for a job sees the last line of its log.
            if options.executor.is_some() {
                tell(&bar, &format!("{begun}/{all} {case}"));
            }
        }
        Event::Profile { id, what } => bar.set_message(format!("{case}: {what} {id}")),
        // What is missing is missing in every case: told once.
        Event::Trouble { profile, reason }
            if told.insert((profile.to_owned(), reason.to_owned())) =>
        {
            tell(&bar, &format!("{case}: {profile}: {reason}"));
        }
        Event::Deciding { preparations } => {
            tell(&bar, &format!("not decided: every case is prepared {preparations} times more"));
        }
        Event::Done { .. } => bar.inc(1),
        _ => {}
    });
    bar.finish_and_clear();
    finished.with_context(|| format!("experiment {}", experiment.id))
}

/// A line on standard error that does not disturb the bar.
pub(super) fn tell(bar: &ProgressBar, line: &str) {
    bar.suspend(|| {
        // Without a standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "{line}");
    });
}

fn show(
    experiment: &Experiment,
    opened: &Opened,
    resumed: bool,
    terminal: &mut Terminal,
) -> anyhow::Result<()> {
    let Opened { path, record } = opened;
    let verdict = || LabVerdict::of(experiment, std::slice::from_ref(opened));
    if terminal.json() {
        let executor = Where::of(record, resumed);
        return terminal.print_json(&Document { record, verdict: verdict(), executor });
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
        let verdict = verdict();
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
