//! What a model says about itself, and which part of that describes one block.

mod json;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::bytes::Bytes;
use crate::error::{FormatError, Result};
use crate::gguf::Gguf;
use crate::gguf::metadata;

pub(crate) use json::number;

/// A config.json is a few kilobytes.
const MAX_CONFIG: usize = 16 << 20;
/// Objects within objects that are looked through: real ones have three levels.
const MAX_DEPTH: usize = 8;

/// A model's configuration as the tree of its keys; nothing in it is trusted over the shapes.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The file that says it, for messages.
    path: PathBuf,
    /// Whether there is any.
    present: bool,
    root: Map<String, Value>,
    /// Whether it is of GGUF: one level of keys, about every block of the file.
    flat: bool,
}

impl Config {
    pub(crate) fn none(path: &Path) -> Self {
        Self { path: path.to_owned(), present: false, root: Map::new(), flat: false }
    }

    /// The metadata of a GGUF file: keys of its architecture without the architecture's prefix, and
    /// `model_type` the architecture.
    pub(crate) fn from_gguf(file: &Gguf, path: &Path) -> Self {
        let Some(architecture) = file.architecture() else { return Self::none(path) };
        let prefix = format!("{architecture}.");
        let mut root: Map<String, Value> = file
            .metadata
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?.to_owned(), json(value))))
            .collect();
        root.insert(MODEL_TYPE.into(), architecture.into());
        Self { path: path.to_owned(), present: true, root, flat: true }
    }

    /// The metadata of a safetensors file, of which a converter may have made a configuration.
    pub(crate) fn from_metadata(metadata: &BTreeMap<String, String>, path: &Path) -> Self {
        let root: Map<String, Value> = [MODEL_TYPE, "hidden_act"]
            .into_iter()
            .filter_map(|key| Some((key.to_owned(), metadata.get(key)?.as_str().into())))
            .collect();
        Self { path: path.to_owned(), present: !root.is_empty(), root, flat: false }
    }

    /// This, and what the `config.json` in the model's directory says; where both do, the latter.
    ///
    /// # Errors
    /// [`FormatError::Configuration`] if it is there and is no JSON object: the activation and the order
    /// of a packed tensor depend on it, and doing without it has to be asked for.
    pub(crate) fn beside(mut self, model: &Path) -> Result<Self> {
        let path = model.with_file_name("config.json");
        // A link that leads nowhere is a configuration that is missing, not one that says nothing.
        if path.symlink_metadata().is_err() {
            return Ok(self);
        }
        let bytes = Bytes::map(&path)?;
        self.root.extend(object(&bytes, &path)?);
        Ok(Self { path, present: true, ..self })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the model says anything about itself.
    pub(crate) fn is_present(&self) -> bool {
        self.present
    }

    pub(crate) fn root(&self) -> &Map<String, Value> {
        &self.root
    }

    /// The part that describes the block whose tensors' names start with `prefix`.
    pub(crate) fn scope(&self, prefix: &str) -> Scope<'_> {
        Scope::new(&self.root, if self.flat { "" } else { prefix })
    }

    /// This without some keys: by their names, or with those of the objects around them.
    pub(crate) fn without(&self, ignored: &[String]) -> Self {
        let mut out = self.clone();
        remove("", &mut out.root, ignored);
        out
    }

    /// Whether there is a key of this name, or with those of the objects around it.
    pub(crate) fn has(&self, key: &str) -> bool {
        let mut without = self.root.clone();
        remove("", &mut without, std::slice::from_ref(&key.to_owned()));
        without != self.root
    }
}

fn remove(path: &str, object: &mut Map<String, Value>, ignored: &[String]) {
    object.retain(|key, _| !ignored.iter().any(|i| i == key || *i == format!("{path}{key}")));
    for (key, value) in object {
        if let Value::Object(inner) = value {
            remove(&format!("{path}{key}."), inner, ignored);
        }
    }
}

fn object(bytes: &[u8], path: &Path) -> Result<Map<String, Value>> {
    let refused = |why: String| FormatError::Configuration { path: path.to_owned(), why };
    if bytes.len() > MAX_CONFIG {
        let given = bytes.len();
        return Err(refused(format!("has {given} bytes, expected at most {MAX_CONFIG}")));
    }
    match json::parse(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(refused("holds JSON, but no object".into())),
        Err(_) if bytes.trim_ascii().is_empty() => Err(refused("is empty".into())),
        Err(error) if error.is_data() => Err(refused(error.to_string())),
        Err(error) => Err(refused(format!("is no JSON: {error}"))),
    }
}

fn json(value: &metadata::Value) -> Value {
    match value {
        metadata::Value::Uint(v) => (*v).into(),
        metadata::Value::Int(v) => (*v).into(),
        metadata::Value::Float(v) => (*v).into(),
        metadata::Value::Bool(v) => (*v).into(),
        metadata::Value::String(v) => v.as_str().into(),
        metadata::Value::Array { items: Some(items), .. } => items.iter().map(json).collect(),
        metadata::Value::Array { .. } => Value::Null,
    }
}

