//! Options that are not known, out of range, or would not be heeded.

use super::*;

#[test]
fn names_that_are_not_known() {
    for (args, parts) in [
        (&["--activation", "swish"][..], &["swish", "geglu-tanh"][..]),
        (&["--dtype", "int8"], &["int8", "bf16"]),
        (&["--numerics", "sloppy"], &["sloppy", "pre_round"]),
        (&["--exp", "quick"], &["quick", "precise"]),
        (&["--isa", "neon"], &["neon", "portable"]),
        (&["--device", "tpu"], &["tpu", "cpu"]),
        (&["--fixture", "gpt5"], &["gpt5", "smollm2"]),
        (&["--weights", STORIES, "--orientation", "up"], &["up", "out-in"]),
        (&["--weights", STORIES, "--arrangement", "mixed"], &["mixed", "gate-first"]),
        (&["--no-such-option"], &["--no-such-option"]),
    ] {
        run(args).refused(parts);
    }
    run(&["--weights", STORIES, "--gate-name", "nope", "--up-name", "nope"]).refused(&["nope"]);
    let spec = format!("{STORIES}#nope");
    run(&["--weights", STORIES, "--input", &spec]).refused(&["nope", "nearest"]);
    swiglu(&["walk"]).refused(&["walk"]);
    swiglu(&["bench", "softmax"]).refused(&["softmax", "gated-linear"]);
}

#[test]
fn devices_that_are_not_there() {
    for verb in [&["run"][..], &["check"], &["bench"], &["explain", "--weights", STORIES]] {
        for device in ["cuda", "cuda:7"] {
            swiglu(&[verb, &["--device", device]].concat()).refused(&["NVIDIA driver"]);
        }
    }
    run(&["--device", "cuda:x"]).refused(&["cuda:x", "cuda:N"]);
}

#[test]
fn options_of_another_device() {
    run(&["--device", "cuda", "--threads", "1"]).refused(&["--threads", "--device cpu"]);
    run(&["--device", "cuda:1", "--isa", "portable"]).refused(&["--isa", "--device cpu"]);
    run(&["--device", "cpu", "--tf32"]).refused(&["--tf32", "CUDA"]);
    run(&["--threads", "1", "--tf32"]).refused(&["--tf32", "CUDA"]);
}

#[test]
fn locks_that_cannot_lie_where_they_should() {
    let files = Files::new();
    let no_directory = files.write("file", "");
    let bench = ["bench", "activation", "--rows", "4", "--cols", "4", "--seconds", "0"];
    end(command().args(bench).env("SWIGLU_LAB_LOCK_DIR", &no_directory)).refused(&[
        "create directory",
        &no_directory,
        "SWIGLU_LAB_LOCK_DIR says where",
    ]);
}

#[test]
fn threads_that_cannot_be_started() {
    let without = |threads| {
        let args = ["run", "--seconds", "0", "--device", "cpu", "--threads", threads];
        // No address space has room for their stacks.
        end(command().args(args).env("RUST_MIN_STACK", (1u64 << 47).to_string()))
    };
    without("2").refused(&["a pool of 1 threads", "one thread needs none (--threads 1)"]);
    assert_eq!(without("1").code, Some(0));
}

#[test]
fn numbers_out_of_range() {
    run(&["--weights", STORIES, "--layer", "7"]).refused(&["layer 7", "0"]);
    run(&["--weights", STORIES, "--expert", "1"]).refused(&["expert"]);
    run(&["--activation", "swiglu(beta=nan)"]).refused(&["NaN", "finite"]);
    run(&["--activation", "swiglu(beta=1e300)"]).refused(&["beta=1e300", "3.4028235e38"]);
    run(&["--threads", "0"]).refused(&["threads = 0", "expected 1 to", "processors"]);
    // One parser, which says the range.
    let gate = ["lab", "gate", "e", "--tolerance"];
    let build = ["kernels", "build", "--arch", "sm_80", "--out", "o", "--shape", "8,8", "--sms"];
    let of_run = |option| ["run", "--weights", STORIES, option];
    for (verb, range) in [
        (&of_run("--tokens")[..], "whole number from 0 to "),
        (&of_run("--seed"), "whole number from 0 to "),
        (&of_run("--layer"), "whole number from 0 to "),
        (&of_run("--expert"), "whole number from 0 to "),
        (&of_run("--rescale"), "whole number from -64 to 64"),
        (&of_run("--threads"), "whole number from 0 to "),
        (&of_run("--seconds"), "number from 0 to 3600"),
        (&["check", "--seed"], "whole number from 0 to "),
        (&["lab", "run", "e", "--preparations"], "whole number from 2 to 5"),
        (&["lab", "run", "e", "--until-decided"], "whole number from 1 to 600"),
        (&gate, "number from 0 to 0.99"),
        (&build, "whole number from 1 to 4294967295"),
    ] {
        let (option, before) = verb.split_last().unwrap();
        for value in ["-99", "abc", "99999999999999999999999", "nan"] {
            let given = format!("number = {value} is out of range: expected a {range}");
            let option = format!("{option}={value}");
            swiglu(&[before, &[&option]].concat()).refused(&[&given]);
        }
    }
    swiglu(&["explain", "--hidden", "8"]).refused(&["--intermediate"]);
    swiglu(&["explain"]).refused(&["--intermediate <H>", "--weights <FILE>"]);
}

