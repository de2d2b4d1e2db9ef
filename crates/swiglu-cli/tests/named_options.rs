//! The messages of the file readers name only options that the command has.

mod support;

use std::collections::BTreeSet;
use std::path::Path;

use support::swiglu;

/// Programs of others whose options messages may give.
const OTHERS: [&str; 1] = ["mlx_lm.convert"];

/// All `.rs` files below a directory.
fn sources(dir: &Path, out: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).expect("the sources are there").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(std::fs::read_to_string(&path).expect("a source is text"));
        }
    }
}

/// The contents of string literals: comments may name what they like.
fn literals(source: &str) -> Vec<&str> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    // Every second part is inside quotes; an escaped quote shifts it and is put right by the next one.
    code.flat_map(|line| line.split('"').skip(1)).collect()
}

fn options(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("--").filter_map(|(at, _)| {
        let end = text[at + 2..].find(|c: char| !c.is_ascii_lowercase() && c != '-');
        let option = &text[at..end.map_or(text.len(), |end| at + 2 + end)];
        let begins = at == 0
            || !text.as_bytes()[at - 1].is_ascii_graphic()
            || b"`('".contains(&text.as_bytes()[at - 1]);
        (begins && option.len() > 2).then_some(option)
    })
}

#[test]
fn options_in_messages_exist() {
    let help = swiglu(&["run", "--help"]).stdout;
    let known: BTreeSet<&str> = options(&help).collect();
    assert!(known.contains("--weights") && known.contains("--gate-up-name"), "{known:?}");
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../swiglu-formats/src"), &mut files);
    assert!(files.len() > 10);
    let literals = files.iter().flat_map(|source| literals(source));
    let named: BTreeSet<&str> = literals
        .filter(|text| !OTHERS.iter().any(|o| text.contains(o)))
        .flat_map(options)
        .collect();
    let unknown: Vec<_> = named.difference(&known).collect();
    assert!(unknown.is_empty(), "`swiglu run` has no {unknown:?}");
    assert_eq!(
        options("give `--layer N` or (--expert E), not a--b or --").collect::<Vec<_>>(),
        ["--layer", "--expert"]
    );
}
