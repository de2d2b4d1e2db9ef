//! Any bytes as a GGUF file: parse, decode every matrix, look for a layer.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use swiglu_formats::{Bytes, LoadOptions, gguf, load_layer_from_bytes};

fuzz_target!(|data: &[u8]| {
    let bytes = Bytes::from(data.to_vec());
    let Ok(file) = gguf::parse(&bytes, Path::new("fuzz")) else { return };
    file.architecture_value("embedding_length");
    for expert in [None, Some(0)] {
        let options = LoadOptions::default().with_expert(expert);
        if let Ok(layer) = load_layer_from_bytes(bytes.clone(), &options) {
            let _ = (layer.gate_up::<f32>(), layer.down::<f32>(), layer.expect_finite());
            layer.describe();
        }
    }
});
