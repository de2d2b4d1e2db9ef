//! `swiglu tune`: every way of computing a layer on a CUDA device, measured, for plans to follow.

mod trials;

use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde::Serialize;
use swiglu::{CoreError, DType, Device, with_dtype};
use swiglu_cuda::tuning::{Entry, Outcome, Trial, TuningOptions};
use swiglu_lab::{Case, CaseOp, DeviceKind};

use crate::args::{DeviceArgs, MathArgs, layer_op};
use crate::inputs;
use crate::models::MODELS;
use crate::table::{self, Table};
use crate::terminal::{Shown, Terminal, Verdict};

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("shapes").required(true).multiple(true))]
pub(crate) struct TuneArgs {
    /// The operation
    #[arg(long, value_name = "NAME", default_value = "gated-linear", value_parser = layer_op())]
    op: CaseOp,
    /// Tokens, input features and intermediate features; may be given several times. Between two
    /// numbers of tokens that are measured, the cost model follows both
    #[arg(long, value_name = "M,K,H", group = "shapes")]
    shape: Vec<Shape>,
    /// The feed-forward sizes of common models, with 1 to 16384 tokens
    #[arg(long, group = "shapes")]
    models: bool,
    /// Time to measure for, per shape
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = crate::args::seconds)]
    seconds: f64,
    /// Where measurements are kept [default: SWIGLU_TUNING_DIR, else swiglu/tuning in the user's
    /// data directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// M, K, H.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape([usize; 3]);

impl FromStr for Shape {
    type Err = CoreError;

    fn from_str(s: &str) -> Result<Self, CoreError> {
        let sizes: Option<Vec<usize>> =
            s.split(',').map(|n| n.parse().ok().filter(|&n| n > 0)).collect();
        match sizes.as_deref() {
            Some(&[m, k, h]) => Ok(Self([m, k, h])),
            _ => Err(CoreError::OutOfRange {
                what: "shape",
                given: s.to_owned(),
                expected: "three numbers above 0: tokens, input, intermediate features".into(),
            }),
        }
    }
}

/// Powers of two: the cost model, corrected by both, knows what lies between.
const TOKENS: [usize; 15] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

impl TuneArgs {
    fn shapes(&self) -> Vec<[usize; 3]> {
        let mut shapes: Vec<[usize; 3]> = self.shape.iter().map(|shape| shape.0).collect();
        if self.models {
            shapes.extend(MODELS.into_iter().flat_map(|(_, [k, h])| TOKENS.map(|m| [m, k, h])));
        }
        shapes
    }
}

/// What was measured and where it is kept.
#[derive(Serialize)]
struct Document {
    device: String,
    record: Shown,
    /// Why the record that was there is replaced.
    replaced: Option<String>,
    entries: Vec<Entry>,
}

pub(crate) fn tune(args: &TuneArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let device = args.device.open()?;
    let Device::Cuda(cuda) = &device else {
        bail!("there is nothing to tune on {device}: its kernels follow from the instruction set");
    };
    args.math.expect_computed(&device, args.op)?;
    let dtype = args.math.dtype.unwrap_or(DType::Bf16);
    let case = |shape| inputs::case(DeviceKind::Cuda, args.op, shape, dtype);
    let cases: Vec<Case> =
        args.shapes().into_iter().map(|shape| args.math.case(case(shape))).collect();
    let budget = Duration::from_secs_f64(args.seconds);
    let subject = trials::Subject { device: &device, cuda, budget };
    let options = TuningOptions { dir: args.out.clone(), disabled: false };
    let bar = terminal.bar(cases.len() as u64);
    // Nothing is measured that cannot be kept.
    let (record, refusal) = cuda.keep_tuning(&options, Vec::new())?;
    let mut entries = Vec::new();
    let before = |case: &Case| bar.set_message(case.key());
    let after = |entry: Entry| {
        // After each problem: a run that is ended has kept what it measured.
        cuda.keep_tuning(&options, vec![entry.clone()])?;
        entries.push(entry);
        bar.inc(1);
        Ok(())
    };
    with_dtype!(dtype, T => subject.measure_all::<T>(&cases, before, after))?;
    bar.finish_and_clear();
    let replaced = refusal.map(|refusal| refusal.to_string());
    let document =
        Document { device: device.to_string(), record: record.into(), replaced, entries };
    terminal.print(&document, Document::show)?;
    Ok(Verdict::from_passed(document.entries.iter().all(trials::is_sound)))
}

impl Document {
    fn show(&self, terminal: &mut Terminal) -> anyhow::Result<()> {
        for entry in &self.entries {
            writeln!(terminal, "{}", entry.problem)?;
            let medians = entry.trials.iter().filter_map(|trial| match trial.outcome {
                Outcome::Measured { median_us, .. } => Some(median_us),
                _ => None,
            });
            let best = medians.fold(f64::INFINITY, f64::min);
            let time = |us: Option<f64>| us.map(table::time).unwrap_or_default();
            let ratio = |us: f64| format!("{:.2}", us / best);
            Table::of(&entry.trials)
                .text("way", |t| &t.way)
                .number("expected", |t| time(t.predicted_us))
                .number("measured", |t| time(t.outcome.median_us()))
                .number("p10", |t| time(spread(t).map(|[p10, _]| p10)))
                .number("p90", |t| time(spread(t).map(|[_, p90]| p90)))
                .number("of best", |t| t.outcome.median_us().map(ratio).unwrap_or_default())
                .text("remark", |t| remark(t, best))
                .print(terminal)?;
            writeln!(terminal)?;
        }
        if let Some(replaced) = &self.replaced {
            writeln!(terminal, "the record that was there is replaced: {replaced}")?;
        }
        writeln!(terminal, "kept in {}", self.record.display())?;
        Ok(())
    }
}

fn spread(trial: &Trial) -> Option<[f64; 2]> {
    match trial.outcome {
        Outcome::Measured { p10_us, p90_us, .. } => Some([p10_us, p90_us]),
        Outcome::Compared { p10_p90_us, .. } => p10_p90_us,
        _ => None,
    }
}

fn remark(trial: &Trial, best: f64) -> String {
    match &trial.outcome {
        Outcome::Measured { median_us, .. } if *median_us == best => "fastest".into(),
        Outcome::Measured { .. } => String::new(),
        Outcome::Compared { reason, .. } => format!("no choice: {reason}"),
        Outcome::Refused { reason } => reason.clone(),
        Outcome::Wrong { reason } => format!("WRONG: {reason}"),
        Outcome::Failed { reason } => format!("FAILED: {reason}"),
    }
}
