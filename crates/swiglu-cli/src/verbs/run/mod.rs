//! `swiglu run`: a layer, its result proved and its time compared with the unfused way.

mod backward;
mod measure;
mod report;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use swiglu::{Activation, CoreError, DType, LoadOptions, MlpWeights, SavePolicy, with_dtype};
use swiglu_fixtures::{SMOLLM2, STORIES15M};
use swiglu_formats::{
    DynMatrix, LayerWeights, matrix_file, matrix_from_safetensors_bytes, read_matrix,
};
use swiglu_lab::CaseOp;

use crate::args::{self, DeviceArgs, MathArgs, layer_op};
use crate::inputs;
use crate::terminal::{Terminal, Verdict, say};
use crate::verify::Unrepresentable;
use crate::weights::WeightArgs;
use measure::Measurement;

/// Turns that are taken even if the time is spent.
const MIN_TURNS: usize = 3;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Fixture {
    /// SmolLM2-135M, block 28, Q4_1, with large outliers
    #[default]
    Smollm2,
    /// stories15M, layer 0, f32
    Stories15m,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// A real layer that is part of this program, with real activations [default: smollm2]
    #[arg(long, value_name = "NAME", conflicts_with_all = [
        "weights", "layer", "expert", "orientation", "arrangement", "beside_experts", "prefix",
        "ignore", "rescale", "no_config", "plain_fp8", "NameArgs",
    ])]
    fixture: Option<Fixture>,
    /// Input x, one token per row: FILE.npy or FILE.safetensors#TENSOR
    #[arg(long, value_name = "FILE")]
    input: Option<OsString>,
    /// Tokens of random input, where only --weights is given [default: 16]
    #[arg(long, value_name = "M", conflicts_with = "input", value_parser = args::whole(0..=usize::MAX))]
    tokens: Option<usize>,
    /// Seed of that input [default: 0]
    #[arg(long, value_name = "N", conflicts_with = "input", value_parser = args::whole(0..=u64::MAX))]
    seed: Option<u64>,
    /// The expected result, as for --input [default: the float64 oracle]
    #[arg(long, value_name = "FILE", requires = "input")]
    reference: Option<OsString>,
    /// Write the result here: FILE.npy; of several element types the first
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace an output that exists
    #[arg(long, requires = "output")]
    force: bool,
    /// The operation
    #[arg(long, value_name = "NAME", default_value = "mlp", value_parser = layer_op())]
    op: CaseOp,
    /// Train: compute the gradients too, verify each, and time a forward and a backward pass
    #[arg(long, conflicts_with = "keep_blocks")]
    backward: bool,
    /// What is kept of gate and up between the passes: save, save-gate or recompute [default: save]
    #[arg(long, value_name = "POLICY", requires = "backward")]
    keep: Option<SavePolicy>,
    /// Time to measure for, per element type; small layers end with 20,000 calls
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = args::seconds)]
    seconds: f64,
    /// Compute with quantised weights as they are [default: where the input has few tokens, and with
    /// --batch-invariant]
    #[arg(long)]
    keep_blocks: bool,
    /// Decode quantised weights to the element type
    #[arg(long, conflicts_with = "keep_blocks")]
    decode_weights: bool,
    /// Compute with NaN and infinities in input or weights instead of refusing them
    #[arg(long)]
    allow_non_finite: bool,
    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

