//! `swiglu lab` as its users call it: lists, runs with this program as the peer, refusals.

// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::Path;

use serde_json::Value;
use support::{definition, end, lab, swiglu};

fn tiny() -> String {
    let profiles = [
        ("ours", "swiglu", "ours", "options = { path = \"fused\" }"),
        ("nobody", "nowhere", "baseline", ""),
    ];
    let cases = "[[cases]]\nop = \"gated-linear\"\nm = [1, 5]\n\
                 shapes = [{ hidden = 64, intermediate = 96 }]\ndtype = \"f32\"\nheat = \"hot\"\n";
    definition("tiny", "cpu", &profiles, cases)
}

#[test]
fn an_experiment_is_run_kept_and_listed() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path(), "tiny", &tiny());
    let places = ["--lab", &lab];
    let machine = ["--machine", "here", "--run-id", "r1", "--quick"];
    let run = |more: &[&str]| {
        swiglu(&[&["lab", "run", "tiny"], &places[..], &machine[..], more].concat())
    };
    let first = run(&["--json"]);
    assert_eq!(first.code, Some(0), "{first:?}");
    let record = first.json()["record"].clone();
    assert_eq!(record["complete"], true);
    // Nobody asked for rates, which are what ceilings are measured for.
    assert_eq!(record["ceilings"], Value::Null);
    let status = |i: usize| record["results"][i]["status"].as_str().unwrap().to_owned();
    assert_eq!([status(0), status(1)], ["ok", "not available"]);
    assert!(first.stderr.contains("2 cases to measure"), "{first:?}");
    let again = run(&[]);
    assert!(again.stderr.contains("0 cases to measure, 2 cases kept"), "{again:?}");
    assert!(again.stdout.contains("quick: not evidence"), "{again:?}");
    let list = swiglu(&[&["lab", "list", "--json"], &places[..]].concat());
    assert_eq!(list.code, Some(0), "{list:?}");
    let row = &list.json()[0];
    assert_eq!((&row["id"], &row["verdict"]), (&Value::from("tiny"), &Value::from("not run")));
    // This lab is in no repository, which could tell how old the record is.
    assert_eq!((&row["headline"], &row["age_commits"]), (&Value::Null, &Value::Null));
    let text = swiglu(&[&["lab", "list"], &places[..]].concat()).stdout;
    assert!(text.contains("quick: not evidence") && text.lines().count() == 2, "{text}");
    let show = |more: &[&str]| swiglu(&[&["lab", "show", "tiny"], &places[..], more].concat());
    let text = show(&[]).stdout;
    for part in ["not run: quick", "claim     It is.", "age not known", "All else."] {
        assert!(text.contains(part), "{part}: {text}");
    }

    // One under another name is named too, and counts for nothing.
    let records = show(&["--json"]).json()["records"].clone();
    assert_eq!(records.as_array().unwrap().len(), 1);
    let path = records[0]["file"].as_str().unwrap();
    let other = Path::new(path).with_file_name("copy.json");
    fs::copy(path, &other).unwrap();
    let list = swiglu(&[&["lab", "list", "--json"], &places[..]].concat());
    assert_eq!(list.code, Some(0), "{list:?}");
    for part in ["warning: ", "copy.json", path, "a copy"] {
        assert!(list.stderr.contains(part), "{part}: {list:?}");
    }
    let out = dir.path().join("report");
    let report = ["lab", "report", "--out", out.to_str().unwrap()];
    let report = swiglu(&[&report, &places[..]].concat());
    assert_eq!(report.code, Some(0), "{report:?}");
    assert!(
        report.stderr.contains("warning: ") && report.stderr.contains("copy.json"),
        "{report:?}"
    );
    fs::remove_file(other).unwrap();

    // A record that was edited is named, and does not count.
    let text = fs::read_to_string(path).unwrap().replacen("\"turns\":5", "\"turns\":50", 1);
    fs::write(path, text).unwrap();
    let list = swiglu(&[&["lab", "list"], &places[..]].concat());
    assert_eq!(list.code, Some(2), "{list:?}");
    assert!(list.stderr.contains("content hash") && list.stdout.contains("tiny"), "{list:?}");
    show(&[]).refused(&["content hash", "measure again"]);
    run(&[]).refused(&["content hash", "measure again"]);
}

