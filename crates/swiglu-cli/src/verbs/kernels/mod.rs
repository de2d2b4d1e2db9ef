//! `swiglu kernels`: what the device kernels compile to, and a cache of them for other machines.
//!
//! Needs the run-time compiler, but neither a device nor a driver.

pub(super) mod layers;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use rayon::prelude::*;
use serde::Serialize;
use swiglu_cuda::jit::cache::{CacheOptions, CacheWarning, KernelCache, Module, Origin};
use swiglu_cuda::jit::{CompileLog, EntryLog, Variant, Version, version};
use swiglu_cuda::kernels::{NamedVariant, registry};
use swiglu_cuda::{Arch, Cuda, CudaError};

use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict, shown, stop_on_signals};
use layers::{Layers, once_each};

/// A file of this size must find room before anything is compiled for a directory.
const PROBE_BYTES: usize = 1 << 20;

#[derive(Debug, Args)]
pub(crate) struct KernelsArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Compile every variant, or take it from the cache, and show what the compiler says
    List {
        /// Architectures, separated by commas; by default that of the first device, or sm_90a without one
        #[arg(long, value_name = "NAMES", value_delimiter = ',')]
        arch: Vec<Arch>,
        #[command(flatten)]
        selection: Selection,
    },
    /// Fill a directory with compiled kernels, for machines that only read it: all, or what layers can need. It can be stopped,
    /// and goes on where it was
    Build {
        /// Architectures, separated by commas, for example sm_80,sm_90a
        #[arg(long, value_name = "NAMES", value_delimiter = ',', required = true)]
        arch: Vec<Arch>,
        /// The directory; made where it is missing. Set SWIGLU_CACHE_READ_ONLY_DIR to it to use it
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        #[command(flatten)]
        selection: Selection,
        #[command(flatten)]
        layers: Layers,
    },
}

#[derive(Debug, Args)]
struct Selection {
    /// Only variants whose file and name, with a space between the two, contain this, or one of several
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Exit code 1 if a kernel spills, has a stack frame, a warning or an advisory
    #[arg(long)]
    strict: bool,
}

pub(crate) fn kernels(args: &KernelsArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let (given, selection, named, out) = match &args.action {
        Action::List { arch, selection } => (arch, selection, None, None),
        Action::Build { arch, out, selection, layers } => {
            (arch, selection, Some((layers, layers.named()?)), Some(out))
        }
    };
    let archs = match given.is_empty() {
        true => vec![Cuda::new(0).map_or(Arch::Sm90a, |cuda| cuda.arch())],
        false => given.clone(),
    };
    let jobs = selected(&archs, selection, |arch| match &named {
        Some((layers, named)) if !named.is_empty() => layers.kernels(named, arch),
        _ => registry(arch),
    })?;
    out.map_or(Ok(()), |out| expect_room(out))?;
    let usual = || KernelCache::new(&CacheOptions::default());
    let cache = out.map_or_else(usual, KernelCache::at);
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(&stop, "the kernels that are being compiled, which are kept")?;
    let report = gather(&jobs, &cache, &stop, terminal)?;
    // From here on the first time ends it at once.
    stop.store(true, Ordering::Relaxed);
    terminal.print(&report, Report::show)?;
    let warnings = report.cache_warnings();
    if let (Some(out), Some(warnings)) = (out, &warnings) {
        expect_kept(&report, out, warnings)?;
    }
    let clean = report.with_complaints == 0 || !selection.strict;
    let verdict = match report.left > 0 {
        true => Verdict::Unfinished,
        false => Verdict::from_passed(report.failed == 0 && clean),
    };
    if terminal.json {
        return Ok(verdict);
    }
    if let Some(warnings) = warnings {
        let what = if out.is_some() { "repaired, all kernels are kept" } else { "cache" };
        writeln!(terminal, "{what}: {warnings}")?;
    }
    if let Some(out) = out.filter(|_| report.left == 0) {
        let out = std::path::absolute(out).with_context(|| out.display().to_string())?;
        writeln!(terminal, "to use it: SWIGLU_CACHE_READ_ONLY_DIR={}", out.display())?;
    }
    Ok(verdict)
}

/// Compiles kernels into the cache that a device looks into, unless it is to `stop`. What does not compile is said where it is
/// launched.
pub(super) fn compile(
    arch: Arch,
    kernels: impl Iterator<Item = NamedVariant>,
    stop: &AtomicBool,
    terminal: &Terminal,
) -> Result<()> {
    let jobs: Vec<Job> = once_each(kernels).into_iter().map(|kernel| (arch, kernel)).collect();
    gather(&jobs, &KernelCache::new(&CacheOptions::default()), stop, terminal).map(drop)
}