#[test]
fn sizes_that_no_layer_has() {
    let limit = "a whole number from 1 to 1073741824";
    for size in ["0", "1073741825", "1000000000000", "-3", "many"] {
        for verb in [
            &["explain", "--hidden", "8", "--intermediate", "8", "--m"][..],
            &["explain", "--intermediate", "8", "--hidden"],
            &["bench", "mlp", "--hidden"],
            &["bench", "activation", "--rows"],
        ] {
            let (name, before) = verb.split_last().unwrap();
            let value = format!("{name}={size}");
            swiglu(&[before, &[&value]].concat()).refused(&[size, limit]);
        }
    }
}

#[test]
fn shapes_to_tune_are_three_numbers() {
    for text in ["16", "16,896", "1,2,3,4"] {
        swiglu(&["tune", "--shape", text]).refused(&["three numbers"]);
    }
    for text in ["", "16,896,0", "a,b,c", "16 896 4864"] {
        swiglu(&["tune", "--shape", text]).refused(&["a whole number from 1 to"]);
    }
    // One that is a shape is refused for the device alone.
    swiglu(&["tune", "--shape", "16,896,4864", "--device", "cpu"]).refused(&["nothing to tune"]);
}

#[test]
fn options_that_need_others() {
    run(&["--layer", "1"]).refused(&["--weights"]);
    run(&["--tokens", "2"]).refused(&["--tokens 2: random input", "--weights FILE"]);
    run(&["--seed", "3"]).refused(&["--seed 3: random input", "--weights FILE"]);
    run(&["--reference", "y.npy"]).refused(&["--input"]);
    run(&["--force"]).refused(&["--output"]);
    run(&["--weights", STORIES, "--fixture", "smollm2"]).refused(&["--fixture"]);
    swiglu(&["bench", "--m", "3"]).refused(&["<OP>"]);
    swiglu(&["bench", "--rows", "3"]).refused(&["<OP>"]);
    swiglu(&["explain", "--hidden", "8", "--intermediate", "8", "--hot"]).refused(&["--measure"]);
    swiglu(&["explain", "--weights", STORIES, "--measure"]).refused(&["--measure"]);
}

#[test]
fn blocks_are_kept_only_where_there_are_any() {
    run(&["--keep-blocks", "--fixture", "stories15m"]).refused(&["--keep-blocks", "not quantised"]);
    run(&["--tokens", "-3", "--weights", STORIES]).refused(&["-3"]);
    swiglu(&["run", "--seconds", "-1"]).refused(&["-1", "from 0 to 3600"]);
}

