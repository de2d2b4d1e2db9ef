//! What a model says about itself: the architecture decides the order of a packed tensor.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::bytes::Bytes;
use crate::error::{FormatError, Result};
use crate::gguf::Gguf;

/// A config.json is a few kilobytes.
const MAX_CONFIG: usize = 16 << 20;

/// Facts that a file may state; all are optional and none is trusted over the shapes.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Facts {
    /// `model_type` or `general.architecture`.
    pub(crate) architecture: Option<String>,
    /// `hidden_act` or its variants of name.
    pub(crate) hidden_act: Option<String>,
    /// gpt-oss: where gate and up are clamped.
    pub(crate) swiglu_limit: Option<f32>,
    /// K.
    pub(crate) hidden: Option<usize>,
    /// Rows and columns of weights with one scale: `quantization_config.weight_block_size`.
    pub(crate) scale_block: Option<Vec<u64>>,
}

impl Facts {
    /// These facts, and `other`'s where there are none.
    pub(crate) fn or(self, other: Facts) -> Facts {
        Facts {
            architecture: self.architecture.or(other.architecture),
            hidden_act: self.hidden_act.or(other.hidden_act),
            swiglu_limit: self.swiglu_limit.or(other.swiglu_limit),
            hidden: self.hidden.or(other.hidden),
            scale_block: self.scale_block.or(other.scale_block),
        }
    }
}

pub(crate) fn from_gguf(file: &Gguf) -> Facts {
    Facts {
        architecture: file.architecture().map(str::to_owned),
        hidden_act: None,
        swiglu_limit: None,
        hidden: file.architecture_value("embedding_length").and_then(|v| v.try_into().ok()),
        scale_block: None,
    }
}

pub(crate) fn from_metadata(metadata: &BTreeMap<String, String>) -> Facts {
    Facts {
        architecture: metadata.get("model_type").cloned(),
        hidden_act: metadata.get("hidden_act").cloned(),
        swiglu_limit: None,
        hidden: None,
        scale_block: None,
    }
}

/// The facts of a `config.json` in the same directory; none where there is no such file.
///
/// One that is there but cannot be understood is refused: the activation and the order of a packed
/// tensor depend on it, and doing without it would be a guess.
pub(crate) fn beside(model: &Path) -> Result<Facts> {
    let path = model.with_file_name("config.json");
    if !path.exists() {
        return Ok(Facts::default());
    }
    let bytes = Bytes::map(&path)?;
    if bytes.len() > MAX_CONFIG {
        let expected = format!("at most {MAX_CONFIG} bytes");
        return Err(FormatError::malformed(&path, 0, "file size", expected, bytes.len()));
    }
    from_config(&bytes, &path)
}

fn from_config(json: &[u8], path: &Path) -> Result<Facts> {
    let config: Value = serde_json::from_slice(json)
        .map_err(|e| FormatError::malformed(path, 0, "configuration", "JSON", e))?;
    // Multimodal models keep the language model's settings one level down, and those are the
    // ones that describe its layers.
    let inner = config.get("text_config").map(|c| read(c, path)).transpose()?;
    Ok(inner.unwrap_or_default().or(read(&config, path)?))
}

fn read(config: &Value, path: &Path) -> Result<Facts> {
    let object = config
        .as_object()
        .ok_or_else(|| FormatError::malformed(path, 0, "configuration", "an object", config))?;
    // A key that is missing or null states nothing; one of another type is a mistake.
    let stated = |key: &str| object.get(key).filter(|v| !v.is_null());
    let wrong = |key: &str, expected: &str, v: &Value| {
        FormatError::malformed(path, 0, format!("`{key}`"), expected, v)
    };
    let text = |key: &str| {
        stated(key)
            .map(|v| v.as_str().map(str::to_owned).ok_or_else(|| wrong(key, "a string", v)))
            .transpose()
    };
    let hidden = stated("hidden_size").map(|v| {
        let size = v.as_u64().and_then(|n| n.try_into().ok());
        size.ok_or_else(|| wrong("hidden_size", "a size", v))
    });
    let limit = stated("swiglu_limit").map(|v| {
        let limit = v.as_f64().filter(|l| *l > 0.0 && l.is_finite());
        limit.map(|l| l as f32).ok_or_else(|| wrong("swiglu_limit", "a positive number", v))
    });
    let quantization = stated("quantization_config").and_then(|q| q.get("weight_block_size"));
    let block = quantization.filter(|v| !v.is_null()).map(|v| {
        let sizes = v.as_array().map(|sizes| sizes.iter().map(Value::as_u64).collect());
        sizes.flatten().ok_or_else(|| wrong("weight_block_size", "a list of sizes", v))
    });
    Ok(Facts {
        architecture: text("model_type")?,
        hidden_act: text("hidden_activation")?.or(text("hidden_act")?),
        swiglu_limit: limit.transpose()?,
        hidden: hidden.transpose()?,
        scale_block: block.transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_states_facts_or_is_refused() {
        let config = |json: &str| from_config(json.as_bytes(), Path::new("config.json"));
        let f = config(r#"{"model_type":"phi3","hidden_act":"silu","hidden_size":3072}"#).unwrap();
        assert_eq!(f.architecture.as_deref(), Some("phi3"));
        assert_eq!((f.hidden_act.as_deref(), f.hidden), (Some("silu"), Some(3072)));
        let f = config(
            r#"{"model_type":"gemma3","text_config":{"model_type":"gemma3_text","hidden_size":8}}"#,
        )
        .unwrap();
        assert_eq!((f.architecture.as_deref(), f.hidden), (Some("gemma3_text"), Some(8)));
        let f = config(r#"{"model_type":"gpt_oss","swiglu_limit":0.5,"hidden_act":null}"#).unwrap();
        assert_eq!((f.swiglu_limit, f.hidden_act), (Some(0.5), None));
        assert_eq!(config("{}").unwrap(), Facts::default());
        for bad in [
            "",
            "{",
            "[]",
            "7",
            r#"{"model_type":7}"#,
            r#"{"hidden_size":-1}"#,
            r#"{"hidden_act":5}"#,
            r#"{"swiglu_limit":"7"}"#,
        ] {
            let error = config(bad).unwrap_err().to_string();
            assert!(error.contains("config.json") && error.contains("expected"), "{error}");
        }
    }
}