#[test]
fn logs_that_say_nothing_are_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let temporary = dir.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let broken = tiny().replacen("path = \"fused\"", "way = \"none\"", 1);
    for (id, definition, code) in [("tiny", tiny(), 0), ("broken", broken, 1)] {
        let lab = lab(dir.path(), id, &definition.replacen("\"tiny\"", &format!("{id:?}"), 1));
        let mut run = support::command();
        run.env("TMPDIR", &temporary).args(["lab", "run", id, "--lab", &lab, "--run-id", "r1"]);
        let ended = end(run.args(["--quick", "--machine", "here"]));
        assert_eq!(ended.code, Some(code), "{ended:?}");
        // Our own peer says what is wrong in its replies.
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "{ended:?}");
        assert!(!ended.stderr.contains("logs of the peers"), "{ended:?}");
    }
    // A measurement without a record leaves nothing at all.
    fs::remove_dir_all(&temporary).unwrap();
    fs::create_dir(&temporary).unwrap();
    let mut profile = support::command();
    let size = ["--m", "2", "--hidden", "16", "--intermediate", "16", "--hot"];
    profile
        .env("TMPDIR", &temporary)
        .args(["explain", "--measure", "--seconds", "0.01"])
        .args(size);
    let ended = end(&mut profile);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
}

/// Times of a program that is not optimised are refused where they would be taken, and only there.
#[test]
fn a_program_that_is_not_optimised_measures_others_alone() {
    if !cfg!(debug_assertions) {
        return swiglu_testing::not_run("this program is optimised");
    }
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path(), "tiny", &tiny());
    let run = |run: &str, more: &[&str]| {
        let places = ["--lab", &lab, "--machine", "here", "--run-id", run];
        swiglu(&[&["lab", "run", "tiny"], &places[..], more].concat())
    };
    run("r1", &[]).refused(&["not optimised", "--release", "--quick"]);
    run("r1", &["--profiles", "ours"]).refused(&["not optimised"]);
    // Nobody is there to be measured, which is another matter.
    let others = run("r1", &["--profiles", "nobody"]);
    assert_eq!(others.code, Some(1), "{others:?}");
    assert!(others.stdout.contains("not available"), "{others:?}");
}

#[test]
fn an_experiment_without_its_device_leaves_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path(), "tiny", &tiny().replacen("\"cpu\"", "\"cuda\"", 1));
    for quick in [&["--quick"][..], &[]] {
        let run = ["lab", "run", "tiny", "--lab", &lab, "--run-id", "r1", "--profiles", "nobody"];
        swiglu(&[&run, quick].concat()).refused(&["tiny", "CUDA device", "Nothing was recorded"]);
    }
    assert!(!Path::new(&lab).join("records").exists());
}

#[test]
fn broken_definitions_and_names_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let lab = lab(dir.path(), "tiny", &tiny().replacen("\"hot\"", "\"warm\"", 1));
    let run = |id: &str, run: &str| {
        swiglu(&["lab", "run", id, "--lab", &lab, "--run-id", run, "--quick"])
    };
    run("tiny", "r1").refused(&["tiny.toml:22:8", "`hot` or `cold`"]);
    run("other", "r1").refused(&["experiment `other`: expected one of", "tiny"]);
    fs::write(Path::new(&lab).join("experiments/tiny.toml"), tiny()).unwrap();
    // One that is no text hides none of the others.
    let no_text = Path::new(&lab).join("experiments/no-text.toml");
    fs::write(&no_text, [0xff]).unwrap();
    let listed = swiglu(&["lab", "list", "--lab", &lab]);
    assert!(listed.stdout.contains("tiny"), "{listed:?}");
    assert!(listed.code == Some(2) && listed.stderr.contains("no-text.toml:1:1"), "{listed:?}");
    fs::remove_file(no_text).unwrap();
    run("tiny", "../r1").refused(&["run id `../r1`"]);
    let as_json = ["lab", "run", "other", "--lab", &lab, "--run-id", "r1", "--json"];
    assert!(swiglu(&as_json).refused_as_json().contains("experiment `other`: expected one of"));
    swiglu(&["lab", "list", "--lab", "/nonexistent"]).refused(&["experiments"]);
    for verb in [&["list"][..], &["gate", "tiny"], &["report", "--out", "/nonexistent/site"]] {
        let places = ["--lab", &lab, "--records", "/nonexistent"];
        swiglu(&[&["lab"], verb, &places[..]].concat())
            .refused(&["--records /nonexistent", "directory with records"]);
    }
    let tolerance = ["lab", "gate", "tiny", "--lab", &lab, "--tolerance", "2"];
    assert_eq!(swiglu(&tolerance).code, Some(2));
    // Where there is no lab above, it says how to name one.
    let mut nowhere = support::command();
    end(nowhere.current_dir("/").args(["lab", "list"])).refused(&["--lab DIR"]);
}