impl RunArgs {
    /// Refuses an output that cannot be written, or that would replace what is read, before any work is done for it;
    /// writing it refuses one that appears meanwhile.
    fn expect_free_output(&self) -> Result<()> {
        let Some(path) = &self.output else { return Ok(()) };
        let shown = path.display();
        if path.is_dir() {
            bail!("--output {shown}: it is a directory; give a name in it that ends in .npy");
        }
        if path.extension().is_none_or(|extension| extension != "npy") {
            bail!("--output {shown}: it is written as npy; expected a name that ends in .npy");
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty() && !dir.is_dir());
        if let Some(dir) = dir {
            bail!("--output {shown}: no such directory: {}", dir.display());
        }
        if path.exists() && !self.force {
            bail!("{shown}: exists already; remove it or give --force");
        }
        let specs = [self.input.as_ref(), self.reference.as_ref()].into_iter().flatten();
        let files = specs.map(|spec| matrix_file(spec).0);
        let mut read = files.chain(self.weights.weights.as_deref());
        let here = path.canonicalize().ok();
        if here.is_some() && read.any(|file| file.canonicalize().ok() == here) {
            bail!("--output {shown}: this run reads that file; give another name");
        }
        Ok(())
    }

    /// Refuses options of random input where a layer of this program comes with a real one.
    fn expect_random_input(&self) -> Result<()> {
        let given = self.tokens.map(|n| format!("--tokens {n}"));
        let given = given.or(self.seed.map(|n| format!("--seed {n}")));
        if let (Some(given), None) = (given, &self.weights.weights) {
            bail!(
                "{given}: random input is for a layer of your own, and this program's layers come \
                 with an input: give --weights FILE too, or leave it out"
            );
        }
        Ok(())
    }

    /// The element types to run: the one asked for, of a file the one it stores, else all, the stored one first.
    fn dtypes(&self, stored: DType) -> Vec<DType> {
        match (self.math.dtype, &self.weights.weights) {
            (Some(dtype), _) => vec![dtype],
            (None, Some(_)) => vec![stored],
            (None, None) => {
                let mut all = vec![DType::F32, DType::Bf16, DType::F16];
                all.sort_by_key(|dtype| *dtype != stored);
                all
            }
        }
    }
}

pub(crate) fn run(args: &RunArgs, terminal: &mut Terminal) -> Result<Verdict> {
    args.expect_random_input()?;
    args.expect_free_output()?;
    let device = args.device.open()?;
    let subject = Subject::open(args)?;
    let dtypes = args.dtypes(subject.weights.resolved_dtype());
    let mut measurement = Measurement { args, subject: &subject, device: &device, exact: None };
    let message = |(_, dtype): &(usize, &DType)| format!("{dtype}: computing, verifying, timing");
    let reports = terminal.each(dtypes.iter().enumerate(), message, |(i, &dtype)| {
        let output = args.output.as_deref().filter(|_| i == 0);
        match with_dtype!(dtype, T => measurement.report::<T>(output)) {
            // Nobody asked for this type, and what the others gave is not lost.
            Err(error) if i > 0 && error.is::<Unrepresentable>() => {
                say(format!("{dtype} is left out: {error}"));
                Ok(None)
            }
            report => report.map(Some),
        }
    })?;
    let reports: Vec<_> = reports.into_iter().flatten().collect();
    report::print(terminal, &subject, &device, &reports)?;
    if let (Some(path), Some(first), false) = (&args.output, dtypes.first(), terminal.json) {
        writeln!(terminal, "output    {}: the result in {first}", path.display())?;
    }
    Ok(Verdict::from_passed(reports.iter().all(|r| r.passed)))
}

/// A matrix and where it is from, for people.
struct Sourced {
    matrix: DynMatrix,
    source: String,
}

impl Sourced {
    fn read(option: &str, spec: Option<&OsStr>) -> Result<Option<Self>> {
        let Some(spec) = spec else { return Ok(None) };
        let (file, tensor) = matrix_file(spec);
        let why = match file {
            file if file.as_os_str().is_empty() => "names no file",
            file if file.is_dir() && tensor.is_none() => "is a directory",
            _ => "",
        };
        if !why.is_empty() {
            bail!("{option} {spec:?} {why}: expected FILE.npy or FILE.safetensors#TENSOR");
        }
        Ok(Some(Self { matrix: read_matrix(spec)?, source: spec.to_string_lossy().into_owned() }))
    }

