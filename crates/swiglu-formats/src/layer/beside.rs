//! The tensors that share a weight's prefix: what a writer put beside it.

use crate::error::Result;
use crate::model::Model;
use crate::tensor::Tensor;

/// `X.` of `X.weight`, `X_` of `X_blocks`, and of a weight `X` by another name what follows it.
pub(super) struct Beside<'a> {
    model: &'a Model,
    /// Full names and what follows the prefix in them.
    all: Vec<(&'a str, &'a str)>,
}

impl<'a> Beside<'a> {
    pub(super) fn new(model: &'a Model, weight: &str) -> Self {
        let with = |prefix| model.names_with(prefix).into_iter();
        let tail = ["weight", "blocks"].into_iter().find(|tail| weight.ends_with(tail));
        let base = tail.and_then(|tail| weight.strip_suffix(tail));
        let all = match (base, tail) {
            // Without a prefix everything in the file would share it.
            (Some(""), Some(tail)) => with(tail).map(|n| (n, n)).collect(),
            (Some(base), _) => with(base).map(|n| (n, &n[base.len()..])).collect(),
            (None, _) => with(weight)
                .filter_map(|n| Some((n, n[weight.len()..].strip_prefix(['.', '_'])?)))
                .collect(),
        };
        Self { model, all }
    }

    /// What follows the prefix, of each tensor that has it.
    pub(super) fn rests(&self) -> impl Iterator<Item = &'a str> {
        self.all.iter().map(|(_, rest)| *rest)
    }

    /// The full names of those whose rest is one of these.
    pub(super) fn names(&self, is: impl Fn(&str) -> bool) -> impl Iterator<Item = &'a str> {
        self.all.iter().filter(move |(_, rest)| is(rest)).map(|(name, _)| *name)
    }

    /// The full name of the first tensor whose rest is none of these.
    pub(super) fn other_than(&self, known: &[&[&str]]) -> Option<&'a str> {
        let is_known = |rest: &str| known.iter().any(|names| names.contains(&rest));
        self.all.iter().find(|(_, rest)| !is_known(rest)).map(|(name, _)| *name)
    }

    /// The tensors whose rest is one of these.
    pub(super) fn tensors(&self, rests: &[&str]) -> Result<Vec<Tensor>> {
        let named = self.all.iter().filter(|(_, rest)| rests.contains(rest));
        named.map(|(name, _)| self.model.tensor(name)).collect()
    }

    /// The tensor with this rest.
    pub(super) fn tensor(&self, rest: &str) -> Result<Option<Tensor>> {
        Ok(self.tensors(&[rest])?.pop())
    }
}

/// Of sorted names those that begin with `prefix`.
pub(super) fn with_prefix<'a>(all: &[&'a str], prefix: &str) -> impl Iterator<Item = &'a str> {
    let start = all.partition_point(|name| *name < prefix);
    all[start..].iter().take_while(move |name| name.starts_with(prefix)).copied()
}
