//! Finding a layer: every naming convention of separate weights, and every refusal.

use crate::support::layer::*;
use crate::support::*;
use half::{bf16, f16};
use swiglu_core::{Arrangement, DType, Orientation, WeightLayout};
use swiglu_formats::{FormatError, LoadOptions, TensorNames, load_layer, load_layer_from_bytes};

#[test]
fn hugging_face_under_every_prefix_and_type() {
    for prefix in
        ["model.", "", "model.language_model.", "language_model.model.", "transformer.", "odd.one."]
    {
        for dtype in ["F32", "F16", "BF16", "F64"] {
            let n = |x: &str| format!("{prefix}layers.7.mlp.{x}_proj.weight");
            let mut tensors = triple([&n("gate"), &n("up"), &n("down")], dtype, K, H, 3);
            tensors.push(t(&format!("{prefix}layers.7.mlp.gate_proj.bias"), "F32", &[H], 8));
            tensors.push(t(&format!("{prefix}layers.7.mlp.down_proj.bias"), dtype, &[K], 9));
            tensors.push(t(
                &format!("{prefix}layers.7.self_attn.q_proj.weight"),
                dtype,
                &[K, K],
                9,
            ));
            let layer = load_layer_from_bytes(safetensors(&tensors), &at(7)).unwrap();
            expect_triple(&layer, K, H, 3);
            assert_eq!(layer.layout(), WeightLayout::HF);
            assert_eq!(layer.stored_dtype().to_string(), dtype);
            assert_eq!(layer.gate_bias().unwrap(), ramp(H, 8));
            assert_eq!(layer.down_bias().unwrap(), ramp(K, 9));
            assert!(layer.up_bias().is_none());
        }
    }
}

#[test]
fn real_sizes_that_break_others() {
    // H not a multiple of 8 or 2, K = 1, K not a multiple of 8.
    let n = |x: &str| format!("model.layers.0.mlp.{x}_proj.weight");
    for (k, h) in [(288, 768), (37, 172), (1, 1), (7, 3420), (5, 13)] {
        let tensors = triple([&n("gate"), &n("up"), &n("down")], "BF16", k, h, 1);
        let layer = load_layer_from_bytes(safetensors(&tensors), &at(0)).unwrap();
        expect_triple(&layer, k, h, 1);
    }
}

#[test]
fn weights_are_borrowed_where_they_lie_aligned() {
    let n = |x: &str| format!("model.layers.0.mlp.{x}_proj.weight");
    for pad in 0..4 {
        let tensors = triple([&n("gate"), &n("up"), &n("down")], "F32", K, H, 1);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        std::fs::write(&path, safetensors_with(&tensors, "", pad)).unwrap();
        let layer = load_layer(&path, &at(0)).unwrap();
        assert_eq!(layer.gate_up_view::<f32>().is_some(), pad == 0, "{pad}");
        assert_eq!(layer.down_view::<f32>().is_some(), pad == 0);
        assert!(layer.gate_up_view::<bf16>().is_none());
        expect_triple(&layer, K, H, 1);
        assert_eq!(
            layer.gate_up::<f16>().unwrap().tensors()[0].as_slice()[3].to_f32(),
            ramp(4, 1)[3]
        );
    }
}

#[test]
fn a_language_model_beside_an_encoder() {
    let n = |p: &str, x: &str| format!("{p}layers.0.mlp.{x}_proj.weight");
    let of = |p: &str, seed| triple([&n(p, "gate"), &n(p, "up"), &n(p, "down")], "F32", 4, 6, seed);
    let both = [of("model.language_model.", 1), of("vision_tower.encoder.", 5)].concat();
    expect_triple(&load_layer_from_bytes(safetensors(&both), &at(0)).unwrap(), 4, 6, 1);
    let both = [of("audio.", 1), of("vision.", 5)].concat();
    let e = load_layer_from_bytes(safetensors(&both), &at(0));
    refused(e, &["ambiguous", "audio., vision.", "the tensors by name"]);
}

