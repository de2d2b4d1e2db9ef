//! `swiglu kernels`: what the device kernels compile to, and a cache of them for other machines.
//!
//! Needs the run-time compiler, but neither a device nor a driver.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use rayon::prelude::*;
use serde::Serialize;
use swiglu_cuda::jit::cache::{CacheOptions, CacheWarning, KernelCache, Module, Origin};
use swiglu_cuda::jit::{CompileLog, EntryLog, Version};
use swiglu_cuda::kernels::{NamedVariant, registry};
use swiglu_cuda::{Arch, Cuda, CudaError};

use crate::table::{self, Table};
use crate::terminal::{Shown, Terminal, Verdict};

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
    List(ListArgs),
    /// Fill a directory with compiled kernels, for machines that only read it
    Build(BuildArgs),
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

#[derive(Debug, Args)]
struct ListArgs {
    /// Architectures, separated by commas; by default that of the first device, or sm_90a without one
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    arch: Vec<Arch>,
    #[command(flatten)]
    selection: Selection,
}

#[derive(Debug, Args)]
struct BuildArgs {
    /// Architectures, separated by commas, for example sm_80,sm_90a
    #[arg(long, value_name = "NAMES", value_delimiter = ',', required = true)]
    arch: Vec<Arch>,
    /// The directory; made where it is missing. Set SWIGLU_CACHE_READ_ONLY_DIR to it to use it
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    selection: Selection,
}

/// What became of one variant on one architecture.
#[derive(Debug, Serialize)]
struct Row {
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
struct Warning {
    path: Shown,
    what: String,
}

#[derive(Debug, Serialize)]
struct Report {
    kernels: Vec<Row>,
    compiled: usize,
    failed: usize,
    with_complaints: usize,
    /// What kept a kernel from being read or kept: path and what happened.
    cache_warnings: Vec<Warning>,
}

impl Report {
    fn verdict(&self, selection: &Selection) -> Verdict {
        let clean = self.with_complaints == 0 || !selection.strict;
        Verdict::from_passed(self.failed == 0 && clean)
    }

    fn show(&self, terminal: &mut Terminal) -> anyhow::Result<()> {
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
        let Report { kernels, compiled, failed, with_complaints, .. } = self;
        let variants = kernels.len();
        writeln!(
            terminal,
            "{variants} variants: {compiled} compiled now, {failed} do not compile, {with_complaints} with complaints"
        )?;
        Ok(())
    }

