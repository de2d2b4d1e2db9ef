//! Whether the tensors of a block are those that its configuration describes: its size and its biases.

use serde_json::Value;

use super::names::{Kind, unwrapped};
use super::{LoadOptions, TensorNames};
use crate::config::{Config, Scope, is_set, size};
use crate::error::{FormatError, Result, clip};
use crate::family::{Blocks, Family, is_neutral};

/// Keys for K.
const HIDDEN: [&str; 5] = ["hidden_size", "embedding_length", "d_model", "n_embd", "dim"];
/// Keys for H of a dense block, and of every block where none of the others is stated.
const DENSE: [&str; 7] = [
    "intermediate_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "prefix_dense_intermediate_size",
    "feed_forward_length",
    "ffn_hidden_size",
    "d_ff",
];
/// Of routed experts.
const EXPERTS: [&str; 4] = [
    "moe_intermediate_size",
    "expert_intermediate_size",
    "expert_ffn_hidden_size",
    "expert_feed_forward_length",
];
/// Of the shared expert, whose size may be a multiple: as many as there are are one.
const SHARED: [&str; 6] = [
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
    "expert_shared_feed_forward_length",
];
/// Families in which H follows from other keys too, or from a rule of its own: a third is left out, the size is
/// rounded up, or the whole is a ratio of K.
const OTHER_RULES: [&str; 4] = ["LFM2", "NeoBERT", "DINOv2", "EVA-02"];
/// Of layers that count twice.
const DOUBLE: &str = "use_double_wide_mlp";
/// Keys that say whether the linear maps of a dense block have biases.
const BIASES: [&str; 3] = ["mlp_bias", "use_mlp_bias", "mlp_use_bias"];
/// The same in single families.
const BIASES_OF: [(&str, &str); 2] = [("ChatGLM", "add_bias_linear"), ("ERNIE", "use_bias")];

/// Parts of a name before the layer's number of blocks that the innermost object describes. Others, as
/// connectors between parts, have sizes of their own.
const DESCRIBED: [&str; 24] = [
    "model",
    "language_model",
    "text_model",
    "transformer",
    "backbone",
    "bert",
    "encoder",
    "decoder",
    "enc",
    "dec",
    "thinker",
    "talker",
    "code_predictor",
    "vision_tower",
    "vision_model",
    "visual",
    "vision",
    "vit",
    "audio_tower",
    "audio_model",
    "audio_encoder",
    "audio",
    "llm",
    "",
];

/// A block that was found by its names.
pub(super) struct Found<'a> {
    pub(super) config: &'a Config,
    pub(super) scope: &'a Scope<'a>,
    pub(super) family: Option<&'static Family>,
    /// What tensor names start with before the layer.
    pub(super) prefix: &'a str,
    pub(super) layer: usize,
    pub(super) kind: Kind,
    pub(super) blocks: Blocks,
    pub(super) options: &'a LoadOptions,
}

