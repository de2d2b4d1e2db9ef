//! Experiments as data: what is asked, who competes, over which cases, and what is claimed.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use swiglu_core::Numerics;

use crate::case::{Case, DeviceKind};
use crate::error::{LabError, Result};
use crate::files::{entries, file_stem};
use crate::place::text_of;
use crate::record::content_hash;
use crate::text::{Named, named};

mod claim;
mod read;
mod values;

pub use claim::{Against, Claim, ClaimKind};

/// The schema of definitions that this program reads.
pub const DEFINITION_SCHEMA: usize = 2;

/// An experiment, its cases expanded and everything checked; by default one that asks, measures and claims nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Experiment {
    /// Unique, and the stem of its file.
    pub id: String,
    /// Another experiment, which measures the same for another claim, and whose records answer this one.
    pub records: Option<String>,
    /// One line.
    pub title: String,
    /// One sentence that ends in a question mark.
    pub question: String,
    /// Why the answer matters.
    pub why: String,
    /// Where it runs.
    pub device: DeviceKind,
    /// Who competes.
    pub profiles: Vec<ProfileDef>,
    /// What is computed, in the order of the definition.
    pub cases: Vec<Case>,
    /// What is measured: latency, traffic, validation.
    pub metrics: Vec<String>,
    /// How turns follow each other.
    pub pace: Pace,
    /// What is claimed.
    pub claim: Claim,
    /// What the evidence does not cover.
    pub boundary: String,
    /// Ids of the decisions that rest on it.
    pub decisions: Vec<String>,
    /// Identity of what is measured: see [`Experiment::definition_hash`].
    pub definition_hash: String,
    /// The file it was read from.
    pub path: PathBuf,
}

/// What comes before each turn that counts, of the profile whose turn it is, and how long a turn is. By default
/// turns follow each other at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pace {
    /// Milliseconds in which nothing runs: what has piled up of heat and power is gone.
    #[serde(default)]
    pub rest_ms: u64,
    /// Milliseconds of calls that do not count, after the rest: clocks come to be what these calls let them be,
    /// whoever ran before.
    #[serde(default)]
    pub warm_ms: u64,
    /// Milliseconds that a turn takes at most, unless the least that a peer gives takes longer, some calls; 0: as
    /// usual.
    #[serde(default)]
    pub turn_ms: u64,
}

impl Pace {
    /// More than this, of any, is a slip.
    pub(crate) const MOST_MS: u64 = 10_000;

    /// Whether nothing is set.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// One way of computing the cases.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileDef {
    /// Unique within the experiment.
    pub id: String,
    /// The peer: `swiglu` is this program, `read` what it reads alone, any other a program of `lab/peers`.
    pub peer: String,
    /// What the peer is told, as it understands it. `tf32 = true` also widens the error bounds of
    /// f32 results.
    #[serde(default)]
    pub options: Map<String, Value>,
    /// What part it plays.
    pub role: Role,
    /// The roundings it promises and is judged by; by default those of the case for our own and
    /// `eager+fast`, the weakest, for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numerics: Option<Named<Numerics>>,
    /// It is the fastest of so many ways at most, of which a case may have fewer or none: the peer is asked for one
    /// after the other by the option `candidate`, from 1 on. All of them take turns; the fastest is recorded, with its plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_of: Option<usize>,
}

/// The option that names one of several ways.
const CANDIDATE: &str = "candidate";
/// More ways than this are not one profile's.
const MOST_WAYS: usize = 64;

impl ProfileDef {
    /// Its ways, each as a profile of the same name.
    pub(crate) fn ways(&self) -> Vec<Self> {
        let Some(most) = self.best_of else { return vec![self.clone()] };
        let way = |at: usize| {
            let mut way = self.clone();
            way.options.insert(CANDIDATE.into(), at.into());
            way
        };
        (1..=most).map(way).collect()
    }
}

named! {
    /// What part a profile plays.
    #[derive(Default)]
    pub enum Role {
        /// This project.
        #[default]
        Ours = "ours",
        /// What users have today: ratios are relative to the first baseline.
        Baseline = "baseline",
        /// A competitor.
        Peer = "peer",
        /// A limit, which computes less than the case: not verified, never ranked.
        Ceiling = "ceiling",
        /// A way that is known to be bad, shown so that nobody takes it: never ranked.
        Warning = "warning",
    }
}

