//! Verdicts: worked out from records and the claim, never typed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::case::Case;
use crate::definition::{Against, Claim, Experiment};
use crate::format::interval;
use crate::record::{Interval, Opened, QUICK, Record, ResultEntry, Status};
use crate::stats;
use crate::text::named;

const NAMED: usize = 3;

named! {
    /// What the evidence says about a claim, the worst news first.
    #[derive(PartialOrd, Ord)]
    pub enum VerdictState {
        /// The claim does not hold.
        Refuted = "refuted",
        /// There are records, but noise or missing results forbid an answer.
        Inconclusive = "inconclusive",
        /// The claim holds.
        Supported = "supported",
        /// There is no complete record of a machine that has the subject.
        NotRun = "not run",
    }
}

impl VerdictState {
    /// All of them, the worst news first.
    pub const ALL: [Self; 4] = [Self::Refuted, Self::Inconclusive, Self::Supported, Self::NotRun];
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
    /// The geometric mean over all cases; none where no case could be compared.
    pub aggregate: Option<Interval>,
    /// Each case that could be compared.
    pub cases: Vec<CaseRatio>,
    /// Cases below the floor, with their figures, then those that take longer than one with more tokens.
    pub exceptions: Vec<CaseRatio>,
    /// Cases whose clock changed while they were measured, a second time too where there was one.
    pub marks: Vec<String>,
    /// Why it is not supported.
    pub reasons: Vec<String>,
    /// What would decide it, where it is inconclusive.
    pub undecided: Option<Undecided>,
}

/// What would decide an inconclusive claim.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Undecided {
    /// Preparations more of every case, if that is all it takes.
    pub preparations: Option<usize>,
    /// The same in words.
    pub text: String,
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

impl fmt::Display for CaseRatio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Interval { value, ci95: [low, high] } = self.ratio;
        write!(f, "{}: {value:.3} [{low:.3}, {high:.3}] of {}", self.case_key, self.against)
    }
}

/// What all records say about an experiment's claim.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The worst of the machines' verdicts.
    pub state: VerdictState,
    /// One line: the statistic with its interval and exceptions, or why there is none.
    pub headline: String,
    /// What the newest complete record of each machine says: first the one that the state and the headline
    /// are of, then the others, the newest first.
    pub machines: Vec<RecordVerdict>,
}

impl Verdict {
    /// The verdict of an experiment from all its records. On each machine the newest complete record
    /// counts, quick ones never; a record of another definition cannot answer the present claim.
    pub fn of(experiment: &Experiment, records: &[Opened]) -> Self {
        // A machine that lacks what the claim is about says nothing about it.
        let counts = |r: &&Record| is_evidence(experiment, r) && has_subject(experiment, r);
        let mut all: Vec<&Record> = records.iter().map(|o| &o.record).filter(counts).collect();
        all.sort_by(|a, b| a.finished.cmp(&b.finished));
        let newest: BTreeMap<&str, &Record> =
            all.into_iter().map(|record| (record.machine.name.as_str(), record)).collect();
        let mut machines: Vec<RecordVerdict> =
            newest.values().map(|record| RecordVerdict::of(experiment, record)).collect();
        machines.sort_by(|a, b| b.finished.cmp(&a.finished));
        let decisive = (0..machines.len()).min_by_key(|&i| machines[i].state);
        let Some(decisive) = decisive else { return Self::not_run(experiment, records) };
        machines[..=decisive].rotate_right(1);
        Self {
            state: machines[0].state,
            headline: machines[0].headline(&experiment.claim),
            machines,
        }
    }

    fn not_run(experiment: &Experiment, records: &[Opened]) -> Self {
        let without: BTreeSet<&str> = records
            .iter()
            .filter(|r| is_evidence(experiment, &r.record))
            .map(|r| r.record.machine.name.as_str())
            .collect();
        let of_old = records.iter().any(|r| r.record.definition_hash != experiment.definition_hash);
        let headline = if !without.is_empty() {
            let machines = without.into_iter().collect::<Vec<_>>().join(", ");
            let subject = &experiment.claim.subject;
            format!("{subject}, which the claim is about, was not available on {machines}")
        } else if records.is_empty() {
            "no record".into()
        } else if of_old {
            "no complete record of the present definition".into()
        } else if records.iter().all(|r| r.record.protocol.quick) {
            QUICK.into()
        } else {
            "no complete record: finish a run of every case and profile".into()
        };
        Self { state: VerdictState::NotRun, headline, machines: Vec::new() }
    }

