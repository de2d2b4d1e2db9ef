//! Bad input of every kind: a clear message, exit code 2, no panic, nothing left behind.

mod options;
#[path = "../support/mod.rs"]
mod support;

use support::{
    Ended, Files, SMOLLM2, STORIES, Tensor, command, end, layer_tensors, npy, raw_safetensors,
    safetensors, swiglu, tensor,
};

fn run(args: &[&str]) -> Ended {
    swiglu(&[&["run", "--seconds", "0.01"], args].concat())
}

/// A run of a layer file with these bytes.
fn run_file(name: &str, bytes: &[u8]) -> Ended {
    let files = Files::new();
    let path = files.write(name, bytes);
    run(&["--weights", &path])
}

#[test]
fn truncated_files() {
    let whole = safetensors(&layer_tensors());
    for len in [3, 8, 60, whole.len() - 1] {
        run_file("layer.safetensors", &whole[..len]).refused(&["layer.safetensors"]);
    }
    let gguf = std::fs::read(SMOLLM2).expect("the fixture is there");
    for len in [10, 200, gguf.len() - 1] {
        run_file("layer.gguf", &gguf[..len]).refused(&["layer.gguf"]);
    }
    let files = Files::new();
    let whole = npy(2, 288, &[0.5; 576]);
    let input = files.write("x.npy", &whole[..whole.len() - 5]);
    run(&["--weights", STORIES, "--input", &input]).refused(&["x.npy", "truncated"]);
}

#[test]
fn a_header_that_claims_to_be_enormous() {
    let mut bytes = u64::MAX.to_le_bytes().to_vec();
    bytes.extend(b"{}");
    run_file("layer.safetensors", &bytes).refused(&["layer.safetensors"]);
    bytes[..8].copy_from_slice(&(1u64 << 31).to_le_bytes());
    run_file("layer.safetensors", &bytes).refused(&["layer.safetensors"]);
}

#[test]
fn tensors_that_overlap() {
    let entry = |name: &str, shape: &str| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[0,240]}}"#)
    };
    let header = format!(
        "{{{},{},{}}}",
        entry("model.layers.0.mlp.gate_proj.weight", "[10,6]"),
        entry("model.layers.0.mlp.up_proj.weight", "[10,6]"),
        entry("model.layers.0.mlp.down_proj.weight", "[6,10]"),
    );
    run_file("layer.safetensors", &raw_safetensors(&header, &[0; 240]))
        .refused(&["layer.safetensors"]);
}

/// A layer of one-byte elements without anything beside them.
fn of_one_byte(dtype: &str) -> Vec<u8> {
    let header = layer_tensors()
        .iter()
        .enumerate()
        .map(|(i, t)| {
            let (start, shape) = (i * 60, &t.shape);
            let end = start + 60;
            format!(
                r#""{}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#,
                t.name
            )
        })
        .collect::<Vec<_>>()
        .join(",");
    raw_safetensors(&format!("{{{header}}}"), &[0; 180])
}

#[test]
fn element_types_that_are_not_read() {
    run_file("layer.safetensors", &of_one_byte("BOOL")).refused(&["BOOL", "F32"]);
}

#[test]
fn codes_without_scales() {
    for dtype in ["I8", "F8_E4M3", "F8_E5M2"] {
        run_file("layer.safetensors", &of_one_byte(dtype)).refused(&[
            dtype,
            "no scales",
            "weight_scale_inv",
        ]);
    }
}

#[test]
fn files_of_another_kind() {
    run_file("layer.safetensors", b"not a model at all, but some text")
        .refused(&["layer.safetensors", "text, which begins with"]);
    run_file("layer.txt", b"\xb9\x86M\xbf").refused(&["unknown format"]);
    run_file("layer.safetensors", b"").refused(&["layer.safetensors"]);
    run(&["--weights", "no/such/file.gguf"]).refused(&["no/such/file.gguf", "No such file"]);
}

#[test]
fn names_without_a_file() {
    let input = format!("{STORIES}#acts.layers.0.mlp_in");
    for (option, more) in [("--input", &[][..]), ("--reference", &["--input", &input])] {
        for name in ["", "#x"] {
            run(&[more, &[option, name]].concat()).refused(&[option, name, "names no file"]);
        }
    }
}

