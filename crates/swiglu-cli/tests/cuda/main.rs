//! The verbs on a CUDA device: the simulated one, so that they run everywhere there is a C++
//! compiler.

mod kernels;
mod rates;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use support::{Ended, Files, command, end, layer_tensors, safetensors};

/// The libraries of the simulator, or nothing after saying why there are none.
fn simulator() -> Option<PathBuf> {
    let built = swiglu_cuda_sim::build().inspect_err(|why| swiglu_testing::not_run(why));
    built.ok().map(|simulator| simulator.directory().to_owned())
}

/// The program on a machine with the simulated device.
fn on_device() -> Option<Command> {
    let directory = simulator()?;
    let mut command = command();
    command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("SWIGLU_CACHE_READ_ONLY_DIR");
    command.env("SWIGLU_CUDA_LIBRARY_PATH", &directory);
    command.env("SWIGLU_CACHE_DIR", directory.join("kernels"));
    // No user's measurements.
    command.env("SWIGLU_TUNING_DIR", directory.join("no-tuning"));
    // A small cache, so that few copies of the weights exceed it.
    command.env("SWIGLU_SIM_L2", "500");
    Some(command)
}

fn swiglu(args: &[&str]) -> Option<Ended> {
    Some(end(on_device()?.args(args)))
}

#[track_caller]
fn json_of(args: &[&str]) -> Option<Value> {
    let ended = swiglu(&[args, &["--json"]].concat())?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    Some(ended.json())
}

#[test]
fn the_best_device_runs_a_layer_and_its_result_is_proved() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let run = ["run", "--seconds", "0.01", "--weights", &layer, "--tokens", "5"];
    for more in [&["--dtype", "f32"][..], &["--dtype", "f32", "--tf32"], &["--dtype", "bf16"]] {
        let Some(report) = json_of(&[&run[..], more].concat()) else { return };
        assert_eq!((&report["device"], &report["passed"]), (&"cuda".into(), &true.into()));
        assert!(report["plan"].as_str().is_some_and(|p| p.starts_with("cuda/")), "{report}");
        for times in ["time_us", "unfused_time_us"] {
            assert!(report[times]["median"].as_f64() > Some(0.0), "{report}");
        }
    }
}

#[test]
fn outputs_agree_with_those_of_the_cpu() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let output = files.name("y.npy");
    let run = ["run", "--seconds", "0.01", "--weights", &layer, "--tokens", "4"];
    let on_cpu = [&run[..], &["--device", "cpu", "--output", &output]].concat();
    let Some(ended) = swiglu(&on_cpu) else { return };
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let again = files.name("z.npy");
    let on_cuda = [&run[..], &["--device", "cuda:0", "--output", &again]].concat();
    assert_eq!(swiglu(&on_cuda).map(|e| e.code), Some(Some(0)));
    let [cpu, cuda] = ["y.npy", "z.npy"].map(|name| support::npy_values(&files.path(name)));
    assert_eq!(cpu.len(), cuda.len());
    let largest = cpu.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    assert!(
        cpu.iter().zip(&cuda).all(|(a, b)| (a - b).abs() <= 1e-5 * largest),
        "{cpu:?} {cuda:?}"
    );
}

/// Gradients are proved on the device too, and a step is timed beside the unfused way.
#[test]
fn backward_proves_and_times_a_step() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let run = ["run", "--seconds", "0.01", "--weights", &layer, "--tokens", "3", "--backward"];
    for (keep, kept) in [("save", 2 * 3 * 16 * 2), ("save-gate", 3 * 16 * 2), ("recompute", 0)] {
        let more = ["--dtype", "bf16", "--device", "cuda", "--keep", keep];
        let Some(mut command) = on_device() else { return };
        // A small cache, so that few copies of the data exceed it.
        command.env("SWIGLU_SIM_L2", "2000").args(run).args(more).arg("--json");
        let ended = end(&mut command);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let report = ended.json();
        assert_eq!((&report["device"], &report["passed"]), (&"cuda".into(), &true.into()));
        assert_eq!(report["kept_bytes"], kept, "{report}");
        for name in ["dx", "dw_gate", "dw_up", "dw_down"] {
            let of = |what| report["gradients"][name][what].as_f64().expect("a number");
            assert!(of("relative_frobenius") <= of("bound"), "{report}");
            assert!(of("eager_error") > 0.0 && of("max_abs") > 0.0, "{report}");
        }
        for times in ["time_us", "unfused_time_us"] {
            assert!(report[times]["median"].as_f64() > Some(0.0), "{report}");
        }
    }
}

