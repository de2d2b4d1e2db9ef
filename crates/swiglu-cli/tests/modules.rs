//! Modules of the command stand on floors: none imports, in however many steps, what imports it.

use std::path::Path;

#[test]
fn no_module_imports_what_imports_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut above = swiglu_testing::modules::imported(&src);
    assert!(above["verbs::lab::run"].contains("verbs::lab::on"), "{above:?}");
    // Whoever imports nothing that is still there is taken away; who is left goes round.
    while let Some(ground) = above.iter().find(|(_, on)| on.is_empty()).map(|(of, _)| of.clone()) {
        above.remove(&ground);
        above.values_mut().for_each(|on| on.retain(|of| *of != ground));
    }
    assert!(above.is_empty(), "modules that import each other: {above:#?}");
}
