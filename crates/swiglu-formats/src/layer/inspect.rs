//! What a model holds, without computing: its blocks, their activation, and what would be refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::names::{Kind, Place, Role};
use super::{LayerWeights, LoadOptions, discover, load_placed, row_blocks};
use crate::config::Config;
use crate::error::{Result, clip, ranges};
use crate::family::Family;
use crate::model::Model;

/// What a model holds.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Inspection {
    /// The file that was opened.
    pub path: PathBuf,
    /// Its format.
    pub format: String,
    /// Where the model says what it is; none where it does not.
    pub configuration: Option<PathBuf>,
    /// Its `model_type` or architecture.
    pub architecture: Option<String>,
    /// Its family in the table of families.
    pub family: Option<&'static str>,
    /// Tensors in all its files.
    pub tensors: usize,
    /// Its gated feed-forward blocks: layers that are alike are one entry.
    pub blocks: Vec<Block>,
    /// What cannot be read, wherever it is: entries of an index that name no file, files that are not there.
    pub defects: Vec<String>,
    /// Why no layer can be loaded; none if there is a block.
    pub refused: Option<String>,
}

/// Blocks of several layers that are alike.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Block {
    /// What tensor names start with before the layer.
    pub prefix: String,
    /// The layers, as ranges: `0 to 31`.
    pub layers: String,
    /// `dense`, `experts` or `shared`.
    pub kind: &'static str,
    /// How many experts; none of a block that has none, or whose stack could not be read.
    pub experts: Option<usize>,
    /// Their numbers, as ranges, where each has tensors of its own: an expert unlike the others of its layer is a
    /// block by itself.
    pub numbers: Option<String>,
    /// What was read of it; none if it is refused.
    #[serde(flatten)]
    pub contents: Option<Contents>,
    /// Why it is refused, and what overrides that.
    pub refused: Option<String>,
}

/// What a block is, as it would be loaded.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct Contents {
    /// K.
    pub hidden: usize,
    /// H.
    pub intermediate: usize,
    /// How gate and up are stored.
    pub layout: String,
    /// The naming convention.
    pub names: &'static str,
    /// Element types of gate and up, and of down.
    pub types: Vec<String>,
    /// Weights that are multiplied by a factor, which file or configuration state.
    pub factors: Vec<String>,
    /// Whether there is a down weight: without one it is a gated linear layer alone.
    pub down: bool,
    /// What is computed from whole rows between the products; none of most blocks.
    pub row_steps: Option<String>,
    /// Which of gate, up and down have a bias.
    pub biases: Vec<&'static str>,
    /// The activation; none if the model says nothing that fixes one.
    pub activation: Option<String>,
    /// Where that was read, or why it is not known.
    pub activation_source: String,
    /// What is good to know: what the model does to the block's result.
    pub notes: Vec<String>,
}

impl Contents {
    fn of(layer: &LayerWeights) -> Self {
        let mut types: Vec<String> = Vec::new();
        for weight in layer.stored_gate_up().iter().chain(layer.stored_down()) {
            let name = weight.stored.to_string();
            if !types.contains(&name) {
                types.push(name);
            }
        }
        let weights = layer.stored_gate_up().iter().chain(layer.stored_down());
        let factors = weights.filter(|w| w.factor() != 1.0);
        let biases =
            [("gate", layer.gate_bias()), ("up", layer.up_bias()), ("down", layer.down_bias())];
        let (activation, activation_source) = match layer.activation() {
            Ok((activation, source)) => (Some(activation.to_string()), source.to_string()),
            Err(error) => (None, error.to_string()),
        };
        let steps = layer.row_params().steps;
        Self {
            hidden: layer.hidden(),
            intermediate: layer.intermediate(),
            layout: layer.layout().to_string(),
            names: layer.convention,
            types,
            factors: factors.map(|w| format!("{} × {}", clip(&w.name, 100), w.factor())).collect(),
            down: layer.stored_down().is_some(),
            row_steps: (!steps.is_none()).then(|| steps.to_string()),
            biases: biases.into_iter().filter_map(|(name, bias)| bias.map(|_| name)).collect(),
            activation,
            activation_source,
            notes: layer.notes().to_vec(),
        }
    }
}