/// Every way of a GPU; on the simulator some in f32, which has a fifth of the kernels to compile: the suites of swiglu-cuda
/// judge all.
#[test]
fn check_passes_on_every_way_of_the_device() {
    let gpu = std::path::Path::new("/dev/nvidiactl").exists();
    let check = |kernel: &[&str], dtype| {
        let args = ["check", "--device", "cuda", "--quick", "--dtype", dtype, "--seed", "2"];
        json_of(&[&args[..], kernel].concat())
    };
    let parts: &[&[&str]] =
        if gpu { &[&[]] } else { &[&["--kernel", "unfused"], &["--kernel", "launches"]] };
    let kernels: &[&str] = match gpu {
        true => &["planned", "unfused", "sm90_gated_gemm 128x64", "mma_gated_gemm 16x32"],
        false => &["unfused", "decode_mlp two launches"],
    };
    let mut rows = Vec::new();
    for part in parts {
        let Some(document) = check(part, if gpu { "f16" } else { "f32" }) else { return };
        assert_eq!((&document["failed"], &document["passed"]), (&0.into(), &document["cases"]));
        rows.extend(document["rows"].as_array().expect("rows").clone());
    }
    let has = |kernel: &str, op: &str| rows.iter().any(|r| r["kernel"] == kernel && r["op"] == op);
    for kernel in kernels {
        assert!(rows.iter().any(|r| r["kernel"] == *kernel), "{kernel}: {rows:?}");
    }
    assert!(has("unfused", "mlp backward"), "{rows:?}");
    if !gpu {
        return;
    }
    assert!(has("planned", "mlp backward"), "{rows:?}");
    for kernel in ["planned", "decode_mlp one launch", "decode_mlp two launches"] {
        assert!(has(kernel, "mlp quantised"), "{kernel}: {rows:?}");
    }
}

#[test]
fn bench_has_calls_and_graphs_and_floors() {
    let size = ["--m", "2", "--intermediate", "16", "--hot", "--hidden", "24"];
    let bench = ["--seconds", "0.01", "--dtype", "bf16", "--device", "cuda"];
    for op in ["activation", "gated-linear", "mlp", "mlp-train"] {
        // The activation has no K.
        let size = &size[..if op == "activation" { 5 } else { 7 }];
        let Some(document) = json_of(&[&["bench", op][..], &bench, size].concat()) else { return };
        let results = document["results"].as_array().expect("results");
        let ways: Vec<&str> = results.iter().filter_map(|r| r["profile"].as_str()).collect();
        match op {
            "activation" => assert_eq!(ways, ["planned, graph", "planned"]),
            "mlp-train" => {
                let calls = ["planned", "unfused", "recompute", "products"];
                let graphs = calls.map(|way| format!("{way}, graph"));
                assert_eq!(ways, [graphs.map(|way| way.leak() as &str), calls].concat());
            }
            _ => assert_eq!(ways, ["planned, graph", "unfused, graph", "planned", "unfused"]),
        }
        assert!(results.iter().all(|r| r["status"] == "ok"), "{document}");
        let ceilings = &document["ceilings"][0]["ceilings"];
        assert_eq!(ceilings["memory"]["name"], "copy", "{document}");
        let named = |c: &Value| c["name"] == "bf16 GEMM" && c["per_second"].as_f64() > Some(0.0);
        assert!(ceilings["compute"].as_array().is_some_and(|c| c.iter().any(named)), "{document}");
    }
}

/// The one of every architecture, or those of sm_90a.
fn is_decode_kernel(name: &Value) -> bool {
    ["decode_mlp", "sm90_decode_mlp", "sm90_held_mlp"].iter().any(|kernel| name == kernel)
}