const MODEL_TYPE: &str = "model_type";

/// Parts of a model by a component of their tensors' names, and the keys of their configurations.
const PARTS: [(&[&str], &[&str]); 8] = [
    (&["thinker"], &["thinker_config"]),
    (&["talker"], &["talker_config"]),
    (&["code_predictor"], &["code_predictor_config"]),
    (&["vision_tower", "vision_model", "visual", "vision", "vit"], &["vision_config", "visual"]),
    (&["audio_tower", "audio_model", "audio_encoder", "audio"], &["audio_config"]),
    (&["qformer"], &["qformer_config"]),
    (&["encoder"], &["encoder"]),
    (&["decoder"], &["decoder"]),
];
/// Of [`PARTS`], those that a language model's own configuration says nothing about.
const FOREIGN: [&str; 9] = [
    "vision_tower",
    "vision_model",
    "visual",
    "vision",
    "vit",
    "audio_tower",
    "audio_model",
    "audio_encoder",
    "audio",
];
/// Keys of the language model's configuration in that of a model of several parts.
const LANGUAGE: [&str; 4] = ["text_config", "llm_config", "language_config", "text_model_config"];

/// The objects of a configuration that describe one block: the innermost first, then those around it.
#[derive(Debug, Clone)]
pub(crate) struct Scope<'a> {
    objects: Vec<(String, &'a Map<String, Value>)>,
    /// `model_type` of each object, the innermost first, and the model's.
    types: Vec<&'a str>,
}

/// A key as it stands in the configuration, and its value.
pub(crate) type Stated<'a> = (String, &'a Value);

impl<'a> Scope<'a> {
    fn new(root: &'a Map<String, Value>, prefix: &str) -> Self {
        let components: Vec<&str> = prefix.split('.').collect();
        let mut objects = vec![(String::new(), root)];
        let mut language = true;
        for (names, keys) in PARTS {
            let Some(name) = names.iter().find(|n| components.contains(n)) else { continue };
            let (path, object) = objects[0].clone();
            match inner(object, keys, &path) {
                Some(found) => {
                    language &= !FOREIGN.contains(name);
                    objects.insert(0, found);
                }
                // The rest of the configuration is of another part.
                None if FOREIGN.contains(name) => {
                    let types = model_type(root).into_iter().collect();
                    return Self { objects: Vec::new(), types };
                }
                None => {}
            }
        }
        while language && objects.len() < MAX_DEPTH {
            let (path, object) = objects[0].clone();
            let Some(found) = inner(object, &LANGUAGE, &path) else { break };
            objects.insert(0, found);
        }
        let types = objects.iter().filter_map(|(_, o)| model_type(o)).collect();
        Self { objects, types }
    }

    /// The model types that are stated, the innermost first.
    pub(crate) fn model_types(&self) -> &[&'a str] {
        &self.types
    }

    /// The value of a key, `outer.inner` for a key within an object; null states nothing.
    pub(crate) fn get(&self, key: &str) -> Option<Stated<'a>> {
        self.objects.iter().find_map(|(path, object)| {
            let mut parts = key.split('.');
            let first = object.get(parts.next()?)?;
            let value = parts.try_fold(first, |value, part| value.get(part))?;
            (!value.is_null()).then(|| (format!("{path}{key}"), value))
        })
    }

    /// As [`Self::get`] in the innermost object alone: sizes around it are of other parts.
    pub(crate) fn innermost(&self, key: &str) -> Option<Stated<'a>> {
        let (path, object) = self.objects.first()?;
        Some((format!("{path}{key}"), object.get(key).filter(|value| !value.is_null())?))
    }

    /// The size that the first of these keys states.
    pub(crate) fn size(&self, keys: &[&str]) -> Option<usize> {
        size(keys.iter().find_map(|key| self.get(key))?.1)
    }

    /// Every key with a value that is no object, with the objects' keys before it. Configurations of other
    /// parts of the model are left out.
    pub(crate) fn leaves(&self) -> Vec<Stated<'a>> {
        let mut out = Vec::new();
        for (path, object) in &self.objects {
            leaves(path, object, 0, &mut out);
        }
        out
    }
}

/// A size: a whole number, also one that a program wrote as a float.
pub(crate) fn size(value: &Value) -> Option<usize> {
    let whole = || value.as_f64().filter(|v| v.fract() == 0.0 && (0.0..1e15).contains(v));
    value.as_u64().or_else(|| whole().map(|v| v as u64))?.try_into().ok()
}

/// Whether a flag is set, as Python decides: a model's code does not look at the kind.
pub(crate) fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(set) => *set,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(object) => !object.is_empty(),
    }
}

fn model_type(object: &Map<String, Value>) -> Option<&str> {
    let class = || object.get("_class_name").and_then(Value::as_str);
    object.get(MODEL_TYPE).and_then(Value::as_str).or_else(class)
}

