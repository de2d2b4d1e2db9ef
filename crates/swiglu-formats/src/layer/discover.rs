//! From a model and a layer number to the names of its tensors.

use std::collections::{BTreeMap, BTreeSet};

use super::TensorNames;
use super::foreign::instead_of_layer;
use super::names::{Convention, LANGUAGE_PREFIXES, Part, Place, Role, TRIED, classify};
use crate::error::{FormatError, Result, list, ranges};
use crate::model::Model;

/// How a caller names tensors when a file cannot be read in one way only.
const BY_NAME: &str = "explicit tensor names (gate and up, or gate_up, and down)";

/// The tensors of a layer and the convention that names them so.
pub(super) struct Discovered {
    pub(super) names: TensorNames,
    pub(super) convention: Convention,
}

pub(super) fn discover(model: &Model, layer: usize, expert: Option<usize>) -> Result<Discovered> {
    let all = model.names();
    let places: Vec<Place<'_>> = all.iter().filter_map(|n| classify(n)).collect();
    if places.is_empty() {
        return Err(instead_of_layer(model, None).unwrap_or_else(|| FormatError::NoLayer {
            path: model.path().to_owned(),
            tried: TRIED,
            present: list(all.iter().copied(), 6),
        }));
    }
    let at: Vec<Place<'_>> = places.iter().filter(|p| p.layer == layer).copied().collect();
    if at.is_empty() {
        let layers: BTreeSet<usize> = places.iter().map(|p| p.layer).collect();
        let foreign = instead_of_layer(model, Some(layer));
        return Err(foreign.unwrap_or_else(|| FormatError::LayerOutOfRange {
            path: model.path().to_owned(),
            layer,
            available: ranges(layers),
        }));
    }
    let at = one_prefix(model, layer, at)?;
    let (convention, at) = one_convention(model, layer, expert, at)?;
    let at = one_expert(model, layer, expert, convention, at)?;
    let names = by_role(model, layer, &at)?;
    let names = complete(model, layer, convention, names)
        .map_err(|e| instead_of_layer(model, Some(layer)).unwrap_or(e))?;
    match instead_of_layer(model, Some(layer)).filter(|_| names.down.is_none()) {
        Some(foreign) => Err(foreign),
        None => Ok(Discovered { names, convention }),
    }
}

fn ambiguous(model: &Model, what: &'static str, why: String, choices: String) -> FormatError {
    FormatError::Ambiguous { path: model.path().to_owned(), what, why, choices }
}

/// Keeps the tensors of one block: that of a language model if exactly one is, or the only one.
fn one_prefix<'a>(model: &Model, layer: usize, at: Vec<Place<'a>>) -> Result<Vec<Place<'a>>> {
    let all: BTreeSet<&str> = at.iter().map(|p| p.prefix).collect();
    let known: BTreeSet<&str> =
        all.iter().copied().filter(|p| LANGUAGE_PREFIXES.contains(p)).collect();
    let candidates = if known.is_empty() { &all } else { &known };
    if candidates.len() > 1 {
        let why = format!(
            "{} blocks have a layer {layer}: {}",
            candidates.len(),
            list(candidates.iter().map(|p| if p.is_empty() { "(no prefix)" } else { p }), 8)
        );
        return Err(ambiguous(model, "the layer", why, BY_NAME.into()));
    }
    Ok(at.iter().copied().filter(|p| candidates.contains(p.prefix)).collect())
}

fn one_convention<'a>(
    model: &Model,
    layer: usize,
    expert: Option<usize>,
    mut at: Vec<Place<'a>>,
) -> Result<(Convention, Vec<Place<'a>>)> {
    let mut found: BTreeSet<Convention> = at.iter().map(|p| p.convention).collect();
    if found.contains(&Convention::HuggingFaceMxfp4) {
        // Biases have the names that they have beside elements.
        found.remove(&Convention::HuggingFaceStacked);
        at.iter_mut()
            .filter(|p| p.convention == Convention::HuggingFaceStacked)
            .for_each(|p| p.convention = Convention::HuggingFaceMxfp4);
    }
    // Next to experts, a dense block is another layer; a given expert decides.
    if expert.is_some() && found.iter().any(|c| c.has_experts()) {
        found.retain(|c| c.has_experts());
    }
    let mut rest = found.iter();
    match (rest.next(), rest.next()) {
        (Some(&only), None) => {
            Ok((only, at.into_iter().filter(|p| p.convention == only).collect()))
        }
        _ => {
            let why =
                format!("layer {layer} is there under {}", list(found.iter().map(|c| c.name()), 8));
            Err(ambiguous(model, "the layer", why, format!("an expert, or {BY_NAME}")))
        }
    }
}

