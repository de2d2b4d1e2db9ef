//! `swiglu lab report`, `swiglu explain --measure` and `swiglu bench --backend` as their users call them.

// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use support::{command, definition, end, json_of, lab, locks, swiglu};
use swiglu_lab::record::{Locks, Measured};

fn tiny_lab(dir: &Path) -> String {
    let profiles = [
        ("ours", "swiglu", "ours", "options = { path = \"fused\" }"),
        ("unfused", "swiglu", "baseline", "options = { path = \"unfused\" }"),
    ];
    let cases = "[[cases]]\nop = \"gated-linear\"\nm = [1, 4]\n\
                 shapes = [{ hidden = 64, intermediate = 96 }]\ndtype = \"f32\"\nheat = \"hot\"\n";
    let definition = definition("tiny", "cpu", &profiles, cases);
    // Rates are held against ceilings, which are measured for who asks for rates.
    lab(dir, "tiny", &definition.replacen("[\"latency\"]", "[\"latency\", \"traffic\"]", 1))
}

#[test]
fn a_report_shows_a_run_with_its_ceilings_and_says_why_there_are_no_counters() {
    let dir = tempfile::tempdir().unwrap();
    let lab = tiny_lab(dir.path());
    let run = ["lab", "run", "tiny", "--lab", &lab, "--machine", "here", "--run-id", "r1"];
    let record = json_of(&[&run[..], &["--quick", "--with-profiling"]].concat())["record"].clone();
    assert!(record["ceilings"]["memory"]["per_second"].as_f64() > Some(1e8), "{record}");
    assert_eq!(record["ceilings"]["memory"]["name"], "read");
    let profiling = record["profiling"].as_array().unwrap();
    assert_eq!(profiling.len(), 4, "two ways of two cases: {record}");
    let reason = profiling[0]["reason"].as_str().unwrap();
    assert!(reason.contains("NVIDIA devices only"), "{reason}");
    let out = dir.path().join("report");
    let report = ["lab", "report", "--lab", &lab, "--out", out.to_str().unwrap()];
    let document = json_of(&report);
    assert_eq!(document["pages"], 3, "index, experiment, run: {document}");
    let index = fs::read_to_string(out.join("index.html")).unwrap();
    assert!(index.contains("A test") && index.contains("quick: not evidence"), "{index}");
    let page = fs::read_to_string(out.join("experiments/tiny.html")).unwrap();
    assert!(page.contains("What binds ours"), "{page}");
    // Its data are hot, and a run measures no caches: arithmetic is all that can explain the time.
    let said = ["-bound", "how fast the caches deliver was not measured"];
    assert!(said.iter().any(|part| page.contains(part)), "{page}");
    // A quick run proves nothing: it is shown, and its experiment is not run.
    assert!(page.contains("r1") && page.contains("quick: not evidence"), "{page}");
    let file = dir.path().join("figures.md");
    let measured = ["lab", "report", "--lab", &lab, "--measured"];
    let written = json_of(&[&measured[..], &[file.to_str().unwrap()]].concat());
    assert_eq!((&written["pages"], &written["index"]), (&0.into(), &serde_json::Value::Null));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("lab report --measured") && text.contains("| not run |"), "{text}");
    // What is no file is not waited for: standard output is a pipe here.
    let piped = swiglu(&[&measured[..], &["/dev/stdout"]].concat());
    assert!(piped.code == Some(0) && piped.stdout.starts_with(&text), "{piped:?}");
    // Without a name it lies beside the lab.
    assert_eq!(swiglu(&measured).code, Some(0));
    assert_eq!(fs::read_to_string(dir.path().join("MEASURED.md")).unwrap(), text);
    // It is written over such a document, and over no other.
    assert_eq!(json_of(&[&measured[..], &[file.to_str().unwrap()]].concat()), written);
    fs::write(&file, "notes\n\nof mine\n").unwrap();
    let refused = swiglu(&[&measured[..], &[file.to_str().unwrap()]].concat());
    assert!(refused.code == Some(2) && refused.stderr.contains("not a document of figures"));
    assert_eq!(fs::read_to_string(&file).unwrap(), "notes\n\nof mine\n");
    // The same record again is the same report.
    assert_eq!(json_of(&report), document);
    // A broken definition is shown, and is an error.
    fs::write(dir.path().join("lab/experiments/broken.toml"), "schema = 1\nid = 7\n").unwrap();
    let ended = swiglu(&report);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("broken.toml:2:6"), "{ended:?}");
    let index = fs::read_to_string(out.join("index.html")).unwrap();
    assert!(index.contains("broken.toml:2:6") && index.contains("A test"), "{index}");
}

#[test]
fn a_report_does_not_replace_what_is_not_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let lab = tiny_lab(dir.path());
    let out = dir.path().join("mine");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("thesis.tex"), "").unwrap();
    let ended = swiglu(&["lab", "report", "--lab", &lab, "--out", out.to_str().unwrap()]);
    ended.refused(&["mine", "not a report", "choose another directory"]);
    swiglu(&["lab", "report", "--lab", "/nowhere", "--out", "x"]).refused(&["/nowhere"]);
    swiglu(&["lab", "report", "--lab", &lab]).refused_by_usage("--out");
    // Before the lab is read.
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let args = ["lab", "report", "--lab", "/nowhere", "--out", file.to_str().unwrap()];
    swiglu(&args).refused(&["--out", "it is a file", "directory"]);
}

