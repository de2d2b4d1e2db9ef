//! Runs that happen elsewhere: with a scheduler that fails in every way, by a command, and, where
//! `scripts/executors-test` has started it, with a real Slurm and an ssh server over loopback.

#![cfg(unix)]
// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

mod cluster;
mod lab;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use lab::{CASES, Lab, done, ended, results_of, signal};

#[test]
fn a_run_as_a_job_says_where_it_was() {
    let lab = Lab::new();
    let document = done(&lab.run(&["--on", "slurm:fake", "--profiles", "ours,plain"]));
    let executor = &document["executor"];
    assert_eq!((&executor["kind"], &executor["job_id"]), (&"slurm".into(), &"101".into()));
    assert_eq!((&executor["partition"], &executor["nodes"][0]), (&"fake".into(), &"n1".into()));
    assert_eq!((&executor["gres"], &executor["resumed"]), (&"gpu:fake:1".into(), &0.into()));
    assert_eq!(document["verdict"]["state"], "not run", "a quick run is no evidence");
    let executed = &document["record"]["executor"];
    assert_eq!((&executed["exclusive"], &executed["other_jobs"][0]), (&true.into(), &"77".into()));
    assert_eq!(executed["place"], "slurm:fake");
    // Nobody named the run: date, place. There is no repository around this lab.
    let run = document["record"]["run_id"].as_str().unwrap();
    assert!(run.starts_with("20") && run.ends_with("-slurm-fake"), "{run}");
    let options = &lab.submitted()[0];
    for part in ["--partition=fake", "--exclusive", "--requeue", "--signal=B:TERM@60"] {
        assert!(options.contains(part), "{part}: {options}");
    }
    // It is done and fetched; once more is no harm, and another run has another name.
    let rows = lab.swiglu(&["status", "--json"]).json();
    assert_eq!(rows.as_array().unwrap().len(), 0, "{rows}");
    let rows = lab.swiglu(&["status", "--all", "--json"]).json();
    assert_eq!(
        (&rows[0]["state"], &rows[0]["id"]),
        (&"ended with exit code 0; fetched".into(), &"101".into())
    );
    let fetch = lab.swiglu(&["fetch", rows[0]["job"].as_str().unwrap(), "--json"]);
    assert_eq!((fetch.code, &fetch.json()[0]["merged"]), (Some(0), &0.into()), "{fetch:?}");
    let again = done(&lab.run(&["--on", "slurm:fake"]));
    assert_eq!(again["record"]["run_id"], format!("{run}-2"));
    assert_eq!(lab.records().len(), 2);
    let none = lab.run(&["--on", "slurm:fake", "--resume"]);
    none.refused_as_json().contains("no incomplete run").then_some(()).unwrap();
    assert!(lab.swiglu(&["fetch", "nothing"]).stderr.contains(run));
}

