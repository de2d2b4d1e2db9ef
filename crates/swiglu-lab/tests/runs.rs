//! Runs with peers that behave and peers that do not: each failure is named, the others go on.

#![cfg(unix)]
// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use support::{Lab, REQUEST, options, run};
use swiglu_lab::record::Record;
use swiglu_lab::{Pace, ResultEntry, RunOptions, Status, Verdict, VerdictState};

fn entry<'a>(record: &'a Record, profile: &str) -> &'a ResultEntry {
    record.results.iter().find(|e| e.profile == profile).unwrap()
}

#[test]
fn a_run_measures_verifies_and_compares() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("quick", "honest");
    lab.peer("slow", "slow");
    let who = [("ours", "quick", "ours"), ("base", "slow", "baseline")];
    let experiment = lab.experiment(&[2, 3], &who);
    let record = run(&lab, &experiment, &options("r1")).unwrap();
    assert!(record.complete);
    assert_eq!(record.results.len(), 4);
    assert_eq!(record.versions["quick"]["fake"], "1.0");
    assert_eq!(record.cases.len(), 2);
    for facts in record.cases.values() {
        assert!(facts.clocks.unwrap().iter().all(|c| c.cpu_mhz.unwrap() > 0.0));
    }
    for e in &record.results {
        assert_eq!(e.status, Status::Ok, "{:?}", e.reason);
        assert_eq!(e.preparations.len(), 2);
        assert_eq!(e.notes, ["plain"]);
        let error = e.error.unwrap();
        assert!(error.worst_ratio.unwrap() <= 1.0);
    }
    let ours = entry(&record, "ours");
    assert_eq!(ours.summary.unwrap().median, 10.5);
    assert_eq!((ours.preparations.as_slice(), ours.summary.unwrap().n), (&[10.5, 10.5][..], 18));
    assert!((ours.gbps().unwrap() - 6144.0 / 10.5 / 1e3).abs() < 1e-9);
    let ratio = |profile| record.ratio_to_baseline(&experiment, entry(&record, profile));
    assert!((ratio("ours").unwrap().value - 20.5 / 10.5).abs() < 1e-9);
    assert_eq!(ratio("base"), None);

    let (records, refused) = lab.store.of_experiment("small").unwrap();
    assert!(refused.is_empty() && records[0].record == record);
    let verdict = Verdict::of(&experiment, &records);
    assert_eq!(verdict.state, VerdictState::Supported, "{verdict:?}");
}

/// What a peer does, what becomes of it, and what the reason says.
#[test]
fn whatever_one_peer_does_is_named_and_the_others_are_measured() {
    let cases = [
        ("unavailable", Status::NotAvailable, "no such framework"),
        ("picky", Status::Unsupported, "not 3"),
        ("clumsy", Status::Failed, "out of memory"),
        ("hangs", Status::Failed, "did not answer `sample` within 0.7"),
        ("dies", Status::Failed, "something broke inside"),
        ("babbles", Status::Failed, "Autotuning 3/7"),
        ("floods", Status::Failed, "what is no reply"),
        ("chatters", Status::Failed, "expected one reply to each request"),
        ("confuses", Status::Failed, "with id Some(99999)"),
        ("mistakes", Status::Failed, "with `released`"),
        ("nan", Status::Failed, "what is no reply"),
        ("negative", Status::Failed, "a sample is -1"),
        ("empty", Status::Failed, "no samples"),
        ("wrong", Status::FailedVerification, "the result is wrong: element [0, 1]"),
        ("nan-rows", Status::FailedVerification, "element [0, 1]"),
        ("short", Status::FailedVerification, "expected 192"),
        ("fickle", Status::Failed, "out of memory by now"),
        ("unsteady", Status::FailedVerification, "element [0, 1]"),
    ];
    for (behaviour, status, reason) in cases {
        let dir = tempfile::tempdir().unwrap();
        let lab = Lab::new(dir.path());
        lab.peer("good", "honest");
        lab.peer("bad", behaviour);
        let who = [("ours", "good", "ours"), ("bad", "bad", "baseline"), ("other", "good", "peer")];
        let experiment = lab.experiment(&[3], &who);
        let start = Instant::now();
        let record = run(&lab, &experiment, &options("r1")).unwrap();
        assert!(start.elapsed() < Duration::from_secs(60), "{behaviour}");
        let bad = entry(&record, "bad");
        assert_eq!(bad.status, status, "{behaviour}: {:?}", bad.reason);
        let told = bad.reason.as_deref().unwrap_or_default();
        assert!(told.contains(reason), "{behaviour}: {told}");
        // No preparations without samples.
        assert_eq!(bad.preparations.is_empty(), bad.summary.is_none(), "{behaviour}");
        for good in ["ours", "other"] {
            let entry = entry(&record, good);
            assert_eq!(entry.status, Status::Ok, "{behaviour}: {:?}", entry.reason);
            assert_eq!(entry.preparations.len(), 2, "{behaviour}");
        }
        assert!(record.complete, "{behaviour}");
        // Times of a wrong result are shown and never ranked.
        assert_eq!(bad.summary.is_some(), status == Status::FailedVerification, "{behaviour}");
        let (records, _) = lab.store.of_experiment("small").unwrap();
        let verdict = Verdict::of(&experiment, &records);
        let ranked = verdict.machines[0].cases.iter().any(|c| c.against == "bad");
        assert!(!ranked, "{behaviour}");
    }
}

