use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use swiglu_lab::LabError;
use swiglu_lab::record::{Locks, Measured, Opened, Record, Store, canonical, content_hash};

use super::made_up::{experiment, record};

/// How the name of a file begins that is being written, and what stands behind its run in it.
const TEMPORARY: &str = ".unfinished-";
const UNFINISHED_END: &str = "-part-";

fn some() -> Record {
    record(&experiment(), 0.01, |_, _| Ok(1.0))
}

fn written(store: &Store) -> PathBuf {
    let mut record = some();
    let path = store.path_of(&record);
    store.write(&mut record, &path).unwrap();
    path
}

#[test]
fn records_come_back_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let path = written(&store);
    assert!(path.ends_with("here/2026-01-01-made-up-r1.json"));
    let (records, refused) = store.of_experiment("made-up").unwrap();
    assert!(refused.is_empty(), "{refused:?}");
    let back = &records[0].record;
    assert_eq!(Record { content_hash: String::new(), ..back.clone() }, some());
    assert_eq!(store.find("here", "made-up", "r1").unwrap().unwrap().path, path);
    assert_eq!(store.find("here", "made-up", "1").unwrap(), None);
    assert_eq!(store.find("there", "made-up", "r1").unwrap(), None);
    // A run id that begins with the date has it once in the file's name.
    let run = "2026-01-01-abc-local";
    let mut dated = Record { run_id: run.into(), ..some() };
    let path = store.path_of(&dated);
    assert!(path.ends_with("here/2026-01-01-made-up-abc-local.json"), "{path:?}");
    store.write(&mut dated, &path).unwrap();
    assert_eq!(store.find("here", "made-up", run).unwrap().unwrap().path, path);
    assert_eq!(store.find("here", "made-up", "abc-local").unwrap(), None);
    fs::remove_file(path).unwrap();
    // `made` has no run `up-r1`.
    assert!(store.of_experiment("made").unwrap().0.is_empty());
    assert!(Store::new(dir.path().join("none")).of_experiment("made-up").unwrap().0.is_empty());
}

#[test]
fn a_file_that_cannot_be_believed_is_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let path = written(&store);
    let good = fs::read_to_string(&path).unwrap();
    let cut = &good[..good.len() / 2];
    let cases = [
        (cut.to_owned(), "not JSON", "measure again"),
        (String::new(), "not JSON", "measure again"),
        ("\u{0}\u{1}garbage".into(), "not JSON", "measure again"),
        (good.replacen("\"schema\": 3", "\"schema\": 1", 1), "schema 1", "the version"),
        (good.replacen("\"schema\": 3", "\"scheme\": 3", 1), "no `schema`", "move it"),
        (good.replacen("\"run_id\": \"r1\"", "\"run_id\": \"r2\"", 1), "hash", "edited"),
        (good.replacen("\"content_hash\": \"", "\"content_hash\": \"0", 1), "hash", "edited"),
        ("[1, 2]".into(), "no `schema`", "move it"),
    ];
    for (text, why, advice) in cases {
        assert_ne!(text, good);
        fs::write(&path, &text).unwrap();
        let message = Opened::read(&path).unwrap_err().to_string();
        assert!(message.contains(why) && message.contains(advice), "{message}");
        let (records, refused) = store.of_experiment("made-up").unwrap();
        assert!(records.is_empty() && refused.len() == 1);
        assert!(store.find("here", "made-up", "r1").is_err());
    }
    // Right by its hash, but not a record.
    let mut value: Value = serde_json::from_str(&good).unwrap();
    value["rows"] = serde_json::json!("none");
    value["content_hash"] = content_hash(&value).into();
    fs::write(&path, value.to_string()).unwrap();
    let message = Opened::read(&path).unwrap_err().to_string();
    assert!(message.contains("not a record of schema 3"), "{message}");
    assert!(Opened::read(&dir.path().join("none.json")).unwrap_err().to_string().contains("read"));
}

/// A user's locks, in a place that no record goes to.
fn user(dir: &Path) -> Locks {
    Locks::new(dir.join("locks"))
}

