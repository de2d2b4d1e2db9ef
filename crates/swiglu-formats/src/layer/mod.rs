//! A gated feed-forward layer: found by naming convention or explicit names, with its layout.

mod beside;
mod discover;
mod foreign;
mod layout;
mod mxfp4;
mod names;
mod scales;
mod weights;

use std::path::Path;

use serde_json::Value;
use swiglu_core::{Arrangement, Half, Orientation, WeightLayout};

use crate::bytes::Bytes;
use crate::config::{Config, Scope};
use crate::error::{FormatError, Result, clip};
use crate::family::{self, Blocks, Effect, Family};
use crate::model::{FileFormat, Model};
use crate::tensor::Tensor;
use beside::Beside;
use layout::{BiasOf, Shapes};
use names::{Convention, Kind};
use scales::weight;
use weights::Bias;
pub use weights::LayerWeights;

/// Which layer to load, and what its file does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// The layer's number, as tensor names count it.
    pub layer: usize,
    /// The expert, where the layer has several.
    pub expert: Option<usize>,
    /// Tensor names, for files that follow no convention.
    pub names: TensorNames,
    /// Which dimension of the weights is the row; overrides what names imply.
    pub orientation: Option<Orientation>,
    /// How gate and up share a packed tensor; overrides what the architecture implies.
    pub arrangement: Option<Arrangement>,
    /// K, where neither file nor names decide the orientation but the hidden size does.
    pub hidden: Option<usize>,
    /// What tensor names start with before the layer, where several parts of a model have it:
    /// `encoder` or `decoder`.
    pub prefix: Option<String>,
    /// Keys of the configuration and tensors of the block to compute without, which would else be refused.
    pub ignore: Vec<String>,
    /// Whether to do without the model's configuration.
    pub no_config: bool,
    /// Whether weights of 8 bits (F8_E4M3, F8_E5M2) that have no scales beside them are a plain cast: the
    /// values are those of the codes.
    pub plain_fp8: bool,
}

/// Explicit tensor names. With `gate` and `up`, or `gate_up`, only the named tensors are used;
/// otherwise each name replaces what the convention would find.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorNames {
    /// The gate weight.
    pub gate: Option<String>,
    /// The up weight.
    pub up: Option<String>,
    /// The down weight.
    pub down: Option<String>,
    /// Gate and up weights in one tensor.
    pub gate_up: Option<String>,
    /// The gate's bias.
    pub gate_bias: Option<String>,
    /// The up projection's bias.
    pub up_bias: Option<String>,
    /// Both biases in one tensor, arranged as the packed weight.
    pub gate_up_bias: Option<String>,
    /// The down projection's bias.
    pub down_bias: Option<String>,
}

impl TensorNames {
    fn fields(&self) -> [&Option<String>; 8] {
        let Self { gate, up, down, gate_up, gate_bias, up_bias, gate_up_bias, down_bias } = self;
        [gate, up, down, gate_up, gate_bias, up_bias, gate_up_bias, down_bias]
    }

    /// The names that are set.
    pub(crate) fn given(&self) -> impl Iterator<Item = &str> {
        self.fields().into_iter().flatten().map(String::as_str)
    }

    /// These names, and `other`'s where there are none.
    fn or(self, other: TensorNames) -> TensorNames {
        TensorNames {
            gate: self.gate.or(other.gate),
            up: self.up.or(other.up),
            down: self.down.or(other.down),
            gate_up: self.gate_up.or(other.gate_up),
            gate_bias: self.gate_bias.or(other.gate_bias),
            up_bias: self.up_bias.or(other.up_bias),
            gate_up_bias: self.gate_up_bias.or(other.gate_up_bias),
            down_bias: self.down_bias.or(other.down_bias),
        }
    }
}

/// Loads a layer from a safetensors file, an index of several, a directory with either under its
/// usual name, or a GGUF file. Files are mapped: nothing is decoded before it is asked for.
///
/// # Errors
/// Any [`FormatError`].
pub fn load_layer(path: &Path, options: &LoadOptions) -> Result<LayerWeights> {
    load_layer_from(&Model::open(path)?, options)
}

