//! `swiglu kernels`: with a compiler, and without one.

mod support;

use std::path::Path;
use std::process::Command;

use support::{Files, command};

/// Variants that take little time to compile.
const FEW: &str = "f32 silu fused+fast out-in bias";

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
    let args = ["--arch", "sm_80,sm_90a", "--arch", "sm_89", "--only", FEW];
    let built = command().args(["kernels", "build", "--out", &out]).args(args).output().unwrap();
    if built.status.code() == Some(2) {
        let why = text(&built.stderr);
        assert!(why.contains("libnvrtc") && why.contains("SWIGLU_CUDA_LIBRARY_PATH"), "{why}");
        swiglu_testing::not_run(why.trim());
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
    for arch in ["sm_80", "sm_89", "sm_90a"] {
        assert!(kernels.iter().any(|kernel| kernel["arch"] == arch), "{arch}: {document}");
    }
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
        swiglu_testing::not_run("the system has a compiler that cannot be hidden");
        return;
    }
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    let why = text(&ended.stderr);
    for part in ["libnvrtc", "the loader's path", "/usr/local/cuda/lib64", "pip install"] {
        assert!(why.contains(part), "{why}");
    }
    // Nothing was announced, and nothing is left.
    assert_eq!((why.lines().count(), files.list()), (1, Vec::new()), "{why}");
}

#[test]
fn where_kernels_cannot_be_kept_is_found_before_compiling() {
    let files = Files::new();
    let file = files.write("a-file", "");
    // Without a compiler the next complaint would be about that.
    let mut places = vec![file.clone(), format!("{file}/below")];
    let link = files.name("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    places.extend([link.clone(), format!("{link}/below")]);
    if Path::new("/proc").exists() {
        places.push("/proc/nowhere".into());
    }
    for out in places {
        let mut build = bare(&files.path("cache"));
        let args = ["kernels", "build", "--arch", "sm_80", "--out", &out];
        let ended = build.args(args).output().unwrap();
        assert_eq!(ended.status.code(), Some(2), "{ended:?}");
        let why = text(&ended.stderr);
        for part in [out.as_str(), "cannot be kept here", "can be written"] {
            assert!(why.contains(part), "{part}: {why}");
        }
        let says = why.contains("link is a symbolic link to nowhere, which is not there");
        assert_eq!((why.lines().count(), says), (1, out.starts_with(&link)), "{why}");
    }
    assert_eq!(files.list(), ["a-file", "link"]);
}

#[test]
fn what_the_cache_cannot_keep_is_one_line() {
    let files = Files::new();
    let cache = files.write("a-file", "");
    let list = ["kernels", "list", "--arch", "sm_80", "--only", FEW];
    let ended = command().args(list).env("SWIGLU_CACHE_DIR", cache).output().unwrap();
    if ended.status.code() == Some(2) {
        swiglu_testing::not_run(text(&ended.stderr).trim());
        return;
    }
    let lines = text(&ended.stdout);
    let lines: Vec<&str> = lines.lines().filter(|line| line.starts_with("cache: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("warnings more"), "{ended:?}");
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
