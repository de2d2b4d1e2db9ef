//! `swiglu run`: a layer, its result proved and its time compared with the unfused way.

mod backward;
mod measure;
mod report;
mod subject;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum};
use swiglu::{DType, SavePolicy, with_dtype};
use swiglu_formats::matrix_file;
use swiglu_lab::CaseOp;

use crate::args::{self, DeviceArgs, MathArgs, layer_op};
use crate::terminal::{Terminal, Verdict};
use crate::weights::WeightArgs;
use measure::Measurement;
use report::Report;
use subject::Subject;

/// Turns that are taken even if the time is spent.
const MIN_TURNS: usize = 3;

/// A layer that is part of this program.
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
    fn expect_free_output(&self) -> anyhow::Result<()> {
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

    /// The layers of this program have activations of a real text as their input: nothing of it is
    /// random.
    fn expect_random_input(&self) -> anyhow::Result<()> {
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

    /// The element types to run, the one that results are written in first: the one asked for;
    /// for an embedded layer all of them; for a file the one it stores.
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

pub(crate) fn run(args: &RunArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    args.expect_random_input()?;
    args.expect_free_output()?;
    let device = args.device.open()?;
    let subject = Subject::open(args)?;
    let dtypes = args.dtypes(subject.weights.resolved_dtype());
    let bar = terminal.bar(dtypes.len() as u64);
    let mut measurement = Measurement::new(args, &subject, &device);
    let mut reports: Vec<Report> = Vec::new();
    for (i, &dtype) in dtypes.iter().enumerate() {
        bar.set_message(format!("{dtype}: computing, verifying, timing"));
        let output = args.output.as_deref().filter(|_| i == 0);
        reports.push(with_dtype!(dtype, T => measurement.report::<T>(output))?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    report::print(terminal, &subject, &device, &reports)?;
    if let (Some(path), Some(first), false) = (&args.output, dtypes.first(), terminal.json) {
        let written = format!("output    {}: the result in {first}\n", path.display());
        terminal.write_all(written.as_bytes())?;
    }
    Ok(Verdict::from_passed(reports.iter().all(|r| r.passed)))
}
