//! What a file says about a block and nobody here understands: refused by name, not left out.

use serde_json::Value;

use super::{Family, Function, activation, table};
use crate::config::Scope;

/// A key whose last component has one of these words may change the block's mathematics.
const WORDS: [&str; 13] = [
    "mlp",
    "ffn",
    "feed_forward",
    "expert",
    "act",
    "gate",
    "glu",
    "clamp",
    "limit",
    "multiplier",
    "sparsity",
    "intermediate",
    "scale",
];

/// The first key that may change the block and is not understood, with its value.
pub(crate) fn not_understood(
    family: Option<&'static Family>,
    scope: &Scope<'_>,
    ignored: &[String],
) -> Option<(String, String)> {
    let leaves = scope.leaves().into_iter();
    leaves
        .filter(|(path, value)| {
            let key = last(path);
            concerns(key) && !is_neutral(value) && !is_known(family, path)
        })
        .find(|(path, _)| !ignored.iter().any(|i| i == path || i == last(path)))
        .map(|(path, value)| (path, value.to_string()))
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Whether a key has one of the words. `act` has to start a word: `factor` has it too.
fn concerns(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    let starts_word = |word: &str| key.split('_').any(|part| part.starts_with(word));
    WORDS.iter().any(|&word| if word == "act" { starts_word(word) } else { key.contains(word) })
}

/// Whether a value changes nothing, whatever its key means.
pub(crate) fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(n) => n.as_f64().is_some_and(|v| v == 0.0 || v == 1.0),
        Value::String(s) => matches!(s.as_str(), "" | "none" | "None"),
        Value::Array(items) => items.iter().all(is_neutral),
        Value::Object(object) => object.is_empty(),
    }
}

fn is_known(family: Option<&'static Family>, path: &str) -> bool {
    let is = |known: &str| path == known || path.ends_with(&format!(".{known}"));
    let any = |keys: &[&str]| keys.iter().any(|k| is(k));
    let of_family = |f: &Family| {
        any(f.harmless)
            || f.effects.iter().any(|e| is(e.key()))
            || match f.function {
                Function::Named(keys, _) => any(keys),
                Function::Flags(flags, _) => flags.iter().any(|(k, _)| is(k)),
                Function::Fixed(_) => false,
            }
    };
    any(&activation::KEYS) || any(table::HARMLESS) || family.is_some_and(of_family)
}

/// Why a tensor inside a block's prefix would have to be part of the block; none for those that are
/// known to be outside: routers, norms before and after the block.
pub(crate) fn unused(
    family: Option<&'static Family>,
    rest: &str,
    is_gguf: bool,
) -> Option<&'static str> {
    let module = rest.rsplit_once('.').map_or(rest, |(module, _)| module);
    let known = if is_gguf { table::OUTSIDE_GGUF } else { table::OUTSIDE };
    let of_family = family.map_or(&[][..], |f| f.outside);
    if known.iter().chain(of_family).any(|&known| rest == known || module == known) {
        return None;
    }
    Some(if rest.contains("norm") {
        "a norm inside the block that its family is not known to have"
    } else if rest.contains("lora_") {
        "an adapter has to be merged into the weights first (PEFT's merge_and_unload)"
    } else if rest.ends_with("bias") {
        "a bias that nobody named (TensorNames::with_gate_bias, TensorNames::with_up_bias, \
         TensorNames::with_gate_up_bias, TensorNames::with_down_bias)"
    } else {
        "what it does to the block is not known here"
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_and_neutral_values() {
        for (key, yes) in [
            ("hidden_act", true),
            ("mlp_multipliers", true),
            ("swiglu_limit", true),
            ("activation_sparsity_pattern", true),
            ("partial_rotary_factor", false),
            ("hidden_size", false),
            ("rope_theta", false),
        ] {
            assert_eq!(concerns(key), yes, "{key}");
        }
        for (value, yes) in [
            (json!(null), true),
            (json!(0), true),
            (json!(1.0), true),
            (json!([0.0, 0.0]), true),
            (json!(false), true),
            (json!(true), false),
            (json!(0.5), false),
            (json!([1.0, 0.5]), false),
            (json!("gelu"), false),
        ] {
            assert_eq!(is_neutral(&value), yes, "{value}");
        }
    }

    #[test]
    fn what_is_outside_the_block_is_told_from_what_is_inside() {
        assert!(unused(None, "gate.weight", false).is_none());
        assert!(unused(None, "norm.weight", true).is_none());
        for (rest, why) in [
            ("norm.weight", "norm inside"),
            ("ffn_sub_norm.weight", "norm inside"),
            ("up_proj.lora_A.default.weight", "merged"),
            ("up_proj.bias", "TensorNames::with_up_bias"),
            ("extra.weight", "not known"),
        ] {
            assert!(unused(None, rest, false).unwrap().contains(why), "{rest}");
        }
    }
}
