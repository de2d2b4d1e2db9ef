//! Experts of gpt-oss as they were released: the same layer as the checkpoint in bf16 would give.

use crate::support::layer::{Checkpoint, at, expert, model_type, refused};
use crate::support::*;
use swiglu_core::{Half, Matrix, bf16};
use swiglu_formats::{LayerWeights, LoadOptions, load_layer_from_bytes};

const K: usize = 64;
const H: usize = 96;
const E: usize = 3;
const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn n(tensor: &str) -> String {
    format!("model.layers.0.mlp.experts.{tensor}")
}

fn raw(name: &str, shape: &[usize], byte: impl Fn(usize) -> u8) -> T {
    let bytes = (0..shape.iter().product()).map(byte).collect();
    T { name: n(name), dtype: "U8", shape: shape.into(), bytes }
}

/// Blocks and scales of `rows` features with `cols` inputs each.
fn packed(name: &str, rows: usize, cols: usize, seed: usize) -> [T; 2] {
    [
        raw(&format!("{name}_blocks"), &[E, rows, cols / 32, 16], |i| {
            (i * 37 + i / 256 + seed) as u8
        }),
        raw(&format!("{name}_scales"), &[E, rows, cols / 32], |i| 118 + ((i + seed) % 9) as u8),
    ]
}

fn released() -> Vec<T> {
    let mut tensors = [packed("gate_up_proj", 2 * H, K, 1), packed("down_proj", K, H, 2)].concat();
    tensors.push(t(&n("gate_up_proj_bias"), "BF16", &[E, 2 * H], 5));
    tensors.push(t(&n("down_proj_bias"), "BF16", &[E, K], 6));
    tensors
}

/// Value of feature `r` and input `c` of an expert, by the definition of the format.
fn value([blocks, scales]: [&T; 2], e: usize, rows: usize, cols: usize, r: usize, c: usize) -> f64 {
    let at = (e * rows + r) * cols + c;
    let byte = blocks.bytes[at / 2];
    let code = if at.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
    let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
    sign * VALUES[usize::from(code & 7)] * 2f64.powi(i32::from(scales.bytes[at / 32]) - 127)
}

/// The same weights as bf16 holds them: stacks `[in, out]`.
fn in_bf16(released: &[T]) -> Vec<T> {
    let transposed = |name: &str, of: [&T; 2], rows: usize, cols: usize| {
        let all = (0..E * cols * rows).map(|i| {
            let (e, c, r) = (i / (rows * cols), i / rows % cols, i % rows);
            value(of, e, rows, cols, r, c) as f32
        });
        values(&n(name), "BF16", &[E, cols, rows], &all.collect::<Vec<_>>())
    };
    let [gate_up, gate_up_scales, down, down_scales, biases @ ..] = released else { panic!() };
    let mut tensors = vec![
        transposed("gate_up_proj", [gate_up, gate_up_scales], 2 * H, K),
        transposed("down_proj", [down, down_scales], K, H),
    ];
    tensors.extend_from_slice(biases);
    tensors
}

/// Gate and up `[H, K]`, down `[K, H]`.
fn dense(layer: &LayerWeights) -> [Matrix<bf16>; 3] {
    let gate_up = layer.gate_up::<bf16>().unwrap();
    let view = gate_up.view().convert(swiglu_core::WeightLayout::HF).unwrap();
    let (down, orientation) = layer.down::<bf16>().unwrap().unwrap();
    let down = Matrix::from_values(
        (0..K * H).map(|i| {
            let [r, c] = orientation.shape(i / H, i % H);
            down.view().row(r)[c]
        }),
        K,
        H,
    );
    let [gate, up] = view.tensors() else { panic!() };
    [gate.clone(), up.clone(), down.unwrap()]
}

