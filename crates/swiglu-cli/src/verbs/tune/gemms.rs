//! `swiglu tune --training`: what cuBLASLt proposes for the products of training steps, each verified, then timed in turns.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use swiglu::{DType, Device, Element, Problem, bf16, f16};
use swiglu_cuda::ceilings::Product;
use swiglu_cuda::tuning::{
    Gemm, GemmAlgorithm, GemmEntry, GemmTrial, Outcome, TuningOptions, gemms_of_step,
};
use swiglu_cuda::{Cuda, Stream, cublaslt_version};

use super::{Kept, in_rounds, of_asked, verdict};
use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict, shown};
use crate::timing::{self, Enqueue, Passes};

pub(super) fn tune(
    cuda: &Cuda,
    problems: &[Problem],
    budget: Duration,
    options: &TuningOptions,
    stop: &AtomicBool,
    terminal: &mut Terminal,
) -> Result<Verdict> {
    if let Some(problem) = problems.iter().find(|problem| problem.dtype == DType::F32) {
        bail!(
            "products of training steps are measured in bf16 or f16, given {}; leave out --dtype, or give one of these",
            problem.dtype
        );
    }
    let (major, minor, _) = cublaslt_version()?;
    let mut kept = Kept::new(|entries| cuda.keep_gemms(options, entries))?;
    // Other steps and other layers have the same.
    let mut all: Vec<(Gemm, Vec<&str>)> = Vec::new();
    for (step, gemm) in problems.iter().flat_map(gemms_of_step) {
        match all.iter_mut().find(|(known, _)| *known == gemm) {
            Some((_, steps)) if steps.contains(&step) => {}
            Some((_, steps)) => steps.push(step),
            None => all.push((gemm, vec![step])),
        }
    }
    let bar = terminal.bar(all.len() as u64);
    for (gemm, steps) in &all {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        bar.set_message(gemm.to_string());
        let what = || format!("{}: {gemm}", steps.join("; "));
        let trials = measure(cuda, gemm, budget).with_context(what)?;
        kept.add(GemmEntry::new((major, minor), *gemm, trials))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let Kept { entries, replaced, path, .. } = kept;
    let entries: Vec<_> = entries.iter().zip(all.iter().map(|(_, steps)| steps)).collect();
    let record = shown(path);
    let told = |(entry, steps): &(&GemmEntry, &Vec<&str>)| {
        let taken = entry.fastest().map(|(number, _)| number);
        json!({ "steps": steps, "gemm": entry.gemm, "trials": entry.trials, "taken": taken })
    };
    let document = json!({
        "device": Device::Cuda(cuda.clone()).to_string(), "record": record, "replaced": replaced,
        "cublaslt": format!("{major}.{minor}"), "entries": entries.iter().map(told).collect::<Vec<_>>(),
    });
    terminal.print(&document, |_, terminal| {
        entries.iter().try_for_each(|(entry, steps)| show(&steps.join("; "), entry, terminal))?;
        if let Some(replaced) = &replaced {
            writeln!(terminal, "the record that was there is replaced: {replaced}")?;
        }
        let stopped = of_asked(entries.len(), all.len());
        writeln!(terminal, "{stopped}kept in {record}, for cuBLASLt {major}.{minor}")
    })?;
    let outcomes = entries.iter().flat_map(|(e, _)| &e.trials).map(|trial| &trial.outcome);
    Ok(verdict(entries.len() == all.len(), outcomes))
}

/// What came of each of its proposals.
type Trials = Vec<(GemmAlgorithm, Outcome)>;

fn measure(cuda: &Cuda, gemm: &Gemm, budget: Duration) -> Result<Trials> {
    match (gemm.dtype, gemm.out) {
        (DType::F16, DType::F32) => measure_of::<f16, f32>(cuda, gemm, budget),
        (DType::F16, _) => measure_of::<f16, f16>(cuda, gemm, budget),
        (_, DType::F32) => measure_of::<bf16, f32>(cuda, gemm, budget),
        _ => measure_of::<bf16, bf16>(cuda, gemm, budget),
    }
}

fn measure_of<T: Element, Y: Element>(
    cuda: &Cuda,
    gemm: &Gemm,
    budget: Duration,
) -> Result<Trials> {
    let stream = cuda.stream();
    let mut first = Product::<T, Y>::of(&stream, gemm)?;
    let proposals = first.proposals()?;
    let [x, w, y] = [gemm.m * gemm.k, gemm.k * gemm.n, gemm.m * gemm.n];
    let bytes = (x + w) * size_of::<T>() + y * size_of::<Y>();
    let others = (1..timing::copies(cuda, bytes)).map(|_| Product::of(&stream, gemm));
    let mut copies = [Ok(first)].into_iter().chain(others).collect::<Result<Vec<_>, _>>()?;
    let checked = (0..).zip(&proposals).map(|(number, _)| match copies[0].check(&stream, number) {
        Ok(wrong) => wrong.map(|reason| Outcome::Wrong { reason }),
        Err(error) => Some(Outcome::Failed { reason: error.to_string() }),
    });
    let mut outcomes: Vec<_> = checked.collect();
    let (count, copies) = (copies.len(), &RefCell::new(copies));
    let mut timed = Vec::new();
    for (at, number) in (0..outcomes.len()).zip(0..) {
        if outcomes[at].is_none() {
            let enqueue: Enqueue<'_> = Box::new(move |stream: &Stream, copy| {
                Ok(copies.borrow_mut()[copy].enqueue_by(stream, number)?)
            });
            match Passes::new(stream.clone(), count, true, enqueue) {
                Ok(passes) => timed.push((at, passes.timed())),
                Err(error) => outcomes[at] = Some(Outcome::Failed { reason: format!("{error:#}") }),
            }
        }
    }
    in_rounds(timed, budget, |at, time| {
        let timing::Summary { median: median_us, p10: p10_us, p90: p90_us, samples } = time;
        outcomes[at] = Some(Outcome::Measured { median_us, p10_us, p90_us, samples });
    })?;
    let trials = proposals.into_iter().zip(outcomes);
    Ok(trials.filter_map(|(by, outcome)| Some((by, outcome?))).collect())
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
