//! What a record holds of one profile in one case.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::stats;
use crate::text::named;

named! {
    /// What became of one profile in one case.
    #[derive(Default)]
    pub enum Status {
        /// Measured, and verified where it computes the case.
        #[default]
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

/// One profile in one case.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
    /// The hash of each compiled variant or CPU façade that the plan used, by its file and the beginning of the
    /// hash, or by its name. Older records have all defines of a variant behind its file.
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
            bytes: case.compulsory_bytes(),
            flops: case.flops(),
            ..Self::default()
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

    /// Adds preparations of the same case. One that could not be measured leaves what is known alone, and so does another
    /// way, of several that a profile is the fastest of; a result that is wrong once is wrong.
    pub(crate) fn extend(&mut self, more: ResultEntry) {
        let other_way = more.status == Status::Ok && more.plan != self.plan;
        if more.status == Status::Failed || other_way {
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
