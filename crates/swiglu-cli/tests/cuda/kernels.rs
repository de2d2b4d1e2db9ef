//! Kernels that are compiled ahead, and kept.

use super::*;

/// What a build puts right is said; what it cannot is an error.
#[test]
fn a_damaged_kernel_is_made_again() {
    let files = Files::new();
    let out = files.name("out");
    let few = "f32 silu fused+fast out-in bias";
    let args = ["kernels", "build", "--out", &out, "--arch", "sm_80", "--only", few];
    let Some(first) = swiglu(&args) else { return };
    assert_eq!(first.code, Some(0), "{first:?}");
    assert!(!first.stdout.contains("repaired"), "{first:?}");
    let beginning = "2 variants for sm_80, 0 in the cache: compiling 2, about 1 second on";
    assert!(first.stderr.starts_with(beginning), "{first:?}");
    let mut entry =
        std::fs::read_dir(&out).expect("it was made").map(|e| e.expect("an entry").path());
    let entry = entry.find(|path| path.extension().is_some_and(|e| e == "cubin"));
    let entry = entry.expect("a kernel");
    std::fs::write(&entry, "damaged").expect("it can be written");
    let name = entry.file_name().and_then(|name| name.to_str()).expect("UTF-8");
    let again = swiglu(&args).expect("as before");
    assert_eq!(again.code, Some(0), "{again:?}");
    for part in ["1 compiled now, 1 in the cache before", "repaired", name, "to use it"] {
        assert!(again.stdout.contains(part), "{part}: {again:?}");
    }
    assert!(!swiglu(&args).expect("as before").stdout.contains("repaired"));

    std::fs::remove_file(&entry).expect("it is there");
    std::fs::create_dir_all(entry.join("in the way")).expect("a new directory");
    let failed = swiglu(&args).expect("as before");
    assert_eq!(failed.code, Some(2), "{failed:?}");
    assert!(failed.stderr.contains(name) && failed.stderr.contains("error: "), "{failed:?}");
}

/// What is built for a layer is enough for it: its calls compile nothing.
#[test]
fn kernels_of_a_layer_are_built_ahead() {
    let files = Files::new();
    let (out, own) = (files.name("out"), files.path("own"));
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    // The simulated device has 4 multiprocessors, and its rates are none that a record or the model knows.
    let few = ["--op", "gated-linear", "--dtype", "f32", "--sms", "4", "--all-candidates"];
    let build = ["kernels", "build", "--json", "--arch", "sm_90a", "--out", &out, "--for", &layer];
    let Some(built) = swiglu(&[&build[..], &few].concat()) else { return };
    assert_eq!(built.code, Some(0), "{built:?}");
    let document = built.json();
    let names: Vec<&str> = document["kernels"]
        .as_array()
        .expect("kernels")
        .iter()
        .filter_map(|kernel| kernel["variant"].as_str())
        .collect();
    assert_eq!(names, ["f32 silu fused+precise apart", "f32 silu fused+precise out-in"]);
    let run = ["run", "--seconds", "0.01", "--op", "gated-linear", "--weights", &layer];
    let mut command = on_device().expect("as before");
    command.args(run).args(["--tokens", "5", "--dtype", "f32", "--device", "cuda"]);
    command.env("SWIGLU_CACHE_READ_ONLY_DIR", &out).env("SWIGLU_CACHE_DIR", &own);
    let ended = end(&mut command);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!own.exists(), "{ended:?}");

    // The same twice, and of what a name or a size stands for.
    let again = swiglu(&[&build[..], &few].concat()).expect("as before").json();
    assert_eq!((&again["compiled"], &again["kept"]), (&0.into(), &2.into()));
    let one = ["--only", "simt_gated_gemm", "--dtype", "f32"];
    for layers in [["--for", "Llama-3-8B"], ["--shape", "4096,14336,64,4096"]] {
        let build = ["kernels", "build", "--json", "--arch", "sm_80,sm_90a", "--out", &out];
        let document = swiglu(&[&build[..], &layers, &one].concat()).expect("as before").json();
        assert_eq!(document["kernels"].as_array().map(Vec::len), Some(2), "{document}");
    }
}

#[test]
fn layers_to_build_for_that_are_none_are_refused() {
    let files = Files::new();
    let (out, file) = (files.name("out"), files.write("none.safetensors", safetensors(&[])));
    let build = ["kernels", "build", "--arch", "sm_80", "--out", &out];
    for (args, parts) in [
        (["--for", "llama-9"], &["--for llama-9", "no such file", "qwen2.5-0.5b"][..]),
        (["--for", &file], &["--for", "none.safetensors"]),
        (["--shape", "4096"], &["4096", "input and intermediate features"]),
        (["--shape", "0,5"], &["0,5", "a whole number from 1"]),
        (["--shape", "5,6,18446744073709551615"], &["18446744073709551615", "a whole number from"]),
        (["--sms", "132"], &["--for", "--shape"]),
    ] {
        let Some(ended) = swiglu(&[&build[..], &args].concat()) else { return };
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{ended:?}");
        assert!(parts.iter().all(|part| ended.stderr.contains(part)), "{parts:?}: {ended:?}");
    }
    assert_eq!(files.list(), ["none.safetensors"]);
}

/// The simulator without the kernels that it has compiled before, which take it no time.
fn fresh_simulator(files: &Files) -> Option<PathBuf> {
    let (from, to) = (simulator()?, files.path("simulator"));
    std::fs::create_dir_all(to.join("device")).expect("a new directory");
    for dir in ["", "device"] {
        for entry in std::fs::read_dir(from.join(dir)).expect("it was built") {
            let file = entry.expect("an entry");
            if file.path().is_file() {
                std::fs::copy(file.path(), to.join(dir).join(file.file_name())).expect("a copy");
            }
        }
    }
    Some(to)
}

/// A build that is stopped keeps what it has compiled, and another goes on.
#[test]
fn a_build_goes_on_where_it_was_stopped() {
    let files = Files::new();
    let out = files.name("out");
    let args = ["kernels", "build", "--out", &out, "--arch", "sm_80,sm_86,sm_87,sm_89"];
    let args = [&args[..], &["--only", "f32 silu fused+fast out-in bias"]].concat();
    let Some(fresh) = fresh_simulator(&files) else { return };
    let mut command = on_device().expect("as before");
    command.args(&args).env("SWIGLU_CUDA_LIBRARY_PATH", fresh).env("RAYON_NUM_THREADS", "1");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let kept = || {
        let entries = std::fs::read_dir(&out).into_iter().flatten().flatten();
        entries.filter(|e| e.path().extension().is_some_and(|e| e == "cubin")).count()
    };
    while kept() == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let signalled = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status();
    assert!(signalled.expect("there is kill").success());
    let stopped = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&stopped.stdout);
    assert_eq!(stopped.status.code(), Some(75), "{stopped:?}");
    assert!(text.contains(" are left, and the same command goes on") && !text.contains("to use"));
    let before = kept();
    let ended = end(on_device().expect("as before").args(&args));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let said = format!("{} compiled now, {before} in the cache before", kept() - before);
    assert!(ended.stdout.contains(&said), "{said}: {ended:?}");
}
