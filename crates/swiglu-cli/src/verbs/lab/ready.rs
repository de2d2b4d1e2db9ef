//! `swiglu lab ready`: what a run would need, and whether it is there.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use serde_json::json;
use swiglu_cuda::DeviceFacts;
use swiglu_lab::executor::{self, ExecutorSpec};
use swiglu_lab::peer::Limits;
use swiglu_lab::record::{Locks, Machine};
use swiglu_lab::{Check, DeviceKind, Experiment, Readiness};

use super::places::{PeerArgs, PlaceArgs};
use super::session::Logs;
use crate::table::{self, Table};
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

pub(super) fn ready(args: &ReadyArgs, terminal: &mut Terminal) -> Result<Verdict> {
    if let Some(place) = &args.on {
        let spec = ExecutorSpec::find(place, &args.places.dir.lab()?)?;
        let checks = executor::readiness(&spec);
        let document = json!({ "ready": are_met(&checks), "checks": checks });
        terminal.print(&document, |_, terminal| print(checks.iter(), terminal))?;
        return Ok(Verdict::from_passed(are_met(&checks)));
    }
    let dir = args.places.experiments()?;
    let experiments = match &args.experiment {
        Some(id) => vec![Experiment::find(&dir, id)?],
        None => Experiment::read_dir(&dir)?.into_iter().collect::<Result<_, _>>()?,
    };
    let checked = checks(&experiments, args, terminal)?;
    let ready = checked.values().all(|checks| are_met(checks));
    let row = |(id, checks): (&String, &Vec<Check>)| json!({ "id": id, "ready": are_met(checks), "checks": checks });
    let experiments: Vec<_> = checked.iter().map(row).collect();
    let document = json!({ "ready": ready, "experiments": experiments });
    terminal.print(&document, |_, terminal| show(&checked, terminal))?;
    Ok(Verdict::from_passed(ready))
}

fn are_met(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.ok)
}

/// What each experiment needs here, by its id.
fn checks(
    experiments: &[Experiment],
    ReadyArgs { places, peers, .. }: &ReadyArgs,
    terminal: &Terminal,
) -> Result<BTreeMap<String, Vec<Check>>> {
    let logs = Logs::of("ready")?;
    let commands = peers.commands(&places.dir.lab()?, logs.dir())?;
    let store = places.store()?;
    let mut readiness = Readiness::new(&commands, &store, &Locks::of_user()?)?;
    let limit = Limits::default().hello.as_secs();
    let message = |of: &&Experiment| format!("{}: a peer has {limit} s to answer", of.id);
    let checked = terminal.each(experiments.iter(), message, |experiment| {
        let checks = readiness.of(experiment, &device(experiment.device, places)?);
        Ok((experiment.id.clone(), checks))
    })?;
    Ok(checked.into_iter().collect())
}

/// The device that experiments of a kind measure.
fn device(kind: DeviceKind, places: &PlaceArgs) -> Result<Check> {
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
                let run = places.dir.command("run ID --on PLACE");
                let advice = format!("run on a machine with one: {run}");
                Check::missing(what, advice).instead(error.to_string())
            }
        },
    })
}

/// Each check once, then which experiments have all that they need.
fn show(checked: &BTreeMap<String, Vec<Check>>, terminal: &mut Terminal) -> Result<()> {
    let mut checks: BTreeMap<&str, &Check> = BTreeMap::new();
    for check in checked.values().flatten() {
        checks.entry(&check.what).or_insert(check);
    }
    print(checks.into_values(), terminal)?;
    let ready = checked.iter().filter(|(_, checks)| are_met(checks));
    let ready: Vec<&str> = ready.map(|(id, _)| id.as_str()).collect();
    let count = checked.len();
    writeln!(terminal, "\n{} of {count} experiments can run here", ready.len())?;
    if !ready.is_empty() && count > 1 {
        writeln!(terminal, "  {}", ready.join(", "))?;
    }
    Ok(())
}

fn print<'a>(checks: impl Iterator<Item = &'a Check>, terminal: &mut Terminal) -> Result<()> {
    Table::of(&checks.collect::<Vec<_>>())
        .text("needed", |check| &check.what)
        .text("there", |check| if check.ok { table::good("yes") } else { table::bad("no") })
        .text("found, or what to do", |check| {
            let said = [check.found.as_deref(), check.advice.as_deref()].into_iter().flatten();
            said.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" → ")
        })
        .print(terminal)
}
