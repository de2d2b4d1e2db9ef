//! A configuration and the tensors that contradict it: refused by name, and nothing else is.

use crate::support::layer::*;
use crate::support::*;
use serde_json::{Value, json};
use swiglu_formats::{FormatError, LoadOptions, load_layer_from_bytes};

fn block(prefix: &str, h: usize) -> Vec<T> {
    let names = ["gate_proj", "up_proj", "down_proj"].map(|role| format!("{prefix}{role}.weight"));
    triple([&names[0], &names[1], &names[2]], "F32", K, h, 1)
}

const DENSE: &str = "model.layers.1.mlp.";
const EXPERT: &str = "model.layers.1.mlp.experts.0.";
const SHARED: &str = "model.layers.1.mlp.shared_expert.";

fn load(prefix: &str, h: usize, config: &Value, options: &LoadOptions) -> Result<(), FormatError> {
    let expert = prefix.contains("experts.0").then_some(0);
    let options = options.clone().with_layer(1).with_expert(expert);
    Checkpoint::new(&block(prefix, h), &config.to_string()).load(&options).map(drop)
}

#[test]
fn a_stated_size_that_the_tensors_contradict_is_refused_with_both_and_what_overrides() {
    for (prefix, config, said) in [
        (
            DENSE,
            json!({"model_type": "llama", "intermediate_size": 64}),
            "`intermediate_size` = 64",
        ),
        (
            EXPERT,
            json!({"moe_intermediate_size": 64, "intermediate_size": 48}),
            "`moe_intermediate_size` = 64",
        ),
        (EXPERT, json!({"intermediate_size": 64}), "`intermediate_size` = 64"),
        (
            SHARED,
            json!({"shared_expert_intermediate_size": 64}),
            "`shared_expert_intermediate_size` = 64",
        ),
        (DENSE, json!({"model_type": "qwen", "intermediate_size": 48}), "`intermediate_size` = 48"),
        (
            DENSE,
            json!({"num_hidden_layers": 2, "intermediate_size": [48, 64]}),
            "`intermediate_size` = [48,64]",
        ),
        (
            "model.language_model.layers.1.mlp.",
            json!({"text_config": {"intermediate_size": 64}, "intermediate_size": 48}),
            "`text_config.intermediate_size` = 64",
        ),
    ] {
        let error = load(prefix, 48, &config, &LoadOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, FormatError::Contradicted { .. }), "{text}");
        for part in [said, "has 48", "with_ignored", "without_config"] {
            assert!(text.contains(part), "`{part}` in {text}");
        }
        let FormatError::Contradicted { key, .. } = error else { panic!() };
        for options in
            [LoadOptions::default().with_ignored(key), LoadOptions::default().without_config()]
        {
            load(prefix, 48, &config, &options).unwrap();
        }
    }
}

#[test]
fn sizes_that_mean_something_else_refuse_nothing() {
    for (prefix, h, config) in [
        (DENSE, 48, json!({"intermediate_size": 48, "moe_intermediate_size": 16})),
        (EXPERT, 16, json!({"intermediate_size": 48, "moe_intermediate_size": 16})),
        // Kinds of experts, and a list that is no list of layers.
        (EXPERT, 16, json!({"moe_intermediate_size": [32, 16], "num_hidden_layers": 5})),
        // Two shared experts as one.
        (SHARED, 32, json!({"moe_intermediate_size": 16, "n_shared_experts": 2})),
        (DENSE, 48, json!({"model_type": "qwen", "intermediate_size": 96})),
        (DENSE, 48, json!({"model_type": "lfm2", "intermediate_size": 64})),
        (
            DENSE,
            48,
            json!({"model_type": "llama4_text", "intermediate_size": 16, "intermediate_size_mlp": 48}),
        ),
        (DENSE, 48, json!({"num_hidden_layers": 2, "intermediate_size": [64, 48]})),
        (
            DENSE,
            48,
            json!({"model_type": "gemma4", "intermediate_size": 24, "use_double_wide_mlp": true}),
        ),
        (
            "model.visual.blocks.1.mlp.",
            48,
            json!({"model_type": "glm4v", "vision_config": {"model_type": "glm4v_vision",
                "intermediate_size": 64, "out_hidden_size": 48}}),
        ),
        // Of another part than the configuration's.
        (
            "model.connector.perceiver.layers.1.mlp.",
            48,
            json!({"text_config": {"intermediate_size": 64}}),
        ),
        (DENSE, 48, json!({"intermediate_size": null, "moe_intermediate_size": 0})),
        (EXPERT, 48, json!({"intermediate_size": 48, "moe_intermediate_size": 0})),
    ] {
        let options = match config.get("use_double_wide_mlp") {
            Some(_) => LoadOptions::default().with_ignored("use_double_wide_mlp"),
            None => LoadOptions::default(),
        };
        let loaded = load(prefix, h, &config, &LoadOptions::default());
        let loaded = loaded.or_else(|e| {
            if options.ignore.is_empty() { Err(e) } else { load(prefix, h, &config, &options) }
        });
        loaded.unwrap_or_else(|e| panic!("{config}: {e}"));
    }
}

