//! What was measured on a device: every algorithm for a problem, also those that were refused.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use swiglu_core::{Op, Problem};

use crate::device::arch::Arch;
use crate::device::digest::{hex, of_texts};
use crate::device::facts::DeviceFacts;
use crate::device::files;
use crate::device::jit::{KernelFile, sources_of};
use crate::kernels::{elementwise, gated_gemm};
use crate::plan::Algorithm;
use crate::plan::machine::Rates;

/// The version of the format. Records of another are refused.
pub const SCHEMA: u32 = 1;

/// Measurements on one kind of device, of one version of the kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`SCHEMA`] when it was written.
    pub schema: u32,
    /// What was measured on, and what.
    pub subject: Subject,
    /// The CUDA version of the driver then: major and minor.
    pub driver: (u32, u32),
    /// What the device said of its rates; unknown in early records. With them a record tells something of devices of the
    /// same architecture, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// The problems, in the order of their first measurement.
    pub entries: Vec<Entry>,
}

/// What the times of a record depend on besides the problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// For example `NVIDIA H200`.
    pub device: String,
    /// What kernels were compiled for.
    pub arch: Arch,
    /// SMs: a part of a device is another one.
    pub sm_count: u32,
    /// A hash of the device files.
    pub source: String,
    /// A hash of the names of all algorithms there were to try.
    pub space: String,
}

/// One problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// What was computed.
    pub problem: Problem,
    /// Whether f32 products rounded their inputs to TF32.
    pub tf32: bool,
    /// Every algorithm there is; of some shipped records without those that do not compute it.
    pub trials: Vec<Trial>,
}

/// One algorithm for the problem.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Its name, for example `sm90_gated_gemm 128x64`.
    pub way: String,
    /// Microseconds that the cost model expected, where it computes the problem.
    pub predicted_us: Option<f64>,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What came of trying an algorithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// Its result was right, and it took so many microseconds.
    Measured {
        /// The median.
        median_us: f64,
        /// The 10th percentile.
        p10_us: f64,
        /// The 90th percentile.
        p90_us: f64,
        /// Turns.
        samples: usize,
    },
    /// It rounds otherwise than was asked for, so that it is no choice. By its own rounding its result
    /// was right, and for comparison it took so many microseconds.
    Compared {
        /// The median.
        median_us: f64,
        /// The 10th and the 90th percentile; records of before they were kept have none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        p10_p90_us: Option<[f64; 2]>,
        /// What it rounds otherwise.
        reason: String,
    },
    /// It does not compute this problem.
    Refused {
        /// Why.
        reason: String,
    },
    /// Its result was outside the bounds: its time does not count.
    Wrong {
        /// By how much.
        reason: String,
    },
    /// It could not be compiled or launched.
    Failed {
        /// What the compiler or the driver said.
        reason: String,
    },
}

impl Outcome {
    /// The median time in microseconds of an algorithm whose result was right.
    pub fn median_us(&self) -> Option<f64> {
        match self {
            Outcome::Measured { median_us, .. } | Outcome::Compared { median_us, .. } => {
                Some(*median_us)
            }
            Outcome::Refused { .. } | Outcome::Wrong { .. } | Outcome::Failed { .. } => None,
        }
    }
}

/// Why a record is not used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    /// The file is not what was written.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// The format is another version's.
    #[error("its format is {given}, expected {SCHEMA}; measure again with `swiglu tune`")]
    Schema {
        /// The format it has.
        given: u32,
    },
    /// It is of another device.
    #[error("it was measured on {recorded}, and this is {here}")]
    Device {
        /// The device it is of.
        recorded: String,
        /// This one.
        here: String,
    },
    /// The device code is another one now.
    #[error("the kernels have changed since; measure again with `swiglu tune`")]
    Source,
}

impl Subject {
    /// What this program would measure on a device.
    pub fn here(facts: &DeviceFacts, arch: Arch) -> Self {
        // A block has every algorithm that there is.
        let ways: String = Algorithm::all(Op::Mlp).map(|way| format!("{way}\n")).collect();
        Self {
            device: facts.name.clone(),
            arch,
            sm_count: facts.sm_count,
            source: hash_of(gated_gemm::files().into_iter().chain([elementwise::forward_file()])),
            space: digest(&ways),
        }
    }

    fn device(&self) -> String {
        device_of_kind(&self.device, self.arch, self.sm_count)
    }
}

/// A kind of device, as a refusal names it.
pub(super) fn device_of_kind(device: &str, arch: Arch, sm_count: u32) -> String {
    format!("{device} ({arch}, {sm_count} SMs)")
}

/// Device files with every header that they include: their code, as comments take no time.
pub(in crate::plan) fn hash_of(files: impl Iterator<Item = &'static KernelFile>) -> String {
    let sources = files.flat_map(sources_of);
    hex(&of_texts(sources.flat_map(|(name, text)| [name.to_owned(), code_of(text)]))[..16])
}

/// A device file without its comments, which all begin with two slashes, and without what indents and
/// ends its lines. None has slashes in a string.
fn code_of(text: &str) -> String {
    let lines =
        text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code).trim());
    lines.filter(|line| !line.is_empty()).flat_map(|line| [line, "\n"]).collect()
}

fn digest(text: &str) -> String {
    hex(&Sha256::digest(text)[..16])
}

/// A file is one JSON object: a digest, and the record, or what else was measured, whose text it is of.
const HEAD: &str = "{\"digest\": \"";
const MIDDLE: &str = "\",\n\"record\": ";
const TAIL: &str = "}\n";

