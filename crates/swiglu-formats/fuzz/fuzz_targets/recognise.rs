//! Any bytes under any kind of name: what they are said to be, and opened as it.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use swiglu_formats::{Bytes, FileFormat, Model, read_matrix};

fuzz_target!(|data: &[u8]| {
    for name in ["m.safetensors", "m.gguf", "m.npy", "m.npz", "m.pt", "m.json", "m"] {
        let _ = FileFormat::detect(data, Path::new(name));
    }
    let _ = Model::from_bytes(&Bytes::from(data.to_vec()));
    // As an index, and for an input: readers of files.
    let path = std::env::temp_dir().join(format!("swiglu-fuzz-{}", std::process::id()));
    if std::fs::write(&path, data).is_ok() {
        let _ = (Model::open(&path), read_matrix(&path));
    }
});
