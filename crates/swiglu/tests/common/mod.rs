//! Files of layers, as tests write them.
#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses a part of it")]

use swiglu::{
    Arrangement, BlockType, GateUpMut, GateUpRef, GatedActivation, MatrixMut, MatrixRef,
    QuantizedType,
};

/// The gradients of ReLU(gate)·up on a device, in two matrices and in one.
pub(crate) fn gradients_of_reglu(act: &GatedActivation) {
    let (gate, up) = ([1.0f32, -1.0, 2.0, 3.0], [5.0, 6.0, 7.0, -8.0]);
    let dh = [1.0, 1.0, -2.0, 1.0];
    let [gate, up, dh] = [&gate, &up, &dh].map(|m| MatrixRef::new(m, 2, 2).unwrap());
    let inputs = GateUpRef::separate(gate, up).unwrap();
    let (mut first, mut second) = ([f32::NAN; 4], [f32::NAN; 4]);
    let [a, b] = [&mut first, &mut second].map(|m| MatrixMut::new(m, 2, 2).unwrap());
    act.backward_into(dh, inputs, GateUpMut::separate(a, b).unwrap()).unwrap();
    assert_eq!((first, second), ([5.0, 0.0, -14.0, -8.0], [1.0, 0.0, -4.0, 3.0]));

    let both = [5.0, 6.0, 1.0, -1.0, 7.0, -8.0, 2.0, 3.0];
    let both = MatrixRef::new(&both, 2, 4).unwrap();
    let inputs = GateUpRef::packed(both, Arrangement::PackedUpFirst).unwrap();
    let mut grads = [f32::NAN; 8];
    let mut into = |arrangement| {
        let place = MatrixMut::new(&mut grads, 2, 4).unwrap();
        act.backward_into(dh, inputs, GateUpMut::packed(place, arrangement).unwrap())
    };
    assert!(into(Arrangement::PackedGateFirst).is_err());
    into(Arrangement::PackedUpFirst).unwrap();
    assert_eq!(grads, [1.0, 0.0, 5.0, 0.0, -4.0, 3.0, -14.0, -8.0]);
}

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