#[test]
fn quantised_weights_are_measured_beside_decoded_ones() {
    let size = ["--m", "3", "--hidden", "64", "--intermediate", "96"];
    let device = ["--device", "cuda"];
    let bench = ["--seconds", "0.01", "--weights-type", "q8_0", "--hot"];
    let Some(document) = json_of(&[&["bench", "mlp"][..], &bench, &size, &device].concat()) else {
        return;
    };
    let results = document["results"].as_array().expect("results");
    let ways: Vec<&str> = results.iter().filter_map(|r| r["profile"].as_str()).collect();
    assert_eq!(ways, ["planned, graph", "decoded, graph", "planned", "decoded"]);
    assert!(results.iter().all(|r| r["status"] == "ok"), "{document}");
    let named = |r: &Value| r["case"].as_str().is_some_and(|c| c.contains(" bf16 Q8_0 "));
    assert!(results.iter().all(named), "{document}");
    // A type that files of blocks do not have.
    let bench = ["--seconds", "0.01", "--weights-type", "f8_e4m3", "--hot"];
    let document = json_of(&[&["bench", "mlp"][..], &bench, &size, &device].concat()).unwrap();
    let results = document["results"].as_array().expect("results");
    assert!(results.len() == 4 && results.iter().all(|r| r["status"] == "ok"), "{document}");

    let explain = ["explain", "--weights-type", "q4_0", "--dtype", "f16"];
    let document = json_of(&[&explain[..], &size, &device].concat()).expect("as before");
    assert!(is_decode_kernel(&document["plan"]["kernel"]), "{document}");
    assert_eq!(document["problem"]["quantized"]["gate_up"], "Q4_0", "{document}");
    let explain = ["explain", "--weights-type", "f8_e4m3_128x128", "--dtype", "bf16"];
    let document = json_of(&[&explain[..], &size, &device].concat()).expect("as before");
    assert!(is_decode_kernel(&document["plan"]["kernel"]), "{document}");
    assert_eq!(document["problem"]["quantized"]["down"], "F8_E4M3_128x128", "{document}");
    let on_cpu = [&["explain", "--weights-type", "i8", "--device", "cpu"][..], &size].concat();
    swiglu(&on_cpu).expect("as before").refused(&["--weights-type I8", "the CPU has kernels for"]);
    for (more, why) in [
        (&["--op", "gated-linear", "--dtype", "f16"][..], "whole feed-forward blocks"),
        (&["--dtype", "f32"], "f16 or bf16"),
    ] {
        let explain = [&["explain", "--weights-type", "q4_0"], more, &size, &device].concat();
        swiglu(&explain).expect("as before").refused(&["--weights-type Q4_0", why]);
    }
}

/// What the host spends, as it needs no clock of a device.
#[test]
fn bench_of_the_host_has_first_and_later_calls() {
    let Some(document) = json_of(&["bench", "--suite", "host", "--seconds", "0.01"]) else {
        return;
    };
    let rows = document.as_array().expect("rows");
    assert_eq!(rows.len(), 5, "{document}");
    assert!(rows.iter().all(|r| r["median"].as_f64() > Some(0.0)), "{document}");
}

#[test]
fn explain_measures_calls_of_a_device() {
    let size = ["--m", "2", "--hidden", "24", "--intermediate", "16", "--dtype", "bf16", "--hot"];
    let Some(document) =
        json_of(&[&["explain", "--measure", "--seconds", "0.01"][..], &size].concat())
    else {
        return;
    };
    let ways = document["measured"]["ways"].as_array().expect("ways");
    assert_eq!(ways.len(), 2, "{document}");
    assert!(ways.iter().all(|w| w["plan"].to_string().contains("cuda/")), "{document}");
}

#[test]
fn explain_lists_what_a_device_chose_from() {
    let args =
        ["explain", "--hidden", "64", "--intermediate", "96", "--m", "300", "--dtype", "f16"];
    let Some(document) = json_of(&args) else { return };
    assert_eq!(document["plan"]["backend"], "cuda");
    let candidates = document["candidates"].as_array().expect("candidates");
    assert_eq!(candidates.iter().filter(|c| c["chosen"] == true).count(), 1, "{document}");
    assert!(candidates.iter().any(|c| c["name"] == "cublaslt + elementwise"), "{document}");
}

