//! Any bytes as the parts of a split GGUF: every way to cut them in two, and both of each.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swiglu_formats::{Bytes, LoadOptions, Model, load_layer_from};

fuzz_target!(|data: &[u8]| {
    let Some((&cut, data)) = data.split_first() else { return };
    let (a, b) = data.split_at(data.len() * usize::from(cut) / 255);
    let [a, b] = [a, b].map(|part| Bytes::from(part.to_vec()));
    for parts in [vec![a.clone(), b.clone()], vec![a.clone(), a, b]] {
        let Ok(model) = Model::from_gguf_parts(&parts) else { continue };
        model.names().into_iter().take(64).for_each(|name| drop(model.tensor(name)));
        if let Ok(layer) = load_layer_from(&model, &LoadOptions::default()) {
            let _ = (layer.gate_up::<f32>(), layer.down::<f32>(), layer.expect_finite());
        }
    }
});