#[test]
fn one_run_at_a_time_and_leftovers_are_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let (store, user) = (Store::new(dir.path()), user(dir.path()));
    fs::create_dir_all(dir.path().join("here")).unwrap();
    let leftover = dir.path().join("here").join(format!("{TEMPORARY}abc"));
    fs::write(&leftover, "half a rec").unwrap();
    let lock = store.lock(&user, Measured::Machine, "here", "run-one").unwrap();
    assert!(!leftover.exists());
    let busy = store.lock(&user, Measured::Machine, "here", "run-two").unwrap_err().to_string();
    assert!(busy.contains("run-one") && busy.contains("wait"), "{busy}");
    drop(lock);
    store.lock(&user, Measured::Machine, "here", "run-two").unwrap();
}

#[test]
fn a_users_locks_may_lie_beside_the_records() {
    let dir = tempfile::tempdir().unwrap();
    let (store, user) = (Store::new(dir.path()), Locks::new(dir.path().join(".")));
    for measured in [Measured::Machine, Measured::Device("GPU-1")] {
        let lock = store.lock(&user, measured, "here", "run-one").unwrap();
        let busy = store.lock(&user, measured, "here", "run-two").unwrap_err().to_string();
        assert!(busy.contains("run-one"), "{busy}");
        drop(lock);
    }
}

#[test]
fn accelerators_are_measured_beside_each_other_and_the_machine_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (store, user) = (Store::new(dir.path()), user(dir.path()));
    let (machine, first, second) =
        (Measured::Machine, Measured::Device("GPU-1/a"), Measured::Device("GPU-2"));
    let one = store.lock(&user, first, "gpu", "one").unwrap();
    let two = store.lock(&user, second, "gpu", "two").unwrap();
    let busy = |measured, machine: &str, run: &str| match store.lock(&user, measured, machine, run)
    {
        Err(LabError::Busy { holder }) => holder,
        other => panic!("{other:?}"),
    };
    let holder = busy(first, "gpu", "three");
    assert!(holder.contains("one, process") && !holder.contains("two"), "{holder}");
    // The processor's records have another name for the same machine.
    let holder = busy(machine, "cpu", "four");
    assert!(holder.contains("one, process") && holder.contains("two, process"), "{holder}");
    // One name is one record, whatever it is measured on.
    assert!(busy(Measured::Device("GPU-3"), "gpu", "two").contains("two, process"));
    // What others are writing now stays; what this run left goes.
    let write = |run: &str| {
        let name = format!("{TEMPORARY}2026-11-20-{run}{UNFINISHED_END}xyz");
        let path = dir.path().join("gpu").join(name);
        fs::write(&path, "half a rec").unwrap();
        path
    };
    let (theirs, ours) = (write("one"), write("three"));
    let three = store.lock(&user, Measured::Device("GPU-3"), "gpu", "three").unwrap();
    assert!(theirs.exists() && !ours.exists());
    drop((one, two, three));
    let whole = store.lock(&user, machine, "cpu", "four").unwrap();
    assert!(busy(first, "gpu", "one").contains("four, process"));
    drop(whole);
    store.lock(&user, first, "gpu", "one").unwrap();
}

/// What is measured for a gate or at the prompt lies in a place of its own, and excludes others all the same.
#[test]
fn records_in_different_places_do_not_make_two_measure_one_accelerator() {
    let dir = tempfile::tempdir().unwrap();
    let user = user(dir.path());
    let [records, one, two] =
        ["records", "one", "two"].map(|name| Store::new(dir.path().join(name)));
    let (first, second) = (Measured::Device("GPU-1"), Measured::Device("GPU-2"));
    let gate = one.lock(&user, first, "gpu", "gate of x").unwrap();
    // The same question on another accelerator: nothing is shared but the name.
    let other = two.lock(&user, second, "gpu", "gate of x").unwrap();
    for (measured, holders) in [(first, 1), (second, 1), (Measured::Machine, 2)] {
        match records.lock(&user, measured, "gpu", "a run") {
            Err(LabError::Busy { holder }) => {
                assert_eq!(holder.matches("gate of x, process").count(), holders, "{holder}");
            }
            other => panic!("{other:?}"),
        }
    }
    drop((gate, other));
    records.lock(&user, Measured::Machine, "gpu", "a run").unwrap();
    // Another user has other locks, and yet does not write among the records of a run.
    let run = records.lock(&user, first, "gpu", "a run").unwrap();
    let theirs = Locks::new(dir.path().join("theirs"));
    assert!(matches!(records.lock(&theirs, first, "gpu", "b"), Err(LabError::Busy { .. })));
    drop(run);
    records.lock(&theirs, first, "gpu", "b").unwrap();
}

