//! Experiments and records made up for tests.

use std::collections::BTreeMap;
use std::path::Path;

use swiglu_lab::record::{
    CaseFacts, Machine, Opened, ProtocolUsed, RECORD_SCHEMA, Record, ResultEntry, Status, Summary,
};
use swiglu_lab::{Case, Code, DeviceKind, Experiment, Pace};

pub(crate) const DEFINITION: &str = r#"
schema = 2
id = "made-up"
title = "A title"
question = "Is it so?"
why = """Because."""
focus = ["m"]
device = "cpu"

[[profiles]]
id = "ours"
peer = "swiglu"
options = { path = "fused" }
role = "ours"

[[profiles]]
id = "eager"
peer = "torch"
role = "baseline"

[[profiles]]
id = "rival"
peer = "other"
role = "peer"

[[profiles]]
id = "limit"
peer = "copy"
role = "ceiling"

[[cases]]
op = "activation"
m = [8, 16]
shapes = [{ intermediate = 32 }]
dtype = "f32"

[metrics]
groups = ["latency", "validation"]

[claim]
text = "It is so."
subject = "ours"
against = "best:baseline,peer"
kind = "faster"

[boundary]
text = "Not elsewhere."
decisions = ["0001-x"]
"#;

pub(crate) fn parse(text: &str) -> swiglu_lab::Result<Experiment> {
    Experiment::parse(text, Path::new("lab/experiments/made-up.toml"))
}

pub(crate) fn experiment() -> Experiment {
    parse(DEFINITION).unwrap()
}

/// The definition with one part replaced.
pub(crate) fn with(from: &str, to: &str) -> String {
    assert!(DEFINITION.contains(from), "{from}");
    DEFINITION.replacen(from, to, 1)
}

/// A complete record: `median(case, profile)` is each result's median, with `noise` of it as the
/// spread over five preparations; a result without a median has the status given instead.
pub(crate) fn record(
    experiment: &Experiment,
    noise: f64,
    median: impl Fn(usize, &str) -> Result<f64, Status>,
) -> Record {
    let mut results = Vec::new();
    for (c, case) in experiment.cases.iter().enumerate() {
        for (p, profile) in experiment.profiles.iter().enumerate() {
            let (preparations, status) = match median(c, &profile.id) {
                Ok(us) => (preparations(us, noise, (c * 16 + p) as u64), Status::Ok),
                Err(status) => (Vec::new(), status),
            };
            results.push(ResultEntry {
                case_key: case.key(),
                profile: profile.id.clone(),
                status,
                reason: None,
                plan: None,
                variants: BTreeMap::new(),
                notes: Vec::new(),
                summary: Summary::of(&preparations),
                preparations,
                versus: Vec::new(),
                error: None,
                bytes: 1.0,
                flops: 1.0,
            });
        }
    }
    Record { results, ..empty_record(experiment) }
}

/// A complete record of a run that measured nothing.
pub(crate) fn empty_record(experiment: &Experiment) -> Record {
    Record {
        schema: RECORD_SCHEMA,
        experiment: experiment.id.clone(),
        definition_hash: experiment.definition_hash.clone(),
        code: Code { commit: Some("1".into()), dirty: false },
        run_id: "r1".into(),
        started: "2026-01-01T00:00:00Z".into(),
        finished: "2026-01-01T00:10:00Z".into(),
        complete: true,
        machine: Machine {
            name: "here".into(),
            device: DeviceKind::Cpu,
            cpu: "c".into(),
            threads: 2,
            memory_bytes: 1,
            os: "linux".into(),
            gpu: None,
            driver: None,
        },
        versions: BTreeMap::new(),
        executor: None,
        protocol: ProtocolUsed {
            turns: 10,
            budget_us: 1,
            seed: 1,
            preparations: 5,
            pace: Pace::default(),
            quick: false,
        },
        cases: experiment.cases.iter().map(|case| (case.key(), facts(case))).collect(),
        ceilings: None,
        results: Vec::new(),
        profiling: Vec::new(),
        content_hash: String::new(),
    }
}

fn facts(case: &Case) -> CaseFacts {
    CaseFacts { case: case.clone(), clocks: None, repeated: false }
}

/// Medians of five preparations about one.
fn preparations(median: f64, noise: f64, stream: u64) -> Vec<f64> {
    let normal = |i| f64::from(swiglu_core::random::normal(stream, i));
    (0..5).map(|i| median * (1.0 + noise * normal(i))).collect()
}

pub(crate) fn opened(record: Record) -> Opened {
    Opened { path: "r.json".into(), record }
}