/// Finds out before minutes of compiling whether what comes of it can be kept.
fn expect_room(out: &Path) -> Result<()> {
    let advice = "expected a directory that can be written, with room for some tens of megabytes";
    let failed = || format!("{}: kernels cannot be kept here: {advice}", out.display());
    // In what is there of it: the rest is made with the first kernel.
    let whole = std::path::absolute(out).with_context(failed)?;
    let is_there = |path: &&Path| path.symlink_metadata().is_ok();
    let there = whole.ancestors().find(is_there).unwrap_or(&whole);
    if let (false, Ok(target)) = (there.exists(), there.read_link()) {
        let (link, target) = (there.display(), target.display());
        let why = format!("{link} is a symbolic link to {target}, which is not there");
        return Err(anyhow!(why).context(failed()));
    }
    let mut probe = tempfile::NamedTempFile::new_in(there).with_context(failed)?;
    let kept = probe.write_all(&[0; PROBE_BYTES]).and_then(|()| probe.as_file().sync_all());
    kept.with_context(failed)
}

/// What went wrong with the directory may have been put right in doing so: a damaged entry is made again.
/// Refuses to be done where a kernel that compiles is not there now.
fn expect_kept(report: &Report, out: &Path, warnings: &str) -> Result<()> {
    let again = KernelCache::at(out);
    for row in report.kernels.iter().filter(|row| row.error.is_none()) {
        if again.module(&row.kernel, row.arch)?.origin == Origin::Compiled {
            bail!("{warnings}");
        }
    }
    Ok(())
}

/// Every selected variant of every architecture, of those that there are for one.
fn selected(
    archs: &[Arch],
    selection: &Selection,
    all: impl Fn(Arch) -> Vec<NamedVariant>,
) -> Result<Vec<Job>> {
    let archs: BTreeSet<Arch> = archs.iter().copied().collect();
    let only = &selection.only;
    let wanted = |v: &NamedVariant| {
        let named = format!("{} {}", v.variant.file().name(), v.name);
        only.is_empty() || only.iter().any(|text| named.contains(text))
    };
    let jobs: Vec<Job> = archs
        .into_iter()
        .flat_map(|arch| all(arch).into_iter().filter(wanted).map(move |v| (arch, v)))
        .collect();
    if jobs.is_empty() {
        let only: Vec<String> = only.iter().map(|text| format!("{text:?}")).collect();
        bail!("no variant has {} in its file or name", only.join(" or "));
    }
    Ok(jobs)
}

/// A kernel and what it is compiled for.
type Job = (Arch, NamedVariant);

/// Seconds of a processor that a variant takes, of the slower of two machines: NVRTC 13.0 took 0.4 for sm_90a on an H200's
/// host (65 of a block, 115 element-wise), and 1.0 on two processors of a Zen 3 (18 gated GEMMs).
const SECONDS_EACH: f64 = 1.0;

/// The variants, begun in their order until it is to `stop`. What is compiled is kept at once.
fn gather(
    jobs: &[Job],
    cache: &KernelCache,
    stop: &AtomicBool,
    terminal: &Terminal,
) -> Result<Report> {
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
    Ok(report(rows, jobs.len(), cache))
}

fn report(mut rows: Vec<(usize, Row)>, jobs: usize, cache: &KernelCache) -> Report {
    rows.sort_by_key(|(at, _)| *at);
    let kernels: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
    let warning = |w: CacheWarning| CacheWarning { path: shown(&w.path).into(), ..w };
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
fn row(arch: Arch, of: &NamedVariant, module: Result<Module, CudaError>) -> Result<Row, CudaError> {
    let (module, error) = match module {
        Ok(module) => (Some(module), None),
        Err(CudaError::Compile { log, .. }) => (None, Some(log)),
        Err(e) => return Err(e),
    };
    let log = module.as_ref().map(|m| m.report.log.clone());
    Ok(Row {
        kernel: of.variant,
        file: of.variant.file().name(),
        variant: of.name.clone(),
        arch,
        origin: module.as_ref().map(|m| m.origin),
        bytes: module.as_ref().map_or(0, |m| m.cubin.len()),
        compile_ms: module.as_ref().map_or(0.0, |m| m.report.millis),
        compiler: module.as_ref().map(|m| m.report.nvrtc),
        complaints: log.as_ref().map(CompileLog::complaints).unwrap_or_default(),
        log: log.unwrap_or_default(),
        error,
    })
}

#[derive(Debug, Serialize)]
struct Row {
    #[serde(skip)]
    kernel: Variant,
    file: &'static str,
    variant: String,
    arch: Arch,
    /// Where the module came from; nothing if it does not compile.
    origin: Option<Origin>,
    bytes: usize,
    compile_ms: f64,
    compiler: Option<Version>,
    #[serde(flatten)]
    log: CompileLog,
    complaints: Vec<String>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    kernels: Vec<Row>,
    compiled: usize,
    /// Those that were in the cache.
    kept: usize,
    failed: usize,
    with_complaints: usize,
    /// Those that the program was stopped before.
    left: usize,
    /// What kept a kernel from being read or kept: path and what happened.
    cache_warnings: Vec<CacheWarning>,
}

impl Report {
    fn show(&self, terminal: &mut Terminal) -> Result<()> {
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
    fn cache_warnings(&self) -> Option<String> {
        let (first, others) = self.cache_warnings.split_first()?;
        let more = format!(" (and {} warnings more, which --json lists)", others.len());
        let more = if others.is_empty() { "" } else { &more };
        Some(format!("{}: {}{more}", first.path.display(), first.what))
    }
}
