//! The peers of the lab, started and judged as a run does it: our own on the CPU and on the simulated
//! device, those in Python where there is a Python with numpy.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod candidates;
mod python;
#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use support::{Files, command, definition, end, lab};

const LAB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../lab");

/// Every operation, layout and kind of data, small.
const CASES: &str = r#"
[[cases]]
op = "activation"
m = 5
shapes = [{ intermediate = 48 }]
dtype = ["f32", "f16", "bf16"]
arrangement = ["separate", "gate-first", "interleaved-8"]
heat = ["hot", "cold"]

[[cases]]
op = "gated-linear"
m = 7
shapes = [{ hidden = 40, intermediate = 48 }]
dtype = ["f32", "f16", "bf16"]
arrangement = ["separate", "up-first"]
orientation = ["out-in", "in-out"]
heat = "hot"

[[cases]]
op = "mlp"
m = 3
shapes = [{ hidden = 40, intermediate = 48 }]
dtype = ["f32", "bf16"]
orientation = ["out-in", "in-out"]
bias = [false, true]
activation = ["swiglu", "geglu-tanh"]
heat = "hot"

[[cases]]
op = "mlp-train"
m = 9
shapes = [{ hidden = 24, intermediate = 40 }]
dtype = ["f32", "bf16"]
arrangement = ["separate", "up-first"]
orientation = ["out-in", "in-out"]
bias = [false, true]
heat = "hot"
"#;

/// Runs an experiment in a lab of its own, with the real peers. The results.
#[track_caller]
fn results(id: &str, definition: &str, mut program: Command, python: &Path) -> Vec<Value> {
    let files = Files::new();
    let lab = lab(&files.path(""), id, definition);
    program.args(["lab", "run", id, "--run-id", "test", "--quick", "--json", "--machine", "here"]);
    program.arg("--lab").arg(&lab).arg("--peers").arg(format!("{LAB}/peers"));
    program.arg("--python").arg(python);
    let ended = end(&mut program);
    let record = ended.json()["record"].clone();
    let mut results = record["results"].as_array().expect("a record has results").clone();
    // The key of a case stands in its first result alone.
    let mut key = String::new();
    for result in &mut results {
        key = result["case_key"].as_str().unwrap_or(&key).to_owned();
        result["case"] = record["cases"][&key]["case"].clone();
        result["case_key"] = key.clone().into();
    }
    // A run that measured nothing has not done what it was for.
    let measured = results.iter().any(|result| text(result, "status") == "ok");
    assert_eq!(ended.code, Some(if measured { 0 } else { 1 }), "{ended:?}");
    results
}

fn text<'a>(result: &'a Value, key: &str) -> &'a str {
    result[key].as_str().unwrap_or_default()
}

/// Each result is verified and has times.
#[track_caller]
fn expect_ok<'a>(results: impl IntoIterator<Item = &'a Value>) -> usize {
    let mut count = 0;
    for result in results {
        let (key, profile) = (text(result, "case_key"), text(result, "profile"));
        let reason = text(result, "reason");
        assert_eq!(text(result, "status"), "ok", "{key}, {profile}: {reason}");
        assert!(result["summary"]["median"].as_f64() > Some(0.0), "{key}, {profile}");
        count += 1;
    }
    count
}

#[test]
fn our_own_peer_computes_what_every_case_says() {
    let profiles = [
        ("a", "swiglu", "ours", "options = { path = \"fused\", threads = 2 }"),
        (
            "b",
            "swiglu",
            "ours",
            "options = { path = \"unfused\", isa = \"portable\" }\nnumerics = \"pre_round+fast\"",
        ),
    ];
    let definition = definition("own", "cpu", &profiles, CASES);
    let results = results("own", &definition, command(), Path::new("no-python"));
    assert_eq!(expect_ok(&results), 2 * (18 + 12 + 16 + 16));
    assert!(results[0]["notes"].to_string().contains("rounds as"), "{}", results[0]);
    for result in &results {
        assert!(text(result, "plan").starts_with("cpu/"), "{result}");
        // The program, by the façade that it computed with.
        let variants = result["variants"].as_object().unwrap();
        assert_eq!(variants.len(), 1, "{result}");
        for (isa, digest) in variants {
            let of = |r: &Value| r["variants"][isa] == *digest;
            assert!(digest.as_str().is_some_and(|d| d.len() == 16), "{result}");
            assert!(results.iter().filter(|r| r["variants"].get(isa).is_some()).all(of));
        }
        let portable = variants.contains_key("portable");
        assert_eq!(portable, text(result, "profile") == "b", "{result}");
    }
}

