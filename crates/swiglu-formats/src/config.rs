//! What a model says about itself: the architecture decides the order of a packed tensor.

use std::collections::BTreeMap;
use std::path::Path;

use crate::bytes::Bytes;
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
    /// K.
    pub(crate) hidden: Option<usize>,
}

impl Facts {
    /// These facts, and `other`'s where there are none.
    pub(crate) fn or(self, other: Facts) -> Facts {
        Facts {
            architecture: self.architecture.or(other.architecture),
            hidden_act: self.hidden_act.or(other.hidden_act),
            hidden: self.hidden.or(other.hidden),
        }
    }
}

pub(crate) fn from_gguf(file: &Gguf) -> Facts {
    Facts {
        architecture: file.architecture().map(str::to_owned),
        hidden_act: None,
        hidden: file.architecture_value("embedding_length").and_then(|v| v.try_into().ok()),
    }
}

pub(crate) fn from_metadata(metadata: &BTreeMap<String, String>) -> Facts {
    Facts {
        architecture: metadata.get("model_type").cloned(),
        hidden_act: metadata.get("hidden_act").cloned(),
        hidden: None,
    }
}

/// The facts of a `config.json` in the same directory.
///
/// One that is missing or unreadable states nothing: it can only add knowledge, and where it was
/// needed the caller is asked instead.
pub(crate) fn beside(model: &Path) -> Facts {
    match Bytes::map(&model.with_file_name("config.json")) {
        Ok(bytes) if bytes.len() <= MAX_CONFIG => from_config(&bytes),
        _ => Facts::default(),
    }
}

fn from_config(json: &[u8]) -> Facts {
    let Ok(config) = serde_json::from_slice::<serde_json::Value>(json) else {
        return Facts::default();
    };
    // Multimodal models keep the language model's settings one level down, and those are the
    // ones that describe its layers.
    let inner = config.get("text_config").map(read).unwrap_or_default();
    inner.or(read(&config))
}

fn read(config: &serde_json::Value) -> Facts {
    let text = |key: &str| config.get(key).and_then(|v| v.as_str()).map(str::to_owned);
    Facts {
        architecture: text("model_type"),
        hidden_act: text("hidden_activation").or_else(|| text("hidden_act")),
        hidden: config.get("hidden_size").and_then(|v| v.as_u64()?.try_into().ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_states_facts_or_nothing() {
        let f = from_config(br#"{"model_type":"phi3","hidden_act":"silu","hidden_size":3072}"#);
        assert_eq!(f.architecture.as_deref(), Some("phi3"));
        assert_eq!((f.hidden_act.as_deref(), f.hidden), (Some("silu"), Some(3072)));
        let f = from_config(
            br#"{"model_type":"gemma3","text_config":{"model_type":"gemma3_text","hidden_size":8}}"#,
        );
        assert_eq!((f.architecture.as_deref(), f.hidden), (Some("gemma3_text"), Some(8)));
        for bad in ["", "[]", "7", r#"{"model_type":7,"hidden_size":-1}"#] {
            assert_eq!(from_config(bad.as_bytes()), Facts::default(), "{bad}");
        }
    }
}
