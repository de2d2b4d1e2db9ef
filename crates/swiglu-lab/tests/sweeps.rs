//! Runs over many cases: split by time, with ways of which the fastest counts, and cases measured again.

#![cfg(unix)]
// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::{Lab, Who, options, run};
use swiglu_lab::record::{Record, Status};
use swiglu_lab::{Experiment, RunOptions, Verdict, VerdictState};

/// An experiment with some of its text replaced.
fn with(lab: &Lab, m: &[usize], who: &[Who<'_>], from: &str, to: &str) -> Experiment {
    let path = lab.experiment(m, who).path;
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
    Experiment::read(&path).unwrap()
}

#[test]
fn a_run_whose_time_is_over_ends_after_a_case_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    let experiment =
        lab.experiment(&[1, 2, 3], &[("ours", "good", "ours"), ("base", "good", "baseline")]);
    let short = RunOptions { time_limit: Some(Duration::ZERO), ..options("r1") };
    for (cases, complete) in [(1, false), (2, false), (3, true)] {
        let record = run(&lab, &experiment, &short).unwrap();
        assert_eq!((record.cases.len(), record.complete), (cases, complete));
    }
    let long = RunOptions { time_limit: Some(Duration::from_secs(60)), ..options("r2") };
    assert!(run(&lab, &experiment, &long).unwrap().complete);
}

#[test]
fn of_several_ways_the_fastest_of_a_case_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    lab.peer("ways", "ways");
    let who = [("ours", "good", "ours"), ("best", "ways", "baseline")];
    let role = "role = \"baseline\"";
    let experiment = with(&lab, &[1, 3], &who, role, &format!("{role}\nbest_of = 4"));
    let record = run(&lab, &experiment, &options("r1")).unwrap();
    assert!(record.complete);
    let of = |m: usize| {
        let key = experiment.cases.iter().find(|case| case.m == m).unwrap().key();
        record.entry(&key, "best").unwrap()
    };
    // Ways of 12 and 11 µs with one token, and none with three.
    let best = of(1);
    assert_eq!((best.status, best.plan.as_deref()), (Status::Ok, Some("way 2")));
    assert_eq!((best.summary.unwrap().median, best.preparations.len()), (11.0, 2));
    assert_eq!(best.notes, ["plain", "the fastest of 2"]);
    assert_eq!(of(3).status, Status::Unsupported);
    // A case that offers none is compared with the others.
    let kept = Verdict::of(&experiment, &lab.store.of_experiment("small").unwrap().0);
    assert_eq!(kept.decisive().unwrap().cases.len(), 1);
}

#[test]
fn cases_outside_the_margin_are_measured_again_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("late", "late");
    lab.peer("slow", "slow");
    let who = [("ours", "late", "ours"), ("base", "slow", "baseline")];
    let claim = "kind = \"faster\"";
    let experiment =
        with(&lab, &[1, 3, 4], &who, claim, &format!("{claim}\nfloor = 0.99\nmonotone = 1.02"));
    let state = || Verdict::of(&experiment, &lab.store.of_experiment("small").unwrap().0).state;
    let prepared = |record: &Record| -> Vec<usize> {
        let ours = record.results.iter().filter(|e| e.profile == "ours");
        let mut ours: Vec<_> = ours.map(|e| (e.case_key.clone(), e.preparations.len())).collect();
        ours.sort();
        ours.into_iter().map(|(_, count)| count).collect()
    };
    // With three tokens 40 µs at first, beside 20 of the other and 10 with more and with fewer tokens.
    let first = run(&lab, &experiment, &options("r1")).unwrap();
    assert_eq!((state(), prepared(&first)), (VerdictState::Refuted, vec![2, 2, 2]));
    // Without time for it everything stays.
    let none = RunOptions { until_decided: Some(Duration::ZERO), ..options("r1") };
    assert_eq!(run(&lab, &experiment, &none).unwrap(), first);
    let again = RunOptions { until_decided: Some(Duration::from_secs(60)), ..options("r1") };
    let last = run(&lab, &experiment, &again).unwrap();
    // It, and the one with more tokens that it is behind.
    assert_eq!((state(), prepared(&last)), (VerdictState::Supported, vec![2, 5, 5]));
    assert_eq!(run(&lab, &experiment, &again).unwrap(), last);
}
