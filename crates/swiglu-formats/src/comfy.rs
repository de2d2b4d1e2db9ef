//! ComfyUI's notes on how weights are stored: `comfy_quant` beside a weight, or one for all of them in the
//! header of a file, from which ComfyUI itself makes the former.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::clip;
use crate::family::is_neutral;

/// The key of a safetensors header.
pub(crate) const KEY: &str = "_quantization_metadata";

/// What a header says of its weights, by their names without `.weight`.
#[derive(Debug, Clone)]
pub(crate) struct Notes(Option<Map<String, Value>>);

impl Notes {
    pub(crate) fn of(metadata: &BTreeMap<String, String>) -> Option<Self> {
        let stated: Option<Value> = serde_json::from_str(metadata.get(KEY)?).ok();
        let layers = stated.as_ref().and_then(|s| s.get("layers")?.as_object().cloned());
        Some(Self(layers))
    }

    /// Why a weight's codes are not read, where it has scales or not.
    pub(crate) fn refusal(&self, weight: &str, scaled: bool) -> Option<String> {
        let base = weight.strip_suffix(".weight").unwrap_or(weight);
        match &self.0 {
            Some(layers) => match layers.get(base) {
                Some(note) => refusal(note).map(|why| format!("{KEY} of the header {why}")),
                // A plain cast needs no note.
                None => scaled.then(|| {
                    format!("{KEY} of the header says nothing of it; expected its format")
                }),
            },
            None => Some(format!("{KEY} of the header is no JSON with layers; expected formats")),
        }
    }
}

/// Why a weight with this note is not read; none if its scales are one or a row's, and lie as everywhere. Those
/// of MX and NVFP4 are in the order in which cuBLAS takes them.
pub(crate) fn refusal(note: &Value) -> Option<String> {
    let format = note.get("format").and_then(Value::as_str);
    if !format.is_some_and(|f| f.starts_with("float8_") || f == "int8_tensorwise") {
        let stated = clip(format.unwrap_or("no format"), 40);
        let order = match stated.starts_with("mx") || stated.starts_with("nv") {
            true => ", whose scales are not in the order of the weights",
            false => "",
        };
        return Some(format!("states {stated}{order}; expected float8_e4m3fn"));
    }
    // How products are computed, and what the weight was before.
    let harmless = ["format", "full_precision_matrix_mult", "orig_dtype", "orig_shape"];
    let mut fields = note.as_object().into_iter().flatten();
    let (key, value) =
        fields.find(|(key, value)| !harmless.contains(&key.as_str()) && !is_neutral(value))?;
    let (key, value) = (clip(key, 40), clip(&value.to_string(), 40));
    Some(format!("states {key} = {value}, which may change what the weights mean"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn notes_of_formats_with_other_orders_or_rotations_are_refused() {
        for (note, why) in [
            (json!({"format": "float8_e4m3fn"}), None),
            (json!({"format": "float8_e5m2", "full_precision_matrix_mult": true}), None),
            (json!({"format": "int8_tensorwise", "convrot": false}), None),
            (json!({"format": "int8_tensorwise", "convrot": true}), Some("convrot = true")),
            (json!({"format": "mxfp8"}), Some("states mxfp8, whose scales")),
            (json!({"format": "nvfp4"}), Some("states nvfp4, whose scales")),
            (json!({"format": 7}), Some("states no format")),
            (json!([]), Some("states no format")),
        ] {
            let said = refusal(&note);
            let fits = why.map_or(said.is_none(), |why| said.clone().unwrap().contains(why));
            assert!(fits, "{note}: {said:?}");
        }
    }
}
