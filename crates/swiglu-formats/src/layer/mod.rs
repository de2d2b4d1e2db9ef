//! A gated feed-forward layer: found by naming convention or explicit names, with its layout.

mod agree;
mod beside;
mod block;
mod discover;
mod factors;
mod foreign;
mod inspect;
mod layout;
mod mxfp4;
mod names;
mod row_blocks;
mod rows;
mod scales;
mod ungated;
mod weights;

use std::path::Path;

use swiglu_core::{Arrangement, Half, Orientation, WeightLayout};

use crate::bytes::Bytes;
use crate::config::Config;
use crate::error::{FormatError, Result, clip, list};
use crate::family::{self, Blocks, Family};
use crate::model::{FileFormat, Model};
use crate::tensor::Tensor;
use block::{Chosen, blocks_of, choose_names, expect_understood, expect_used};
pub use inspect::{Block, Contents, Inspection, inspect};
use layout::{BiasOf, Shapes};
use names::Place;
use scales::weight;
use weights::Bias;
pub use weights::LayerWeights;

/// What a layer is found by whose tensors the caller names.
const EXPLICIT: &str = "explicit names";

/// Which layer to load, and what its file does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The layer's number, as tensor names count it.
    pub layer: usize,
    /// The expert, where the layer has several.
    pub expert: Option<usize>,
    /// Whether the block beside the layer's experts is meant: the shared expert, or a dense block.
    pub beside_experts: bool,
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
    /// Powers of two by which the up weights are made smaller and the down weights larger: the same result
    /// from a smaller h, which may else exceed half precision.
    pub rescale: i32,
    /// Whether weights of 8 bits (F8_E4M3, F8_E5M2) that have no scales beside them are a plain cast: the
    /// values are those of the codes.
    pub plain_fp8: bool,
}

impl LoadOptions {
    /// A layer by its number, as tensor names count it.
    pub fn new(layer: usize) -> Self {
        Self { layer, ..Self::default() }
    }

    swiglu_core::setters! {
        /// Another layer.
        with_layer(layer: usize);
        /// The expert, where the layer has several.
        with_expert(expert: impl Into<Option<usize>>, expert.into());
        /// Explicit tensor names.
        with_names(names: TensorNames);
        /// Which dimension of the weights is the row.
        with_orientation(orientation: impl Into<Option<Orientation>>, orientation.into());
        /// How gate and up share a packed tensor.
        with_arrangement(arrangement: impl Into<Option<Arrangement>>, arrangement.into());
        /// K, where neither file nor names decide the orientation.
        with_hidden(hidden: impl Into<Option<usize>>, hidden.into());
        /// What tensor names start with before the layer.
        with_prefix(prefix: impl Into<String>, Some(prefix.into()));
        /// Makes the up weights smaller and the down weights larger by so many powers of two.
        with_rescale(rescale: i32);
    }

    /// The block beside the layer's experts.
    #[must_use]
    pub fn with_beside_experts(self) -> Self {
        Self { beside_experts: true, ..self }
    }

    /// Computes without a key of the configuration, or a tensor of the block; also for several of them.
    #[must_use]
    pub fn with_ignored(mut self, name: impl Into<String>) -> Self {
        self.ignore.push(name.into());
        self
    }

    /// Does without the model's configuration.
    #[must_use]
    pub fn without_config(self) -> Self {
        Self { no_config: true, ..self }
    }

    /// Takes weights of 8 bits that have no scales for a plain cast.
    #[must_use]
    pub fn with_plain_fp8(self) -> Self {
        Self { plain_fp8: true, ..self }
    }
}

/// Explicit tensor names. With `gate` and `up`, or `gate_up`, only the named tensors are used;
/// otherwise each name replaces what the convention would find.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
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
    swiglu_core::setters! {
        /// The gate weight.
        with_gate(gate: impl Into<String>, Some(gate.into()));
        /// The up weight.
        with_up(up: impl Into<String>, Some(up.into()));
        /// The down weight.
        with_down(down: impl Into<String>, Some(down.into()));
        /// Gate and up weights in one tensor.
        with_gate_up(gate_up: impl Into<String>, Some(gate_up.into()));
        /// The gate's bias.
        with_gate_bias(gate_bias: impl Into<String>, Some(gate_bias.into()));
        /// The up projection's bias.
        with_up_bias(up_bias: impl Into<String>, Some(up_bias.into()));
        /// Both biases in one tensor.
        with_gate_up_bias(gate_up_bias: impl Into<String>, Some(gate_up_bias.into()));
        /// The down projection's bias.
        with_down_bias(down_bias: impl Into<String>, Some(down_bias.into()));
    }

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
    block::expect_known(model, config, &options.ignore)?;
    let config = &config.without(&options.ignore);
    load_placed(model, config, options, &discover::places(model, config))
}

