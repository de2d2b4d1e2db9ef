use swiglu_lab::gate::{GateReport, Outcome, expect_comparable, needed_profiles};
use swiglu_lab::record::{Record, Status};

use super::made_up::{experiment, opened, parse, record, with};

fn times(ours: f64, others: f64) -> impl Fn(usize, &str) -> std::result::Result<f64, Status> {
    move |_, profile| Ok(if profile == "ours" { ours } else { others })
}

fn outcomes(old: &Record, new: &Record) -> (Vec<Outcome>, GateReport) {
    let report = GateReport::of(&experiment(), old, new, 0.05);
    (report.comparisons.iter().map(|c| c.outcome).collect(), report)
}

#[test]
fn a_slower_machine_is_no_regression_and_slower_code_is() {
    let e = experiment();
    let old = record(&e, 0.01, times(1.0, 2.0));
    for (ours, others, expected, passed) in [
        (1.0, 2.0, Outcome::Held, true),
        (2.0, 4.0, Outcome::Held, true),
        (1.03, 2.0, Outcome::Held, true),
        (1.3, 2.0, Outcome::Regressed, false),
        (0.7, 2.0, Outcome::Improved, true),
    ] {
        let (found, report) = outcomes(&old, &record(&e, 0.01, times(ours, others)));
        assert_eq!((found, report.passed()), (vec![expected; 2], Some(passed)), "{ours} {others}");
        assert!(report.comparisons[0].measure.contains("relative to"));
    }
}

#[test]
fn where_nobody_else_computes_a_ceiling_is_the_yardstick() {
    let text = with("role = \"baseline\"", "role = \"ceiling\"").replacen(
        "role = \"peer\"",
        "role = \"ceiling\"",
        1,
    );
    let e = parse(&text.replacen("\"best:baseline,peer\"", "[\"limit\"]", 1)).unwrap();
    let old = record(&e, 0.01, times(2.0, 1.0));
    assert_eq!(needed_profiles(&e, &old), ["ours", "eager", "rival", "limit"]);
    for (ours, others, expected) in
        [(4.0, 2.0, Outcome::Held), (3.0, 1.0, Outcome::Regressed), (2.0, 0.9, Outcome::Regressed)]
    {
        let report = GateReport::of(&e, &old, &record(&e, 0.01, times(ours, others)), 0.05);
        assert!(report.comparisons.iter().all(|c| c.outcome == expected), "{ours} {others}");
    }
}

#[test]
fn noise_is_no_regression_and_no_proof_that_there_is_none() {
    let e = experiment();
    let old = record(&e, 0.01, times(1.0, 2.0));
    let (found, report) = outcomes(&old, &record(&e, 0.3, times(1.1, 2.0)));
    assert_eq!((found, report.passed()), (vec![Outcome::Undecided; 2], None));
    // Nor is noise of the record.
    let old = record(&e, 0.3, times(1.0, 2.0));
    let (found, report) = outcomes(&old, &record(&e, 0.01, times(1.3, 2.0)));
    assert!(found.contains(&Outcome::Undecided) && report.passed().is_none(), "{found:?}");
}

#[test]
fn without_a_yardstick_time_itself_counts() {
    let e = experiment();
    let alone = |ours: f64| {
        move |_, profile: &str| {
            if profile == "ours" { Ok(ours) } else { Err(Status::NotAvailable) }
        }
    };
    let old = record(&e, 0.01, alone(1.0));
    let (found, report) = outcomes(&old, &record(&e, 0.01, alone(1.2)));
    assert_eq!(found, [Outcome::Regressed; 2]);
    assert_eq!(report.comparisons[0].measure, "calls per second");
    assert_eq!(needed_profiles(&e, &old), ["ours"]);
}

#[test]
fn a_result_that_is_no_longer_right_is_a_regression() {
    let e = experiment();
    let old = record(&e, 0.01, times(1.0, 2.0));
    let wrong =
        |status| move |_, profile: &str| if profile == "ours" { Err(status) } else { Ok(2.0) };
    for (status, expected) in [
        (Status::FailedVerification, Outcome::Regressed),
        (Status::Failed, Outcome::Regressed),
        (Status::NotAvailable, Outcome::NotComparable),
    ] {
        let (found, report) = outcomes(&old, &record(&e, 0.01, wrong(status)));
        assert_eq!(found, [expected; 2]);
        assert_eq!(report.passed(), Some(false));
    }
    assert_eq!(needed_profiles(&e, &old), ["ours", "eager", "rival"]);
}

#[test]
fn only_records_that_can_be_measured_again_are_taken() {
    let e = experiment();
    let good = record(&e, 0.01, times(1.0, 2.0));
    let machine = good.machine.clone();
    let check = |record: Record| expect_comparable(&e, &machine, &opened(record));
    assert!(check(good.clone()).is_ok());
    let mut quick = good.clone();
    quick.protocol.quick = true;
    let mut elsewhere = good.clone();
    elsewhere.machine.name = "there".into();
    for (bad, expected) in [
        (Record { experiment: "x".into(), ..good.clone() }, "a record of x"),
        (Record { definition_hash: "x".into(), ..good.clone() }, "definition has changed"),
        (elsewhere, "a record of there, and this is here"),
        (quick, "without --quick"),
    ] {
        let message = check(bad).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}