#[test]
fn mixtral_and_numbered_experts() {
    let mut tensors = vec![t("model.layers.1.block_sparse_moe.gate.weight", "F32", &[2, K], 0)];
    for e in 0..2 {
        let n = |w: &str| format!("model.layers.1.block_sparse_moe.experts.{e}.{w}.weight");
        tensors.extend(triple([&n("w1"), &n("w3"), &n("w2")], "BF16", K, H, 10 * e));
    }
    let file = safetensors(&tensors);
    for e in 0..2 {
        let layer = load_layer_from_bytes(file.clone(), &expert(1, e)).unwrap();
        expect_triple(&layer, K, H, 10 * e);
    }
    refused(load_layer_from_bytes(file.clone(), &at(1)), &["the expert is ambiguous", "0 to 1"]);
    let e = refused(load_layer_from_bytes(file, &expert(1, 2)), &["expert 2", "0 to 1"]);
    assert!(matches!(e, FormatError::ExpertOutOfRange { .. }));
}

#[test]
fn qwen_and_deepseek_experts_with_a_shared_one() {
    let n = |i: usize, part: &str, x: &str| format!("model.layers.{i}.mlp.{part}{x}_proj.weight");
    let of = |i, part: &str, h, seed| {
        triple([&n(i, part, "gate"), &n(i, part, "up"), &n(i, part, "down")], "F32", K, h, seed)
    };
    let tensors = [
        of(0, "", 20, 1),
        of(1, "experts.0.", 8, 2),
        of(1, "experts.11.", 8, 3),
        of(1, "shared_experts.", 9, 4),
        vec![t("model.layers.1.mlp.gate.weight", "F32", &[12, K], 0)],
    ]
    .concat();
    let file = safetensors(&tensors);
    let load = |o: &LoadOptions| load_layer_from_bytes(file.clone(), o);
    expect_triple(&load(&at(0)).unwrap(), K, 20, 1);
    expect_triple(&load(&expert(1, 11)).unwrap(), K, 8, 3);
    refused(
        load(&at(1)),
        &["with_expert: 0, 11", "LoadOptions::with_beside_experts for a shared one"],
    );
    refused(load(&expert(0, 1)), &["layer 0 has no experts"]);
    refused(load(&at(2)), &["layer 2 given, the file has layers 0 to 1"]);
    // The shared expert by name; its names say that it is made of linear layers.
    let part = |x: &str| n(1, "shared_experts.", x);
    let names =
        TensorNames::default().with_gate(part("gate")).with_up(part("up")).with_down(part("down"));
    let layer = load(&at(1).with_names(names)).unwrap();
    expect_triple(&layer, K, 9, 4);
    assert_eq!(layer.layout().orientation, Orientation::OutIn);
}

#[test]
fn llama_cpp_dense_and_stacked_experts() {
    let mut tensors = triple(
        ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"],
        "F16",
        K,
        H,
        1,
    );
    tensors.push(t("blk.0.ffn_up.bias", "F32", &[H], 7));
    tensors.push(t("blk.0.ffn_norm.weight", "F32", &[K], 7));
    let stack = |name: &str, a, b, seed| {
        let v: Vec<f32> = (0..3usize).flat_map(|e| ramp(a * b, seed + 10 * e)).collect();
        values(name, "F32", &[3, a, b], &v)
    };
    tensors.push(stack("blk.1.ffn_gate_exps.weight", 8, K, 1));
    tensors.push(stack("blk.1.ffn_up_exps.weight", 8, K, 2));
    tensors.push(stack("blk.1.ffn_down_exps.weight", K, 8, 3));
    let n = |x: &str| format!("blk.2.ffn_{x}.5.weight");
    tensors.extend(triple([&n("gate"), &n("up"), &n("down")], "F32", K, 8, 4));
    let file = gguf(&tensors, &[text("general.architecture", "qwen3moe")]);
    let load = |o: &LoadOptions| load_layer_from_bytes(file.clone(), o);
    let layer = load(&at(0)).unwrap();
    expect_triple(&layer, K, H, 1);
    assert_eq!(layer.up_bias().unwrap(), ramp(H, 7));
    assert_eq!(layer.architecture(), Some("qwen3moe"));
    for e in 0..3 {
        expect_triple(&load(&expert(1, e)).unwrap(), K, 8, 1 + 10 * e);
    }
    refused(load(&at(1)), &["the expert is ambiguous", "[3, 8, 12]", "expert 0 to 2"]);
    refused(load(&expert(1, 3)), &["expert 3", "stacks 3 experts"]);
    expect_triple(&load(&expert(2, 5)).unwrap(), K, 8, 4);
}

