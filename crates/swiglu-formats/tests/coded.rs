//! Codes whose scales are powers of two, in groups, of other writers, or missing: values computed here in
//! float64 from the definitions of the formats.

use crate::support::layer::{Checkpoint, refused};
use crate::support::*;
use swiglu_core::{Matrix, bf16};
use swiglu_formats::{LayerWeights, LoadOptions, Result, load_layer_from_bytes};

const K: usize = 64;
const H: usize = 160;
const PARTS: [(&str, usize, usize); 3] = [("gate", H, K), ("up", H, K), ("down", K, H)];

fn raw(name: String, dtype: &'static str, shape: &[usize], byte: impl Fn(usize) -> u8) -> T {
    let bytes = (0..shape.iter().product()).map(byte).collect();
    T { name, dtype, shape: shape.into(), bytes }
}

fn name(part: &str, tensor: &str) -> String {
    format!("model.layers.0.mlp.{part}_proj.{tensor}")
}

/// Codes of a weight: all of them, but those that are no number.
fn codes(part: usize, dtype: &'static str, width: usize) -> T {
    let (name, rows) = (name(PARTS[part].0, "weight"), PARTS[part].1);
    raw(name, dtype, &[rows, width], |i| match ((i * 37 + part * 101) % 256) as u8 {
        0x7F | 0xFF if dtype == "F8_E4M3" => 0x38,
        0x7C..=0x7F | 0xFC..=0xFF if dtype == "F8_E5M2" => 0x38,
        code => code,
    })
}

/// Each weight and what is beside it.
fn file(beside: impl Fn(&str, usize, usize) -> Vec<T>, weight: impl Fn(usize) -> T) -> Vec<T> {
    let parts = (0..3).flat_map(|i| {
        let (part, rows, cols) = PARTS[i];
        [vec![weight(i)], beside(part, rows, cols)].concat()
    });
    parts.collect()
}

fn load(tensors: &[T]) -> Result<LayerWeights> {
    load_layer_from_bytes(safetensors(tensors), &LoadOptions::default())
}

/// Every weight of the layer is `value(part, row, column)`, also where it is rounded, and is called `kind`.
fn expect(layer: &LayerWeights, kind: &str, value: impl Fn(usize, usize, usize) -> f64) {
    layer.expect_finite().unwrap();
    assert_eq!((layer.hidden(), layer.intermediate()), (K, H));
    let stored = layer.stored_gate_up().iter().chain(layer.stored_down());
    for (part, matrix) in stored.enumerate() {
        let (_, rows, cols) = PARTS[part];
        assert_eq!(matrix.stored.to_string(), kind);
        let all = (0..rows * cols).map(|i| value(part, i / cols, i % cols));
        let want = Matrix::from_vec(all.collect(), rows, cols).unwrap();
        assert_eq!(matrix.to_matrix_f64().unwrap(), want, "{}", matrix.name);
        let single: Matrix<f32> = matrix.to_matrix().unwrap();
        assert!(single.as_slice().iter().zip(want.as_slice()).all(|(&a, &b)| a == b as f32));
        let narrow: Matrix<bf16> = matrix.to_matrix().unwrap();
        assert_eq!(narrow, single.view().to_dtype::<bf16>().unwrap());
    }
}

/// A float of `1 + exponent + fraction` bits with the usual bias; none of the codes is special.
fn float(code: u8, exponent: u32, fraction: u32) -> f64 {
    let (power, part) =
        (i32::from(code >> fraction) & ((1 << exponent) - 1), code & ((1 << fraction) - 1));
    let (bias, unit) = ((1 << (exponent - 1)) - 1, f64::from(1u32 << fraction));
    let magnitude = match power {
        0 => f64::from(part) / unit * 2f64.powi(1 - bias),
        _ => (1.0 + f64::from(part) / unit) * 2f64.powi(power - bias),
    };
    if code >> (exponent + fraction) & 1 == 0 { magnitude } else { -magnitude }
}

fn e4m3(code: u8) -> f64 {
    float(code, 4, 3)
}

