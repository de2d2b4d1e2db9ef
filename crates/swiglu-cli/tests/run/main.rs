//! `swiglu run`: embedded layers, files, results and outputs.

mod numbers;
#[path = "../support/mod.rs"]
mod support;

use serde_json::Value;
use support::{
    Files, SMOLLM2, STORIES, json_of, layer_tensors, npy, npy_values, safetensors, swiglu, tensor,
};

const QUICK: [&str; 3] = ["run", "--seconds", "0.01"];

fn run(args: &[&str]) -> Value {
    json_of(&[&QUICK, args].concat())
}

fn number(v: &Value) -> f64 {
    v.as_f64().expect("a number")
}

/// Every field that scripts may rely on.
fn check_schema(report: &Value) {
    for name in ["device", "plan", "dtype", "weights", "numerics", "activation"] {
        assert!(report[name].is_string(), "{name} of {report}");
    }
    for name in ["m", "hidden", "intermediate"] {
        assert!(report["shape"][name].is_u64(), "shape.{name} of {report}");
    }
    for times in ["time_us", "unfused_time_us"] {
        let [p10, median, p90] = ["p10", "median", "p90"].map(|n| number(&report[times][n]));
        assert!(0.0 < p10 && p10 <= median && median <= p90, "{times} of {report}");
        assert!(report[times]["samples"].as_u64() > Some(0), "{times} of {report}");
    }
    for name in ["speedup", "gflops", "gbytes_per_s"] {
        assert!(number(&report[name]) >= 0.0, "{name} of {report}");
    }
    let error = &report["error"];
    assert!(number(&error["max_abs"]) >= 0.0 && number(&error["relative_frobenius"]) >= 0.0);
    assert!(["file", "oracle"].contains(&error["reference"].as_str().unwrap_or("")), "{error}");
}

#[test]
fn without_arguments_the_embedded_layer_runs_in_every_dtype() {
    let document = run(&[]);
    check_schema(&document);
    assert_eq!((&document["dtype"], &document["device"]), (&"f32".into(), &"cpu".into()));
    assert_eq!(document["numerics"], "fused+precise");
    assert_eq!(document["activation"], "swiglu");
    assert_eq!(document["shape"]["m"], 73);
    assert_eq!(document["error"]["reference"], "file");
    let all = document["all"].as_array().expect("all dtypes");
    let dtypes: Vec<&Value> = all.iter().map(|r| &r["dtype"]).collect();
    for report in all {
        assert_eq!(report["weights"], report["dtype"], "{document}");
        let why = report["decoded_because"].as_str().expect("a reason");
        assert!(why.contains("as Q4_1 they are meant for up to "), "{why}");
    }
    assert_eq!(dtypes, ["f32", "bf16", "f16"]);
    for report in all {
        check_schema(report);
        assert_eq!(report["passed"], true, "{report}");
    }
    assert!(number(&all[0]["error"]["relative_frobenius"]) < 2e-6);
}

#[test]
fn quantised_weights_stay_as_they_are_for_few_tokens_and_where_that_is_asked_for() {
    let file = ["--weights", SMOLLM2, "--layer", "28"];
    for (args, weights) in [
        (&[&file[..], &["--tokens", "1"]].concat(), "Q4_1"),
        (&[&file[..], &["--tokens", "64"]].concat(), "f32"),
        (
            &[&file[..], &["--tokens", "64", "--keep-blocks", "--op", "gated-linear"]].concat(),
            "Q4_1",
        ),
    ] {
        let report = run(&[&args[..], &["--dtype", "f32"]].concat());
        check_schema(&report);
        assert_eq!((&report["weights"], &report["passed"]), (&weights.into(), &true.into()));
        assert_eq!(report["decoded_because"].is_string(), weights == "f32", "{report}");
    }
    let report = run(&["--keep-blocks", "--dtype", "bf16"]);
    assert_eq!((&report["weights"], &report["passed"]), (&"Q4_1".into(), &true.into()));
    assert_eq!(report["error"]["reference"], "file");
    swiglu(&["run", "--keep-blocks", "--decode-weights"]).refused(&["--decode-weights"]);
}

#[test]
fn quantised_weights_are_decoded_where_that_is_asked_for() {
    let few = ["--weights", SMOLLM2, "--layer", "28", "--tokens", "4"];
    let decoded = [&few[..], &["--decode-weights", "--dtype", "f32"]].concat();
    let report = run(&decoded);
    check_schema(&report);
    assert_eq!((&report["weights"], &report["passed"]), (&"f32".into(), &true.into()));
    let why = report["decoded_because"].as_str().expect("a reason");
    assert!(why.contains("Q4_1") && why.contains("asked for"), "{why}");
    let text = swiglu(&[&QUICK[..], &decoded].concat()).stdout;
    assert!(text.contains("unfused") && text.contains("weights decoded:"), "{text}");
}