/// Says what a model holds: every block of every layer is looked at as loading it would, and nothing is
/// decoded.
///
/// # Errors
/// Any [`crate::FormatError`] of opening the model or its configuration. What is wrong with its layers is
/// in the [`Inspection`].
pub fn inspect(path: &Path, options: &LoadOptions) -> Result<Inspection> {
    let model = Model::open(path)?;
    let none = Config::none(model.path());
    let config = if options.no_config { &none } else { model.config()? };
    super::block::expect_known(&model, config, &options.ignore)?;
    let config = &config.without(&options.ignore);
    let places = discover::places(&model, config);
    let mut layers: BTreeMap<(&str, &'static str, usize), Vec<Place<'_>>> = BTreeMap::new();
    for place in &places {
        let key = (place.prefix, name(place.kind), place.layer);
        layers.entry(key).or_default().push(*place);
    }
    // A down projection alone has a name that ungated blocks have too.
    layers.retain(|_, of_layer| of_layer.iter().any(|p| p.role != Role::Down));
    let beside: BTreeSet<(&str, usize)> = layers
        .keys()
        .filter(|(_, kind, _)| *kind == EXPERTS)
        .map(|&(prefix, _, layer)| (prefix, layer))
        .collect();
    let mut alike: BTreeMap<_, (Vec<usize>, Option<String>)> = BTreeMap::new();
    for ((prefix, kind, layer), of_layer) in &layers {
        for (numbers, of_layer) in experts_alike(&model, of_layer) {
            let expert = numbers.first().copied();
            let one = LoadOptions {
                layer: *layer,
                prefix: Some((*prefix).to_owned()),
                expert: (*kind == EXPERTS).then(|| expert.unwrap_or(0)),
                beside_experts: *kind != EXPERTS && beside.contains(&(*prefix, *layer)),
                ..options.clone()
            };
            let loaded = load_placed(&model, config, &one, &places);
            let (contents, refused) = match &loaded {
                Ok(layer) => (Some(Contents::of(layer)), None),
                Err(error) => (None, Some(clip(&error.to_string(), 600))),
            };
            // The layer's number in a refusal makes no other of it.
            let why = refused.as_ref().map(|why| {
                why.replace(&format!(".{layer}."), ".N.")
                    .replace(&format!("layer {layer} "), "layer N ")
            });
            let count = match expert {
                Some(_) => Some(numbers.len()),
                None => stacked(&model, config, &of_layer),
            };
            let numbers = expert.map(|_| ranges(numbers));
            let key = (*prefix, *kind, count, numbers, contents, why);
            alike.entry(key).or_insert_with(|| (Vec::new(), refused)).0.push(*layer);
        }
    }
    let mut blocks: Vec<(usize, Block)> = alike
        .into_iter()
        .map(|((prefix, kind, experts, numbers, contents, _), (layers, refused))| {
            let first = layers.first().copied().unwrap_or_default();
            let (prefix, layers) = (prefix.to_owned(), ranges(layers));
            (first, Block { prefix, layers, kind, experts, numbers, contents, refused })
        })
        .collect();
    // Of a layer's experts those first that are most.
    let order = |(first, b): &(usize, Block)| {
        (b.prefix.clone(), *first, b.kind, std::cmp::Reverse(b.experts), b.numbers.clone())
    };
    blocks.sort_by_cached_key(order);
    let scope = config.scope(places.first().map_or("", |p| p.block));
    let refused = match blocks.is_empty() {
        true => load_placed(&model, config, options, &places).err().map(|e| e.to_string()),
        false => None,
    };
    Ok(Inspection {
        path: model.path().to_owned(),
        format: model.format().to_string(),
        configuration: config.is_present().then(|| config.path().to_owned()),
        architecture: scope.model_types().first().map(|name| (*name).to_owned()),
        family: Family::of(&scope).map(|family| family.name),
        tensors: model.names().len(),
        blocks: blocks.into_iter().map(|(_, block)| block).collect(),
        defects: model.defects().iter().map(|defect| clip(defect, 400)).collect(),
        refused,
    })
}

const EXPERTS: &str = "experts";

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Dense => "dense",
        Kind::Shared => "shared",
        Kind::Expert(_) | Kind::Stack => EXPERTS,
    }
}

/// The places of a layer by what its experts have in common, with the numbers of these; those of one that is no
/// numbered expert as they are. A file may have thousands: each is looked at, and of those that are alike one is
/// loaded.
fn experts_alike<'m>(model: &Model, of_layer: &[Place<'m>]) -> Vec<(Vec<usize>, Vec<Place<'m>>)> {
    let mut experts: BTreeMap<usize, Vec<Place<'m>>> = BTreeMap::new();
    for place in of_layer {
        if let Kind::Expert(number) = place.kind {
            experts.entry(number).or_default().push(*place);
        }
    }
    if experts.is_empty() {
        return vec![(Vec::new(), of_layer.to_vec())];
    }
    let mut alike: BTreeMap<Vec<String>, (Vec<usize>, Vec<Place<'m>>)> = BTreeMap::new();
    for (number, places) in experts {
        let (numbers, all) = alike.entry(tensors(model, &places)).or_default();
        numbers.push(number);
        all.extend(places);
    }
    alike.into_values().collect()
}

/// The tensors of an expert as far as they can differ without being decoded: what follows the expert's number
/// in their names, types and shapes.
fn tensors(model: &Model, places: &[Place<'_>]) -> Vec<String> {
    let blocks: BTreeSet<&str> = places.iter().map(|p| p.block).collect();
    let named = blocks.iter().flat_map(|block| {
        let own: Vec<&str> = match block.ends_with('.') {
            true => model.names_with(block),
            // Of GGUF, where the number follows the role.
            false => places.iter().map(|p| p.name).collect(),
        };
        own.into_iter().map(|name| (&name[block.len()..], name))
    });
    let said = named.map(|(rest, name)| match model.tensor(name) {
        Ok(tensor) => format!("{} {} {:?}", unnumbered(rest), tensor.stored, tensor.shape),
        Err(error) => format!("{} {}", unnumbered(rest), error.to_string().replace(name, "")),
    });
    said.collect()
}

fn unnumbered(rest: &str) -> String {
    let parts = rest.split('.').filter(|part| !part.bytes().all(|b| b.is_ascii_digit()));
    parts.collect::<Vec<_>>().join(".")
}

/// The experts of a stack.
fn stacked(model: &Model, config: &Config, places: &[Place<'_>]) -> Option<usize> {
    let stack = places.iter().find(|p| p.kind == Kind::Stack)?;
    let mut tensor = model.tensor(stack.name).ok()?;
    if stack.convention.row_blocks {
        let rows = row_blocks::rows(model, &config.scope(stack.block), stack.name).ok()?;
        tensor = row_blocks::stacked(model, tensor, rows).ok()?;
    }
    tensor.shape.first().copied()
}
