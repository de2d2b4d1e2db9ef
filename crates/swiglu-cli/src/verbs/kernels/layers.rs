//! The layers that kernels are compiled for: of common models, of files, and of sizes.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use swiglu::{
    Activation, CoreError, DType, Numerics, Op, Problem, QuantizedType, QuantizedTypes,
    WeightLayout,
};
use swiglu_cuda::jit::Variant;
use swiglu_cuda::kernels::NamedVariant;
use swiglu_cuda::{Arch, Target, Ways, expect_quantized};
use swiglu_formats::{Contents, LoadOptions};
use swiglu_lab::CaseOp;

use crate::args::{activations, extents, layer_op, out_of_range, whole};
use crate::terminal::by_options;

#[derive(Debug, Args)]
#[command(next_help_heading = "What layers can need")]
#[command(group = ArgGroup::new("layers").multiple(true))]
pub(super) struct Layers {
    /// The layers of a model: a safetensors or GGUF file, an index, a directory with a model in it, or one of qwen2.5-0.5b,
    /// llama-3.2-1b, llama-3-8b, qwen2.5-32b, llama-3-70b; may be repeated
    #[arg(long = "for", value_name = "MODEL", group = "layers")]
    models: Vec<String>,
    /// A layer of so many input and intermediate features, for these numbers of tokens [default: all]; may be repeated
    #[arg(long, value_name = "K,H[,M,...]", group = "layers", value_parser = shape)]
    shape: Vec<Shape>,
    /// The operation [default: both]
    #[arg(long, value_name = "NAME", requires = "layers", value_parser = layer_op())]
    op: Option<CaseOp>,
    /// Element types, separated by commas [default: bf16]
    #[arg(long, value_name = "TYPES", value_delimiter = ',', requires = "layers")]
    dtype: Vec<DType>,
    #[arg(long, value_name = "NAME", requires = "layers", help = activations())]
    activation: Option<Activation>,
    /// With biases of gate and up, where sizes do not tell
    #[arg(long, requires = "layers")]
    bias: bool,
    /// What a tuner tries too, not only what is planned by the shipped records and the cost model
    #[arg(long, requires = "layers")]
    all_candidates: bool,
    /// Multiprocessors of the device, which tiles are fitted to [default: those of an A100 (sm_80), A40 (sm_86), Orin (sm_87),
    /// L40S (sm_89), H100 and H200 (sm_90a: 132), B200 (sm_100a), B300 (sm_103a), Thor (sm_110a), RTX 5090 (sm_120a), DGX
    /// Spark (sm_121a)]
    #[arg(long, value_name = "N", requires = "layers", value_parser = whole(1..=u32::MAX))]
    sms: Option<u32>,
}

/// K, H, and numbers of tokens, if not all.
type Shape = ([usize; 2], Vec<usize>);

fn shape(s: &str) -> Result<Shape, CoreError> {
    let numbers = extents(s)?;
    let expected = "input and intermediate features, and numbers of tokens if not all";
    match numbers[..] {
        [k, h, ref tokens @ ..] => Ok(([k, h], tokens.to_vec())),
        _ => Err(out_of_range("shape", s, expected)),
    }
}

/// A layer, and the numbers of tokens it is for, if not all.
pub(super) type Layer = (Problem, Option<Vec<usize>>);

impl Layers {
    pub(super) fn named(&self) -> Result<Vec<Layer>> {
        let of_size = |model: &String| named(model).is_some();
        if self.bias && self.shape.is_empty() && !self.models.iter().any(of_size) {
            bail!("--bias is of sizes: files say which biases they have; leave it out");
        }
        let mut layers: Vec<Layer> = Vec::new();
        for (size, tokens) in &self.shape {
            let tokens = (!tokens.is_empty()).then(|| tokens.clone());
            layers.extend(self.of_size(*size).map(|layer| (layer, tokens.clone())));
        }
        for model in &self.models {
            let problems = match named(model) {
                Some(size) => self.of_size(size).collect(),
                None => of_file(model, "layer for this --op", |block| self.of_block(block))?,
            };
            layers.extend(problems.into_iter().map(|layer| (layer, None)));
        }
        Ok(layers)
    }

    /// What they can need on an architecture: first what is planned, each variant once.
    pub(super) fn kernels(&self, layers: &[Layer], arch: Arch) -> Vec<NamedVariant> {
        let target = Target::new(arch, self.sms);
        let every = self.all_candidates.then_some(Ways::Every);
        let ways = [Ways::Planned].into_iter().chain(every);
        let of_ways = |ways| layers.iter().map(move |(layer, tokens)| (layer, tokens, ways));
        let all = ways
            .flat_map(of_ways)
            .flat_map(|(layer, tokens, ways)| target.kernels(layer, tokens.as_deref(), ways));
        once_each(all)
    }

