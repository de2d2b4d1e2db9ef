//! Files of layers, as tests write them.
#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses a part of it")]

use swiglu::{BlockType, QuantizedType};

/// A GGUF file of `[256, 256]` tensors.
pub(crate) fn gguf(tensors: &[(String, BlockType, Vec<u8>)]) -> Vec<u8> {
    let string = |s: &str| [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat();
    let mut file = [b"GGUF".as_slice(), &3u32.to_le_bytes()].concat();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend(string("general.architecture"));
    file.extend(8u32.to_le_bytes());
    file.extend(string("llama"));
    let mut data = Vec::new();
    for (name, block, bytes) in tensors {
        file.extend(string(name));
        file.extend(2u32.to_le_bytes());
        file.extend([256u64, 256].map(u64::to_le_bytes).concat());
        file.extend(block.id().to_le_bytes());
        file.extend((data.len() as u64).to_le_bytes());
        data.extend_from_slice(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    [file, data].concat()
}

/// A safetensors file of a layer of random codes, `[n, n]` each, with scales of a shape beside them.
pub(crate) fn scaled(dtype: &str, n: usize, scales: [usize; 2]) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::<u8>::new());
    let mut add = |name: String, dtype: &str, shape: [usize; 2], bytes: Vec<u8>| {
        let start = data.len();
        data.extend(bytes);
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{}]}}"#,
            data.len()
        ));
    };
    for (seed, part) in (1..).zip(["gate", "up", "down"]) {
        let name = format!("model.layers.0.mlp.{part}_proj");
        let kind = if dtype == "I8" { QuantizedType::I8 } else { QuantizedType::F8E4m3 };
        let (codes, factors) =
            swiglu_core::random::quantized_matrix(seed, kind, n, n, 0.06).unwrap().into_parts();
        add(format!("{name}.weight"), dtype, [n, n], codes);
        let factors = &factors[..scales[0] * scales[1]];
        let bytes = factors.iter().flat_map(|f| f.to_le_bytes()).collect();
        add(format!("{name}.weight_scale"), "F32", scales, bytes);
    }
    let header = format!("{{{}}}", entries.join(","));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}
