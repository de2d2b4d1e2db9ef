//! Verdicts: worked out from records and the claim, never typed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::definition::{Against, Aggregate, Claim, Experiment, ProfileDef};
use crate::record::{Clocks, Interval, Opened, QUICK, Record, ResultEntry, Status};
use crate::source::Code;
use crate::stats::{self, Turns};

/// Clocks that differ by more than this within a case make its times incomparable.
const CLOCK_DRIFT: f64 = 0.10;
/// How many cases a reason names.
const NAMED: usize = 3;

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
    /// There is no complete record of a machine that has the subject.
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

    /// The larger is the worse news.
    const fn badness(self) -> u8 {
        match self {
            VerdictState::NotRun => 0,
            VerdictState::Supported => 1,
            VerdictState::Inconclusive => 2,
            VerdictState::Refuted => 3,
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
    /// Set if the newest record that counts is stale: why.
    pub stale: Option<String>,
    /// The newest complete record of each machine, the newest first.
    pub machines: Vec<RecordVerdict>,
}

impl Verdict {
    /// The verdict of an experiment from all its records. On each machine the newest complete
    /// record counts, quick ones never; a record of another definition cannot answer the present
    /// claim and does not count.
    pub fn of(experiment: &Experiment, records: &[Opened], code: &impl Code) -> Self {
        let mut newest: BTreeMap<&str, &Record> = BTreeMap::new();
        for record in records.iter().map(|opened| &opened.record) {
            // A machine that lacks what the claim is about says nothing about it.
            let counts = is_evidence(experiment, record) && has_subject(experiment, record);
            let machine = record.machine.name.as_str();
            let newer = newest.get(machine).is_none_or(|old| old.finished <= record.finished);
            if counts && newer {
                newest.insert(machine, record);
            }
        }
        let mut machines: Vec<RecordVerdict> =
            newest.values().map(|record| RecordVerdict::of(experiment, record, code)).collect();
        machines.sort_by(|a, b| b.finished.cmp(&a.finished));
        // Of equals the newest, which the last maximum is from behind.
        let worst = machines.iter().rev().max_by_key(|m| m.state.badness());
        let Some(worst) = worst else { return Self::not_run(experiment, records) };
        Self {
            state: worst.state,
            headline: worst.headline(&experiment.claim),
            stale: machines.first().and_then(|m| m.stale.clone()),
            machines,
        }
    }

    fn not_run(experiment: &Experiment, records: &[Opened]) -> Self {
        let state = VerdictState::NotRun;
        let without: BTreeSet<&str> = records
            .iter()
            .filter(|r| is_evidence(experiment, &r.record))
            .map(|r| r.record.machine.name.as_str())
            .collect();
        if !without.is_empty() {
            let machines = without.into_iter().collect::<Vec<_>>().join(", ");
            let subject = &experiment.claim.subject;
            let headline =
                format!("{subject}, which the claim is about, was not available on {machines}");
            return Self { state, headline, stale: None, machines: Vec::new() };
        }
        let of_old = records.iter().any(|r| r.record.definition_hash != experiment.definition_hash);
        let all_quick = records.iter().all(|r| r.record.protocol.quick);
        let headline = match (records.is_empty(), of_old) {
            (true, _) => "no record",
            (false, true) => "no complete record of the present definition",
            (false, false) if all_quick => QUICK,
            (false, false) => "no complete record: finish a run of every case and profile",
        };
        let stale = of_old.then(|| "the definition has changed since".to_owned());
        Self { state, headline: headline.into(), stale, machines: Vec::new() }
    }
}

/// Whether a record can answer the present claim.
fn is_evidence(experiment: &Experiment, record: &Record) -> bool {
    let same = record.definition_hash == experiment.definition_hash;
    record.complete && !record.protocol.quick && same
}

/// Whether the claim's subject was there.
fn has_subject(experiment: &Experiment, record: &Record) -> bool {
    let subject = experiment.claim.subject.as_str();
    let mut results = record.results.iter().filter(|entry| entry.profile == subject);
    results.any(|entry| entry.status != Status::NotAvailable)
}

impl RecordVerdict {
    /// What one record says about the claim of its experiment.
    pub fn of(experiment: &Experiment, record: &Record, code: &impl Code) -> Self {
        let claim = &experiment.claim;
        let mut reasons = Vec::new();
        let mut lacking = Vec::new();
        let mut drifted = Vec::new();
        let (mut cases, mut draws) = (Vec::new(), Vec::new());
        for case in &experiment.cases {
            let key = case.key();
            let of_case = OfCase { experiment, record, key: &key };
            match of_case.ratio() {
                Ok((ratio, replicates)) => {
                    cases.push(ratio);
                    draws.push(replicates);
                }
                Err(why) => lacking.push(format!("{key}: {why}")),
            }
            if let Some(why) = record.case_clocks.get(&key).and_then(drift) {
                drifted.push(format!("{key}: {why}"));
            }
        }
        let aggregate = aggregate(claim, &cases, &draws);
        let mut state = match &aggregate {
            Some(a) if lacking.is_empty() => judge(claim, a, &cases, &mut reasons),
            _ => VerdictState::Inconclusive,
        };
        reasons.extend(summed_up("cannot be compared", lacking));
        if !drifted.is_empty() {
            state = VerdictState::Inconclusive;
            reasons.extend(summed_up("measured at changing clocks", drifted));
        }
        let stale = match record.definition_hash == experiment.definition_hash {
            true => code.why_stale(experiment, &record.source_hash),
            false => Some("the definition has changed since".into()),
        };
        Self {
            state,
            machine: record.machine.name.clone(),
            run_id: record.run_id.clone(),
            finished: record.finished.clone(),
            aggregate,
            cases,
            reasons,
            stale,
        }
    }

    fn headline(&self, claim: &Claim) -> String {
        let Some(Interval { value, ci95: [low, high] }) = self.aggregate else {
            return self.reasons.first().cloned().unwrap_or_default();
        };
        let cases = match self.cases.len() {
            1 => "1 case".to_owned(),
            n => format!("{n} cases"),
        };
        let subject = &claim.subject;
        let machine = &self.machine;
        match claim.aggregate {
            Aggregate::Share => format!(
                "{subject} reaches {:.2}× in {:.0} % of {cases} [{:.0}, {:.0}] on {machine}",
                claim.case_threshold,
                value * 100.0,
                low * 100.0,
                high * 100.0
            ),
            Aggregate::Geomean | Aggregate::Min => {
                let what = if claim.aggregate == Aggregate::Min { "at least " } else { "" };
                format!(
                    "{subject} is {what}{value:.2}× as fast [{low:.2}, {high:.2}] over {cases} \
                     on {machine}"
                )
            }
        }
    }
}

/// One reason for many cases.
fn summed_up(what: &str, cases: Vec<String>) -> Option<String> {
    let more = cases.len().saturating_sub(NAMED);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    let count = cases.len();
    let named = cases.into_iter().take(NAMED).collect::<Vec<_>>().join("; ");
    let noun = if count == 1 { "case" } else { "cases" };
    (count > 0).then(|| format!("{count} {noun} {what}: {named}{more}"))
}

/// Supported or refuted only if the whole interval says so, of the aggregate and of every case that
/// has a floor.
fn judge(
    claim: &Claim,
    aggregate: &Interval,
    cases: &[CaseRatio],
    reasons: &mut Vec<String>,
) -> VerdictState {
    let side = |interval: &Interval, limit: f64| match interval.ci95 {
        [low, _] if low >= limit => VerdictState::Supported,
        [_, high] if high < limit => VerdictState::Refuted,
        _ => VerdictState::Inconclusive,
    };
    let mut state = side(aggregate, claim.threshold);
    let [low, high] = aggregate.ci95;
    match state {
        VerdictState::Supported => {}
        VerdictState::Refuted => reasons.push(format!(
            "the aggregate {:.3} [{low:.3}, {high:.3}] is below {}",
            aggregate.value, claim.threshold
        )),
        VerdictState::Inconclusive | VerdictState::NotRun => reasons.push(format!(
            "the interval of the aggregate [{low:.3}, {high:.3}] includes values below and above {}",
            claim.threshold
        )),
    }
    let Some(floor) = claim.case_floor else { return state };
    for (found, what) in [
        (VerdictState::Refuted, format!("below the floor of {floor}")),
        (VerdictState::Inconclusive, format!("with the floor of {floor} within the interval")),
    ] {
        let at_fault = cases.iter().filter(|case| side(&case.ratio, floor) == found);
        let at_fault: Vec<String> = at_fault
            .map(|c| {
                let [low, high] = c.ratio.ci95;
                format!("{}: {:.3} [{low:.3}, {high:.3}]", c.case_key, c.ratio.value)
            })
            .collect();
        if !at_fault.is_empty() && found.badness() > state.badness() {
            state = found;
        }
        reasons.extend(summed_up(&what, at_fault));
    }
    state
}

/// The claim's aggregate, with the interval of the aggregate of each draw: cases are independent
/// of each other, so draw r of one goes with draw r of any other.
fn aggregate(claim: &Claim, cases: &[CaseRatio], draws: &[Vec<f64>]) -> Option<Interval> {
    if cases.is_empty() {
        return None;
    }
    let values: Vec<f64> = cases.iter().map(|c| c.ratio.value).collect();
    let replicates: Vec<f64> = (0..stats::REPLICATES)
        .map(|r| join(claim, draws.iter().filter_map(|of_case| of_case.get(r).copied())))
        .collect();
    Some(stats::interval(join(claim, values.iter().copied()), &replicates))
}

fn join(claim: &Claim, ratios: impl Iterator<Item = f64>) -> f64 {
    let (mut count, mut sum, mut least, mut reached) = (0.0, 0.0, f64::INFINITY, 0.0);
    for ratio in ratios {
        count += 1.0;
        sum += ratio.ln();
        least = ratio.min(least);
        reached += f64::from(u8::from(ratio >= claim.case_threshold));
    }
    match claim.aggregate {
        Aggregate::Geomean => (sum / count).exp(),
        Aggregate::Min => least,
        Aggregate::Share => reached / count,
    }
}

/// How clocks changed within a case, if they changed too much.
fn drift([before, after]: &[Clocks; 2]) -> Option<String> {
    let changed = |what: &str, a: Option<f64>, b: Option<f64>| {
        let (a, b) = (a?, b?);
        ((a - b).abs() > CLOCK_DRIFT * a.max(b)).then(|| format!("{what} {a:.0} then {b:.0} MHz"))
    };
    // The host's clock matters little to an accelerator that has one of its own.
    match before.sm_mhz.is_some() && after.sm_mhz.is_some() {
        true => changed("device", before.sm_mhz, after.sm_mhz),
        false => changed("CPU", before.cpu_mhz, after.cpu_mhz),
    }
}

/// One case of a record.
#[derive(Clone, Copy)]
struct OfCase<'a> {
    experiment: &'a Experiment,
    record: &'a Record,
    key: &'a str,
}

