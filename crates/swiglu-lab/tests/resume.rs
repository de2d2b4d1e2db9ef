//! Runs that are killed at any moment, and two at once.

#![cfg(unix)]
// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::{Lab, options};
use swiglu_lab::{Experiment, LabError};

/// Where the host of a run finds its lab.
const HOST: &str = "SWIGLU_LAB_TEST_HOST";
/// As many as let a run be killed several times.
const CASES: std::ops::RangeInclusive<usize> = 1..=24;

fn experiment(lab: &Lab) -> Experiment {
    lab.experiment(
        &CASES.collect::<Vec<_>>(),
        &[("ours", "good", "ours"), ("base", "slow", "baseline")],
    )
}

fn run(lab: &Lab, experiment: &Experiment) -> Result<bool, LabError> {
    support::run(lab, experiment, &options("r1")).map(|record| record.complete)
}

/// The program that is killed. As a test of its own it does nothing.
#[test]
fn host() {
    let Ok(dir) = std::env::var(HOST) else { return };
    let lab = Lab::new(&PathBuf::from(dir));
    let experiment = Experiment::read(&lab.dir.join("experiments/small.toml")).unwrap();
    run(&lab, &experiment).unwrap();
}

fn start(lab: &Lab) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "host"])
        .env(HOST, &lab.dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn lab(dir: &tempfile::TempDir) -> Lab {
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    lab.peer("slow", "slow");
    lab
}

#[test]
fn a_kill_at_any_moment_loses_no_finished_case() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(&dir);
    let experiment = experiment(&lab);
    // By case and profile, as the file has them.
    let mut seen: BTreeMap<(String, String), serde_json::Value> = BTreeMap::new();
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut kills = 0;
    for round in 0u64.. {
        assert!(Instant::now() < deadline, "{kills} kills, {} results", seen.len());
        let mut host = start(&lab);
        let pause = 20 + swiglu_core::random::bits(7, round) % 300;
        std::thread::sleep(Duration::from_millis(pause));
        let ended = host.try_wait().unwrap().is_some();
        if !ended {
            host.kill().unwrap();
            host.wait().unwrap();
            kills += 1;
        }
        let (records, refused) = lab.store.of_experiment("small").unwrap();
        assert!(refused.is_empty(), "{refused:?}");
        let Some(opened) = records.first() else { continue };
        assert_eq!(records.len(), 1, "one run is one file");
        let now: BTreeMap<_, _> = opened
            .record
            .results
            .iter()
            .map(|e| ((e.case_key.clone(), e.profile.clone()), serde_json::to_value(e).unwrap()))
            .collect();
        for (key, entry) in &seen {
            assert_eq!(now.get(key), Some(entry), "{key:?} was lost or measured again");
        }
        assert_eq!(now.len() % 2, 0, "half a case was written");
        seen = now;
        if opened.record.complete {
            break;
        }
    }
    assert_eq!(seen.len(), CASES.count() * 2);
    assert!(kills > 2, "{kills}");
    // A finished run has nothing left to do.
    assert!(run(&lab, &experiment).unwrap());
}

#[test]
fn two_runs_at_once_are_one_and_a_refusal() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(&dir);
    let experiment = experiment(&lab);
    let mut host = start(&lab);
    let begun = Instant::now();
    // The host has the lock once its record is there.
    while lab.store.of_experiment("small").unwrap().0.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(2));
    }
    let refused = run(&lab, &experiment);
    assert!(matches!(refused, Err(LabError::Busy { .. })), "{refused:?}");
    host.kill().unwrap();
    host.wait().unwrap();
    // The kill gave the lock back; a process that the host was just starting, as a copy of itself, may have it for as
    // long as it takes to become a peer.
    let killed = Instant::now();
    let done = loop {
        match run(&lab, &experiment) {
            Err(LabError::Busy { .. }) if killed.elapsed() < Duration::from_secs(20) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            done => break done,
        }
    };
    assert!(done.unwrap());
}

#[test]
fn a_place_for_records_that_cannot_be_written_is_found_before_measuring() {
    let dir = tempfile::tempdir().unwrap();
    let mut lab = lab(&dir);
    let experiment = experiment(&lab);
    let file = dir.path().join("a-file");
    std::fs::write(&file, "").unwrap();
    lab.store = swiglu_lab::record::Store::new(&file);
    let error = run(&lab, &experiment).unwrap_err().to_string();
    assert!(error.contains("a-file"), "{error}");
    // No peer was started: none left a log.
    assert_eq!(std::fs::read_dir(&lab.commands.logs).unwrap().count(), 0);
}
