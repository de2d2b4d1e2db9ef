//! Weights of 8 bits with scales beside them, under the names that checkpoints give them.

use crate::support::*;
use swiglu_core::quant::{e4m3_from_f32, e4m3_to_f32};
use swiglu_core::{Matrix, QuantizedType, bf16};
use swiglu_formats::{FormatError, LoadOptions, load_layer, load_layer_from_bytes, read_matrix};

const K: usize = 200;
const H: usize = 130;

fn codes(name: &str, dtype: &'static str, [rows, cols]: [usize; 2], seed: usize) -> T {
    // Every code but NaN.
    let code = |i: usize| match (i * 37 + seed * 101) % 256 {
        nan @ (0x7F | 0xFF) if dtype != "I8" => nan as u8 - 1,
        code => code as u8,
    };
    let bytes = (0..rows * cols).map(code).collect();
    T { name: name.into(), dtype, shape: vec![rows, cols], bytes }
}

fn name(part: &str, tensor: &str) -> String {
    format!("model.layers.3.mlp.{part}_proj.{tensor}")
}

const PARTS: [(&str, [usize; 2]); 3] = [("gate", [H, K]), ("up", [H, K]), ("down", [K, H])];

/// A layer whose scales have the shape that `scales` gives for rows and columns.
fn file(
    dtype: &'static str,
    (tensor, scale_dtype): (&str, &'static str),
    scales: impl Fn(usize, usize) -> Vec<usize>,
) -> Vec<T> {
    let mut tensors = Vec::new();
    for (seed, (part, shape)) in PARTS.into_iter().enumerate() {
        tensors.push(codes(&name(part, "weight"), dtype, shape, seed));
        let shape = scales(shape[0], shape[1]);
        tensors.push(t(&name(part, tensor), scale_dtype, &shape, seed + 7));
    }
    tensors
}

fn load(tensors: &[T]) -> Result<swiglu_formats::LayerWeights, FormatError> {
    let options = LoadOptions::new(3);
    load_layer_from_bytes(safetensors(tensors), &options)
}

/// What a weight means, by plain loops: `scale(row, column)` finds the scale.
fn meant(codes: &T, scales: &T, place: impl Fn(usize, usize) -> usize) -> Matrix<f64> {
    let (rows, cols) = (codes.shape[0], codes.shape[1]);
    let factors = ramp(scales.shape.iter().product(), {
        PARTS.iter().position(|(part, _)| codes.name.contains(part)).unwrap() + 7
    });
    let value = |i: usize| {
        let code = codes.bytes[i];
        let value = match codes.dtype {
            "I8" => f32::from(code.cast_signed()),
            _ => e4m3_to_f32(code),
        };
        f64::from(value) * f64::from(factors[place(i / cols, i % cols)])
    };
    Matrix::from_vec((0..rows * cols).map(value).collect(), rows, cols).unwrap()
}

fn expect(tensors: &[T], kind: QuantizedType, place: impl Fn(usize, usize, usize) -> usize) {
    let layer = load(tensors).unwrap();
    assert_eq!((layer.hidden(), layer.intermediate()), (K, H));
    assert_eq!(layer.stored_dtype().to_string(), kind.name());
    layer.expect_finite().unwrap();
    let stored: Vec<_> = layer.stored_gate_up().iter().chain(layer.stored_down()).collect();
    for (i, matrix) in stored.into_iter().enumerate() {
        let (codes, scales) = (&tensors[2 * i], &tensors[2 * i + 1]);
        let meant = meant(codes, scales, |r, c| place(r, c, codes.shape[1]));
        assert_eq!(matrix.to_matrix_f64().unwrap(), meant, "{}", codes.name);
        let rounded: Matrix<f32> = matrix.to_matrix().unwrap();
        let same = |(&a, &b): (&f32, &f64)| a == b as f32;
        assert!(rounded.as_slice().iter().zip(meant.as_slice()).all(same), "{}", codes.name);
        let narrow: Matrix<bf16> = matrix.to_matrix().unwrap();
        assert_eq!(narrow, rounded.view().to_dtype::<bf16>().unwrap());
    }
    let [gate, up] = layer.quantized_gate_up().unwrap();
    let down = layer.quantized_down().unwrap().unwrap();
    assert_eq!([gate, up, down].map(|m| m.kind()), [kind; 3]);
}

#[test]
fn one_scale_for_all_or_for_each_output_feature() {
    for (dtype, kind) in [("I8", QuantizedType::I8), ("F8_E4M3", QuantizedType::F8E4m3)] {
        for names in [("weight_scale", "F32"), ("weight_scale", "BF16"), ("scales", "F16")] {
            expect(&file(dtype, names, |rows, _| vec![rows, 1]), kind, |r, _, _| r);
            expect(&file(dtype, names, |rows, _| vec![rows]), kind, |r, _, _| r);
        }
        for shape in [vec![], vec![1], vec![1, 1]] {
            let names = ("weight_scale_inv", "F32");
            expect(&file(dtype, names, |_, _| shape.clone()), kind, |_, _, _| 0);
        }
    }
}

#[test]
fn one_scale_for_each_block() {
    for tensor in ["weight_scale_inv", "weight_scale"] {
        let blocks = |rows: usize, cols: usize| vec![rows.div_ceil(128), cols.div_ceil(128)];
        let place = |r, c, cols: usize| r / 128 * cols.div_ceil(128) + c / 128;
        let tensors = file("F8_E4M3", (tensor, "F32"), blocks);
        expect(&tensors, QuantizedType::F8E4m3Blocks, place);
    }
}

#[track_caller]
fn refused(tensors: &[T], parts: &[&str]) {
    let e = load(tensors).unwrap_err().to_string();
    assert!(parts.iter().all(|part| e.contains(part)), "{e}");
}

#[test]
fn what_codes_and_scales_do_not_say_is_refused() {
    let good = || file("F8_E4M3", ("weight_scale", "F32"), |rows, _| vec![rows, 1]);
    let up_scale = name("up", "weight_scale");

    let without: Vec<T> = good().into_iter().filter(|t| t.name != up_scale).collect();
    refused(&without, &["up_proj.weight as F8_E4M3", &up_scale, "is missing"]);
    let bare: Vec<T> = good().into_iter().filter(|t| !t.name.ends_with("scale")).collect();
    refused(&bare, &["gate_proj.weight as F8_E4M3", "no scales", "weight_scale_inv"]);

    let mut twice = good();
    twice.push(t(&name("up", "weight_scale_inv"), "F32", &[1], 0));
    refused(&twice, &["weight_scale and", "weight_scale_inv"]);

    for (shape, dtype) in [
        (vec![H, 2], "F8_E4M3"),
        (vec![1, K], "F8_E4M3"),
        (vec![K], "F8_E4M3"),
        (vec![3, 2], "F8_E4M3"),
        // Blocks are of e4m3 alone.
        (vec![2, 2], "I8"),
        (vec![0], "I8"),
    ] {
        let tensors = file(dtype, ("weight_scale", "F32"), |rows, _| match rows {
            H => shape.clone(),
            rows => vec![rows],
        });
        refused(&tensors, &["gate_proj.weight_scale", "expected shape one scale, [130, 1]"]);
    }
    let wide = file("F8_E4M3", ("weight_scale", "F64"), |_, _| vec![1]);
    refused(&wide, &["weight_scale is F64", "expected F32"]);

    let mut smoothed = good();
    smoothed.push(t(&name("down", "pre_quant_scale"), "F32", &[H], 0));
    refused(&smoothed, &["down_proj.weight as F8_E4M3", "pre_quant_scale scales the inputs"]);

    // Codes are no values: not as biases, and not as inputs.
    let mut biased = good();
    biased.push(codes(&name("down", "bias"), "I8", [1, K], 1));
    biased.last_mut().unwrap().shape = vec![K];
    refused(&biased, &["down_proj.bias has element type I8"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    std::fs::write(&path, safetensors(&[codes("x", "F8_E4M3", [2, 4], 1)])).unwrap();
    let e = read_matrix(path.to_str().unwrap()).unwrap_err().to_string();
    assert!(e.contains("F8_E4M3") && e.contains("readable are"), "{e}");
}

/// Shapes alone do not tell blocks of 128 from others; `config.json` does.
#[test]
fn blocks_have_the_size_that_the_configuration_states() {
    let blocks = |rows: usize, cols: usize| vec![rows.div_ceil(128), cols.div_ceil(128)];
    let tensors = file("F8_E4M3", ("weight_scale_inv", "F32"), blocks);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, safetensors(&tensors)).unwrap();
    let options = LoadOptions::new(3);
    let with = |sizes: &str| {
        let config = format!("{{\"quantization_config\":{{\"weight_block_size\":{sizes}}}}}");
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        load_layer(&path, &options)
    };
    assert!(with("[128, 128]").is_ok() && with("null").is_ok());
    let layer = with("[100, 128]").unwrap();
    let gate = &layer.stored_gate_up()[0];
    assert_eq!(gate.stored.to_string(), "F8_E4M3_100x128");
    let place = |r: usize, c: usize| r / 100 * 2 + c / 128;
    assert_eq!(gate.to_matrix_f64().unwrap(), meant(&tensors[0], &tensors[1], place));
    let why = layer.quantized_gate_up().unwrap_err().to_string();
    assert!(why.contains("no kernels for this form"), "{why}");
    for other in ["[64, 128]", "[0, 128]", "[128]", "[128, 128, 1]"] {
        let e = with(other).unwrap_err().to_string();
        assert!(e.contains(other) && e.contains("gate_proj.weight_scale_inv"), "{e}");
    }
    let e = with("128").unwrap_err().to_string();
    assert!(e.contains("weight_block_size") && e.contains("a list of sizes"), "{e}");
}

#[test]
fn an_expert_of_a_stack_takes_its_scales() {
    let stack = |part: &str, [rows, cols]: [usize; 2], seed| {
        let name = format!("model.layers.3.mlp.experts.{part}");
        let mut weight = codes(&format!("{name}.weight"), "F8_E4M3", [3 * rows, cols], seed);
        weight.shape = vec![3, rows, cols];
        [weight, t(&format!("{name}.weight_scale"), "F32", &[3, rows, 1], seed + 7)]
    };
    let tensors =
        [stack("gate", [8, 4], 0), stack("up", [8, 4], 1), stack("down", [4, 8], 2)].concat();
    let name = |part: &str| format!("model.layers.3.mlp.experts.{part}.weight");
    let names = swiglu_formats::TensorNames::default()
        .with_gate(name("gate"))
        .with_up(name("up"))
        .with_down(name("down"));
    let options = |expert| {
        LoadOptions::default()
            .with_names(names.clone())
            .with_expert(expert)
            .with_orientation(swiglu_core::Orientation::OutIn)
    };
    let file = safetensors(&tensors);
    let layer = load_layer_from_bytes(file.clone(), &options(Some(2))).unwrap();
    let gate = layer.stored_gate_up()[0].to_matrix_f64().unwrap();
    let scales = ramp(24, 7);
    for (i, &value) in gate.as_slice().iter().enumerate() {
        let code = tensors[0].bytes[2 * 32 + i];
        let expected = f64::from(e4m3_to_f32(code)) * f64::from(scales[16 + i / 4]);
        assert_eq!(value, expected, "{i}");
    }
    let e = load_layer_from_bytes(file, &options(None)).unwrap_err().to_string();
    assert!(e.contains("expert 0 to 2"), "{e}");
}

/// Halves of a packed tensor take their scales, unless a block is of both.
#[test]
fn packed_halves_take_their_scales() {
    let load = |h: usize| {
        let blocks = |rows: usize, cols: usize| [rows.div_ceil(128), cols.div_ceil(128)];
        let mut tensors = Vec::new();
        for (part, [rows, cols]) in [("gate_up", [2 * h, K]), ("down", [K, h])] {
            tensors.push(codes(&name(part, "weight"), "F8_E4M3", [rows, cols], 1));
            let shape = blocks(rows, cols);
            tensors.push(t(&name(part, "weight_scale_inv"), "F32", &shape, 2));
        }
        let options = LoadOptions::new(3).with_arrangement(swiglu_core::Arrangement::PackedUpFirst);
        load_layer_from_bytes(safetensors(&tensors), &options).unwrap()
    };
    let layer = load(128);
    let [gate, up] = layer.quantized_gate_up().unwrap();
    let scales = ramp(4, 2);
    assert_eq!((up.scales(), gate.scales()), (&scales[..2], &scales[2..]));
    let layer = load(130);
    let e = layer.quantized_gate_up().unwrap_err();
    assert!(matches!(e, swiglu_core::Error::Unsupported { .. }), "{e}");
    assert!(e.to_string().contains("multiple of 128"), "{e}");
    assert_eq!(layer.gate_up::<f32>().unwrap().view().intermediate(), 130);
}

#[test]
fn a_code_that_is_no_number_is_located() {
    let mut tensors = file("F8_E4M3", ("weight_scale", "F32"), |rows, _| vec![rows, 1]);
    tensors[4].bytes[3 * H + 5] = 0xFF;
    let e = load(&tensors).unwrap().expect_finite().unwrap_err().to_string();
    assert!(e.contains("down_proj.weight") && e.contains('3') && e.contains('5'), "{e}");
    assert_eq!(e4m3_from_f32(1.0), 0x38);
}

/// Rows, blocks and groups of each type of codes and scales, also where they do not fit: read with values
/// in every place, or refused, and nothing else.
#[test]
fn shapes_and_types_of_all_kinds_are_read_whole_or_refused() {
    let extents = [0, 1, 2, 3, 5, 16, 32, 64, 128, 129];
    let mut shapes: Vec<Vec<usize>> = vec![vec![]];
    for a in extents {
        shapes.push(vec![a]);
        shapes.extend([1, 2, 4, 8, 32].map(|b| vec![a, b]));
        shapes.extend([1, 2, 32].map(|b| vec![2, a, b]));
    }
    let n = |tensor: &str| format!("layers.0.mlp.{tensor}");
    let part = |name: &str, dtype, shape: &[usize], size: usize| {
        let bytes = (0..shape.iter().product::<usize>() * size).map(|i| (i * 29) as u8).collect();
        T { name: n(name), dtype, shape: shape.into(), bytes }
    };
    let (mut read, mut all) = (0, 0);
    for dtype in ["I8", "F8_E4M3", "F8_E5M2", "U8"] {
        for weight in
            [&[129, 64][..], &[32, 32], &[1, 32], &[2, 32, 64], &[0, 4], &[64], &[2, 2, 2, 2]]
        {
            for scale in &shapes {
                for (scale_dtype, size) in [("F32", 4), ("U8", 1), ("F8_E8M0", 1), ("F8_E4M3", 1)] {
                    let tensors = [
                        part("gate_proj.weight", dtype, weight, 1),
                        part("gate_proj.weight_scale", scale_dtype, scale, size),
                        part("up_proj.weight", dtype, weight, 1),
                        part("up_proj.weight_scale", scale_dtype, scale, size),
                        part("up_proj.weight_offset", "I8", &[1], 1),
                    ];
                    all += 1;
                    let expert = (weight.len() == 3).then_some(1);
                    let names = swiglu_formats::TensorNames::default()
                        .with_gate(n("gate_proj.weight"))
                        .with_up(n("up_proj.weight"));
                    let o = LoadOptions::default().with_expert(expert).with_names(names);
                    let Ok(layer) = load_layer_from_bytes(safetensors(&tensors), &o) else {
                        continue;
                    };
                    read += 1;
                    let _ = layer.expect_finite();
                    let gate_up = layer.gate_up::<f32>().unwrap();
                    assert_eq!(gate_up.view().hidden(), layer.hidden());
                }
            }
        }
    }
    assert!(read > 50 && read < all / 10, "{read} of {all}");
}