fn power(code: u8) -> f64 {
    2f64.powi(i32::from(code) - 127)
}

fn power_code(i: usize) -> u8 {
    110 + (i * 7 % 23) as u8
}

/// The least scale is a subnormal f32.
#[test]
fn powers_of_two_scale_blocks_rows_and_tensors() {
    let weights = [0, 1, 2].map(|i| codes(i, "F8_E4M3", PARTS[i].2));
    let weight = |i: usize| weights[i].clone();
    let with = |shape: fn(usize, usize) -> Vec<usize>, dtype, first| {
        file(
            |part, rows, cols| {
                let code = |i| if i == 0 { first } else { power_code(i) };
                vec![raw(name(part, "weight_scale_inv"), dtype, &shape(rows, cols), code)]
            },
            weight,
        )
    };
    let scale = |i: usize| power(if i == 0 { 0 } else { power_code(i) });
    let code = |part: usize, r: usize, c: usize| e4m3(weights[part].bytes[r * PARTS[part].2 + c]);
    for dtype in ["F8_E8M0", "U8"] {
        let blocks = with(|r, c| vec![r.div_ceil(128), c.div_ceil(128)], dtype, 0);
        expect(&load(&blocks).unwrap(), "F8_E4M3_128x128", |part, r, c| {
            code(part, r, c) * scale(r / 128 * PARTS[part].2.div_ceil(128) + c / 128)
        });
    }
    let rows = with(|r, _| vec![r, 1], "F8_E8M0", 0);
    expect(&load(&rows).unwrap(), "F8_E4M3", |part, r, c| code(part, r, c) * scale(r));
    let one = with(|_, _| vec![], "F8_E8M0", 120);
    expect(&load(&one).unwrap(), "F8_E4M3", |part, r, c| code(part, r, c) * power(120));

    // Of U8 only groups are powers of two for certain.
    refused(load(&with(|r, _| vec![r, 1], "U8", 0)), &["weight_scale_inv is U8", "F8_E8M0"]);
    // 255 is NaN.
    let nan = load(&with(|r, c| vec![r.div_ceil(128), c.div_ceil(128)], "F8_E8M0", 255)).unwrap();
    let e = nan.expect_finite().unwrap_err().to_string();
    assert!(e.contains("scale of model.layers.0.mlp.gate_proj.weight[0, 0] is NaN"), "{e}");
}

#[test]
fn mx_groups_run_along_the_inputs() {
    for (dtype, bits, kind) in [("F8_E4M3", (4, 3), "MXFP8"), ("F8_E5M2", (5, 2), "F8_E5M2_1x32")] {
        for scale_dtype in ["U8", "F8_E8M0"] {
            let weights = [0, 1, 2].map(|i| codes(i, dtype, PARTS[i].2));
            let weight = |i: usize| weights[i].clone();
            let scales = |part: &str, rows, cols: usize| {
                vec![raw(name(part, "weight_scale"), scale_dtype, &[rows, cols / 32], power_code)]
            };
            let tensors = file(scales, weight);
            expect(&load(&tensors).unwrap(), kind, |part, r, c| {
                let cols = PARTS[part].2;
                let code = weights[part].bytes[r * cols + c];
                float(code, bits.0, bits.1) * power(power_code(r * (cols / 32) + c / 32))
            });
            let mut nan = tensors;
            nan[1].bytes[5] = 255;
            let e = load(&nan).unwrap().expect_finite().unwrap_err().to_string();
            assert!(e.contains("scale of model.layers.0.mlp.gate_proj.weight[2, 1] is NaN"), "{e}");
        }
    }
    for shape in [[H, 1 + K / 32], [H - 1, K / 32], [K / 32, H], [2 * H, 1]] {
        let scales =
            |part: &str, _, _| vec![raw(name(part, "weight_scale"), "U8", &shape, power_code)];
        let wrong = file(scales, |i| codes(i, "F8_E4M3", PARTS[i].2));
        refused(load(&wrong), &["gate_proj.weight_scale", "expected shape", "[160, 64]"]);
    }
    // Groups of other scales have no usual size.
    let scales = |part: &str, rows, cols: usize| {
        vec![t(&name(part, "weight_scale"), "F32", &[rows, cols / 32], 1)]
    };
    let floats = file(scales, |i| codes(i, "F8_E4M3", PARTS[i].2));
    refused(load(&floats), &["expected shape", "[160, 1]"]);
}

