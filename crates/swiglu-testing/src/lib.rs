//! What tests say to the people and scripts that run them, and are told.
//!
//! A test that lacks what it needs returns, and the test harness counts it as passed: [`not_run`] says that it did not run,
//! where a person and CI read it. [`ALL`] asks for everything that takes too long after each change.

pub mod modules;

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Names the file to which [`not_run`] also appends its line.
pub const LOG: &str = "SWIGLU_NOT_RUN_LOG";

/// Asks for all cases where tests have a part of them: `.ci/nightly` sets it.
pub const ALL: &str = "SWIGLU_TEST_ALL";

/// Random cases of a property: `usual`, or many more where [`ALL`] is set.
pub fn cases(usual: u32) -> u32 {
    if std::env::var_os(ALL).is_some() { 20 * usual } else { usual }
}

/// Says that the calling test did not run, and why: `not run: swiglu-cuda decode weights_held: the reason`.
///
/// The line goes to standard error past the harness, which would keep what a passing test prints to itself, and to the
/// file that [`LOG`] names.
///
/// # Panics
/// If that file cannot be written: what did not run would count as passed.
pub fn not_run(why: impl Display) {
    let line = format!("not run: {}: {why}\n", test());
    // Whoever closed standard error wants to read nothing.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os(LOG) {
        let mut log = OpenOptions::new().create(true).append(true).open(&path);
        let written = log.as_mut().map(|log| log.write_all(line.as_bytes()));
        assert!(matches!(written, Ok(Ok(()))), "{}: {written:?}", path.display());
    }
}

/// The package, the test program and the test, as far as they are known: the harness names threads after tests.
fn test() -> String {
    let package = std::env::var("CARGO_PKG_NAME").ok();
    let program = std::env::current_exe().ok();
    let program = program.as_deref().and_then(|path| path.file_stem()?.to_str());
    // Cargo ends the name with a hash.
    let program = program.map(|name| name.rsplit_once('-').map_or(name, |(name, _)| name));
    let thread = std::thread::current();
    let parts = [package.as_deref(), program, thread.name()];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Run by the test below, in a process of its own.
    #[test]
    #[ignore = "run by another test"]
    fn lacks_something() {
        not_run("no such thing");
    }

    #[test]
    fn a_passing_test_is_heard() {
        let log = std::env::temp_dir().join(format!("swiglu-not-run-{}", std::process::id()));
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "tests::lacks_something", "--test-threads=2"])
            .env(LOG, &log)
            .output()
            .unwrap();
        let written = std::fs::read_to_string(&log);
        std::fs::remove_file(&log).unwrap();
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(written.unwrap(), said);
        assert!(said.starts_with("not run: "), "{said}");
        assert!(said.ends_with("swiglu_testing tests::lacks_something: no such thing\n"), "{said}");
    }

    #[test]
    fn a_log_that_cannot_be_written_fails_the_test() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "tests::lacks_something"])
            .env(LOG, "/")
            .output()
            .unwrap();
        assert!(!output.status.success(), "{output:?}");
    }
}