impl Role {
    /// Whether it can be the best of a case.
    pub const fn is_ranked(self) -> bool {
        matches!(self, Role::Ours | Role::Baseline | Role::Peer)
    }
}

/// Groups of metrics: time per call, bytes and operations per second, distance from the oracle.
const METRICS: [&str; 3] = ["latency", "traffic", "validation"];

impl Experiment {
    /// Whether it asks for bytes and operations per second, which say something beside what the machine can do.
    pub fn asks_for_rates(&self) -> bool {
        self.metrics.iter().any(|group| group == METRICS[1])
    }

    /// Reads one definition.
    ///
    /// # Errors
    /// [`LabError::Definition`] with line and column, [`LabError::Io`] if it cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let source = text_of(path)?;
        Self::parse(&source, path)
    }

    /// Reads every `*.toml` of a directory, sorted by name. A broken definition does not hide the
    /// others.
    pub fn read_dir(dir: &Path) -> Result<Vec<Result<Self>>> {
        Ok(files(dir)?.iter().map(|path| Self::read(path)).collect())
    }

    /// The experiment of this id: `<dir>/<id>.toml`.
    ///
    /// # Errors
    /// [`LabError::Name`] with those there are; else as [`Experiment::read`].
    pub fn find(dir: &Path, id: &str) -> Result<Self> {
        let files = files(dir)?;
        if let Some(file) = files.iter().find(|path| file_stem(path) == id) {
            return Self::read(file);
        }
        let stems: Vec<String> = files.iter().map(|path| file_stem(path)).collect();
        let expected = format!("one of {}, in {}", stems.join(", "), dir.display());
        Err(LabError::name("experiment", id, expected))
    }

    /// Reads a definition from text; `path` names it in errors and fixes its id, and beside it lies the definition whose
    /// records answer this one, if it says so.
    ///
    /// # Errors
    /// [`LabError::Definition`].
    pub fn parse(source: &str, path: &Path) -> Result<Self> {
        let mut experiment = read::experiment(source, path)?;
        experiment.definition_hash = experiment.identity();
        Ok(experiment)
    }

    /// SHA-256 over what decides the measurements: device, profiles, cases, metrics and pace. Prose and
    /// the claim are left out: a verdict is worked out from the present claim, and a better
    /// sentence does not make a measurement old.
    fn identity(&self) -> String {
        let mut measured = json!({
            "schema": DEFINITION_SCHEMA,
            "id": self.measured_as(),
            "device": self.device,
            "profiles": self.profiles,
            "cases": self.cases,
            "metrics": self.metrics,
        });
        // Definitions without one are what they were before there was any.
        if !self.pace.is_none() {
            measured["pace"] = json!(self.pace);
        }
        content_hash(&measured)
    }

    /// Whether the claim compares its subject with a profile.
    pub(crate) fn is_rival(&self, profile: &ProfileDef) -> bool {
        match &self.claim.against {
            Against::Profiles(ids) => ids.contains(&profile.id),
            Against::Best(roles) => {
                roles.contains(&profile.role) && profile.id != self.claim.subject
            }
        }
    }

    /// Refuses to measure an experiment that has the records of another.
    ///
    /// # Errors
    /// [`LabError::Name`] with the one to measure.
    pub fn expect_measured(&self) -> Result<()> {
        let Some(records) = &self.records else { return Ok(()) };
        let expected = format!("`{records}`, whose records answer this one too: measure that");
        Err(LabError::name("experiment", &self.id, expected))
    }

    /// The experiment whose records answer it.
    pub fn measured_as(&self) -> &str {
        self.records.as_ref().unwrap_or(&self.id)
    }

    /// The profile of this id.
    pub fn profile(&self, id: &str) -> Option<&ProfileDef> {
        self.profiles.iter().find(|p| p.id == id)
    }
}

/// The definitions in a directory, which must exist, sorted.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    std::fs::metadata(dir).map_err(LabError::io("read directory", dir))?;
    let mut files = entries(dir)?;
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    files.sort_by(|a, b| a.file_stem().cmp(&b.file_stem()));
    Ok(files)
}
