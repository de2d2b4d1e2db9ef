//! Which tensors are a layer's block, and whether all that its file says of the block is understood.

use serde_json::Value;

use super::beside::Beside;
use super::names::{self, Convention, Kind, Place, Role};
use super::rows::Found;
use super::{LoadOptions, TensorNames, contradiction, discover, scales};
use crate::config::{Config, Scope};
use crate::error::{FormatError, Result, clip};
use crate::family::{self, Blocks, Effect, Family};
use crate::model::{FileFormat, Model};

/// The tensors to load and what is known of their block.
pub(super) struct Chosen {
    pub(super) names: TensorNames,
    /// None where the caller named the tensors.
    pub(super) found: Option<(&'static Convention, Kind)>,
    /// What the names of all tensors of the block start with; empty where that is not known.
    pub(super) block: String,
    /// The part of the model, as names start before the layer; none where the caller named the tensors.
    pub(super) prefix: Option<String>,
    /// Parts that have such a layer too, where the caller chose none.
    pub(super) others: Vec<String>,
}

pub(super) fn choose_names(
    model: &Model,
    config: &Config,
    options: &LoadOptions,
    places: &[Place<'_>],
) -> Result<Chosen> {
    let names = &options.names;
    match (&names.gate, &names.up, &names.gate_up) {
        (Some(_), Some(_), None) | (None, None, Some(_)) => {
            let block = block_of(names);
            let (names, others) = (names.clone(), Vec::new());
            Ok(Chosen { names, found: None, block, prefix: None, others })
        }
        (None, None, None) => {
            let found = discover::discover(model, config, options, places)?;
            let replaced = names.clone().or(found.names);
            let convention = Some((found.convention, found.kind));
            Ok(Chosen {
                names: replaced,
                found: convention,
                block: found.block,
                prefix: Some(found.prefix),
                others: found.others,
            })
        }
        (Some(_), None, None) => {
            Err(contradiction(model, "gate given without up; name both, or gate_up".into()))
        }
        (None, Some(_), None) => {
            Err(contradiction(model, "up given without gate; name both, or gate_up".into()))
        }
        _ => Err(contradiction(model, "gate_up given together with gate or up".into())),
    }
}

/// Which of the layer's blocks it is, for what a configuration says of some of them.
pub(super) fn blocks_of(names: &TensorNames, found: Option<(&'static Convention, Kind)>) -> Blocks {
    let of_name = || names.given().find_map(|n| names::classify(n).first().map(|p| p.kind));
    match found.map(|(_, kind)| kind).or_else(of_name) {
        Some(Kind::Dense) => Blocks::All,
        Some(Kind::Shared) => Blocks::Shared,
        Some(Kind::Expert(_) | Kind::Stack) => Blocks::Experts,
        None if names.given().any(|n| n.contains("shared")) => Blocks::Shared,
        None if names.given().any(|n| n.contains("exp")) => Blocks::Experts,
        None => Blocks::All,
    }
}

/// What the given names have in common up to a dot: the block, where they are of one.
fn block_of(names: &TensorNames) -> String {
    if let Some(place) = names.given().find_map(|n| names::classify(n).into_iter().next()) {
        return place.block.to_owned();
    }
    let mut given = names.given();
    let first = given.next().unwrap_or_default();
    let common = given.fold(first, |common, name| {
        let same = common.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        common.get(..same).unwrap_or_default()
    });
    match common.rfind('.') {
        Some(dot) => common[..=dot].to_owned(),
        None => String::new(),
    }
}

/// Refuses names to ignore that are neither a key of the configuration nor a tensor.
pub(super) fn expect_known(model: &Model, config: &Config, ignored: &[String]) -> Result<()> {
    let names = model.names();
    let unknown = |name: &&String| {
        names.binary_search(&name.as_str()).is_err() && !config.has(name) && !family::is_key(name)
    };
    match ignored.iter().find(unknown) {
        Some(name) => Err(FormatError::Contradiction {
            path: model.path().to_owned(),
            what: "LoadOptions::with_ignored",
            why: format!("{name} is neither a key of the configuration nor a tensor"),
        }),
        None => Ok(()),
    }
}

/// Refuses a configuration that may say something about the block that is not understood, or that asks
/// for what is not computed here.
pub(super) fn expect_understood(
    config: &Config,
    scope: &Scope<'_>,
    family: Option<&'static Family>,
    layer: usize,
    options: &LoadOptions,
) -> Result<()> {
    for effect in family.map_or(&[][..], |f| f.effects) {
        let &Effect::Refused(key, why) = effect else { continue };
        let stated = scope.get(key);
        // A list has a value for each layer.
        let changes = match &stated {
            Some((_, Value::Array(layers))) => {
                layers.get(layer).is_some_and(|v| !family::is_neutral(v))
            }
            Some((_, value)) => !family::is_neutral(value),
            None => false,
        };
        let (path, value) = stated.map_or((key.to_owned(), &Value::Null), |stated| stated);
        if changes && !options.ignore.iter().any(|i| *i == path || i == key) {
            let value = clip(&value.to_string(), 100);
            let (file, key) = (config.path().to_owned(), path);
            return Err(FormatError::NotComputed { path: file, key, value, why });
        }
    }
    match family::not_understood(family, scope, &options.ignore) {
        Some((key, value)) => {
            let value = clip(&value, 100);
            let (path, key) = (config.path().to_owned(), clip(&key, 200));
            Err(FormatError::NotUnderstood { path, key, value })
        }
        None => Ok(()),
    }
}

/// Refuses a block of which a tensor is not used.
pub(super) fn expect_used(
    model: &Model,
    (Chosen { names, found, block, .. }, rows): (&Chosen, &Found),
    family: Option<&'static Family>,
    options: &LoadOptions,
) -> Result<()> {
    // Next to a layer's number stand its other parts too, and these have no name for the block.
    if block.is_empty() || names::is_layer(block) {
        return Ok(());
    }
    let weights: Vec<&str> = [&names.gate, &names.up, &names.gate_up, &names.down]
        .into_iter()
        .flatten()
        .map(String::as_str)
        .collect();
    let own: Vec<Kind> = match found {
        Some((_, kind)) => vec![*kind],
        None => weights.iter().flat_map(|n| names::classify(n)).map(|p| p.kind).collect(),
    };
    let is_gguf = model.format() == FileFormat::Gguf;
    // What stands beside codes is looked at with them, and so is a factor of GGUF.
    let mut looked_at: Vec<&str> = rows.names().collect();
    for weight in &weights {
        let coded = scales::is_coded(&model.tensor(weight)?);
        let rests = |rest: &str| if is_gguf { rest.ends_with("scale") } else { coded };
        let beside = Beside::new(model, weight);
        looked_at.extend(beside.names(|rest| rest != "bias" && rests(rest)));
    }
    for name in model.names_with(block) {
        let rest = &name[block.len()..];
        let given = names.given().any(|n| n == name) || options.ignore.iter().any(|i| i == name);
        // Of another expert, of the dense block beside experts, or the down projection that a caller left out.
        let elsewhere = || {
            let places = names::classify(name);
            let is = |p: &Place<'_>| {
                !own.contains(&p.kind) || p.role == Role::Down && names.down.is_none()
            };
            !places.is_empty() && places.iter().all(is)
        };
        if given || looked_at.contains(&name) || elsewhere() {
            continue;
        }
        if let Some(why) = family::unused(family, rest, is_gguf) {
            let (path, tensor) = (model.path().to_owned(), clip(name, 200));
            return Err(FormatError::Unused { path, tensor, why });
        }
    }
    Ok(())
}