/// What takes turns with ours as its limit: reading as many bytes.
#[test]
fn reading_alone_is_a_ceiling_of_what_has_weights() {
    let profiles = [
        ("a", "swiglu", "ours", ""),
        ("b", "read", "ceiling", "options = { threads = 2 }"),
        ("c", "read", "ceiling", "options = { asks = true, isa = \"portable\" }"),
        ("d", "read", "ceiling", "options = { graph = true }"),
    ];
    let cases = "[[cases]]\nop = \"gated-linear\"\nm = 1\n\
         shapes = [{ hidden = 40, intermediate = 48 }]\ndtype = \"f32\"\n\
         heat = [\"hot\", \"cold\"]\n\n[[cases]]\nop = \"activation\"\nm = 1\n\
         shapes = [{ intermediate = 48 }]\ndtype = \"f32\"\n";
    let definition = definition("read", "cpu", &profiles, cases);
    let results = results("read", &definition, command(), Path::new("no-python"));
    let of = |profile: &str, op: &str| -> Vec<&Value> {
        results.iter().filter(|r| text(r, "profile") == profile && r["case"]["op"] == op).collect()
    };
    for profile in ["b", "c"] {
        let read = of(profile, "gated-linear");
        assert_eq!(expect_ok(read.clone()), 2);
        assert!(read.iter().all(|r| r["error"].is_null() && r["bytes"].as_f64() > Some(15360.0)));
        let [refused] = of(profile, "activation")[..] else { panic!("{results:?}") };
        assert_eq!(text(refused, "status"), "unsupported");
        assert!(text(refused, "reason").contains("has no weights"), "{refused}");
    }
    for wrong in of("d", "gated-linear") {
        assert_eq!(text(wrong, "status"), "failed");
        assert!(text(wrong, "reason").contains("asks, threads and isa, and no others"), "{wrong}");
    }
}

/// The program on a machine with the simulated device.
fn on_device() -> Option<Command> {
    let simulator = match swiglu_cuda_sim::build() {
        Ok(simulator) => simulator,
        Err(reason) => {
            swiglu_testing::not_run(reason);
            return None;
        }
    };
    let directory = simulator.directory();
    let mut program = command();
    program.env_remove("CUDA_VISIBLE_DEVICES").env_remove("SWIGLU_CACHE_READ_ONLY_DIR");
    program.env("SWIGLU_CUDA_LIBRARY_PATH", directory);
    program.env("SWIGLU_CACHE_DIR", directory.join("kernels"));
    Some(program)
}

/// A design is measured, or the case refused: never another way under its name.
#[test]
fn a_design_is_refused_where_a_layer_takes_another_way() {
    let Some(program) = on_device() else { return };
    let designs = ["one-launch", "two-launches", "sequential", "steps"];
    let options = designs.map(|design| {
        format!("options = {{ design = \"{design}\" }}\nnumerics = \"pre_round+fast\"")
    });
    let profiles: Vec<_> =
        designs.iter().zip(&options).map(|(id, o)| (*id, "swiglu", "ours", o.as_str())).collect();
    let cases = "[[cases]]\nop = \"mlp\"\nm = [2, 17]\n\
         shapes = [{ hidden = 16, intermediate = 16 }]\ndtype = \"bf16\"\nheat = \"hot\"\n";
    let definition = definition("designs", "cuda", &profiles, cases);
    let results = results("designs", &definition, program, Path::new("no-python"));
    let (few, many): (Vec<_>, Vec<_>) = results.iter().partition(|r| r["case"]["m"] == 2);
    assert_eq!(expect_ok(few), 4);
    let (steps, others): (Vec<_>, Vec<_>) =
        many.into_iter().partition(|r| text(r, "profile") == "steps");
    assert_eq!(expect_ok(steps), 1);
    assert_eq!(others.len(), 3);
    for result in others {
        let (status, reason) = (text(result, "status"), text(result, "reason"));
        assert_eq!(status, "unsupported", "{}: {reason}", text(result, "profile"));
        assert!(reason.contains("17 such tokens in another way"), "{reason}");
    }
}

#[test]
fn our_own_peer_computes_on_the_device() {
    let Some(program) = on_device() else { return };
    let profiles = [
        ("a", "swiglu", "ours", "options = { graph = true }\nnumerics = \"pre_round+fast\""),
        ("b", "swiglu", "ours", "options = { path = \"unfused\" }\nnumerics = \"pre_round+fast\""),
        ("c", "copy", "ceiling", ""),
    ];
    let cases = "[[cases]]\nop = \"activation\"\nm = 3\nshapes = [{ intermediate = 16 }]\n\
         dtype = [\"f32\", \"bf16\"]\narrangement = [\"separate\", \"gate-first\"]\nheat = \"hot\"\n\n\
         [[cases]]\nop = \"activation-backward\"\nm = 5\nshapes = [{ intermediate = 24 }]\n\
         dtype = [\"f32\", \"f16\", \"bf16\"]\n\
         arrangement = [\"separate\", \"gate-first\", \"up-first\", \"interleaved-8\"]\n\
         heat = \"hot\"\n\n\
         [[cases]]\nop = \"gated-linear\"\nm = 3\nshapes = [{ hidden = 16, intermediate = 16 }]\n\
         dtype = [\"f32\", \"bf16\"]\nheat = \"hot\"\n\n\
         [[cases]]\nop = \"mlp\"\nm = 2\nshapes = [{ hidden = 16, intermediate = 16 }]\n\
         dtype = \"bf16\"\nheat = \"hot\"\n";
    let definition = definition("device", "cuda", &profiles, cases);
    let results = results("device", &definition, program, Path::new("no-python"));
    let (ours, others): (Vec<_>, Vec<_>) =
        results.iter().partition(|result| text(result, "profile") != "c");
    // Each has the kernels that it launched, and none of those of other cases.
    for result in &ours {
        let variants = result["variants"].as_object().unwrap();
        let elementwise = variants.keys().any(|name| name.starts_with("elementwise"));
        let op = text(result, "case_key").split(' ').next().unwrap();
        let digests = variants.values().filter_map(Value::as_str);
        assert!(digests.clone().count() > 0 && digests.clone().all(|d| d.len() == 16), "{result}");
        if op.starts_with("activation") {
            assert!(elementwise && variants.len() == 1, "{result}");
        }
    }
    assert_eq!(expect_ok(ours), 2 * (4 + 12 + 2 + 1));
    // There is no Python by that name.
    assert!(others.iter().all(|result| text(result, "status") != "ok"), "{others:?}");
}

