//! What a record holds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::case::{Case, DeviceKind};
use crate::definition::Pace;
use crate::profile::{Ceilings, KernelCounters};

/// The schema that this program writes and reads.
pub const RECORD_SCHEMA: u32 = 1;

/// One run of an experiment on one machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`RECORD_SCHEMA`].
    pub schema: u32,
    /// The experiment's id.
    pub experiment: String,
    /// Identity of what was to be measured: [`crate::Experiment::definition_hash`].
    pub definition_hash: String,
    /// Identity of the code that was measured, or why there is none: see [`crate::Source`].
    pub source_hash: String,
    /// The name of the run.
    pub run_id: String,
    /// When the run began, RFC 3339 in UTC.
    pub started: String,
    /// When its last result was written, RFC 3339 in UTC.
    pub finished: String,
    /// Whether every case has a result of every profile.
    pub complete: bool,
    /// The machine.
    pub machine: Machine,
    /// Versions of each peer's parts, by peer.
    pub versions: BTreeMap<String, BTreeMap<String, String>>,
    /// How it was measured.
    pub protocol: ProtocolUsed,
    /// Clocks and power when the first case began, warmed up.
    pub clocks_before: Option<Clocks>,
    /// Clocks and power when the last case ended.
    pub clocks_after: Option<Clocks>,
    /// Clocks and power at the begin and end of each case, by case key.
    pub case_clocks: BTreeMap<String, [Clocks; 2]>,
    /// What the machine can do at most, measured beside the cases; none where nobody measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceilings: Option<Ceilings>,
    /// One entry per case and profile.
    pub results: Vec<ResultEntry>,
    /// What hardware counters said, of the pairs that ran under a profiler.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiling: Vec<Profiled>,
    /// SHA-256 of the canonical JSON without this field.
    pub content_hash: String,
}

/// The machine that a record was taken on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Short and stable: the directory of its records.
    pub name: String,
    /// The device that was measured.
    pub device: DeviceKind,
    /// The processor's model.
    pub cpu: String,
    /// Logical processors.
    pub threads: usize,
    /// Main memory.
    pub memory_bytes: u64,
    /// Kernel and its version.
    pub os: String,
    /// The accelerator's name, as its peers report it.
    pub gpu: Option<String>,
    /// The accelerator's driver.
    pub driver: Option<String>,
}

/// How samples were taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolUsed {
    /// Turns of each profile in each case.
    pub turns: usize,
    /// What a turn may take at most, unless one call takes longer.
    pub budget_us: u64,
    /// Seed of all inputs.
    pub seed: u64,
    /// How often each profile was prepared in a case: its turns are spread over so many preparations.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub preparations: usize,
    /// What came before each turn.
    #[serde(default, skip_serializing_if = "Pace::is_none")]
    pub pace: Pace,
    /// A quick look: shown, but not evidence, see [`QUICK`].
    pub quick: bool,
}

/// How often profiles were prepared before records said so.
const fn once() -> usize {
    1
}

fn is_once(preparations: &usize) -> bool {
    *preparations == once()
}

/// What is said of a quick record wherever it is shown.
pub const QUICK: &str = "quick: not evidence";

/// Clocks and power at one moment; what the device does not tell is absent.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Clocks {
    /// Clock of the device's cores.
    pub sm_mhz: Option<f64>,
    /// Power drawn by the device.
    pub power_w: Option<f64>,
    /// Effective clock of one processor core, from a chain of dependent operations.
    pub cpu_mhz: Option<f64>,
}

/// What became of one profile in one case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// Measured, and verified where it computes the case.
    #[serde(rename = "ok")]
    Ok,
    /// The peer or its device is not on this machine.
    #[serde(rename = "not available")]
    NotAvailable,
    /// The peer does not do this case.
    #[serde(rename = "unsupported")]
    Unsupported,
    /// The result is wrong: the times are shown and never ranked.
    #[serde(rename = "failed verification")]
    FailedVerification,
    /// The peer crashed, hung, broke the protocol or reported a failure.
    #[serde(rename = "failed")]
    Failed,
}

impl Status {
    /// The name as records have it.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::NotAvailable => "not available",
            Status::Unsupported => "unsupported",
            Status::FailedVerification => "failed verification",
            Status::Failed => "failed",
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// One profile in one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResultEntry {
    /// The case.
    pub case: Case,
    /// [`Case::key`].
    pub case_key: String,
    /// The profile's id.
    pub profile: String,
    /// What became of it.
    pub status: Status,
    /// Why it is not ok, or a note of the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What the peer says about how it computes the case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Every sample, in the order they were taken: microseconds per call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples_us: Vec<f64>,
    /// How many of the samples each turn took; turn t of all profiles of a case are neighbours in
    /// time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turn_lengths: Vec<usize>,
    /// How many of the turns each preparation took; empty in records from before
    /// there were several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preparation_turns: Vec<usize>,
    /// Of the samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// Distance from the oracle; none where the profile computes something else (a ceiling).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorMetrics>,
    /// Bytes that the profile moves at least, as the peer counts them, else the compulsory ones.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes by the median time, in 10⁹ per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effective_gbps: Option<f64>,
    /// Operations by the median time, in 10⁹ per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effective_gflops: Option<f64>,
    /// The baseline's median by this one's: above 1 is faster than the baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_baseline: Option<Interval>,
}

impl ResultEntry {
    /// An entry without samples.
    pub(crate) fn without_samples(
        case: &Case,
        profile: &str,
        status: Status,
        reason: Option<String>,
    ) -> ResultEntry {
        ResultEntry {
            case: case.clone(),
            case_key: case.key(),
            profile: profile.to_owned(),
            status,
            reason,
            notes: Vec::new(),
            samples_us: Vec::new(),
            turn_lengths: Vec::new(),
            preparation_turns: Vec::new(),
            summary: None,
            error: None,
            bytes: case.compulsory_bytes(),
            flops: case.flops(),
            effective_gbps: None,
            effective_gflops: None,
            ratio_to_baseline: None,
        }
    }
}

/// A pair of case and profile under a profiler. Its times are not those of the results: a profiler
/// slows what it watches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profiled {
    /// [`Case::key`].
    pub case_key: String,
    /// The profile's id.
    pub profile: String,
    /// What was counted, by kernel; empty if nothing could be.
    pub kernels: Vec<KernelCounters>,
    /// Why nothing could be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What a set of times says, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Half of the samples are at most this.
    pub median: f64,
    /// A tenth of the samples are at most this.
    pub p10: f64,
    /// Nine tenths of the samples are at most this.
    pub p90: f64,
    /// Median absolute deviation from the median.
    pub mad: f64,
    /// Number of samples.
    pub n: usize,
}

/// A value with its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Its confidence interval.
    pub ci95: [f64; 2],
}

/// Distance from the float64 oracle over the rows that were checked. A measure that is not a finite
/// number (the output has NaN, or the bound is 0) is absent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ErrorMetrics {
    /// ‖error‖ / ‖reference‖.
    pub relative_frobenius: Option<f64>,
    /// What that may be.
    pub frobenius_limit: Option<f64>,
    /// The largest |error| ÷ its bound; above 1 is wrong.
    pub worst_ratio: Option<f64>,
}
