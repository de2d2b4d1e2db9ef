use std::collections::BTreeSet;
use std::path::Path;

use super::super::code::{Language, code_of};
use super::*;
use crate::testkit::{DEFINITION, experiment, parse};

const PATH: &str = "crates/swiglu-cuda/src/a.rs";
const OTHER: &str = "crates/swiglu-cuda/src/b.rs";

/// Of `fingerprint`s that live as long as the tests.
fn change(path: &'static str, before: &[u8], after: &[u8], concerns: Kind) -> Change {
    let [before, after] = [before, after].map(|code| &*fingerprint(code).leak());
    Change { path, before, after, concerns }
}

#[test]
fn listed_changes_lead_from_one_code_to_another() {
    let quantized = DEFINITION
        .replace("op = \"activation\"", "op = \"mlp\"\nweights = [\"Q4_0\"]")
        .replace("{ intermediate = 32 }", "{ hidden = 32, intermediate = 32 }");
    let (plain, quantized) = (experiment(), parse(&quantized).unwrap());
    let changes = [
        change(PATH, b"two", b"three", Kind::QuantizedWeights),
        change(PATH, b"one", b"two", Kind::QuantizedWeights),
        change(OTHER, b"three", b"four", Kind::QuantizedWeights),
        change(PATH, b"three", b"two", Kind::QuantizedWeights),
    ];
    let lead = |experiment: &Experiment, path: &str, then: &[u8], now: &[u8]| {
        lead(&changes, experiment, path, [then, now])
    };
    assert!(lead(&plain, PATH, b"one", b"two"));
    assert!(lead(&plain, PATH, b"one", b"three"));
    assert!(lead(&plain, OTHER, b"three", b"four"));
    for (path, then, now) in [
        // Not what is listed, not back, not of another file; and what goes round ends.
        (PATH, &b"one"[..], &b"one or another"[..]),
        (PATH, b"two", b"one"),
        (PATH, b"three", b"four"),
        (OTHER, b"one", b"two"),
        (PATH, b"one", b"never"),
        // Of a new file, and of one that is gone.
        (PATH, b"", b"two"),
        (PATH, b"one", b""),
    ] {
        assert!(!lead(&plain, path, then, now), "{path} {then:?} {now:?}");
    }
    assert!(!lead(&quantized, PATH, b"one", b"two"));
}

/// A change whose end is no code that there is says nothing any more: whoever changed the file since lists that change too,
/// with what shows that results are the same, or takes this one out, and measures again.
#[test]
fn every_listed_change_leads_to_the_code_as_it_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for change in &CHANGES {
        let text = std::fs::read(root.join(change.path)).unwrap();
        let now = fingerprint(&code_of(Language::of(change.path), &text));
        let of_path = CHANGES.iter().filter(|other| other.path == change.path);
        let begun: BTreeSet<_> = of_path.map(|other| other.before).collect();
        let goes_on = change.after == now || begun.contains(change.after);
        assert!(goes_on, "{}: {} is not its code, which is {now}", change.path, change.after);
        assert_ne!(change.before, change.after, "{}", change.path);
    }
}
