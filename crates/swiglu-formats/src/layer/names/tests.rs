use super::*;

fn read(name: &str) -> Vec<(&'static str, usize, Kind, Role, Part, &str)> {
    let all = classify(name).into_iter();
    all.map(|p| (p.convention.name, p.layer, p.kind, p.role, p.part, p.block)).collect()
}

#[test]
fn every_convention_is_read() {
    use Kind::*;
    use Part::*;
    for (name, convention, layer, kind, role, part, block) in [
        ("model.layers.3.mlp.gate_proj.weight", 0, 3, Dense, Gate, Weight, "model.layers.3.mlp."),
        ("layers.0.mlp.down_proj.bias", 0, 0, Dense, Down, Bias, "layers.0.mlp."),
        ("m.layers.12.mlp.gate_up_proj.weight", 0, 12, Dense, GateUp, Weight, "m.layers.12.mlp."),
        (
            "a.layers.1.mlp.experts.7.up_proj.weight",
            1,
            1,
            Expert(7),
            Up,
            Weight,
            "a.layers.1.mlp.experts.7.",
        ),
        (
            "layers.1.mlp.shared_expert.up_proj.weight",
            2,
            1,
            Shared,
            Up,
            Weight,
            "layers.1.mlp.shared_expert.",
        ),
        (
            "a.layers.1.mlp.experts.gate_up_proj",
            3,
            1,
            Stack,
            GateUp,
            Weight,
            "a.layers.1.mlp.experts.",
        ),
        (
            "a.layers.1.mlp.experts.down_proj_bias",
            3,
            1,
            Stack,
            Down,
            Bias,
            "a.layers.1.mlp.experts.",
        ),
        (
            "a.layers.1.mlp.experts.gate_up_proj_blocks",
            4,
            1,
            Stack,
            GateUp,
            Weight,
            "a.layers.1.mlp.experts.",
        ),
        (
            "layers.1.mlp.switch_mlp.up_proj.weight",
            5,
            1,
            Stack,
            Up,
            Weight,
            "layers.1.mlp.switch_mlp.",
        ),
        (
            "layers.2.block_sparse_moe.experts.5.w3.weight",
            6,
            2,
            Expert(5),
            Up,
            Weight,
            "layers.2.block_sparse_moe.experts.5.",
        ),
        (
            "layers.0.ffn.experts.0.w1.weight",
            6,
            0,
            Expert(0),
            Gate,
            Weight,
            "layers.0.ffn.experts.0.",
        ),
        ("layers.0.feed_forward.w2.weight", 7, 0, Dense, Down, Weight, "layers.0.feed_forward."),
        ("layers.9.w1", 9, 9, Dense, Gate, Weight, "layers.9."),
        ("layers.9.w2.weight", 8, 9, Dense, Down, Weight, "layers.9."),
        (
            "model.layers.0.shared_mlp.input_linear.weight",
            10,
            0,
            Shared,
            GateUp,
            Weight,
            "model.layers.0.shared_mlp.",
        ),
        ("transformer.h.0.mlp.w2.weight", 12, 0, Dense, Gate, Weight, "transformer.h.0.mlp."),
        ("blocks.0.mlp.w12.bias", 14, 0, Dense, GateUp, Bias, "blocks.0.mlp."),
        ("blocks.0.mlp.fc1_g.weight", 16, 0, Dense, Gate, Weight, "blocks.0.mlp."),
        (
            "encoder.block.3.layer.1.DenseReluDense.wi_1.weight",
            18,
            3,
            Dense,
            Up,
            Weight,
            "encoder.block.3.layer.1.DenseReluDense.",
        ),
        (
            "transformer_blocks.0.ff.net.0.proj.weight",
            26,
            0,
            Dense,
            GateUp,
            Weight,
            "transformer_blocks.0.ff.",
        ),
        (
            "transformer.blocks.2.ffn.experts.mlp.v1",
            27,
            2,
            Stack,
            Up,
            Weight,
            "transformer.blocks.2.ffn.experts.mlp.",
        ),
        ("x.layers.1.mlp.up_proj.base_layer.weight", 0, 1, Dense, Up, Weight, "x.layers.1.mlp."),
    ] {
        let convention = CONVENTIONS[convention].name;
        let expected = (convention, layer, kind, role, part, block);
        assert_eq!(read(name).first(), Some(&expected), "{name}");
    }
    for (name, layer, kind, role, part) in [
        ("blk.28.ffn_gate.weight", 28, Dense, Gate, Weight),
        ("blk.28.ffn_down.bias", 28, Dense, Down, Bias),
        ("v.blk.0.ffn_up_exps.weight", 0, Stack, Up, Weight),
        ("blk.0.ffn_gate_up_exps.weight", 0, Stack, GateUp, Weight),
        ("blk.0.ffn_up_shexp.weight", 0, Shared, Up, Weight),
        ("blk.0.ffn_up.4.weight", 0, Expert(4), Up, Weight),
    ] {
        let block = &name[..name.find("ffn_").unwrap() + 4];
        assert_eq!(read(name), [(LLAMA_CPP.name, layer, kind, role, part, block)], "{name}");
    }
}

#[test]
fn other_tensors_are_not_mistaken() {
    for name in [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.x.mlp.gate_proj.weight",
        "model.layers.00.mlp.gate_proj.weight",
        "model.layers.+1.mlp.gate_proj.weight",
        "model.layers.99999999999999999999.mlp.gate_proj.weight",
        "model.sublayers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.w12.lora_A.weight",
        "blk.0.ffn_norm.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_exps.3.weight",
        "layers.",
        "blk.",
        "layers.0.",
        "",
    ] {
        assert!(classify(name).is_empty(), "{name}: {:?}", read(name));
    }
}

#[test]
fn a_layer_is_known_from_any_name() {
    assert_eq!(layer_of("layers.7.ffn.experts.0.w1.weight"), Some(7));
    assert_eq!((layer_of("gate"), layer_of("a.7.b")), (None, None));
}
