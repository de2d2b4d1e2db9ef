//! `swiglu info --probe`: the rates of a device, and where they are kept.

use serde_json::Value;

use super::on_device;
use super::support::end;

/// Its times mean nothing here: what is measured is kept and followed, or is said not to be possible.
#[test]
fn a_probe_is_said_beside_what_is_expected_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let run =
        |args: &[&str]| Some(end(on_device()?.args(args).env("SWIGLU_TUNING_DIR", dir.path())));
    let Some(before) = run(&["info", "--json"]) else { return };
    let before = before.json()["cuda"]["devices"][0].clone();
    assert!(before["rates"]["copy"]["prior"].as_f64() > Some(0.0), "{before}");
    assert_eq!(
        (&before["rates"]["copy"]["measured"], &before["probe"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let explain = ["explain", "--op", "gated-linear", "--hidden", "64", "--intermediate", "96"];
    let last_note = |explained: &Value| {
        let notes = explained["notes"].as_array().unwrap();
        notes.last().unwrap().as_str().unwrap().to_owned()
    };
    let explain = || run(&[&explain[..], &["--json"]].concat()).unwrap().json();
    assert!(last_note(&explain()).starts_with("rates expected"), "{}", explain());
    let probed = run(&["info", "--probe"]).unwrap();
    assert_eq!(probed.code, Some(0), "{probed:?}");
    // A line each, in its unit.
    let units =
        [("copy", "GB/s"), ("clock", "MHz"), ("l2", "GB/s"), ("launch", "µs"), ("barrier", "µs")];
    for (name, unit) in units {
        let is_of = |line: &str| line.trim_start().starts_with(&format!("{name} "));
        let line = probed.stdout.lines().find(|line| is_of(line)).unwrap();
        assert!(line.contains(unit), "{line}");
    }
    let document = run(&["info", "--probe", "--json"]).unwrap().json();
    let device = &document["cuda"]["devices"][0];
    let path = device["probe"]["kept"].as_str().unwrap();
    assert!(probed.stdout.contains(&format!("rates kept in {path}")), "{probed:?}");
    for (name, rate) in device["rates"].as_object().unwrap() {
        assert_ne!(rate["measured"].is_null(), rate["refused"].is_null(), "{name}: {rate}");
    }
    // A later process has it, and says so.
    let after = run(&["info", "--json"]).unwrap().json();
    assert_eq!(after["cuda"]["devices"][0]["rates"], device["rates"]);
    let note = last_note(&explain());
    assert!(note.starts_with(path) && note.contains("rates "), "{note}");
    // Cut in half it is refused, and replaced.
    let text = std::fs::read_to_string(path).unwrap();
    std::fs::write(path, &text[..text.len() / 2]).unwrap();
    assert!(last_note(&explain()).contains("not used: it is damaged"), "{}", explain());
    // What cannot be kept is said.
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut command = on_device().unwrap();
    command.args(["info", "--probe"]).env("SWIGLU_TUNING_DIR", file.path());
    let ended = end(&mut command);
    assert!(ended.code == Some(0) && ended.stdout.contains("cannot be kept"), "{ended:?}");
}