/// What a record says of itself before anything else of it is believed.
#[derive(Deserialize)]
struct Version {
    schema: u32,
}

/// The text of a file.
pub(in crate::plan) fn seal(body: &str) -> String {
    format!("{HEAD}{}{MIDDLE}{body}{TAIL}", digest(body))
}

/// The text of a file whose last field is its entries: an entry is a line.
pub(super) fn lines(
    without: &impl Serialize,
    entries: &[impl Serialize],
) -> serde_json::Result<String> {
    let rest = serde_json::to_string(without)?;
    let (head, tail) = rest.split_at(rest.len() - "]}".len());
    let lines: Result<Vec<_>, _> = entries.iter().map(serde_json::to_string).collect();
    Ok(seal(&format!("{head}\n{}\n{tail}", lines?.join(",\n"))))
}

/// What a file has, if it is whole and of this version.
pub(super) fn unseal<T: DeserializeOwned>(text: &str) -> Result<T, Refusal> {
    let parts = text.strip_prefix(HEAD).and_then(|rest| rest.split_once(MIDDLE));
    let parts = parts.and_then(|(digest, rest)| Some((digest, rest.strip_suffix(TAIL)?)));
    let Some((expected, body)) = parts else {
        return Err(Refusal::Damaged("no digest and record in it".into()));
    };
    if digest(body) != expected {
        return Err(Refusal::Damaged("its digest does not match".into()));
    }
    let damaged = |e: serde_json::Error| Refusal::Damaged(e.to_string());
    // Before the fields: another version may have others.
    let Version { schema } = serde_json::from_str(body).map_err(damaged)?;
    if schema != SCHEMA {
        return Err(Refusal::Schema { given: schema });
    }
    serde_json::from_str(body).map_err(damaged)
}

/// What a file has, if it is whole and of this version; nothing if there is no such file.
pub(in crate::plan) fn read_sealed<T: DeserializeOwned>(
    path: &Path,
    most_bytes: u64,
) -> Result<Option<T>, Refusal> {
    let bytes = files::read(path, most_bytes).map_err(Refusal::Unreadable)?;
    let text = bytes.map(String::from_utf8).transpose();
    let text = text.map_err(|e| Refusal::Damaged(e.to_string()))?;
    text.as_deref().map(unseal).transpose()
}

impl Record {
    /// An empty record.
    pub fn new(subject: Subject, driver: (u32, u32)) -> Self {
        Self { schema: SCHEMA, subject, driver, rates: None, entries: Vec::new() }
    }

    /// Adds an entry, in the place of one of the same problem.
    pub fn insert(&mut self, entry: Entry) {
        let same = |e: &&mut Entry| e.problem == entry.problem && e.tf32 == entry.tf32;
        match self.entries.iter_mut().find(same) {
            Some(known) => *known = entry,
            None => self.entries.push(entry),
        }
    }

    /// The record as a file has it.
    pub(super) fn to_text(&self) -> serde_json::Result<String> {
        lines(&Self { entries: Vec::new(), ..self.clone() }, &self.entries)
    }

    /// The rates of the device it was measured on, where that is one like `here`: as many SMs of the same architecture.
    pub(super) fn like(&self, here: &Subject) -> Option<Rates> {
        let Subject { arch, sm_count, .. } = self.subject;
        self.rates.filter(|_| (arch, sm_count) == (here.arch, here.sm_count))
    }

    /// Whether it is about what `here` says; the device code last.
    pub(super) fn check(&self, here: &Subject) -> Result<(), Refusal> {
        let (recorded, expected) = (self.subject.device(), here.device());
        if recorded != expected {
            return Err(Refusal::Device { recorded, here: expected });
        }
        if self.subject.source == here.source { Ok(()) } else { Err(Refusal::Source) }
    }
}

impl Entry {
    /// What came of every algorithm. Times are rounded to nanoseconds.
    pub fn new(problem: Problem, tf32: bool, mut trials: Vec<Trial>) -> Self {
        trials.iter_mut().for_each(Trial::round);
        Self { problem, tf32, trials }
    }
}

impl Trial {
    fn round(&mut self) {
        self.predicted_us.iter_mut().for_each(round);
        self.outcome.round();
    }
}

impl Outcome {
    /// To nanoseconds: what is written is what is read again.
    pub(super) fn round(&mut self) {
        match self {
            Outcome::Measured { median_us, p10_us, p90_us, .. } => {
                [median_us, p10_us, p90_us].into_iter().for_each(round);
            }
            Outcome::Compared { median_us, p10_p90_us, .. } => {
                std::iter::once(median_us).chain(p10_p90_us.iter_mut().flatten()).for_each(round);
            }
            Outcome::Refused { .. } | Outcome::Wrong { .. } | Outcome::Failed { .. } => {}
        }
    }
}

fn round(us: &mut f64) {
    *us = (*us * 1e3).round() / 1e3;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_indentation_are_no_code() {
        let text = "// head\n#pragma once\n\n  int a;  // why\n\tint b;\n";
        assert_eq!(code_of(text), "#pragma once\nint a;\nint b;\n");
        let files = gated_gemm::files().into_iter().chain([elementwise::forward_file()]);
        for (_, text) in files.flat_map(sources_of) {
            assert!(!text.contains("/*"), "a comment of another form");
            assert!(
                !text.lines().any(|l| l.split('"').skip(1).step_by(2).any(|s| s.contains("//")))
            );
        }
    }
}
