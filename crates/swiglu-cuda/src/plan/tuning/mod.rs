//! Measurements that a plan is chosen by: what was measured on this device before, else on one of its
//! kind and shipped with this program.
//!
//! A record says what it was measured on and of: device, architecture, the device code, the algorithms
//! there were to choose from. It is verified when it is read, and one that is damaged, or of a device that says nothing of
//! this one, is not used, with its reason. The record counts that has what is nearest to
//! a problem; of several, in this order: of this device by the user, shipped with this
//! program, of earlier device code, and of another device with as many SMs of the same architecture. What it has corrects the
//! cost model (`table.rs`); algorithms that were not measured there are not taken. Without any, the model
//! alone decides. Nothing about a record is an error of a computation; [`crate::Cuda::tuning_notes`] says what was found.

mod gemms;
mod record;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use swiglu_core::{Op, Problem};

use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;
use crate::device::files::{self, Environment, named_by, users_directory};
use crate::device::lt::Measured;
pub use crate::device::lt::{Gemm, GemmAlgorithm};
use crate::kernels::decode_mlp::MOST_TOKENS;
pub(super) use gemms::{DOWN, DX, GATE_UP, GemmSubject, keep as keep_gemms};
pub use gemms::{GemmEntry, GemmTrial, gemms_of_step};
use record::unseal;
pub use record::{Entry, Outcome, Record, Refusal, SCHEMA, Subject, Trial};
pub(super) use record::{hash_of, read_sealed, seal};
pub(crate) use table::Near;
use table::Table;

pub use super::machine::Rates;
use super::machine::{Machine, Model};
use super::of_h;

/// Where measurements are kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TuningOptions {
    /// The directory; by default `SWIGLU_TUNING_DIR`, else `swiglu/tuning` in `XDG_DATA_HOME`, else
    /// `~/.local/share/swiglu/tuning`.
    pub dir: Option<PathBuf>,
    /// Use no record, neither the user's nor a shipped one.
    pub disabled: bool,
}

/// Why measurements were not kept.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}: measurements cannot be kept there: {why}; give a directory that can be written", path.display())]
pub struct NotKept {
    /// The file or directory.
    pub path: PathBuf,
    /// The reason.
    pub why: String,
}

macro_rules! record {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../tuning/", $name)))
    };
}

/// Records that are part of this program, by file name: entries as `swiglu tune` wrote them. Of those for one device the
/// first that has a problem counts; between its name and `.json` a file's name may say what it is of.
pub(super) static SHIPPED: &[(&str, &str)] = &[
    record!("nvidia-h100-80gb-hbm3-sm_90a.json"),
    record!("nvidia-h200-sm_90a.blocks-128.json"),
    record!("nvidia-h200-sm_90a.blocks-8192.json"),
    record!("nvidia-h200-sm_90a.blocks.json"),
    record!("nvidia-h200-sm_90a.json"),
    record!("nvidia-h200-sm_90a.tokens.json"),
];

/// The same of cuBLASLt's proposals, by `swiglu tune --training`: of each product the first and the fastest.
pub(super) static SHIPPED_GEMMS: &[(&str, &str)] = &[record!("nvidia-h200-sm_90a.gemms.json")];

/// The shipped records of an architecture.
pub(super) fn shipped(arch: Arch) -> impl Iterator<Item = Record> {
    let of_arch = SHIPPED.iter().filter(move |(file, _)| file.contains(arch.name()));
    of_arch.filter_map(|(_, text)| unseal(text).ok())
}

/// Larger files are none of ours.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// How long to wait for another process that writes the same record, which takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

impl NotKept {
    pub(super) fn nowhere() -> Self {
        Self { path: "~".into(), why: "nothing says where: set SWIGLU_TUNING_DIR".into() }
    }
}

impl TuningOptions {
    /// The directory, unless nothing says where it would be.
    pub fn directory(&self) -> Option<PathBuf> {
        self.resolve(&|name| std::env::var_os(name))
    }

    fn resolve(&self, env: Environment<'_>) -> Option<PathBuf> {
        let given = self.dir.clone().or_else(|| named_by(env, "SWIGLU_TUNING_DIR"));
        given.or_else(|| users_directory(env, "XDG_DATA_HOME", ".local/share", "swiglu/tuning"))
    }
}

/// `nvidia-h200-sm_90a.json`: devices of one kind share files of each ending.
pub(super) fn file_name(device: &str, arch: Arch, ending: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let device: String = device.chars().map(plain).collect();
    format!("{device}-{arch}.{ending}")
}

/// Measurements in order of preference, and what was said when they were looked for.
#[derive(Debug, Default)]
pub(crate) struct Tuning {
    tables: Vec<Source>,
    /// Of cuBLASLt's algorithms.
    pub(super) gemms: Vec<Arc<Measured>>,
    pub(super) notes: Vec<String>,
}

/// Whose measurements they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Measured here, or by another user of the directory.
    Measured,
    /// Part of this program.
    Shipped,
    /// Of another device with as many SMs of the same architecture.
    Like,
}

/// A record that is used.
#[derive(Debug)]
struct Source {
    origin: Origin,
    /// Whether the device code has changed since.
    earlier: bool,
    table: Table,
}

impl Source {
    /// A record that tells something of this device, and what is said of it.
    fn new(
        mut origin: Origin,
        record: &Record,
        here: &Subject,
        driver: (u32, u32),
        mut model: Model,
    ) -> Result<(Self, String), Refusal> {
        let mut said = String::new();
        match record.check(here) {
            Ok(()) => {}
            Err(Refusal::Source) => said += ", of earlier kernels",
            Err(refusal) => {
                let rates = record.like(here).ok_or(refusal)?;
                said += &format!(", of {}, a device like this one", record.subject.device);
                origin = Origin::Like;
                model.machine = Machine::new(&rates, here.sm_count, here.arch);
            }
        }
        said += &format!(": {} problems measured", record.entries.len());
        let (major, minor) = record.driver;
        if record.driver != driver {
            said += &format!(", with driver {major}.{minor}");
        }
        let earlier = record.subject.source != here.source;
        Ok((Self { origin, earlier, table: Table::new(record, &model) }, said))
    }
}

