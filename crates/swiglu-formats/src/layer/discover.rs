//! From a model and a layer number to the names of its tensors.

use std::collections::{BTreeMap, BTreeSet};

use super::foreign::instead_of_layer;
use super::names::{Convention, Kind, LANGUAGE_PREFIXES, Part, Place, Role, TRIED};
use super::names::{classify, unwrapped};
use super::ungated::{ungated, unpacked};
use super::{LoadOptions, TensorNames};
use crate::config::Config;
use crate::error::{FormatError, Result, list, ranges};
use crate::family::Family;
use crate::model::{FileFormat, Model};

/// How a caller names tensors when a file cannot be read in one way only.
const BY_NAME: &str = "the tensors by name (TensorNames::with_gate and TensorNames::with_up, or TensorNames::with_gate_up; \
     TensorNames::with_down)";

/// The tensors of a layer and the convention that names them so.
pub(super) struct Discovered {
    pub(super) names: TensorNames,
    pub(super) convention: &'static Convention,
    pub(super) kind: Kind,
    /// What the names of all tensors of the block start with.
    pub(super) block: String,
    /// The part of the model, as names start before the layer.
    pub(super) prefix: String,
    /// The parts that have such a layer too, where the caller chose none.
    pub(super) others: Vec<String>,
}

/// The places of all tensors of gated blocks, in the order of their names.
pub(super) fn places<'m>(model: &'m Model, config: &Config) -> Vec<Place<'m>> {
    let mut families: BTreeMap<&str, Option<&'static Family>> = BTreeMap::new();
    let mut places: Vec<Place<'_>> = Vec::new();
    for place in model.names().into_iter().flat_map(classify) {
        let of = place.convention.families;
        let mut family = || {
            let of_prefix = || Family::of(&config.scope(place.block));
            *families.entry(place.prefix).or_insert_with(of_prefix)
        };
        if of.is_empty() || family().is_some_and(|f| of.contains(&f.name)) {
            places.push(place);
        }
    }
    places
}