#[test]
fn a_directory_instead_of_a_file() {
    let files = Files::new();
    run(&["--weights", &files.name("")]).refused(&["model.safetensors"]);
    let input = files.name("x.npy");
    std::fs::create_dir(&input).expect("the directory can be made");
    run(&["--input", &input]).refused(&["--input", "x.npy", "is a directory", "FILE.npy"]);
}

#[test]
fn values_that_are_no_numbers() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    for (value, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut x = vec![0.5f32; 18];
        x[10] = value;
        let input = files.write("x.npy", npy(3, 6, &x));
        for dtype in ["f32", "f16"] {
            let args = ["--weights", &layer, "--input", &input, "--dtype", dtype];
            run(&args).refused(&["input[1, 4] is", name, "in the file", "--allow-non-finite"]);
        }

        let mut tensors = layer_tensors();
        tensors[2].values[21] = value;
        let bad = files.write("bad.safetensors", safetensors(&tensors));
        run(&["--weights", &bad]).refused(&["down_proj", "[2, 1]", name, "--allow-non-finite"]);
    }
}

#[test]
fn values_that_overflow_the_asked_for_type() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let run = |dtype: &str, value: f32| {
        let input = files.write("x.npy", npy(1, 6, &[0.0, value, 0.0, 0.0, 0.0, 0.0]));
        run(&["--weights", &layer, "--input", &input, "--dtype", dtype])
    };
    let becomes = "input[0, 1] becomes inf in ";
    run("f16", 1e6).refused(&[becomes, "--dtype f32, --dtype bf16, or --allow-non-finite"]);
    let refused = run("bf16", f32::MAX);
    refused.refused(&[becomes, "3.390e38", "numbers, --dtype f32, or --allow"]);
}

#[test]
fn shapes_that_do_not_fit() {
    let files = Files::new();
    let input = files.write("x.npy", npy(2, 5, &[0.5; 10]));
    run(&["--weights", STORIES, "--input", &input]).refused(&["[2, 288]", "[2, 5]"]);

    let input = files.write("x.npy", npy(2, 288, &[0.5; 576]));
    let reference = files.write("ref.npy", npy(2, 287, &[0.5; 574]));
    run(&["--weights", STORIES, "--input", &input, "--reference", &reference]).refused(&[
        "reference",
        "[2, 288]",
        "[2, 287]",
    ]);

    let mut tensors = layer_tensors();
    tensors[1] = Tensor { name: tensors[1].name, ..tensor("", &[9, 6]) };
    run_file("layer.safetensors", &safetensors(&tensors)).refused(&["[10, 6]", "[9, 6]"]);
}

#[test]
fn outputs_that_cannot_be_written_leave_nothing() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let output = files.name("missing/y.npy");
    run(&["--weights", &layer, "--output", &output]).refused(&["y.npy", "no such directory"]);
    let output = files.name("layer.safetensors/y.npy");
    run(&["--weights", &layer, "--output", &output]).refused(&["y.npy"]);
    run(&["--weights", &layer, "--output", &files.name("")]).refused(&["directory"]);
    run(&["--weights", &layer, "--output", &files.name("y.safetensors")]).refused(&[".npy"]);
    assert_eq!(files.list(), ["layer.safetensors"]);
}

#[cfg(target_os = "linux")]
#[test]
fn what_has_no_room_is_named() {
    let helps = [&["--help"][..], &["--version"], &["help", "lab"]];
    for args in [&["info"][..], &["completions", "zsh"]].into_iter().chain(helps) {
        let full = std::fs::File::create("/dev/full").expect("every Linux has it");
        let mut command = support::command();
        let refused = support::end(command.args(args).stdout(full));
        refused.refused(&["standard output: ", "No space left"]);
    }
}