impl Tuning {
    /// The user's record in `dir`, and those of what is shipped with this program that tell something of a device.
    pub(super) fn read(
        dir: Option<&Path>,
        shipped: &[(&str, &str)],
        facts: &DeviceFacts,
        arch: Arch,
        model: &Model,
    ) -> Self {
        let mut tuning = Self::default();
        let here = Subject::here(facts, arch);
        let users = dir.map(|dir| {
            let path = dir.join(file_name(&here.device, arch, "json"));
            (Origin::Measured, path.display().to_string(), read_sealed(&path, MAX_FILE_BYTES))
        });
        // Of another architecture there are other kernels; the name is enough to know.
        let of_arch = shipped.iter().filter(|(file, _)| file.contains(arch.name()));
        let shipped = of_arch.map(|(file, text)| {
            (Origin::Shipped, format!("shipped {file}"), unseal(text).map(Some))
        });
        for (origin, what, record) in users.into_iter().chain(shipped) {
            let Some(record) = record.transpose() else { continue };
            match record.and_then(|r| Source::new(origin, &r, &here, facts.driver_version, *model))
            {
                Ok((source, said)) => {
                    tuning.notes.push(what + &said);
                    tuning.tables.push(source);
                }
                // One that is shipped for others is no news.
                Err(Refusal::Device { .. }) if origin == Origin::Shipped => {}
                Err(refusal) => tuning.notes.push(format!("{what}: not used: {refusal}")),
            }
        }
        // Of one rank the order stays: what the user measured, then what is shipped.
        tuning.tables.sort_by_key(|table| (table.origin == Origin::Like, table.earlier));
        let here = GemmSubject::here(facts, arch);
        let (gemms, notes) = gemms::read(dir, SHIPPED_GEMMS, &here);
        tuning.gemms = gemms;
        tuning.notes.extend(notes);
        tuning
    }

    /// What was measured nearest to a problem; of several records that say as much, by the first. Of a block of more tokens
    /// than kernels for whole blocks take it may be of its gated linear layer. It allocates nothing.
    pub(crate) fn near(&self, problem: &Problem, tf32: bool) -> Option<(Origin, Near<'_>)> {
        let of = |problem: &Problem| {
            let tables = self.tables.iter().map(|source| (source.origin, &source.table));
            let all = tables.filter_map(|(of, table)| Some((of, table.near(problem, tf32)?)));
            // Of equals it is the first.
            all.min_by_key(|(_, near)| near.rank(problem))
        };
        let whole = of(problem);
        if problem.op != Op::Mlp || problem.m <= MOST_TOKENS {
            return whole;
        }
        let of_h = of(&of_h(problem)).map(|(origin, near)| (origin, near.of_h()));
        [whole, of_h].into_iter().flatten().min_by_key(|(_, near)| near.rank(problem))
    }
}

/// Adds entries to the record of this kind of device in `dir`. What the file has of the same problems
/// is replaced, and so is a file that was read and is refused: its reason is returned beside the path.
///
/// # Errors
/// [`NotKept`]. The file is then as it was.
pub(crate) fn keep(
    dir: &Path,
    subject: Subject,
    driver: (u32, u32),
    rates: Rates,
    entries: Vec<Entry>,
) -> Result<(PathBuf, Option<Refusal>), NotKept> {
    let path = dir.join(file_name(&subject.device, subject.arch, "json"));
    let checked = |record: &Record| record.check(&subject);
    let (empty, adds) = (Record::new(subject.clone(), driver), !entries.is_empty());
    let add = |record: &mut Record| {
        (record.driver, record.rates) = (driver, Some(rates));
        entries.into_iter().for_each(|entry| record.insert(entry));
        record.to_text()
    };
    rewrite(dir, path, empty, checked, adds.then_some(add))
}

/// Writes what `change` makes of the file at a path, or of an empty one where there is none, or none that passes `check`: its
/// reason is returned beside the path. Without a change a file can be written there, and nothing is.
///
/// # Errors
/// [`NotKept`]. The file is then as it was.
fn rewrite<F: DeserializeOwned>(
    dir: &Path,
    path: PathBuf,
    empty: F,
    check: impl Fn(&F) -> Result<(), Refusal>,
    change: Option<impl FnOnce(&mut F) -> serde_json::Result<String>>,
) -> Result<(PathBuf, Option<Refusal>), NotKept> {
    let not_kept = |why: String| NotKept { path: path.clone(), why };
    // Two processes that both add to what they have read would each lose the other's entries.
    let lock = path.with_extension("json.lock");
    let _lock = files::lock(&lock, PATIENCE).map_err(not_kept)?;
    let checked = |file: F| check(&file).map(|()| file);
    let (known, refusal) =
        match read_sealed(&path, MAX_FILE_BYTES).and_then(|file| file.map(checked).transpose()) {
            Ok(known) => (known, None),
            // Nobody knows what is in it.
            Err(Refusal::Unreadable(why)) => return Err(not_kept(why)),
            Err(refusal) => (None, Some(refusal)),
        };
    if let Some(change) = change {
        let text = change(&mut known.unwrap_or(empty)).map_err(|e| not_kept(e.to_string()))?;
        files::write_whole(dir, &path, text.as_bytes()).map_err(|e| not_kept(e.to_string()))?;
    }
    Ok((path, refusal))
}

#[cfg(test)]
mod tests;
