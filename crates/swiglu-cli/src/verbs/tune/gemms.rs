//! `swiglu tune --training`: what cuBLASLt proposes for the products of training steps, each verified, then timed in turns.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use serde_json::json;
use swiglu::{DType, Element, Problem, bf16, f16};
use swiglu_cuda::ceilings::Product;
use swiglu_cuda::tuning::{Gemm, GemmEntry, GemmTrial, Outcome, TuningOptions, gemms_of_step};
use swiglu_cuda::{Cuda, Stream};

use super::in_rounds;
use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict, shown};
use crate::timing::{self, Enqueue, Passes};

pub(super) fn tune(
    cuda: &Cuda,
    problems: &[Problem],
    budget: Duration,
    options: &TuningOptions,
    terminal: &mut Terminal,
) -> Result<Verdict> {
    // Nothing is measured that cannot be kept.
    let (path, refusal) = cuda.keep_gemms(options, Vec::new())?;
    let mut all: Vec<(&str, Gemm)> = Vec::new();
    for (step, gemm) in problems.iter().flat_map(gemms_of_step) {
        // Other layers have the same.
        if !all.iter().any(|(_, known)| *known == gemm) {
            all.push((step, gemm));
        }
    }
    let bar = terminal.bar(all.len() as u64);
    let mut entries = Vec::new();
    for (step, gemm) in all {
        let entry = measure(cuda, &gemm, budget, &bar)?;
        // A run that is ended has lost nothing.
        cuda.keep_gemms(options, vec![entry.clone()])?;
        entries.push((step, entry));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let replaced = refusal.map(|refusal| refusal.to_string());
    let record = shown(path);
    let document = json!({
        "device": cuda.facts().name, "record": record, "replaced": replaced,
        "entries": entries.iter().map(|(_, entry)| entry).collect::<Vec<_>>(),
    });
    terminal.print(&document, |_, terminal| {
        entries.iter().try_for_each(|(step, entry)| show(step, entry, terminal))?;
        if let Some(replaced) = &replaced {
            writeln!(terminal, "the record that was there is replaced: {replaced}")?;
        }
        writeln!(terminal, "kept in {record}")
    })?;
    let unsound =
        |t: &GemmTrial| matches!(t.outcome, Outcome::Wrong { .. } | Outcome::Failed { .. });
    Ok(Verdict::from_passed(!entries.iter().flat_map(|(_, e)| &e.trials).any(unsound)))
}

fn measure(cuda: &Cuda, gemm: &Gemm, budget: Duration, bar: &ProgressBar) -> Result<GemmEntry> {
    bar.set_message(gemm.to_string());
    match (gemm.dtype, gemm.out) {
        (DType::Bf16, DType::F32) => measure_of::<bf16, f32>(cuda, gemm, budget),
        (DType::Bf16, _) => measure_of::<bf16, bf16>(cuda, gemm, budget),
        (DType::F16, DType::F32) => measure_of::<f16, f32>(cuda, gemm, budget),
        (DType::F16, _) => measure_of::<f16, f16>(cuda, gemm, budget),
        (dtype, _) => bail!("products of training steps are tuned in bf16 and f16, given {dtype}"),
    }
}

fn measure_of<T: Element, Y: Element>(
    cuda: &Cuda,
    gemm: &Gemm,
    budget: Duration,
) -> Result<GemmEntry> {
    let stream = cuda.stream();
    let [x, w, y] = [gemm.m * gemm.k, gemm.k * gemm.n, gemm.m * gemm.n];
    let bytes = (x + w) * size_of::<T>() + y * size_of::<Y>();
    let copies = (0..timing::copies(cuda, bytes)).map(|_| Product::<T, Y>::of(&stream, gemm));
    let mut copies = copies.collect::<Result<Vec<_>, _>>()?;
    let proposals = copies[0].proposals()?;
    let numbered = || proposals.iter().zip(0..).enumerate();
    let mut outcomes = vec![None; proposals.len()];
    for (at, (_, number)) in numbered() {
        outcomes[at] = match copies[0].check(&stream, number) {
            Ok(wrong) => wrong.map(|reason| Outcome::Wrong { reason }),
            Err(error) => Some(Outcome::Failed { reason: error.to_string() }),
        };
    }
    let (count, copies) = (copies.len(), &RefCell::new(copies));
    let mut timed = Vec::new();
    for (at, (_, number)) in numbered() {
        if outcomes[at].is_none() {
            let enqueue: Enqueue<'_> = Box::new(move |stream: &Stream, copy| {
                Ok(copies.borrow_mut()[copy].enqueue_by(stream, number)?)
            });
            timed.push((at, Passes::new(stream.clone(), count, true, enqueue)?.timed()));
        }
    }
    in_rounds(timed, budget, |at, time| {
        let timing::Summary { median: median_us, p10: p10_us, p90: p90_us, samples } = time;
        outcomes[at] = Some(Outcome::Measured { median_us, p10_us, p90_us, samples });
    })?;
    let trials = proposals.into_iter().zip(outcomes);
    Ok(GemmEntry::new(*gemm, trials.filter_map(|(by, outcome)| Some((by, outcome?)))))
}

fn show(step: &str, entry: &GemmEntry, terminal: &mut Terminal) -> Result<()> {
    writeln!(terminal, "{step}: {}", entry.gemm)?;
    let taken = entry.fastest().map(|(number, _)| number);
    let us = |trial: &GemmTrial| trial.outcome.median_us();
    let first = entry.trials.first().and_then(us);
    let of_first = |us: f64| first.map(|first| format!("{:.3}", us / first)).unwrap_or_default();
    let remark = |number: usize, trial: &GemmTrial| match &trial.outcome {
        Outcome::Wrong { reason } => format!("WRONG: {reason}"),
        Outcome::Failed { reason } => format!("FAILED: {reason}"),
        _ if taken == Some(number) => "taken".into(),
        _ => String::new(),
    };
    let rows: Vec<_> = entry.trials.iter().enumerate().collect();
    Table::of(&rows)
        .text("proposal", |(_, trial)| trial.algorithm.to_string())
        .number("measured", |(_, trial)| us(trial).map(table::time).unwrap_or_default())
        .number("of first", |(_, trial)| us(trial).map(of_first).unwrap_or_default())
        .text("remark", |(number, trial)| remark(*number, trial))
        .print(terminal)?;
    writeln!(terminal)
}
