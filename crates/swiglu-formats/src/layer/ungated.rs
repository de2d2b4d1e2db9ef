//! Feed-forward blocks without a gate, told from gated ones whose names are not known.

use super::names::{layer_of, part_of};
use super::{LoadOptions, TensorNames};
use crate::error::{FormatError, clip};
use crate::model::Model;

/// Modules before and behind the activation, as usual names have them.
const PAIRS: [(&str, &str); 13] = [
    ("wi", "wo"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("intermediate.dense", "output.dense"),
    ("fc_in", "fc_out"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
    ("linear_fc1", "linear_fc2"),
    ("up_proj", "down_proj"),
    ("ffn_up", "ffn_down"),
    ("net.0.proj", "net.2"),
    ("ff_proj", "ff_out"),
];

/// The refusal of a layer that has no gate: its two weights have the same intermediate size. Half of that
/// behind the activation would be gate and up in one.
pub(super) fn ungated(
    model: &Model,
    options: &LoadOptions,
    layer: Option<usize>,
) -> Option<FormatError> {
    let all = model.names();
    let fits = |prefix: &str| match &options.prefix {
        Some(asked) => prefix == asked || prefix.strip_suffix('.') == Some(asked),
        None => true,
    };
    let in_layer = all.iter().filter(|name| {
        layer.is_none_or(|layer| layer_of(name) == Some(layer)) && part_of(name).is_some_and(fits)
    });
    for name in in_layer {
        let Some(module) = name.strip_suffix(".weight") else { continue };
        for (first, second) in PAIRS {
            let Some(base) = module.strip_suffix(first) else { continue };
            let whole = base.is_empty() || base.ends_with('.');
            let other = format!("{base}{second}.weight");
            if whole && all.binary_search(&&*other).is_ok() && are_all(model, base, name, &other) {
                return Some(FormatError::Ungated {
                    path: model.path().to_owned(),
                    layer: layer_of(name).unwrap_or(options.layer),
                    first: clip(name, 200),
                    second: clip(&other, 200),
                });
            }
        }
    }
    None
}

/// The refusal of a layer whose weight by the name of gate and up in one is as wide as the down weight: in some
/// families one part has a gate and another has none.
pub(super) fn unpacked(model: &Model, names: &TensorNames, layer: usize) -> Option<FormatError> {
    let (first, second) = (names.gate_up.as_ref()?, names.down.as_ref()?);
    let shape = |name: &str| model.tensor(name).ok().map(|t| t.shape);
    match (&shape(first)?[..], &shape(second)?[..]) {
        (&[a, b], &[c, d]) if a == d && b == c => Some(FormatError::Ungated {
            path: model.path().to_owned(),
            layer,
            first: clip(first, 200),
            second: clip(second, 200),
        }),
        _ => None,
    }
}

/// Whether the first weight's outputs are the second one's inputs, `[H, K]` and `[K, H]` or both transposed,
/// and nothing beside them has the first one's shape, as a gate would.
fn are_all(model: &Model, base: &str, first: &str, second: &str) -> bool {
    let shape = |name: &str| model.tensor(name).map(|t| t.shape).unwrap_or_default();
    let (one, two) = (shape(first), shape(second));
    let (&[a, b], &[c, d]) = (&one[..], &two[..]) else { return false };
    let mut beside = model.names_with(base).into_iter().filter(|n| *n != first && *n != second);
    a == d && b == c && !beside.any(|name| name.ends_with(".weight") && shape(name) == one)
}
