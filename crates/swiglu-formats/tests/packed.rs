//! Gate and up in one tensor: known orders, stated orders, and refusals.

use crate::support::layer::*;
use crate::support::*;
use swiglu_core::{Activation, Arrangement, Half, Orientation, WeightLayout};
use swiglu_formats::{FormatError, LoadOptions, TensorNames, load_layer_from_bytes};

/// Gate and up of `triple` in one `[2H, K]` tensor.
fn packed(name: &str, arrangement: Arrangement, k: usize, h: usize, seed: usize) -> T {
    let (gate, up) = (ramp(h * k, seed), ramp(h * k, seed + 1));
    let mut v = vec![0.0; 2 * h * k];
    for (half, source) in [(Half::Gate, gate), (Half::Up, up)] {
        for i in 0..h {
            let f = arrangement.locate(half, i, h).1;
            v[f * k..][..k].copy_from_slice(&source[i * k..][..k]);
        }
    }
    values(name, "F32", &[2 * h, k], &v)
}

#[test]
fn packed_gate_up_needs_a_known_order() {
    const NAME: &str = "model.layers.2.mlp.gate_up_proj.weight";
    let down = t("model.layers.2.mlp.down_proj.weight", "F32", &[K, H], 3);
    for arrangement in [
        Arrangement::PackedGateFirst,
        Arrangement::PackedUpFirst,
        Arrangement::Interleaved { group: 1 },
        Arrangement::Interleaved { group: 43 },
    ] {
        let file = safetensors(&[packed(NAME, arrangement, K, H, 1), down.clone()]);
        let o = at(2).with_arrangement(arrangement);
        let layer = load_layer_from_bytes(file.clone(), &o).unwrap();
        expect_triple(&layer, K, H, 1);
        assert_eq!(layer.layout(), WeightLayout { orientation: Orientation::OutIn, arrangement });
        let e = load_layer_from_bytes(file, &at(2));
        refused(e, &["arrangement is ambiguous", "gate-first, up-first or interleaved-G"]);
    }
    let tensors = [packed(NAME, Arrangement::PackedGateFirst, K, H, 1), down.clone()];
    for name in ["phi3", "phi4", "glm", "glm4"] {
        let layer = Checkpoint::new(&tensors, &model_type(name)).load(&at(2)).unwrap();
        expect_triple(&layer, K, H, 1);
        assert_eq!(layer.architecture(), Some(name));
        assert_eq!(layer.activation().unwrap().0, Activation::SWIGLU);
    }
    // The file's own metadata does as well.
    let own = safetensors_with(&tensors, r#""__metadata__":{"model_type":"phi3"}"#, 0);
    expect_triple(&load_layer_from_bytes(own, &at(2)).unwrap(), K, H, 1);
    let e = Checkpoint::new(&tensors, &model_type("mystery")).load(&at(2));
    refused(e, &["`mystery`", "gate-first"]);
    let o = at(2).with_arrangement(Arrangement::Separate);
    refused(load_layer_from_bytes(safetensors(&tensors), &o), &["separate given"]);
    let o = at(2).with_arrangement(Arrangement::Interleaved { group: 5 });
    let e = load_layer_from_bytes(safetensors(&tensors), &o);
    let e = refused(e, &[NAME, "interleaved-5", "a divisor of"]);
    assert!(matches!(e, FormatError::Contradiction { .. }));
    // Odd rows hold no two halves.
    let odd = [t(NAME, "F32", &[2 * H + 1, K], 1), down];
    let o = at(2).with_arrangement(Arrangement::PackedGateFirst);
    refused(load_layer_from_bytes(safetensors(&odd), &o), &["even number"]);
}

#[test]
fn phi3_and_glm4_in_gguf_pack_both_into_up() {
    let tensors = [
        packed("blk.0.ffn_up.weight", Arrangement::PackedGateFirst, K, H, 1),
        t("blk.0.ffn_down.weight", "F32", &[K, H], 3),
    ];
    for arch in ["phi3", "glm4", "chatglm"] {
        let file = gguf(&tensors, &[text("general.architecture", arch)]);
        expect_triple(&load_layer_from_bytes(file, &at(0)).unwrap(), K, H, 1);
    }
    let file = gguf(&tensors, &[text("general.architecture", "gpt2")]);
    let e = refused(load_layer_from_bytes(file, &at(0)), &["no gate weight", "ffn_up.weight"]);
    assert!(matches!(e, FormatError::IncompleteLayer { .. }));
}

/// gpt-oss: `[E, K, 2H]` interleaved by one, `[E, H, K]`, and both biases.
fn gpt_oss(k: usize, h: usize) -> Vec<T> {
    let a = Arrangement::Interleaved { group: 1 };
    let (mut both, mut down, mut bias) = (Vec::new(), Vec::new(), Vec::new());
    for e in 0..2 {
        let seed = 1 + 10 * e;
        let (gate, up, d) = (ramp(h * k, seed), ramp(h * k, seed + 1), ramp(h * k, seed + 2));
        for i in 0..k {
            for f in 0..2 * h {
                both.push(if f % 2 == 0 { &gate } else { &up }[f / 2 * k + i]);
            }
        }
        for i in 0..h {
            (0..k).for_each(|o| down.push(d[o * h + i]));
        }
        let (gb, ub) = (ramp(h, seed + 3), ramp(h, seed + 4));
        let mut packed = vec![0.0; 2 * h];
        for i in 0..h {
            packed[a.locate(Half::Gate, i, h).1] = gb[i];
            packed[a.locate(Half::Up, i, h).1] = ub[i];
        }
        bias.extend(packed);
    }
    let n = |x: &str| format!("model.layers.0.mlp.experts.{x}");
    vec![
        values(&n("gate_up_proj"), "BF16", &[2, k, 2 * h], &both),
        values(&n("gate_up_proj_bias"), "BF16", &[2, 2 * h], &bias),
        values(&n("down_proj"), "BF16", &[2, h, k], &down),
        t(&n("down_proj_bias"), "BF16", &[2, k], 7),
        t("model.layers.0.mlp.router.weight", "BF16", &[2, k], 7),
    ]
}

#[test]
fn gpt_oss_experts_are_interleaved() {
    // 2880 = 2880 in the real model: only the architecture or the caller can tell.
    for (k, h) in [(8, 8), (8, 6)] {
        let c = Checkpoint::new(&gpt_oss(k, h), &model_type("gpt_oss"));
        for e in 0..2 {
            let layer = c.load(&expert(0, e)).unwrap();
            expect_triple(&layer, k, h, 1 + 10 * e);
            assert_eq!(layer.layout().to_string(), "in-out interleaved-1");
            assert_eq!(layer.gate_bias().unwrap(), ramp(h, 4 + 10 * e));
            assert_eq!(layer.up_bias().unwrap(), ramp(h, 5 + 10 * e));
            assert_eq!(layer.down_bias().unwrap(), &ramp(2 * k, 7)[e * k..][..k]);
        }
        refused(c.load(&at(0)), &["the expert is ambiguous", "0 to 1"]);
        let file = safetensors(&gpt_oss(k, h));
        refused(load_layer_from_bytes(file.clone(), &expert(0, 0)), &["arrangement is ambiguous"]);
        // Given the arrangement, the packed width decides the orientation.
        let o = expert(0, 1).with_arrangement(Arrangement::Interleaved { group: 1 });
        expect_triple(&load_layer_from_bytes(file, &o).unwrap(), k, h, 11);
    }
}

#[test]
fn moonshine_by_explicit_names() {
    let n = |x: &str| format!("model.decoder.layers.0.mlp.{x}");
    let a = Arrangement::PackedUpFirst;
    let tensors = [
        packed(&n("fc1.weight"), a, K, 8, 1),
        t(&n("fc1.bias"), "F32", &[16], 5),
        t(&n("fc2.weight"), "F32", &[K, 8], 3),
        t(&n("fc2.bias"), "F32", &[K], 6),
    ];
    let file = safetensors(&tensors);
    let names = TensorNames::default()
        .with_gate_up(n("fc1.weight"))
        .with_gate_up_bias(n("fc1.bias"))
        .with_down(n("fc2.weight"))
        .with_down_bias(n("fc2.bias"));
    let o = LoadOptions::default().with_names(names).with_arrangement(a);
    let layer = load_layer_from_bytes(file.clone(), &o).unwrap();
    expect_triple(&layer, K, 8, 1);
    assert_eq!(layer.up_bias().unwrap(), &ramp(16, 5)[..8]);
    assert_eq!(layer.gate_bias().unwrap(), &ramp(16, 5)[8..]);
    let text = layer.describe();
    assert!(text.contains("fc1.weight F32") && text.contains("out-in up-first"), "{text}");
    let e = load_layer_from_bytes(file.clone(), &o.clone().with_arrangement(None));
    refused(e, &["fc1.weight holds gate and up", "up-first"]);
    let e = refused(
        load_layer_from_bytes(file, &at(0)),
        &["TensorNames::with_gate_up", "mlp.fc2.weight"],
    );
    assert!(matches!(e, FormatError::IncompleteLayer { .. }));
}
