//! A made-up lab for tests: a device that does not exist, times from a formula, text that tries to
//! break out of its page.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;
use swiglu_lab::profile::{Ceiling, Ceilings, Counters, KernelCounters};
use swiglu_lab::record::{
    ErrorMetrics, Opened, Profiled, RECORD_SCHEMA, Record, ResultEntry, Status, Store, Summary,
};
use swiglu_lab::report::{Entry, Site};
use swiglu_lab::{Case, Decision, DeviceKind, Experiment, LabError, Role, Verdict};

pub(crate) const HOSTILE: &str = "</svg></title><script>alert(1)</script> & \"quotes\" 'too'";

const SWEEP: &str = r##"
schema = 2
id = "gated-linear-sweep"
title = "Fused gated linear layer over the number of tokens"
question = "Is the fused kernel faster than cuBLAS and an activation at every size?"
why = """
A model meets every M between **1** and some thousands. A kernel that wins at one size and loses at
another is no replacement.

<script>alert("why")</script>

[a trap](javascript:alert(1)) ![pixel](https://example.com/x.png)
[the web](https://example.com/)
"""
focus = ["m", "shape"]
device = "cuda"
[[profiles]]
id = "ours-planned"
peer = "swiglu"
options = { path = "planned", graph = true }
role = "ours"
[[profiles]]
id = "ours-unfused"
peer = "swiglu"
options = { path = "unfused", graph = true }
role = "ours"
[[profiles]]
id = "cublas-act"
peer = "torch"
options = { way = "cublas_packed_act" }
role = "baseline"
[[profiles]]
id = "torch-eager"
peer = "torch"
options = { way = "eager" }
role = "baseline"
[[profiles]]
id = "torch-compile"
peer = "torch"
options = { way = "compile" }
role = "peer"
[[profiles]]
id = "triton-dual"
peer = "triton"
role = "peer"
[[profiles]]
id = "quack"
peer = "quack"
role = "peer"
[[profiles]]
id = "cublas-gemm-only"
peer = "torch"
options = { way = "gemm_only" }
role = "ceiling"
[[profiles]]
id = "sequential"
peer = "triton"
role = "warning"
[[cases]]
op = "gated-linear"
m = [1, 16, 64, 256, 1024, 4096, 16384]
shapes = [
    { model = "Llama-3-8B", hidden = 4096, intermediate = 14336 },
    { model = "Qwen2.5-0.5B", hidden = 896, intermediate = 4864 },
]
dtype = ["bf16"]
[metrics]
groups = ["latency", "traffic", "validation"]
[claim]
text = "The planned path is at least as fast as the best way that exists, at every size."
subject = "ours-planned"
against = "best:peer,baseline"
kind = "faster"
floor = 0.97
[boundary]
text = """
One device, forward only. `M` above 16384 was not measured.
"""
decisions = ["0001-plan", "0009-missing"]
"##;

const DECODE: &str = r##"
schema = 2
id = "cpu-mlp-decode"
title = "One token through a feed-forward block on a CPU"
question = "Does the fused block reach the machine's read bandwidth?"
why = "Decoding reads every weight once."
focus = ["shape"]
device = "cpu"
[[profiles]]
id = "ours"
peer = "swiglu"
options = { path = "fused" }
role = "ours"
[[profiles]]
id = "unfused"
peer = "swiglu"
options = { path = "unfused" }
role = "baseline"
[[profiles]]
id = "torch"
peer = "torch"
role = "peer"
[[cases]]
op = "mlp"
m = [1]
shapes = [{ model = "SmolLM2-135M", hidden = 576, intermediate = 1536 }]
dtype = ["f32", "bf16"]
[metrics]
groups = ["latency", "traffic", "validation"]
[claim]
text = "The fused block is at least as fast as the unfused one."
subject = "ours"
against = ["unfused"]
kind = "faster"
[boundary]
text = "Two cores of a shared host."
"##;