#[test]
fn what_binds_each_way_is_measured_and_named() {
    let size = ["--hidden", "64", "--m", "2", "--intermediate", "96", "--device", "cpu"];
    let measure = |op: &str, more: &[&str]| {
        // An activation has no hidden size.
        let size = &size[if op == "activation" { 2 } else { 0 }..];
        let measure = ["explain", "--measure", "--seconds", "0.01", "--op", op];
        json_of(&[&measure[..], size, more].concat())
    };
    let one = measure("mlp", &["--dtype", "bf16", "--threads", "1", "--isa", "portable"]);
    let plan = one["measured"]["ways"][0]["plan"].to_string();
    assert!(plan.contains("cpu/portable fused mlp, 1 thread,"), "{plan}");
    // Hot data are held against the caches, and an activation against its own arithmetic.
    let hot = measure("activation", &["--dtype", "bf16", "--hot"]);
    for ceiling in ["cache", "activation"] {
        let ceiling = &hot["measured"]["ceilings"][ceiling];
        assert!(ceiling["per_second"].as_f64() > Some(0.0), "{hot}");
    }
    for (document, ways, traffic) in [(one, 2, "memory"), (hot, 1, "cache")] {
        let measured = &document["measured"];
        let list = measured["ways"].as_array().unwrap();
        assert_eq!(list.len(), ways, "{document}");
        for way in list {
            let classified = &way["analysis"]["classified"];
            let class = classified["class"].as_str().unwrap();
            assert!([traffic, "compute", "latency"].contains(&class), "{way}");
            for floor in ["memory_us", "compute_us"] {
                assert!(classified[floor].as_f64() > Some(0.0), "{way}");
            }
            assert!(way["summary"]["median"].as_f64() > Some(0.0), "{way}");
            let text = way["analysis"]["text"].as_str().unwrap();
            assert!(text.contains("-bound") && !text.contains("NaN"), "{text}");
        }
        assert!(measured["no_counters"].as_str().unwrap().contains("NVIDIA"), "{document}");
    }
    let text = ["explain", "--measure", "--seconds", "0.01", "--hot"];
    let text = swiglu(&[&text[..], &size].concat());
    assert_eq!(text.code, Some(0), "{text:?}");
    for part in [
        "candidates",
        "planned: A call takes",
        "unfused: A call takes",
        "floor",
        "class",
        "in the caches",
        "no hardware counters",
    ] {
        assert!(text.stdout.contains(part), "{part}: {text:?}");
    }
}

#[test]
fn backends_are_compared_in_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let bench = |extra: &[&str]| {
        // Beside each run what the machine can do is measured; one thread is told that sooner.
        let size = ["--rows=8", "--cols=72", "--dtype=float32", "--device=cpu", "--threads=1"];
        let mut command = command();
        command.current_dir(dir.path()).args(["bench", "activation", "--seconds", "0.01"]);
        end(command.args(size).args(extra))
    };
    let all = ["--backend", "all", "--python", "/nowhere/python3"];
    // Not beside a run, wherever that writes its record.
    let lock = Locks::new(locks()).take(Measured::Machine, "mlp-decode-1").unwrap();
    bench(&all).refused(&["another run is measuring here (mlp-decode-1, process"]);
    drop(lock);
    // No Python here: what is not there is said, and the rest is measured.
    let ended = bench(&all);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in ["activation 8x72 f32", "planned", "torch-compile", "copy", "not available"] {
        assert!(ended.stdout.contains(part), "{part}: {ended:?}");
    }
    assert!(ended.stdout.starts_with("case "), "{ended:?}");
    // Once: under the table.
    assert!(!ended.stderr.contains("python3"), "{ended:?}");
    let ended = bench(&["--json"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let results = ended.json()["results"].as_array().unwrap().clone();
    assert_eq!((results.len(), &results[0]["status"]), (1, &"ok".into()));
    // What was asked for has a row, and its reason under the table.
    let peers = dir.path().join("peers");
    fs::create_dir_all(&peers).unwrap();
    let ended = bench(&[
        "--providers",
        "triton",
        "--peers",
        peers.to_str().unwrap(),
        "--python",
        "/nowhere",
    ]);
    assert!(ended.stdout.contains("triton: not available: peer"), "{ended:?}");
    // Nothing of what was named could be measured.
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended.stderr.contains("nothing of --backend was measured: triton: not available"),
        "{ended:?}"
    );
    bench(&["--backend", "numpy"]).refused_by_usage("numpy");
    swiglu(&["bench", "activation", "--rows", "-1"]).refused_by_usage("number = -1");
    // One that breaks is told, and the comparison is not whole.
    fs::write(peers.join("triton_peer.py"), "").unwrap();
    let broken = ["--backend", "triton", "--peers", peers.to_str().unwrap(), "--python", "false"];
    let ended = bench(&broken);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("triton: failed: "), "{ended:?}");
    // So is one that no longer listens when it is asked, with its last words.
    let deaf = "#!/bin/sh\nread -r hello\nexec 0<&-\necho '{\"type\":\"hello\",\"name\":\"deaf\"}'\n\
                echo 'no memory left' >&2\nsleep 0.2\nexit 3\n";
    fs::write(peers.join("triton"), deaf).unwrap();
    fs::set_permissions(peers.join("triton"), fs::Permissions::from_mode(0o755)).unwrap();
    let ended = bench(&broken);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let said = "triton: failed: peer `triton` ended on `prepare` (exit status: 3); it last said: no memory left";
    assert!(ended.stdout.contains(said), "{ended:?}");
}

impl support::Ended {
    /// What the parser of the command line refuses.
    fn refused_by_usage(&self, part: &str) {
        assert_eq!((self.code, self.stdout.as_str()), (Some(2), ""), "{self:?}");
        assert!(self.stderr.contains(part), "{self:?}");
    }
}
