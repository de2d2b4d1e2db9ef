//! Runs over many cases, with ways of which the fastest counts.

#![cfg(unix)]
// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

mod support;

use support::{Lab, Who, options, run};
use swiglu_lab::record::Status;
use swiglu_lab::{Experiment, Verdict};

/// An experiment with some of its text replaced.
fn with(lab: &Lab, m: &[usize], who: &[Who<'_>], from: &str, to: &str) -> Experiment {
    let path = lab.experiment(m, who).path;
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
    Experiment::read(&path).unwrap()
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