/// Loads a layer of a model whose tensors' places are known: they are the same for all layers.
fn load_placed(
    model: &Model,
    config: &Config,
    options: &LoadOptions,
    places: &[Place<'_>],
) -> Result<LayerWeights> {
    let chosen = choose_names(model, config, options, places).map_err(|e| model.explain(e))?;
    let Chosen { names, found, block, prefix, others } = &chosen;
    let found = *found;
    let scope = config.scope(block);
    let family = Family::of(&scope);
    let number = names.given().find_map(names::layer_of).unwrap_or(options.layer);
    expect_understood(config, &scope, family, number, options)?;
    let in_rows = found.is_some_and(|(convention, _)| convention.row_blocks);
    let rows = match names.gate.as_ref().filter(|_| in_rows) {
        Some(gate) => row_blocks::rows(model, &scope, gate)?,
        None => None,
    };
    let gate_up = match (&names.gate_up, &names.gate, &names.up) {
        (Some(both), ..) => vec![weight(model, both, rows, options)?],
        (None, Some(gate), Some(up)) => {
            vec![weight(model, gate, rows, options)?, weight(model, up, rows, options)?]
        }
        // `choose_names` gives one of the two.
        _ => Vec::new(),
    };
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
        Some(name) => Some(weight(model, name, rows, options)?),
        None if found.is_some() => model.none("the down weight")?,
        None => None,
    };
    let rows = rows::find(model, config, (&scope, family), (&chosen, number), options)?;
    expect_used(model, (&chosen, &rows), family, options)?;
    let packed = gate_up.len() == 1;
    let known = layout::known(model, found, family, names);
    let architecture = scope.model_types().first().copied();
    let arrangement = layout::arrange(
        model,
        packed.then_some(gate.name.as_str()),
        options.arrangement,
        known.arrangement,
        architecture,
    )?;
    let biases = load_biases(model, names, options.expert, packed)?;
    // The model's own hidden size speaks for the layers of its language model. Tensors that a
    // caller picked may be of another part, and a caller who states the orientation knows best.
    let picked = found.is_none() && known.orientation.is_some();
    let described = prefix.as_deref().is_none_or(agree::is_described);
    let stated_hidden = match options.orientation {
        None if !picked && described => agree::stated_hidden(config, &scope)?,
        _ => None,
    };
    let shapes = Shapes {
        gate,
        packed,
        down_transposed: in_rows,
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

    let blocks = blocks_of(names, found);
    if let (Some(prefix), Some((_, kind))) = (prefix, found) {
        let found = agree::Found {
            config,
            scope: &scope,
            family,
            prefix,
            layer: number,
            kind,
            blocks,
            options,
        };
        found.expect_size(&gate.name, intermediate)?;
        found.expect_biases(names)?;
    }
    let activation = family::stated_activation(family, &scope, number, blocks, config.is_present());
    let mut layer = LayerWeights {
        path: model.path().to_owned(),
        format: model.format(),
        architecture: architecture.map(str::to_owned),
        family: family.map(|f| f.name),
        activation,
        config: config.path().to_owned(),
        convention: found.map_or(EXPLICIT, |(convention, _)| convention.name),
        layer: options.layer,
        expert: options.expert,
        layout: WeightLayout { orientation, arrangement },
        hidden,
        intermediate,
        gate_up,
        down,
        down_orientation: if in_rows { transposed(orientation) } else { orientation },
        gate_bias: None,
        up_bias: None,
        down_bias: None,
        rows: rows.checked(model, intermediate)?,
        rescale: 0,
        notes: notes(model, block, blocks, prefix.as_deref(), others),
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
    factors::apply(layer, config, &scope, family, options.rescale)
}

/// What is good to know of a layer that is computed.
fn notes(
    model: &Model,
    block: &str,
    blocks: Blocks,
    prefix: Option<&str>,
    others: &[String],
) -> Vec<String> {
    let mut out = Vec::new();
    if let (Some(prefix), false) = (prefix, others.is_empty()) {
        let shown = |prefix: &str| match prefix.trim_end_matches('.') {
            "" => "(none)".to_owned(),
            prefix => clip(prefix, 100),
        };
        let others: Vec<String> = others.iter().map(|other| shown(other)).collect();
        out.push(format!(
            "this is the layer of the part {}; {} too has one of this number: LoadOptions::with_prefix takes it",
            shown(prefix),
            list(others.iter().map(String::as_str), 6)
        ));
    }
    let of_hugging_face = block.strip_suffix('.').map(|block| format!("{block}_gate."));
    let gates =
        [of_hugging_face, block.strip_suffix("ffn_").map(|b| format!("{b}ffn_gate_inp_shexp."))];
    let mut gates = gates.into_iter().flatten().flat_map(|prefix| model.names_with(&prefix));
    if blocks == Blocks::Shared && gates.next().is_some() {
        let gate = if model.format() == FileFormat::Gguf {
            "ffn_gate_inp_shexp"
        } else {
            "shared_expert_gate"
        };
        out.push(format!(
            "{gate} is outside the block and not applied: the model multiplies the result by its sigmoid"
        ));
    }
    out
}

fn transposed(orientation: Orientation) -> Orientation {
    match orientation {
        Orientation::OutIn => Orientation::InOut,
        Orientation::InOut => Orientation::OutIn,
    }
}

fn contradiction(model: &Model, why: String) -> FormatError {
    FormatError::Contradiction { path: model.path().to_owned(), what: "tensor names", why }
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
