//! Blocks without a gate: said to be none, with no advice that leads nowhere.

use crate::support::layer::*;
use crate::support::*;
use swiglu_formats::{FormatError, LoadOptions, inspect};

fn pair(base: &str, [first, second]: [&str; 2], shapes: [[usize; 2]; 2]) -> Vec<T> {
    vec![
        t(&format!("{base}{first}.weight"), "F32", &shapes[0], 1),
        t(&format!("{base}{second}.weight"), "F32", &shapes[1], 2),
    ]
}

#[test]
fn a_block_without_a_gate_is_said_to_be_none() {
    for (base, names) in [
        ("encoder.block.0.layer.1.DenseReluDense.", ["wi", "wo"]),
        ("vision_model.encoder.layers.0.mlp.", ["fc1", "fc2"]),
        ("transformer.h.0.mlp.", ["c_fc", "c_proj"]),
        ("gpt_neox.layers.0.mlp.", ["dense_h_to_4h", "dense_4h_to_h"]),
        ("bert.encoder.layer.0.", ["intermediate.dense", "output.dense"]),
        ("model.layers.0.mlp.", ["up_proj", "down_proj"]),
        ("blk.0.", ["ffn_up", "ffn_down"]),
    ] {
        for shapes in [[[H, K], [K, H]], [[K, H], [H, K]]] {
            let checkpoint = Checkpoint::new(&pair(base, names, shapes), "");
            let error = refused(checkpoint.load(&at(0)), &["without a gate", names[0], names[1]]);
            assert!(matches!(error, FormatError::Ungated { .. }), "{error}");
            assert!(!error.to_string().contains("TensorNames"), "{error}");
            let found = inspect(checkpoint.dir.path(), &LoadOptions::default()).unwrap();
            // A weight by the name of a gated block's up weight makes a block that is refused.
            let block = found.blocks.first().and_then(|b| b.refused.clone());
            let said = found.refused.or(block).unwrap();
            assert!(said.contains("without a gate"), "{base}: {said}");
        }
    }
}

#[test]
fn one_that_may_have_a_gate_is_still_to_be_named() {
    let base = "model.layers.0.mlp.";
    // Twice as wide before the activation: both in one.
    let both = pair(base, ["fc1", "fc2"], [[2 * H, K], [K, H]]);
    // A third of the first one's shape.
    let mut third = pair(base, ["fc1", "fc2"], [[H, K], [K, H]]);
    third.push(t(&format!("{base}fc3.weight"), "F32", &[H, K], 3));
    for tensors in [both, third] {
        refused(Checkpoint::new(&tensors, "").load(&at(0)), &["TensorNames::with_gate_up"]);
    }
}

#[test]
fn an_ungated_tower_beside_a_gated_model_is_told_when_it_is_asked_for() {
    let names =
        ["gate_proj", "up_proj", "down_proj"].map(|r| format!("model.layers.0.mlp.{r}.weight"));
    let mut tensors = triple([&names[0], &names[1], &names[2]], "F32", K, H, 1);
    tensors.extend(pair("vision_tower.layers.0.mlp.", ["fc1", "fc2"], [[H, K], [K, H]]));
    tensors.extend(pair("vision_tower.layers.1.mlp.", ["fc1", "fc2"], [[H, K], [K, H]]));
    let checkpoint = Checkpoint::new(&tensors, "");
    checkpoint.load(&at(0)).unwrap();
    refused(checkpoint.load(&at(1)), &["vision_tower.layers.1.mlp.fc1.weight", "without a gate"]);
    let asked = at(0).with_prefix("vision_tower");
    refused(checkpoint.load(&asked), &["vision_tower.layers.0.mlp.fc1.weight", "without a gate"]);
}

#[test]
fn two_ungated_towers_are_not_told_to_choose_between_them() {
    let mut tensors = pair("text_model.encoder.layers.0.mlp.", ["fc1", "fc2"], [[H, K], [K, H]]);
    tensors.extend(pair("vision_model.encoder.layers.0.mlp.", ["fc1", "fc2"], [[H, K], [K, H]]));
    refused(Checkpoint::new(&tensors, "").load(&at(0)), &["without a gate"]);
}

/// Moonshine's decoder has a gate, its encoder has none, under the same names.
#[test]
fn a_weight_that_would_hold_both_and_is_too_narrow_has_no_gate() {
    let config = r#"{"model_type":"moonshine"}"#;
    let decoder = pair("model.decoder.layers.0.mlp.", ["fc1", "fc2"], [[2 * H, K], [K, H]]);
    Checkpoint::new(&decoder, config).load(&at(0)).unwrap();
    let encoder = pair("model.encoder.layers.0.mlp.", ["fc1", "fc2"], [[H, K], [K, H]]);
    refused(Checkpoint::new(&encoder, config).load(&at(0)), &["without a gate"]);
}

/// As the vocabularies that llama.cpp tests its tokenisers with.
#[test]
fn a_file_without_tensors_is_said_to_have_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ggml-vocab.gguf");
    std::fs::write(&path, gguf(&[], &[text("general.architecture", "llama")])).unwrap();
    refused(swiglu_formats::load_layer(&path, &at(0)), &["holds no tensors", "vocabulary"]);
    let said = inspect(&path, &LoadOptions::default()).unwrap().refused.unwrap();
    assert!(said.contains("holds no tensors"), "{said}");
}
