//! What a record holds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::result::{Interval, ResultEntry, Status};
use crate::case::{Case, DeviceKind, Heat};
use crate::code::Code;
use crate::definition::{Experiment, Pace, ProfileDef, Role};
use crate::executor::ExecutorKind;
use crate::profile::{Ceiling, Ceilings, KernelCounters};

/// The schema that this program writes; it also reads 2, which has no rows.
pub const RECORD_SCHEMA: u32 = 3;
/// The oldest schema that it reads.
pub(super) const OLDEST_SCHEMA: u32 = 2;

/// One run of an experiment on one machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// Results as files have them: the key of a case stands in its first result alone.
mod grouped {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::ResultEntry;

    pub(super) fn serialize<S: Serializer>(
        results: &[ResultEntry],
        s: S,
    ) -> Result<S::Ok, S::Error> {
        let mut entries = results.to_vec();
        for i in (1..entries.len()).filter(|&i| results[i].case_key == results[i - 1].case_key) {
            entries[i].case_key.clear();
        }
        entries.serialize(s)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        d: D,
    ) -> Result<Vec<ResultEntry>, D::Error> {
        let mut entries = Vec::<ResultEntry>::deserialize(d)?;
        for i in 1..entries.len() {
            if entries[i].case_key.is_empty() {
                entries[i].case_key = entries[i - 1].case_key.clone();
            }
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
        let device = before.sm_mhz.zip(after.sm_mhz).map(|clocks| ("device", clocks));
        // The host's clock matters little to an accelerator that has one of its own.
        let host = || before.cpu_mhz.zip(after.cpu_mhz).map(|clocks| ("CPU", clocks));
        let (what, (a, b)) = device.or_else(host)?;
        let changed = (a - b).abs() > Self::CLOCK_DRIFT * a.max(b);
        changed.then(|| format!("{what} clock {a:.0} then {b:.0} MHz"))
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

    /// What the machine can do at most in a case. A ceiling that the experiment itself has, measured in turns
    /// with the others, stands for one that was measured beside them at another moment.
    pub fn ceilings_of(&self, experiment: &Experiment, case: &Case) -> Ceilings {
        let mut ceilings = self.ceilings.clone().unwrap_or_default();
        let key = case.key();
        let moves =
            |p: &&ProfileDef| p.role == Role::Ceiling && matches!(p.peer.as_str(), "read" | "copy");
        let measured = experiment.profiles.iter().filter(moves).filter_map(|p| {
            let entry = self.entry(&key, &p.id).filter(|entry| entry.status == Status::Ok)?;
            Some(Ceiling { name: p.id.clone(), per_second: entry.gbps()? * 1e9 })
        });
        let best = measured.max_by(|a, b| a.per_second.total_cmp(&b.per_second));
        match case.heat {
            Heat::Cold => ceilings.memory = best.or(ceilings.memory),
            Heat::Hot => ceilings.cache = best.or(ceilings.cache),
        }
        ceilings
    }
}
