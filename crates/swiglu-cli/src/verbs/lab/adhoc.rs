//! Cases without a definition: the lab's protocol and peers for a question asked at the prompt.

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use swiglu::Rounding;
use swiglu_lab::record::{Machine, Record, Store};
use swiglu_lab::{
    Case, CaseOp, Claim, DeviceKind, Event, Experiment, ProfileDef, Role, RunOptions,
};

use super::places::{LabDirArgs, OWN, PeerArgs};
use super::session::{Session, doing};
use crate::terminal::Terminal;

/// Fewer turns say nothing of ratios; more take longer than anybody looks on.
const TURNS: [f64; 2] = [5.0, 200.0];
/// Turns of a second.
const TURNS_PER_SECOND: f64 = 10.0;

#[derive(Debug, Clone, Args)]
pub(crate) struct AdHocArgs {
    #[command(flatten)]
    dir: LabDirArgs,
    #[command(flatten)]
    peers: PeerArgs,
}

pub(crate) fn way(id: &str, peer: &str, role: Role, options: Value) -> ProfileDef {
    let options = options.as_object().cloned().unwrap_or_default();
    ProfileDef { id: id.into(), peer: peer.into(), options, role, numerics: None, best_of: None }
}

/// Options with a graph on a device, where calls are shorter than what starting them takes.
pub(crate) fn graph(case: &Case, options: Value) -> Value {
    match case.device {
        DeviceKind::Cuda => with(options, &json!({ "graph": true })),
        DeviceKind::Cpu => options,
    }
}

/// Both together; what is in both is of the second.
pub(crate) fn with(mut options: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().into_iter().flatten() {
        options[name] = value.clone();
    }
    options
}

/// Our ways of a case, the one that is planned first; then the baseline, which passes gate and up through
/// memory or, with quantised weights, decodes them once. `options` are those of the device.
pub(crate) fn own_ways(case: &Case, options: &Value) -> Vec<ProfileDef> {
    // Gate and up that lie in memory are rounded; on a device the plan may be that path too.
    let mut stored = case.numerics;
    if stored.rounding == Rounding::Fused {
        stored.rounding = Rounding::PreRound;
    }
    let (cuda, trains) = (case.device == DeviceKind::Cuda, case.op == CaseOp::MlpTrain);
    let (weights, quantized) = (case.op.has_weights(), case.weights.is_some());
    let all = [
        (true, "planned", Role::Ours, json!({})),
        (quantized, "decoded", Role::Baseline, json!({ "decode": true })),
        (weights && !quantized, "unfused", Role::Baseline, json!({ "path": "unfused" })),
        (trains, "recompute", Role::Ours, json!({ "keep": "recompute" })),
        (trains && cuda, "products", Role::Ceiling, json!({ "products": true })),
    ];
    let own = |(_, id, role, more)| ProfileDef {
        numerics: (id != "planned" || cuda && weights).then_some(swiglu_lab::Named(stored)),
        ..way(id, OWN, role, with(more, options))
    };
    all.into_iter().filter(|(is_there, ..)| *is_there).map(own).collect()
}

/// What the lab would call this: an experiment that claims nothing.
pub(crate) fn experiment(cases: Vec<Case>, profiles: Vec<ProfileDef>) -> Experiment {
    let first = cases.first();
    let subject = profiles.first().map(|p| p.id.clone()).unwrap_or_default();
    Experiment {
        id: "ad-hoc".into(),
        title: first.map(Case::key).unwrap_or_default(),
        device: first.map_or(DeviceKind::Cpu, |case| case.device),
        claim: Claim { subject, ..Claim::default() },
        profiles,
        cases,
        ..Experiment::default()
    }
}

impl AdHocArgs {
    /// Refuses places that are not there, before anything is measured, and any where nothing is.
    pub(crate) fn expect_places(&self, measured: bool) -> Result<()> {
        if !measured && (self.dir.lab.is_some() || self.peers.peers.is_some()) {
            bail!(
                "--lab and --peers are for problems that are measured (--measure, without --weights)"
            );
        }
        if self.dir.lab.is_some() {
            self.dir.lab()?;
        }
        self.peers.expect_dir()
    }

    /// Measures for about so many seconds a case, and keeps no record.
    pub(crate) fn measure(
        &self,
        experiment: &Experiment,
        seconds: f64,
        terminal: &Terminal,
    ) -> Result<Record> {
        let scratch = tempfile::tempdir().context("a directory for the measurements")?;
        let store = Store::new(scratch.path().join("records"));
        let machine = Machine::detect(experiment.device, None)?;
        // Without a lab in sight there is still this program to measure.
        let lab = match self.dir.lab() {
            Err(_) if self.dir.lab.is_none() => scratch.path().to_owned(),
            lab => lab?,
        };
        let name = &experiment.id;
        let mut session = Session::begin(name, experiment, &store, &machine, &lab, &self.peers)?;
        let bar = terminal.spinner();
        let mut options = RunOptions::new("once", false);
        let turns = (seconds * TURNS_PER_SECOND).clamp(TURNS[0], TURNS[1]).ceil();
        let each = seconds * 1e6 / (turns * experiment.profiles.len().max(1) as f64);
        options.protocol.turns = turns as usize;
        options.protocol.budget_us = each.max(1.0) as u64;
        // Nothing is claimed of this, so it is prepared once.
        options.protocol.preparations = 1;
        let mut case = String::new();
        let finished = session.run(&options, &mut |event| match event {
            Event::Case(next) => case = next.key(),
            // What went wrong with a profile is in its result, which the caller shows.
            Event::Profile { id, what } => bar.set_message(doing(&case, id, what, &options)),
            _ => {}
        });
        bar.finish_and_clear();
        Ok(finished?.record)
    }
}
