use std::collections::BTreeMap;
use std::path::Path;

use swiglu_lab::{Decision, DecisionStatus, Result, Verdict, VerdictState};

const GOOD: &str = "+++\nid = \"0001-x\"\ntitle = \"T\"\ndate = 2026-01-31\n\
    status = \"accepted\"\nexperiments = [\"a\", \"b\", \"c\", \"d\"]\nclaim = \"C.\"\n+++\n\n\
    ## Context\n\nText.\n";

fn parse(text: &str) -> Result<Decision> {
    Decision::parse(text, Path::new("lab/decisions/0001-x.md"))
}

#[test]
fn front_matter_and_body_are_read() {
    let d = parse(GOOD).unwrap();
    assert_eq!((d.date.as_str(), d.status), ("2026-01-31", DecisionStatus::Accepted));
    assert!(d.body.starts_with("## Context") && d.body.ends_with("Text."));
}

#[test]
fn errors_name_the_line_of_the_file() {
    let cases = [
        ("no front matter", ":1:1: "),
        ("+++\nid = \"0001-x\"\n", "does not end"),
        (&GOOD.replace("\"0001-x\"", "\"0002-x\""), ":2:6: id `0002-x`"),
        (&GOOD.replace("accepted", "agreed"), ":5:10: "),
        (&GOOD.replace("2026-01-31", "12:00:00"), ":4:8: expected a date"),
        (&GOOD.replace("title", "titel"), ":3:1: unknown field `titel`"),
        (&GOOD.replace("\"C.\"", "\" \""), ":7:9: claim is empty"),
    ];
    for (text, expected) in cases {
        let message = parse(text).unwrap_err().to_string();
        assert!(message.contains(expected), "{message} lacks {expected}");
    }
}

#[test]
fn a_decision_is_doubted_with_its_evidence() {
    let verdict = |state| Verdict { state, headline: "no record".into(), machines: Vec::new() };
    let verdicts = BTreeMap::from([
        ("a".to_owned(), verdict(VerdictState::Supported)),
        ("b".to_owned(), verdict(VerdictState::Refuted)),
        ("c".to_owned(), verdict(VerdictState::NotRun)),
    ]);
    let doubts = parse(GOOD).unwrap().doubts(&verdicts);
    assert_eq!(doubts, ["b is refuted", "c: no record", "d: there is no such experiment"]);
}
