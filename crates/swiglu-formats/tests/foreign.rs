//! Files of quantisers that are not read, and of adapters: refused by name, with what to do.

use crate::support::layer::{Checkpoint, at, refused};
use crate::support::*;
use swiglu_formats::{FormatError, LoadOptions, TensorNames};

const K: usize = 64;
const H: usize = 96;

fn raw(name: &str, dtype: &'static str, shape: &[usize]) -> T {
    let width = match dtype {
        "I64" => 8,
        "I32" | "U32" | "F32" => 4,
        "I16" | "F16" | "BF16" => 2,
        _ => 1,
    };
    let bytes = vec![0; shape.iter().product::<usize>() * width];
    T { name: name.into(), dtype, shape: shape.into(), bytes }
}

/// Rests of names with their types and shapes, for `out` features of `inputs`.
type Writer = fn(usize, usize) -> Vec<(&'static str, &'static str, Vec<usize>)>;

/// What its tensors are called, and a part of the advice.
const WRITERS: [(&str, &str, Writer); 24] = [
    ("GPTQ", "a GGUF of the same model", |o, i| {
        vec![
            ("qweight", "I32", vec![i / 8, o]),
            ("qzeros", "I32", vec![1, o / 8]),
            ("scales", "F16", vec![1, o]),
            ("g_idx", "I32", vec![i]),
        ]
    }),
    ("AWQ", "a GGUF of the same model", |o, i| {
        vec![
            ("qweight", "I32", vec![i, o / 8]),
            ("qzeros", "I32", vec![1, o / 8]),
            ("scales", "F16", vec![1, o]),
        ]
    }),
    ("Marlin", "a GGUF", |o, i| vec![("B", "I32", vec![i / 16, o * 2]), ("s", "F16", vec![1, o])]),
    ("bitsandbytes of 4 bits", "dequantize()", |o, i| {
        vec![
            ("weight", "U8", vec![o * i / 2, 1]),
            ("weight.absmax", "U8", vec![o * i / 64]),
            ("weight.quant_map", "F32", vec![16]),
            ("weight.nested_absmax", "F32", vec![1]),
            ("weight.quant_state.bitsandbytes__nf4", "U8", vec![80]),
        ]
    }),
    ("bitsandbytes of 4 bits", "dequantize()", |o, i| {
        vec![
            ("weight", "U8", vec![o * i / 2, 1]),
            ("weight.quant_state.bitsandbytes__fp4", "U8", vec![80]),
        ]
    }),
    ("MLX", "mlx_lm.convert", |o, i| {
        vec![
            ("weight", "U32", vec![o, i / 8]),
            ("scales", "F16", vec![o, i / 64]),
            ("biases", "F16", vec![o, i / 64]),
        ]
    }),
    ("MLX", "mlx_lm.convert", |o, i| {
        vec![("weight", "U32", vec![o, i / 8]), ("scales", "U8", vec![o, i / 32])]
    }),
    ("compressed-tensors, packed integers", "run_compressed=False", |o, i| {
        vec![
            ("weight_packed", "I32", vec![o, i / 8]),
            ("weight_scale", "F16", vec![o, 1]),
            ("weight_shape", "I64", vec![2]),
        ]
    }),
    ("NVFP4 (compressed-tensors)", "run_compressed=False", |o, i| {
        vec![
            ("weight_packed", "U8", vec![o, i / 2]),
            ("weight_scale", "F8_E4M3", vec![o, i / 16]),
            ("weight_global_scale", "F32", vec![1]),
        ]
    }),
    ("NVFP4 (ModelOpt)", "a GGUF", |o, i| {
        vec![
            ("weight", "U8", vec![o, i / 2]),
            ("weight_scale", "F8_E4M3", vec![o, i / 16]),
            ("weight_scale_2", "F32", vec![]),
            ("input_scale", "F32", vec![]),
        ]
    }),
    ("HQQ", "a GGUF", |o, i| {
        vec![
            ("W_q", "U8", vec![o / 2, i]),
            ("scale", "F16", vec![o, 1]),
            ("zero", "F16", vec![o, 1]),
        ]
    }),
    ("quanto", "a GGUF", |o, i| {
        vec![("weight._data", "I8", vec![o, i]), ("weight._scale", "F32", vec![o, 1])]
    }),
    ("torchao", "a GGUF", |o, i| {
        vec![("_weight_qdata", "I8", vec![o, i]), ("_weight_scale", "F32", vec![o, 1])]
    }),
    ("EETQ", "a GGUF", |o, i| {
        vec![("weight", "I8", vec![i, o]), ("weight_scales", "F16", vec![o])]
    }),
    ("AQLM", "a GGUF", |o, i| {
        vec![
            ("codes", "I16", vec![o, i / 8, 1]),
            ("codebooks", "F16", vec![1, 256, 1, 8]),
            ("scales", "F16", vec![o]),
        ]
    }),
    ("VPTQ", "a GGUF", |_, _| {
        vec![("centroids", "F16", vec![1, 8]), ("indices", "I32", vec![1, 8])]
    }),
    ("ExLlamaV2", "a GGUF", |o, i| {
        vec![("q_weight", "I32", vec![i / 8, o]), ("q_scale", "I32", vec![1, o / 8])]
    }),
    ("ExLlamaV3", "a GGUF", |o, i| {
        vec![("trellis", "I16", vec![i / 16, o / 16, 64]), ("suh", "F16", vec![i])]
    }),
    ("SVDQuant", "a GGUF", |o, i| {
        vec![
            ("qweight", "I8", vec![o, i / 2]),
            ("wscales", "BF16", vec![i / 64, o]),
            ("smooth", "BF16", vec![i]),
        ]
    }),
    ("BitNet, packed", "BF16", |o, i| {
        vec![("weight", "U8", vec![o / 4, i]), ("weight_scale", "BF16", vec![1])]
    }),
    ("LoRA", "merge_and_unload", |o, i| {
        vec![("lora_A.weight", "F32", vec![4, i]), ("lora_B.weight", "F32", vec![o, 4])]
    }),
    ("LoRA", "merge_and_unload", |o, i| {
        vec![
            ("base_layer.weight", "F32", vec![o, i]),
            ("lora_A.default.weight", "F32", vec![4, i]),
            ("lora_B.default.weight", "F32", vec![o, 4]),
        ]
    }),
    ("LoRA", "merge", |o, i| {
        vec![
            ("weight", "F32", vec![o, i]),
            ("lora_A.weight", "F32", vec![4, i]),
            ("lora_B.weight", "F32", vec![o, 4]),
        ]
    }),
    ("(IA)³", "merge", |o, i| vec![("weight", "F32", vec![o, i]), ("ia3_l", "F32", vec![o, 1])]),
];