/// As U8 (Quark), or as I8 where the scales are of the type that only these formats have (DeepSeek).
#[test]
fn bytes_with_scales_for_each_sixteen_are_two_codes_each() {
    for (dtype, scale_dtype) in [("U8", "U8"), ("U8", "F8_E8M0"), ("I8", "F8_E8M0")] {
        let weights = [0, 1, 2].map(|i| codes(i, dtype, PARTS[i].2 / 2));
        let weight = |i: usize| weights[i].clone();
        let scales = |part: &str, rows, cols: usize| {
            vec![raw(name(part, "scale"), scale_dtype, &[rows, cols / 32], power_code)]
        };
        expect(&load(&file(scales, weight)).unwrap(), "MXFP4", |part, r, c| {
            let cols = PARTS[part].2;
            let byte = weights[part].bytes[(r * cols + c) / 2];
            let code = if c % 2 == 0 { byte & 15 } else { byte >> 4 };
            float(code, 2, 1) * power(power_code(r * (cols / 32) + c / 32))
        });
    }
    let scales = |part: &str, rows, cols: usize| {
        vec![raw(name(part, "scale"), "U8", &[rows, cols / 16], power_code)]
    };
    let other = file(scales, |i| codes(i, "U8", PARTS[i].2 / 2));
    refused(load(&other), &["gate_proj.weight as U8", "is not known", "gate_proj.scale [160, 4]"]);
}

#[test]
fn e5m2_is_decoded_exactly() {
    let weights = [0, 1, 2].map(|i| codes(i, "F8_E5M2", PARTS[i].2));
    let weight = |i: usize| weights[i].clone();
    let value =
        |part: usize, r: usize, c: usize| float(weights[part].bytes[r * PARTS[part].2 + c], 5, 2);
    let scales = |part: &str, rows, _| vec![t(&name(part, "weight_scale"), "F32", &[rows, 1], 3)];
    let ramp = ramp(H, 3);
    let layer = load(&file(scales, weight)).unwrap();
    expect(&layer, "F8_E5M2", |part, r, c| value(part, r, c) * f64::from(ramp[r]));
    let one = |part: &str, _, _| vec![values(&name(part, "weight_scale"), "F32", &[], &[0.1])];
    let layer = load(&file(one, weight)).unwrap();
    expect(&layer, "F8_E5M2", |part, r, c| value(part, r, c) * f64::from(0.1f32));

    let mut infinite = file(one, weight);
    infinite[2].bytes[K + 3] = 0x7C;
    let e = load(&infinite).unwrap().expect_finite().unwrap_err().to_string();
    assert!(e.contains("up_proj.weight[1, 3] is inf"), "{e}");
}

#[test]
fn a_plain_cast_is_read_where_the_caller_says_so() {
    for (dtype, bits) in [("F8_E4M3", (4, 3)), ("F8_E5M2", (5, 2))] {
        let weights = [0, 1, 2].map(|i| codes(i, dtype, PARTS[i].2));
        let weight = |i: usize| weights[i].clone();
        let tensors = file(|_, _, _| vec![], weight);
        refused(load(&tensors), &["gate_proj.weight as", dtype, "no scales", "with_plain_fp8"]);
        let options = LoadOptions::default().with_plain_fp8();
        let layer = load_layer_from_bytes(safetensors(&tensors), &options).unwrap();
        expect(&layer, dtype, |part, r, c| {
            float(weights[part].bytes[r * PARTS[part].2 + c], bits.0, bits.1)
        });
        // Scales that are there hold.
        let one = |part: &str, _, _| vec![values(&name(part, "scale_weight"), "F32", &[1], &[0.5])];
        let layer = load_layer_from_bytes(safetensors(&file(one, weight)), &options).unwrap();
        expect(&layer, dtype, |part, r, c| {
            float(weights[part].bytes[r * PARTS[part].2 + c], bits.0, bits.1) * 0.5
        });
    }
    let integers = file(|_, _, _| vec![], |i| codes(i, "I8", PARTS[i].2));
    let options = LoadOptions::default().with_plain_fp8();
    let e =
        refused(load_layer_from_bytes(safetensors(&integers), &options), &["as I8", "no scales"]);
    assert!(!e.to_string().contains("plain"), "{e}");
}

