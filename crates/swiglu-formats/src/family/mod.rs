//! Families of models: how each computes its gated feed-forward block, in one table.

mod activation;
mod document;
mod rows;
mod rule;
mod table;

use swiglu_core::{Arrangement, NormKind, Orientation};

use crate::config::Scope;

pub use activation::ActivationSource;
pub(crate) use activation::{Stated, stated_activation};
pub use document::page;
pub(crate) use rows::{stated_norms, stated_sparsity};
pub(crate) use rule::{is_neutral, not_understood, unused};
pub use table::FAMILIES;

/// How one family of models computes its gated feed-forward block.
#[derive(Debug)]
pub struct Family {
    /// What it is called here.
    pub name: &'static str,
    /// `model_type` (or `_class_name`) of its configurations; a `_text` at the end is left out.
    pub model_types: &'static [&'static str],
    /// `general.architecture` of its GGUF files, where it is no model type.
    pub gguf: &'static [&'static str],
    /// The gate's function.
    pub function: Function,
    /// The order in a tensor that holds gate and up.
    pub packed: Option<Arrangement>,
    /// Whether `ffn_up` of its GGUF files holds gate and up.
    pub gguf_packed: bool,
    /// Of a stack of experts, `[E, 2H, K]` or `[E, K, 2H]`.
    pub stack: Option<(Orientation, Arrangement)>,
    /// What else its configuration says about the block's mathematics.
    pub effects: &'static [Effect],
    /// Keys of its configuration that sound as if they did, and do not.
    pub harmless: &'static [&'static str],
    /// Modules whose names start as the block's, and that stand behind it.
    pub outside: &'static [&'static str],
}

/// Where a family's activation comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// Its configuration names it under the first of these keys that is there (under any usual one, if
    /// there are none); without one it is the second.
    Named(&'static [&'static str], &'static str),
    /// Whatever its configuration names, its published code applies this.
    Fixed(&'static str),
    /// The flag that is set chooses; else it is the second.
    Flags(&'static [(&'static str, &'static str)], &'static str),
}

/// What a key of a configuration does to the block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Effect {
    /// min(gate, L) and clamp(up, ±L) before the activation: L is the key's value, for all layers or a list
    /// of one for each; 0 is none. Without the key it is the last, if there is one.
    Clamp(&'static str, Blocks, Option<f32>),
    /// min(f(gate), L) and clamp(up, ±L): L is the key's value, as of [`Effect::Clamp`].
    ClampBehind(&'static str, Blocks),
    /// The gate keeps what is above mean + z·σ of its row, less that: for all layers or a list of one for
    /// each the first key has the part that becomes 0, the second z. Without either key it is that part
    /// of the first so many layers, if there are more.
    Sparsity(&'static str, &'static str, (f32, usize)),
    /// A norm of h in the module of this name, where the block has its weight; with this ε if the
    /// configuration states none.
    Norm(&'static str, NormKind, f32),
    /// α of x · σ(αx), in place of that of the family's function.
    Alpha(&'static str),
    /// The gate is multiplied by the first value of the list, the down projection by the second.
    Multipliers(&'static str),
    /// What is not computed here, and why a layer with another value than 0, 1, false or null is refused.
    Refused(&'static str, &'static str),
}

/// Which of a layer's blocks an effect is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// All.
    All,
    /// Routed experts.
    Experts,
    /// The shared expert.
    Shared,
    /// All but routed experts: dense blocks and the shared expert.
    NotRouted,
}

impl Blocks {
    /// Whether `block`, which is of one kind, is among them; a dense one is [`Blocks::All`].
    fn has(self, block: Blocks) -> bool {
        let not_routed = self == Blocks::NotRouted && block != Blocks::Experts;
        self == Blocks::All || self == block || not_routed
    }
}

impl Effect {
    /// The key, or the module of a norm.
    pub(crate) fn key(&self) -> &'static str {
        match *self {
            Effect::Clamp(key, ..)
            | Effect::ClampBehind(key, _)
            | Effect::Sparsity(key, ..)
            | Effect::Norm(key, ..)
            | Effect::Alpha(key)
            | Effect::Multipliers(key)
            | Effect::Refused(key, _) => key,
        }
    }
}

/// Whether a family has an effect by this key, which may act by its absence.
pub(crate) fn is_key(name: &str) -> bool {
    let mut effects = FAMILIES.iter().flat_map(|f| f.effects);
    effects.any(|effect| !matches!(effect, Effect::Norm(..)) && effect.key() == name)
}

impl Family {
    /// The family of the model types that describe a block, of which the innermost known one decides.
    pub(crate) fn of(scope: &Scope<'_>) -> Option<&'static Family> {
        scope.model_types().iter().find_map(|name| Family::named(name))
    }

    fn named(name: &str) -> Option<&'static Family> {
        let plain = |name: &str| name.to_ascii_lowercase().replace('-', "_");
        let name = plain(name);
        let short = name.strip_suffix("_text").unwrap_or(&name);
        let is = |known: &&str| plain(known) == name || plain(known) == short;
        FAMILIES.iter().find(|f| f.model_types.iter().any(is) || f.gguf.iter().any(is))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_model_type_is_of_one_family() {
        let mut seen = BTreeSet::new();
        for family in FAMILIES {
            for name in family.model_types.iter().chain(family.gguf) {
                assert!(seen.insert(name.replace('-', "_")), "{name} is there twice");
                assert_eq!(Family::named(name).map(|f| f.name), Some(family.name), "{name}");
            }
        }
    }

    #[test]
    fn names_are_read_as_writers_write_them() {
        for (name, family) in [
            ("gpt-oss", "gpt-oss"),
            ("gpt_oss", "gpt-oss"),
            ("Llama", "Llama"),
            ("qwen2_5_vl_text", "Qwen"),
            ("qwen3moe", "Qwen"),
        ] {
            assert_eq!(Family::named(name).map(|f| f.name), Some(family), "{name}");
        }
        assert!(Family::named("somebody_s_own").is_none() && Family::named("").is_none());
    }
}
