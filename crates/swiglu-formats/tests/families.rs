//! The table of families: its page is current, and real configurations are understood.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod support;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use support::layer::*;
use swiglu_core::Activation;
use swiglu_formats::{ActivationSource, FormatError, LoadOptions, load_layer};

const NAMES: [&str; 3] = [
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
];

#[test]
fn the_page_of_families_is_what_the_code_says() {
    let page = include_str!("../../../docs/families.md");
    assert_eq!(
        page,
        swiglu_formats::family::page(),
        "cargo run -p swiglu-formats --example families > docs/families.md"
    );
}

/// What a layer of plain names says beside a configuration: its activation, or the refusal.
fn beside(
    config: &Value,
    options: &LoadOptions,
) -> Result<(Activation, ActivationSource), FormatError> {
    let checkpoint = Checkpoint::new(&triple(NAMES, "F32", K, H, 1), &config.to_string());
    let layer = load_layer(&checkpoint.file(), options)?;
    let (activation, source) = layer.activation()?;
    Ok((activation, source.clone()))
}

/// The default configurations of transformers: of those a key is refused, or the activation is not
/// known, that are listed, and no others. A new one is looked at before it is added.
#[test]
fn default_configurations_of_transformers_are_understood_but_for_these() {
    let file: Value = serde_json::from_str(include_str!("data/transformers-configs.json")).unwrap();
    // A size that the tensors contradict is another test's; `hidden` lets them be of another part.
    let mut refused: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, config) in file["configs"].as_object().unwrap() {
        let mut config = config.clone();
        strip(&mut config);
        let why = match beside(&config, &LoadOptions::default()) {
            Ok(_) => continue,
            Err(FormatError::NotUnderstood { key, .. } | FormatError::NotComputed { key, .. }) => {
                key
            }
            Err(FormatError::UnknownActivation { why, .. }) => why,
            Err(other) => panic!("{name}: {other}"),
        };
        refused.entry(why).or_default().push(name.clone());
    }
    let shown: Vec<String> =
        refused.iter().map(|(why, names)| format!("{why}: {}", names.join(" "))).collect();
    let expected: Vec<&str> = include_str!("data/refused-configs.txt").lines().collect();
    assert_eq!(shown, expected, "{}", shown.join("\n"));
}

/// BitNet's function, under every name; a family whose blocks have no gate says nothing of one.
#[test]
fn the_square_of_relu_is_known_where_there_is_a_gate() {
    let known = |config| beside(&config, &LoadOptions::default());
    for name in ["relu2", "relu_squared", "relu_sqr", "relu2_glu", "ReGLU2"] {
        let (activation, _) = known(json!({"model_type": "bitnet", "hidden_act": name})).unwrap();
        assert_eq!(activation, Activation::REGLU2, "{name}");
    }
    let unsaid = known(json!({"model_type": "bitnet"})).unwrap();
    assert_eq!(unsaid, (Activation::REGLU2, ActivationSource::Family("BitNet")));
    let gateless = known(json!({"model_type": "nemotron", "hidden_act": "relu2"}));
    assert!(matches!(gateless, Err(FormatError::UnknownActivation { .. })), "{gateless:?}");
}

/// Sizes are left out: the layer of the test has its own.
fn strip(config: &mut Value) {
    let Some(object) = config.as_object_mut() else { return };
    for key in ["hidden_size", "d_model", "n_embd", "dim"] {
        object.remove(key);
    }
    object.values_mut().for_each(strip);
}
