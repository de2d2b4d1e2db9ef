//! `swiglu kernels`: with a compiler, and without one.

mod support;

use std::path::Path;
use std::process::Command;

use support::{Files, command};

/// The command in an environment without CUDA, and with caches of its own.
fn bare(cache: &Path) -> Command {
    let mut command = command();
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
    command.env_remove("SWIGLU_CUDA_LIBRARY_PATH").env_remove("SWIGLU_CACHE_READ_ONLY_DIR");
    command.env("PATH", "").env("HOME", "/nonexistent").env("SWIGLU_CACHE_DIR", cache);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_cache_is_built_shown_and_enough_without_a_compiler() {
    let files = Files::new();
    let (out, unused) = (files.name("out"), files.path("unused"));
    let args = ["--arch", "sm_80", "--only", "simt"];
    let built = command().args(["kernels", "build", "--out", &out]).args(args).output().unwrap();
    if built.status.code() == Some(2) {
        let why = text(&built.stderr);
        assert!(why.contains("libnvrtc") && why.contains("SWIGLU_CUDA_LIBRARY_PATH"), "{why}");
        println!("not run: {why}");
        return;
    }
    assert_eq!(built.status.code(), Some(0), "{built:?}");
    assert!(text(&built.stdout).contains("SWIGLU_CACHE_READ_ONLY_DIR="), "{built:?}");

    let mut list = bare(&unused);
    list.args(["kernels", "list", "--json", "--strict"]).args(args);
    let listed = list.env("SWIGLU_CACHE_READ_ONLY_DIR", &out).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let kernels = document["kernels"].as_array().unwrap();
    assert!(!kernels.is_empty());
    for kernel in kernels {
        assert_eq!(kernel["origin"], "read_only", "{kernel}");
        assert!(kernel["entries"][0]["registers"].as_u64() > Some(0), "{kernel}");
    }
    assert!(!unused.exists());
}

#[test]
fn without_a_compiler_every_place_is_named() {
    let files = Files::new();
    let mut build = bare(&files.path("cache"));
    build.args(["kernels", "build", "--arch", "sm_90a", "--only", "simt", "--out"]);
    let ended = build.arg(files.path("out")).output().unwrap();
    if ended.status.code() == Some(0) {
        println!("not run: the system has a compiler that cannot be hidden");
        return;
    }
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    let why = text(&ended.stderr);
    for part in ["libnvrtc", "the loader's path", "/usr/local/cuda/lib64", "pip install"] {
        assert!(why.contains(part), "{why}");
    }
}

#[test]
fn unknown_names_list_the_choices() {
    let files = Files::new();
    for (args, parts) in [
        (["--arch", "sm_75", "--only", ""], ["sm_75", "sm_90a"]),
        (["--arch", "sm_80", "--only", "no such kernel"], ["no such kernel", "no variant"]),
    ] {
        let ended = command()
            .args(["kernels", "build", "--out", &files.name("out")])
            .args(args)
            .output()
            .unwrap();
        assert_eq!(ended.status.code(), Some(2), "{ended:?}");
        let why = text(&ended.stderr);
        assert!(parts.iter().all(|part| why.contains(part)), "{why}");
    }
    assert_eq!(files.list(), [""; 0]);
}