impl<'a> OfCase<'a> {
    fn entry(self, profile: &str) -> Option<&'a ResultEntry> {
        self.record.results.iter().find(|e| e.case_key == self.key && e.profile == profile)
    }

    /// A verified result with its median; else why there is none.
    fn measured(self, profile: &str) -> Result<(&'a ResultEntry, f64), String> {
        let Some(entry) = self.entry(profile) else {
            return Err(format!("{profile} was not run"));
        };
        match (entry.status, entry.summary) {
            (Status::Ok, Some(summary)) => Ok((entry, summary.median)),
            (status, _) => Err(format!("{profile} is {status}")),
        }
    }

    /// The claim's ratio and its draws.
    fn ratio(self) -> Result<(CaseRatio, Vec<f64>), String> {
        let claim = &self.experiment.claim;
        let (subject, _) = self.measured(&claim.subject)?;
        let rivals: Vec<&ProfileDef> = match &claim.against {
            Against::Profiles(ids) => {
                ids.iter().filter_map(|id| self.experiment.profile(id)).collect()
            }
            Against::Best(roles) => {
                self.experiment.profiles.iter().filter(|p| roles.contains(&p.role)).collect()
            }
        };
        let named = matches!(claim.against, Against::Profiles(_));
        let mut fastest: Option<(&ResultEntry, f64)> = None;
        let mut missing = Vec::new();
        for rival in rivals.into_iter().filter(|p| p.id != claim.subject) {
            match self.measured(&rival.id) {
                Ok((entry, median)) if fastest.is_none_or(|(_, best)| median < best) => {
                    fastest = Some((entry, median));
                }
                Ok(_) => {}
                Err(why) => {
                    let status = self.entry(&rival.id).map(|e| e.status);
                    // A rival that does not do the case is no rival there; one that was named and
                    // could not be measured leaves the claim open.
                    if named && status != Some(Status::Unsupported) {
                        return Err(why);
                    }
                    missing.push(why);
                }
            }
        }
        let Some((against, _)) = fastest else {
            return Err(match missing.is_empty() {
                true => "nothing to compare with".into(),
                false => missing.join(", "),
            });
        };
        let turns = |entry: &'a ResultEntry| {
            Turns::of(entry).ok_or_else(|| format!("{} has broken turns", entry.profile))
        };
        let seed = stats::seed_of(&[self.key, &subject.profile, &against.profile]);
        let ratio = stats::ratio(&turns(against)?, &turns(subject)?, seed)
            .ok_or_else(|| format!("fewer than {} turns", stats::MIN_TURNS))?;
        let case = CaseRatio {
            case_key: self.key.to_owned(),
            against: against.profile.clone(),
            ratio: ratio.interval,
        };
        Ok((case, ratio.replicates))
    }
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
