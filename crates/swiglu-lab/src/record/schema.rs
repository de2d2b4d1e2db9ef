//! What a record holds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::case::{Case, DeviceKind};
use crate::code::Code;
use crate::definition::{Experiment, Pace, Role};
use crate::executor::ExecutorKind;
use crate::profile::{Ceilings, KernelCounters};
use crate::stats;
use crate::text::named;

/// The schema that this program writes and reads.
pub const RECORD_SCHEMA: u32 = 2;

/// One run of an experiment on one machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`RECORD_SCHEMA`].
    pub schema: u32,
    /// The experiment's id.
    pub experiment: String,
    /// Identity of what was to be measured: [`crate::Experiment::definition_hash`].
    pub definition_hash: String,
    /// The commit that was measured.
    pub code: Code,
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
    /// Where it ran, if an executor started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executed>,
    /// What was computed, and how fast the device ran meanwhile, by [`Case::key`].
    pub cases: BTreeMap<String, CaseFacts>,
    /// What the machine can do at most, measured beside the cases; none where nobody measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceilings: Option<Ceilings>,
    /// One entry per case and profile.
    #[serde(with = "grouped")]
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

/// Where a run happened that an executor started. A run that went on elsewhere was in every place that
/// this names.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Executed {
    /// How that place runs things.
    pub kind: ExecutorKind,
    /// As it was named to `--on`.
    pub place: String,
    /// The host that was reached by ssh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The last job, as its scheduler calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The partition of Slurm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<String>,
    /// All nodes that it ran on.
    pub nodes: Vec<String>,
    /// Generic resources that the job asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gres: Option<String>,
    /// `CUDA_VISIBLE_DEVICES`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<String>,
    /// Whether no other job could be on the nodes; none where nobody could be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive: Option<bool>,
    /// Other jobs on the nodes when the run began or went on; none where nobody could be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_jobs: Option<Vec<String>>,
    /// The content hash of the program, definitions and peers that it was started with.
    pub bundle: String,
    /// How often it went on.
    pub resumed: u32,
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
    /// How often each profile was prepared in a case at first: its turns are spread over so many preparations.
    pub preparations: usize,
    /// What came before each turn.
    #[serde(default, skip_serializing_if = "Pace::is_none")]
    pub pace: Pace,
    /// A quick look: shown, but not evidence, see [`QUICK`].
    pub quick: bool,
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

named! {
    /// What became of one profile in one case.
    pub enum Status {
        /// Measured, and verified where it computes the case.
        Ok = "ok",
        /// The peer or its device is not on this machine.
        NotAvailable = "not available",
        /// The peer does not do this case.
        Unsupported = "unsupported",
        /// The result is wrong: the times are shown and never ranked.
        FailedVerification = "failed verification",
        /// The peer crashed, hung, broke the protocol or reported a failure.
        Failed = "failed",
    }
}

/// Results as files have them: the key of a case stands in its first result alone.
mod grouped {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::ResultEntry;

    pub(super) fn serialize<S: Serializer>(
        results: &[ResultEntry],
        s: S,
    ) -> Result<S::Ok, S::Error> {
        let mut last = "";
        let mut entries = results.to_vec();
        for (entry, full) in entries.iter_mut().zip(results) {
            if full.case_key == last {
                entry.case_key.clear();
            }
            last = &full.case_key;
        }
        entries.serialize(s)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        d: D,
    ) -> Result<Vec<ResultEntry>, D::Error> {
        let mut entries = Vec::<ResultEntry>::deserialize(d)?;
        let mut last = String::new();
        for entry in &mut entries {
            if entry.case_key.is_empty() {
                entry.case_key.clone_from(&last);
            }
            last.clone_from(&entry.case_key);
        }
        Ok(entries)
    }
}

/// A case of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseFacts {
    /// What was computed.
    pub case: Case,
    /// Clocks and power before its first turn that counts and after its last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks: Option<[Clocks; 2]>,
    /// Whether clocks changed under the first measurement, so that this is the second.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeated: bool,
}

impl CaseFacts {
    /// Clocks that differ by more than this within a case are marked.
    const CLOCK_DRIFT: f64 = 0.10;

    /// The mark of a case whose clock changed while it was measured; none if it did not.
    pub fn drift(&self) -> Option<String> {
        let [before, after] = self.clocks.as_ref()?;
        let changed = |what: &str, a: Option<f64>, b: Option<f64>| {
            let (a, b) = (a?, b?);
            ((a - b).abs() > Self::CLOCK_DRIFT * a.max(b))
                .then(|| format!("{what} clock {a:.0} then {b:.0} MHz"))
        };
        // The host's clock matters little to an accelerator that has one of its own.
        match before.sm_mhz.is_some() && after.sm_mhz.is_some() {
            true => changed("device", before.sm_mhz, after.sm_mhz),
            false => changed("CPU", before.cpu_mhz, after.cpu_mhz),
        }
    }
}

