//! The table of families: its page is current, and real configurations are understood.

use std::collections::BTreeMap;

use crate::support::layer::*;
use crate::support::*;
use serde_json::{Value, json};
use swiglu_core::{Activation, Norm, NormKind, Orientation, RowSteps, Sparsity};
use swiglu_formats::{ActivationSource, FormatError, LoadOptions, inspect, load_layer};

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

/// Sizes and biases are left out: the layer of the test has its own.
fn strip(config: &mut Value) {
    let Some(object) = config.as_object_mut() else { return };
    for key in ["hidden_size", "d_model", "n_embd", "dim", "d_ff", "mlp_bias", "ffn_hidden_size"] {
        object.remove(key);
    }
    object.retain(|key, _| !key.trim_end_matches("_mlp").ends_with("intermediate_size"));
    object.values_mut().for_each(strip);
}

fn named(prefix: &str, roles: [&str; 3]) -> Vec<String> {
    roles.iter().map(|role| format!("{prefix}{role}")).collect()
}

fn checkpoint(prefix: &str, config: &str) -> Checkpoint {
    let names = named(prefix, ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]);
    let names: [&str; 3] = [&names[0], &names[1], &names[2]];
    Checkpoint::new(&triple(names, "F32", K, H, 1), config)
}

fn activation_of(prefix: &str, config: &str, options: &LoadOptions) -> Activation {
    let layer = checkpoint(prefix, config).load(options).unwrap();
    layer.activation().unwrap().0
}