#[test]
fn readiness_names_what_is_missing_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let definition = tiny();
    let lab = lab(dir.path(), "tiny", &definition);
    let ready =
        |id: &str, more: &[&str]| swiglu(&[&["lab", "ready", id, "--lab", &lab], more].concat());
    let missing = ready("tiny", &["--json"]);
    assert_eq!(missing.code, Some(1), "{missing:?}");
    let document = missing.json();
    let checks = document["experiments"][0]["checks"].as_array().unwrap().clone();
    let of = |what: &str| checks.iter().find(|c| c["what"] == what).unwrap().clone();
    assert_eq!(
        (&of("device cpu")["ok"], &of("peer swiglu on cpu")["ok"]),
        (&true.into(), &true.into())
    );
    let nobody = of("peer nowhere on cpu");
    assert_eq!((&document["ready"], &nobody["ok"]), (&false.into(), &false.into()));
    assert!(nobody["advice"].as_str().unwrap().contains("README"), "{nobody}");
    let text = ready("tiny", &[]).stdout;
    assert!(
        text.contains("peer nowhere on cpu  no") && text.contains("0 of 1 experiments"),
        "{text}"
    );
    ready("other", &[]).refused(&["experiment `other`: expected one of", "tiny"]);
}

/// Runs git in a directory.
fn git(dir: &Path, arguments: &[&str]) {
    let mut command = std::process::Command::new("git");
    command.args(["-c", "user.name=n", "-c", "user.email=e@x", "-C"]).arg(dir).args(arguments);
    assert!(command.output().unwrap().status.success(), "{arguments:?}");
}

#[test]
fn a_renamed_file_and_a_moved_function_change_no_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let lab = dir.path().join("lab");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab");
    for (from, to) in [
        ("experiments/elementwise-memory.toml", "experiments/elementwise-memory.toml"),
        ("records/nvidia-h200", "records/nvidia-h200"),
    ] {
        let (from, to) = (own.join(from), lab.join(to));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        if from.is_file() {
            fs::copy(from, to).unwrap();
            continue;
        }
        fs::create_dir_all(&to).unwrap();
        for file in fs::read_dir(from).unwrap().map(|f| f.unwrap().path()) {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            if name.contains("-elementwise-memory-") {
                fs::copy(&file, to.join(name)).unwrap();
            }
        }
    }
    let kernels = dir.path().join("crates/swiglu-cuda/src");
    fs::create_dir_all(&kernels).unwrap();
    fs::write(kernels.join("plan.rs"), "fn plan() {}\nfn cost() {}\n").unwrap();
    git(dir.path(), &["init", "-q"]);
    git(dir.path(), &["add", "-A"]);
    git(dir.path(), &["commit", "-qm", "one"]);
    let listed = || {
        let list = swiglu(&["lab", "list", "--json", "--lab", lab.to_str().unwrap()]);
        assert_eq!(list.code, Some(0), "{list:?}");
        let row = list.json()[0].clone();
        (row["verdict"].clone(), row["headline"].clone(), row["undecided"].clone())
    };
    let before = listed();
    assert_eq!(before.0, "refuted");
    fs::remove_file(kernels.join("plan.rs")).unwrap();
    fs::write(kernels.join("algorithm.rs"), "fn plan() {}\n").unwrap();
    fs::write(kernels.join("cost.rs"), "fn cost() {}\n").unwrap();
    assert_eq!(listed(), before);
    git(dir.path(), &["add", "-A"]);
    git(dir.path(), &["commit", "-qm", "two"]);
    assert_eq!(listed(), before);
}
