//! Modules of the command stand on floors: none imports, in however many steps, what imports it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

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

#[test]
fn no_module_imports_what_imports_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = sources(&src);
    let name = |file: &PathBuf| module(file.strip_prefix(&src).unwrap());
    let modules: BTreeSet<String> = files.iter().map(name).collect();
    // The module that a path leads to: its longest part that is one.
    let found = |path: String| {
        let within = |of: &&String| path == **of || path.starts_with(&format!("{of}::"));
        modules.iter().filter(within).max_by_key(|of| of.len()).cloned()
    };
    let mut above: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in &files {
        let of = name(file);
        let paths = imports(&of, &std::fs::read_to_string(file).unwrap());
        let imported = paths.into_iter().filter_map(found).filter(|path| *path != of);
        above.insert(of.clone(), imported.collect());
    }
    assert!(above["verbs::lab::run"].contains("verbs::lab::on"), "{above:?}");
    // Whoever imports nothing that is still there is taken away; who is left goes round.
    while let Some(ground) = above.iter().find(|(_, on)| on.is_empty()).map(|(of, _)| of.clone()) {
        above.remove(&ground);
        above.values_mut().for_each(|on| on.retain(|of| *of != ground));
    }
    assert!(above.is_empty(), "modules that import each other: {above:#?}");
}