/// Whom the host asked to prepare, and then to sample, in each preparation of a case.
fn asked(lab: &Lab, peer: &str) -> Vec<(Vec<String>, Vec<String>)> {
    let log = std::fs::read_to_string(lab.commands.logs.join(format!("{peer}.log"))).unwrap();
    let mut names = BTreeMap::new();
    let mut preparations: Vec<(Vec<String>, Vec<String>)> = Vec::new();
    let mut preparing = false;
    for line in log.lines().filter_map(|line| line.strip_prefix(REQUEST)) {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["prepare", id, profile] => {
                names.insert(id.to_owned(), profile.to_owned());
                // The first sample of each profile warms it up, before the next is prepared.
                if !preparing {
                    preparations.push(Default::default());
                }
                preparing = true;
                preparations.last_mut().unwrap().0.push(profile.to_owned());
            }
            ["sample", id] => {
                let (prepared, sampled) = preparations.last_mut().unwrap();
                sampled.push(names[id].clone());
                preparing = sampled.len() <= prepared.len();
            }
            _ => panic!("{line}"),
        }
    }
    preparations
}

#[test]
fn every_profile_is_the_first_to_be_prepared_and_the_first_of_a_turn_as_often_as_any() {
    let ids = ["a", "b", "c", "d"];
    for count in [2, 4] {
        let dir = tempfile::tempdir().unwrap();
        let lab = Lab::new(dir.path());
        lab.peer("one", "logs");
        let who: Vec<_> = ids[..count].iter().map(|id| (*id, "one", "ours")).collect();
        let experiment = lab.experiment(&[2], &who);
        let mut options = options("r1");
        // As a run has them that is evidence.
        options.protocol.turns = 15;
        options.protocol.preparations = 5;
        let record = run(&lab, &experiment, &options).unwrap();
        assert!(record.results.iter().all(|e| e.preparations.len() == 5), "{record:?}");
        let preparations = asked(&lab, "one");
        assert_eq!(preparations.len(), 5);
        let mut begun: BTreeMap<&str, usize> = ids[..count].iter().map(|id| (*id, 0)).collect();
        for (i, (prepared, sampled)) in preparations.iter().enumerate() {
            assert_eq!(prepared[0], ids[i % count], "{preparations:?}");
            assert_eq!(prepared.len(), count);
            // One to warm up, then two turns that do not count and three that do.
            let turns: Vec<_> = sampled.chunks_exact(count).collect();
            assert_eq!((turns.len(), sampled.len()), (1 + 2 + 3, 6 * count));
            for turn in &turns[3..] {
                *begun.get_mut(turn[0].as_str()).unwrap() += 1;
            }
        }
        let (most, least) = (begun.values().max().unwrap(), begun.values().min().unwrap());
        assert!(most - least <= 1, "{begun:?}");
    }
}

