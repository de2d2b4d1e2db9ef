use swiglu_lab::record::{CaseFacts, Clocks, Interval, QUICK, Record, Status, Versus};
use swiglu_lab::{Experiment, RecordVerdict, Verdict, VerdictState};

use super::made_up::{experiment, opened, parse, record, with};

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

fn state_of(experiment: &Experiment, record: Record) -> (VerdictState, RecordVerdict) {
    let (verdict, decisive) = told(experiment, record);
    (verdict.state, decisive)
}

fn told(experiment: &Experiment, record: Record) -> (Verdict, RecordVerdict) {
    let verdict = Verdict::of(experiment, &[opened(record)]);
    let decisive = verdict.decisive().unwrap().clone();
    (verdict, decisive)
}

fn claims(kind: &str) -> Experiment {
    parse(&with("kind = \"faster\"", kind)).unwrap()
}

#[test]
fn faster_needs_the_interval_above_one_and_the_estimate_at_the_goal() {
    use VerdictState::{Inconclusive, Refuted, Supported};
    let (plain, tenth) = (claims("kind = \"faster\""), claims("kind = \"faster\"\ngoal = 1.1"));
    for (e, rival, noise, expected) in [
        (&plain, 1.4, 0.01, Supported),
        (&plain, 0.8, 0.01, Refuted),
        (&plain, 1.03, 0.1, Inconclusive),
        (&tenth, 1.15, 0.005, Supported),
        (&tenth, 1.05, 0.005, Refuted),
        (&tenth, 1.09, 0.02, Inconclusive),
    ] {
        let (state, verdict) = state_of(e, record(e, noise, times(1.5, rival)));
        assert_eq!(state, expected, "{rival}: {verdict:?}");
        assert_eq!(verdict.undecided.is_some(), state == Inconclusive);
        assert_eq!(verdict.reasons.is_empty(), state == Supported, "{:?}", verdict.reasons);
        assert_eq!(verdict.cases.len(), 2);
    }
    let (_, verdict) = state_of(&tenth, record(&tenth, 0.02, times(1.5, 1.09)));
    let undecided = verdict.undecided.unwrap();
    assert!(undecided.preparations.unwrap() > 0 && undecided.text.contains("more preparations"));
}

#[test]
fn not_slower_and_shares_have_a_margin() {
    use VerdictState::{Refuted, Supported};
    let (equal, share) =
        (claims("kind = \"not-slower\""), claims("kind = \"reaches\"\nshare = 0.9"));
    for (e, rival, expected) in [
        (&equal, 0.99, Supported),
        (&equal, 0.96, Refuted),
        (&share, 0.92, Supported),
        (&share, 0.88, Refuted),
    ] {
        assert_eq!(state_of(e, record(e, 0.002, times(1.5, rival))).0, expected, "{rival}");
    }
}

#[test]
fn exceptions_are_listed_and_more_than_the_claim_allows_refute_it() {
    use VerdictState::{Refuted, Supported};
    // Ratios 2 and 0.9.
    let two = |c: usize, profile: &str| match (c, profile) {
        (_, "ours") => Ok(1.0),
        (0, _) => Ok(2.0),
        _ => Ok(0.9),
    };
    for (floor, exceptions, found, expected) in
        [(0.85, 0, 0, Supported), (0.95, 1, 1, Supported), (0.95, 0, 1, Refuted)]
    {
        let kind = format!("kind = \"faster\"\nfloor = {floor}\nexceptions = {exceptions}");
        let e = claims(&kind);
        let (whole, verdict) = told(&e, record(&e, 0.0, two));
        assert_eq!((whole.state, verdict.exceptions.len()), (expected, found));
        assert!((verdict.aggregate.unwrap().value - 1.8f64.sqrt()).abs() < 1e-9);
        assert!(verdict.exceptions.iter().all(|c| c.to_string().contains("m=16 ")));
        assert_eq!(whole.headline.contains("1 below 0.95"), found == 1);
    }
}