/// DBRX: each weight of all experts is one matrix, gate and up `[E·H, K]`, down of the same shape.
#[test]
fn experts_in_blocks_of_rows() {
    let prefix = "transformer.blocks.2.ffn.experts.mlp.";
    let stack = |name: &str, seed: usize| {
        let all: Vec<f32> = (0..3).flat_map(|e| ramp(8 * K, 10 * e + seed)).collect();
        values(&format!("{prefix}{name}"), "F32", &[3 * 8, K], &all)
    };
    // Down transposed: what `expect_triple` has as [K, H] lies as [H, K].
    let down: Vec<f32> = (0..3)
        .flat_map(|e| {
            let plain = ramp(8 * K, 10 * e + 2);
            (0..8 * K).map(move |i| plain[(i % K) * 8 + i / K]).collect::<Vec<_>>()
        })
        .collect();
    let tensors =
        [stack("w1", 0), stack("v1", 1), values(&format!("{prefix}w2"), "F32", &[3 * 8, K], &down)];
    for config in [
        r#"{"model_type":"dbrx","d_model":12,"ffn_config":{"ffn_hidden_size":8,"moe_num_experts":3}}"#,
        r#"{"model_type":"dbrx","ffn_config":{"ffn_hidden_size":8}}"#,
        r#"{"model_type":"dbrx","ffn_config":{"moe_num_experts":3}}"#,
    ] {
        let checkpoint = Checkpoint::new(&tensors, config);
        for e in 0..3 {
            expect_triple(&checkpoint.load(&expert(2, e)).unwrap(), K, 8, 10 * e);
        }
        refused(checkpoint.load(&expert(2, 3)), &["stacks 3 experts"]);
        refused(checkpoint.load(&at(2)), &["expert 0 to 2"]);
        let found = swiglu_formats::inspect(&checkpoint.file(), &LoadOptions::default()).unwrap();
        assert_eq!((found.blocks[0].experts, found.blocks[0].refused.as_deref()), (Some(3), None));
    }
    let unsaid = Checkpoint::new(&tensors, r#"{"model_type":"dbrx"}"#);
    refused(unsaid.load(&expert(2, 0)), &["of how many experts", "moe_num_experts"]);
    for ffn in [r#"{"ffn_hidden_size":8,"moe_num_experts":4}"#, r#"{"ffn_hidden_size":7}"#] {
        let config = format!(r#"{{"model_type":"dbrx","ffn_config":{ffn}}}"#);
        refused(Checkpoint::new(&tensors, &config).load(&expert(2, 0)), &["24"]);
    }
}

/// Old converters of vision encoders wrote up as `ffn_down` and down as `ffn_up`.
#[test]
fn swapped_names_of_projectors_are_read_as_they_are_meant() {
    let [gate, up, down] = ["gate", "up", "down"].map(|r| format!("v.blk.0.ffn_{r}.weight"));
    let load = |names: [&str; 3], architecture: &str| {
        let mut tensors = triple(names, "F32", K, H, 4);
        tensors.push(t(&names[1].replace("weight", "bias"), "F32", &[H], 8));
        tensors.push(t(&names[2].replace("weight", "bias"), "F32", &[K], 9));
        let file = gguf(&tensors, &[text("general.architecture", architecture)]);
        load_layer_from_bytes(file, &at(0))
    };
    for names in [[&*gate, &*up, &*down], [&*gate, &*down, &*up]] {
        let layer = load(names, "clip").unwrap();
        expect_triple(&layer, K, H, 4);
        assert_eq!(layer.up_bias().unwrap(), ramp(H, 8));
        assert_eq!(layer.down_bias().unwrap(), ramp(K, 9));
    }
    refused(load([&gate, &down, &up], "llama"), &["expected shape"]);
}

#[test]
fn meta_and_plain_names() {
    let n = |w: &str| format!("layers.0.feed_forward.{w}.weight");
    let tensors = triple([&n("w1"), &n("w3"), &n("w2")], "F32", K, K, 1);
    expect_triple(&load_layer_from_bytes(safetensors(&tensors), &at(0)).unwrap(), K, K, 1);

    // Without a convention that fixes the orientation, shapes of gate and down fit both ways.
    let tensors = triple(["layers.0.w1", "layers.0.w3", "layers.0.w2"], "F32", K, H, 1);
    let load = |tensors: &[T], o: &LoadOptions| load_layer_from_bytes(safetensors(tensors), o);
    let e = load(&tensors, &at(0));
    refused(e, &["the orientation is ambiguous", "[172, 12]", "out-in", "in-out"]);
    let layer = load(&tensors, &at(0).with_hidden(K)).unwrap();
    expect_triple(&layer, K, H, 1);
    let layer = load(&tensors, &at(0).with_hidden(H)).unwrap();
    assert_eq!(layer.layout().orientation, Orientation::InOut);
    assert_eq!((layer.hidden(), layer.intermediate()), (H, K));
    let o = at(0).with_orientation(Orientation::OutIn);
    expect_triple(&load(&tensors, &o).unwrap(), K, H, 1);
    let e = load(&tensors, &at(0).with_hidden(5));
    assert!(matches!(refused(e, &["as out-in", "as in-out"]), FormatError::Shape { .. }));
    // A bias decides, too.
    let with = [tensors, vec![t("layers.0.w2.bias", "F32", &[K], 1)]].concat();
    expect_triple(&load(&with, &at(0)).unwrap(), K, H, 1);
    // A square layer is refused, whatever the bias.
    let square = triple(["layers.0.w1", "layers.0.w3", "layers.0.w2"], "F32", K, K, 1);
    refused(load(&square, &at(0)), &["fits both ways"]);
    // config.json knows the hidden size.
    let tensors = triple(["layers.0.w1", "layers.0.w3", "layers.0.w2"], "F32", K, H, 1);
    let c = Checkpoint::new(&tensors, &format!(r#"{{"hidden_size":{K}}}"#));
    expect_triple(&c.load(&at(0)).unwrap(), K, H, 1);
}

#[test]
fn shapes_that_contradict_the_convention_are_refused() {
    let n = |x: &str| format!("model.layers.0.mlp.{x}_proj.weight");
    let base = triple([&n("gate"), &n("up"), &n("down")], "F32", K, H, 1);
    let swap = |i: usize, shape: &[usize]| {
        let mut tensors = base.clone();
        tensors[i] = t(&tensors[i].name, "F32", shape, 1);
        load_layer_from_bytes(safetensors(&tensors), &at(0))
    };
    let e = refused(swap(2, &[H, K]), &["down_proj", "[12, 172]", "given [172, 12]"]);
    assert!(matches!(e, FormatError::Shape { .. }));
    refused(swap(1, &[H, K + 1]), &["up_proj", "given [172, 13]"]);
    refused(swap(0, &[H * K]), &["gate_proj", "two extents"]);
    refused(swap(0, &[0, K]), &["up_proj"]);
    let zero = triple([&n("gate"), &n("up"), &n("down")], "F32", 0, 4, 1);
    refused(load_layer_from_bytes(safetensors(&zero), &at(0)), &["at least one"]);
    let bias = [base.clone(), vec![t("model.layers.0.mlp.up_proj.bias", "F32", &[K], 1)]].concat();
    refused(load_layer_from_bytes(safetensors(&bias), &at(0)), &["up_proj.bias", "[172]", "[12]"]);
    // Transposed as a whole, which only the stated hidden size shows.
    let c = Checkpoint::new(&base, &format!(r#"{{"hidden_size":{H}}}"#));
    refused(c.load(&at(0)), &["172 input features"]);
    let o = at(0).with_orientation(Orientation::OutIn);
    expect_triple(&c.load(&o).unwrap(), K, H, 1);
}

#[test]
fn explicit_names_are_checked() {
    let tensors = triple(["a", "b", "c"], "F32", K, H, 1);
    let load = |names: TensorNames| {
        let o = LoadOptions::default().with_names(names).with_hidden(K);
        load_layer_from_bytes(safetensors(&tensors), &o)
    };
    let base = TensorNames::default().with_gate("a").with_up("b");
    let layer = load(base.clone().with_down("c")).unwrap();
    expect_triple(&layer, K, H, 1);
    assert!(layer.describe().starts_with("tensors of "), "{}", layer.describe());
    let layer = load(base.clone()).unwrap();
    assert!(layer.down::<f32>().unwrap().is_none() && layer.describe().contains("no down"));
    refused(load(TensorNames::default().with_gate("a")), &["gate given without up"]);
    refused(load(TensorNames::default().with_up("b")), &["up given without gate"]);
    refused(load(base.clone().with_gate_up("c")), &["together with"]);
    refused(load(base.clone().with_gate_up_bias("c")), &["gate_up_bias needs"]);
    let both = base.clone().with_gate_bias("c").with_gate_up_bias("c");
    refused(load(both), &["together with"]);
    refused(load(base.clone().with_gate_bias("c")), &["the expert"]);
    let e = refused(load(base.with_down("d")), &["no tensor `d`", "nearest"]);
    assert!(matches!(e, FormatError::TensorNotFound { .. }));
    let o = at(0).with_arrangement(Arrangement::PackedUpFirst);
    let n = |x: &str| format!("layers.0.mlp.{x}_proj.weight");
    let hf = triple([&n("gate"), &n("up"), &n("down")], "F32", K, H, 1);
    refused(load_layer_from_bytes(safetensors(&hf), &o), &["up-first given", "two tensors"]);
}

#[test]
fn incomplete_layers_say_what_is_missing() {
    let n = |x: &str| format!("layers.0.mlp.{x}_proj.weight");
    let all = triple([&n("gate"), &n("up"), &n("down")], "F32", K, H, 1);
    for (keep, what) in [(0, "no up weight"), (1, "no gate weight"), (2, "no gate and no up")] {
        let e = load_layer_from_bytes(safetensors(&all[keep..=keep]), &at(0));
        let e = refused(e, &["layer 0 is incomplete", what, &all[keep].name]);
        assert!(matches!(e, FormatError::IncompleteLayer { .. }));
    }
    let layer = load_layer_from_bytes(safetensors(&all[..2]), &at(0)).unwrap();
    assert!(layer.stored_down().is_none());
    let many: Vec<T> = (0..31)
        .flat_map(|i| {
            let n = |x: &str| format!("layers.{i}.mlp.{x}_proj.weight");
            triple([&n("gate"), &n("up"), &n("down")], "F32", 1, 1, 1)
        })
        .collect();
    let e = load_layer_from_bytes(safetensors(&many), &at(31));
    let e = refused(e, &["layer 31 given, the file has layers 0 to 30"]);
    assert!(matches!(e, FormatError::LayerOutOfRange { .. }));
    refused(load_layer_from_bytes(safetensors(&[]), &at(0)), &["holds no tensors"]);
}

#[test]
fn sharded_checkpoints_open_only_what_they_need() {
    let n = |i: usize, x: &str| format!("model.layers.{i}.mlp.{x}_proj.weight");
    let zero = triple([&n(0, "gate"), &n(0, "up"), &n(0, "down")], "BF16", K, H, 1);
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, tensors: &[T]| {
        std::fs::write(dir.path().join(name), safetensors(tensors)).unwrap();
    };
    write("model-00001-of-00003.safetensors", &zero[..1]);
    write("model-00002-of-00003.safetensors", &zero[1..]);
    let mut map = serde_json::Map::new();
    for (i, t) in zero.iter().enumerate() {
        let shard = if i == 0 { 1 } else { 2 };
        map.insert(t.name.clone(), format!("model-0000{shard}-of-00003.safetensors").into());
    }
    for x in ["gate", "up", "down"] {
        map.insert(n(1, x), "model-00003-of-00003.safetensors".into());
    }
    map.insert(n(2, "gate"), "model-00001-of-00003.safetensors".into());
    map.insert(n(2, "up"), "model-00001-of-00003.safetensors".into());
    let index = dir.path().join("model.safetensors.index.json");
    let json = serde_json::json!({ "metadata": {"total_size": 1}, "weight_map": map });
    std::fs::write(&index, json.to_string()).unwrap();
    for path in [dir.path(), &index] {
        let layer = load_layer(path, &at(0)).unwrap();
        expect_triple(&layer, K, H, 1);
        assert_eq!(layer.format().to_string(), "sharded safetensors");
        assert_eq!(layer.stored_dtype().dtype(), Some(DType::Bf16));
    }
    // The third shard was not downloaded; the index lies about layer 2.
    let e = refused(load_layer(dir.path(), &at(1)), &["model-00003-of-00003.safetensors"]);
    assert!(matches!(e, FormatError::MissingPart { .. }));
    let e = refused(load_layer(dir.path(), &at(2)), &["weight_map", "has none of that name"]);
    assert!(matches!(e, FormatError::Malformed { .. }));
}

#[test]
fn non_finite_weights_are_named_with_their_place() {
    let n = |x: &str| format!("layers.0.mlp.{x}_proj.weight");
    let mut tensors = triple([&n("gate"), &n("up"), &n("down")], "F32", K, H, 1);
    tensors.push(values("layers.0.mlp.up_proj.bias", "F32", &[H], &vec![0.0; H]));
    let mut v = ramp(K * H, 3);
    v[2 * H + 5] = f32::NEG_INFINITY;
    let with = [&tensors[..2], &[values(&n("down"), "F16", &[K, H], &v)]].concat();
    let e = load_layer_from_bytes(safetensors(&with), &at(0)).unwrap().expect_finite();
    let e = e.unwrap_err().to_string();
    assert!(e.contains("down_proj.weight[2, 5] is -inf"), "{e}");
    let mut b = vec![0.0; H];
    b[9] = f32::NAN;
    tensors[3] = values("layers.0.mlp.up_proj.bias", "F32", &[H], &b);
    let e = load_layer_from_bytes(safetensors(&tensors), &at(0)).unwrap().expect_finite();
    assert!(e.unwrap_err().to_string().contains("up_proj.bias[0, 9] is NaN"));
}

#[test]
fn matrices_are_read_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x#1.safetensors");
    let read = |name: &str| swiglu_formats::read_matrix(format!("{}{name}", path.display()));
    std::fs::write(&path, safetensors(&[t("only", "BF16", &[2, 3, 4], 1)])).unwrap();
    assert_eq!(read("").unwrap().shape(), [6, 4]);
    assert_eq!(read("#").unwrap().shape(), [6, 4]);
    assert_eq!(read("#only").unwrap().to::<f32>().unwrap().as_slice(), ramp(24, 1));
    let two = [t("x.a", "F64", &[4], 1), t("x.b", "F16", &[1, 4], 2)];
    std::fs::write(&path, safetensors(&two)).unwrap();
    assert_eq!(read("#x.a").unwrap().dtype_name(), "f64");
    assert_eq!(read("#x.a").unwrap().to::<bf16>().unwrap().as_slice()[1].to_f32(), ramp(2, 1)[1]);
    let e = read("").unwrap_err();
    assert!(matches!(&e, FormatError::TensorNotNamed { count: 2, .. }), "{e}");
    assert!(e.to_string().contains("FILE#TENSOR: x.a, x.b"), "{e}");
    assert!(read("#x.c").unwrap_err().to_string().contains("nearest: x.a"));
    let npy_path = dir.path().join("y.npy");
    std::fs::write(
        &npy_path,
        npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1), }", &[0; 4]),
    )
    .unwrap();
    let e = swiglu_formats::read_matrix(format!("{}#a", npy_path.display())).unwrap_err();
    assert!(e.to_string().contains("without a name"), "{e}");
}

/// Names of files that are not UTF-8.
#[cfg(target_os = "linux")]
#[test]
fn matrices_are_read_from_any_path() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(std::ffi::OsStr::from_bytes(b"x\xFF.safetensors"));
    std::fs::write(&path, safetensors(&[t("a", "F32", &[2], 1), t("b", "F32", &[3], 1)])).unwrap();
    let of = |tensor: &[u8]| {
        let mut spec = path.clone().into_os_string();
        spec.push(std::ffi::OsStr::from_bytes(tensor));
        swiglu_formats::read_matrix(spec)
    };
    assert_eq!(of(b"#b").unwrap().shape(), [1, 3]);
    assert!(matches!(of(b"").unwrap_err(), FormatError::TensorNotNamed { count: 2, .. }));
    assert!(matches!(of(b"#\xFE").unwrap_err(), FormatError::TensorNotFound { .. }));
}
