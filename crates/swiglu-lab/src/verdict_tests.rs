use super::*;
use crate::source::Source;
use crate::testkit::{experiment, opened, parse, record, with};

const TREE: &str = "tree:1";

fn source() -> Source {
    Source::Tree("1".into())
}

/// Our time is 1 in every case; the baseline's and the rival's are given.
fn times(baseline: f64, rival: f64) -> impl Fn(usize, &str) -> Result<f64, Status> {
    move |_, profile| {
        Ok(match profile {
            "eager" => baseline,
            "rival" => rival,
            "limit" => 0.5,
            _ => 1.0,
        })
    }
}

fn state_of(experiment: &Experiment, record: Record) -> (VerdictState, Verdict) {
    let verdict = Verdict::of(experiment, &[opened(record)], &source());
    (verdict.state, verdict)
}

#[test]
fn the_interval_decides() {
    let e = experiment();
    for (baseline, rival, noise, expected) in [
        (1.5, 1.4, 0.01, VerdictState::Supported),
        (1.5, 0.8, 0.01, VerdictState::Refuted),
        (0.8, 1.5, 0.01, VerdictState::Refuted),
        (1.001, 1.001, 0.2, VerdictState::Inconclusive),
    ] {
        let (state, verdict) = state_of(&e, record(&e, noise, times(baseline, rival)));
        assert_eq!(state, expected, "{baseline} {rival}: {verdict:?}");
        assert_eq!(verdict.machines[0].cases.len(), 2);
        assert!(verdict.headline.contains("on here"), "{}", verdict.headline);
        assert_eq!(verdict.stale, None);
    }
}

#[test]
fn the_rival_of_a_case_is_the_fastest_and_never_a_ceiling() {
    let e = experiment();
    let (_, verdict) = state_of(&e, record(&e, 0.0, times(1.5, 1.2)));
    let case = &verdict.machines[0].cases[0];
    assert_eq!(case.against, "rival");
    assert!((case.ratio.value - 1.2).abs() < 1e-9);
}

/// What became of `eager` and `rival`, and whether the claim names them.
#[test]
fn missing_rivals_leave_a_claim_open_unless_they_do_not_do_the_case() {
    use Status::{Failed, FailedVerification, NotAvailable, Unsupported};
    let best = experiment();
    let named = parse(&with("\"best:baseline,peer\"", "[\"eager\", \"rival\"]")).unwrap();
    let supported = VerdictState::Supported;
    let open = VerdictState::Inconclusive;
    for (status, of_best, of_named) in [
        (NotAvailable, supported, open),
        (Failed, supported, open),
        (FailedVerification, supported, open),
        (Unsupported, supported, supported),
    ] {
        let outcome = |_, profile: &str| match profile {
            "rival" => Err(status),
            "eager" => Ok(1.5),
            _ => Ok(1.0),
        };
        assert_eq!(state_of(&best, record(&best, 0.01, outcome)).0, of_best, "best, {status}");
        assert_eq!(state_of(&named, record(&named, 0.01, outcome)).0, of_named, "named, {status}");
    }
    let nobody = |_, profile: &str| if profile == "ours" { Ok(1.0) } else { Err(NotAvailable) };
    let (state, verdict) = state_of(&best, record(&best, 0.01, nobody));
    assert_eq!(state, open);
    assert!(verdict.headline.contains("not available"), "{}", verdict.headline);
    let wrong =
        |_, profile: &str| if profile == "ours" { Err(FailedVerification) } else { Ok(2.0) };
    let (state, verdict) = state_of(&best, record(&best, 0.01, wrong));
    assert_eq!(state, open);
    assert!(verdict.headline.contains("failed verification"), "{}", verdict.headline);
}

#[test]
fn aggregates_are_what_they_are_called() {
    // Ratios 2 and 0.9.
    let two = |c: usize, profile: &str| match (c, profile) {
        (_, "ours") => Ok(1.0),
        (0, _) => Ok(2.0),
        _ => Ok(0.9),
    };
    let value = |from: &str| {
        let e = parse(&with("aggregate = \"geomean\"\nthreshold = 1.0", from)).unwrap();
        let (state, verdict) = state_of(&e, record(&e, 0.0, two));
        (state, verdict.machines[0].aggregate.unwrap().value)
    };
    let (state, geomean) = value("aggregate = \"geomean\"\nthreshold = 1.0");
    assert!((geomean - 1.8f64.sqrt()).abs() < 1e-9 && state == VerdictState::Supported);
    let (state, min) = value("aggregate = \"min\"\nthreshold = 1.0");
    assert!((min - 0.9).abs() < 1e-9 && state == VerdictState::Refuted);
    let (state, share) = value("aggregate = \"share\"\nthreshold = 0.5\ncase_threshold = 1.0");
    assert!((share - 0.5).abs() < 1e-9 && state == VerdictState::Supported);
    let (state, _) = value("aggregate = \"share\"\nthreshold = 0.9");
    assert_eq!(state, VerdictState::Refuted);
    // The mean holds, but one case is below the floor.
    let floor = |f: f64| format!("aggregate = \"geomean\"\nthreshold = 1.0\ncase_floor = {f}");
    assert_eq!(value(&floor(0.95)).0, VerdictState::Refuted);
    assert_eq!(value(&floor(0.85)).0, VerdictState::Supported);
}