    /// What the cache could not do, in one line: where one file cannot be kept, most cannot.
    fn cache_warnings(&self) -> Option<String> {
        let (first, others) = self.cache_warnings.split_first()?;
        let more = match others.len() {
            0 => String::new(),
            n => format!(" (and {n} warnings more, which --json lists)"),
        };
        Some(format!("{}: {}{more}", first.path.display(), first.what))
    }
}

pub(crate) fn kernels(args: &KernelsArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    match &args.action {
        Action::List(list) => {
            let archs = match list.arch.is_empty() {
                true => vec![Cuda::new(0).map_or(Arch::Sm90a, |cuda| cuda.arch())],
                false => list.arch.clone(),
            };
            let cache = KernelCache::new(&CacheOptions::default());
            let report = gather(&jobs(&archs, &list.selection)?, &cache, terminal)?;
            terminal.print(&report, Report::show)?;
            if let (Some(warnings), false) = (report.cache_warnings(), terminal.json()) {
                writeln!(terminal, "cache: {warnings}")?;
            }
            Ok(report.verdict(&list.selection))
        }
        Action::Build(build) => {
            let jobs = jobs(&build.arch, &build.selection)?;
            expect_room(&build.out)?;
            let report = gather(&jobs, &KernelCache::at(&build.out), terminal)?;
            terminal.print(&report, Report::show)?;
            let warnings = report.cache_warnings();
            if let Some(warnings) = &warnings {
                expect_kept(&jobs, &report, &build.out, warnings)?;
            }
            if !terminal.json() {
                if let Some(warnings) = warnings {
                    writeln!(terminal, "repaired, all kernels are kept: {warnings}")?;
                }
                let out = std::path::absolute(&build.out)
                    .with_context(|| build.out.display().to_string())?;
                writeln!(terminal, "to use it: SWIGLU_CACHE_READ_ONLY_DIR={}", out.display())?;
            }
            Ok(report.verdict(&build.selection))
        }
    }
}

/// Finds out before minutes of compiling whether what comes of it can be kept.
fn expect_room(out: &Path) -> anyhow::Result<()> {
    let advice = "expected a directory that can be written, with room for some tens of megabytes";
    let failed = || format!("{}: kernels cannot be kept here: {advice}", out.display());
    std::fs::create_dir_all(out).with_context(failed)?;
    let mut probe = tempfile::NamedTempFile::new_in(out).with_context(failed)?;
    probe
        .write_all(&[0; PROBE_BYTES])
        .and_then(|()| probe.as_file().sync_all())
        .with_context(failed)
}

/// What went wrong with the directory may have been put right in doing so: a damaged entry is made again.
/// Refuses to be done where a kernel that compiles is not there now.
fn expect_kept(
    jobs: &[(Arch, NamedVariant)],
    report: &Report,
    out: &Path,
    warnings: &str,
) -> anyhow::Result<()> {
    let again = KernelCache::at(out);
    let compiles = jobs.iter().zip(&report.kernels).filter(|(_, row)| row.error.is_none());
    for ((arch, named), _) in compiles {
        if again.module(&named.variant, *arch)?.origin == Origin::Compiled {
            bail!("{warnings}");
        }
    }
    Ok(())
}

/// Every selected variant of every architecture.
fn jobs(archs: &[Arch], selection: &Selection) -> anyhow::Result<Vec<(Arch, NamedVariant)>> {
    let archs: BTreeSet<Arch> = archs.iter().copied().collect();
    let only = &selection.only;
    let wanted = |v: &NamedVariant| {
        let named = format!("{} {}", v.variant.file().name(), v.name);
        only.is_empty() || only.iter().any(|text| named.contains(text))
    };
    let jobs: Vec<(Arch, NamedVariant)> = archs
        .into_iter()
        .flat_map(|arch| registry(arch).into_iter().filter(wanted).map(move |v| (arch, v)))
        .collect();
    if jobs.is_empty() {
        let only: Vec<String> = only.iter().map(|text| format!("{text:?}")).collect();
        bail!("no variant has {} in its file or name", only.join(" or "));
    }
    Ok(jobs)
}

/// The variants, compiled on all processors.
fn gather(
    jobs: &[(Arch, NamedVariant)],
    cache: &KernelCache,
    terminal: &Terminal,
) -> anyhow::Result<Report> {
    terminal.announce(&beginning(jobs));
    let bar = terminal.bar(jobs.len() as u64);
    let kernels: Vec<Row> = jobs
        .par_iter()
        .map(|(arch, named)| {
            let row = row(*arch, named, cache.module(&named.variant, *arch));
            bar.inc(1);
            row
        })
        .collect::<Result<_, CudaError>>()?;
    bar.finish_and_clear();
    let warning = |w: CacheWarning| Warning { path: w.path.into(), what: w.what };
    let count = |what: fn(&Row) -> bool| kernels.iter().filter(|row| what(row)).count();
    Ok(Report {
        compiled: count(|row| row.origin == Some(Origin::Compiled)),
        failed: count(|row| row.error.is_some()),
        with_complaints: count(|row| !row.complaints.is_empty()),
        cache_warnings: cache.warnings().into_iter().map(warning).collect(),
        kernels,
    })
}

/// What takes a minute where little of it is in the cache.
fn beginning(jobs: &[(Arch, NamedVariant)]) -> String {
    let archs: BTreeSet<Arch> = jobs.iter().map(|(arch, _)| *arch).collect();
    let archs: Vec<String> = archs.iter().map(Arch::to_string).collect();
    let variants = if jobs.len() == 1 { "variant" } else { "variants" };
    format!("{} {variants} for {}: compiling what is not kept", jobs.len(), archs.join(", "))
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
