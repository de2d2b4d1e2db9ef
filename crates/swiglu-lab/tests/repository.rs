//! The lab of this repository: what it may weigh, and what its records must answer.

// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use swiglu_lab::record::{Opened, Store};
use swiglu_lab::{CaseOp, Decision, DeviceKind, Experiment, Verdict, VerdictState};

/// What the lab may weigh in the tree; older records are in the history.
const MOST_BYTES: u64 = 3 << 20;

fn lab() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab")
}

fn bytes(path: &Path) -> u64 {
    match fs::read_dir(path) {
        Ok(entries) => entries.map(|entry| bytes(&entry.unwrap().path())).sum(),
        Err(_) => fs::metadata(path).unwrap().len(),
    }
}

#[test]
fn the_lab_stays_small() {
    // What is installed or compiled beside it is not part of it.
    let parts =
        ["decisions", "experiments", "peers", "records"].map(|part| bytes(&lab().join(part)));
    assert!(parts.iter().all(|part| *part > 0), "{parts:?}");
    assert!(parts.iter().sum::<u64>() <= MOST_BYTES, "{parts:?}");
}

/// Of a sweep over hundreds of numbers of tokens a record has a row for each, in which hardly more than figures stand.
#[test]
fn rows_of_a_record_give_it_back_and_are_short() {
    let dir = tempfile::tempdir().unwrap();
    let kept = Store::new(lab().join("records"));
    let again = Store::new(dir.path());
    let (mut before, mut after) = (0, 0);
    for experiment in Experiment::read_dir(&lab().join("experiments")).unwrap() {
        for opened in kept.of_experiment(experiment.unwrap().measured_as()).unwrap().0 {
            let path = dir.path().join("record.json");
            let _ = fs::remove_file(&path);
            let mut record = opened.record;
            again.write(&mut record, &path).unwrap();
            assert_eq!(Opened::read(&path).unwrap().record, record, "{}", opened.path.display());
            before += bytes(&opened.path);
            after += bytes(&path);
        }
    }
    assert!(after > 0 && after <= before, "{after} of {before} bytes");
}

/// Without AVX-512 a step of PyTorch in bfloat16 takes minutes: a run of both would never be complete there.
#[test]
fn training_on_a_cpu_is_asked_of_one_element_type_at_a_time() {
    let experiments = Experiment::read_dir(&lab().join("experiments")).unwrap();
    let mut asked = Vec::new();
    for experiment in experiments.into_iter().map(Result::unwrap) {
        let trains = experiment.cases.iter().all(|case| case.op == CaseOp::MlpTrain);
        if trains && experiment.device == DeviceKind::Cpu {
            let first = experiment.cases[0].dtype;
            assert!(experiment.cases.iter().all(|case| case.dtype == first), "{}", experiment.id);
            asked.push(first.to_string());
        }
    }
    asked.sort();
    // With all threads and with one.
    assert_eq!(asked, ["bf16", "bf16", "f16", "f32", "f32"]);
}

#[test]
fn every_experiment_has_a_verdict_and_what_is_open_says_what_would_decide_it() {
    let store = Store::new(lab().join("records"));
    let experiments = Experiment::read_dir(&lab().join("experiments")).unwrap();
    assert!(experiments.len() >= 22);
    let mut verdicts = BTreeMap::new();
    for experiment in experiments {
        let experiment = experiment.unwrap();
        let (records, refused) = store.of_experiment(experiment.measured_as()).unwrap();
        assert!(refused.is_empty(), "{refused:?}");
        let mut machines: Vec<_> = records.iter().map(|r| &r.record.machine.name).collect();
        let count = machines.len();
        machines.sort();
        machines.dedup();
        assert_eq!(machines.len(), count, "{}: one record a machine, the newest", experiment.id);
        let verdict = Verdict::of(&experiment, &records);
        for machine in &verdict.machines {
            let open = machine.state == VerdictState::Inconclusive;
            assert_eq!(machine.undecided.is_some(), open, "{}: {machine:?}", experiment.id);
        }
        verdicts.insert(experiment.id, verdict);
    }
    for decision in Decision::read_dir(&lab().join("decisions")).unwrap() {
        let decision = decision.unwrap();
        for experiment in &decision.experiments {
            assert!(verdicts.contains_key(experiment), "{}: {experiment}", decision.id);
        }
    }
}
