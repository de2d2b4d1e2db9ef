//! Prints what a copy of the lab without its repository keeps as `source.json`: the identity of the
//! code that its records will be of. Usage: `cargo run -p swiglu-lab --example source -- lab`

use std::path::PathBuf;
use std::process::ExitCode;

use swiglu_lab::{DeviceKind, Source};

fn main() -> ExitCode {
    let Some(lab) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("expected the directory of the lab");
        return ExitCode::from(2);
    };
    let identity = |device| Source::detect(&lab, device).to_string();
    let noted = serde_json::json!({
        "cpu": identity(DeviceKind::Cpu),
        "cuda": identity(DeviceKind::Cuda),
    });
    // An example is a program: it prints.
    #[allow(clippy::print_stdout)]
    {
        println!("{noted}");
    }
    ExitCode::SUCCESS
}
