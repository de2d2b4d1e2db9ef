//! Writers of small files, and an independent decoder of quantised blocks.
#![allow(unreachable_pub)]

pub mod layer;
pub mod reference;

use half::{bf16, f16};
use std::path::{Path, PathBuf};
use swiglu_core::BlockType;

/// A tensor to write: name, type name, row-major shape, bytes.
#[derive(Clone)]
pub struct T {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Values that differ, of both signs, exact in bf16 (integers below 128 over 16).
pub fn ramp(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 + seed * 101) % 255) as f32 / 16.0 - 7.9375).collect()
}

pub fn encode(dtype: &str, values: &[f32]) -> Vec<u8> {
    match dtype {
        "F64" => values.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect(),
        "F32" => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        "F16" => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        "BF16" => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        other => panic!("{other}"),
    }
}

pub fn t(name: &str, dtype: &'static str, shape: &[usize], seed: usize) -> T {
    let n = shape.iter().product();
    values(name, dtype, shape, &ramp(n, seed))
}

pub fn values(name: &str, dtype: &'static str, shape: &[usize], v: &[f32]) -> T {
    T { name: name.into(), dtype, shape: shape.into(), bytes: encode(dtype, v) }
}

pub fn safetensors(tensors: &[T]) -> Vec<u8> {
    safetensors_with(tensors, "", 0)
}

/// `extra` goes into the header as it is; `pad` spaces shift the data.
pub fn safetensors_with(tensors: &[T], extra: &str, pad: usize) -> Vec<u8> {
    let mut at = 0;
    let mut parts: Vec<String> = Vec::new();
    if !extra.is_empty() {
        parts.push(extra.into());
    }
    for t in tensors {
        let end = at + t.bytes.len();
        let name = serde_json::to_string(&t.name).unwrap();
        parts.push(format!(
            r#"{name}:{{"dtype":"{}","shape":{:?},"data_offsets":[{at},{end}]}}"#,
            t.dtype, t.shape
        ));
        at = end;
    }
    let mut header = format!("{{{}}}", parts.join(","));
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    header.push_str(&" ".repeat(pad));
    raw_safetensors(&header, &tensors.iter().flat_map(|t| t.bytes.clone()).collect::<Vec<_>>())
}

pub fn raw_safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

pub fn type_id(dtype: &str) -> u32 {
    match dtype {
        "F32" => 0,
        "F16" => 1,
        "F64" => 28,
        "BF16" => 30,
        "Q8_K" => 15,
        block => block.parse::<BlockType>().unwrap().id(),
    }
}

pub fn gguf_string(s: &str) -> Vec<u8> {
    let mut out = (s.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(s.as_bytes());
    out
}

/// One metadata pair with a raw value.
pub fn pair(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut out = gguf_string(key);
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(value);
    out
}

pub fn text(key: &str, value: &str) -> Vec<u8> {
    pair(key, 8, &gguf_string(value))
}

pub fn uint(key: &str, value: u32) -> Vec<u8> {
    pair(key, 4, &value.to_le_bytes())
}

pub fn gguf(tensors: &[T], pairs: &[Vec<u8>]) -> Vec<u8> {
    gguf_with(3, 32, tensors, pairs)
}

pub fn gguf_with(version: u32, alignment: usize, tensors: &[T], pairs: &[Vec<u8>]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend_from_slice(&version.to_le_bytes());
    out.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    out.extend_from_slice(&(pairs.len() as u64).to_le_bytes());
    pairs.iter().for_each(|p| out.extend_from_slice(p));
    let mut at = 0usize;
    let mut data = Vec::new();
    for t in tensors {
        out.extend_from_slice(&gguf_string(&t.name));
        out.extend_from_slice(&(t.shape.len() as u32).to_le_bytes());
        for d in t.shape.iter().rev() {
            out.extend_from_slice(&(*d as u64).to_le_bytes());
        }
        out.extend_from_slice(&type_id(t.dtype).to_le_bytes());
        out.extend_from_slice(&(at as u64).to_le_bytes());
        data.extend_from_slice(&t.bytes);
        data.resize(data.len().next_multiple_of(alignment), 0);
        at = data.len();
    }
    out.resize(out.len().next_multiple_of(alignment), 0);
    out.extend_from_slice(&data);
    out
}

/// Blocks of pseudo-random bits with finite scales.
pub fn random_blocks(dtype: &str, count: usize, seed: u64) -> Vec<u8> {
    let size = dtype.parse::<BlockType>().unwrap().bytes();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut out: Vec<u8> = (0..size * count).map(|_| next() as u8).collect();
    for block in out.chunks_mut(size) {
        for &at in reference::half_offsets(dtype) {
            // An exponent of 31 would be infinity or NaN.
            block[at + 1] &= 0xbf;
        }
        match dtype {
            // 12 times the largest powers of two would be infinite.
            "MXFP4" => block[0] = block[0].min(250),
            "IQ1_M" => block[55] &= 0xbf,
            _ => {}
        }
    }
    out
}

pub fn npy(version: u8, dict: &str, data: &[u8]) -> Vec<u8> {
    let mut out = b"\x93NUMPY".to_vec();
    out.extend_from_slice(&[version, 0]);
    let mut dict = dict.to_owned();
    let prefix = if version == 1 { 10 } else { 12 };
    while !(prefix + dict.len() + 1).is_multiple_of(64) {
        dict.push(' ');
    }
    dict.push('\n');
    if version == 1 {
        out.extend_from_slice(&(dict.len() as u16).to_le_bytes());
    } else {
        out.extend_from_slice(&(dict.len() as u32).to_le_bytes());
    }
    out.extend_from_slice(dict.as_bytes());
    out.extend_from_slice(data);
    out
}

/// Blocks of GGUF's types with their values, see `scripts/make_gguf_types.py`.
pub fn gguf_types() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf-types")
}