fn layer(write: Writer, prefix: &str, parts: &[&str]) -> Vec<T> {
    let sizes = |part: &str| if part.starts_with("down") { (K, H) } else { (H, K) };
    let of = |part: &&str| {
        let (o, i) = sizes(part);
        let named = |(rest, dtype, shape): (&str, _, Vec<usize>)| {
            raw(&format!("{prefix}.{part}.{rest}"), dtype, &shape)
        };
        write(o, i).into_iter().map(named).collect::<Vec<_>>()
    };
    parts.iter().flat_map(of).collect()
}

const PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn expect(tensors: &[T], config: &str, o: &LoadOptions, parts: &[&str]) {
    let e = refused(Checkpoint::new(tensors, config).load(o), parts);
    assert!(matches!(e, FormatError::Quantization { .. }), "{e}");
}

#[test]
fn each_is_refused_by_its_name_with_advice() {
    for (name, advice, write) in WRITERS {
        for prefix in [
            "model.layers.0.mlp",
            "base_model.model.model.layers.0.mlp",
            "model.layers.0.feed_forward",
        ] {
            expect(&layer(write, prefix, &PARTS), "", &at(0), &["_proj", name, advice]);
        }
    }
}

/// Also where a part of the layer, or another layer, has the usual names.
#[test]
fn a_layer_of_which_a_part_is_foreign_is_refused() {
    let names = |i: usize| PARTS.map(|part| format!("model.layers.{i}.mlp.{part}.weight"));
    let dense = |i: usize| {
        let names = names(i);
        crate::support::layer::triple(names.each_ref().map(String::as_str), "F32", K, H, 1)
    };
    let gptq = WRITERS[0].2;
    // Down alone: without it, the gated linear layer would be computed.
    let mut mixed = dense(0);
    drop(mixed.pop());
    mixed.extend(layer(gptq, "model.layers.0.mlp", &["down_proj"]));
    expect(&mixed, "", &at(0), &["layers.0.mlp.down_proj.qweight", "GPTQ"]);
    // A bias has its usual name.
    let mut biased = layer(gptq, "model.layers.0.mlp", &PARTS);
    biased.push(t("model.layers.0.mlp.gate_proj.bias", "F32", &[H], 1));
    expect(&biased, "", &at(0), &["GPTQ"]);
    // Layer 1 is foreign, layer 0 is not, and layer 2 is not there.
    let mut two = dense(0);
    two.extend(layer(gptq, "model.layers.1.mlp", &PARTS));
    two.extend(layer(gptq, "model.layers.0.self_attn", &["q_proj"]));
    Checkpoint::new(&two, "").load(&at(0)).unwrap();
    expect(&two, "", &at(1), &["layers.1.mlp", "GPTQ"]);
    let e = refused(Checkpoint::new(&two, "").load(&at(2)), &["layer 2 given"]);
    assert!(matches!(e, FormatError::LayerOutOfRange { .. }), "{e}");
}