/// Loads a layer from a whole safetensors or GGUF file in memory.
///
/// # Errors
/// Any [`FormatError`].
pub fn load_layer_from_bytes(
    bytes: impl Into<Bytes>,
    options: &LoadOptions,
) -> Result<LayerWeights> {
    load_layer_from(&Model::from_bytes(&bytes.into())?, options)
}

/// Loads a layer from an open model: for several layers of one file.
///
/// # Errors
/// Any [`FormatError`].
pub fn load_layer_from(model: &Model, options: &LoadOptions) -> Result<LayerWeights> {
    let none = Config::none(model.path());
    let config = if options.no_config { &none } else { model.config()? };
    let Chosen { names, found, block } =
        choose_names(model, config, options).map_err(|e| model.explain(e))?;
    let scope = config.scope(&block);
    let family = Family::of(&scope);
    let number = names.given().find_map(names::layer_of).unwrap_or(options.layer);
    expect_understood(config, &scope, family, number, options)?;
    let [of_gate, of_down] = multipliers(config, &scope, family)?;
    let mut gate_up = match (&names.gate_up, &names.gate, &names.up) {
        (Some(both), ..) => vec![weight(model, both, options)?],
        (None, Some(gate), Some(up)) => {
            vec![weight(model, gate, options)?, weight(model, up, options)?]
        }
        // `choose_names` gives one of the two.
        _ => Vec::new(),
    };
    match gate_up.as_mut_slice() {
        [gate, _] => *gate = gate.clone().scaled_by(of_gate),
        _ if of_gate == 1.0 => {}
        _ => {
            let why = "a multiplier of the gate needs gate and up in two tensors";
            return Err(contradiction(model, why.into()));
        }
    }
    if let [gate, up] = gate_up.as_slice()
        && [gate.rows, gate.cols] != [up.rows, up.cols]
    {
        let expected = format!("[{}, {}] as {}", gate.rows, gate.cols, gate.name);
        let given = [up.rows, up.cols];
        return Err(FormatError::shape(model.path(), &up.name, expected, &given));
    }
    let Some(gate) = gate_up.first() else {
        return Err(contradiction(model, "no gate and up weights were named".into()));
    };
    let down = match &names.down {
        Some(name) => Some(weight(model, name, options)?.scaled_by(of_down)),
        None if found.is_some() => model.none("the down weight")?,
        None => None,
    };
    expect_used(model, &names, &block, (found, family), options)?;
    let packed = gate_up.len() == 1;
    let known = layout::known(model, found, family, &names);
    let architecture = scope.model_types().first().copied();
    let arrangement = layout::arrange(
        model,
        packed.then_some(gate.name.as_str()),
        options.arrangement,
        known.arrangement,
        architecture,
    )?;
    let mut biases = load_biases(model, &names, options.expert, packed)?;
    for (bias, _, place) in &mut biases {
        let (factor, weight) = match place {
            BiasPlace::Gate => (of_gate, gate_up.first()),
            BiasPlace::Up | BiasPlace::Both => (1.0, gate_up.last()),
            BiasPlace::Down => (of_down, down.as_ref()),
        };
        // A multiplier is of the whole product; of a factor beside a weight it is not said.
        if weight.is_some_and(|w| w.factor() != factor) {
            let why = format!("{} is there beside a factor of its weight", bias.name);
            return Err(contradiction(model, why));
        }
        bias.values.iter_mut().for_each(|v| *v *= factor);
    }
    // The model's own hidden size speaks for the layers of its language model. Tensors that a
    // caller picked may be of another part, and a caller who states the orientation knows best.
    let picked = found.is_none() && known.orientation.is_some();
    let stated_hidden = match options.orientation {
        None if !picked => scope.size(&HIDDEN),
        _ => None,
    };
    let shapes = Shapes {
        gate,
        packed,
        down: down.as_ref(),
        biases: biases.iter().map(|(b, of, _)| (b.name.as_str(), b.values.len(), *of)).collect(),
        hidden: options.hidden.or(stated_hidden),
    };
    let (orientation, hidden, intermediate) =
        shapes.orient(model, options.orientation, known.orientation)?;
    arrangement.validate(intermediate).map_err(|e| FormatError::Contradiction {
        path: model.path().to_owned(),
        what: "arrangement",
        why: format!("{arrangement} given for {}: {e}", gate.name),
    })?;

    let blocks = blocks_of(&names, found);
    let activation = family::stated_activation(family, &scope, number, blocks, config.is_present());
    let mut layer = LayerWeights {
        path: model.path().to_owned(),
        format: model.format(),
        architecture: architecture.map(str::to_owned),
        family: family.map(|f| f.name),
        activation,
        config: config.path().to_owned(),
        convention: found.map_or("explicit names", |(convention, _)| convention.name),
        layer: options.layer,
        expert: options.expert,
        layout: WeightLayout { orientation, arrangement },
        hidden,
        intermediate,
        gate_up,
        down,
        gate_bias: None,
        up_bias: None,
        down_bias: None,
    };
    for (bias, _, place) in biases {
        match place {
            BiasPlace::Gate => layer.gate_bias = Some(bias),
            BiasPlace::Up => layer.up_bias = Some(bias),
            BiasPlace::Down => layer.down_bias = Some(bias),
            BiasPlace::Both => {
                layer.gate_bias = Some(split(&bias, arrangement, Half::Gate, intermediate));
                layer.up_bias = Some(split(&bias, arrangement, Half::Up, intermediate));
            }
        }
    }
    Ok(layer)
}