#[test]
fn changing_clocks_settle_nothing() {
    let e = experiment();
    let clocks =
        |cpu: f64, sm: Option<f64>| Clocks { cpu_mhz: Some(cpu), sm_mhz: sm, ..Clocks::default() };
    for (before, after, expected) in [
        (clocks(4000.0, None), clocks(3700.0, None), VerdictState::Supported),
        (clocks(4000.0, None), clocks(3500.0, None), VerdictState::Inconclusive),
        (clocks(4000.0, Some(1900.0)), clocks(3000.0, Some(1850.0)), VerdictState::Supported),
        (clocks(4000.0, Some(1900.0)), clocks(4000.0, Some(1500.0)), VerdictState::Inconclusive),
    ] {
        let mut r = record(&e, 0.01, times(2.0, 2.0));
        r.case_clocks.insert(e.cases[0].key(), [before, after]);
        assert_eq!(state_of(&e, r).0, expected, "{before:?} {after:?}");
    }
}

#[test]
fn only_complete_records_of_the_definition_count_and_the_newest_of_a_machine() {
    let e = experiment();
    let of = |records: Vec<Record>| {
        Verdict::of(&e, &records.into_iter().map(opened).collect::<Vec<_>>(), &source())
    };
    let good = || record(&e, 0.01, times(2.0, 2.0));
    assert_eq!(of(vec![]).state, VerdictState::NotRun);
    assert_eq!(of(vec![Record { complete: false, ..good() }]).state, VerdictState::NotRun);
    let mut quick = good();
    quick.protocol.quick = true;
    let only_quick = of(vec![quick]);
    assert_eq!((only_quick.state, only_quick.headline.as_str()), (VerdictState::NotRun, QUICK));
    let foreign = of(vec![Record { definition_hash: "x".into(), ..good() }]);
    assert_eq!(foreign.state, VerdictState::NotRun);
    assert!(foreign.stale.unwrap().contains("definition"));

    let later =
        Record { finished: "2026-01-02T00:00:00Z".into(), ..record(&e, 0.01, times(0.5, 0.5)) };
    assert_eq!(of(vec![later.clone(), good()]).state, VerdictState::Refuted);
    // On another machine the old one stands as well; the worse of the two is told.
    let mut elsewhere = good();
    elsewhere.machine.name = "there".into();
    let both = of(vec![elsewhere, later]);
    assert_eq!((both.state, both.machines.len()), (VerdictState::Refuted, 2));
    assert_eq!(both.machines[0].machine, "here");
    // Of two that agree the newer one's numbers are.
    let mut newer = Record { finished: "2026-01-03T00:00:00Z".into(), ..good() };
    newer.machine.name = "there".into();
    for records in [vec![good(), newer.clone()], vec![newer, good()]] {
        assert!(of(records).headline.ends_with("on there"));
    }
}

#[test]
fn a_record_without_the_subject_says_so() {
    let e = experiment();
    let absent = |_: usize, profile: &str| match profile {
        "ours" => Err(Status::NotAvailable),
        _ => Ok(1.0),
    };
    let (state, verdict) = state_of(&e, record(&e, 0.01, absent));
    assert_eq!(state, VerdictState::NotRun);
    let told = "ours, which the claim is about, was not available on here";
    assert_eq!((verdict.headline.as_str(), verdict.machines.len()), (told, 0));
    // One that was not finished, or is of another definition, is no news beside it.
    let incomplete = Record { complete: false, ..record(&e, 0.01, absent) };
    let old = Record { definition_hash: "x".into(), ..record(&e, 0.01, absent) };
    let of = |records: [&Record; 2]| {
        Verdict::of(&e, &records.map(|r| opened(r.clone())), &source()).headline
    };
    assert_eq!(of([&record(&e, 0.01, absent), &old]), told);
    assert!(of([&incomplete, &old]).contains("present definition"));
    assert!(of([&incomplete, &incomplete]).contains("finish a run"));
    // Where it is there, that machine decides.
    let there = record(&e, 0.01, times(2.0, 2.0));
    let mut elsewhere = record(&e, 0.01, absent);
    elsewhere.machine.name = "elsewhere".into();
    assert!(of([&there, &elsewhere]).contains("on here"));
}

#[test]
fn records_of_other_code_are_stale() {
    let e = experiment();
    let stale = |hash: &str, source: Source| {
        let r = Record { source_hash: hash.into(), ..record(&e, 0.01, times(2.0, 2.0)) };
        Verdict::of(&e, &[opened(r)], &source).stale
    };
    assert_eq!(stale(TREE, source()), None);
    assert_eq!(stale(TREE, Source::Unknown), None);
    assert!(stale(TREE, Source::Tree("2".into())).unwrap().contains("changed since"));
    assert!(stale(TREE, Source::Dirty("2".into())).unwrap().contains("uncommitted"));
    assert!(stale("dirty:1", source()).unwrap().contains("uncommitted"));
    assert!(stale("unknown", source()).unwrap().contains("not known"));
}
