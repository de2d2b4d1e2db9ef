//! `swiglu run`: a layer, its result proved and its time compared with the unfused way.

mod measure;
mod report;
mod subject;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use swiglu::{DType, with_dtype};
use swiglu_formats::matrix_file;

use crate::Verdict;
use crate::args::{DeviceArgs, LayerOp, MathArgs, WeightArgs};
use crate::terminal::Terminal;
use measure::Measurement;
use report::Report;
use subject::{Fixture, Subject};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// A real layer that is part of this program, with real activations [default: smollm2]
    #[arg(long, value_name = "NAME", conflicts_with_all = [
        "weights", "layer", "expert", "orientation", "arrangement", "gate_name", "up_name",
        "gate_up_name", "down_name", "gate_bias_name", "up_bias_name", "gate_up_bias_name",
        "down_bias_name",
    ])]
    fixture: Option<Fixture>,
    /// Input x, one token per row: FILE.npy or FILE.safetensors#TENSOR
    #[arg(long, value_name = "FILE")]
    input: Option<OsString>,
    /// Tokens of random input, where only --weights is given [default: 16]
    #[arg(long, value_name = "M", conflicts_with = "input", value_parser = crate::args::whole::<usize>,
        allow_negative_numbers = true)]
    tokens: Option<usize>,
    /// Seed of that input [default: 0]
    #[arg(long, value_name = "N", conflicts_with = "input", value_parser = crate::args::whole::<u64>,
        allow_negative_numbers = true)]
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
    #[arg(long, value_name = "NAME", default_value = "mlp")]
    op: LayerOp,
    /// Time to measure for, per element type
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = crate::args::seconds,
        allow_negative_numbers = true)]
    seconds: f64,
    /// Compute with quantised weights as they are [default: where the input has few tokens]
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
    /// Refuses an output that exists before any work is done for it; writing refuses one that
    /// appears meanwhile.
    fn expect_free_output(&self) -> anyhow::Result<()> {
        let Some(path) = &self.output else { return Ok(()) };
        let shown = path.display();
        if path.is_dir() {
            bail!("--output {shown}: it is a directory; give a name in it that ends in .npy");
        }
        if path.extension().is_none_or(|suffix| suffix != "npy") {
            bail!("--output {shown}: results are written as npy; give a name that ends in .npy");
        }
        if !path.is_file() {
            return Ok(());
        }
        if !self.force {
            bail!("{shown}: exists already; remove it or give --force");
        }
        let here = path.canonicalize()?;
        let specs = [self.input.as_ref(), self.reference.as_ref()].into_iter().flatten();
        let files = specs.map(|spec| matrix_file(spec).0);
        let mut read = files.chain(self.weights.weights.as_deref());
        match read.find(|file| file.canonicalize().is_ok_and(|file| file == here)) {
            Some(_) => bail!("--output {shown}: this run reads that file; give another name"),
            None => Ok(()),
        }
    }

    /// The layers of this program have activations of a real text as their input: nothing of it is
    /// random.
    fn expect_random_input(&self) -> anyhow::Result<()> {
        let given = match (self.tokens, self.seed) {
            (Some(tokens), _) => format!("--tokens {tokens}"),
            (None, Some(seed)) => format!("--seed {seed}"),
            (None, None) => return Ok(()),
        };
        match self.weights.weights {
            Some(_) => Ok(()),
            None => bail!(
                "{given}: random input is for a layer of your own, and this program's layers come \
                 with an input: give --weights FILE too, or leave it out"
            ),
        }
    }

    /// The element types to run, the one that results are written in first: the one asked for;
    /// for an embedded layer all of them; for a file the one it stores.
    fn dtypes(&self, subject: &Subject) -> Vec<DType> {
        let stored = subject.weights.resolved_dtype();
        match (self.math.dtype, &self.weights.weights) {
            (Some(dtype), _) => vec![dtype],
            (None, Some(_)) => vec![stored],
            (None, None) => {
                let others = [DType::F32, DType::Bf16, DType::F16];
                let others = others.into_iter().filter(|&d| d != stored);
                std::iter::once(stored).chain(others).collect()
            }
        }
    }
}

pub(crate) fn run(args: &RunArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    args.expect_random_input()?;
    args.expect_free_output()?;
    let device = args.device.open()?;
    let subject = Subject::open(args)?;
    let dtypes = args.dtypes(&subject);
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
    if let (Some(path), Some(first), false) = (&args.output, dtypes.first(), terminal.json()) {
        let written = format!("output    {}: the result in {first}\n", path.display());
        terminal.write_all(written.as_bytes())?;
    }
    Ok(Verdict::from_passed(reports.iter().all(|r| r.passed)))
}
