//! The same with a real Slurm and a real ssh server. `scripts/executors-test` starts both on this
//! machine, over loopback, and then runs these.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use crate::lab::{CASES, Lab, done, ended, results_of, signal};

const NEEDED: &str = "needs Slurm and ssh over loopback: scripts/executors-test";

/// A command of Slurm that must succeed.
#[track_caller]
fn slurm(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The lab's only job that is not done.
fn open_job(lab: &Lab) -> Value {
    let rows = lab.swiglu(&["status", "--json"]).json();
    assert_eq!(rows.as_array().map(Vec::len), Some(1), "{rows}");
    rows[0].clone()
}

#[test]
#[ignore = "needs Slurm and ssh over loopback: scripts/executors-test"]
fn an_experiment_of_this_lab_runs_on_slurm() {
    let lab = Lab::on_cluster();
    let definition = "lab/experiments/cpu-read-ceiling.toml";
    let definition = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(definition);
    fs::copy(definition, Path::new(&lab.lab).join("experiments/cpu-read-ceiling.toml")).unwrap();
    let run = ["run", "cpu-read-ceiling", "--on", "slurm", "--quick", "--json"];
    let ended = lab.swiglu(&[&run[..], &["--cases", "bf16 hidden=896"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let executor = &ended.json()["executor"];
    assert_eq!((&executor["kind"], &executor["partition"]), (&"slurm".into(), &"all".into()));
    let node = slurm("sinfo", &["-h", "-p", "all", "-o", "%n"]);
    assert_eq!(executor["nodes"], Value::from(vec![node.trim()]), "{executor}");
    let id: u32 = executor["job_id"].as_str().unwrap().parse().unwrap();
    assert!(id > 0 && lab.records().len() == 1);
}

/// A signal as before a time limit, a start anew by whoever administers, a kill: each time it goes on.
#[test]
#[ignore = "needs Slurm and ssh over loopback: scripts/executors-test"]
fn a_job_of_slurm_goes_on_after_whatever_ends_it() {
    let lab = Lab::on_cluster();
    let child = lab.start(&["--on", "slurm:all", "--run-id", "r1"], 2);
    let id = open_job(&lab)["id"].as_str().unwrap().to_owned();
    slurm("scancel", &["--signal=TERM", "--batch", &id]);
    lab.wait_for(6);
    // Slurm has started the same job again.
    assert_eq!(open_job(&lab)["id"], id.as_str());
    slurm("scancel", &["--signal=KILL", "--batch", &id]);
    let ended = ended(child);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("was killed by signal 9; it goes on as job"), "{ended:?}");
    let log = fs::read_to_string(lab.job("r1").join("log")).unwrap();
    assert!(log.contains("stopped: --run-id r1 --resume goes on"), "{log}");
    let record = &lab.records()[0];
    assert_eq!((results_of(record), &record["executor"]["resumed"]), (2 * CASES, &2.into()));
    assert_ne!(record["executor"]["job_id"], id.as_str());
}

#[test]
#[ignore = "needs Slurm and ssh over loopback: scripts/executors-test"]
fn a_job_that_waits_says_why_and_can_be_left_and_cancelled() {
    let lab = Lab::on_cluster();
    let child = lab.start(&["--on", "slurm:down", "--run-id", "r1"], 0);
    let state = || lab.swiglu(&["status", "--json"]).json()[0]["state"].to_string();
    while !state().contains("PartitionDown") {
        sleep(Duration::from_millis(100));
    }
    signal(&child, "INT");
    assert_eq!(ended(child).code, Some(75));
    assert_eq!(lab.swiglu(&["cancel", "tiny-r1"]).code, Some(0));
    let fetch = lab.swiglu(&["fetch", "tiny-r1", "--json"]);
    assert_eq!((fetch.code, &fetch.json()[0]["state"]), (Some(0), &"was cancelled".into()));
    let refused = lab.run(&["--on", "slurm:none"]).refused_as_json();
    assert!(refused.contains("invalid partition"), "{refused}");
    let ready = lab.swiglu(&["ready", "--on", "slurm:none", "--json"]);
    assert_eq!(ready.code, Some(1), "{ready:?}");
    let partitions = ready.json()["checks"].to_string();
    assert!(partitions.contains("all* up"), "{partitions}");
}

/// What the far side of the cluster has of a job: it shares no directory with the lab.
fn far() -> std::path::PathBuf {
    Path::new(&std::env::var("SWIGLU_TEST_CLUSTER").expect(NEEDED)).join("far/swiglu-lab")
}

#[test]
#[ignore = "needs Slurm and ssh over loopback: scripts/executors-test"]
fn a_workstation_by_ssh_needs_no_more_than_a_shell_and_tar() {
    let lab = Lab::on_cluster();
    let first = done(&lab.run(&["--on", "ssh:loopback", "--run-id", "r1"]));
    assert_eq!(first["record"]["executor"]["host"], "loopback");
    let bundle = |document: &Value| {
        far().join("bundles").join(document["record"]["executor"]["bundle"].as_str().unwrap())
    };
    assert!(bundle(&first).join("swiglu").exists());
    // Another bundle, where there is no rsync, and a job that is killed.
    lab.program("rsync", "#!/bin/sh\nexit 127\n");
    fs::write(Path::new(&lab.lab).join("experiments/more.toml"), "schema = 1\n").unwrap();
    let child = lab.start(&["--on", "ssh:loopback", "--run-id", "r2"], 0);
    let log = || {
        let job = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().path();
        let mut jobs = fs::read_dir(far().join("jobs")).unwrap().map(job);
        let ours = |path: &std::path::PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with("tiny-r2-")
                && fs::read_to_string(path.join("log")).unwrap_or_default().contains("2/5")
        };
        jobs.find(ours)
    };
    let job = loop {
        match log() {
            Some(job) => break job,
            None => sleep(Duration::from_millis(20)),
        }
    };
    let id = fs::read_to_string(job.join("id")).unwrap();
    slurm("kill", &["-s", "KILL", "--", &format!("-{}", id.trim())]);
    let ended = ended(child);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("was killed before it could say"), "{ended:?}");
    let resumed = |record: &Value| record["executor"]["resumed"].clone();
    let again = lab.records().into_iter().find(|record| record["run_id"] == "r2").unwrap();
    assert_eq!(resumed(&again), 1, "{again}");
    assert_ne!(again["executor"]["bundle"], first["record"]["executor"]["bundle"]);
    let nowhere = lab.run(&["--on", "ssh:nowhere.invalid"]).refused_as_json();
    assert!(nowhere.contains("nowhere.invalid: ssh failed"), "{nowhere}");
    let ready = lab.swiglu(&["ready", "--on", "ssh:loopback", "--json"]);
    assert_eq!(ready.code, Some(0), "{ready:?}");
}

#[test]
#[ignore = "needs Slurm and ssh over loopback: scripts/executors-test"]
fn slurm_is_reached_by_ssh() {
    let lab = Lab::on_cluster();
    let file = "[executor.far]\nkind = \"slurm\"\nhost = \"loopback\"\npartition = \"all\"\n";
    fs::write(Path::new(&lab.lab).join("executors.toml"), file).unwrap();
    let document = done(&lab.run(&["--on", "far", "--run-id", "r1"]));
    let executed = &document["record"]["executor"];
    assert_eq!((&executed["kind"], &executed["place"]), (&"slurm".into(), &"far".into()));
    assert!(executed["job_id"].is_string() && executed["exclusive"] == true, "{executed}");
    assert!(far().join("jobs").read_dir().unwrap().count() > 0);
}

/// A file system that holds 4 MB.
struct Small<'a>(&'a Path);

