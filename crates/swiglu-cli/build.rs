//! Which compiler makes the program: records say so of what they measured.

use std::process::Command;

fn main() {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let told = Command::new(rustc).arg("--version").output().ok();
    let text = told.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
    // `rustc 1.90.0 (1159e78c4 2025-09-14)`.
    let version = text.trim().strip_prefix("rustc ").unwrap_or("unknown");
    println!("cargo::rustc-env=RUSTC_VERSION={version}");
    println!("cargo::rerun-if-changed=build.rs");
}