#[test]
fn options_that_would_not_be_heeded() {
    // Nothing is recorded of these.
    for option in ["--records", "--machine"] {
        swiglu(&["explain", "--measure", option, "x"]).refused(&[option]);
        swiglu(&["bench", "activation", option, "x"]).refused(&[option]);
    }
    swiglu(&["bench", "--suite", "quick", "--m", "3"]).refused(&["--suite"]);
    // Two names of one list do not add up.
    for names in [["--m", "--rows"], ["--rows", "--rows"]] {
        swiglu(&["bench", "activation", names[0], "3", names[1], "4"])
            .refused(&["--m", "multiple times"]);
    }
    // Those of a file where a shape is explained.
    let shape = ["explain", "--hidden", "64", "--intermediate", "96"];
    for option in [["--layer", "1"], ["--expert", "0"], ["--gate-name", "g"], ["--down-name", "d"]]
    {
        swiglu(&[&shape[..], &option].concat()).refused(&[option[0], "--weights FILE"]);
    }
    swiglu(&[&shape[..], &["--plain-fp8"]].concat()).refused(&["--plain-fp8", "--weights FILE"]);
    run(&["--fixture", "stories15m", "--plain-fp8"]).refused(&["--fixture", "--plain-fp8"]);
    swiglu(&[&shape[..], &["--decode-weights"]].concat())
        .refused(&["--decode-weights", "--weights FILE"]);
    let activation = ["explain", "--op", "activation", "--intermediate", "96"];
    swiglu(&[&activation[..], &["--orientation", "in-out"]].concat())
        .refused(&["--orientation in-out", "no weights"]);
    swiglu(&[&activation[..], &["--hidden", "64"]].concat())
        .refused(&["--hidden 64", "leave it out"]);
    swiglu(&["explain", "--intermediate", "96"]).refused(&["--hidden", "--weights FILE"]);
    swiglu(&["bench", "activation", "--lab", "/nonexistent"]).refused(&["/nonexistent"]);
    for verb in [&["bench", "activation"][..], &[&shape[..], &["--measure"]].concat()] {
        swiglu(&[verb, &["--peers", "/nonexistent"]].concat()).refused(&["--peers /nonexistent"]);
    }
    swiglu(&[&shape[..], &["--arrangement", "interleaved-5"]].concat()).refused(&["5", "divisor"]);
    for layout in [["--orientation", "in-out"], ["--arrangement", "interleaved-2"]] {
        swiglu(&[&shape[..], &["--weights-type", "q8_0"], &layout].concat()).refused(&[
            "--weights-type Q8_0",
            layout[1],
            "out-in",
        ]);
    }
    swiglu(&["bench", "--suite", "goals", "--hot"]).refused(&["--suite"]);
    for option in [["--layer", "9"], ["--expert", "1"], ["--gate-name", "g"], ["--prefix", "p"]] {
        run(&[&["--fixture", "stories15m"], &option[..]].concat())
            .refused(&["--fixture", option[0]]);
    }
    for option in ["--beside-experts", "--no-config", "--plain-fp8"] {
        run(&["--fixture", "stories15m", option]).refused(&["--fixture", option]);
    }
    // A layer that has nothing of what they are for.
    for (option, of) in [
        ("--beside-experts", "layers with experts"),
        ("--plain-fp8", "weights of 8 bits without scales"),
        ("--decode-weights", "not quantised"),
    ] {
        for verb in ["run", "explain"] {
            let refused = swiglu(&[verb, "--weights", STORIES, option]);
            refused.refused(&[option, of, "leave it out"]);
        }
    }
    // What a layer is looked for by, where its tensors are named.
    let names = ["gate", "up", "down"]
        .map(|part| [format!("--{part}-name"), format!("model.layers.0.mlp.{part}_proj.weight")]);
    let names: Vec<&str> = names.as_flattened().iter().map(String::as_str).collect();
    let named = |verb: &'static str, more: &[&str]| {
        swiglu(&[&[verb, "--weights", STORIES], &names[..], more].concat())
    };
    assert_eq!(named("explain", &[]).code, Some(0));
    for option in [["--layer", "0"], ["--prefix", "model"]] {
        for verb in ["run", "explain"] {
            named(verb, &option).refused(&[&option.join(" "), "--gate-name", "leave one out"]);
        }
    }
    run(&["--fixture", "stories15m", "--decode-weights"]).refused(&["not quantised"]);
    run(&["--decode-weights"]).refused(&["--decode-weights", "73 tokens", "leave it out"]);
    swiglu(&["bench", "activation", "--hidden", "8"]).refused(&["--hidden 8", "leave it out"]);
    swiglu(&[&shape[..], &["--peers", "p"]].concat()).refused(&["--peers", "--measure"]);
    let bias = ["kernels", "build", "--arch", "sm_80", "--out", "o", "--for", STORIES, "--bias"];
    swiglu(&bias).refused(&["--bias", "leave it out"]);
}
