//! `swiglu lab gate`: measure again and compare with a record.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use comfy_table::{Attribute, Cell, Color};
use swiglu_lab::gate::{Comparison, GateReport, Outcome};
use swiglu_lab::record::{Machine, Opened, Store};
use swiglu_lab::{Code, Experiment, Laboratory, RunOptions};

use super::places::{self, Logs, MachineArgs, PeerArgs, PlaceArgs};
use super::run;
use crate::table::{self, row};
use crate::terminal::{Terminal, Verdict};

#[derive(Debug, Args)]
pub(super) struct GateArgs {
    /// The experiment's id
    experiment: String,
    /// The record to compare with [default: the newest complete one of this machine]
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// What may be lost beyond noise, as a fraction
    #[arg(long, value_name = "FRACTION", default_value = "0.05", value_parser = fraction)]
    tolerance: f64,
    /// Only cases that have all these words, for example "m=1 bf16"
    #[arg(long, value_name = "WORDS")]
    cases: Option<String>,
    #[command(flatten)]
    places: PlaceArgs,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    peers: PeerArgs,
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (0.0..1.0).contains(&x) => Ok(x),
        _ => Err("expected a number from 0 to below 1".into()),
    }
}

pub(super) fn gate(args: &GateArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let lab = args.places.lab()?;
    let experiment = Experiment::find(&args.places.experiments()?, &args.experiment)?;
    let machine = Machine::detect(experiment.device, args.machine.machine.as_deref())?;
    let store = args.places.records()?;
    let old = match &args.record {
        Some(path) => Opened::read(path)?,
        None => newest(&store, &experiment, &machine.name)?,
    };
    swiglu_lab::gate::expect_comparable(&experiment, &machine, &old)?;
    // The new record is not evidence and goes elsewhere, so that gates of one experiment can measure
    // several accelerators.
    let scratch = tempfile::tempdir().context("a directory for the new measurements")?;
    let new_store = Store::new(scratch.path());
    let name = format!("gate of {}", experiment.id);
    let lock = places::lock(&new_store, &experiment, &machine, &name)?;
    let logs = Logs::of(&format!("{}-gate", experiment.id))?;
    let commands = args.peers.commands(&lab, logs.dir())?;
    let code = Code::detect(&lab);
    let needed = swiglu_lab::gate::needed_profiles(&experiment, &old.record);
    run::expect_optimised(experiment.profiles.iter().filter(|p| needed.contains(&p.id)))?;
    let options = RunOptions {
        profiles: Some(needed),
        cases: args.cases.clone(),
        ..RunOptions::new("gate", false)
    };
    let laboratory = Laboratory {
        store: &new_store,
        lock: &lock,
        commands: &commands,
        machine: &machine,
        code: &code,
    };
    let new = run::watched(&laboratory, &experiment, &options, terminal);
    logs.close(&new);
    let report = GateReport::of(&experiment, &old.record, &new?.record, args.tolerance);
    show(&report, &old, terminal)?;
    Ok(Verdict::from_passed(report.passed()))
}

fn newest(store: &Store, experiment: &Experiment, machine: &str) -> anyhow::Result<Opened> {
    let (records, refused) = store.of_experiment(&experiment.id)?;
    if let Some(refused) = refused.into_iter().next() {
        return Err(refused.error.into());
    }
    let usable = |o: &Opened| {
        o.record.machine.name == machine && o.record.complete && !o.record.protocol.quick
    };
    match records.into_iter().rfind(usable) {
        Some(opened) => Ok(opened),
        None => bail!(
            "no complete record of {} on {machine} in {}: run it first, or give --record FILE",
            experiment.id,
            store.root().display()
        ),
    }
}

fn show(report: &GateReport, old: &Opened, terminal: &mut Terminal) -> anyhow::Result<()> {
    if terminal.json() {
        return terminal.print_json(report);
    }
    let columns = ["case", "profile", "measured as", ">record", ">now", "outcome"];
    table::print(terminal, &columns, report.comparisons.iter().map(cells))?;
    let count = |outcome| report.comparisons.iter().filter(|c| c.outcome == outcome).count();
    writeln!(
        terminal,
        "against {}: {} held, {} improved, {} regressed, {} not comparable",
        old.path.display(),
        count(Outcome::Held),
        count(Outcome::Improved),
        count(Outcome::Regressed),
        count(Outcome::NotComparable)
    )?;
    Ok(())
}

fn cells(comparison: &Comparison) -> Vec<Cell> {
    let interval = |i: Option<swiglu_lab::record::Interval>| match i {
        Some(i) => {
            let [low, high] = i.ci95.map(table::number);
            format!("{} [{low}, {high}]", table::number(i.value))
        }
        None => String::new(),
    };
    let outcome = Cell::new(match &comparison.reason {
        Some(reason) => format!("{}: {reason}", comparison.outcome),
        None => comparison.outcome.to_string(),
    });
    row![
        &comparison.case_key,
        &comparison.profile,
        &comparison.measure,
        interval(comparison.old),
        interval(comparison.new),
        match comparison.outcome {
            Outcome::Regressed => outcome.fg(Color::Red).add_attribute(Attribute::Bold),
            Outcome::Improved => outcome.fg(Color::Green),
            Outcome::Held | Outcome::NotComparable => outcome,
        },
    ]
}