/// Finds the tensors of the layer that `options` ask for among all [`places`].
pub(super) fn discover(
    model: &Model,
    config: &Config,
    options: &LoadOptions,
    places: &[Place<'_>],
) -> Result<Discovered> {
    let layer = options.layer;
    if places.is_empty() {
        if model.names().is_empty() {
            let help = "give the file that has the model's weights";
            let found = "it holds no tensors, as a file of a vocabulary or of settings alone";
            return Err(FormatError::recognised(model.path(), found, help));
        }
        let instead = instead_of_layer(model, None).or_else(|| ungated(model, options, None));
        return Err(instead.unwrap_or_else(|| FormatError::NoLayer {
            path: model.path().to_owned(),
            tried: TRIED,
            present: list(model.names(), 6),
        }));
    }
    let at: Vec<Place<'_>> = places.iter().filter(|p| p.layer == layer).copied().collect();
    if at.is_empty() {
        let layers: BTreeSet<usize> = places.iter().map(|p| p.layer).collect();
        let instead = instead_of_layer(model, Some(layer));
        let instead = instead.or_else(|| ungated(model, options, Some(layer)));
        return Err(instead.unwrap_or_else(|| FormatError::LayerOutOfRange {
            path: model.path().to_owned(),
            layer,
            available: ranges(layers),
        }));
    }
    let all: BTreeSet<&str> = at.iter().map(|p| p.prefix).collect();
    let at = one_prefix(model, options, at)?;
    let others = match options.prefix {
        None => all.into_iter().filter(|p| *p != at[0].prefix).map(str::to_owned).collect(),
        Some(_) => Vec::new(),
    };
    let family = Family::of(&config.scope(at[0].block));
    let packed_up = model.format() == FileFormat::Gguf && family.is_some_and(|f| f.gguf_packed);
    let at = one_kind(model, options, at, packed_up)?;
    let at = one_expert(model, layer, options.expert, at)?;
    let names = complete(model, layer, packed_up, by_role(model, layer, &at)?).map_err(|e| {
        let instead = instead_of_layer(model, Some(layer));
        instead.or_else(|| ungated(model, options, Some(layer))).unwrap_or(e)
    })?;
    let names = match family {
        Some(family) if family.name == PROJECTORS => unswapped(model, names),
        _ => names,
    };
    // Gate and up may be stored, and the down weight another quantiser's.
    if names.down.is_none()
        && let Some(foreign) = instead_of_layer(model, Some(layer))
    {
        return Err(foreign);
    }
    if let Some(ungated) = unpacked(model, &names, layer) {
        return Err(ungated);
    }
    let Place { convention, kind, block, prefix, .. } = at[0];
    let (block, prefix) = (block.to_owned(), prefix.to_owned());
    Ok(Discovered { names, convention, kind, block, prefix, others })
}

/// The family of vision encoders in GGUF, of which old converters wrote `ffn_up` for down and the reverse.
pub(super) const PROJECTORS: &str = "CLIP projectors";

/// The names as they are meant, which the gate's shape tells.
fn unswapped(model: &Model, names: TensorNames) -> TensorNames {
    let shape = |name: &Option<String>| {
        let shape = model.tensor(name.as_ref()?).ok()?.shape;
        <[usize; 2]>::try_from(shape).ok()
    };
    match (shape(&names.gate), shape(&names.up), shape(&names.down)) {
        (Some([h, k]), Some(up), Some(down)) if h != k && up == [k, h] && down == [h, k] => {
            TensorNames {
                up: names.down,
                up_bias: names.down_bias,
                down: names.up,
                down_bias: names.up_bias,
                ..names
            }
        }
        _ => names,
    }
}

fn ambiguous(model: &Model, what: &'static str, why: String, choices: String) -> FormatError {
    FormatError::Ambiguous { path: model.path().to_owned(), what, why, choices }
}

/// Keeps the tensors of one part of the model: the one asked for, that of a language model if exactly one
/// is, or the only one.
fn one_prefix<'a>(
    model: &Model,
    options: &LoadOptions,
    at: Vec<Place<'a>>,
) -> Result<Vec<Place<'a>>> {
    let layer = options.layer;
    let all: BTreeSet<&str> = at.iter().map(|p| p.prefix).collect();
    let shown = |prefixes: &BTreeSet<&str>| {
        list(prefixes.iter().map(|p| if p.is_empty() { "(none)" } else { p }), 8)
    };
    if let Some(asked) = &options.prefix {
        let fits = |p: &str| p == asked || p.strip_suffix('.') == Some(asked);
        let at: Vec<_> = at.into_iter().filter(|p| fits(p.prefix)).collect();
        if at.is_empty() {
            if let Some(ungated) = ungated(model, options, Some(layer)) {
                return Err(ungated);
            }
            return Err(FormatError::Contradiction {
                path: model.path().to_owned(),
                what: "prefix",
                why: format!("{asked} given; a layer {layer} is there with: {}", shown(&all)),
            });
        }
        return Ok(at);
    }
    let is_known = |p: &&str| LANGUAGE_PREFIXES.contains(&unwrapped(p));
    let known: BTreeSet<&str> = all.iter().copied().filter(is_known).collect();
    let candidates = if known.is_empty() { &all } else { &known };
    if candidates.len() > 1 {
        // A down projection alone has a name that blocks without a gate have too.
        if at.iter().all(|p| p.role == Role::Down)
            && let Some(ungated) = ungated(model, options, Some(layer))
        {
            return Err(ungated);
        }
        let why = format!(
            "{} parts of the model have a layer {layer}: {}",
            candidates.len(),
            shown(candidates)
        );
        return Err(ambiguous(
            model,
            "the layer",
            why,
            format!("LoadOptions::with_prefix, or {BY_NAME}"),
        ));
    }
    Ok(at.iter().copied().filter(|p| candidates.contains(p.prefix)).collect())
}

/// Which of a layer's blocks, whatever the expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Dense,
    Shared,
    Experts,
}

fn group(kind: Kind) -> Group {
    match kind {
        Kind::Dense => Group::Dense,
        Kind::Shared => Group::Shared,
        Kind::Expert(_) | Kind::Stack => Group::Experts,
    }
}

