//! `swiglu lab gate`: measure again and compare with a record.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use swiglu_lab::gate::{Comparison, GateReport, Outcome};
use swiglu_lab::record::{Interval, Machine, Opened, Store};
use swiglu_lab::{Experiment, RunOptions};

use super::list::expect_none;
use super::places::{PeerArgs, PlaceArgs};
use super::session::{Session, expect_optimised};
use crate::args::fraction;
use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict, say};

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
    /// Name of this machine: the directory of its records [default: made of its facts]
    #[arg(long, value_name = "NAME", help_heading = "Places")]
    machine: Option<String>,
    #[command(flatten)]
    peers: PeerArgs,
}

pub(super) fn gate(args: &GateArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let experiment = Experiment::find(&args.places.experiments()?, &args.experiment)?;
    experiment.expect_measured()?;
    let machine = Machine::detect(experiment.device, args.machine.as_deref())?;
    let store = args.places.records()?;
    let old = match &args.record {
        Some(path) => Opened::read(path)?,
        None => newest(&store, &experiment, &machine.name)?,
    };
    swiglu_lab::gate::expect_comparable(&experiment, &machine, &old)?;
    // The new record is no evidence and goes elsewhere: several gates can measure an accelerator each.
    let scratch = tempfile::tempdir().context("a directory for the new measurements")?;
    let new_store = Store::new(scratch.path());
    let needed = swiglu_lab::gate::needed_profiles(&experiment, &old.record);
    expect_optimised(experiment.profiles.iter().filter(|p| needed.contains(&p.id)))?;
    let options = RunOptions {
        profiles: Some(needed),
        cases: args.cases.clone(),
        ..RunOptions::new("gate", false)
    };
    let name = format!("{}-gate", experiment.id);
    let lab = args.places.dir.lab()?;
    let mut session = Session::begin(&name, &experiment, &new_store, &machine, &lab, &args.peers)?;
    let busy = swiglu_lab::quiet();
    if let (Some(advice), Some(found)) = (busy.advice, busy.found) {
        say(format!("this machine is busy ({found}), and a verdict needs a quiet one: {advice}"));
    }
    let new = session.shown(&options, terminal)?;
    let report = GateReport::of(&experiment, &old.record, &new.record, args.tolerance);
    terminal.print(&report, |report, terminal| show(report, &old, terminal))?;
    Ok(report.passed().map_or(Verdict::Unfinished, Verdict::from_passed))
}

fn newest(store: &Store, experiment: &Experiment, machine: &str) -> Result<Opened> {
    let (records, refused) = store.of_experiment(&experiment.id)?;
    expect_none(refused)?;
    let usable = |o: &Opened| {
        o.record.machine.name == machine && o.record.complete && !o.record.protocol.quick
    };
    let (id, root) = (&experiment.id, store.root().display());
    records.into_iter().rfind(usable).with_context(|| {
        format!(
            "no complete record of {id} on {machine} in {root}: run it first, or give --record FILE"
        )
    })
}

fn show(report: &GateReport, old: &Opened, terminal: &mut Terminal) -> Result<()> {
    use Outcome::{Held, Improved, NotComparable, Regressed, Undecided};
    let interval = |i: Option<Interval>| {
        let shown = i.map(|i| (table::number(i.value), i.ci95.map(table::number)));
        shown.map(|(value, [low, high])| format!("{value} [{low}, {high}]")).unwrap_or_default()
    };
    let outcome = |c: &Comparison| match &c.reason {
        Some(reason) => format!("{}: {reason}", c.outcome),
        None => c.outcome.to_string(),
    };
    Table::of(&report.comparisons)
        .text("case", |c| &c.case_key)
        .text("profile", |c| &c.profile)
        .text("measured as", |c| &c.measure)
        .number("record", |c| interval(c.old))
        .number("now", |c| interval(c.new))
        .text("outcome", |c| match c.outcome {
            Regressed => table::bad(outcome(c)),
            Improved => table::good(outcome(c)),
            Undecided => table::open(outcome(c)),
            Held | NotComparable => outcome(c).into(),
        })
        .print(terminal)?;
    let outcomes = [Held, Improved, Regressed, Undecided, NotComparable];
    let outcomes = outcomes.map(|outcome| format!("{} {outcome}", report.count(outcome)));
    writeln!(terminal, "against {}: {}", old.path.display(), outcomes.join(", "))?;
    if report.passed().is_none() {
        writeln!(
            terminal,
            "no verdict: noise reaches further than the tolerance; measure again on a quiet machine, or give --tolerance"
        )?;
    }
    Ok(())
}