#[test]
fn a_pace_comes_before_every_turn_and_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("one", "logs");
    let mut experiment = lab.experiment(&[2], &[("a", "one", "ours"), ("b", "one", "peer")]);
    let samples = |run_id: &str, experiment: &_| {
        std::fs::remove_file(lab.commands.logs.join("one.log")).ok();
        let record = run(&lab, experiment, &options(run_id)).unwrap();
        assert!(record.results.iter().all(|e| e.preparations.len() == 2), "{record:?}");
        let asked: usize = asked(&lab, "one").iter().map(|(_, sampled)| sampled.len()).sum();
        (asked, record.protocol.pace)
    };
    // One to warm up, two turns that do not count and three that do, of two profiles, twice.
    assert_eq!(samples("r1", &experiment), (2 * 2 * 6, Pace::default()));
    experiment.pace = Pace { rest_ms: 1, warm_ms: 1, turn_ms: 0 };
    let (paced, pace) = samples("r2", &experiment);
    assert!(paced >= 2 * 2 * (1 + 2 * 5), "{paced}");
    assert_eq!(pace, experiment.pace);
}

#[test]
fn what_a_preparation_decides_is_in_the_interval() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    lab.peer("misplaced", "misplaced");
    let who = [("ours", "good", "ours"), ("base", "misplaced", "baseline")];
    let experiment = lab.experiment(&[2], &who);
    let record = run(&lab, &experiment, &options("r1")).unwrap();
    assert_eq!(record.protocol.preparations, 2);
    // 10 µs in one preparation and 20 in the other, never anything else: turns alone know no spread.
    let base = entry(&record, "base");
    assert_eq!((base.preparations.as_slice(), base.summary.unwrap().n), (&[10.0, 20.0][..], 12));
    let [low, high] = record.ratio_to_baseline(&experiment, entry(&record, "ours")).unwrap().ci95;
    assert!(low < 10.01 / 10.5 && high > 19.99 / 10.5, "{low} {high}");
}

#[test]
fn what_noise_leaves_open_is_prepared_more_often_until_it_is_decided() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    lab.peer("settles", "settles");
    let who = [("ours", "good", "ours"), ("base", "settles", "baseline")];
    let experiment = lab.experiment(&[2], &who);
    let state = || {
        let verdict = Verdict::of(&experiment, &lab.store.of_experiment("small").unwrap().0);
        (verdict.state, verdict.decisive().unwrap().undecided.clone())
    };
    // 10 and 12 µs beside 10.5: nobody can tell.
    let first = run(&lab, &experiment, &options("r1")).unwrap();
    let (open, undecided) = state();
    assert_eq!((open, first.results[0].preparations.len()), (VerdictState::Inconclusive, 2));
    assert!(undecided.unwrap().preparations.unwrap() > 0);
    let longer = RunOptions { until_decided: Some(Duration::from_secs(60)), ..options("r1") };
    let decided = run(&lab, &experiment, &longer).unwrap();
    assert_eq!(state(), (VerdictState::Supported, None));
    let base = entry(&decided, "base");
    assert!(
        base.preparations.len() > 3
            && base.summary.unwrap().n > first.results[1].summary.unwrap().n
    );
    // Decided, there is nothing left to do; with no time, nothing is begun.
    assert_eq!(run(&lab, &experiment, &longer).unwrap(), decided);
}

#[test]
fn profiles_that_share_a_broken_peer_are_still_measured_and_it_is_not_tried_forever() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    lab.peer("bad", "dies");
    let who = [("ours", "good", "ours"), ("bad", "bad", "baseline")];
    let experiment = lab.experiment(&[1, 2, 4], &who);
    let record = run(&lab, &experiment, &options("r1")).unwrap();
    let reasons: Vec<&str> = record
        .results
        .iter()
        .filter(|e| e.profile == "bad")
        .map(|e| e.reason.as_deref().unwrap())
        .collect();
    assert!(reasons[0].contains("signal") && reasons[1].contains("signal"), "{reasons:?}");
    assert!(reasons[2].contains("not tried again after 2 crashes"), "{reasons:?}");
    assert!(record.results.iter().filter(|e| e.profile == "ours").all(|e| e.status == Status::Ok));
}