    /// The record that the state and the headline are of.
    pub fn decisive(&self) -> Option<&RecordVerdict> {
        self.machines.first()
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
    pub fn of(experiment: &Experiment, record: &Record) -> Self {
        let claim = &experiment.claim;
        let (mut cases, mut lacking, mut marks) = (Vec::new(), Vec::new(), Vec::new());
        for key in experiment.cases.iter().map(|case| case.key()) {
            match ratio(experiment, record, &key) {
                Ok(ratio) => cases.push(ratio),
                Err(why) => lacking.push(format!("{key}: {why}")),
            }
            if let Some(drift) = record.cases.get(&key).and_then(|facts| facts.drift()) {
                marks.push(format!("{key}: {drift}"));
            }
        }
        let ratios: Vec<Interval> = cases.iter().map(|c| c.ratio).collect();
        let below = |c: &&CaseRatio| claim.floor.is_some_and(|floor| c.ratio.value < floor);
        let falls = falls(experiment, record).into_iter().map(|fall| fall.0);
        let mut verdict = Self {
            state: VerdictState::Inconclusive,
            machine: record.machine.name.clone(),
            run_id: record.run_id.clone(),
            finished: record.finished.clone(),
            aggregate: stats::geometric_mean(&ratios),
            exceptions: cases.iter().filter(below).cloned().chain(falls).collect(),
            cases,
            marks,
            reasons: Vec::new(),
            undecided: None,
        };
        let preparations = |e: &ResultEntry| e.preparations.len();
        let of_subject = record.results.iter().filter(|e| e.profile == claim.subject);
        verdict.judge(claim, lacking, of_subject.map(preparations).min().unwrap_or(0));
        verdict
    }

    /// The claim's statistic in a case, if it could be compared.
    pub(crate) fn case(&self, key: &str) -> Option<&CaseRatio> {
        self.cases.iter().find(|case| case.case_key == key)
    }

    fn judge(&mut self, claim: &Claim, lacking: Vec<String>, preparations: usize) {
        let (limit, goal) = (claim.kind.limit(), claim.kind.goal());
        if self.exceptions.len() > claim.exceptions {
            self.state = VerdictState::Refuted;
            let (floor, allowed) = (claim.floor.unwrap_or_default(), claim.exceptions);
            let what = format!("below the floor of {floor}, where {allowed} may be");
            let cases: Vec<_> = self.exceptions.iter().map(ToString::to_string).collect();
            self.reasons.extend(summed_up(&what, &cases));
        }
        // What noise may have moved the estimate across.
        let mut within = limit;
        if let Some(Interval { value, ci95: [low, high] }) = self.aggregate {
            let figures = format!("the geometric mean is {value:.3} [{low:.3}, {high:.3}]");
            if high < goal {
                self.state = VerdictState::Refuted;
                self.reasons.push(format!("{figures}: all of it below {goal}"));
            } else if value < goal || low < limit {
                within = if value < goal { goal } else { limit };
                self.reasons.push(format!("{figures}: {within} is within the interval"));
            } else if lacking.is_empty() && self.reasons.is_empty() {
                self.state = VerdictState::Supported;
            }
        }
        if self.state == VerdictState::Inconclusive {
            let whole = self.aggregate.filter(|_| lacking.is_empty());
            let more = whole.and_then(|it| stats::more_preparations(&it, within, preparations));
            let text = match more {
                Some(1) => "1 more preparation of every case, if the ratio stays".into(),
                Some(n) => format!("{n} more preparations of every case, if the ratio stays"),
                None if whole.is_none() => format!("results of {} more cases", lacking.len()),
                None => format!(
                    "more than {} preparations: the ratio lies too near to {within}",
                    stats::MOST_PREPARATIONS
                ),
            };
            self.undecided = Some(Undecided { preparations: more, text });
        }
        self.reasons.extend(summed_up("cannot be compared", &lacking));
    }

    fn headline(&self, claim: &Claim) -> String {
        let Some(aggregate) = self.aggregate else {
            return self.reasons.first().cloned().unwrap_or_default();
        };
        let cases = counted(self.cases.len());
        let exceptions = match (self.exceptions.len(), claim.floor) {
            (0, _) | (_, None) => String::new(),
            (n, Some(floor)) => format!(", {n} below {floor}"),
        };
        format!("{}, {cases}{exceptions}", interval(aggregate))
    }
}

/// The keys of cases that are exceptions, or that one is behind, if the subject was prepared less often than this.
pub(crate) fn outside(experiment: &Experiment, record: &Record, enough: usize) -> BTreeSet<String> {
    let verdict = RecordVerdict::of(experiment, record);
    let beside = falls(experiment, record).into_iter().map(|(_, faster)| faster);
    let keys = verdict.exceptions.into_iter().map(|found| found.case_key).chain(beside);
    let few = |key: &String| {
        let entry = record.entry(key, &experiment.claim.subject);
        entry.is_some_and(|entry| entry.preparations.len() < enough)
    };
    keys.filter(few).collect()
}

/// Cases in which the subject takes longer than a monotone claim allows beside a case with more tokens, by the fastest of
/// those, whose key stands beside it.
fn falls(experiment: &Experiment, record: &Record) -> Vec<(CaseRatio, String)> {
    let Claim { subject, monotone: Some(most), .. } = &experiment.claim else { return Vec::new() };
    let mut alike: BTreeMap<String, Vec<(usize, &ResultEntry, f64)>> = BTreeMap::new();
    for case in &experiment.cases {
        if let Ok((entry, us)) = measured(record, &case.key(), subject) {
            let group = Case { m: 0, ..case.clone() }.key();
            alike.entry(group).or_default().push((case.m, entry, us));
        }
    }
    let mut falls = Vec::new();
    for mut counts in alike.into_values() {
        counts.sort_by_key(|(m, ..)| std::cmp::Reverse(*m));
        let Some(mut fastest) = counts.first().copied() else { continue };
        for (m, entry, us) in counts {
            let (more, faster, least) = fastest;
            if us > most * least {
                let value = least / us;
                // They were measured one after the other, so their preparations are no pairs, and drawn as if they were.
                let alone = Interval { value, ci95: [f64::NAN; 2] };
                let ratio = entry.speed_over(faster).unwrap_or(alone);
                let against = format!("{subject} with {more} tokens");
                let fall = CaseRatio { case_key: entry.case_key.clone(), against, ratio };
                falls.push((fall, faster.case_key.clone()));
            }
            if us < least {
                fastest = (m, entry, us);
            }
        }
    }
    falls
}

/// One reason for many cases.
fn summed_up(what: &str, cases: &[String]) -> Option<String> {
    let counted = counted(cases.len());
    (!cases.is_empty()).then(|| format!("{counted} {what}: {}", listed(cases, NAMED)))
}

fn counted(cases: usize) -> String {
    if cases == 1 { "1 case".into() } else { format!("{cases} cases") }
}

/// These are the first of many, and how many more there are.
pub(crate) fn listed(all: &[String], most: usize) -> String {
    let named = all[..all.len().min(most)].join("; ");
    if all.len() > most { format!("{named}; and {} more", all.len() - most) } else { named }
}

/// A verified result of a case with its median; else why there is none.
fn measured<'a>(
    record: &'a Record,
    key: &str,
    profile: &str,
) -> Result<(&'a ResultEntry, f64), String> {
    let entry = record.entry(key, profile).ok_or_else(|| format!("{profile} was not run"))?;
    match (entry.status, entry.summary) {
        (Status::Ok, Some(summary)) => Ok((entry, summary.median)),
        (status, _) => Err(format!("{profile} is {status}")),
    }
}

fn ratio(experiment: &Experiment, record: &Record, key: &str) -> Result<CaseRatio, String> {
    let claim = &experiment.claim;
    let (subject, _) = measured(record, key, &claim.subject)?;
    let named = matches!(claim.against, Against::Profiles(_));
    let (mut rivals, mut missing) = (Vec::new(), Vec::new());
    for rival in experiment.profiles.iter().filter(|p| experiment.is_rival(p)) {
        match measured(record, key, &rival.id) {
            Ok(found) => rivals.push(found),
            Err(why) => {
                let status = record.entry(key, &rival.id).map(|e| e.status);
                // A rival that does not do the case is no rival there; one that was named and could not be
                // measured leaves the claim open.
                if named && status != Some(Status::Unsupported) {
                    return Err(why);
                }
                missing.push(why);
            }
        }
    }
    let Some((against, _)) = rivals.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)) else {
        return Err(match missing.is_empty() {
            true => "nothing to compare with".into(),
            false => missing.join(", "),
        });
    };
    let ratio = subject
        .speed_over(against)
        .ok_or("it was prepared less than twice, which tells no interval")?;
    Ok(CaseRatio { case_key: key.to_owned(), against: against.profile.clone(), ratio })
}
