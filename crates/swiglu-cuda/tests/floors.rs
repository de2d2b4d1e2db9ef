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

#[test]
fn no_module_imports_one_of_a_floor_above() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let imported = swiglu_testing::modules::imported(&src);
    assert!(imported["kernels::gate"].contains("device::jit"), "{imported:#?}");
    let pairs = imported.iter().flat_map(|(of, on)| on.iter().map(move |on| (&of[..], &on[..])));
    let upward: Vec<_> =
        pairs.filter(|(of, on)| floor(of) < floor(on) && floor(on) < usize::MAX).collect();
    assert!(upward.is_empty(), "{upward:?}");
}