impl Found<'_> {
    /// Refuses an intermediate size that is none of those which the configuration states for such a block.
    pub(super) fn expect_size(&self, tensor: &str, intermediate: usize) -> Result<()> {
        let ignored = |key: &str| self.options.ignore.iter().any(|i| last(i) == key);
        let name = self.family.map_or("", |f| f.name);
        if !is_described(self.prefix)
            || OTHER_RULES.contains(&name)
            || [&DENSE[..], &EXPERTS, &SHARED].into_iter().flatten().any(|key| ignored(key))
        {
            return Ok(());
        }
        let (stated, of_block) = match self.blocks {
            // A block is of one kind: what is not routed is dense or shared.
            Blocks::All | Blocks::NotRouted => (self.stated(&DENSE)?, true),
            Blocks::Experts => self.first_stated(&[&EXPERTS, &DENSE])?,
            Blocks::Shared => self.first_stated(&[&SHARED, &EXPERTS, &DENSE])?,
        };
        let fits = |&size: &usize| match self.blocks {
            Blocks::All if name == "Qwen 1" => size / 2 == intermediate && size.is_multiple_of(2),
            Blocks::All | Blocks::NotRouted => {
                size == intermediate || self.is_double(size, intermediate)
            }
            Blocks::Experts => {
                size == intermediate || !of_block && self.is_of_all(size, intermediate)
            }
            Blocks::Shared => {
                intermediate.is_multiple_of(size) || !of_block && size.is_multiple_of(intermediate)
            }
        };
        let mut all = stated.iter().flat_map(|(_, _, sizes)| sizes).peekable();
        if all.peek().is_none() || all.any(fits) || self.vision_rule(intermediate) {
            return Ok(());
        }
        let Some((key, value, _)) = stated.first() else { return Ok(()) };
        Err(contradicted(self.config, key, value, format!("{tensor} has {intermediate}")))
    }

    /// Refuses a block without the biases that its configuration says it has.
    pub(super) fn expect_biases(&self, names: &TensorNames) -> Result<()> {
        if self.kind != Kind::Dense || !is_described(self.prefix) {
            return Ok(());
        }
        let name = self.family.map_or("", |f| f.name);
        let of_family = BIASES_OF.iter().filter(|(family, _)| *family == name);
        let mut keys = BIASES.into_iter().chain(of_family.map(|(_, key)| *key));
        let stated = |key| self.scope.innermost(key).filter(|(_, v)| is_set(v));
        let Some((key, value)) = keys.find_map(stated) else { return Ok(()) };
        let both = names.gate_up_bias.is_some();
        let lacking: Vec<&str> = [
            ("gate", both || names.gate_bias.is_some()),
            ("up", both || names.up_bias.is_some()),
            ("down", names.down.is_none() || names.down_bias.is_some()),
        ]
        .into_iter()
        .filter_map(|(role, there)| (!there).then_some(role))
        .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        let why = format!("layer {} has no bias of {}", self.layer, lacking.join(", "));
        Err(contradicted(self.config, &key, value, why))
    }

    /// Of the first list with a key that is stated, all that are; and whether it is the list of such blocks.
    fn first_stated(&self, lists: &[&[&'static str]]) -> Result<(Vec<Sizes<'_>>, bool)> {
        for (i, keys) in lists.iter().enumerate() {
            let stated = self.stated(keys)?;
            if !stated.is_empty() {
                return Ok((stated, i == 0));
            }
        }
        Ok((Vec::new(), false))
    }

    /// The keys that the innermost object states, with their sizes for this layer.
    fn stated(&self, keys: &[&'static str]) -> Result<Vec<Sizes<'_>>> {
        let mut out = Vec::new();
        for (path, value) in keys.iter().filter_map(|key| self.scope.innermost(key)) {
            let of = |value| expect_whole(self.config, &path, value);
            let sizes: Vec<usize> = match value {
                Value::Array(items) => match items.get(self.layer) {
                    Some(own) if Some(items.len()) == self.layers() => {
                        of(own)?.into_iter().collect()
                    }
                    // Of kinds of experts.
                    _ => items.iter().filter_map(size).filter(|&size| size > 0).collect(),
                },
                one => of(one)?.into_iter().collect(),
            };
            if !sizes.is_empty() {
                out.push((path, value, sizes));
            }
        }
        Ok(out)
    }

    fn layers(&self) -> Option<usize> {
        self.scope.size(&["num_hidden_layers", "block_count", "num_layers", "n_layer"])
    }

    fn is_double(&self, size: usize, intermediate: usize) -> bool {
        size.checked_mul(2) == Some(intermediate)
            && self.scope.get(DOUBLE).is_some_and(|(_, v)| is_set(v))
    }

    /// Old writers of GGUF state what all experts of a token have together.
    fn is_of_all(&self, size: usize, intermediate: usize) -> bool {
        size.is_multiple_of(intermediate) && self.scope.innermost("feed_forward_length").is_some()
    }

    /// The vision blocks of GLM have the size of what they are projected to.
    fn vision_rule(&self, intermediate: usize) -> bool {
        self.family.is_some_and(|f| f.name.starts_with("GLM"))
            && self.scope.size(&["out_hidden_size"]) == Some(intermediate)
    }
}

/// The hidden size that a configuration states.
///
/// # Errors
/// [`FormatError::Contradicted`] if it is no size.
pub(super) fn stated_hidden(config: &Config, scope: &Scope<'_>) -> Result<Option<usize>> {
    match HIDDEN.iter().find_map(|key| scope.get(key)) {
        None => Ok(None),
        // Also the axis that something else works along.
        Some((key, value)) if last(&key) == "dim" && size(value).is_none() => Ok(None),
        Some((key, value)) => expect_whole(config, &key, value),
    }
}

/// The size that a key states; none if it is 0, false or empty, or a list.
fn expect_whole(config: &Config, key: &str, value: &Value) -> Result<Option<usize>> {
    match size(value) {
        Some(size) => Ok((size > 0).then_some(size)),
        // Sizes of several are none of this block's.
        None if is_neutral(value) || value.is_array() => Ok(None),
        None => Err(contradicted(config, key, value, "a size is a whole number".into())),
    }
}

fn contradicted(config: &Config, key: &str, value: &Value, why: String) -> FormatError {
    FormatError::Contradicted {
        path: config.path().to_owned(),
        key: clip(key, 200),
        value: clip(&value.to_string(), 100),
        why: clip(&why, 300),
    }
}

/// Whether the innermost object of a configuration describes the blocks of a part of the model.
pub(super) fn is_described(prefix: &str) -> bool {
    unwrapped(prefix).split('.').all(|part| DESCRIBED.contains(&part))
}

/// A key as it stands, its value, and the sizes in it.
type Sizes<'a> = (String, &'a Value, Vec<usize>);

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}
