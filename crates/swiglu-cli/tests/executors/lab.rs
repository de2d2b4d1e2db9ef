//! A lab for tests of executors, and the schedulers that it finds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use swiglu_lab::record::Opened;

use crate::support::{self, Ended, Files, definition, end};

const SCHEDULER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/executors/scheduler");
/// Cases of the experiment, each with a result.
pub(crate) const CASES: usize = 5;
/// What waits for anything here gives up after that long.
const LIMIT: Duration = Duration::from_secs(60);

/// A lab, and the scheduler that it finds.
pub(crate) struct Lab {
    pub(crate) files: Files,
    pub(crate) lab: String,
    /// Found before other programs.
    schedulers: PathBuf,
}

impl Lab {
    /// One experiment, whose cases take no time to speak of.
    pub(crate) fn new() -> Self {
        Self::of("")
    }

    /// The same, whose cases take about a third of a second each: long enough to do something meanwhile.
    pub(crate) fn slow() -> Self {
        Self::of("[pace]\nrest_ms = 20\n")
    }

    fn of(pace: &str) -> Self {
        let profiles = [("ours", "swiglu", "ours", ""), ("plain", "swiglu", "baseline", "")];
        let cases = format!(
            "[[cases]]\nop = \"activation\"\nm = {:?}\nshapes = [{{ intermediate = 16 }}]\n\
             dtype = \"f32\"\nheat = \"hot\"\n{pace}",
            (1..=CASES).collect::<Vec<_>>()
        );
        let files = Files::new();
        fs::create_dir(files.path("fake")).unwrap();
        let lab =
            support::lab(&files.path(""), "tiny", &definition("tiny", "cpu", &profiles, &cases));
        let lab = Self { files, lab, schedulers: SCHEDULER.into() };
        lab.place("fake", "kind = \"slurm\"\npartition = \"fake\"");
        lab
    }

    /// A place of the lab, whose bundles have no more of the program than where it lies: hashing, packing and
    /// copying all of it for every job would take longer than the jobs.
    pub(crate) fn place(&self, name: &str, text: &str) {
        let own = env!("CARGO_BIN_EXE_swiglu");
        let program = self.program("small", &format!("#!/bin/sh\nexec '{own}' \"$@\"\n"));
        let entry = format!("[executor.{name}]\n{text}\nprogram = {program:?}\n");
        let file = Path::new(&self.lab).join("executors.toml");
        let others = fs::read_to_string(&file).unwrap_or_default();
        fs::write(file, others + &entry).unwrap();
    }

    /// The same with the Slurm and the ssh server that `scripts/executors-test` started.
    pub(crate) fn on_cluster() -> Self {
        let cluster = std::env::var("SWIGLU_TEST_CLUSTER").expect("scripts/executors-test sets it");
        Self { schedulers: Path::new(&cluster).join("bin"), ..Self::slow() }
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = support::command();
        let path = std::env::var("PATH").unwrap();
        command.env("FAKE", self.files.path("fake"));
        let own = self.files.path("bin");
        let [own, schedulers] = [own.display(), self.schedulers.display()];
        command.env("PATH", format!("{own}:{schedulers}:{path}"));
        command.env("XDG_CACHE_HOME", self.files.path("cache"));
        command.env("SWIGLU_LAB_LOCK_DIR", self.files.path("locks"));
        command.arg("lab").args(args).args(["--lab", &self.lab]);
        command
    }

    pub(crate) fn swiglu(&self, args: &[&str]) -> Ended {
        end(&mut self.command(args))
    }

    pub(crate) fn run(&self, more: &[&str]) -> Ended {
        self.swiglu(&[&["run", "tiny", "--quick", "--json"], more].concat())
    }

    /// Starts a run and goes on once it has so many results.
    pub(crate) fn start(&self, more: &[&str], results: usize) -> Child {
        let args = [&["run", "tiny", "--quick"], more].concat();
        let mut command = self.command(&args);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        self.wait_for(results);
        child
    }

    /// Waits until a record anywhere has so many results.
    pub(crate) fn wait_for(&self, results: usize) {
        let begun = Instant::now();
        let found = || {
            let records = self.records_below(&self.files.path(""));
            records.iter().map(results_of).max().unwrap_or(0)
        };
        while found() < results {
            assert!(begun.elapsed() < LIMIT, "{} of {results} results", found());
            sleep(Duration::from_millis(20));
        }
    }

    fn records_below(&self, dir: &Path) -> Vec<Value> {
        let mut records = Vec::new();
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                records.extend(self.records_below(&path));
            } else if path.parent().unwrap().parent().unwrap().ends_with("records") {
                // As a document has it.
                let opened = Opened::read(&path);
                records.extend(opened.map(|o| serde_json::to_value(o.record).unwrap()));
            }
        }
        records
    }

    /// The records of the lab itself.
    pub(crate) fn records(&self) -> Vec<Value> {
        self.records_below(&Path::new(&self.lab).join("records"))
    }

    pub(crate) fn fake(&self, name: &str, text: &str) {
        fs::write(self.files.path("fake").join(name), text).unwrap();
    }

    pub(crate) fn submitted(&self) -> Vec<String> {
        let text = fs::read_to_string(self.files.path("fake/submitted")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// A program that is found before all others; where it is.
    pub(crate) fn program(&self, name: &str, text: &str) -> PathBuf {
        fs::create_dir_all(self.files.path("bin")).unwrap();
        let path = self.files.path("bin").join(name);
        fs::write(&path, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&path, mode).unwrap();
        path
    }

    /// The directory of a run's job, where it is staged here.
    pub(crate) fn job(&self, run: &str) -> PathBuf {
        let jobs = fs::read_dir(Path::new(&self.lab).join(".jobs/swiglu-lab/jobs")).unwrap();
        let mut dirs = jobs.map(|entry| entry.unwrap().path());
        let named = |dir: &PathBuf| dir.display().to_string().contains(&format!("tiny-{run}"));
        dirs.find(named).unwrap()
    }
}

pub(crate) fn results_of(record: &Value) -> usize {
    record["results"].as_array().map_or(0, Vec::len)
}

pub(crate) fn signal(child: &Child, name: &str) {
    let ended = Command::new("kill").args(["-s", name, &child.id().to_string()]).status();
    assert!(ended.unwrap().success());
}

pub(crate) fn ended(child: Child) -> Ended {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The record in the document of a run that was done.
#[track_caller]
pub(crate) fn done(ended: &Ended) -> Value {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let document = ended.json();
    assert_eq!(document["record"]["complete"], true, "{ended:?}");
    document
}
