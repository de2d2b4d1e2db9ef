//! `swiglu tune`: every way of computing a layer on a CUDA device, measured, for plans to follow.

mod report;
mod trials;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde::Serialize;
use swiglu::cuda::tuning::{Entry, TuningOptions};
use swiglu::{Activation, CoreError, DType, Device, with_dtype};

use crate::Verdict;
use crate::args::{DeviceArgs, LayerOp, MathArgs};
use crate::terminal::{Shown, Terminal};

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("shapes").required(true).multiple(true))]
pub(crate) struct TuneArgs {
    /// The operation
    #[arg(long, value_name = "NAME", default_value = "gated-linear")]
    op: LayerOp,
    /// Tokens, input features and intermediate features; may be given several times. What is
    /// measured for M tokens stands for all numbers above M/2 up to M
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

/// K and H: Qwen2.5-0.5B, Llama-3.2-1B, Llama-3-8B, Qwen2.5-32B, Llama-3-70B.
const MODELS: [[usize; 2]; 5] =
    [[896, 4864], [2048, 8192], [4096, 14336], [5120, 27648], [8192, 28672]];
/// Powers of two, so that each stands for the numbers down to the next.
const TOKENS: [usize; 15] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

impl TuneArgs {
    fn shapes(&self) -> Vec<[usize; 3]> {
        let mut shapes: Vec<[usize; 3]> = self.shape.iter().map(|shape| shape.0).collect();
        if self.models {
            shapes.extend(MODELS.into_iter().flat_map(|[k, h]| TOKENS.map(|m| [m, k, h])));
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
    let dtype = args.math.dtype.unwrap_or(DType::Bf16);
    let subject = trials::Subject {
        device: &device,
        cuda,
        op: args.op,
        activation: args.math.activation.unwrap_or(Activation::SWIGLU),
        numerics: args.math.numerics(dtype),
        budget: Duration::from_secs_f64(args.seconds),
    };
    let options = TuningOptions { dir: args.out.clone(), disabled: false };
    let shapes = args.shapes();
    let bar = terminal.bar(shapes.len() as u64);
    // Nothing is measured that cannot be kept.
    let (record, refusal) = cuda.keep_tuning(&options, Vec::new())?;
    let mut entries = Vec::new();
    let before = |[m, k, h]: [usize; 3]| bar.set_message(format!("{m}x{k}x{h} {dtype}"));
    let after = |entry: Entry| {
        // After each problem: a run that is ended has kept what it measured.
        cuda.keep_tuning(&options, vec![entry.clone()])?;
        entries.push(entry);
        bar.inc(1);
        Ok(())
    };
    with_dtype!(dtype, T => subject.measure_all::<T>(&shapes, before, after))?;
    bar.finish_and_clear();
    let replaced = refusal.map(|refusal| refusal.to_string());
    let document =
        Document { device: device.to_string(), record: record.into(), replaced, entries };
    match terminal.json() {
        true => terminal.print_json(&document)?,
        false => report::show(&document, terminal)?,
    }
    Ok(Verdict::from_passed(document.entries.iter().all(trials::is_sound)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_three_numbers() {
        assert_eq!("16,896,4864".parse(), Ok(Shape([16, 896, 4864])));
        for text in ["", "16", "16,896", "16,896,0", "a,b,c", "1,2,3,4", "16 896 4864"] {
            let error = text.parse::<Shape>().unwrap_err().to_string();
            assert!(error.contains("three numbers"), "{error}");
        }
    }
}