#[test]
fn an_activation_is_read_where_its_family_says_it() {
    let (encoder, language) = ("model.encoder.layers.0.mlp.", "model.layers.0.mlp.");
    for (prefix, config, expected) in [
        (
            encoder,
            r#"{"model_type":"t5gemma","encoder":{"hidden_activation":"silu"},"decoder":{}}"#,
            Activation::SWIGLU,
        ),
        (
            encoder,
            r#"{"model_type":"t5gemma","encoder":{},"decoder":{"hidden_activation":"silu"}}"#,
            Activation::GEGLU_TANH,
        ),
        (
            language,
            r#"{"model_type":"gemma","hidden_act":"gelu","hidden_activation":null}"#,
            Activation::GEGLU_TANH,
        ),
        (
            language,
            r#"{"model_type":"gemma","hidden_act":"gelu","hidden_activation":"gelu"}"#,
            Activation::GEGLU,
        ),
        (
            language,
            r#"{"model_type":"internvl_chat","llm_config":{"model_type":"qwen2","hidden_act":"silu"},"vision_config":{"hidden_act":"gelu"}}"#,
            Activation::SWIGLU,
        ),
        (
            language,
            r#"{"model_type":"dbrx","ffn_config":{"ffn_act_fn":{"name":"gelu"}}}"#,
            Activation::GEGLU,
        ),
        (
            language,
            r#"{"model_type":"t5","feed_forward_proj":"gated-gelu","dense_act_fn":"gelu_new"}"#,
            Activation::GEGLU_TANH,
        ),
        (language, r#"{"model_type":"gpt_oss","hidden_act":"silu"}"#, Activation::CLAMPED_SWIGLU),
        (language, r#"{"model_type":"lfm2"}"#, Activation::SWIGLU),
        (language, r#"{"hidden_act":"quick_gelu"}"#, Activation::swiglu_beta(1.702).unwrap()),
        (language, r#"{"hidden_act":"GELU-python"}"#, Activation::GEGLU),
    ] {
        assert_eq!(activation_of(prefix, config, &at(0)), expected, "{config}");
    }
}

#[test]
fn a_vision_tower_is_not_described_by_its_language_model() {
    let config = r#"{"model_type":"qwen2_5_vl","hidden_act":"gelu","hidden_size":2048,
        "vision_config":{"hidden_act":"relu","hidden_size":12}}"#;
    assert_eq!(activation_of("visual.blocks.0.mlp.", config, &at(0)), Activation::REGLU);
}

#[test]
fn a_limit_is_that_of_the_block_and_the_layer() {
    let expert = |layer| LoadOptions::new(layer).with_expert(0);
    let limit = |prefix: &str, config: &str, options: &LoadOptions| {
        activation_of(prefix, config, options).limit()
    };
    let (dense, routed, second) =
        ("model.layers.0.mlp.", "model.layers.0.mlp.experts.0.", "model.layers.1.mlp.experts.0.");
    let v4 = r#"{"model_type":"deepseek_v4","swiglu_limit":3.5}"#;
    assert_eq!(limit(routed, v4, &expert(0)), Some(3.5));
    // What the family's code does without the key.
    assert_eq!(limit(routed, r#"{"model_type":"deepseek_v4"}"#, &expert(0)), Some(10.0));
    assert_eq!(limit(routed, r#"{"model_type":"deepseek_v4","swiglu_limit":0}"#, &expert(0)), None);
    let hy = r#"{"model_type":"hy_v4","swiglu_limit":3.5}"#;
    assert_eq!(limit(routed, hy, &expert(0)), Some(3.5));
    assert_eq!(limit(dense, hy, &at(0)), None);
    let lists = r#"{"model_type":"deepseek_v4","swiglu_limit":[3.5,0.0]}"#;
    assert_eq!(limit(routed, lists, &expert(0)), Some(3.5));
    assert_eq!(limit(second, lists, &expert(1)), None);
    for odd in ["\"much\"", "NaN", "[]", "{}", "true", "-1"] {
        let config = format!(r#"{{"model_type":"deepseek_v4","swiglu_limit":{odd}}}"#);
        let layer = checkpoint(routed, &config).load(&expert(0)).unwrap();
        let error = layer.activation().unwrap_err().to_string();
        assert!(error.contains("swiglu_limit = ") && error.contains(odd), "{odd}: {error}");
    }
    for stated in ["NaN", "Infinity"] {
        let config = format!(r#"{{"model_type":"llama","swiglu_limit":{stated}}}"#);
        refused(checkpoint(dense, &config).load(&at(0)), &["swiglu_limit", stated]);
    }
}

#[test]
fn what_a_configuration_asks_for_and_is_not_computed_is_refused() {
    let first = "model.layers.0.mlp.";
    let load = |prefix: &str, config: &str, options: &LoadOptions| {
        checkpoint(prefix, config).load(options)
    };
    for (prefix, layer, config, key) in [
        (first, 0, r#"{"model_type":"inkling2","mlp_up_softcap":25.0}"#, "mlp_up_softcap"),
        (first, 0, r#"{"model_type":"llama","mlp_gate_scale":2.5}"#, "mlp_gate_scale"),
        (first, 0, r#"{"model_type":"llama","ffn_config":{"act_clip":3}}"#, "ffn_config.act_clip"),
    ] {
        let error = load(prefix, config, &at(layer)).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("with_ignored"), "{error}");
        let ignored = at(layer).with_ignored(key);
        load(prefix, config, &ignored).unwrap();
        load(prefix, config, &at(layer).without_config()).unwrap();
    }
    for (prefix, layer, config) in [
        (first, 0, r#"{"model_type":"inkling2","mlp_up_softcap":0}"#),
        (
            first,
            0,
            r#"{"model_type":"llama","mlp_gate_scale":1.0,"rope_factor":2.5,"vision_config":{"mlp_gate_scale":3}}"#,
        ),
    ] {
        load(prefix, config, &at(layer)).unwrap();
    }
}

/// A limit behind the function, of routed experts and of the others, each by its own key.
#[test]
fn a_limit_behind_the_function_is_that_of_the_block_and_the_layer() {
    let expert = |layer| LoadOptions::new(layer).with_expert(0);
    let (dense, routed, shared) = (
        "model.layers.1.mlp.",
        "model.layers.1.mlp.experts.0.",
        "model.layers.1.mlp.shared_expert.",
    );
    let step =
        r#"{"model_type":"step3p5","swiglu_limits":[0.0,7.0],"swiglu_limits_shared":[null,16.0]}"#;
    let ling = r#"{"model_type":"bailing_hybrid","expert_swiglu_limit_list":[0,4],
        "share_expert_swiglu_limit_list":[0,5]}"#;
    let behind = |limit| Activation::new(Activation::SWIGLU.gate(), Some(limit), 0.0).unwrap();
    for (prefix, config, options, limit) in [
        (routed, step, expert(1), Some(7.0)),
        (shared, step, at(1), Some(16.0)),
        (dense, step, at(1), Some(16.0)),
        (routed, ling, expert(1), Some(4.0)),
        (shared, ling, at(1), Some(5.0)),
        (dense, ling, at(1), None),
    ] {
        let expected = limit.map_or(Activation::SWIGLU, |l| behind(l).limited_behind());
        assert_eq!(activation_of(prefix, config, &options), expected, "{prefix} {config}");
    }
    assert_eq!(activation_of("model.layers.0.mlp.", step, &at(0)), Activation::SWIGLU);
}

fn steps_of(prefix: &str, config: &str, options: &LoadOptions) -> RowSteps {
    checkpoint(prefix, config).load(options).unwrap().row_params().steps
}

/// By fractions of the configuration, deviations of a GGUF file, or the family's own in the first layers.
#[test]
fn a_sparse_gate_is_that_of_the_layer() {
    let (first, eleventh) = ("model.layers.0.mlp.", "model.layers.10.mlp.");
    let of = |fraction| RowSteps::NONE.with_sparsity(Sparsity::of(fraction).unwrap());
    for (prefix, layer, rest, expected) in [
        (first, 0, "", of(0.95)),
        (eleventh, 10, "", RowSteps::NONE),
        (first, 0, r#","num_hidden_layers":8"#, RowSteps::NONE),
        (first, 0, r#","activation_sparsity_pattern":[0.9]"#, of(0.9)),
        (first, 0, r#","activation_sparsity_pattern":0.9"#, of(0.9)),
        (first, 0, r#","activation_sparsity_pattern":[0.0,0.95]"#, RowSteps::NONE),
        (
            first,
            0,
            r#","activation_sparsity_scale":[1.5]"#,
            RowSteps::NONE.with_sparsity(Sparsity::above(1.5).unwrap()),
        ),
        // −∞ of a GGUF file is no number of JSON.
        (first, 0, r#","activation_sparsity_scale":[null,1.5]"#, RowSteps::NONE),
    ] {
        let config = format!(r#"{{"model_type":"gemma3n_text"{rest}}}"#);
        assert_eq!(steps_of(prefix, &config, &at(layer)), expected, "{config}");
    }
    let ignored = at(0).with_ignored("activation_sparsity_pattern");
    assert_eq!(steps_of(first, r#"{"model_type":"gemma3n_text"}"#, &ignored), RowSteps::NONE);
    for odd in ["[]", "1.5", r#"["much"]"#] {
        let config =
            format!(r#"{{"model_type":"gemma3n_text","activation_sparsity_pattern":{odd}}}"#);
        refused(checkpoint(first, &config).load(&at(0)), &["activation_sparsity_pattern", odd]);
    }
}

/// A layer of plain names with a norm's tensors beside them.
fn with_norm(norm: &[(&str, usize)], config: &str) -> Checkpoint {
    let mut tensors = triple(NAMES, "F32", K, H, 1);
    tensors.extend(norm.iter().map(|&(name, len)| t(name, "F32", &[len], 7)));
    Checkpoint::new(&tensors, config)
}

#[test]
fn a_norm_inside_the_block_is_its_familys() {
    let (sub, old) =
        ("model.layers.0.mlp.ffn_sub_norm.weight", "model.layers.0.mlp.ffn_layernorm.weight");
    let rms = |epsilon| RowSteps::NONE.with_norm(Norm::new(NormKind::Rms, epsilon).unwrap());
    for (name, config, expected) in [
        (sub, r#"{"model_type":"bitnet"}"#, rms(1e-5)),
        (sub, r#"{"model_type":"bitnet","rms_norm_eps":0.001}"#, rms(1e-3)),
        (old, r#"{"model_type":"llama"}"#, rms(1e-6)),
    ] {
        let layer = with_norm(&[(name, H)], config).load(&at(0)).unwrap();
        let rows = layer.row_params();
        assert_eq!((rows.steps, rows.norm_bias), (expected, None), "{config}");
        assert_eq!(rows.norm_weight.unwrap(), ramp(H, 7));
        assert!(layer.describe().contains(name) && layer.describe().contains("rms-norm"));
    }
    let names = named("blocks.0.mlp.", ["fc1_g.weight", "fc1_x.weight", "fc2.weight"]);
    let mut tensors = triple([&names[0], &names[1], &names[2]], "F32", K, H, 1);
    tensors.push(t("blocks.0.mlp.norm.weight", "F32", &[H], 7));
    tensors.push(t("blocks.0.mlp.norm.bias", "F32", &[H], 8));
    let layer = Checkpoint::new(&tensors, r#"{"model_type":"eva02"}"#).load(&at(0)).unwrap();
    let rows = layer.row_params();
    assert_eq!(rows.steps.norm, Some(Norm::new(NormKind::Layer, 1e-6).unwrap()));
    assert_eq!(rows.norm_weight.zip(rows.norm_bias).unwrap(), (&ramp(H, 7)[..], &ramp(H, 8)[..]));
}

#[test]
fn a_norm_that_does_not_fit_its_block_is_refused() {
    let name = "model.layers.0.mlp.ffn_sub_norm.weight";
    let bitnet = r#"{"model_type":"bitnet"}"#;
    refused(with_norm(&[(name, K)], bitnet).load(&at(0)), &[name, &H.to_string()]);
    let odd = r#"{"model_type":"bitnet","rms_norm_eps":"small"}"#;
    refused(with_norm(&[(name, H)], odd).load(&at(0)), &["rms_norm_eps", "small"]);
    let smaller = at(0).with_rescale(2);
    refused(with_norm(&[(name, H)], bitnet).load(&smaller), &["norm", "with_rescale"]);
    // A family that has none, and names that are of no block.
    refused(with_norm(&[(name, H)], r#"{"model_type":"qwen3"}"#).load(&at(0)), &[name]);
    let ignored = at(0).with_ignored(name);
    let layer = with_norm(&[(name, H)], bitnet).load(&ignored);
    assert_eq!(layer.unwrap().row_params().steps, RowSteps::NONE);
    let mut tensors = triple(["a.gate", "b.up", "c.down"], "F32", K, H, 1);
    tensors.push(t(name, "F32", &[H], 7));
    let names = swiglu_formats::TensorNames::default()
        .with_gate("a.gate")
        .with_up("b.up")
        .with_down("c.down");
    let picked = at(0).with_names(names).with_orientation(Orientation::OutIn);
    refused(Checkpoint::new(&tensors, bitnet).load(&picked), &[name, "prefix"]);
}

#[test]
fn a_tensor_of_the_block_that_is_not_used_is_refused_by_name() {
    for (extra, why) in [
        ("model.layers.0.mlp.ffn_sub_norm.weight", "norm inside the block"),
        ("model.layers.0.mlp.mystery", "not known here"),
    ] {
        let mut tensors = triple(NAMES, "F32", K, H, 1);
        tensors.push(t(extra, "F32", &[H], 7));
        let checkpoint = Checkpoint::new(&tensors, "");
        let error = checkpoint.load(&at(0)).unwrap_err().to_string();
        assert!(error.contains(extra) && error.contains(why), "{error}");
    }
    let mut tensors = triple(NAMES, "F32", K, H, 1);
    tensors.push(t("model.layers.0.mlp.mystery", "F32", &[H], 7));
    tensors.push(t("model.layers.0.mlp.gate.weight", "F32", &[8, K], 8));
    tensors.push(t("model.layers.0.post_norm.weight", "F32", &[K], 9));
    let ignored = LoadOptions::default().with_ignored("model.layers.0.mlp.mystery");
    expect_triple(&Checkpoint::new(&tensors, "").load(&ignored).unwrap(), K, H, 1);
}

#[test]
fn multipliers_of_a_configuration_are_of_gate_and_down() {
    let config = r#"{"model_type":"falcon_h1","mlp_multipliers":[0.5,4.0]}"#;
    let layer = checkpoint("model.layers.0.feed_forward.", config).load(&at(0)).unwrap();
    let gate_up = layer.gate_up::<f32>().unwrap();
    let times = |seed, by: f32| -> Vec<f32> { ramp(H * K, seed).iter().map(|v| v * by).collect() };
    assert_eq!(gate_up.tensors()[0].as_slice(), times(1, 0.5));
    assert_eq!(gate_up.tensors()[1].as_slice(), times(2, 1.0));
    assert_eq!(layer.down::<f32>().unwrap().unwrap().0.as_slice(), times(3, 4.0));
    let odd = r#"{"model_type":"falcon_h1","mlp_multipliers":[0.5]}"#;
    refused(checkpoint("model.layers.0.feed_forward.", odd).load(&at(0)), &["mlp_multipliers"]);
}

#[test]
fn a_smaller_h_moves_a_power_of_two_into_the_down_weights() {
    let names = ["model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"];
    let tensors = [t(names[0], "F32", &[2 * H, K], 1), t(names[1], "F32", &[K, H], 2)];
    let options = LoadOptions::default().with_rescale(3);
    let layer = Checkpoint::new(&tensors, r#"{"model_type":"phi3"}"#).load(&options).unwrap();
    let (both, gate_up) = (ramp(2 * H * K, 1), layer.gate_up::<f32>().unwrap());
    assert_eq!(gate_up.tensors()[0].as_slice(), &both[..H * K]);
    let up: Vec<f32> = both[H * K..].iter().map(|v| v / 8.0).collect();
    assert_eq!(gate_up.tensors()[1].as_slice(), up);
    let down: Vec<f32> = ramp(H * K, 2).iter().map(|v| v * 8.0).collect();
    assert_eq!(layer.down::<f32>().unwrap().unwrap().0.as_slice(), down);
}

#[test]
fn layers_are_found_under_the_names_of_their_families() {
    for (prefix, roles, model_type) in [
        (
            "visual.blocks.0.mlp.",
            ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
            "qwen2_5_vl",
        ),
        ("layer.0.mlp.", ["gate_proj.weight", "up_proj.weight", "down_proj.weight"], "dinov3_vit"),
        (
            "model.layers.0.shared_mlp.",
            ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
            "hunyuan",
        ),
        ("layers.0.ffn.", ["w1.weight", "w3.weight", "w2.weight"], "llama"),
        ("transformer.h.0.mlp.", ["w2.weight", "w1.weight", "c_proj.weight"], "qwen"),
        ("transformer.h.0.mlp.", ["c_fc_0.weight", "c_fc_1.weight", "c_proj.weight"], "exaone"),
        ("blocks.0.mlp.", ["fc1_g.weight", "fc1_x.weight", "fc2.weight"], "eva02"),
        ("encoder.layers.0.mlp.", ["fc12.weight", "fc11.weight", "fc2.weight"], "nomic_bert"),
        (
            "encoder.block.0.layer.1.DenseReluDense.",
            ["wi_0.weight", "wi_1.weight", "wo.weight"],
            "t5",
        ),
        (
            "layers.0.feed_forward.",
            ["linear_1.weight", "linear_3.weight", "linear_2.weight"],
            "llama",
        ),
        (
            "base_model.model.model.layers.0.mlp.",
            [
                "gate_proj.base_layer.weight",
                "up_proj.base_layer.weight",
                "down_proj.base_layer.weight",
            ],
            "llama",
        ),
        (
            "_orig_mod.model.layers.0.mlp.",
            ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
            "llama",
        ),
    ] {
        let names = named(prefix, roles);
        let names: [&str; 3] = [&names[0], &names[1], &names[2]];
        let config = format!(r#"{{"model_type":"{model_type}"}}"#);
        let layer = Checkpoint::new(&triple(names, "F32", K, H, 5), &config).load(&at(0));
        expect_triple(&layer.unwrap_or_else(|e| panic!("{prefix}: {e}")), K, H, 5);
    }
    // The same names of a family that has no gate.
    let names = named("transformer.h.0.mlp.", ["w2.weight", "w1.weight", "c_proj.weight"]);
    let names: [&str; 3] = [&names[0], &names[1], &names[2]];
    let other = Checkpoint::new(&triple(names, "F32", K, H, 5), r#"{"model_type":"gpt2"}"#);
    assert!(other.load(&at(0)).is_err());
}

#[test]
fn inspecting_lists_blocks_and_what_would_be_refused() {
    let mut tensors = Vec::new();
    for layer in 0..4 {
        let names = named(
            &format!("model.layers.{layer}.mlp."),
            ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
        );
        tensors.extend(triple([&names[0], &names[1], &names[2]], "F32", K, H, layer));
    }
    for expert in 0..3 {
        let names = named(
            &format!("model.layers.4.mlp.experts.{expert}."),
            ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
        );
        tensors.extend(triple([&names[0], &names[1], &names[2]], "BF16", K, 8, expert));
    }
    let names = named(
        "model.layers.4.mlp.shared_expert.",
        ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
    );
    tensors.extend(triple([&names[0], &names[1], &names[2]], "F32", K, H, 9));
    tensors.push(t("model.layers.2.mlp.ffn_sub_norm.weight", "F32", &[H], 7));
    let checkpoint = Checkpoint::new(&tensors, &model_type("qwen3_moe"));
    let found = inspect(checkpoint.dir.path(), &LoadOptions::default()).unwrap();
    assert_eq!((found.architecture.as_deref(), found.family), (Some("qwen3_moe"), Some("Qwen")));
    let blocks: Vec<(&str, &str, Option<usize>, bool)> = found
        .blocks
        .iter()
        .map(|b| (b.layers.as_str(), b.kind, b.experts, b.refused.is_some()))
        .collect();
    let expected = [
        ("0 to 1, 3", "dense", None, false),
        ("2", "dense", None, true),
        ("4", "experts", Some(3), false),
        ("4", "shared", None, false),
    ];
    assert_eq!(blocks, expected);
    let contents = found.blocks[2].contents.as_ref().unwrap();
    assert_eq!((contents.hidden, contents.intermediate), (K, 8));
    assert_eq!(contents.activation.as_deref(), Some("swiglu"));
    assert!(found.blocks[1].refused.as_ref().unwrap().contains("with_ignored(model.layers.2.mlp"));
}

#[test]
fn a_stated_limit_holds_before_the_familys_own_and_an_ignored_key_is_as_if_it_were_not_there() {
    let (routed, shared) = ("model.layers.0.mlp.experts.0.", "model.layers.0.mlp.shared_experts.");
    let expert = LoadOptions::default().with_expert(0);
    let limit = |prefix: &str, keys: &str, options: &LoadOptions| {
        let config = format!(r#"{{"model_type":"deepseek_v4",{keys}}}"#);
        activation_of(prefix, &config, options).limit()
    };
    let keys = r#""swiglu_clamp_exp":[3.0,3.0],"swiglu_clamp_shexp":[5.0]"#;
    assert_eq!(limit(routed, keys, &expert), Some(3.0));
    assert_eq!(limit(shared, keys, &at(0)), Some(5.0));
    // As llama.cpp takes it.
    assert_eq!(limit(shared, r#""swiglu_clamp_exp":[3.0]"#, &at(0)), Some(3.0));
    for none in ["0.0", "Infinity", "[0.0]"] {
        assert_eq!(limit(routed, &format!(r#""swiglu_limit":{none}"#), &expert), None, "{none}");
    }
    let ignoring = |key: &str| at(0).with_ignored(key);
    let config = r#"{"model_type":"falcon_h1","mlp_multipliers":[0.5,4.0]}"#;
    let falcon = checkpoint("model.layers.0.feed_forward.", config);
    expect_triple(&falcon.load(&ignoring("mlp_multipliers")).unwrap(), K, H, 1);
    refused(falcon.load(&ignoring("mlp_multiplier")), &["mlp_multiplier is neither a key"]);
}

#[cfg(unix)]
#[test]
fn a_configuration_that_is_a_link_to_nowhere_is_refused() {
    let checkpoint = checkpoint("model.layers.0.mlp.", "");
    let link = checkpoint.dir.path().join("config.json");
    std::os::unix::fs::symlink("../blobs/missing", link).unwrap();
    refused(checkpoint.load(&at(0)), &["config.json", "cannot"]);
    checkpoint.load(&at(0).without_config()).unwrap();
}
