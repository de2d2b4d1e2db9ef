//! What the façade exports may grow: its structures with public fields and its enums are not exhaustive, but for those
//! that are listed here with the reason why nothing will be added to them.
// A helper of a test is a test: it ends by panicking.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

/// Types that are complete.
const COMPLETE: [(&str, &str); 7] = [
    ("Orientation", "a matrix has two dimensions"),
    ("Half", "gate and up"),
    ("Path", "through memory or not"),
    ("Arrangement", "every kernel has to know each: another one is a change for all of them"),
    ("Rounding", "as of arrangements"),
    ("ExpMode", "as of arrangements"),
    ("WeightLayout", "an orientation and an arrangement, also as a constant"),
];

const CRATES: [&str; 5] = ["swiglu", "swiglu-core", "swiglu-cpu", "swiglu-cuda", "swiglu-formats"];

/// The text of every source file below a directory.
fn sources(dir: &Path, out: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// The types in the `pub use` declarations of the crate's root, by the crate they come from.
fn exported(root: &str) -> BTreeSet<(&'static str, &str)> {
    let uses = root.split("pub use ").skip(1).map(|rest| rest.split(';').next().unwrap());
    uses.flat_map(|list| {
        let from = list.split("::").next().unwrap();
        let from = CRATES.into_iter().find(|name| name.replace('-', "_") == from);
        list.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase()))
            .map(move |name| (from.unwrap_or("swiglu"), name))
    })
    .collect()
}

/// Whether a definition with these attributes and this text is open to users and complete.
fn is_complete(attributes: &str, definition: &str) -> bool {
    let is_enum = definition.starts_with("enum");
    let body = definition.split("\n}").next().unwrap();
    let has_fields = body.lines().next().unwrap().ends_with('{');
    let shows = has_fields && body.lines().any(|line| line.starts_with("    pub "));
    (is_enum || shows) && !attributes.contains("#[non_exhaustive]")
}

#[test]
fn public_types_can_grow() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = std::fs::read_to_string(here.join("src/lib.rs")).unwrap();
    let names = exported(&root);
    let (mut complete, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for from in CRATES {
        let mut files = Vec::new();
        sources(&here.join("..").join(from).join("src"), &mut files);
        for file in &files {
            let places =
                file.match_indices("\npub struct ").chain(file.match_indices("\npub enum "));
            for (at, _) in places {
                let definition = &file[at + "\npub ".len()..];
                let name = definition.split_once(' ').unwrap().1;
                let name = name.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap();
                let exported = names.iter().find(|(of, exported)| (*of, *exported) == (from, name));
                let Some(&(_, name)) = exported else { continue };
                seen.insert(name);
                // What stands between the item before and this one.
                let attributes = file[..at].rsplit("\n\n").next().unwrap();
                if is_complete(attributes, definition) {
                    complete.insert(name);
                }
            }
        }
    }
    assert!(seen.len() > 50, "{seen:?}");
    let listed: BTreeSet<&str> = COMPLETE.iter().map(|(name, _)| *name).collect();
    assert_eq!(complete, listed, "types that are exhaustive, and those listed to be");
}