/// Quantised weights on a device, as they are and decoded, and what is no such block.
#[test]
fn quantised_blocks_are_computed_on_the_device() {
    let Some(program) = on_device() else { return };
    let profiles = [
        ("a", "swiglu", "ours", "options = { graph = true }\nnumerics = \"pre_round+fast\""),
        ("b", "swiglu", "ours", "options = { decode = true }\nnumerics = \"pre_round+fast\""),
        ("c", "swiglu", "peer", "options = { design = \"steps\" }"),
    ];
    let cases = "[[cases]]\nop = \"mlp\"\nm = 3\nshapes = [{ hidden = 64, intermediate = 96 }]\n\
         dtype = \"bf16\"\nweights = [\"Q8_0\", \"Q4_0\", \"Q4_1\"]\nheat = \"hot\"\n\n\
         [[cases]]\nop = \"mlp\"\nm = 3\nshapes = [{ hidden = 64, intermediate = 96 }]\n\
         dtype = \"bf16\"\nheat = \"hot\"\n";
    let definition = definition("blocks", "cuda", &profiles, cases);
    let results = results("blocks", &definition, program, Path::new("no-python"));
    for result in &results {
        let (weights, status) = (result["case"]["weights"].as_str(), text(result, "status"));
        let reason = text(result, "reason");
        match (text(result, "profile"), weights) {
            ("c", Some(_)) => {
                assert_eq!(status, "failed");
                assert!(reason.contains("blocks of elements"), "{reason}");
            }
            // There are no kernels for it; decoded there are.
            ("a", Some("Q4_1")) => {
                assert_eq!(status, "unsupported");
                assert!(reason.contains("Q4_1"), "{reason}");
            }
            _ => assert_eq!(expect_ok([result]), 1),
        }
    }
    assert_eq!(results.iter().filter(|r| text(r, "status") == "ok").count(), 2 + 3 + 3);
}

#[test]
fn options_that_do_not_exist_or_do_not_fit_are_failures_with_a_reason() {
    let profiles = [
        ("a", "swiglu", "peer", "options = { way = \"fast\" }"),
        ("b", "swiglu", "peer", "options = { graph = true }"),
        ("c", "swiglu", "peer", "options = { keep = \"save\" }"),
    ];
    let cases = "[[cases]]\nop = \"activation\"\nm = 3\nshapes = [{ intermediate = 16 }]\n\
         dtype = \"f32\"\nheat = \"hot\"\n\n\
         [[cases]]\nop = \"copy\"\nm = 3\nshapes = [{ intermediate = 16 }]\ndtype = \"f32\"\n";
    let definition = definition("options", "cpu", &profiles, cases);
    let results = results("options", &definition, command(), Path::new("no-python"));
    let of = |profile: &str| {
        let of = results.iter().find(|r| text(r, "profile") == profile);
        of.map(|r| (text(r, "status").to_owned(), text(r, "reason").to_owned())).unwrap()
    };
    let (status, reason) = of("a");
    assert!(status == "failed" && reason.contains("way") && reason.contains("`a`"), "{reason}");
    let (status, reason) = of("b");
    assert!(status == "failed" && reason.contains("CUDA"), "{reason}");
    let (status, reason) = of("c");
    assert!(status == "failed" && reason.contains("of mlp-train"), "{reason}");
}

#[test]
fn every_definition_of_the_lab_is_read() {
    let ended = end(command().args(["lab", "list", "--json", "--lab", LAB]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let listed = ended.json();
    let ids: Vec<&str> = listed.as_array().unwrap().iter().map(|e| text(e, "id")).collect();
    let required = [
        "swiglu-elementwise",
        "swiglu-elementwise-backward",
        "swiglu-packed-16384",
        "gated-linear-sweep",
        "mlp-decode",
        "cpu-gated-linear",
        "cpu-mlp-decode",
        "cpu-quantized-mlp",
        "cpu-quantized-mlp-one-thread",
        "allocation-and-packing",
        "token-counts-gated-linear",
        "token-counts-mlp",
    ];
    for id in required {
        assert!(ids.contains(&id), "{id} in {ids:?}");
    }
}