#[test]
fn a_rejected_job_is_submitted_by_the_same_command_later() {
    let lab = Lab::new();
    lab.fake("reject", "");
    let run = ["--on", "fake", "--run-id", "r1"];
    let message = lab.run(&run).refused_as_json();
    for part in ["submitting the job", "Invalid partition name", "same command"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(lab.records().is_empty());
    fs::remove_file(lab.files.path("fake/reject")).unwrap();
    assert_eq!(done(&lab.run(&run))["executor"]["job_id"], "102");
    // Nothing is submitted for a selection that leaves nothing, or to go on with a run that never was.
    let submitted = lab.submitted().len();
    let nothing = [&run[..2], &["--run-id", "r2", "--profiles", "nobody"]].concat();
    assert!(lab.run(&nothing).refused_as_json().contains("nobody"));
    let never = [&run[..2], &["--run-id", "r2", "--resume"]].concat();
    assert!(lab.run(&never).refused_as_json().contains("no such run"));
    assert_eq!(lab.submitted().len(), submitted);
}

#[test]
fn a_job_that_was_never_submitted_is_forgotten_when_it_is_cancelled() {
    let lab = Lab::new();
    lab.fake("reject", "");
    lab.run(&["--on", "fake", "--run-id", "r1"]).refused_as_json();
    let cancel = lab.swiglu(&["cancel", "tiny-r1"]);
    assert_eq!(cancel.code, Some(0), "{cancel:?}");
    assert!(cancel.stdout.contains("was not submitted"), "{cancel:?}");
    assert_eq!(lab.swiglu(&["fetch"]).code, Some(0));
    assert_eq!(lab.swiglu(&["status", "--json"]).json().as_array().unwrap().len(), 0);
    // What was copied for it goes, but for a bundle that another job is of.
    let there = || {
        let dir = |name: &str| fs::read_dir(format!("{}/.jobs/swiglu-lab/{name}", lab.lab));
        ["bundles", "jobs"].map(|name| dir(name).unwrap().count())
    };
    assert_eq!(there(), [0, 0]);
    fs::remove_file(lab.files.path("fake/reject")).unwrap();
    done(&lab.run(&["--on", "fake", "--run-id", "r2"]));
    lab.fake("reject", "");
    lab.run(&["--on", "fake", "--run-id", "r3"]).refused_as_json();
    assert_eq!(there(), [1, 2]);
    assert_eq!(lab.swiglu(&["cancel", "tiny-r3"]).code, Some(0));
    assert_eq!(there(), [1, 1]);
}

#[test]
fn a_job_that_is_killed_twice_goes_on_twice() {
    let lab = Lab::slow();
    lab.fake("plan", "PREEMPTED 1\nNODE_FAIL 3\n");
    let ended = lab.run(&["--on", "fake"]);
    let document = done(&ended);
    assert_eq!((&document["executor"]["resumed"], lab.submitted().len()), (&2.into(), 3));
    assert_eq!(document["executor"]["job_id"], "103");
    for part in ["(preempted); it goes on as job 102", "(node_fail); it goes on as job 103"] {
        assert!(ended.stderr.contains(part), "{part}: {ended:?}");
    }
    // No finished case was measured again.
    let log = fs::read_to_string(lab.job("").join("log")).unwrap();
    assert!(log.contains("4 cases to measure, 1 cases kept"), "{log}");
    assert!(log.contains("2 cases to measure, 3 cases kept"), "{log}");
}

#[test]
fn a_job_that_gets_nowhere_is_given_up() {
    let lab = Lab::new();
    lab.fake("plan", &"NODE_FAIL 0\n".repeat(9));
    let ended = lab.run(&["--on", "fake", "--run-id", "r1"]);
    let message = ended.refused_as_json();
    for part in ["tiny-r1", "node_fail", "again and again", "0 results", "--run-id r1"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(lab.submitted().len(), 3);
}

#[test]
fn what_is_not_the_jobs_own_is_refused() {
    let lab = Lab::new();
    // A bundle that is not what it was when it was hashed.
    lab.fake(
        "before",
        "for file in \"$1\"/../../bundles/*/lab/experiments/tiny.toml; do echo >>\"$file\"; done\n",
    );
    let run = ["--on", "fake", "--run-id", "r1"];
    let message = lab.run(&run).refused_as_json();
    for part in ["exit code 2", "SHA-256", "tiny.toml", "remove the directory"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(lab.records().is_empty());
    fs::remove_dir_all(Path::new(&lab.lab).join(".jobs")).unwrap();
    fs::remove_file(lab.files.path("fake/before")).unwrap();
    let before = done(&lab.run(&run))["record"].clone();

    // A record of another run, and one that was edited.
    let other = done(&lab.run(&["--on", "fake", "--run-id", "r2"]))["record"].clone();
    let file = |run: &str| {
        let records = fs::read_dir(lab.job(run).join("records")).unwrap();
        let machine = records.map(|entry| entry.unwrap().path()).find(|path| path.is_dir());
        fs::read_dir(machine.unwrap()).unwrap().next().unwrap().unwrap().path()
    };
    let own = fs::read_to_string(file("r1")).unwrap();
    fs::copy(file("r2"), file("r1")).unwrap();
    let fetch = || lab.swiglu(&["fetch", "tiny-r1"]);
    fetch().refused(&["run id", "is r2, expected r1", "not merged"]);
    fs::write(file("r1"), own.replacen("\"turns\":5", "\"turns\":50", 1)).unwrap();
    fetch().refused(&["tiny-r1", "content hash"]);
    // What claims another bundle is not of this job, however it is hashed.
    fs::write(file("r1"), &own).unwrap();
    let state = Path::new(&lab.lab).join(".jobs/tiny-r1/job.json");
    let text = fs::read_to_string(&state).unwrap();
    let bundle = before["executor"]["bundle"].as_str().unwrap();
    fs::write(&state, text.replace(bundle, &"0".repeat(64))).unwrap();
    fetch().refused(&["bundle hash", "not merged"]);
    let mut records = lab.records();
    records.sort_by_key(|record| record["run_id"].to_string());
    assert_eq!(records, [before, other]);
}

#[test]
fn a_full_disk_where_a_bundle_goes_leaves_nothing_there() {
    let lab = Lab::new();
    let tar = Command::new("sh").args(["-c", "command -v tar"]).output().unwrap().stdout;
    let tar = String::from_utf8(tar).unwrap();
    let full = "case \"$*\" in *-xf*) head -c 100 >\"$2/swiglu\"; \
                echo 'tar: swiglu: Cannot write: No space left on device' >&2; exit 2;; esac";
    lab.program("tar", &format!("#!/bin/sh\n{full}\nexec {} \"$@\"\n", tar.trim()));
    let run = ["--on", "fake", "--run-id", "r1"];
    let message = lab.run(&run).refused_as_json();
    for part in ["copying the bundle", "No space left on device", "`stage`"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let bundles = Path::new(&lab.lab).join(".jobs/swiglu-lab/bundles");
    assert_eq!(fs::read_dir(bundles).unwrap().count(), 0);
    assert!(lab.submitted().is_empty());
    fs::remove_file(lab.files.path("bin/tar")).unwrap();
    done(&lab.run(&run));
}

#[test]
fn a_controller_that_does_not_answer_is_no_end_of_a_job() {
    let lab = Lab::slow();
    let child = lab.start(&["--on", "fake", "--run-id", "r1"], 2);
    lab.fake("down", "");
    sleep(Duration::from_secs(1));
    let status = lab.swiglu(&["status", "--json"]).json();
    let state = status[0]["state"].as_str().unwrap();
    assert!(state.contains("cannot be asked for") && state.contains("contact"), "{state}");
    fs::remove_file(lab.files.path("fake/down")).unwrap();
    let ended = ended(child);
    assert_eq!((ended.code, lab.submitted().len()), (Some(0), 1), "{ended:?}");
}

#[test]
fn a_job_outlives_who_waits_for_it() {
    let lab = Lab::slow();
    let run = ["--on", "fake", "--run-id", "r1"];
    let child = lab.start(&run, 2);
    // While one waits, another may not.
    lab.swiglu(&[&["run", "tiny", "--quick"], &run[..]].concat())
        .refused(&["another `swiglu lab run`"]);
    signal(&child, "INT");
    let left = ended(child);
    assert_eq!(left.code, Some(75), "{left:?}");
    for part in ["job 101", "`swiglu lab fetch tiny-r1 --lab '", "swiglu lab cancel tiny-r1"] {
        assert!(left.stderr.contains(part), "{part}: {left:?}");
    }
    // What is finished by now can be had by now.
    let fetch = lab.swiglu(&["fetch", "--json"]);
    assert_eq!((fetch.code, &fetch.json()[0]["merged"]), (Some(75), &1.into()), "{fetch:?}");
    assert!(results_of(&lab.records()[0]) >= 2);

    // Killed, and even without the id that it was told: it is found again, and not submitted again.
    let mut child = lab.start(&run, 4);
    child.kill().unwrap();
    child.wait().unwrap();
    let state = Path::new(&lab.lab).join(".jobs/tiny-r1/job.json");
    let text = fs::read_to_string(&state).unwrap();
    fs::write(&state, text.replace("\"id\": \"101\"", "\"id\": null")).unwrap();
    let document = done(&lab.run(&["--on", "fake", "--resume"]));
    assert_eq!((&document["executor"]["job_id"], lab.submitted().len()), (&"101".into(), 1));
    assert_eq!(lab.records().len(), 1);
}

#[test]
fn a_run_that_is_to_stop_says_so_at_once_and_keeps_its_case() {
    let lab = Lab::slow();
    let child = lab.start(&["--run-id", "r1"], 2);
    signal(&child, "INT");
    let stopped = ended(child);
    assert_eq!(stopped.code, Some(75), "{stopped:?}");
    let said = "stopping after this case, which is kept; a second Ctrl-C stops now";
    let (before, after) = stopped.stderr.split_once(said).unwrap();
    assert!(!before.contains("stopped: ") && after.contains("stopped: --run-id r1"), "{stopped:?}");
    let had = results_of(&lab.records()[0]);
    assert!((2..2 * CASES).contains(&had) && had.is_multiple_of(2), "{had}");
    done(&lab.run(&["--resume"]));
}

#[test]
fn a_cancelled_job_keeps_its_finished_cases() {
    let lab = Lab::slow();
    let child = lab.start(&["--on", "fake"], 2);
    let rows = lab.swiglu(&["status", "--json"]).json();
    assert!(rows[0]["state"].as_str().unwrap().starts_with("runs on n1"), "{rows}");
    let job = rows[0]["job"].as_str().unwrap();
    let cancel = lab.swiglu(&["cancel", job]);
    assert_eq!(cancel.code, Some(0), "{cancel:?}");
    let left = ended(child);
    assert_eq!(left.code, Some(2), "{left:?}");
    assert!(left.stderr.contains("was cancelled"), "{left:?}");
    let had = results_of(&lab.records()[0]);
    assert!((2..2 * CASES).contains(&had), "{had}");
    let document = done(&lab.run(&["--on", "fake", "--resume"]));
    assert_eq!((&document["executor"]["resumed"], lab.records().len()), (&1.into(), 1));
}

#[test]
fn a_command_takes_a_script_and_prints_records() {
    let lab = Lab::slow();
    lab.place("spoils", "kind = \"command\"\ncommand = \"cat - | tr -d x | sh\"");
    lab.place("gentle", "kind = \"command\"\ncommand = \"launcher {script}\"");
    for (on, run) in [("command:sh {script}", "r1"), ("spoils", "r2")] {
        // The second one spoils what it carries, and nothing is believed of it.
        let ended = lab.run(&["--on", on, "--run-id", run]);
        if run == "r2" {
            let message = ended.refused_as_json();
            assert!(
                message.contains("ended with exit code") && message.contains("log"),
                "{message}"
            );
            continue;
        }
        let document = done(&ended);
        assert_eq!(document["executor"]["kind"], "command");
        let job = document["executor"]["job_id"].as_str().unwrap();
        assert!(job.parse::<u32>().is_ok() && ended.stderr.contains(job), "{job}: {ended:?}");
        assert_eq!(document["record"]["executor"]["place"], "command");
    }
    // Whoever ends it gently loses no case that is done: it goes on with what came back.
    let stops = "#!/bin/sh\nsh \"$@\" & child=$!\n[ -e \"$FAKE/stopped\" ] || {\n\
                 while ! grep -q '^[3]/' \"$FAKE\"/../lab/.jobs/swiglu-lab/jobs/tiny-r3-*/log; do\n\
                 sleep 0.02; done\n: >\"$FAKE/stopped\"; kill -s TERM \"$child\"; }\nwait \"$child\"\n";
    lab.program("launcher", stops);
    let ended = lab.run(&["--on", "gentle", "--run-id", "r3"]);
    let document = done(&ended);
    assert_eq!(document["executor"]["resumed"], 1, "{ended:?}");
    assert!(ended.stderr.contains("stopped early; it goes on"), "{ended:?}");
    assert!(lab.run(&["--on", "command:sh"]).refused_as_json().contains("{script}"));
    assert!(
        lab.run(&["--on", "ssh:-oProxyCommand=x"]).refused_as_json().contains("begin with `-`")
    );
}

#[test]
fn a_run_here_is_ended_after_its_case_and_goes_on() {
    let lab = Lab::slow();
    let child = lab.start(&[], 2);
    signal(&child, "TERM");
    let stopped = ended(child);
    assert_eq!(stopped.code, Some(75), "{stopped:?}");
    assert!(stopped.stderr.contains("--resume goes on"), "{stopped:?}");
    let had = results_of(&lab.records()[0]);
    assert!((2..2 * CASES).contains(&had) && had.is_multiple_of(2), "{had}");
    let document = done(&lab.run(&["--resume"]));
    assert_eq!((&document["executor"]["kind"], lab.records().len()), (&"local".into(), 1));
    assert_eq!(document["executor"]["resumed"], 1);
    let run = document["record"]["run_id"].as_str().unwrap();
    assert!(run.ends_with("-local"), "{run}");
}

#[test]
fn places_of_a_lab_have_names() {
    let lab = Lab::new();
    let file = Path::new(&lab.lab).join("executors.toml");
    let name = |text: &str| fs::write(&file, text).unwrap();
    name("");
    lab.place(
        "near",
        "kind = \"slurm\"\npartition = \"p\"\ntime = \"0:10\"\noptions = [\"--qos=low\"]\n\
         exclusive = false\ncontainer = [\"env\", \"IN=it's\"]",
    );
    let document = done(&lab.run(&["--on", "near", "--run-id", "r1"]));
    assert_eq!(document["record"]["executor"]["place"], "near");
    let options = &lab.submitted()[0];
    for part in ["--partition=p", "--time=0:10", "--qos=low", "--nodes=1"] {
        assert!(options.contains(part), "{part}: {options}");
    }
    assert!(!options.contains("--exclusive"), "{options}");
    assert!(lab.run(&["--on", "far"]).refused_as_json().contains("near"));
    name("[executor.near]\nkind = \"slurm\"\ngers = \"gpu\"\n");
    assert!(lab.run(&["--on", "near"]).refused_as_json().contains("executors.toml:3:1"));
    for (bad, says) in [("kind = \"slurm\"\nhost = \"-x\"", "`-x`"), ("host = \"a\"", "kind")] {
        name(&format!("[executor.near]\n{bad}\n"));
        let message = lab.run(&["--on", "near"]).refused_as_json();
        assert!(message.contains("executors.toml:1:1") && message.contains(says), "{message}");
    }
}