#[test]
fn text_has_a_row_per_dtype_and_no_colour_in_a_pipe() {
    let ended = swiglu(&[&QUICK[..], &["--fixture", "stories15m"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stdout.matches(" ok").count(), 3, "{ended:?}");
    assert!(!ended.stdout.contains('\x1b') && ended.stderr.is_empty(), "{ended:?}");
}

#[test]
fn a_type_that_nobody_asked_for_and_that_cannot_hold_the_result_is_left_out() {
    let files = Files::new();
    let input = files.write("x.npy", npy(2, 288, &[3e4; 2 * 288]));
    let args = [&QUICK[..], &["--fixture", "stories15m", "--input", &input]].concat();
    let ended = swiglu(&args);
    assert_eq!((ended.code, ended.stdout.matches(" ok").count()), (Some(0), 2), "{ended:?}");
    assert!(ended.stderr.contains("f16 is left out: the exact result reaches"), "{ended:?}");
    swiglu(&[&args[..], &["--dtype", "f16"]].concat()).refused(&["--dtype bf16 or --dtype f32"]);
}

#[test]
fn options_reach_the_result() {
    let report = run(&[
        "--dtype",
        "bf16",
        "--numerics",
        "eager",
        "--isa",
        "portable",
        "--threads",
        "1",
        "--activation",
        "geglu-tanh",
        "--op",
        "gated-linear",
        "--fixture",
        "stories15m",
    ]);
    check_schema(&report);
    assert_eq!(report["numerics"], "eager+precise");
    assert_eq!(report["activation"], "geglu-tanh");
    assert_eq!(report["op"], "gated-linear");
    assert_eq!(report["error"]["reference"], "oracle");
    assert!(report["plan"].as_str().is_some_and(|p| p.starts_with("cpu/portable fused")));
    assert!(report.get("all").is_none());
}

#[test]
fn a_file_with_input_and_reference_gives_the_output() {
    let files = Files::new();
    let output = files.name("y.npy");
    let input = format!("{STORIES}#acts.layers.0.mlp_in");
    let reference = format!("{STORIES}#acts.layers.0.mlp_out_f64ref");
    let report = run(&[
        "--weights",
        STORIES,
        "--layer",
        "0",
        "--input",
        &input,
        "--reference",
        &reference,
        "--output",
        &output,
    ]);
    check_schema(&report);
    assert_eq!((&report["error"]["reference"], &report["passed"]), (&"file".into(), &true.into()));
    assert_eq!(npy_values(&files.path("y.npy")).len(), 96 * 288);

    // The output is a valid reference of the next run.
    let again = run(&["--weights", STORIES, "--input", &input, "--reference", &output]);
    assert_eq!(number(&again["error"]["relative_frobenius"]), 0.0, "{again}");
}

#[test]
fn a_tokens_bits_do_not_follow_its_batch_where_they_must_not() {
    let files = Files::new();
    let output = files.name("y.npy");
    for (weights, layer, hidden) in [(STORIES, "0", 288), (SMOLLM2, "28", 576)] {
        // Of one seed, the first token is always the same.
        let first = |tokens: &str| {
            let args =
                ["--weights", weights, "--layer", layer, "--tokens", tokens, "--dtype", "f32"];
            let more = ["--batch-invariant", "--device", "cpu", "--output", &output, "--force"];
            let report = run(&[&args[..], &more].concat());
            assert_eq!(report["passed"], true, "{report}");
            assert_eq!(report["numerics"], "fused+precise+batch-invariant");
            let bits = npy_values(&files.path("y.npy")).into_iter().map(f32::to_bits);
            (report["weights"].clone(), bits.take(hidden).collect::<Vec<_>>())
        };
        let alone = first("1");
        for tokens in ["3", "40"] {
            assert_eq!(first(tokens), alone, "{weights}, {tokens} tokens");
        }
    }
}

#[test]
fn a_wrong_reference_is_a_failed_check_not_an_error() {
    let files = Files::new();
    let input = format!("{STORIES}#acts.layers.0.mlp_in");
    for dtype in ["f32", "bf16"] {
        let reference = files.write("ref.npy", npy(96, 288, &vec![0.01; 96 * 288]));
        let args =
            ["--weights", STORIES, "--input", &input, "--reference", &reference, "--dtype", dtype];
        let ended = swiglu(&[&QUICK[..], &args, &["--json"]].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert_eq!(ended.json()["passed"], false);
        // What is said beside it is of the bound that was exceeded.
        let text = swiglu(&[&QUICK[..], &args].concat()).stdout;
        let line = text.lines().find(|line| line.contains("; relative error ")).unwrap();
        assert!(line.contains(&format!("against {reference}, limit ")), "{text}");
        assert!(!line.contains("of its bound") && text.contains("FAILED"), "{text}");
    }
}

#[test]
fn random_input_is_said_to_be_random_and_any_number_of_tokens_works() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    for tokens in ["0", "1", "3"] {
        let args = ["--weights", &layer, "--tokens", tokens, "--seed", "4"];
        let report = run(&args);
        assert_eq!(report["shape"]["m"].to_string(), tokens);
        assert_eq!(
            (&report["passed"], &report["input"]),
            (&true.into(), &"random, normal, seed 4".into())
        );
    }
}

#[test]
fn an_existing_output_needs_force() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let output = files.write("y.npy", "precious");
    let args = [&QUICK[..], &["--weights", &layer, "--output", &output]].concat();
    swiglu(&args).refused(&["y.npy", "exists already", "--force"]);
    assert_eq!(std::fs::read(files.path("y.npy")).ok().as_deref(), Some(&b"precious"[..]));
    let ended = swiglu(&[&args[..], &["--force"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(npy_values(&files.path("y.npy")).len(), 16 * 6);
}

#[test]
fn an_assumed_activation_is_said_and_a_stated_limit_applied() {
    let files = Files::new();
    let path = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let work = |dir: &Files, path: &str| {
        let ended = swiglu(&["run", "--seconds", "0.01", "--weights", path]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(dir.list().iter().any(|f| f == "layer.safetensors"));
        ended.stdout.lines().find(|l| l.starts_with("work")).expect("a line of work").to_owned()
    };
    assert!(work(&files, &path).contains("swiglu (assumed"), "{}", work(&files, &path));
    files.write("config.json", r#"{"hidden_act":"silu"}"#);
    assert!(!work(&files, &path).contains("assumed"));
    files.write("config.json", r#"{"model_type":"gpt_oss","swiglu_limit":0.5}"#);
    assert!(work(&files, &path).contains("limit=0.5"), "{}", work(&files, &path));
}

/// Every gradient is proved, in each element type: of a small layer, and of a real one for few tokens in one type, or as it
/// is embedded in all where SWIGLU_TEST_ALL is set, because the oracle takes long for each.
#[test]
fn backward_proves_every_gradient() {
    let files = Files::new();
    let tensors = layer_tensors().into_iter().zip([[96, 64], [96, 64], [64, 96]]);
    let tensors: Vec<_> = tensors.map(|(t, shape)| tensor(t.name, &shape)).collect();
    let layer = files.write("layer.safetensors", safetensors(&tensors));
    let small = ["--backward", "--weights", &layer, "--tokens", "12"];
    let embedded = ["--backward", "--fixture", "stories15m"];
    let in_dtype = |layer: &[&str], dtype| run(&[layer, &["--dtype", dtype]].concat());
    let mut reports = ["f32", "bf16", "f16"].map(|dtype| in_dtype(&small, dtype)).to_vec();
    match std::env::var_os(swiglu_testing::ALL) {
        Some(_) => reports.extend(run(&embedded)["all"].as_array().expect("all dtypes").clone()),
        None => {
            let few = ["--backward", "--weights", STORIES, "--layer", "0", "--tokens", "8"];
            reports.push(in_dtype(&few, "bf16"));
        }
    }
    for report in &reports {
        check_schema(report);
        check_gradients(report, &["dx", "dw_gate", "dw_up", "dw_down"]);
        let size = if report["dtype"] == "f32" { 4 } else { 2 };
        let [m, h] = ["m", "intermediate"].map(|n| report["shape"][n].as_u64().expect("a size"));
        assert_eq!(report["kept_bytes"].as_u64(), Some(2 * m * h * size), "{report}");
        assert_eq!(report["save_policy"], "save");
    }
    for (keep, share) in [("save-gate", 1), ("recompute", 0)] {
        let layer = [&small[..], &["--op", "gated-linear"]].concat();
        let report = run(&[&layer[..], &["--keep", keep, "--dtype", "bf16"]].concat());
        check_gradients(&report, &["dx", "dw_gate", "dw_up"]);
        let [m, h] = ["m", "intermediate"].map(|n| report["shape"][n].as_u64().expect("a size"));
        assert_eq!(report["kept_bytes"].as_u64(), Some(m * h * 2 * share), "{report}");
    }
}

fn check_gradients(report: &Value, names: &[&str]) {
    assert_eq!(report["passed"], true, "{report}");
    let gradients = report["gradients"].as_object().expect("gradients");
    let mut expected = names.to_vec();
    expected.sort_unstable();
    assert_eq!(gradients.keys().collect::<Vec<_>>(), expected);
    for (name, gradient) in gradients {
        let [error, bound, eager] =
            ["relative_frobenius", "bound", "eager_error"].map(|n| number(&gradient[n]));
        assert!(0.0 < error && error <= bound, "{name} of {report}");
        // The limit is twice what the baseline is off by, and little more.
        assert!(2.0 * eager <= bound && bound < 2.0 * eager + 2e-3, "{name} of {report}");
        assert!(number(&gradient["max_abs"]) > 0.0 && number(&gradient["worst_element"]) <= 1.0);
    }
}

#[test]
fn backward_prints_a_line_for_each_gradient() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let args = ["--backward", "--dtype", "f16", "--weights", &layer, "--tokens", "5"];
    let out = swiglu(&[&QUICK[..], &args].concat());
    let text = out.stdout;
    for expected in ["times are of a forward and a backward pass", "dw_down  error ", "(save)"] {
        assert!(text.contains(expected), "{text}");
    }
    let refused = swiglu(&["run", "--keep", "save"]);
    assert!(refused.stderr.contains("--backward"), "{refused:?}");
}
