//! A case without a definition: the lab's protocol and peers for a question asked at the prompt.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::{Map, json};
use swiglu_lab::record::{Machine, Record, Store};
use swiglu_lab::{
    Against, Case, Claim, ClaimKind, Code, Event, Experiment, Laboratory, MetricGroup, Pace,
    ProfileDef, Role, RunOptions,
};

use super::{LabDirArgs, PeerArgs};
use crate::terminal::Terminal;

/// Where peers are found.
#[derive(Debug, Clone, Args)]
pub(crate) struct AdHocArgs {
    #[command(flatten)]
    dir: LabDirArgs,
    #[command(flatten)]
    pub(super) peers: PeerArgs,
}

/// A way of computing the case.
pub(crate) fn way(id: &str, peer: &str, role: Role, options: serde_json::Value) -> ProfileDef {
    let options = match options {
        serde_json::Value::Object(options) => options,
        _ => Map::new(),
    };
    ProfileDef { id: id.into(), peer: peer.into(), options, role, numerics: None }
}

/// Options with a graph on a device, where calls are shorter than what starting them takes.
pub(crate) fn options(case: &Case, options: serde_json::Value) -> serde_json::Value {
    match case.device {
        swiglu_lab::DeviceKind::Cuda => with(options, &json!({ "graph": true })),
        swiglu_lab::DeviceKind::Cpu => options,
    }
}

/// Both together; what is in both is of the second.
pub(crate) fn with(mut options: serde_json::Value, more: &serde_json::Value) -> serde_json::Value {
    for (name, value) in more.as_object().into_iter().flatten() {
        options[name] = value.clone();
    }
    options
}

/// What the lab would call this: an experiment of one case, which claims nothing.
pub(crate) fn experiment(case: Case, profiles: Vec<ProfileDef>) -> Experiment {
    let subject = profiles.first().map(|p| p.id.clone()).unwrap_or_default();
    Experiment {
        id: "ad-hoc".into(),
        title: case.key(),
        question: String::new(),
        why: String::new(),
        focus: Vec::new(),
        device: case.device,
        profiles,
        cases: vec![case],
        metrics: vec![MetricGroup::Latency, MetricGroup::Traffic, MetricGroup::Validation],
        pace: Pace::default(),
        claim: Claim {
            text: String::new(),
            subject,
            against: Against::Best(vec![Role::Baseline, Role::Peer]),
            kind: ClaimKind::NotSlower,
            floor: None,
            exceptions: 0,
        },
        boundary: String::new(),
        decisions: Vec::new(),
        definition_hash: String::new(),
        path: PathBuf::new(),
    }
}

impl AdHocArgs {
    /// Measures, and keeps no record.
    pub(crate) fn measure(
        &self,
        experiment: &Experiment,
        quick: bool,
        terminal: &Terminal,
    ) -> anyhow::Result<Record> {
        let scratch = tempfile::tempdir().context("a directory for the measurements")?;
        let (records, logs) = (scratch.path().join("records"), scratch.path().join("logs"));
        std::fs::create_dir(&logs).context("a directory for the peers' logs")?;
        let store = Store::new(records);
        let machine = Machine::detect(experiment.device, None)?;
        let lock = super::lock(&store, experiment, &machine, &experiment.id)?;
        // Without a lab in sight there is still this program to measure.
        let lab = self.dir.lab().unwrap_or_else(|_| scratch.path().to_owned());
        let commands = self.peers.commands(&lab, &logs)?;
        let laboratory = Laboratory {
            store: &store,
            lock: &lock,
            commands: &commands,
            machine: &machine,
            code: &Code::default(),
        };
        let bar = terminal.spinner();
        // Nothing is claimed of this, so it is prepared once.
        let mut options = RunOptions::new("once", quick);
        options.protocol.preparations = 1;
        let finished = laboratory.run(experiment, &options, &mut |event| {
            // What went wrong with a profile is in its result, which the caller shows.
            if let Event::Profile { id, what } = event {
                bar.set_message(format!("{what} {id}"));
            }
        });
        bar.finish_and_clear();
        Ok(finished?.record)
    }
}