/// Keeps the tensors of one convention and kind.
fn one_kind<'a>(
    model: &Model,
    options: &LoadOptions,
    at: Vec<Place<'a>>,
    packed_up: bool,
) -> Result<Vec<Place<'a>>> {
    let LoadOptions { layer, expert, beside_experts, .. } = *options;
    let key = |p: &Place<'a>| (group(p.kind), p.kind == Kind::Stack, p.convention.name);
    let mut found: BTreeMap<_, Vec<Place<'a>>> = BTreeMap::new();
    for place in at {
        found.entry(key(&place)).or_default().push(place);
    }
    let has = |places: &[Place<'_>], role| {
        places.iter().any(|p| p.role == role && p.part == Part::Weight)
    };
    let is_complete = |places: &[Place<'_>]| {
        let up = has(places, Role::Up);
        has(places, Role::GateUp) || up && (has(places, Role::Gate) || packed_up)
    };
    // A name may fit several conventions: the others of its layer tell.
    if found.values().any(|places| is_complete(places)) {
        found.retain(|_, places| is_complete(places));
    }
    // Where none is complete, the one that has most says best what is missing.
    else if let Some((&most, _)) = found.iter().max_by_key(|(_, places)| places.len()) {
        found.retain(|key, _| *key == most);
    }
    if beside_experts {
        found.retain(|(group, ..), _| *group != Group::Experts);
        if found.is_empty() {
            return Err(FormatError::Contradiction {
                path: model.path().to_owned(),
                what: "LoadOptions::with_beside_experts",
                why: format!("layer {layer} has no block beside its experts"),
            });
        }
    }
    // Next to experts, a dense or shared block is another; a given expert decides.
    let experts = found.keys().any(|(group, ..)| *group == Group::Experts);
    let dense = found.keys().any(|(group, ..)| *group == Group::Dense);
    if experts && (expert.is_some() || !dense) {
        found.retain(|(group, ..), _| *group == Group::Experts);
    }
    match found.len() {
        1 => Ok(found.into_values().flatten().collect()),
        _ => {
            let names = list(found.keys().map(|(.., name)| *name), 8);
            let why = format!("layer {layer} is there under {names}");
            Err(ambiguous(
                model,
                "the layer",
                why,
                format!("LoadOptions::with_expert, LoadOptions::with_beside_experts, or {BY_NAME}"),
            ))
        }
    }
}

fn one_expert<'a>(
    model: &Model,
    layer: usize,
    expert: Option<usize>,
    at: Vec<Place<'a>>,
) -> Result<Vec<Place<'a>>> {
    let out_of_range = |expert, available| FormatError::ExpertOutOfRange {
        path: model.path().to_owned(),
        expert,
        available,
    };
    let experts: BTreeSet<usize> = at
        .iter()
        .filter_map(|p| match p.kind {
            Kind::Expert(expert) => Some(expert),
            _ => None,
        })
        .collect();
    match (expert, experts.is_empty()) {
        (Some(e), false) if experts.contains(&e) => {
            Ok(at.into_iter().filter(|p| p.kind == Kind::Expert(e)).collect())
        }
        (Some(e), false) => {
            Err(out_of_range(e, format!("layer {layer} has experts {}", ranges(experts))))
        }
        (None, false) => Err(ambiguous(
            model,
            "the expert",
            format!("layer {layer} has experts"),
            format!(
                "LoadOptions::with_expert: {}; or LoadOptions::with_beside_experts for a shared one",
                ranges(experts)
            ),
        )),
        // Stacked: the shape says how many there are.
        (Some(e), true) if at.iter().all(|p| p.kind != Kind::Stack) => {
            Err(out_of_range(e, format!("layer {layer} has no experts")))
        }
        _ => Ok(at),
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

fn complete(
    model: &Model,
    layer: usize,
    packed_up: bool,
    mut names: TensorNames,
) -> Result<TensorNames> {
    if packed_up && names.gate.is_none() && names.gate_up.is_none() {
        names.gate_up = names.up.take();
        names.gate_up_bias = names.up_bias.take();
    }
    let missing = match (&names.gate, &names.up, &names.gate_up) {
        (Some(_), Some(_), None) | (None, None, Some(_)) => return Ok(names),
        (None, None, None) => {
            "no gate and no up weight under names that are known here; name them (TensorNames::with_gate \
             and TensorNames::with_up, or TensorNames::with_gate_up)"
        }
        (None, Some(_), None) => {
            "no gate weight; a layer without a gate is not a gated linear unit, and one whose up \
             weight holds both must be given as TensorNames::with_gate_up with its \
             LoadOptions::with_arrangement"
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
