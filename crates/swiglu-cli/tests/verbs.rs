//! The other verbs: what they print and how they end.

mod support;

use std::io::Read;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use support::{SMOLLM2, STORIES, command, json_of, swiglu};

#[test]
fn check_passes_and_counts() {
    // One element type, or all: the suites of swiglu-cpu judge all.
    let part = match std::env::var_os(swiglu_testing::ALL) {
        Some(_) => &[][..],
        None => &["--dtype", "f16"],
    };
    let document = json_of(&[&["check", "--quick", "--seed", "3"], part].concat());
    let count = |name: &str| document[name].as_u64().expect("a number");
    assert_eq!((count("passed"), count("failed")), (count("cases"), 0), "{document}");
    let rows = document["rows"].as_array().expect("rows");
    for op in [
        "activation",
        "activation bits",
        "gated-linear",
        "gated-linear backward",
        "gated-linear quantised",
        "mlp",
        "mlp backward",
        "mlp quantised",
    ] {
        assert!(rows.iter().any(|r| r["op"] == op && r["kernel"] == "portable"), "{op}");
    }
}

#[test]
fn check_of_some_kernels_takes_no_others() {
    let some = ["check", "--quick", "--dtype", "f32", "--threads", "1", "--device", "cpu"];
    let document = json_of(&[&some[..], &["--kernel", "port"]].concat());
    let rows = document["rows"].as_array().expect("rows");
    assert!(rows.len() > 5 && rows.iter().all(|r| r["kernel"] == "portable"), "{document}");
    let none = [&some[..], &["--kernel", "sm10"]].concat();
    swiglu(&none).refused(&["`sm10`", "there are: portable"]);
}