#[test]
fn a_run_that_goes_on_tries_again_what_was_not_available() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    lab.peer("part", "picky");
    let who = [("ours", "good", "ours"), ("late", "late", "peer"), ("part", "part", "peer")];
    let experiment = lab.experiment(&[2, 3], &who);
    let one = RunOptions { cases: Some("m=2".into()), ..options("r1") };
    run(&lab, &experiment, &one).unwrap();
    let without = run(&lab, &experiment, &options("r1")).unwrap();
    assert!(without.complete);
    assert_eq!(entry(&without, "late").status, Status::NotAvailable);
    // Nothing has changed: everything is kept.
    assert_eq!(run(&lab, &experiment, &options("r1")).unwrap(), without);

    lab.peer("late", "slow");
    // What a selection leaves out is kept as it was, whatever has been installed.
    let others = RunOptions { profiles: Some(vec!["ours".into(), "part".into()]), ..options("r1") };
    assert_eq!(run(&lab, &experiment, &others).unwrap(), without);
    // Asked for alone, it is measured beside what the case had: only neighbours compare.
    let late = RunOptions { profiles: Some(vec!["late".into()]), ..one };
    let with = run(&lab, &experiment, &late).unwrap();
    assert!(with.complete);
    let kept = |r: &Record| {
        r.results.iter().filter(|e| e.case_key.contains("m=3")).cloned().collect::<Vec<_>>()
    };
    assert_eq!(kept(&with), kept(&without), "only the selected case was measured again");
    let with = run(&lab, &experiment, &options("r1")).unwrap();
    let late: Vec<Status> =
        with.results.iter().filter(|e| e.profile == "late").map(|e| e.status).collect();
    assert_eq!(late, [Status::Ok, Status::Ok]);
    assert!(with.complete && with.results.len() == 6);
    // It is there now, so a third time nothing is left to do.
    assert_eq!(run(&lab, &experiment, &options("r1")).unwrap(), with);
}

#[test]
fn missing_programs_are_not_available() {
    let dir = tempfile::tempdir().unwrap();
    let mut lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    lab.peer("silent", "mute");
    std::fs::write(lab.commands.dir.join("script_peer.py"), "").unwrap();
    lab.commands.python = "/nonexistent/python".into();
    let who = [
        ("ours", "good", "ours"),
        ("own", "swiglu", "ours"),
        ("none", "nowhere", "peer"),
        ("script", "script", "peer"),
        ("mute", "silent", "peer"),
    ];
    let experiment = lab.experiment(&[1], &who);
    let mut options = options("r1");
    options.limits.hello = Duration::from_millis(700);
    let record = run(&lab, &experiment, &options).unwrap();
    let statuses: Vec<Status> = record.results.iter().map(|e| e.status).collect();
    let missing = Status::NotAvailable;
    assert_eq!(statuses, [Status::Ok, missing, missing, missing, Status::Failed]);
    assert!(entry(&record, "mute").reason.as_deref().unwrap().contains("`hello` within 0.7 s"));
}

#[test]
fn selections_leave_a_record_incomplete_and_wrong_ones_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Lab::new(dir.path());
    lab.peer("good", "honest");
    let who = [("ours", "good", "ours"), ("base", "good", "baseline")];
    let experiment = lab.experiment(&[1, 16], &who);
    let part = RunOptions { cases: Some("m=1 f32".into()), ..options("r1") };
    let record = run(&lab, &experiment, &part).unwrap();
    assert_eq!((record.results.len(), record.complete), (2, false));
    // The same run without the selection measures the rest.
    let record = run(&lab, &experiment, &options("r1")).unwrap();
    assert_eq!((record.results.len(), record.complete), (4, true));

    let refused = |options: RunOptions| run(&lab, &experiment, &options).unwrap_err().to_string();
    let wrong = RunOptions { cases: Some("m=2".into()), ..options("r2") };
    assert!(refused(wrong).contains("activation m=1"));
    let wrong = RunOptions { profiles: Some(vec!["them".into()]), ..options("r2") };
    assert!(refused(wrong).contains("ours, base"));
    assert!(refused(options("../r2")).contains("run id"));
    let mut other = options("r1");
    other.protocol.turns = 7;
    assert!(refused(other).contains("other turns or preparations"));
    let changed = lab.experiment(&[1, 17], &who);
    let message = run(&lab, &changed, &options("r1")).unwrap_err().to_string();
    assert!(message.contains("another definition") && message.contains("--run-id"), "{message}");
}
