//! Kernels from the cache or the compiler, on all processors, until there are all or the program is stopped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rayon::prelude::*;
use swiglu_cuda::jit::cache::{CacheWarning, KernelCache, Module, Origin};
use swiglu_cuda::kernels::NamedVariant;
use swiglu_cuda::{Arch, CudaError};

use super::report::{Report, Row, Warning};
use crate::terminal::{Terminal, shown, stop_on_signals};

/// A kernel and what it is compiled for.
pub(super) type Job = (Arch, NamedVariant);

/// Seconds of a processor that a variant takes: NVRTC 13.0 took 0.37 for sm_90a, on average over 65 of a block and over 115
/// that are element-wise.
const SECONDS_EACH: f64 = 0.4;

/// The variants, begun in their order. What is compiled is kept at once, so that a run which is stopped has lost nothing.
pub(super) fn gather(
    jobs: &[Job],
    cache: &KernelCache,
    terminal: &Terminal,
) -> anyhow::Result<Report> {
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(&stop)?;
    let kept = jobs.par_iter().filter(|(arch, named)| cache.has(&named.variant, *arch)).count();
    let missing = jobs.len() - kept;
    terminal.announce(&beginning(jobs, kept));
    let bar = terminal.bar(jobs.len() as u64);
    bar.set_message(duration(estimate(missing)));
    let (start, compiled) = (Instant::now(), AtomicUsize::new(0));
    let rows: Vec<(usize, Row)> = jobs
        .iter()
        .enumerate()
        .par_bridge()
        .filter(|_| !stop.load(Ordering::Relaxed))
        .map(|(at, (arch, named))| {
            let row = row(*arch, named, cache.module(&named.variant, *arch))?;
            if row.origin == Some(Origin::Compiled) {
                let done = compiled.fetch_add(1, Ordering::Relaxed) + 1;
                let each = start.elapsed().div_f64(done as f64);
                let left = each.mul_f64(missing.saturating_sub(done) as f64);
                bar.set_message(format!("{} left", duration(left)));
            }
            bar.inc(1);
            Ok((at, row))
        })
        .collect::<Result<_, CudaError>>()?;
    bar.finish_and_clear();
    // From here on the first time ends it at once.
    stop.store(true, Ordering::Relaxed);
    Ok(report(rows, jobs.len(), cache))
}

fn report(mut rows: Vec<(usize, Row)>, jobs: usize, cache: &KernelCache) -> Report {
    rows.sort_by_key(|(at, _)| *at);
    let kernels: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
    let warning = |w: CacheWarning| Warning { path: shown(w.path), what: w.what };
    let count = |what: fn(&Row) -> bool| kernels.iter().filter(|row| what(row)).count();
    let is_kept = |row: &Row| matches!(row.origin, Some(Origin::Cache | Origin::ReadOnly));
    Report {
        compiled: count(|row| row.origin == Some(Origin::Compiled)),
        kept: count(is_kept),
        failed: count(|row| row.error.is_some()),
        with_complaints: count(|row| !row.complaints.is_empty()),
        left: jobs - kernels.len(),
        cache_warnings: cache.warnings().into_iter().map(warning).collect(),
        kernels,
    }
}

/// How much there is to do, and how long that takes about.
fn beginning(jobs: &[Job], kept: usize) -> String {
    let archs: BTreeSet<Arch> = jobs.iter().map(|(arch, _)| *arch).collect();
    let archs: Vec<String> = archs.iter().map(Arch::to_string).collect();
    let variants = if jobs.len() == 1 { "variant" } else { "variants" };
    let all = format!("{} {variants} for {}", jobs.len(), archs.join(", "));
    let missing = jobs.len() - kept;
    if missing == 0 {
        return format!("{all}, all in the cache");
    }
    let threads = rayon::current_num_threads();
    let processors = if threads == 1 { "processor" } else { "processors" };
    let time = duration(estimate(missing));
    format!("{all}, {kept} in the cache: compiling {missing}, {time} on {threads} {processors}")
}

fn estimate(missing: usize) -> Duration {
    let turns = missing.div_ceil(rayon::current_num_threads());
    Duration::from_secs_f64(turns as f64 * SECONDS_EACH)
}

/// `about 40 s`, `about 3 min`.
fn duration(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..100 => format!("about {} s", seconds.max(1)),
        seconds => format!("about {} min", seconds.div_ceil(60)),
    }
}

/// What became of a variant. That it does not compile is a finding; all else is an error.
fn row(
    arch: Arch,
    named: &NamedVariant,
    module: Result<Module, CudaError>,
) -> Result<Row, CudaError> {
    let (module, error) = match module {
        Ok(module) => (Some(module), None),
        Err(CudaError::Compile { log, .. }) => (None, Some(log)),
        Err(e) => return Err(e),
    };
    let log = module.as_ref().map(|m| m.report.log.clone()).unwrap_or_default();
    Ok(Row {
        kernel: named.variant,
        file: named.variant.file().name(),
        variant: named.name.clone(),
        arch,
        origin: module.as_ref().map(|m| m.origin),
        bytes: module.as_ref().map_or(0, |m| m.cubin.len()),
        compile_ms: module.as_ref().map_or(0.0, |m| m.report.millis),
        compiler: module.as_ref().map(|m| m.report.nvrtc),
        complaints: log.complaints(),
        log,
        error,
    })
}