fn one_expert<'a>(
    model: &Model,
    layer: usize,
    expert: Option<usize>,
    convention: Convention,
    at: Vec<Place<'a>>,
) -> Result<Vec<Place<'a>>> {
    if !convention.has_experts() {
        return match expert {
            None => Ok(at),
            Some(expert) => Err(FormatError::ExpertOutOfRange {
                path: model.path().to_owned(),
                expert,
                available: format!("layer {layer} has no experts"),
            }),
        };
    }
    let experts: BTreeSet<usize> = at.iter().filter_map(|p| p.expert).collect();
    if experts.is_empty() {
        // Stacked: the shape says how many there are.
        return Ok(at);
    }
    match expert {
        Some(e) if experts.contains(&e) => {
            Ok(at.into_iter().filter(|p| p.expert == Some(e)).collect())
        }
        Some(expert) => Err(FormatError::ExpertOutOfRange {
            path: model.path().to_owned(),
            expert,
            available: format!("layer {layer} has experts {}", ranges(experts)),
        }),
        None => Err(ambiguous(
            model,
            "the expert",
            format!("layer {layer} has experts"),
            format!("expert {}; a shared expert by {BY_NAME}", ranges(experts)),
        )),
    }
}

fn by_role(model: &Model, layer: usize, at: &[Place<'_>]) -> Result<TensorNames> {
    let mut map: BTreeMap<(Role, Part), &str> = BTreeMap::new();
    for place in at {
        if let Some(other) = map.insert((place.role, place.part), place.name) {
            let why = format!("layer {layer} has both {other} and {}", place.name);
            return Err(ambiguous(model, "the layer", why, BY_NAME.into()));
        }
    }
    let get = |role, part| map.get(&(role, part)).map(|n| (*n).to_owned());
    Ok(TensorNames {
        gate: get(Role::Gate, Part::Weight),
        up: get(Role::Up, Part::Weight),
        down: get(Role::Down, Part::Weight),
        gate_up: get(Role::GateUp, Part::Weight),
        gate_bias: get(Role::Gate, Part::Bias),
        up_bias: get(Role::Up, Part::Bias),
        gate_up_bias: get(Role::GateUp, Part::Bias),
        down_bias: get(Role::Down, Part::Bias),
    })
}

/// GGUF architectures whose `ffn_up` is gate and up in one tensor.
pub(super) const GGUF_PACKED: [&str; 3] = ["phi3", "chatglm", "glm4"];

fn complete(
    model: &Model,
    layer: usize,
    convention: Convention,
    mut names: TensorNames,
) -> Result<TensorNames> {
    let packed_up = convention == Convention::LlamaCpp
        && model.architecture().is_some_and(|a| GGUF_PACKED.contains(&a));
    if packed_up && names.gate.is_none() && names.gate_up.is_none() {
        names.gate_up = names.up.take();
        names.gate_up_bias = names.up_bias.take();
    }
    let missing = match (&names.gate, &names.up, &names.gate_up) {
        (Some(_), Some(_), None) | (None, None, Some(_)) => return Ok(names),
        (None, None, None) => "no gate and no up weight",
        (None, Some(_), None) => {
            "no gate weight; a layer without a gate is not a gated linear unit, and one whose up \
             weight holds both must be given as gate_up with its arrangement"
        }
        (Some(_), None, None) => "no up weight",
        _ => {
            let why = format!("layer {layer} has both separate and packed gate and up weights");
            return Err(ambiguous(model, "the layer", why, BY_NAME.into()));
        }
    };
    Err(FormatError::IncompleteLayer {
        path: model.path().to_owned(),
        layer,
        missing: missing.into(),
        found: list(names.given(), 8),
    })
}