#[test]
fn a_place_that_cannot_be_written_is_an_error_and_the_old_file_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let path = written(&store);
    let good = fs::read(&path).unwrap();
    // A directory in the place of the file, and a file in the place of the directory: neither can
    // be written, whoever asks.
    let taken = dir.path().join("here/taken.json");
    fs::create_dir_all(taken.join("x")).unwrap();
    assert!(matches!(store.write(&mut some(), &taken), Err(LabError::Io { .. })));
    assert!(matches!(store.write(&mut some(), &path.join("r.json")), Err(LabError::Io { .. })));
    let file_as_root = Store::new(&path);
    assert!(matches!(
        file_as_root.lock(&user(dir.path()), Measured::Machine, "here", "run"),
        Err(LabError::Io { .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), good);
    let files = fs::read_dir(dir.path().join("here")).unwrap();
    let names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
    let unfinished = |name: &std::ffi::OsString| name.to_string_lossy().starts_with(TEMPORARY);
    assert!(!names.iter().any(unfinished), "{names:?}");
}

#[test]
fn records_that_count_for_nothing_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let path = written(&store);
    let text = fs::read_to_string(&path).unwrap();
    let here = dir.path().join("here");
    for name in ["copy.json", "2026-01-01-made-up-r1.json.bak"] {
        fs::write(here.join(name), &text).unwrap();
    }
    fs::write(dir.path().join("2026-01-01-made-up-r1.json"), &text).unwrap();
    fs::write(here.join("broken.json"), "{").unwrap();
    // Something else, and what a killed run left.
    for (name, text) in [("notes.txt", "hello"), ("bench.json", "{}"), (".unfinished-a", &text)] {
        fs::write(here.join(name), text).unwrap();
    }
    let strays = |counted: &[&PathBuf], experiment: &str| -> Vec<String> {
        let counted = counted.iter().map(|path| (*path).clone()).collect();
        let strays = store.strays(&counted, &[experiment.into()]).unwrap();
        strays.iter().map(LabError::to_string).collect()
    };
    let found = strays(&[&path], "made-up");
    assert_eq!(found.len(), 4, "{found:?}");
    let said = |name: &str, why: &str| {
        assert!(found.iter().any(|s| s.contains(name) && s.contains(why)), "{name}: {found:?}");
    };
    said("copy.json", "would count as");
    said("here/2026-01-01-made-up-r1.json.bak", "would count as");
    said("broken.json", "not JSON");
    assert_eq!(strays(&[], "other").iter().filter(|s| s.contains("no experiment")).count(), 4);
}

#[test]
fn a_record_that_another_program_changed_is_not_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let path = written(&store);
    let [mut ours, mut theirs] = [(); 2].map(|()| Opened::read(&path).unwrap().record);
    theirs.complete = false;
    store.write(&mut theirs, &path).unwrap();
    let refused = store.write(&mut ours, &path).unwrap_err().to_string();
    assert!(refused.contains("another program") && refused.contains("nothing was written"));
    assert_eq!(Opened::read(&path).unwrap().record, theirs);
    // Who wrote last goes on, one write after the other.
    store.write(&mut theirs, &path).unwrap();
    assert!(store.write(&mut some(), &path).unwrap_err().to_string().contains("another program"));
}

#[test]
fn order_and_blanks_do_not_matter() {
    let a: Value = serde_json::from_str(r#"{"b": [1, 2.50], "a": "x\n"}"#).unwrap();
    assert_eq!(canonical(&a), r#"{"a":"x\n","b":[1,2.5]}"#);
    let b = json!({"a": "x\n", "b": [1, 2.5], "content_hash": "whatever"});
    assert_eq!(content_hash(&a), content_hash(&b));
    assert_ne!(content_hash(&a), content_hash(&json!({"a": "x\n", "b": [2.5, 1]})));
}

#[test]
fn numbers_survive_a_round_trip() {
    for x in [0.1 + 0.2, 1e-310, 123_456_789.123_456_79, 5e-324, 1.0] {
        let text = json!(x).to_string();
        let back: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((back.as_f64(), back.to_string()), (Some(x), text));
    }
}