fn experiment(source: &str, id: &str) -> Experiment {
    Experiment::parse(source, Path::new(&format!("lab/experiments/{id}.toml"))).unwrap()
}

fn not_run() -> Experiment {
    let source = DECODE
        .replace("cpu-mlp-decode", "hostile")
        .replace("One token through a feed-forward block on a CPU", &HOSTILE.replace('"', "\\\""));
    experiment(&source, "hostile")
}

/// How much slower than ours a profile is, by its place.
const FACTORS: [f64; 9] = [1.0, 1.1, 1.07, 1.2, 1.13, 1.24, 1.02, 0.98, 40.0];

fn result(experiment: &Experiment, case: &Case, place: usize) -> ResultEntry {
    let profile = &experiment.profiles[place];
    let mut entry: ResultEntry = serde_json::from_value(json!({
        "case_key": case.key(),
        "profile": profile.id,
        "status": "ok",
        "bytes": case.compulsory_bytes(),
        "flops": case.flops(),
    }))
    .unwrap();
    if profile.id == "quack" && case.hidden == 896 {
        entry.status = Status::NotAvailable;
        entry.reason = Some("no module named quack".into());
        return entry;
    }
    if profile.id == "torch" {
        entry.status = Status::Failed;
        entry.reason = Some(HOSTILE.into());
        return entry;
    }
    let floor = (case.compulsory_bytes() / 4.1e12).max(case.flops() / 7.6e14) * 1e6;
    let wave = 1.0 + 0.06 * ((case.m as f64).ln() + place as f64).sin();
    let base = floor * 1.1 + 2.5;
    let middle = base * FACTORS[place % FACTORS.len()] * wave;
    let noise = |i: usize| 1.0 + 0.01 * ((i * 7919 % 13) as f64 - 6.0) / 6.0;
    entry.preparations = (0..5).map(|i| middle * noise(i)).collect();
    entry.summary = Summary::of(&entry.preparations);
    let eager = profile.id.contains("eager") || profile.id.contains("cublas");
    let error = if eager { 3.5e-3 } else { 1.7e-3 };
    entry.error = (profile.role != Role::Ceiling).then_some(ErrorMetrics {
        relative_frobenius: Some(error * wave),
        frobenius_limit: Some(7.2e-3),
        worst_ratio: Some(0.4),
    });
    if profile.id == "sequential" && case.m > 64 {
        entry.status = Status::FailedVerification;
        entry.reason = Some("row 3 has NaN".into());
        entry.error = Some(ErrorMetrics {
            relative_frobenius: None,
            frobenius_limit: Some(7.2e-3),
            worst_ratio: None,
        });
    }
    let unfused = profile.id.ends_with("unfused");
    entry.plan = unfused.then(|| "cublaslt unfused".into());
    entry
}