#[test]
fn what_is_read_is_not_written_over() {
    let files = Files::new();
    let layer = files.write("layer.npy", safetensors(&layer_tensors()));
    let input = files.write("x.npy", npy(2, 4, &[0.5; 8]));
    for (option, read) in [("--weights", &layer), ("--input", &input)] {
        let before = std::fs::read(read).unwrap();
        run(&[option, read, "--output", read, "--force"]).refused(&["reads that file"]);
        assert_eq!(std::fs::read(read).unwrap(), before);
    }
    // Names that say more than a file, or look so.
    let numbered = files.write("a#b#c.npy", npy(2, 4, &[0.5; 8]));
    let tensor = format!("{layer}#w");
    for (given, output) in [(&numbered, &numbered), (&tensor, &layer)] {
        let args = ["--weights", STORIES, "--input", given, "--output", output, "--force"];
        run(&args).refused(&["reads that file"]);
        let args = [&args[..2], &["--input", &input, "--reference", given], &args[4..]].concat();
        run(&args).refused(&["reads that file"]);
    }
}

#[test]
fn a_script_is_no_document() {
    let message = swiglu(&["completions", "bash", "--json"]).refused_as_json();
    assert!(message.contains("leave the option out"), "{message}");
}

/// Also where it is the options that are not understood; behind `--` it is a name like any other.
#[test]
fn a_line_that_is_not_understood_is_refused_as_a_document() {
    let message = swiglu(&["run", "--seconds", "x", "--json"]).refused_as_json();
    assert!(message.starts_with("invalid value 'x' for '--seconds <S>'"), "{message}");
    assert!(!message.contains("--help"), "{message}");
    swiglu(&["run", "--nonsense", "--", "--json"]).refused(&["--nonsense"]);
}

#[test]
fn a_square_packed_layer_is_not_guessed() {
    let files = Files::new();
    let both = files.write("both.safetensors", safetensors(&[tensor("w", &[12, 12])]));
    let args = ["--weights", &both, "--gate-up-name", "w", "--op", "gated-linear"];
    run(&args).refused(&["ambiguous", "gate-first"]);
    run(&[&args[..], &["--arrangement", "gate-first"]].concat()).refused(&["ambiguous", "out-in"]);
    let decided = [&args[..], &["--arrangement", "gate-first", "--orientation", "in-out"]].concat();
    assert_eq!(run(&decided).code, Some(0));
    // The block needs a down weight.
    run(&[
        "--weights",
        &both,
        "--gate-up-name",
        "w",
        "--arrangement",
        "up-first",
        "--orientation",
        "out-in",
    ])
    .refused(&["down", "--down-name", "--op gated-linear"]);
}

#[test]
fn a_configuration_that_cannot_be_understood() {
    for (config, part) in [
        ("{", "no JSON"),
        ("[]", "no object"),
        (r#"{"hidden_act":5}"#, "hidden_act = 5"),
        (r#"{"model_type":"gpt_oss","swiglu_limit":-1}"#, "swiglu_limit = -1"),
    ] {
        let files = Files::new();
        let path = files.write("layer.safetensors", safetensors(&layer_tensors()));
        files.write("config.json", config);
        run(&["--weights", &path]).refused(&["config.json", part]);
    }
}

#[test]
fn more_than_the_machine_has() {
    let most = "1073741824";
    run(&["--tokens", most, "--weights", STORIES]).refused(&["memory"]);
    swiglu(&["bench", "mlp", "--m", most, "--seconds", "0.01"]).refused(&["memory"]);
    // A plan needs numbers, not memory.
    let explained = swiglu(&["explain", "--hidden", "100000000", "--intermediate", "100000000"]);
    assert_eq!(explained.code, Some(0), "{explained:?}");
    run(&["--threads", "1000000"]).refused(&["threads = 1000000", "expected 1 to"]);
}

/// Two copies of the input do not fit where one does: no part of a run may take memory without asking.
#[cfg(target_os = "linux")]
#[test]
fn more_than_this_process_may_have() {
    // In units of 1024 bytes; the input has 200 MB.
    let limited = "ulimit -v 360000 && exec \"$0\" \"$@\"";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", limited, env!("CARGO_BIN_EXE_swiglu"), "run", "--device", "cpu"]);
    shell.args(["--weights", STORIES, "--tokens", "175000", "--threads", "1"]);
    // Each thread reserves address space of its own.
    shell.env("RAYON_NUM_THREADS", "1").env("CUDA_VISIBLE_DEVICES", "");
    support::end(&mut shell).refused(&["memory for a ", "175000×288"]);
}
