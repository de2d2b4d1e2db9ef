//! `swiglu kernels`: what the device kernels compile to, and a cache of them for other machines.
//!
//! Needs the run-time compiler, but neither a device nor a driver.

mod gather;
pub(super) mod layers;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use swiglu_cuda::jit::cache::{CacheOptions, KernelCache, Origin};
use swiglu_cuda::kernels::{NamedVariant, registry};
use swiglu_cuda::{Arch, Cuda};

use crate::terminal::{Terminal, Verdict};
use gather::{Job, Report, gather};
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

pub(crate) fn kernels(args: &KernelsArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
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
    let cache = match out {
        Some(out) => {
            expect_room(out)?;
            KernelCache::at(out)
        }
        None => KernelCache::new(&CacheOptions::default()),
    };
    let report = gather(&jobs, &cache, terminal)?;
    terminal.print(&report, Report::show)?;
    let warnings = report.cache_warnings();
    if let (Some(out), Some(warnings)) = (out, &warnings) {
        expect_kept(&report, out, warnings)?;
    }
    let verdict = report.verdict(selection.strict);
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

/// Compiles kernels for a device into the cache that it looks into, on all processors. What does not compile is said where it
/// is launched.
pub(super) fn compile(
    arch: Arch,
    kernels: impl Iterator<Item = NamedVariant>,
    terminal: &Terminal,
) -> anyhow::Result<()> {
    let jobs: Vec<Job> = once_each(kernels).into_iter().map(|kernel| (arch, kernel)).collect();
    let report = gather(&jobs, &KernelCache::new(&CacheOptions::default()), terminal)?;
    if report.left > 0 {
        bail!("stopped with {} of {} kernels to compile", report.left, jobs.len());
    }
    Ok(())
}

/// Finds out before minutes of compiling whether what comes of it can be kept.
fn expect_room(out: &Path) -> anyhow::Result<()> {
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
    probe
        .write_all(&[0; PROBE_BYTES])
        .and_then(|()| probe.as_file().sync_all())
        .with_context(failed)
}

/// What went wrong with the directory may have been put right in doing so: a damaged entry is made again.
/// Refuses to be done where a kernel that compiles is not there now.
fn expect_kept(report: &Report, out: &Path, warnings: &str) -> anyhow::Result<()> {
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
) -> anyhow::Result<Vec<Job>> {
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