/// A decoder of codes inside a speech model has a configuration, and a hidden size, of its own.
#[test]
fn the_hidden_size_of_another_part_refuses_nothing() {
    let config =
        json!({"model_type": "csm", "hidden_size": 64, "depth_decoder_config": {"hidden_size": K}});
    load("depth_decoder.model.layers.1.mlp.", 48, &config, &LoadOptions::default()).unwrap();
    let of_its_own = load(DENSE, 48, &config, &LoadOptions::default()).unwrap_err().to_string();
    assert!(of_its_own.contains("64 input features"), "{of_its_own}");
}

#[test]
fn sizes_of_gguf_are_compared_too() {
    let names = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"];
    let load = |name: &str, keys: &[Vec<u8>]| {
        let file = gguf(
            &triple(names, "F32", K, 48, 1),
            &[vec![text("general.architecture", name)], keys.to_vec()].concat(),
        );
        load_layer_from_bytes(file, &LoadOptions::default())
    };
    load("llama", &[uint("llama.feed_forward_length", 48)]).unwrap();
    load("qwen", &[uint("qwen.feed_forward_length", 96)]).unwrap();
    let e = load("llama", &[uint("llama.feed_forward_length", 64)]).unwrap_err().to_string();
    assert!(e.contains("`feed_forward_length` = 64, but blk.0.ffn_gate.weight has 48"), "{e}");
}

/// No size of a file is multiplied before it is looked at.
#[test]
fn sizes_that_fit_no_number_are_contradictions_and_no_more() {
    let names = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"];
    for model in ["llama", "qwen", "gemma4", "qwen2moe"] {
        for size in [u64::MAX, 1 << 63, (1 << 63) + 24] {
            let key = pair(&format!("{model}.feed_forward_length"), 10, &size.to_le_bytes());
            let file =
                gguf(&triple(names, "F32", K, 48, 1), &[text("general.architecture", model), key]);
            let loaded = load_layer_from_bytes(file, &LoadOptions::default());
            assert!(matches!(loaded, Err(FormatError::Contradicted { .. })), "{model} {size}");
        }
    }
}

#[test]
fn what_is_no_size_contradicts_every_tensor() {
    for value in [json!(-5), json!(47.5), json!(1e300), json!("48"), json!({"a": 48}), json!(true)]
    {
        for key in ["intermediate_size", "hidden_size"] {
            let config = json!({"model_type": "llama", key: value});
            let error = load(DENSE, 48, &config, &LoadOptions::default()).unwrap_err();
            assert!(matches!(error, FormatError::Contradicted { .. }), "{error}");
            assert!(error.to_string().contains(&format!("`{key}` = {value}, but")), "{error}");
            load(DENSE, 48, &config, &LoadOptions::default().with_ignored(key)).unwrap();
        }
    }
    for none in [json!(0), json!(null), json!(false), json!(""), json!([])] {
        let config = json!({"intermediate_size": none, "hidden_size": none});
        load(DENSE, 48, &config, &LoadOptions::default()).unwrap();
    }
    let floats = json!({"intermediate_size": 48.0, "hidden_size": 12.0});
    load(DENSE, 48, &floats, &LoadOptions::default()).unwrap();
    let other = json!({"intermediate_size": 64.0});
    load(DENSE, 48, &other, &LoadOptions::default()).unwrap_err();
}