fn contradiction(model: &Model, why: String) -> FormatError {
    FormatError::Contradiction { path: model.path().to_owned(), what: "tensor names", why }
}

/// Keys for K.
const HIDDEN: [&str; 5] = ["hidden_size", "embedding_length", "d_model", "n_embd", "dim"];

/// The tensors to load and what is known of their block.
struct Chosen {
    names: TensorNames,
    /// None where the caller named the tensors.
    found: Option<(&'static Convention, Kind)>,
    /// What the names of all tensors of the block start with; empty where that is not known.
    block: String,
}

fn choose_names(model: &Model, config: &Config, options: &LoadOptions) -> Result<Chosen> {
    let names = &options.names;
    match (&names.gate, &names.up, &names.gate_up) {
        (Some(_), Some(_), None) | (None, None, Some(_)) => {
            let block = block_of(names);
            Ok(Chosen { names: names.clone(), found: None, block })
        }
        (None, None, None) => {
            let found = discover::discover(model, config, options)?;
            let replaced = names.clone().or(found.names);
            let convention = Some((found.convention, found.kind));
            Ok(Chosen { names: replaced, found: convention, block: found.block })
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
fn blocks_of(names: &TensorNames, found: Option<(&'static Convention, Kind)>) -> Blocks {
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

/// What the configuration multiplies the gate's and the down projection's products by.
fn multipliers(
    config: &Config,
    scope: &Scope<'_>,
    family: Option<&'static Family>,
) -> Result<[f32; 2]> {
    let keys = family.map_or(&[][..], |f| f.effects).iter().filter_map(|effect| match *effect {
        Effect::Multipliers(key) => scope.get(key),
        _ => None,
    });
    let mut out = [1.0; 2];
    for (key, value) in keys {
        let of = |at: usize| value.get(at)?.as_f64().map(|m| m as f32).filter(|m| m.is_finite());
        let (Some(gate), Some(down)) = (of(0), of(1)) else {
            let path = config.path().to_owned();
            let why = format!("has `{key}` = {value}, expected two numbers, of gate and down");
            return Err(FormatError::Configuration { path, why: clip(&why, 200) });
        };
        out = [gate, down];
    }
    Ok(out)
}

/// Refuses a configuration that may say something about the block that is not understood, or that asks
/// for what is not computed here.
fn expect_understood(
    config: &Config,
    scope: &Scope<'_>,
    family: Option<&'static Family>,
    layer: usize,
    options: &LoadOptions,
) -> Result<()> {
    for effect in family.map_or(&[][..], |f| f.effects) {
        let &Effect::Refused(key, why, first) = effect else { continue };
        let stated = scope.get(key);
        // A list has a value for each layer.
        let changes = match &stated {
            Some((_, Value::Array(layers))) => {
                layers.get(layer).is_some_and(|v| !family::is_neutral(v))
            }
            Some((_, value)) => !family::is_neutral(value),
            None => layer < first,
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
fn expect_used(
    model: &Model,
    names: &TensorNames,
    block: &str,
    (found, family): (Option<(&'static Convention, Kind)>, Option<&'static Family>),
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
        Some((_, kind)) => vec![kind],
        None => weights.iter().flat_map(|n| names::classify(n)).map(|p| p.kind).collect(),
    };
    let is_gguf = model.format() == FileFormat::Gguf;
    // What stands beside codes is looked at with them, and so is a factor of GGUF.
    let mut looked_at: Vec<&str> = Vec::new();
    for weight in &weights {
        let coded = scales::is_coded(&model.tensor(weight)?);
        let rests = |rest: &str| if is_gguf { rest.ends_with("scale") } else { coded };
        let beside = Beside::new(model, weight);
        looked_at.extend(beside.names(|rest| rest != "bias" && rests(rest)));
    }
    for name in beside::with_prefix(&model.names(), block) {
        let rest = &name[block.len()..];
        let given = names.given().any(|n| n == name) || options.ignore.iter().any(|i| i == name);
        // Of another expert, or of the dense block beside experts.
        let elsewhere = || {
            let places = names::classify(name);
            !places.is_empty() && places.iter().all(|p| !own.contains(&p.kind))
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

/// One expert of a stack, or the tensor itself.
fn select(model: &Model, tensor: Tensor, rank: usize, expert: Option<usize>) -> Result<Tensor> {
    if tensor.shape.len() <= rank {
        return Ok(tensor);
    }
    match expert {
        Some(expert) => tensor.entry(expert, model.path()),
        None => Err(FormatError::Ambiguous {
            path: model.path().to_owned(),
            what: "the expert",
            why: format!("{} is a stack of shape {:?}", tensor.name, tensor.shape),
            choices: match tensor.shape[0].checked_sub(1) {
                Some(last) => format!("expert 0 to {last}"),
                None => "none, the stack is empty".into(),
            },
        }),
    }
}

#[derive(Clone, Copy)]
enum BiasPlace {
    Gate,
    Up,
    Both,
    Down,
}

fn load_biases(
    model: &Model,
    names: &TensorNames,
    expert: Option<usize>,
    packed: bool,
) -> Result<Vec<(Bias, BiasOf, BiasPlace)>> {
    if names.gate_up_bias.is_some() && (names.gate_bias.is_some() || names.up_bias.is_some()) {
        let why = "gate_up_bias given together with gate_bias or up_bias";
        return Err(contradiction(model, why.into()));
    }
    if names.gate_up_bias.is_some() && !packed {
        let why = "gate_up_bias needs the arrangement of a packed gate_up weight";
        return Err(contradiction(model, why.into()));
    }
    let mut out = Vec::new();
    for (name, of, place) in [
        (&names.gate_bias, BiasOf::Half, BiasPlace::Gate),
        (&names.up_bias, BiasOf::Half, BiasPlace::Up),
        (&names.gate_up_bias, BiasOf::Both, BiasPlace::Both),
        (&names.down_bias, BiasOf::Down, BiasPlace::Down),
    ] {
        let Some(name) = name else { continue };
        let tensor = select(model, model.tensor(name)?, 1, expert)?;
        if tensor.shape.len() != 1 {
            let expected = "one extent, or a stack of experts";
            return Err(FormatError::shape(model.path(), name, expected, &tensor.shape));
        }
        let values = tensor.to_vec_f32(model.path())?;
        out.push((Bias { name: name.clone(), values }, of, place));
    }
    Ok(out)
}

/// One half of a packed bias in feature order. Its length, 2H, was checked with the shapes.
fn split(bias: &Bias, arrangement: Arrangement, half: Half, intermediate: usize) -> Bias {
    let values = (0..intermediate)
        .map(|h| arrangement.locate(half, h, intermediate).1)
        .filter_map(|at| bias.values.get(at).copied())
        .collect();
    Bias { name: bias.name.clone(), values }
}