/// One profile in one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResultEntry {
    /// [`Case::key`] of the case.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub case_key: String,
    /// The profile's id.
    pub profile: String,
    /// What became of it.
    pub status: Status,
    /// Why it is not ok, or a note of the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The plan that computed it, where the peer makes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// The hash of each compiled variant or CPU façade that the plan used, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub variants: BTreeMap<String, String>,
    /// What the peer says besides about how it computes the case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Of all samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// The median of each preparation, in µs; the i-th of all profiles of a case are neighbours in time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preparations: Vec<f64>,
    /// Ratios to other profiles as their raw samples gave them, where those are no longer at hand. Other
    /// intervals follow from the medians of the preparations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub versus: Vec<Versus>,
    /// Distance from the oracle; none where the profile computes something else (a ceiling).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorMetrics>,
    /// Bytes that the profile moves at least, as the peer counts them, else the compulsory ones.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
}

impl ResultEntry {
    /// An entry without times.
    pub(crate) fn without_times(
        case: &Case,
        profile: &str,
        status: Status,
        reason: Option<String>,
    ) -> ResultEntry {
        ResultEntry {
            case_key: case.key(),
            profile: profile.to_owned(),
            status,
            reason,
            plan: None,
            variants: BTreeMap::new(),
            notes: Vec::new(),
            summary: None,
            preparations: Vec::new(),
            versus: Vec::new(),
            error: None,
            bytes: case.compulsory_bytes(),
            flops: case.flops(),
        }
    }

    /// Bytes by the median time, in 10⁹ per second.
    pub fn gbps(&self) -> Option<f64> {
        self.rate(self.bytes)
    }

    /// Operations by the median time, in 10⁹ per second.
    pub fn gflops(&self) -> Option<f64> {
        self.rate(self.flops)
    }

    fn rate(&self, amount: f64) -> Option<f64> {
        // Amounts per microsecond are 10⁶ per second.
        self.summary.filter(|_| amount > 0.0).map(|s| amount / s.median / 1e3)
    }

    /// How many times as fast this is as `other`, which was measured beside it: the ratio of the medians.
    /// The interval is what the raw samples gave where it was kept, else it follows from the medians of the
    /// preparations; none with fewer than two of them.
    pub fn speed_over(&self, other: &ResultEntry) -> Option<Interval> {
        if let Some(known) = self.versus.iter().find(|v| v.against == other.profile) {
            return Some(Interval { value: known.ratio, ci95: [known.low, known.high] });
        }
        let value = other.summary?.median / self.summary?.median;
        let seed = stats::seed_of(&[&self.case_key, &self.profile, &other.profile]);
        stats::ratio(value, &other.preparations, &self.preparations, seed)
    }

    /// Adds preparations of the same case. One that could not be measured leaves what is known alone; a
    /// result that is wrong once is wrong.
    pub(crate) fn extend(&mut self, more: ResultEntry) {
        if more.status == Status::Failed {
            return;
        }
        if self.status == Status::Ok && more.status != Status::Ok {
            (self.status, self.reason, self.error) = (more.status, more.reason, more.error);
        }
        self.summary = match (self.summary, more.summary) {
            (Some(a), Some(b)) => Some(a.with(b)),
            (a, b) => a.or(b),
        };
        self.preparations.extend(more.preparations);
        // What the first samples gave is not what all of them would.
        self.versus.clear();
    }
}

/// A ratio of speeds with its 95 % confidence interval, as raw samples gave it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Versus {
    /// The profile that was compared with.
    pub against: String,
    /// Its median by this one's: above 1 this one is faster.
    pub ratio: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// How the interval was worked out.
    pub method: String,
    /// Over so many preparations.
    pub preparations: usize,
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
    /// A quarter of the samples are at most this.
    pub q1: f64,
    /// Three quarters of the samples are at most this.
    pub q3: f64,
    /// The least sample.
    pub min: f64,
    /// Number of samples.
    pub n: usize,
}

impl Summary {
    /// Of both sets together, as nearly as their summaries tell: the median and the quartiles are means,
    /// weighted by the numbers of samples.
    fn with(self, other: Self) -> Self {
        let n = self.n + other.n;
        let mean = |a: f64, b: f64| (a * self.n as f64 + b * other.n as f64) / n.max(1) as f64;
        Self {
            median: mean(self.median, other.median),
            q1: mean(self.q1, other.q1),
            q3: mean(self.q3, other.q3),
            min: self.min.min(other.min),
            n,
        }
    }
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

impl Record {
    /// The result of a profile in a case.
    pub fn entry(&self, case_key: &str, profile: &str) -> Option<&ResultEntry> {
        self.results.iter().find(|e| e.case_key == case_key && e.profile == profile)
    }

    /// The case of an entry.
    pub fn case_of(&self, entry: &ResultEntry) -> Option<&Case> {
        self.cases.get(&entry.case_key).map(|facts| &facts.case)
    }

    /// How many times as fast an entry is as the first baseline of its case that has a result; none for
    /// that baseline itself.
    pub fn ratio_to_baseline(
        &self,
        experiment: &Experiment,
        entry: &ResultEntry,
    ) -> Option<Interval> {
        let baselines = experiment.profiles.iter().filter(|p| p.role == Role::Baseline);
        let mut results = baselines.filter_map(|p| self.entry(&entry.case_key, &p.id));
        let baseline = results.find(|e| e.status == Status::Ok)?;
        let value = baseline.summary?.median / entry.summary?.median;
        let alone = Interval { value, ci95: [f64::NAN; 2] };
        (baseline.profile != entry.profile).then(|| entry.speed_over(baseline).unwrap_or(alone))
    }
}