/// Of a layer, or of the layers of a model, of which one scale is missing.
#[test]
fn a_weight_whose_scale_is_missing_is_no_plain_cast() {
    let scale = |part: &str, rows, _| vec![t(&name(part, "weight_scale"), "F32", &[rows, 1], 3)];
    let whole = file(scale, |i| codes(i, "F8_E4M3", PARTS[i].2));
    let plain = LoadOptions::default().with_plain_fp8();
    let in_layer_1 = |t: &T| T { name: t.name.replace("layers.0", "layers.1"), ..t.clone() };
    for missing in PARTS.map(|(part, ..)| name(part, "weight_scale")) {
        let one: Vec<T> = whole.iter().filter(|t| t.name != missing).cloned().collect();
        // Without any of its own, beside a layer that has them.
        let bare = whole.iter().filter(|t| !t.name.ends_with("scale")).cloned();
        let beside: Vec<T> = bare.chain(whole.iter().map(in_layer_1)).collect();
        for tensors in [one, beside] {
            for options in [&plain, &LoadOptions::default()] {
                let loaded = load_layer_from_bytes(safetensors(&tensors), options);
                let error = refused(loaded, &["its scale", "is missing", "weight_scale is there"]);
                assert!(!error.to_string().contains("plain-fp8"), "{error}");
            }
        }
        let one: Vec<T> = whole.iter().filter(|t| t.name != missing).cloned().collect();
        refused(load(&one), &[&format!("its scale {missing} is missing")]);
    }
}