/// Each step of the backward pass is computed by one algorithm, and the others say why not.
#[test]
fn explain_backward_has_an_algorithm_for_each_step() {
    let size = ["explain", "--backward", "--m", "300", "--hidden", "64"];
    let explained = |h: &str, dtype: &str| {
        let document = json_of(&[&size[..], &["--intermediate", h, "--dtype", dtype]].concat())?;
        let steps = document["candidates"].as_array().expect("candidates").clone();
        Some((document, steps))
    };
    let Some((document, steps)) = explained("96", "bf16") else { return };
    let chosen = |steps: &[Value]| {
        let taken = steps.iter().filter(|step| step["chosen"] == true);
        let name = |of: &Value| of.as_str().expect("a name").to_owned();
        taken.map(|step| (name(&step["step"]), name(&step["name"]))).collect::<Vec<_>>()
    };
    let differentiated = "sm90_dgated_gemm 128x128 4 consumers";
    let products = ["dx", "dw_gate, dw_up", "dw_down"].map(|step| (step, "cublaslt"));
    let expected = [&[("dgate, dup, h", differentiated)], &products[..]].concat();
    let expected: Vec<_> =
        expected.into_iter().map(|(s, n)| (s.to_owned(), n.to_owned())).collect();
    assert_eq!(chosen(&steps), expected, "{document}");
    let scratch = |document: &Value| {
        let keeps = document["keeps"].as_array().expect("policies");
        keeps.iter().map(|k| k["scratch_bytes"].as_u64().expect("bytes")).collect::<Vec<_>>()
    };
    // Beside the gate both gradients get room, as one product takes them.
    let [save, gate, none] = scratch(&document)[..] else { panic!("{document}") };
    assert_eq!(gate - save, 300 * 2 * 96 * 2, "{document}");
    assert_eq!(none, gate, "gate and up, computed again: {document}");
    // A forward pass of few tokens stores gate and up step by step.
    let saving = document["saving"]["candidates"].as_array().expect("candidates");
    let decode = saving.iter().find(|c| c["name"] == "decode_mlp two launches").expect("a design");
    assert!(decode["reason"].as_str().is_some_and(|why| !why.is_empty()), "{document}");
    for step in &steps {
        let computes = step["chosen"] == true || step["name"] == "cublaslt + elementwise";
        assert!(!computes || step["predicted_us"].as_f64() > Some(0.0), "{step}");
    }
    // Rows that TMA does not write go through the kernel of every architecture, and values that no kernel has step by step.
    let cases =
        [("100", "bf16", "TMA", "mma_dgated_gemm"), ("96", "f32", "f32", "cublaslt + elementwise")];
    for (h, dtype, why, by) in cases {
        let (document, steps) = explained(h, dtype).expect("as before");
        let (step, name) = &chosen(&steps)[0];
        assert!(step == "dgate, dup, h" && name.starts_with(by), "{document}");
        let reason = steps[0]["reason"].as_str().expect("a reason");
        assert!(reason.contains(why), "{reason}");
    }
    let text = swiglu(&[&size[..], &["--intermediate", "96"]].concat()).expect("as before").stdout;
    for part in ["dw_down", "expected ", "up is computed again by cublaslt; ", "meanwhile"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn info_names_the_device_its_libraries_and_the_cache() {
    let Some(document) = json_of(&["info"]) else { return };
    let cuda = &document["cuda"];
    assert_eq!((&cuda["devices"][0]["ordinal"], &cuda["none"]), (&0.into(), &Value::Null));
    for library in cuda["libraries"].as_array().expect("libraries") {
        assert_eq!(library["found"], "environment", "{document}");
    }
    assert!(cuda["cache"].is_string(), "{document}");
    let text = swiglu(&["info"]).expect("as before").stdout;
    assert!(
        text.contains("CUDA       cuda:0 ")
            && text.contains("kernels kept in")
            && text.contains("measurements kept in"),
        "{text}"
    );
}

#[test]
fn a_device_number_that_is_too_large_is_refused_with_the_count() {
    let Some(ended) = swiglu(&["run", "--device", "cuda:9"]) else { return };
    ended.refused(&["CUDA device 9 does not exist", "counted from 0"]);
}

/// What was measured decides the plan of a later process, and is refused when it is damaged.
#[test]
fn tuning_is_kept_and_followed() {
    let Some(mut command) = on_device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let tune = ["tune", "--device", "cuda", "--shape", "5,72,40", "--seconds", "0", "--json"];
    let ended = end(command.args(tune).args(["--out", out]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let report = ended.json();
    // Rates of the device are measured too, and kept beside the record.
    let probed = std::path::Path::new(report["probe"]["kept"].as_str().unwrap());
    assert_eq!(probed.parent(), Some(dir.path()), "{report}");
    let trials = report["entries"][0]["trials"].as_array().unwrap();
    let outcome = |name: &str| {
        let of = trials.iter().find(|t| t["way"] == name).unwrap();
        of["outcome"].as_str().unwrap().to_owned()
    };
    assert_eq!(outcome("sm90_gated_gemm 128x64"), "measured");
    assert_eq!(outcome("mma_gated_gemm 16x32"), "measured");
    assert_eq!(outcome("simt_gated_gemm 128x64"), "refused");
    assert_eq!(outcome("cublaslt + elementwise"), "compared");
    assert_eq!(outcome("cublaslt f32 + elementwise"), "measured");
    let compared = trials.iter().find(|t| t["outcome"] == "compared").unwrap();
    let time = |t: &Value| t.as_f64().unwrap();
    let spread = &compared["p10_p90_us"];
    assert!(time(&spread[0]) <= time(&compared["median_us"]), "{compared}");
    assert!(time(&compared["median_us"]) <= time(&spread[1]), "{compared}");
    let fastest = trials
        .iter()
        .filter(|t| t["outcome"] == "measured")
        .min_by(|a, b| {
            a["median_us"].as_f64().unwrap().total_cmp(&b["median_us"].as_f64().unwrap())
        })
        .unwrap();
    let explain = |device: &str, m: &str| {
        let shape = ["explain", "--op", "gated-linear", "--m", m, "--hidden", "72"];
        let mut command = on_device().unwrap();
        command.args(shape).args(["--intermediate", "40", "--dtype", "bf16", "--json"]);
        end(command.args(["--device", device]).env("SWIGLU_TUNING_DIR", out)).json()
    };
    let explained = explain("cuda", "3");
    let reason = explained["plan"]["reason"].as_str().unwrap();
    assert_eq!(reason, "the least time expected from measurements of 72/40 with 5 tokens");
    let explained = explain("cuda", "5");
    assert_eq!(explained["plan"]["reason"], "the fastest, measured");
    let candidates = explained["candidates"].as_array().unwrap();
    let chosen = candidates.iter().find(|c| c["chosen"] == true).unwrap();
    // Times that are the same but for noise leave the choice to the order of the candidates.
    let same = time(&chosen["measured_us"]) / time(&fastest["median_us"]);
    assert!((1.0..1.005).contains(&same), "{chosen} {fastest}");
    let record = report["record"].as_str().unwrap();
    let text = std::fs::read_to_string(record).unwrap();
    std::fs::write(record, &text[..text.len() / 2]).unwrap();
    let explained = explain("cuda", "3");
    assert!(explained["notes"][0].as_str().unwrap().contains("damaged"), "{explained}");
    assert!(explained["plan"]["reason"].as_str().unwrap().contains("expected"), "{explained}");
}

/// What cuBLASLt proposes for the products of a training step is measured, kept, added to, and said of a plan.
#[test]
fn products_of_training_steps_are_tuned_and_kept() {
    let Some(mut command) = on_device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let tune = |m: &str| {
        let shape = format!("{m},72,40");
        let args = ["tune", "--device", "cuda", "--training", "--seconds", "0", "--json"];
        let ended = end(on_device().unwrap().args(args).args(["--shape", &shape, "--out", out]));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.json()
    };
    let report = tune("24");
    let entries = report["entries"].as_array().unwrap();
    // y, dx, and of three gradients of weights each also added to f32.
    assert_eq!(entries.len(), 8, "{report}");
    for entry in entries {
        let trials = entry["trials"].as_array().unwrap();
        assert_eq!(trials.len(), 4, "{entry}");
        let measured = |t: &Value| t["outcome"] == "measured" && t["median_us"].is_number();
        assert!(trials.iter().all(measured), "{entry}");
    }
    let gemm = |entry: &Value, name: &str| entry["gemm"][name].clone();
    let added = entries.iter().filter(|e| gemm(e, "accumulate") == true);
    assert!(added.clone().count() == 3 && added.clone().all(|e| gemm(e, "out") == "f32"));
    tune("48");
    let record = report["record"].as_str().unwrap();
    assert!(record.ends_with(".gemms.json"), "{record}");
    let text = std::fs::read_to_string(record).unwrap();
    assert_eq!(text.matches("\"gemm\"").count(), 16);
    let first = &entries[0];
    assert_eq!((&first["steps"], first["taken"].is_number()), (&json!(["dx"]), true), "{first}");
    // What is refused gives way to what is measured, and not to a request that measures nothing.
    std::fs::write(record, "no record").unwrap();
    let refused = ["tune", "--device", "cuda", "--training", "--shape", "8,8,8", "--dtype", "f32"];
    end(on_device().unwrap().args(refused).args(["--out", out])).refused(&["bf16 or f16"]);
    assert_eq!(std::fs::read_to_string(record).unwrap(), "no record");
    assert!(tune("24")["replaced"].as_str().unwrap().contains("damaged"));
    tune("48");
    let shape = ["explain", "--m", "24", "--hidden", "72", "--intermediate", "40", "--json"];
    command.args(shape).args(["--dtype", "bf16", "--device", "cuda"]);
    let explained = end(command.env("SWIGLU_TUNING_DIR", out)).json();
    let notes = explained["notes"].as_array().unwrap();
    let said = |note: &Value| {
        note.as_str().unwrap().contains("16 products measured for cuBLASLt 13.0, and no other")
    };
    assert!(notes.iter().any(said), "{explained}");
}

/// A request that is ended keeps what it has measured, says how much that is, and ends as unfinished.
#[test]
fn tuning_that_is_ended_keeps_what_it_has_measured() {
    for (training, file) in [(&["--training"][..], "gemms.json"), (&[], "json")] {
        let Some(mut command) = on_device() else { return };
        let dir = tempfile::tempdir().unwrap();
        let shapes = (1..2000).flat_map(|m| ["--shape".to_owned(), format!("{m},8,8")]);
        command.args(["tune", "--device", "cuda", "--seconds", "0", "--json"]).args(training);
        command.arg("--out").arg(dir.path()).args(shapes);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let name = format!("simulated-gpu--sm-90--sm_90a.{file}");
        let record = dir.path().join(name);
        while !record.exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(75), "{stderr}");
        let said = "stopping after what is being compiled or measured, which is kept; a second Ctrl-C stops now";
        assert!(stderr.contains(said), "{stderr}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let entries = report["entries"].as_array().unwrap().len();
        let kept: Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
        assert!(
            entries > 0 && kept["record"]["entries"].as_array().map(Vec::len) == Some(entries),
            "{kept}"
        );
    }
}

#[test]
fn tuning_refuses_what_it_cannot_do() {
    let Some(ended) = swiglu(&["tune", "--device", "cuda"]) else { return };
    ended.refused(&["--shape", "--models"]);
    let ended = swiglu(&["tune", "--device", "cuda", "--shape", "5,72"]).unwrap();
    ended.refused(&["5,72", "three numbers"]);
    let ended = swiglu(&["tune", "--device", "cpu", "--shape", "5,72,40"]).unwrap();
    ended.refused(&["nothing to tune on cpu"]);
    let file = tempfile::NamedTempFile::new().unwrap();
    let out = file.path().to_str().unwrap();
    let shape = ["tune", "--device", "cuda", "--shape", "1,8,8", "--seconds", "0", "--out", out];
    swiglu(&shape).unwrap().refused(&[
        out,
        "cannot be kept there",
        "a directory that can be written",
    ]);
    swiglu(&[&shape[..], &["--training"]].concat()).unwrap().refused(&[
        out,
        "cannot be kept there",
        "a directory that can be written",
    ]);
    let f32 = ["tune", "--device", "cuda", "--training", "--shape", "8,8,8", "--dtype", "f32"];
    swiglu(&f32).unwrap().refused(&["bf16 or f16, given f32", "leave out --dtype"]);
    let exp = ["tune", "--device", "cuda", "--training", "--shape", "8,8,8", "--exp", "fast"];
    swiglu(&exp).unwrap().refused(&["--exp", "--training"]);
}
