//! What a block computes from whole rows, and where that is said.

use serde_json::Value;
use swiglu_core::{Norm, NormKind, Sparsity};

use super::{Effect, Family, is_neutral};
use crate::config::{Scope, number};

/// Keys for ε of an RMS norm. That of a layer norm is its family's.
const EPSILON: [&str; 2] = ["rms_norm_eps", "attention.layer_norm_rms_epsilon"];
/// Keys for the number of layers.
const LAYERS: [&str; 2] = ["num_hidden_layers", "block_count"];

/// A norm that a family has inside its block where there is a tensor of its weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StatedNorm {
    /// The module's name within the block.
    pub(crate) module: &'static str,
    pub(crate) norm: Norm,
}

/// The sparsity of the gate in this layer.
///
/// # Errors
/// What the configuration says and nobody understands.
pub(crate) fn stated_sparsity(
    family: Option<&'static Family>,
    scope: &Scope<'_>,
    layer: usize,
    ignored: &[String],
) -> Result<Option<Sparsity>, String> {
    let mut effects = family.map_or(&[][..], |f| f.effects).iter();
    let stated = effects.find_map(|effect| match *effect {
        Effect::Sparsity(fractions, deviations, default) => Some((fractions, deviations, default)),
        _ => None,
    });
    let Some((fractions, deviations, (default, first))) = stated else { return Ok(None) };
    if ignored.iter().any(|i| i == fractions) {
        return Ok(None);
    }
    for (key, made) in [
        (fractions, Sparsity::of as fn(f32) -> swiglu_core::Result<Sparsity>),
        (deviations, Sparsity::above),
    ] {
        let Some((path, value)) = scope.get(key) else { continue };
        let said = |why: &str| format!("has `{path}` = {value}, {why}");
        let value = match value {
            Value::Array(layers) => layers
                .get(layer)
                .ok_or_else(|| said(&format!("expected a value for layer {layer}")))?,
            value => value,
        };
        let number = number(value);
        // Without any sparsity z is −∞.
        if is_neutral(value) && number != Some(1.0) || number == Some(f64::NEG_INFINITY) {
            return Ok(None);
        }
        let number = number.ok_or_else(|| said("expected numbers"))?;
        return made(number as f32).map(Some).map_err(|error| said(&error.to_string()));
    }
    let sparse = layer < first && scope.size(&LAYERS).is_none_or(|layers| layers > first);
    Ok(if sparse { Sparsity::of(default).ok() } else { None })
}

/// The norms that the family may have inside its block.
///
/// # Errors
/// As [`stated_sparsity`].
pub(crate) fn stated_norms(
    family: Option<&'static Family>,
    scope: &Scope<'_>,
) -> Result<Vec<StatedNorm>, String> {
    let norms = family.map_or(&[][..], |f| f.effects).iter().filter_map(|effect| match *effect {
        Effect::Norm(module, kind, epsilon) => Some((module, kind, epsilon)),
        _ => None,
    });
    norms
        .map(|(module, kind, default)| {
            let stated = EPSILON.iter().find_map(|key| scope.get(key));
            let (said, epsilon) = match stated.filter(|_| kind == NormKind::Rms) {
                Some((path, value)) => (format!("`{path}` = {value}"), number(value)),
                None => (module.to_owned(), Some(f64::from(default))),
            };
            let epsilon = epsilon.unwrap_or(f64::NAN) as f32;
            match Norm::new(kind, epsilon) {
                Ok(norm) => Ok(StatedNorm { module, norm }),
                Err(error) => Err(format!("has {said}: {error}")),
            }
        })
        .collect()
}