    fn random(args: &RunArgs, hidden: usize) -> Result<Self> {
        let (tokens, seed) = (args.tokens.unwrap_or(16), args.seed.unwrap_or(0));
        let matrix = DynMatrix::F32(inputs::normal(seed, tokens, hidden, 1.0)?);
        Ok(Self { matrix, source: format!("random, normal, seed {seed}") })
    }

    fn embedded(from: &swiglu_fixtures::Layer, tensor: &str, what: &str) -> Result<Self> {
        let matrix = matrix_from_safetensors_bytes(from.activations, tensor)?;
        Ok(Self { matrix, source: format!("{what} (embedded)") })
    }
}

struct Subject {
    title: String,
    weights: MlpWeights,
    input: Sourced,
    /// The expected result; the oracle decides where there is none.
    reference: Option<Sourced>,
}

impl Subject {
    fn open(args: &RunArgs) -> Result<Self> {
        let input = Sourced::read("--input", args.input.as_deref())?;
        let reference = Sourced::read("--reference", args.reference.as_deref())?;
        let subject = match args.weights.load()? {
            Some(weights) => {
                let hidden = weights.stored().hidden();
                let input = input.map_or_else(|| Sourced::random(args, hidden), Ok)?;
                Self { title: weights.stored().describe(), weights, input, reference }
            }
            None => Self::own(args, input, reference)?,
        };
        subject.validate(args)?;
        Ok(subject)
    }

    fn own(args: &RunArgs, input: Option<Sourced>, reference: Option<Sourced>) -> Result<Self> {
        let from = match args.fixture.unwrap_or_default() {
            Fixture::Smollm2 => &SMOLLM2,
            Fixture::Stories15m => &STORIES15M,
        };
        let title = format!("{} (embedded)", from.title);
        let options = LoadOptions::new(from.layer);
        // Both embedded layers are of Llama models; one of their files does not say so.
        let weights = swiglu::Mlp::load_from_bytes(from.weights, &options)?;
        let weights = weights.activation(Activation::SWIGLU);
        if let Some(input) = input {
            return Ok(Self { title, weights, input, reference });
        }
        let input = Sourced::embedded(from, from.input, "activations of a real text")?;
        // The reference is that of the whole block with the model's own activation.
        let activation = weights.resolved_activation()?;
        let same = args.op == CaseOp::Mlp && args.math.activation.is_none_or(|a| a == activation);
        let what = "a float64 result that came with them";
        let reference = same.then(|| Sourced::embedded(from, from.reference, what)).transpose()?;
        Ok(Self { title, weights, input, reference })
    }

    /// Shapes, and that every stored value is a number, before any work is done.
    fn validate(&self, args: &RunArgs) -> Result<()> {
        let stored = self.weights.stored();
        let fits = |what, of: &Sourced, expected| match of.matrix.shape() {
            shape if shape == expected => Ok(()),
            shape => Err(CoreError::shape(format!("{what} ({})", of.source), expected, shape)),
        };
        let [tokens, _] = self.input.matrix.shape();
        fits("input", &self.input, [tokens, stored.hidden()])?;
        let (out, finite): (_, fn(_) -> _) = match args.op {
            CaseOp::GatedLinear => (stored.intermediate(), LayerWeights::expect_finite_gated),
            _ => (stored.hidden(), LayerWeights::expect_finite),
        };
        self.reference.iter().try_for_each(|of| fits("reference", of, [tokens, out]))?;
        if !args.allow_non_finite {
            finite(stored).map_err(|e| not_finite(e.into()))?;
            self.input.matrix.expect_finite("input").map_err(|e| not_finite(e.into()))?;
        }
        Ok(())
    }
}

/// What to do about a value that a file has.
fn not_finite(error: swiglu::Error) -> anyhow::Error {
    match error.core() {
        Some(CoreError::NonFinite { what, row, col, value }) => anyhow!(
            "{what}[{row}, {col}] is {value} in the file: expected finite numbers; \
             --allow-non-finite computes with others"
        ),
        _ => error.into(),
    }
}