#[test]
fn check_prints_a_table_of_the_forced_kernel() {
    let ended =
        swiglu(&["check", "--quick", "--isa", "portable", "--threads", "1", "--dtype", "bf16"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stdout.lines().filter(|l| l.starts_with("portable")).count(), 8, "{ended:?}");
    assert!(ended.stdout.contains("cases passed, threads 1;"), "{ended:?}");
}

#[test]
fn bench_of_one_operation_has_every_way_and_field() {
    let size = ["--m", "3", "--intermediate", "48", "--hot", "--hidden", "40"];
    for op in ["activation", "gated-linear", "mlp", "mlp-train"] {
        // The activation has no K.
        let size = &size[..if op == "activation" { 5 } else { 7 }];
        let args = [&["bench", op, "--seconds", "0.01", "--dtype", "bf16"], size].concat();
        let document = json_of(&args);
        let results = document["results"].as_array().expect("results");
        let ways: Vec<&str> = results.iter().filter_map(|r| r["profile"].as_str()).collect();
        match op {
            "activation" => assert_eq!(ways, ["planned"]),
            "mlp-train" => assert_eq!(ways, ["planned", "unfused", "recompute"]),
            _ => assert_eq!(ways, ["planned", "unfused"]),
        }
        for r in results {
            assert_eq!(r["status"], "ok", "{r}");
            let named = |c: &str| c.starts_with(op) && c.ends_with(" bf16 hot");
            assert!(r["case"].as_str().is_some_and(named), "{r}");
            for name in ["median", "q1", "q3", "min"] {
                assert!(r["summary"][name].as_f64() > Some(0.0), "{name} of {r}");
            }
            assert!(r["gflops"].is_f64() && r["gbytes_per_s"].is_f64(), "{r}");
            let error = |name: &str| r["error"][name].as_f64().expect("a number");
            assert!(error("relative_frobenius") <= error("frobenius_limit"), "{r}");
            assert!(r["fraction"].as_f64() > Some(0.0), "{r}");
        }
        let ceilings = &document["ceilings"][0]["ceilings"];
        assert!(ceilings["compute"][0]["per_second"].as_f64() > Some(0.0), "{document}");
    }
}

#[test]
fn bench_of_quantised_weights_compares_them_with_decoded_ones() {
    let size = ["--m", "2", "--hidden", "64", "--intermediate", "96", "--hot"];
    for op in ["gated-linear", "mlp"] {
        let args = [&["bench", op, "--seconds", "0.01", "--weights-type", "q4_0"], &size[..]];
        let document = json_of(&args.concat());
        let results = document["results"].as_array().expect("results");
        let ways: Vec<&str> = results.iter().filter_map(|r| r["profile"].as_str()).collect();
        assert_eq!(ways, ["planned", "decoded"]);
        for r in results {
            let named = |c: &str| c.ends_with(" f32 Q4_0 hot");
            assert!(r["status"] == "ok" && r["case"].as_str().is_some_and(named), "{r}");
        }
        assert!(results[0]["ratio"].is_f64() && results[1]["ratio"].is_null(), "{document}");
    }
    swiglu(&["bench", "activation", "--weights-type", "q4_0"]).refused(&["no weights"]);
    swiglu(&["bench", "mlp-train", "--weights-type", "q4_0"]).refused(&["have no gradients"]);
    swiglu(&["bench", "mlp", "--weights-type", "q8_k"]).refused(&["q8_k", "Q4_0"]);
    swiglu(&["bench", "mlp", "--weights-type", "q4_k"]).refused(&["896", "Q4_K blocks of 256"]);
}

/// Data from memory have what reads alone beside them, and are held against that; several numbers of tokens
/// are several cases.
#[test]
fn bench_of_cold_weights_has_reading_alone_as_the_ceiling() {
    let size = ["--m", "1,3", "--hidden", "40", "--intermediate", "48", "--dtype", "f32"];
    let document = json_of(&[&["bench", "gated-linear", "--seconds", "0.01"], &size[..]].concat());
    let results = document["results"].as_array().expect("results");
    assert_eq!(results.len(), 2 * 3, "{document}");
    let read = results.iter().filter(|r| r["profile"] == "read" && r["role"] == "ceiling");
    for r in read.clone() {
        assert!(r["gbytes_per_s"].is_f64() && r["fraction"].is_null() && r["ratio"].is_null());
    }
    assert_eq!(read.count(), 2, "{document}");
}

#[test]
fn explain_names_the_plan_its_rivals_and_the_floor() {
    let size = ["--hidden", "64", "--intermediate", "96", "--m", "2", "--dtype", "f16"];
    // An activation has no hidden size.
    let of = |op: &str| &size[if op == "activation" { 2 } else { 0 }..];
    let packed = ["--arrangement", "gate-first", "--orientation", "in-out"];
    for (op, layout) in [("activation", &packed[..2]), ("gated-linear", &[]), ("mlp", &packed[..])]
    {
        let document = json_of(&[&["explain", "--op", op], of(op), layout].concat());
        assert_eq!(
            (&document["problem"]["op"], &document["plan"]["backend"]),
            (&op.into(), &"cpu".into())
        );
        assert!(document["candidates"].as_array().is_some_and(|c| c.len() >= 4), "{document}");
        assert!(document["floor"]["us"].as_f64() > Some(0.0), "{document}");
        let arrangement = if layout.is_empty() { "separate" } else { "packed-gate-first" };
        let orientation = layout.get(3).unwrap_or(&"out-in");
        let expected =
            serde_json::json!({ "orientation": orientation, "arrangement": arrangement });
        assert_eq!(document["problem"]["layout"], expected, "{document}");
        assert_eq!(document["plan"]["problem"]["layout"], expected, "{document}");
    }
    // What the machine can do is measured each time; one thread is told that sooner.
    let one = ["explain", "--threads", "1"];
    let quantised = [&one[..], &["--weights-type", "q8_0"], &size].concat();
    let document = json_of(&quantised);
    assert_eq!(document["problem"]["quantized"]["down"], "Q8_0", "{document}");
    // Three matrices of 34 bytes per 32 weights; x and y of two tokens in f16.
    let bytes = 3.0 * 64.0 * 96.0 * 34.0 / 32.0 + 2.0 * 2.0 * 64.0 * 2.0;
    assert_eq!(document["compulsory_bytes"].as_f64(), Some(bytes));
    swiglu(&[&quantised[..], &["--op", "activation"]].concat()).refused(&["no weights"]);
    swiglu(&["explain", "--hidden", "896", "--intermediate", "4864", "--weights-type", "q4_k"])
        .refused(&["896 inputs", "blocks of 256"]);
    let file = [&one[..], &["--weights", SMOLLM2, "--layer", "28"]].concat();
    assert!(swiglu(&file).stdout.contains("weights as Q4_1"));
    let decoded = swiglu(&[&file[..], &["--decode-weights"]].concat()).stdout;
    assert!(!decoded.contains("weights as Q4_1"), "{decoded}");
    assert!(decoded.contains("decoding was asked for"), "{decoded}");

    let ended = swiglu(&["explain", "--weights", STORIES, "--m", "5"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in ["mlp f32 m=5 hidden=288", "plan", "candidates", "floor"] {
        assert!(ended.stdout.contains(part), "{part}: {ended:?}");
    }
}

/// Both passes of a training step, and the bytes of a token that each policy keeps: 2H values, H or none.
#[test]
fn explain_backward_has_both_passes_and_what_policies_keep() {
    let size = ["--hidden", "64", "--intermediate", "96", "--m", "8", "--dtype", "bf16"];
    // What the machine can do is measured each time; one thread is told that sooner.
    let backward = [&["explain", "--backward", "--threads", "1"], &size[..]].concat();
    for op in ["gated-linear", "mlp"] {
        let document = json_of(&[&backward[..], &["--op", op]].concat());
        let passes = [&document["saving"]["problem"]["pass"], &document["problem"]["pass"]];
        assert_eq!(passes, ["saving", "backward"], "{document}");
        let keeps = document["keeps"].as_array().expect("policies");
        let kept: Vec<_> = keeps.iter().map(|k| (&k["policy"], &k["bytes_per_token"])).collect();
        let [save, gate, none] = [4 * 96, 2 * 96, 0].map(serde_json::Value::from);
        let names = ["save", "save-gate", "recompute"].map(serde_json::Value::from);
        assert_eq!(kept, [(&names[0], &save), (&names[1], &gate), (&names[2], &none)]);
        let [saving, gradients] =
            [&document["saving"]["flops"], &document["flops"]].map(|f| f.as_f64().expect("work"));
        assert!(gradients == 2.0 * saving && saving > 0.0, "{document}");
        assert!(document["floor"]["us"].as_f64() > Some(0.0), "{document}");
    }
    let text = swiglu(&backward).stdout;
    for part in
        [" saving\n", " backward\n", "384 B a token, nothing is computed again", "for both passes"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let activation = ["explain", "--backward", "--op", "activation", "--intermediate", "96"];
    swiglu(&activation).refused(&["training of the activation", "no weights to train"]);
    let quantised =
        ["explain", "--backward", "--threads", "1", "--weights", SMOLLM2, "--layer", "28"];
    swiglu(&quantised).refused(&["no gradients", "--decode-weights"]);
    let decoded = swiglu(&[&quantised[..], &["--decode-weights"]].concat());
    assert!(decoded.stdout.contains("decoding was asked for"), "{decoded:?}");
    for other in [&["--measure"][..], &["--weights-type", "q8_0"]] {
        swiglu(&[&backward[..], other].concat()).refused(&["--backward", other[0]]);
    }
}

#[test]
fn info_says_what_is_here_and_what_is_not() {
    let document = json_of(&["info"]);
    assert_eq!(document["version"], env!("CARGO_PKG_VERSION"));
    assert!(document["threads"].as_u64() > Some(0));
    assert!(document["isas"].as_array().is_some_and(|i| i.len() == swiglu_cpu::Isa::ALL.len()));
    let libraries = document["cuda"]["libraries"].as_array().expect("libraries");
    assert_eq!(libraries.len(), 3, "{document}");
    let text = swiglu(&["info"]).stdout;
    assert!(text.contains("portable") && text.contains("CUDA       no device: "), "{text}");
    // Without a device there is nothing to measure, which is said.
    let probed = swiglu(&["info", "--probe"]);
    let text = text.replacen("no device: ", "no device to probe: ", 1);
    assert_eq!((probed.code, probed.stdout), (Some(0), text));
    assert_eq!(json_of(&["info", "--probe"]), document);
}

/// A path is text in a document, whatever bytes it has.
#[cfg(unix)]
#[test]
fn paths_that_are_not_utf8_are_shown_in_whole_documents() {
    use std::os::unix::ffi::OsStrExt;
    let dir = support::Files::new();
    let odd = dir.path("").join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
    let info = support::end(command().args(["info", "--json"]).env("SWIGLU_CACHE_DIR", &odd));
    assert_eq!(info.code, Some(0), "{info:?}");
    let cache = info.json()["cuda"]["cache"].as_str().unwrap_or_default().to_owned();
    assert!(cache.ends_with("caf\u{fffd}"), "{cache}");

    std::fs::create_dir_all(odd.join("experiments")).expect("a new directory");
    let mut report = command();
    report.args(["lab", "report", "--json", "--lab"]).arg(&odd);
    let report = support::end(report.arg("--out").arg(odd.join("site")));
    assert_eq!(report.code, Some(0), "{report:?}");
    assert!(report.json()["index"].as_str().is_some_and(|i| i.ends_with("site/index.html")));
}

#[test]
fn completions_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ended = swiglu(&["completions", shell]);
        assert!(ended.code == Some(0) && ended.stdout.contains("completions"), "{shell}");
    }
}

/// Names of environment variables in the sources, but for those of tests.
fn variables(dir: &std::path::Path, found: &mut std::collections::BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).expect("sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            variables(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = std::fs::read_to_string(&path).expect("text");
            let quoted = text.split('"').filter(|s| s.starts_with("SWIGLU_"));
            let names = quoted.filter(|s| s.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'));
            found.extend(names.filter(|s| !s.contains("TEST")).map(str::to_owned));
        }
    }
}

#[test]
fn the_help_names_every_variable_that_is_read() {
    let help = swiglu(&["--help"]).stdout;
    let mut found = std::collections::BTreeSet::new();
    for name in ["swiglu", "swiglu-cpu", "swiglu-cuda", "swiglu-lab"] {
        let sources = format!("{}/../{name}/src", env!("CARGO_MANIFEST_DIR"));
        variables(std::path::Path::new(&sources), &mut found);
    }
    assert!(found.contains("SWIGLU_CACHE_DIR"), "{found:?}");
    for name in found {
        assert!(help.contains(&name), "{name}: {help}");
    }
}

#[test]
fn help_and_version_are_not_errors() {
    for verb in ["run", "check", "bench", "explain", "info", "completions"] {
        let ended = swiglu(&[verb, "--help"]);
        assert!(ended.code == Some(0) && ended.stdout.contains("--json"), "{ended:?}");
    }
    assert!(swiglu(&["--version"]).stdout.starts_with("swiglu "));
}

#[test]
fn a_reader_that_leaves_early_ends_the_program_without_a_word() {
    for args in [&["completions", "bash"][..], &["info"], &["info", "--json"], &["--help"]] {
        // It has left before the first word. A pipe's end might live on in a process that another test is about to start.
        let (reader, stdout) = UnixStream::pair().expect("two ends");
        reader.shutdown(Shutdown::Both).expect("an end that can be closed");
        let mut child = command()
            .args(args)
            .stdout(OwnedFd::from(stdout))
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut stderr = String::new();
        child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("UTF-8");
        let status = child.wait().expect("the binary ends");
        // As `cat` and others, by SIGPIPE.
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert!(signal == Some(13) && stderr.is_empty(), "{args:?} {status} {stderr}");
    }
}
