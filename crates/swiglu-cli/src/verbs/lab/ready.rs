//! `swiglu lab ready`: what a run would need, and whether it is there.

use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use comfy_table::{Cell, Color};
use serde::Serialize;
use swiglu_cuda::DeviceFacts;
use swiglu_lab::executor::{self, ExecutorSpec};
use swiglu_lab::record::{Locks, Machine};
use swiglu_lab::{Check, DeviceKind, Experiment, Readiness};

use super::places::{Logs, PeerArgs, PlaceArgs};
use crate::table::{self, row};
use crate::terminal::{Terminal, Verdict};

#[derive(Debug, Args)]
pub(super) struct ReadyArgs {
    /// The experiment's id [default: all of them]
    experiment: Option<String>,
    /// What a place elsewhere has of what jobs need, see `lab run --on`
    #[arg(long, value_name = "PLACE", conflicts_with = "experiment")]
    on: Option<String>,
    #[command(flatten)]
    places: PlaceArgs,
    #[command(flatten)]
    peers: PeerArgs,
}

#[derive(Serialize)]
struct Document {
    ready: bool,
    experiments: Vec<Row>,
}

/// What one experiment needs.
#[derive(Serialize)]
struct Row {
    id: String,
    ready: bool,
    checks: Vec<Check>,
}

/// What a place has.
#[derive(Serialize)]
struct Place {
    ready: bool,
    checks: Vec<Check>,
}

pub(super) fn ready(args: &ReadyArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    if let Some(place) = &args.on {
        let spec = ExecutorSpec::find(place, &args.places.lab()?)?;
        let checks = executor::readiness(&spec);
        let ready = checks.iter().all(|check| check.ok);
        match terminal.json() {
            true => terminal.print_json(&Place { ready, checks })?,
            false => table_of(&checks.iter().collect::<Vec<_>>(), terminal)?,
        }
        return Ok(Verdict::from_passed(ready));
    }
    let dir = args.places.experiments()?;
    let experiments = match &args.experiment {
        Some(id) => vec![Experiment::find(&dir, id)?],
        None => Experiment::read_dir(&dir)?.into_iter().collect::<Result<_, _>>()?,
    };
    let checked = checks(experiments.iter(), &args.places, &args.peers, terminal)?;
    let row = |(id, checks): (String, Vec<Check>)| Row {
        id,
        ready: checks.iter().all(|check| check.ok),
        checks,
    };
    let rows: Vec<Row> = checked.into_iter().map(row).collect();
    let document = Document { ready: rows.iter().all(|row| row.ready), experiments: rows };
    match terminal.json() {
        true => terminal.print_json(&document)?,
        false => show(&document, terminal)?,
    }
    Ok(Verdict::from_passed(document.ready))
}

/// What each experiment needs here, by its id.
pub(super) fn checks<'a>(
    experiments: impl ExactSizeIterator<Item = &'a Experiment>,
    places: &PlaceArgs,
    peers: &PeerArgs,
    terminal: &Terminal,
) -> anyhow::Result<BTreeMap<String, Vec<Check>>> {
    let logs = Logs::of("ready")?;
    let commands = peers.commands(&places.lab()?, logs.dir())?;
    let store = places.store()?;
    let mut readiness = Readiness::new(&commands, &store, &Locks::of_user()?)?;
    let bar = terminal.bar(experiments.len() as u64);
    let mut checked = BTreeMap::new();
    for experiment in experiments {
        bar.set_message(experiment.id.clone());
        let checks = readiness.of(experiment, &device(experiment.device)?);
        checked.insert(experiment.id.clone(), checks);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(checked)
}

/// The device that experiments of a kind measure.
fn device(kind: DeviceKind) -> anyhow::Result<Check> {
    let what = format!("device {kind}");
    Ok(match kind {
        DeviceKind::Cpu => {
            let machine = Machine::detect(kind, None)?;
            Check::found(what, format!("{}, {} threads", machine.cpu, machine.threads))
        }
        DeviceKind::Cuda => match DeviceFacts::of(0) {
            Ok(facts) => {
                let (major, minor) = facts.driver_version;
                Check::found(what, format!("{}, CUDA driver {major}.{minor}", facts.name))
            }
            Err(error) => {
                let advice = "run on a machine with one: `swiglu lab run ID --on PLACE`";
                Check::missing(what, advice).instead(error.to_string())
            }
        },
    })
}

/// Each check once, then which experiments have all that they need.
fn show(document: &Document, terminal: &mut Terminal) -> anyhow::Result<()> {
    let mut checks: BTreeMap<&str, &Check> = BTreeMap::new();
    for row in &document.experiments {
        for check in &row.checks {
            checks.entry(&check.what).or_insert(check);
        }
    }
    table_of(&checks.into_values().collect::<Vec<_>>(), terminal)?;
    let ready: Vec<&str> =
        document.experiments.iter().filter(|r| r.ready).map(|r| r.id.as_str()).collect();
    let count = document.experiments.len();
    writeln!(terminal, "\n{} of {count} experiments can run here", ready.len())?;
    if !ready.is_empty() && count > 1 {
        writeln!(terminal, "  {}", ready.join(", "))?;
    }
    Ok(())
}

fn table_of(checks: &[&Check], terminal: &mut Terminal) -> anyhow::Result<()> {
    let cells = |check: &&Check| {
        let state = match check.ok {
            true => Cell::new("yes").fg(Color::Green),
            false => Cell::new("no").fg(Color::Red),
        };
        let found = check.found.as_deref().unwrap_or_default();
        let text = match &check.advice {
            Some(advice) if !found.is_empty() => format!("{found} → {advice}"),
            Some(advice) => advice.clone(),
            None => found.to_owned(),
        };
        row![&check.what, state, text]
    };
    let columns = ["needed", "there", "found, or what to do"];
    Ok(table::print(terminal, &columns, checks.iter().map(cells))?)
}
