//! Options that say which layer of which file, and how to read it.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use swiglu::{Arrangement, LoadOptions, MlpWeights, Orientation, TensorNames};
use swiglu_lab::CaseOp;

use crate::args::whole;

#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Weights")]
pub(crate) struct WeightArgs {
    /// A safetensors file, its index, a GGUF file, or a directory with a model in it
    #[arg(long, value_name = "FILE")]
    pub(crate) weights: Option<PathBuf>,
    /// The layer's number [default: 0]
    #[arg(long, value_name = "N", requires = "weights", value_parser = whole(0..=usize::MAX))]
    layer: Option<usize>,
    /// The expert, where the layer has several
    #[arg(long, value_name = "E", requires = "weights", value_parser = whole(0..=usize::MAX))]
    expert: Option<usize>,
    /// Which dimension of the weights is the row: out-in or in-out
    #[arg(long, value_name = "NAME", requires = "weights")]
    pub(crate) orientation: Option<Orientation>,
    /// How gate and up share a tensor: separate, gate-first, up-first or interleaved-G
    #[arg(long, value_name = "NAME", requires = "weights")]
    pub(crate) arrangement: Option<Arrangement>,
    /// The block beside the layer's experts: the shared one, or a dense one
    #[arg(long, requires = "weights", conflicts_with = "expert")]
    beside_experts: bool,
    /// What tensor names start with before the layer, where several parts of a model have it
    #[arg(long, value_name = "TEXT", requires = "weights")]
    prefix: Option<String>,
    /// A key of the configuration or a tensor of the block to compute without; may be repeated
    #[arg(long, value_name = "NAME", requires = "weights")]
    ignore: Vec<String>,
    /// Compute h smaller by so many powers of two, which the down weights undo: half precision may hold it
    #[arg(long, value_name = "N", requires = "weights", value_parser = whole(-64..=64))]
    rescale: Option<i32>,
    /// Do without the config.json beside the weights
    #[arg(long, requires = "weights")]
    no_config: bool,
    /// Weights of 8 bits (F8_E4M3, F8_E5M2) without scales are a plain cast: take the codes' values
    #[arg(long, requires = "weights")]
    plain_fp8: bool,
    #[command(flatten)]
    #[serde(skip)]
    names: NameArgs,
}

#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Tensor names, for files that follow no known convention")]
struct NameArgs {
    /// The gate weight
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_name: Option<String>,
    /// The up weight
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    up_name: Option<String>,
    /// Gate and up weights in one tensor
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_up_name: Option<String>,
    /// The down weight
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    down_name: Option<String>,
    /// The gate's bias
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_bias_name: Option<String>,
    /// The up projection's bias
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    up_bias_name: Option<String>,
    /// Both biases in one tensor
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_up_bias_name: Option<String>,
    /// The down projection's bias
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    down_bias_name: Option<String>,
}

type Switch = fn(&mut LoadOptions) -> &mut bool;

/// Options that mean nothing to a layer which is read without them, and what they are for.
const SWITCHES: [(&str, &str, Switch); 2] = [
    ("--beside-experts", "layers with experts", |options| &mut options.beside_experts),
    ("--plain-fp8", "weights of 8 bits without scales", |options| &mut options.plain_fp8),
];

/// Has quantised weights decoded where that is asked for; refuses it where there are none.
pub(crate) fn decoded(asked: bool, weights: MlpWeights, op: CaseOp) -> Result<MlpWeights> {
    match asked {
        false => Ok(weights),
        true if op.op().is_some_and(|op| weights.is_quantized(op)) => Ok(weights.decoded()),
        true => bail!("--decode-weights: the weights are not quantised; leave it out"),
    }
}

impl WeightArgs {
    /// The layer in the file, if one was named.
    pub(crate) fn load(&self) -> Result<Option<MlpWeights>> {
        let Some(path) = &self.weights else { return Ok(None) };
        self.expect_looked_for()?;
        let n = self.names.clone();
        let mut names = TensorNames::default();
        names.gate = n.gate_name;
        names.up = n.up_name;
        names.down = n.down_name;
        names.gate_up = n.gate_up_name;
        names.gate_bias = n.gate_bias_name;
        names.up_bias = n.up_bias_name;
        names.gate_up_bias = n.gate_up_bias_name;
        names.down_bias = n.down_bias_name;
        let mut options = LoadOptions::new(self.layer.unwrap_or(0))
            .with_expert(self.expert)
            .with_names(names)
            .with_orientation(self.orientation)
            .with_arrangement(self.arrangement)
            .with_rescale(self.rescale.unwrap_or(0));
        options.beside_experts = self.beside_experts;
        options.prefix.clone_from(&self.prefix);
        options.ignore.clone_from(&self.ignore);
        options.no_config = self.no_config;
        options.plain_fp8 = self.plain_fp8;
        let weights = swiglu::Mlp::load_with(path, &options)?;
        for (option, of, switch) in SWITCHES {
            let mut without = options.clone();
            let given = std::mem::take(switch(&mut without));
            if given && swiglu::Mlp::load_with(path, &without).is_ok() {
                bail!("{option} is for {of}; this layer is the same without it: leave it out");
            }
        }
        Ok(Some(weights))
    }

    /// Refuses what a layer is looked for by where its tensors are named. A layer's number that no name has may decide what
    /// the configuration says of it.
    fn expect_looked_for(&self) -> Result<()> {
        let NameArgs { gate_name, gate_up_name, .. } = &self.names;
        let names = [("--gate-name", gate_name), ("--gate-up-name", gate_up_name)];
        let mut named =
            names.into_iter().filter_map(|(option, name)| Some((option, name.as_ref()?)));
        let Some((option, name)) = named.next() else { return Ok(()) };
        let is_numbered = name.split('.').any(|part| part.parse::<usize>().is_ok());
        let layer = self.layer.filter(|_| is_numbered).map(|layer| format!("--layer {layer}"));
        let prefix = self.prefix.as_ref().map(|prefix| format!("--prefix {prefix}"));
        match layer.or(prefix) {
            Some(given) => {
                bail!("{given}: nothing is looked for beside {option} {name}; leave one out")
            }
            None => Ok(()),
        }
    }

    /// An option that was given and means nothing without a file. Where the file conflicts with what
    /// was given instead of it, `requires` above is not heeded.
    pub(crate) fn of_a_file(&self) -> Option<String> {
        let given = serde_json::to_value((self, &self.names)).ok()?;
        let options = given.as_array()?.iter().filter_map(Value::as_object).flatten();
        let of_both = ["weights", "orientation", "arrangement"];
        let mut given = options.filter(|(name, value)| {
            let absent =
                value.is_null() || *value == false || value.as_array().is_some_and(Vec::is_empty);
            !absent && !of_both.contains(&name.as_str())
        });
        given.next().map(|(name, _)| format!("--{name}"))
    }
}
