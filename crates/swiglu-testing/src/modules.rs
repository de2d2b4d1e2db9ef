//! What the sources of a crate import from it, for tests that hold the order of its modules.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Every module of a crate under `src`, with the modules of the crate that its `use` lines name: `verbs::lab::run` of
/// `verbs/lab/run.rs`, and `verbs::lab` of `verbs/lab/mod.rs`. Modules inside a file, its tests above all, do not count.
///
/// # Panics
/// If a source cannot be read.
pub fn imported(src: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let files = sources(src);
    let name = |file: &PathBuf| module(file.strip_prefix(src).expect("a file below it"));
    let modules: BTreeSet<String> = files.iter().map(name).collect();
    // The module that a path leads to: its longest part that is one.
    let found = |path: String| {
        let within = |of: &&String| path == **of || path.starts_with(&format!("{of}::"));
        modules.iter().filter(within).max_by_key(|of| of.len()).cloned()
    };
    let of_file = |file: &PathBuf| {
        let of = name(file);
        let text = std::fs::read_to_string(file).expect("a source");
        let on = imports(&of, &text).into_iter().filter_map(found).filter(|on| *on != of).collect();
        (of, on)
    };
    files.iter().map(of_file).collect()
}

/// The sources below a directory.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let read = std::fs::read_dir(dir).expect("a directory of sources");
    let entries = read.map(|entry| entry.expect("its entry").path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// `verbs::lab::run` of `verbs/lab/run.rs`, and `verbs::lab` of `verbs/lab/mod.rs`.
fn module(file: &Path) -> String {
    let names = file.with_extension("").to_string_lossy().replace('/', "::");
    names.trim_end_matches("::mod").to_owned()
}

/// The paths that a source imports from this crate, in full.
fn imports(of: &str, text: &str) -> Vec<String> {
    let parent = of.rsplit_once("::").map_or("", |(parent, _)| parent);
    let mut paths = Vec::new();
    for statement in text.split("\nuse ").skip(1).filter_map(|rest| rest.split(';').next()) {
        let (path, names) = statement.split_once("::{").unwrap_or((statement, ""));
        let path = match (path.strip_prefix("crate::"), path.strip_prefix("super")) {
            (Some(path), _) => path.to_owned(),
            (_, Some(path)) => format!("{parent}{path}"),
            _ => continue,
        };
        let names = names.split(',').map(|name| name.trim().trim_end_matches('}'));
        paths.extend(names.map(|name| format!("{path}::{name}")));
    }
    paths
}
