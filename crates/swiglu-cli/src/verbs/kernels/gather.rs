//! Kernels from the cache or the compiler, on all processors, until there are all or the program is stopped; and what
//! became of them.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rayon::prelude::*;
use serde::Serialize;
use swiglu_cuda::jit::cache::{CacheWarning, KernelCache, Module, Origin};
use swiglu_cuda::jit::{CompileLog, EntryLog, Variant, Version, version};
use swiglu_cuda::kernels::NamedVariant;
use swiglu_cuda::{Arch, CudaError};

use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict, shown, stop_on_signals};

/// A kernel and what it is compiled for.
pub(super) type Job = (Arch, NamedVariant);

/// Seconds of a processor that a variant takes, of the slower of two machines: NVRTC 13.0 took 0.4 for sm_90a on an H200's
/// host (65 of a block, 115 element-wise), and 1.0 on two processors of a Zen 3 (18 gated GEMMs).
const SECONDS_EACH: f64 = 1.0;

/// The variants, begun in their order. What is compiled is kept at once, so that a run which is stopped has lost nothing.
pub(super) fn gather(
    jobs: &[Job],
    cache: &KernelCache,
    terminal: &Terminal,
) -> anyhow::Result<Report> {
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(&stop, "the kernels that are being compiled, which are kept")?;
    let kept = jobs.par_iter().filter(|(arch, named)| cache.has(&named.variant, *arch)).count();
    let missing = jobs.len() - kept;
    if missing > 0 {
        // Without the compiler nothing begins.
        version()?;
    }
    terminal.announce(&beginning(jobs, kept));
    let bar = terminal.bar(jobs.len() as u64);
    let rows: Vec<(usize, Row)> = jobs
        .iter()
        .enumerate()
        .par_bridge()
        .filter(|_| !stop.load(Ordering::Relaxed))
        .map(|(at, (arch, named))| {
            let row = row(*arch, named, cache.module(&named.variant, *arch))?;
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
    let seconds = (missing.div_ceil(threads) as f64 * SECONDS_EACH).ceil();
    let time = indicatif::HumanDuration(Duration::from_secs_f64(seconds));
    format!(
        "{all}, {kept} in the cache: compiling {missing}, about {time} on {threads} {processors}"
    )
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

/// What became of one variant on one architecture.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    #[serde(skip)]
    pub(super) kernel: Variant,
    pub(super) file: &'static str,
    pub(super) variant: String,
    pub(super) arch: Arch,
    /// Where the module came from; nothing if it does not compile.
    pub(super) origin: Option<Origin>,
    pub(super) bytes: usize,
    pub(super) compile_ms: f64,
    pub(super) compiler: Option<Version>,
    #[serde(flatten)]
    pub(super) log: CompileLog,
    pub(super) complaints: Vec<String>,
    pub(super) error: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Warning {
    pub(super) path: String,
    pub(super) what: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) kernels: Vec<Row>,
    pub(super) compiled: usize,
    /// Those that were in the cache.
    pub(super) kept: usize,
    pub(super) failed: usize,
    pub(super) with_complaints: usize,
    /// Those that the program was stopped before.
    pub(super) left: usize,
    /// What kept a kernel from being read or kept: path and what happened.
    pub(super) cache_warnings: Vec<Warning>,
}

impl Report {
    /// Of all kernels; whoever is strict takes no complaint.
    pub(super) fn verdict(&self, strict: bool) -> Verdict {
        let clean = self.with_complaints == 0 || !strict;
        match self.left > 0 {
            true => Verdict::Unfinished,
            false => Verdict::from_passed(self.failed == 0 && clean),
        }
    }

    pub(super) fn show(&self, terminal: &mut Terminal) -> anyhow::Result<()> {
        // A module has several kernels: the most registers and shared memory of one, the spills of all.
        let most =
            |row: &Row, of: fn(&EntryLog) -> u32| row.log.entries.iter().map(of).max().unwrap_or(0);
        Table::of(&self.kernels)
            .text("file", |row| row.file)
            .text("variant", |row| &row.variant)
            .text("arch", |row| row.arch)
            .number("registers", |row| most(row, |e| e.registers))
            .number("shared", |row| most(row, |e| e.shared))
            .number("spills", |row| {
                row.log.entries.iter().map(|e| e.spill_stores + e.spill_loads).sum::<u32>()
            })
            .number("bytes", |row| row.bytes)
            .number("compile ms", |row| table::number(row.compile_ms))
            .text("from", |row| match row.origin {
                Some(Origin::Compiled) => "compiler",
                Some(Origin::Cache) => "cache",
                Some(Origin::ReadOnly) => "read-only cache",
                None => "",
            })
            .text("verdict", |row| table::verdict(row.error.is_none() && row.complaints.is_empty()))
            .print(terminal)?;
        for row in &self.kernels {
            for text in row.complaints.iter().chain(&row.error) {
                writeln!(terminal, "{} ({}) {}: {text}", row.file, row.variant, row.arch)?;
            }
        }
        let Report { kernels, compiled, kept, failed, with_complaints, left, .. } = self;
        let all = kernels.len() + left;
        let variants = if all == 1 { "variant" } else { "variants" };
        writeln!(
            terminal,
            "{all} {variants}: {compiled} compiled now, {kept} in the cache before, {failed} do not compile, \
             {with_complaints} with complaints"
        )?;
        if *left > 0 {
            writeln!(terminal, "stopped: {left} are left, and the same command goes on with them")?;
        }
        Ok(())
    }

    /// What the cache could not do, in one line: where one file cannot be kept, most cannot.
    pub(super) fn cache_warnings(&self) -> Option<String> {
        let (first, others) = self.cache_warnings.split_first()?;
        let more = match others.len() {
            0 => String::new(),
            n => format!(" (and {n} warnings more, which --json lists)"),
        };
        Some(format!("{}: {}{more}", first.path, first.what))
    }
}