fn record(experiment: &Experiment, run_id: &str) -> Record {
    let cuda = experiment.device == DeviceKind::Cuda;
    let clocks = json!({ "sm_mhz": cuda.then_some(1755.0), "power_w": null, "cpu_mhz": 3100.0 });
    let facts = |case: &Case| json!({ "case": case, "clocks": [clocks, clocks] });
    let cases: BTreeMap<_, _> = experiment.cases.iter().map(|c| (c.key(), facts(c))).collect();
    // As text, so that it need not name what a record may leave out.
    let mut record: Record = serde_json::from_value(json!({
        "schema": RECORD_SCHEMA,
        "experiment": experiment.id,
        "definition_hash": experiment.definition_hash,
        "code": { "commit": "abcdef0123456789" },
        "run_id": run_id,
        "started": "2026-11-19T23:10:00Z",
        "finished": "2026-11-20T01:02:03Z",
        "complete": true,
        "machine": {
            "name": if cuda { "imaginary-gpu" } else { "imaginary-cpu" },
            "device": experiment.device,
            "cpu": "Imaginary 9",
            "threads": 2,
            "memory_bytes": 24_u64 << 30,
            "os": "Linux 6.1",
            "gpu": cuda.then_some("Imaginary GPU 141 GB"),
            "driver": cuda.then_some("999.1"),
        },
        "executor": (run_id == "two").then(|| json!({
            "kind": "slurm", "place": "slurm:gpu", "job_id": "4711", "partition": "gpu",
            "nodes": ["node7"], "exclusive": false, "other_jobs": ["4712"], "bundle": "b0d1", "resumed": 1,
        })),
        "versions": { "torch": { "torch": "2.11.0" } },
        "protocol": {
            "turns": 15, "budget_us": 20_000, "seed": 0x5eed, "preparations": 5, "quick": false,
        },
        "cases": cases,
        "results": [],
        "content_hash": "",
    }))
    .unwrap();
    let ceiling = |name: &str, per_second| Ceiling { name: name.into(), per_second };
    let counters = Counters {
        us: Some(1502.0),
        dram_percent: Some(22.0),
        tensor_percent: Some(88.0),
        dram_read_bytes: Some(2.4e8),
        ..Counters::default()
    };
    let kernels = vec![KernelCounters { kernel: HOSTILE.into(), launches: 2, counters }];
    let profiled = |reason: Option<String>, kernels| Profiled {
        case_key: experiment.cases[0].key(),
        profile: experiment.profiles[0].id.clone(),
        kernels,
        reason,
    };
    if cuda {
        record.ceilings = Some(Ceilings {
            memory: Some(ceiling("copy", 4.1e12)),
            compute: vec![ceiling("bf16 GEMM", 7.6e14), ceiling("f32 GEMM", 3.9e14)],
            ..Ceilings::default()
        });
        record.profiling =
            vec![profiled(None, kernels), profiled(Some("no ncu".into()), Vec::new())];
    }
    let pairs = experiment.cases.iter().flat_map(|case| {
        (0..experiment.profiles.len()).map(move |place| result(experiment, case, place))
    });
    record.results = pairs.collect();
    record
}

/// A site whose records lie in `dir`.
pub(crate) fn site(dir: &Path) -> Site {
    let store = Store::new(dir);
    let entry = |experiment: Experiment, runs: &[&str]| {
        let records: Vec<Opened> = runs
            .iter()
            .map(|run| {
                let mut record = record(&experiment, run);
                let path = store.path_of(&record);
                store.write(&mut record, &path).unwrap();
                Opened { path, record }
            })
            .collect();
        let verdict = Verdict::of(&experiment, &records);
        // Nobody knows the age of all but the first.
        let ages = [Some(17), None].into_iter().take(records.len()).collect();
        let (path, why) = (PathBuf::from("x.json"), HOSTILE.into());
        let refused = vec![LabError::Record { path, why, advice: "measure again" }];
        Entry { experiment, verdict, records, ages, refused }
    };
    let front = |id: &str, experiments: &str| {
        format!(
            "+++\nid = \"{id}\"\ntitle = \"Plan by cost\"\ndate = 2026-11-20\nstatus = \"accepted\"\n\
             experiments = [{experiments}]\nclaim = \"The planner chooses the fused path.\"\n+++\n\n\
             ## Context\n\nSee [the web](https://example.com) and <b>this</b>.\n\n## Decision\n\nYes.\n\n\
             ## Consequences\n\n- one\n"
        )
    };
    let decision = |id: &str, experiments: &str| {
        let path = PathBuf::from(format!("lab/decisions/{id}.md"));
        Decision::parse(&front(id, experiments), &path).unwrap()
    };
    Site {
        experiments: vec![
            entry(experiment(DECODE, "cpu-mlp-decode"), &["first"]),
            entry(experiment(SWEEP, "gated-linear-sweep"), &["one", "two"]),
            entry(not_run(), &[]),
        ],
        decisions: vec![
            decision("0001-plan", "\"cpu-mlp-decode\""),
            decision("0002-doubted", "\"hostile\", \"gone\""),
        ],
        broken: vec![format!("lab/experiments/x.toml:3:1: {HOSTILE}")],
        strays: Vec::new(),
    }
}
