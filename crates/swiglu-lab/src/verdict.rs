//! Verdicts: worked out from records and the claim, never typed.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::record::Interval;

/// What the evidence says about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum VerdictState {
    /// The claim holds, its confidence interval included.
    #[serde(rename = "supported")]
    Supported,
    /// The claim does not hold, its confidence interval included.
    #[serde(rename = "refuted")]
    Refuted,
    /// There are records, but they do not decide.
    #[serde(rename = "inconclusive")]
    Inconclusive,
    /// There is no complete record.
    #[serde(rename = "not run")]
    NotRun,
}

impl VerdictState {
    /// The name as lists and pages have it.
    pub const fn name(self) -> &'static str {
        match self {
            VerdictState::Supported => "supported",
            VerdictState::Refuted => "refuted",
            VerdictState::Inconclusive => "inconclusive",
            VerdictState::NotRun => "not run",
        }
    }
}

impl fmt::Display for VerdictState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What one record says about the claim.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecordVerdict {
    /// Of this record.
    pub state: VerdictState,
    /// The machine it is of.
    pub machine: String,
    /// The run.
    pub run_id: String,
    /// When it finished.
    pub finished: String,
    /// The claim's aggregate; none where no case could be compared.
    pub aggregate: Option<Interval>,
    /// Each case that could be compared.
    pub cases: Vec<CaseRatio>,
    /// Why it is not supported, or what to know about it.
    pub reasons: Vec<String>,
    /// Why the record is not of the present definition or code.
    pub stale: Option<String>,
}

/// The claim's statistic in one case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseRatio {
    /// The case.
    pub case_key: String,
    /// The profile that the subject was compared with: the fastest.
    pub against: String,
    /// Its median by the subject's.
    pub ratio: Interval,
}

/// What all records say about an experiment's claim.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The worst of the machines' verdicts: refuted, inconclusive, supported.
    pub state: VerdictState,
    /// One line: the aggregate with its interval and the machine, or why there is none.
    pub headline: String,
    /// Set if every record that counts is stale, with the reason of the newest.
    pub stale: Option<String>,
    /// The newest complete record of each machine.
    pub machines: Vec<RecordVerdict>,
}
