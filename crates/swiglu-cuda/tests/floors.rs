//! The CUDA backend stands on floors, `device` ← `kernels` ← `plan` ← `layers`: none imports one above it.

use std::path::Path;

/// From the ground up.
const FLOORS: [&str; 4] = ["device", "kernels", "plan", "layers"];

/// Whoever stands on none, and tests in a file of their own, may use all.
fn floor(module: &str) -> usize {
    let floor = |folder: &str| FLOORS.iter().position(|floor| *floor == folder);
    let all = module.split("::").any(|part| part == "tests").then_some(usize::MAX);
    all.or_else(|| floor(module.split("::").next()?)).unwrap_or(usize::MAX)
}

/// A file that is longer than this says at its top why it is one: "In one file because …".
const MOST_LINES: [(&str, usize); 2] = [("src", 400), ("device", 600)];

/// The crate, or nothing after saying that there is only its program here, as on a machine that was sent the tests.
fn sources() -> Option<&'static Path> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let there = sources.join("src").is_dir();
    if !there {
        swiglu_testing::not_run(format_args!("no sources in {}", sources.display()));
    }
    there.then_some(sources)
}

#[test]
fn files_are_short_or_say_why_they_are_not() {
    let Some(sources) = sources() else { return };
    let mut long = Vec::new();
    for (folder, most) in MOST_LINES {
        let mut folders = vec![sources.join(folder)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                let head: Vec<_> = text.lines().take_while(|line| line.starts_with("//")).collect();
                let is_test = path.components().any(|part| part.as_os_str() == "tests")
                    || path.ends_with("tests.rs");
                let short = text.lines().count() <= most || is_test;
                if !short && !head.concat().contains("In one file because") {
                    long.push(path);
                }
            }
        }
    }
    assert!(long.is_empty(), "{long:?}");
}

#[test]
fn no_module_imports_one_of_a_floor_above() {
    let Some(sources) = sources() else { return };
    let imported = swiglu_testing::modules::imported(&sources.join("src"));
    assert!(imported["kernels::gate"].contains("device::jit"), "{imported:#?}");
    let pairs = imported.iter().flat_map(|(of, on)| on.iter().map(move |on| (&of[..], &on[..])));
    let upward: Vec<_> =
        pairs.filter(|(of, on)| floor(of) < floor(on) && floor(on) < usize::MAX).collect();
    assert!(upward.is_empty(), "{upward:?}");
}
