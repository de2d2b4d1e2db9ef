//! Any bytes as a safetensors file: parse, read every tensor, look for a layer.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use swiglu_formats::{
    Bytes, LoadOptions, load_layer_from_bytes, matrix_from_safetensors_bytes, safetensors,
};

fuzz_target!(|data: &[u8]| {
    let bytes = Bytes::from(data.to_vec());
    let Ok(file) = safetensors::parse(&bytes, Path::new("fuzz")) else { return };
    for tensor in file.tensors.iter().take(16) {
        if let Ok(m) = matrix_from_safetensors_bytes(bytes.clone(), &tensor.name) {
            let _ = m.to_f64();
        }
    }
    for expert in [None, Some(0)] {
        let options = LoadOptions::default().with_expert(expert);
        if let Ok(layer) = load_layer_from_bytes(bytes.clone(), &options) {
            let _ = (layer.gate_up::<f32>(), layer.down::<f32>(), layer.expect_finite());
            layer.describe();
        }
    }
});