#[test]
fn adapters_of_other_layers_do_not_stand_for_a_layer_that_is_there() {
    let lora = WRITERS[20].2;
    let attention = layer(lora, "base_model.model.model.layers.0.self_attn", &["q_proj"]);
    expect(&attention, "", &at(0), &["q_proj.lora_A.weight", "LoRA"]);
    let names = PARTS.map(|part| format!("model.layers.0.mlp.{part}.weight"));
    let mut dense =
        crate::support::layer::triple(names.each_ref().map(String::as_str), "F32", K, H, 1);
    dense.extend(attention);
    Checkpoint::new(&dense, "").load(&at(0)).unwrap();
}

#[test]
fn names_that_a_caller_picks_are_checked_too() {
    let tensors = layer(WRITERS[3].2, "m", &["a", "b", "c"]);
    let name = |part: &str| format!("m.{part}.weight");
    let names = TensorNames::default().with_gate(name("a")).with_up(name("b")).with_down(name("c"));
    let o = LoadOptions::default().with_names(names);
    expect(&tensors, "", &o, &["m.a.weight", "bitsandbytes of 4 bits"]);
}

#[test]
fn the_configuration_names_what_tensors_do_not() {
    let tensors = [t("model.layers.0.mlp.gate_proj.mystery", "F32", &[H, K], 1)];
    let config =
        |method: &str| format!(r#"{{"quantization_config":{{"quant_method":"{method}"}}}}"#);
    expect(&tensors, &config("vptq"), &at(0), &["VPTQ (config.json: quant_method)"]);
    expect(&tensors, &config("new-one"), &at(0), &["new-one (config.json: quant_method)", "GGUF"]);
    let inner = format!(r#"{{"text_config":{}}}"#, config("hqq"));
    expect(&tensors, &inner, &at(0), &["HQQ (config.json"]);
    // What is read in some form was not found for another reason.
    let none = refused(Checkpoint::new(&tensors, &config("fp8")).load(&at(0)), &["no gated"]);
    assert!(matches!(none, FormatError::NoLayer { .. }), "{none}");
    let bytes = layer(
        |o, i| vec![("weight", "U8", vec![o, i]), ("weight_scale", "F32", vec![o, 2])],
        "model.layers.0.mlp",
        &PARTS,
    );
    expect(&bytes, &config("new-one"), &at(0), &["names the quantiser `new-one`"]);
    expect(&bytes, "", &at(0), &["gate_proj.weight as U8", "no configuration beside it"]);
}