impl<'a> Small<'a> {
    fn mount(path: &'a Path) -> Self {
        fs::create_dir_all(path).unwrap();
        slurm("mount", &["-t", "tmpfs", "-o", "size=4m", "small", path.to_str().unwrap()]);
        Self(path)
    }
}

impl Drop for Small<'_> {
    fn drop(&mut self) {
        let ended = Command::new("umount").arg(self.0).status();
        assert!(ended.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
#[ignore = "needs root to mount a small file system: scripts/executors-test"]
fn a_full_disk_spoils_nothing_that_was_there() {
    let lab = Lab::on_cluster();
    let (stage, records) = (lab.files.path("stage"), Path::new(&lab.lab).join("records"));
    let small = Small::mount(&stage);
    let file = format!("[executor.near]\nkind = \"slurm\"\nstage = {:?}\n", small.0);
    fs::write(Path::new(&lab.lab).join("executors.toml"), file).unwrap();
    let full = lab.run(&["--on", "near", "--run-id", "r1"]).refused_as_json();
    assert!(full.contains("copying the bundle") && full.contains("No space left"), "{full}");
    assert_eq!(stage.join("swiglu-lab/bundles").read_dir().unwrap().count(), 0);

    // Records that come back to a full disk: the run's first part is there, and stays as it is.
    let small = Small::mount(&records);
    let child = lab.start(&["--on", "slurm", "--run-id", "r1"], 2);
    signal(&child, "INT");
    assert_eq!(ended(child).code, Some(75));
    assert_eq!(lab.swiglu(&["fetch"]).code, Some(75));
    let before = lab.records();
    assert!(!before.is_empty());
    lab.wait_for(2 * CASES);
    let fill = small.0.join("fill");
    let mut zeros = Command::new("sh");
    zeros.args(["-c", "cat /dev/zero >\"$1\"", "sh"]).arg(&fill).output().unwrap();
    let fetch = lab.swiglu(&["fetch", "tiny-r1"]);
    fetch.refused(&["No space left"]);
    assert_eq!(lab.records(), before);
    fs::remove_file(fill).unwrap();
    while lab.swiglu(&["fetch", "tiny-r1"]).code != Some(0) {
        sleep(Duration::from_millis(100));
    }
    assert_eq!(results_of(&lab.records()[0]), 2 * CASES);
}