    fn kinds(&self) -> impl Iterator<Item = (Op, DType)> {
        let given = self.op.and_then(CaseOp::op);
        let ops = given.map_or(vec![Op::GatedLinear, Op::Mlp], |op| vec![op]);
        let dtypes = if self.dtype.is_empty() { vec![DType::Bf16] } else { self.dtype.clone() };
        ops.into_iter().flat_map(move |op| dtypes.clone().into_iter().map(move |t| (op, t)))
    }

    fn problem(&self, (op, dtype): (Op, DType), [k, h]: [usize; 2], own: Activation) -> Problem {
        let activation = self.activation.unwrap_or(own);
        Problem::new(op, 0, k, h, dtype, activation).with_numerics(Numerics::default_for(dtype))
    }

    fn of_size(&self, size: [usize; 2]) -> impl Iterator<Item = Problem> {
        let of = move |kind| self.problem(kind, size, Activation::SWIGLU).with_bias(self.bias);
        self.kinds().map(of)
    }

    fn of_block(&self, contents: &Contents) -> Result<Vec<Problem>> {
        let own = contents.activation.as_deref().map(str::parse).transpose()?;
        let Some(activation) = self.activation.or(own) else {
            bail!("{}; --activation names it", by_options(&contents.activation_source));
        };
        let bias = contents.biases.iter().any(|of| *of != "down");
        // `out-in separate`.
        let orientation = contents.layout.split(' ').next().unwrap_or_default().parse()?;
        let kinds = self.kinds().filter(|(op, _)| contents.down || *op == Op::GatedLinear);
        let of = |kind| {
            let layer = self.problem(kind, [contents.hidden, contents.intermediate], activation);
            layer
                .with_layout(WeightLayout { orientation, ..WeightLayout::HF })
                .with_bias(bias)
                .with_quantized(quantized(contents, kind))
        };
        Ok(kinds.map(of).collect())
    }
}

/// The types of quantised weights that are computed with as they are.
fn quantized(contents: &Contents, (op, dtype): (Op, DType)) -> Option<QuantizedTypes> {
    let types: Option<Vec<QuantizedType>> =
        contents.types.iter().map(|name| name.parse().ok()).collect();
    let types = match types?[..] {
        [one] => [one; 2],
        [gate_up, down] => [gate_up, down],
        _ => return None,
    };
    let computed = types.iter().all(|&kind| expect_quantized(op, dtype, kind).is_ok());
    computed.then(|| QuantizedTypes::new(types[0], Some(types[1])))
}

pub(super) fn once_each(kernels: impl Iterator<Item = NamedVariant>) -> Vec<NamedVariant> {
    let mut seen: HashSet<Variant> = HashSet::new();
    kernels.filter(|kernel| seen.insert(kernel.variant)).collect()
}

/// Names as they are given, with K and H.
pub(crate) const MODELS: [(&str, [usize; 2]); 5] = [
    ("qwen2.5-0.5b", [896, 4864]),
    ("llama-3.2-1b", [2048, 8192]),
    ("llama-3-8b", [4096, 14336]),
    ("qwen2.5-32b", [5120, 27648]),
    ("llama-3-70b", [8192, 28672]),
];

/// K and H of a model by its name, in whatever case.
fn named(name: &str) -> Option<[usize; 2]> {
    MODELS.into_iter().find_map(|(known, size)| known.eq_ignore_ascii_case(name).then_some(size))
}

/// What `of` makes of the feed-forward blocks of a file or directory that can be computed, each once; where that is nothing,
/// why one of the others cannot, or that it has no `what`.
fn of_file<L: PartialEq>(
    model: &str,
    what: &str,
    of: impl Fn(&Contents) -> Result<Vec<L>>,
) -> Result<Vec<L>> {
    let path = Path::new(model);
    if !path.exists() {
        let names: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
        let names = names.join(", ");
        bail!("--for {model}: there is no such file or directory, nor is it one of {names}");
    }
    let found = swiglu_formats::inspect(path, &LoadOptions::default())?;
    let refusals =
        found.refused.iter().chain(found.blocks.iter().filter_map(|b| b.refused.as_ref()));
    let mut refusal = refusals.map(|text| by_options(text)).next();
    let mut all: Vec<L> = Vec::new();
    for contents in found.blocks.iter().filter_map(|block| block.contents.as_ref()) {
        if let Some(steps) = &contents.row_steps {
            refusal.get_or_insert_with(|| format!("no CUDA kernel computes {steps}"));
            continue;
        }
        for one in of(contents).with_context(|| format!("--for {model}"))? {
            if !all.contains(&one) {
                all.push(one);
            }
        }
    }
    match refusal {
        _ if !all.is_empty() => Ok(all),
        Some(why) => bail!("--for {model}: {why}"),
        None => bail!("--for {model}: it has no {what}"),
    }
}

/// Each K and H of a model's blocks, once.
pub(crate) fn sizes(model: &str) -> Result<Vec<[usize; 2]>> {
    if let Some(size) = named(model) {
        return Ok(vec![size]);
    }
    let size = |block: &Contents| Ok(vec![[block.hidden, block.intermediate]]);
    let mut sizes = of_file(model, "feed-forward block", size)?;
    sizes.sort_unstable();
    Ok(sizes)
}