fn inner<'a>(
    object: &'a Map<String, Value>,
    keys: &[&str],
    path: &str,
) -> Option<(String, &'a Map<String, Value>)> {
    keys.iter().find_map(|key| Some((format!("{path}{key}."), object.get(*key)?.as_object()?)))
}

fn leaves<'a>(path: &str, object: &'a Map<String, Value>, depth: usize, out: &mut Vec<Stated<'a>>) {
    for (key, value) in object {
        match value {
            Value::Object(_) if depth == MAX_DEPTH || is_other_part(key, value) => {}
            Value::Object(inner) => leaves(&format!("{path}{key}."), inner, depth + 1, out),
            _ => out.push((format!("{path}{key}"), value)),
        }
    }
}

/// Whether an object is the configuration of a part of the model, which its own tensors' names choose.
fn is_other_part(key: &str, value: &Value) -> bool {
    let known = |keys: &[&str]| keys.contains(&key);
    let of_block = ["ffn", "mlp", "moe"].iter().any(|word| key.contains(word));
    let is_part = value.get(MODEL_TYPE).is_some() || key.ends_with("_config");
    is_part && !of_block || PARTS.iter().any(|(_, keys)| known(keys)) || known(&LANGUAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(root: Value) -> Config {
        let Value::Object(root) = root else { panic!("{root}") };
        Config { path: "config.json".into(), present: true, root, flat: false }
    }

    fn stated(config: &Config, prefix: &str, key: &str) -> Option<String> {
        config.scope(prefix).get(key).map(|(path, value)| format!("{path} = {value}"))
    }

    #[test]
    fn a_block_is_described_by_the_part_it_is_in() {
        let omni = config(json!({"model_type": "omni", "thinker_config": {
            "text_config": {"model_type": "omni_text", "hidden_act": "silu"},
            "vision_config": {"hidden_act": "gelu"},
            "audio_config": {}},
            "talker_config": {"hidden_act": "relu"}}));
        let act = |prefix| stated(&omni, prefix, "hidden_act");
        let text = Some("thinker_config.text_config.hidden_act = \"silu\"".to_owned());
        assert_eq!(act("thinker.model.layers.0.mlp."), text);
        let vision = Some("thinker_config.vision_config.hidden_act = \"gelu\"".to_owned());
        assert_eq!(act("thinker.visual.blocks.0.mlp."), vision);
        assert_eq!(
            act("talker.model.layers.0.mlp."),
            Some("talker_config.hidden_act = \"relu\"".into())
        );
        assert_eq!(act("thinker.audio_tower.layers.0."), None);
        let scope = omni.scope("thinker.model.layers.0.mlp.");
        assert_eq!(scope.model_types(), ["omni_text", "omni"]);
    }

    #[test]
    fn a_flat_configuration_is_of_the_language_model() {
        let flat = config(json!({"model_type": "vl", "hidden_act": "silu", "text_config": null}));
        assert_eq!(
            stated(&flat, "model.layers.0.mlp.", "hidden_act").unwrap(),
            "hidden_act = \"silu\""
        );
        assert_eq!(stated(&flat, "visual.blocks.0.mlp.", "hidden_act"), None);
        assert_eq!(flat.scope("visual.blocks.0.mlp.").model_types(), ["vl"]);
    }

    #[test]
    fn keys_of_other_parts_are_no_leaves() {
        let nested =
            config(json!({"a": 1, "rope_scaling": {"factor": 2}, "vision_config": {"b": 3},
            "ffn_config": {"ffn_act_fn": {"name": "silu"}}, "text_config": {"c": null}}));
        let leaves = nested.scope("layers.0.").leaves();
        let keys: Vec<&str> = leaves.iter().map(|(key, _)| key.as_str()).collect();
        let expected = ["text_config.c", "a", "ffn_config.ffn_act_fn.name", "rope_scaling.factor"];
        assert_eq!(keys, expected);
    }

    #[test]
    fn sizes_are_whole_numbers_however_they_are_written() {
        for (value, expected) in [
            (json!(64), Some(64)),
            (json!(64.0), Some(64)),
            (json!(64.5), None),
            (json!(-1), None),
            (json!([64, 128]), None),
            (json!("64"), None),
        ] {
            let scope = config(json!({"hidden_size": value}));
            assert_eq!(scope.scope("").size(&["hidden_size"]), expected, "{value}");
        }
    }

    #[test]
    fn what_is_no_configuration_is_refused() {
        let twice = r#"{"a": 1, "a": 2}"#;
        for (bad, why) in [
            ("", "empty"),
            ("{", "no JSON"),
            ("[]", "no object"),
            ("7", "no object"),
            (twice, "configuration has `a` twice, as 1 and 2"),
        ] {
            let error = object(bad.as_bytes(), Path::new("config.json")).unwrap_err().to_string();
            assert!(error.contains("config.json") && error.contains(why), "{error}");
            assert!(error.contains("without_config"), "{error}");
        }
    }
}