#[test]
fn what_takes_longer_than_more_tokens_is_an_exception_of_a_monotone_claim() {
    use VerdictState::{Refuted, Supported};
    let claim = "kind = \"not-slower\"\nfloor = 0.99\nmonotone = 1.02";
    let text = with("kind = \"faster\"", claim);
    let text = text.replacen("m = [8, 16]", "m = [8, \"16..=17\", 64, 3]", 1);
    let e = parse(&text).unwrap();
    // By the order of the definition: of 8, 16, 17, 64 and 3 tokens.
    for (ours, found, expected) in [
        ([1.0, 1.1, 1.2, 3.0, 0.9], &[][..], Supported),
        // Within the margin.
        ([1.0, 1.1, 1.09, 3.0, 1.01], &[], Supported),
        // The fastest with more tokens counts, not the next.
        ([1.0, 1.3, 1.4, 1.2, 1.1], &[("m=16 ", "64"), ("m=17 ", "64"), ("m=3 ", "8")], Refuted),
    ] {
        let of = |c: usize, profile: &str| Ok(if profile == "ours" { ours[c] } else { 9.0 });
        let (whole, verdict) = told(&e, record(&e, 0.0, of));
        assert_eq!(whole.state, expected, "{ours:?}: {verdict:?}");
        let mut exceptions: Vec<String> =
            verdict.exceptions.iter().map(ToString::to_string).collect();
        exceptions.sort();
        assert_eq!(exceptions.len(), found.len(), "{exceptions:?}");
        for (exception, (case, more)) in exceptions.iter().zip(found) {
            assert!(exception.contains(case), "{exception}");
            assert!(exception.ends_with(&format!("of ours with {more} tokens")), "{exception}");
        }
    }
    // Other shapes are no more tokens.
    let text = text.replacen(
        "[{ intermediate = 32 }]",
        "[{ intermediate = 32 }, { intermediate = 8 }]",
        1,
    );
    let e = parse(&text).unwrap();
    let of = |c: usize, profile: &str| {
        let ours = [2.0, 2.1, 2.2, 3.0, 1.9, 1.0, 1.1, 1.2, 1.3, 0.9];
        Ok(if profile == "ours" { ours[c] } else { 9.0 })
    };
    assert_eq!(told(&e, record(&e, 0.0, of)).0.state, Supported);
}

#[test]
fn the_rival_of_a_case_is_the_fastest_and_never_a_ceiling() {
    let e = experiment();
    let (_, verdict) = state_of(&e, record(&e, 0.0, times(1.5, 1.2)));
    let case = &verdict.cases[0];
    assert_eq!(case.against, "rival");
    assert!((case.ratio.value - 1.2).abs() < 1e-9);
}

#[test]
fn an_interval_that_raw_samples_gave_counts_before_one_of_medians() {
    let e = experiment();
    let mut r = record(&e, 0.01, times(1.5, 1.4));
    for entry in r.results.iter_mut().filter(|e| e.profile == "ours") {
        entry.versus = vec![Versus { against: "rival".into(), ratio: 1.4, low: 0.7, high: 2.8 }];
    }
    let (state, verdict) = state_of(&e, r);
    assert_eq!(state, VerdictState::Inconclusive);
    assert_eq!(verdict.cases[0].ratio, Interval { value: 1.4, ci95: [0.7, 2.8] });
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
    assert!(verdict.reasons[0].contains("not available"), "{:?}", verdict.reasons);
    assert!(verdict.undecided.unwrap().text.contains("results of 2 more cases"));
    let wrong =
        |_, profile: &str| if profile == "ours" { Err(FailedVerification) } else { Ok(2.0) };
    let (whole, _) = told(&best, record(&best, 0.01, wrong));
    assert_eq!(whole.state, open);
    assert!(whole.headline.contains("failed verification"));
    let once = {
        let mut r = record(&best, 0.01, times(2.0, 2.0));
        r.results.iter_mut().for_each(|e| e.preparations.truncate(1));
        state_of(&best, r)
    };
    assert_eq!(once.0, open);
    assert!(once.1.reasons[0].contains("less than twice"), "{:?}", once.1.reasons);
}

