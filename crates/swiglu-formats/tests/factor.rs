//! A factor for a whole tensor, as GGUF files have it beside the weight.

use crate::support::layer::{expert, refused, triple};
use crate::support::*;
use swiglu_core::{Matrix, bf16};
use swiglu_formats::{LayerWeights, LoadOptions, Result, load_layer_from_bytes};

const K: usize = 32;
const H: usize = 64;
const PARTS: [&str; 3] = ["gate", "up", "down"];
const FACTORS: [f32; 3] = [0.3, -0.25, 3.0];

fn scale(part: &str, shape: &[usize], v: &[f32]) -> T {
    values(&format!("blk.0.ffn_{part}.scale"), "F32", shape, v)
}

fn load(tensors: &[T], options: &LoadOptions) -> Result<LayerWeights> {
    let pairs = [text("general.architecture", "bitnet"), uint("bitnet.embedding_length", K as u32)];
    load_layer_from_bytes(gguf(tensors, &pairs), options)
}

fn with_factors(mut tensors: Vec<T>) -> Vec<T> {
    let scales = PARTS.iter().zip(FACTORS).map(|(part, f)| scale(part, &[1], &[f]));
    tensors.extend(scales);
    tensors
}

fn weights(layer: &LayerWeights) -> impl Iterator<Item = &swiglu_formats::StoredMatrix> {
    layer.stored_gate_up().iter().chain(layer.stored_down())
}

/// One rounding to f32, one to the element type.
#[test]
fn values_are_multiplied_and_rounded_once() {
    let names = PARTS.map(|part| format!("blk.0.ffn_{part}.weight"));
    for dtype in ["F32", "F16", "BF16"] {
        let dense = triple(names.each_ref().map(String::as_str), dtype, K, H, 1);
        let layer = load(&with_factors(dense.clone()), &LoadOptions::default()).unwrap();
        layer.expect_finite().unwrap();
        for (i, m) in weights(&layer).enumerate() {
            assert_eq!(m.factor(), FACTORS[i]);
            let want: Vec<f64> =
                ramp(K * H, 1 + i).iter().map(|&v| f64::from(v) * f64::from(FACTORS[i])).collect();
            assert_eq!(m.to_matrix_f64().unwrap().as_slice(), want);
            let single: Matrix<f32> = m.to_matrix().unwrap();
            assert!(single.as_slice().iter().zip(&want).all(|(&a, &b)| a == b as f32));
            let narrow: Matrix<bf16> = m.to_matrix().unwrap();
            assert_eq!(narrow, single.view().to_dtype::<bf16>().unwrap());
            assert!(m.view::<f32>().is_none() && m.view::<bf16>().is_none());
        }
        assert!(layer.gate_up_view::<f32>().is_none());
        assert!(layer.describe().contains(&format!("blk.0.ffn_up.weight {dtype} × -0.25")));
        let without = load(&dense, &LoadOptions::default()).unwrap();
        assert!(!without.describe().contains('×'));
    }
}

#[test]
fn blocks_with_a_factor_are_decoded() {
    let blocks = |part: &str, rows: usize, cols: usize| T {
        name: format!("blk.0.ffn_{part}.weight"),
        dtype: "Q8_0",
        shape: vec![rows, cols],
        bytes: random_blocks("Q8_0", rows * cols / 32, rows as u64),
    };
    let tensors = vec![blocks("gate", H, K), blocks("up", H, K), blocks("down", K, H)];
    let plain = load(&tensors, &LoadOptions::default()).unwrap();
    assert!(plain.quantized_gate_up().is_ok());
    let layer = load(&with_factors(tensors.clone()), &LoadOptions::default()).unwrap();
    let why = layer.quantized_gate_up().unwrap_err().to_string();
    assert!(why.contains("a factor of the tensor; decode them"), "{why}");
    assert!(layer.quantized_down().is_err());
    for ((m, plain), factor) in weights(&layer).zip(weights(&plain)).zip(FACTORS) {
        assert!(m.quantized().is_none());
        let (m, plain) = (m.to_matrix_f64().unwrap(), plain.to_matrix_f64().unwrap());
        let same = |(&a, &b): (&f64, &f64)| a == b * f64::from(factor);
        assert!(m.as_slice().iter().zip(plain.as_slice()).all(same));
    }
    // A factor of 1 changes nothing.
    let ones = PARTS.map(|part| scale(part, &[1], &[1.0]));
    let layer = load(&[tensors, ones.to_vec()].concat(), &LoadOptions::default()).unwrap();
    assert!(layer.quantized_gate_up().is_ok());
}

#[test]
fn a_stack_has_a_factor_for_each_expert() {
    let stack = |part: &str, shape: [usize; 3], seed| {
        t(&format!("blk.0.ffn_{part}_exps.weight"), "F32", &shape, seed)
    };
    let stacks = || {
        vec![stack("gate", [3, H, K], 1), stack("up", [3, H, K], 2), stack("down", [3, K, H], 3)]
    };
    let with = |shape: &[usize]| {
        let mut tensors = stacks();
        tensors.push(scale("gate_exps", shape, &ramp(shape.iter().product(), 5)));
        load(&tensors, &expert(0, 2))
    };
    let factors =
        |shape: &[usize]| with(shape).map(|l| weights(&l).map(|m| m.factor()).collect::<Vec<_>>());
    assert_eq!(factors(&[3]).unwrap(), [ramp(3, 5)[2], 1.0, 1.0]);
    assert_eq!(factors(&[1]).unwrap(), [ramp(1, 5)[0], 1.0, 1.0]);
    refused(with(&[2]), &["blk.0.ffn_gate_exps.scale", "a stack for 3 experts"]);
    refused(with(&[3, 2]), &["blk.0.ffn_gate_exps.scale", "one factor"]);
}

#[test]
fn a_factor_that_is_no_number_is_refused() {
    let names = PARTS.map(|part| format!("blk.0.ffn_{part}.weight"));
    let dense = triple(names.each_ref().map(String::as_str), "F32", K, H, 1);
    let with = |shape: &[usize], v: &[f32]| {
        load(&[dense.clone(), vec![scale("up", shape, v)]].concat(), &LoadOptions::default())
    };
    refused(with(&[2], &[1.0, 2.0]), &["blk.0.ffn_up.scale", "one factor"]);
    for v in [f32::NAN, f32::INFINITY] {
        let e = with(&[1], &[v]).unwrap().expect_finite().unwrap_err().to_string();
        assert!(e.contains("the factor of blk.0.ffn_up.weight"), "{e}");
    }
    // 7.9 · 1e38 is no f32.
    let e = with(&[1], &[1e38]).unwrap().expect_finite().unwrap_err().to_string();
    assert!(e.contains("blk.0.ffn_up.weight[0, "), "{e}");
}