fn with_biases(roles: &[(&str, usize)]) -> Vec<T> {
    let mut tensors = block(DENSE, H);
    tensors.extend(
        roles.iter().map(|(role, n)| t(&format!("{DENSE}{role}_proj.bias"), "F32", &[*n], 5)),
    );
    tensors
}

#[test]
fn biases_that_are_stated_and_absent_are_refused_by_name() {
    for (key, model) in [
        ("mlp_bias", "llama"),
        ("use_mlp_bias", "somebody_s_own"),
        ("use_bias", "ernie4_5"),
        ("add_bias_linear", "chatglm"),
    ] {
        let config = json!({"model_type": model, "hidden_act": "silu", key: true}).to_string();
        let load = |tensors: &[T], ignore: &[&str]| {
            let options = ignore.iter().copied().fold(at(1), LoadOptions::with_ignored);
            Checkpoint::new(tensors, &config).load(&options)
        };
        refused(load(&block(DENSE, H), &[]), &["gate, up, down", "layer 1", key, "with_ignored"]);
        let some = with_biases(&[("gate", H), ("up", H)]);
        refused(load(&some, &[]), &["no bias of down"]);
        load(&block(DENSE, H), &[key]).unwrap();
        load(&with_biases(&[("gate", H), ("up", H), ("down", K)]), &[]).unwrap();
    }
    // Set is what Python takes for true.
    for (value, set) in
        [(json!("yes"), true), (json!(1), true), (json!(0), false), (json!(""), false)]
    {
        let config = json!({"model_type": "llama", "mlp_bias": value}).to_string();
        let loaded = Checkpoint::new(&block(DENSE, H), &config).load(&at(1));
        assert_eq!(loaded.is_err(), set, "{config}");
    }
    // Of the language model, beside a part that says nothing of its own.
    let config =
        json!({"hidden_act": "silu", "mlp_bias": true, "vision_config": {"hidden_act": "silu"}});
    load("visual.blocks.1.mlp.", H, &config, &LoadOptions::default()).unwrap();
    // Elsewhere the key is of other maps.
    let config = json!({"model_type": "llama", "use_bias": true, "mlp_bias": false}).to_string();
    Checkpoint::new(&block(DENSE, H), &config).load(&at(1)).unwrap();
}

/// Of every default configuration with a size a layer of that size is no contradiction, and one of another is
/// refused or its size is not compared.
#[test]
fn default_configurations_of_transformers_are_contradicted_by_no_layer_of_their_own_size() {
    let file: Value = serde_json::from_str(include_str!("data/transformers-configs.json")).unwrap();
    let mut compared = 0;
    for (name, config) in file["configs"].as_object().unwrap() {
        let mut config = config.clone();
        shrink(&mut config);
        let sizes = [DENSE, EXPERT].map(|prefix| {
            let keys: &[&str] = match prefix {
                EXPERT => &["moe_intermediate_size", "intermediate_size"],
                _ => &["intermediate_size"],
            };
            let text = config.get("text_config").unwrap_or(&config);
            let size = keys.iter().find_map(|key| text.get(key)).and_then(Value::as_u64);
            (prefix, size)
        });
        for (prefix, size) in sizes {
            let Some(size) = size.and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0) else {
                continue;
            };
            let contradicted = |h: usize| {
                matches!(
                    load(prefix, h, &config, &LoadOptions::default()),
                    Err(FormatError::Contradicted { .. })
                )
            };
            assert!(!contradicted(size), "{name}: {prefix} of {size}");
            compared += usize::from(contradicted(size + 5));
        }
    }
    assert!(compared > 300, "{compared}");
}

/// Sizes as small as a test wants them, different ones different; biases are another test's.
fn shrink(config: &mut Value) {
    let Some(object) = config.as_object_mut() else { return };
    for key in ["hidden_size", "d_model", "n_embd", "dim", "mlp_bias", "use_mlp_bias"] {
        object.remove(key);
    }
    for (key, value) in object.iter_mut() {
        match value.as_u64() {
            Some(n) if key.contains("intermediate") => *value = (n % 61 + 3).into(),
            _ => shrink(value),
        }
    }
}
