//! `swiglu lab gate` against records of peers whose times are made up.

#![cfg(target_os = "linux")]
// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use support::{Ended, definition, lab, locks, swiglu};
use swiglu_lab::record::{Locks, Measured};

/// Replaces the times of a reply.
fn faked(us: f64) -> String {
    let times = [0.98, 1.0, 1.02].map(|x| (x * us).to_string()).join(",");
    format!(r#"s/"us":\[[^]]*\]/"us":[{times}]/"#)
}

/// A lab with one experiment, `pace`, of our profile and a baseline.
struct Lab {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Lab {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let profiles = [("ours", "paced", "ours", ""), ("base", "steady", "baseline", "")];
        let cases = "[[cases]]\nop = \"activation\"\nm = [2, 3]\n\
                     shapes = [{ intermediate = 48 }]\ndtype = \"f32\"\n";
        let definition = definition("pace", "cpu", &profiles, cases);
        let path = PathBuf::from(lab(dir.path(), "pace", &definition));
        let lab = Self { _dir: dir, path };
        lab.pace("steady", 20.0);
        lab
    }

    /// A peer that computes as this program does and says that each call takes about `us`.
    fn pace(&self, peer: &str, us: f64) {
        self.peer(peer, &format!("sed -u '{}'", faked(us)));
    }

    /// A peer that says `us` after three of a case's five preparations, and three times as much after the others;
    /// the same ones when the case is measured again, as it is where the processor's clock changed.
    fn waver(&self, peer: &str, us: f64) {
        let [once, thrice] = [us, 3.0 * us].map(faked);
        let says = format!(
            "{{ n=0; while IFS= read -r line; do case $line in *prepared*) n=$(((n + 1) % 5));; esac\n\
             by='{once}'; case $n in 2 | 4) by='{thrice}';; esac\n\
             printf '%s\\n' \"$line\" | sed \"$by\"; done; }}"
        );
        self.peer(peer, &says);
    }

    /// This program, with replies that go through another.
    fn peer(&self, name: &str, filter: &str) {
        let (path, own) = (self.path.join("peers").join(name), env!("CARGO_BIN_EXE_swiglu"));
        fs::write(&path, format!("#!/bin/sh\n'{own}' lab peer | {filter}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn lab(&self, args: &[&str]) -> Ended {
        let places = ["--lab", self.path.to_str().unwrap(), "--machine", "here"];
        swiglu(&[&["lab"], args, &places[..]].concat())
    }

    fn gate(&self, args: &[&str]) -> Ended {
        self.lab(&[&["gate", "pace"], args].concat())
    }

    fn record(&self) -> PathBuf {
        let files = fs::read_dir(self.path.join("records/here")).unwrap();
        let paths = files.map(|entry| entry.unwrap().path());
        paths.into_iter().find(|path| path.extension().is_some_and(|e| e == "json")).unwrap()
    }
}

#[test]
fn a_gate_ends_with_1_on_a_regression_beyond_noise_and_with_0_otherwise() {
    let lab = Lab::new();
    lab.pace("paced", 10.0);
    lab.gate(&[]).refused(&["no complete record of pace on here", "run it first"]);
    let run = lab.lab(&["run", "pace", "--run-id", "r1"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("supported: 2.00× [2.00, 2.00], 2 cases"), "{run:?}");
    let record = fs::read(lab.record()).unwrap();

    for (ours, base, code, outcome) in [
        (10.0, 20.0, 0, "held"),
        (10.3, 20.0, 0, "held"),
        (15.0, 20.0, 1, "regressed"),
        // The machine is slower, not the code.
        (15.0, 30.0, 0, "held"),
        (5.0, 20.0, 0, "improved"),
    ] {
        lab.pace("paced", ours);
        lab.pace("steady", base);
        let ended = lab.gate(&["--json"]);
        assert_eq!(ended.code, Some(code), "{ours} {base}: {ended:?}");
        let comparisons = ended.json()["comparisons"].as_array().unwrap().clone();
        assert_eq!(comparisons.len(), 2, "{comparisons:?}");
        for comparison in comparisons {
            assert_eq!(comparison["outcome"], outcome, "{ours} {base}: {comparison}");
            assert_eq!(comparison["measure"], "speed relative to base");
        }
    }
    // What was measured for the gate is no evidence and is not kept; the record is as it was.
    assert_eq!(fs::read(lab.record()).unwrap(), record);
    assert_eq!(fs::read_dir(lab.path.join("records/here")).unwrap().count(), 1);

    // The tolerance, the cases and the record are the caller's choice.
    lab.pace("paced", 15.0);
    lab.pace("steady", 20.0);
    let record = lab.record().display().to_string();
    let some = lab.gate(&["--cases", "m=3", "--record", &record]);
    assert_eq!(some.code, Some(1), "{some:?}");
    for part in ["regressed", "2.00 [", "1.33 [", "0 held, 0 improved, 1 regressed", &record] {
        assert!(some.stdout.contains(part), "{part}: {some:?}");
    }
    assert_eq!(lab.gate(&["--tolerance", "0.4"]).code, Some(0));
}

/// A processor's worth of other work, until it is dropped.
struct Busy(std::process::Child);

impl Busy {
    fn new() -> Self {
        let work = ["-c", "while :; do :; done"];
        Self(std::process::Command::new("sh").args(work).spawn().unwrap())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_gate_passes_nothing_that_noise_hides() {
    let lab = Lab::new();
    lab.pace("paced", 10.0);
    assert_eq!(lab.lab(&["run", "pace", "--run-id", "r1"]).code, Some(0));
    lab.waver("paced", 10.0);
    let ended = lab.gate(&["--cases", "m=2"]);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    for part in ["0 held, 0 improved, 0 regressed, 1 undecided", "no verdict: noise", "quiet"] {
        assert!(ended.stdout.contains(part), "{part}: {ended:?}");
    }
    // Beside other work it says so before anything is measured.
    let others: Vec<Busy> =
        (0..std::thread::available_parallelism().unwrap().get()).map(|_| Busy::new()).collect();
    let busy = lab.gate(&[]);
    drop(others);
    assert!(busy.stderr.contains("and a verdict needs a quiet one: end what else"), "{busy:?}");
}

#[test]
fn a_gate_does_not_measure_beside_a_run_nor_against_what_cannot_be_compared() {
    let lab = Lab::new();
    lab.pace("paced", 10.0);
    let run = lab.lab(&["run", "pace", "--run-id", "r1", "--quick"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in ["  2.00×  ", "no intervals, which takes more than one preparation"] {
        assert!(run.stdout.contains(part) && !run.stdout.contains("NaN"), "{part}: {run:?}");
    }
    // A quick record is not evidence.
    lab.gate(&[]).refused(&["no complete record"]);
    let quick = lab.record().display().to_string();
    lab.gate(&["--record", &quick]).refused(&["a quick run", "without --quick"]);
    fs::remove_file(quick).unwrap();
    assert_eq!(lab.lab(&["run", "pace", "--run-id", "r2"]).code, Some(0));

    let lock = Locks::new(locks()).take(Measured::Machine, "somebody's").unwrap();
    lab.gate(&[]).refused(&["another run is measuring here (somebody's, process"]);
    drop(lock);
    assert_eq!(lab.gate(&[]).code, Some(0));

    // Ours no longer runs: that is a regression too.
    fs::remove_file(lab.path.join("peers/steady")).unwrap();
    fs::write(lab.path.join("peers/paced"), "#!/bin/sh\nexit 3\n").unwrap();
    let ended = lab.gate(&[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("2 regressed") && ended.stdout.contains("hello"), "{ended:?}");
}
