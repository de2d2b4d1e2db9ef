//! Peers in Python, where there is one with numpy, or PyTorch.

use super::*;

/// A Python that has these modules: `SWIGLU_LAB_PYTHON`, else `python3`.
fn python(modules: &str) -> Option<PathBuf> {
    let python = std::env::var_os("SWIGLU_LAB_PYTHON").unwrap_or_else(|| "python3".into());
    let has = Command::new(&python).args(["-c", &format!("import {modules}")]).output();
    match has {
        Ok(output) if output.status.success() => Some(python.into()),
        _ => {
            swiglu_testing::not_run(format_args!("{} has no {modules}", python.display()));
            None
        }
    }
}

#[test]
fn peers_in_python_keep_to_the_protocol() {
    let Some(python) = python("numpy") else { return };
    // Results of torch and Triton take a minute; `python3 -m unittest` runs them all.
    let tests = ["tests.test_inputs", "tests.test_ggml", "tests.test_protocol.Conversation"];
    let mut unittest = Command::new(python);
    unittest.args(["-m", "unittest"]).args(tests).current_dir(format!("{LAB}/peers"));
    let ended = end(&mut unittest);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn tests_in_python_are_skipped_with_a_reason_where_numpy_is_missing() {
    // Without the packages that were installed.
    let bare = |args: &[&str]| {
        let mut python = Command::new("python3");
        let python = python.arg("-S").args(args).current_dir(format!("{LAB}/peers"));
        python.output().ok().map(|o| (o.status, String::from_utf8_lossy(&o.stderr).into_owned()))
    };
    match bare(&["-c", "import numpy"]) {
        Some((status, why)) if !status.success() && why.contains("numpy") => {}
        other => {
            let why = format_args!("no python3 without numpy: {other:?}");
            return swiglu_testing::not_run(why);
        }
    }
    let (status, said) = bare(&["-m", "unittest", "-v"]).unwrap();
    assert!(status.success(), "{said}");
    assert!(said.contains("not run: numpy is not installed") && said.contains("OK"), "{said}");
}

#[test]
fn pytorch_derives_the_same_inputs_and_is_verified_beside_us() {
    let Some(python) = python("numpy, torch") else { return };
    let profiles = [
        ("a", "swiglu", "ours", ""),
        ("b", "torch", "baseline", "options = { way = \"eager\" }"),
        ("c", "copy", "ceiling", ""),
    ];
    let cases = r#"
[[cases]]
op = "activation"
m = 5
shapes = [{ intermediate = 48 }]
dtype = ["f32", "f16", "bf16"]
arrangement = ["separate", "gate-first"]

[[cases]]
op = "mlp"
m = 3
shapes = [{ hidden = 40, intermediate = 48 }]
dtype = ["f32", "f16", "bf16"]
orientation = ["out-in", "in-out"]
heat = "hot"
"#;
    let definition = definition("torch", "cpu", &profiles, cases);
    let results = results("torch", &definition, command(), &python);
    assert_eq!(expect_ok(&results), 3 * 12);
    let ratio = |r: &&Value| r["ratio_to_baseline"]["value"].as_f64().is_some();
    assert_eq!(results.iter().filter(ratio).count(), 3 * 12);
}

/// The CPU has no gradients of ours; PyTorch's there are judged as ours are on a device.
#[test]
fn gradients_on_the_cpu_are_refused_by_us_and_verified_of_pytorch() {
    let python = python("numpy, torch");
    let profiles = [
        ("a", "swiglu", "ours", ""),
        ("b", "torch", "baseline", "options = { way = \"eager_into\" }"),
        ("c", "copy", "ceiling", ""),
    ];
    let cases = "[[cases]]\nop = \"activation-backward\"\nm = 5\nshapes = [{ intermediate = 48 }]\n\
         dtype = [\"f32\", \"f16\", \"bf16\"]\narrangement = [\"separate\", \"gate-first\"]\n";
    let definition = definition("gradients", "cpu", &profiles, cases);
    let used = python.as_deref().unwrap_or(Path::new("no-python"));
    let results = results("gradients", &definition, command(), used);
    let (ours, others): (Vec<_>, Vec<_>) =
        results.iter().partition(|result| text(result, "profile") == "a");
    assert_eq!(ours.len(), 6);
    for result in ours {
        let (status, reason) = (text(result, "status"), text(result, "reason"));
        assert_eq!(status, "unsupported", "{reason}");
        assert!(reason.contains("not available") && reason.contains("CUDA"), "{reason}");
    }
    if python.is_some() {
        assert_eq!(expect_ok(others), 2 * 6);
    }
}

#[test]
fn the_values_that_python_tests_are_those_of_rust() {
    use swiglu_core::random::normal;
    let path = format!("{LAB}/peers/tests/vectors.json");
    let vectors: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let list = |v: &Value| v.as_array().unwrap().clone();
    let number = |v: &Value, key: &str| v[key].as_u64().unwrap();
    for v in list(&vectors["normal"]) {
        let bits = normal(number(&v, "seed"), number(&v, "index")).to_bits();
        assert_eq!(u64::from(bits), number(&v, "f32_bits"), "{v}");
    }
    for v in list(&vectors["matrices"]) {
        let scale = 1.0 / (number(&v, "inputs") as f32).sqrt();
        let values = (0..6).map(|i| normal(number(&v, "seed"), i) * scale);
        let words: Vec<u64> = match v["dtype"].as_str().unwrap() {
            "f32" => values.map(|x| x.to_bits().into()).collect(),
            "f16" => values.map(|x| swiglu::f16::from_f32(x).to_bits().into()).collect(),
            _ => values.map(|x| swiglu::bf16::from_f32(x).to_bits().into()).collect(),
        };
        let expected: Vec<u64> = list(&v["words"]).iter().map(|w| w.as_u64().unwrap()).collect();
        assert_eq!(words, expected, "{v}");
    }
    for v in list(&vectors["quantized"]) {
        let scale = 1.0 / (number(&v, "inputs") as f32).sqrt();
        let [seed, rows, cols] = ["seed", "rows", "cols"].map(|key| number(&v, key));
        let block: swiglu::BlockType = v["type"].as_str().unwrap().parse().unwrap();
        let (rows, cols) = (rows as usize, cols as usize);
        let made = swiglu_core::random::quantized_matrix(seed, block, rows, cols, scale).unwrap();
        let hex: String = made.view().bytes().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, v["bytes"].as_str().unwrap(), "{v}");
    }
}