#[test]
fn a_changed_clock_is_a_mark_and_no_veto() {
    let e = experiment();
    let clocks =
        |cpu: f64, sm: Option<f64>| Clocks { cpu_mhz: Some(cpu), sm_mhz: sm, ..Clocks::default() };
    for (before, after, marked) in [
        (clocks(4000.0, None), clocks(3700.0, None), false),
        (clocks(4000.0, None), clocks(3500.0, None), true),
        (clocks(4000.0, Some(1900.0)), clocks(3000.0, Some(1850.0)), false),
        (clocks(4000.0, Some(1900.0)), clocks(4000.0, Some(1500.0)), true),
    ] {
        let mut r = record(&e, 0.01, times(2.0, 2.0));
        let case = e.cases[0].clone();
        let facts = CaseFacts { case, clocks: Some([before, after]), repeated: true };
        r.cases.insert(e.cases[0].key(), facts);
        let (state, verdict) = state_of(&e, r);
        assert_eq!((state, !verdict.marks.is_empty()), (VerdictState::Supported, marked));
    }
}

#[test]
fn only_complete_records_of_the_definition_count_and_the_newest_of_a_machine() {
    let e = experiment();
    let of = |records: Vec<Record>| {
        Verdict::of(&e, &records.into_iter().map(opened).collect::<Vec<_>>())
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
    assert!(foreign.headline.contains("definition"));

    let later =
        Record { finished: "2026-01-02T00:00:00Z".into(), ..record(&e, 0.01, times(0.5, 0.5)) };
    assert_eq!(of(vec![later.clone(), good()]).state, VerdictState::Refuted);
    // On another machine the old one stands as well; the worse of the two is told, with its own figures.
    let mut newest = good();
    (newest.machine.name, newest.finished) = ("there".into(), "2026-01-03T00:00:00Z".into());
    let both = of(vec![newest.clone(), later]);
    assert_eq!((both.state, both.machines.len()), (VerdictState::Refuted, 2));
    assert_eq!(both.decisive().unwrap().machine, "here");
    assert!(both.headline.starts_with("0.50×"), "{}", both.headline);
    // Of two that agree the newer one's numbers are.
    for records in [vec![good(), newest.clone()], vec![newest, good()]] {
        assert_eq!(of(records).decisive().unwrap().machine, "there");
    }
}

#[test]
fn a_record_without_the_subject_says_so() {
    let e = experiment();
    let absent = |_: usize, profile: &str| match profile {
        "ours" => Err(Status::NotAvailable),
        _ => Ok(1.0),
    };
    let verdict = Verdict::of(&e, &[opened(record(&e, 0.01, absent))]);
    let told = "ours, which the claim is about, was not available on here";
    assert_eq!((verdict.state, verdict.machines.len()), (VerdictState::NotRun, 0));
    assert_eq!(verdict.headline, told);
    // One that was not finished, or is of another definition, is no news beside it.
    let incomplete = Record { complete: false, ..record(&e, 0.01, absent) };
    let old = Record { definition_hash: "x".into(), ..record(&e, 0.01, absent) };
    let of = |records: [&Record; 2]| Verdict::of(&e, &records.map(|r| opened(r.clone())));
    assert_eq!(of([&record(&e, 0.01, absent), &old]).headline, told);
    assert!(of([&incomplete, &old]).headline.contains("present definition"));
    assert!(of([&incomplete, &incomplete]).headline.contains("finish a run"));
    // Where it is there, that machine decides.
    let there = record(&e, 0.01, times(2.0, 2.0));
    let mut elsewhere = record(&e, 0.01, absent);
    elsewhere.machine.name = "elsewhere".into();
    assert_eq!(of([&there, &elsewhere]).decisive().unwrap().machine, "here");
}