#[test]
fn blocks_are_the_layer_that_the_bf16_checkpoint_has() {
    let released = released();
    let c = Checkpoint::new(&released, &model_type("gpt_oss"));
    let twin = Checkpoint::new(&in_bf16(&released), &model_type("gpt_oss"));
    for e in 0..E {
        let (layer, twin) = (c.load(&expert(0, e)).unwrap(), twin.load(&expert(0, e)).unwrap());
        layer.expect_finite().unwrap();
        assert_eq!((layer.hidden(), layer.intermediate()), (K, H));
        assert_eq!(layer.layout().to_string(), "out-in interleaved-1");
        assert_eq!(layer.stored_dtype().to_string(), "MXFP4");
        assert_eq!(dense(&layer), dense(&twin));
        assert_eq!(layer.gate_bias(), twin.gate_bias());
        assert_eq!(layer.up_bias(), twin.up_bias());
        assert_eq!(layer.down_bias(), twin.down_bias());
        let stored = layer.stored_gate_up()[0].to_matrix_f64().unwrap();
        for (i, &given) in stored.as_slice().iter().enumerate() {
            assert_eq!(given, value([&released[0], &released[1]], e, 2 * H, K, i / K, i % K));
        }
        let arrangement = layer.layout().arrangement;
        assert_eq!(arrangement.locate(Half::Up, 5, H).1, 11);
        assert!(layer.quantized_gate_up().is_err(), "no kernel takes them");
    }
    refused(c.load(&at(0)), &["the expert is ambiguous", "0 to 2"]);
    let e = refused(c.load(&expert(0, E)), &["expert 3 given", "stacks 3 experts"]);
    assert!(matches!(e, swiglu_formats::FormatError::ExpertOutOfRange { .. }));
}

/// The names fix the blocks, and the architecture the order of gate and up.
#[test]
fn another_architecture_has_to_say_its_arrangement() {
    let file = safetensors(&released());
    let load = |o: &LoadOptions| load_layer_from_bytes(file.clone(), o);
    refused(load(&expert(0, 0)), &["arrangement is ambiguous"]);
    let arrangement = Some(swiglu_core::Arrangement::PackedGateFirst);
    let layer = load(&expert(0, 0).with_arrangement(arrangement)).unwrap();
    assert_eq!(layer.layout().to_string(), "out-in gate-first");
}

#[test]
fn blocks_and_scales_that_do_not_fit_are_refused() {
    let c = |change: &dyn Fn(&mut Vec<T>)| {
        let mut tensors = released();
        change(&mut tensors);
        Checkpoint::new(&tensors, &model_type("gpt_oss")).load(&expert(0, 1))
    };
    let gate = "gate_up_proj_blocks";
    refused(c(&|t| drop(t.remove(1))), &[gate, "MXFP4", "no scales"]);
    refused(
        c(&|t| t[1].shape = vec![E, K / 32, 2 * H]),
        &["gate_up_proj_scales", "[3, 192, 2], one for"],
    );
    refused(c(&|t| t[1].shape = vec![E * 2 * H, K / 32]), &["gate_up_proj_scales"]);
    refused(c(&|t| t[0].shape = vec![E, 2 * H, K / 16, 8]), &[gate, "[rows, blocks, 16]"]);
    refused(c(&|t| t[0].shape = vec![E * 2 * H * K / 32, 16]), &[gate, "[rows, blocks, 16]"]);
    refused(c(&|t| t[2].shape = vec![E, 2 * K, H / 64, 16]), &["down_proj"]);
    let floats = |t: &mut Vec<T>| t[1].dtype = "F8_E4M3";
    refused(c(&floats), &["gate_up_proj_scales is F8_E4M3"]);
    let other = |t: &mut Vec<T>| t.push(raw("gate_up_proj_offsets", &[1], |_| 1));
    refused(c(&other), &["gate_up_proj_offsets beside it is not understood"]);
    // In elements too: one of the two is meant.
    let both = |t: &mut Vec<T>| t.push(values(&n("gate_up_proj"), "BF16", &[1, 1, 1], &[1.0]));
    refused(c(&both), &["is there under", "MXFP4 experts"]);
}

#[test]
fn scales_that_are_no_number_or_overflow_are_located() {
    let with = |scale: u8| {
        let mut tensors = released();
        tensors[1].bytes[(2 * H + 5) * (K / 32) + 1] = scale;
        let layer = Checkpoint::new(&tensors, &model_type("gpt_oss")).load(&expert(0, 1)).unwrap();
        layer.expect_finite().map_err(|e| e.to_string())
    };
    let e = with(255).unwrap_err();
    assert!(e.contains("scale of") && e.contains("gate_up_proj_blocks[5, 1] is NaN"), "{e}");
    // 6 · 2^127 is no f32.
    let e = with(254).unwrap_err();
    assert!(e.contains("gate_up_proj_blocks[5, "), "{e}");
    with(0).unwrap();
}