/// ComfyUI writes scales of MX in the order in which cuBLAS takes them, and says so in the header.
#[test]
fn notes_of_comfyui_in_a_header_are_heeded() {
    let noted = |tensors: &[T], format: &str, roles: &[&str]| {
        let layers: serde_json::Map<_, _> = roles
            .iter()
            .map(|role| {
                let name = name(role, "weight").replace(".weight", "");
                (name, serde_json::json!({ "format": format }))
            })
            .collect();
        let notes = serde_json::json!({"format_version": "1.0", "layers": layers}).to_string();
        let metadata = serde_json::json!({ "_quantization_metadata": notes });
        let file = safetensors_with(tensors, &format!(r#""__metadata__":{metadata}"#), 0);
        load_layer_from_bytes(file, &LoadOptions::default())
    };
    let all = ["gate", "up", "down"];
    let powers = |part: &str, rows, cols: usize| {
        vec![raw(name(part, "weight_scale"), "U8", &[rows, cols / 32], |i| 120 + (i % 9) as u8)]
    };
    let mx = file(powers, |i| codes(i, "F8_E4M3", PARTS[i].2));
    // Without the note the order is that of the rows.
    load(&mx).unwrap();
    refused(noted(&mx, "mxfp8", &all), &["gate_proj.weight", "states mxfp8, whose scales"]);
    refused(noted(&mx, "float8_e4m3fn", &["gate"]), &["up_proj.weight", "says nothing of it"]);
    let one = |part: &str, _, _| vec![values(&name(part, "weight_scale"), "F32", &[1], &[0.5])];
    let plain = file(one, |i| codes(i, "F8_E4M3", PARTS[i].2));
    let weights = [0, 1, 2].map(|i| codes(i, "F8_E4M3", PARTS[i].2).bytes);
    let value = |part: usize, r: usize, c: usize| e4m3(weights[part][r * PARTS[part].2 + c]) * 0.5;
    expect(&noted(&plain, "float8_e4m3fn", &all).unwrap(), "F8_E4M3", value);
    let broken = safetensors_with(&plain, r#""__metadata__":{"_quantization_metadata":"{"}"#, 0);
    let loaded = load_layer_from_bytes(broken, &LoadOptions::default());
    refused(loaded, &["_quantization_metadata of the header is no JSON"]);
}

#[test]
fn offsets_are_subtracted_before_scales() {
    let weights = [0, 1, 2].map(|i| codes(i, "I8", PARTS[i].2));
    let weight = |i: usize| weights[i].clone();
    let value = |part: usize, r: usize, c: usize| {
        f64::from(weights[part].bytes[r * PARTS[part].2 + c].cast_signed())
    };
    let scales = ramp(H, 3);
    let scale = |part: &str, rows| t(&name(part, "weight_scale"), "F32", &[rows, 1], 3);
    let offset = |i: usize| (i * 11 % 255) as f32 - 127.0;
    for (tensor, dtype) in
        [("weight_offset", "F32"), ("weight_offset", "F16"), ("weight_zero_point", "I8")]
    {
        let beside = |part: &str, rows: usize, _| {
            let name = name(part, tensor);
            let offsets = match dtype {
                "I8" => raw(name, "I8", &[rows, 1], |i| (offset(i) as i8).cast_unsigned()),
                _ => values(&name, dtype, &[rows, 1], &(0..rows).map(offset).collect::<Vec<_>>()),
            };
            vec![scale(part, rows), offsets]
        };
        let layer = load(&file(beside, weight)).unwrap();
        expect(&layer, "I8 with offsets", |part, r, c| {
            (value(part, r, c) - f64::from(offset(r))) * f64::from(scales[r])
        });
        assert!(layer.quantized_gate_up().is_err());
        assert!(layer.describe().contains("gate_proj.weight I8 with offsets"));
    }
    let none = |part: &str, rows, _| {
        vec![
            scale(part, rows),
            values(&name(part, "weight_offset"), "F32", &[rows], &vec![0.0; rows]),
        ]
    };
    let layer = load(&file(none, weight)).unwrap();
    expect(&layer, "I8", |part, r, c| value(part, r, c) * f64::from(scales[r]));

    let wrong = |tensor: &'static str, dtype: &'static str, n: usize, v: f32| {
        move |part: &str, rows, _: usize| {
            vec![scale(part, rows), values(&name(part, tensor), dtype, &[n], &vec![v; n])]
        }
    };
    refused(
        load(&file(wrong("weight_offset", "F32", 3, 1.0), weight)),
        &["weight_offset", "160 scales"],
    );
    refused(load(&file(wrong("weight_offset", "F64", H, 1.0), weight)), &["moves zero; it is F64"]);
    let floats = |i| codes(i, "F8_E4M3", PARTS[i].2);
    refused(load(&file(wrong("zero_point", "F32", H, 1.0), floats)), &["zero_point moves zero"]);
    let one = |part: &str, rows, _| {
        vec![scale(part, rows), values(&name(part, "weight_offset"), "F32", &[], &[f32::NAN])]
    };
    let e = load(&file(one, weight)).unwrap().expect_finite().unwrap_err().to_string();
    assert!(e.contains("offset of model.layers.0.mlp.gate_proj.weight[0, 0] is NaN"), "{e}");
}

/// bitsandbytes stores the largest magnitude of a row, which is code 127.
#[test]
fn scb_is_127_times_the_scale() {
    let weights = [0, 1, 2].map(|i| codes(i, "I8", PARTS[i].2));
    let weight = |i: usize| weights[i].clone();
    let with = |format: u8| {
        let beside = |part: &str, rows: usize, _| {
            vec![
                t(&name(part, "SCB"), "F32", &[rows], 3),
                raw(name(part, "weight_format"), "U8", &[], |_| format),
            ]
        };
        load(&file(beside, weight))
    };
    let scb = ramp(H, 3);
    expect(&with(0).unwrap(), "I8", |part, r, c| {
        let code = weights[part].bytes[r * PARTS[part].2 + c].cast_signed();
        f64::from((f64::from(scb[r]) / 127.0) as f32) * f64::from(code)
    });
    refused(with(1), &["gate_proj.weight as I8", "weight_format is not 0"]);
}

/// A tensor beside codes may be a part of what they mean.
#[test]
fn what_is_not_understood_beside_codes_is_refused_by_name() {
    let with = |tensor: &str, bytes: &[u8]| {
        let scale =
            |part: &str, rows, _| vec![t(&name(part, "weight_scale"), "F32", &[rows, 1], 3)];
        let mut tensors = file(scale, |i| codes(i, "F8_E4M3", PARTS[i].2));
        tensors.push(raw(name("down", tensor), "U8", &[bytes.len()], |i| bytes[i]));
        load(&tensors)
    };
    for other in
        ["weight_scale_3", "scale_bias", "weight.mask", "quant_bias", "smooth_scale", "rotation"]
    {
        refused(with(other, &[1]), &["down_proj.weight as F8_E4M3", &name("down", other)]);
    }
    // Activations are not quantised here.
    for harmless in ["input_scale", "input_scale_ub", "scale_input", "input_zero_point"] {
        with(harmless, &[1]).unwrap();
    }
    with("comfy_quant", br#"{"format": "float8_e4m3fn"}"#).unwrap();
    refused(with("comfy_quant", br#"{"format": "mxfp8"}"#), &["comfy_quant states mxfp8"]);
    refused(with("comfy_quant", b"["), &["comfy_quant states no format"]);

    // A scale beside values would be left out.
    let mut dense = layer::triple(
        ["gate", "up", "down"].map(|p| name(p, "weight")).each_ref().map(|s| s.as_str()),
        "BF16",
        K,
        H,
        1,
    );
    dense.push(t(&name("up", "weight_scale"), "F32", &[1], 1));
    refused(load(&dense), &["up_proj.weight as BF16", "up_proj.weight_scale is a scale"]);
}

/// Stacks under the name of the stack, as transformers has them.
#[test]
fn a_stack_takes_the_scales_of_its_expert() {
    let n = |part: &str| format!("model.layers.0.mlp.experts.{part}");
    let code = |i: usize| (i % 0x7F) as u8;
    let stack = |scale: [&[usize]; 2]| {
        let tensors = [
            raw(n("gate_up_proj"), "F8_E4M3", &[3, 2 * H, K], code),
            t(&n("gate_up_proj_scale"), "F32", scale[0], 1),
            raw(n("down_proj"), "F8_E4M3", &[3, K, H], code),
            t(&n("down_proj_scale"), "F32", scale[1], 1),
        ];
        let c = Checkpoint::new(&tensors, "");
        c.load(
            &LoadOptions::default()
                .with_expert(2)
                .with_arrangement(swiglu_core::Arrangement::PackedGateFirst),
        )
    };
    let all: Vec<f32> = ramp(3 * 2 * H, 1);
    let first =
        |layer: LayerWeights| layer.stored_gate_up()[0].to_matrix_f64().unwrap().as_slice()[0];
    let value = e4m3(code(2 * 2 * H * K));
    for (scale, at) in [
        ([&[3, 2 * H, 1][..], &[3, K, 1]], 2 * 2 * H),
        ([&[3, 2 * H], &[3, K]], 2 * 2 * H),
        ([&[3], &[3]], 2),
        ([&[3, 1, 1], &[3, 1, 1]], 2),
        ([&[], &[1, 1, 1]], 0),
    ] {
        assert_eq!(first(stack(scale).unwrap()), value * f64::from(all[at]), "{scale:?}");
    }
    refused(stack([&[2, 2 * H, 1], &[3]]), &["gate_up_proj_scale", "a stack for 3 experts"]);
    refused(stack([&[4], &[3]]), &["gate_up_proj_scale", "a stack for 3 experts"]);
}
