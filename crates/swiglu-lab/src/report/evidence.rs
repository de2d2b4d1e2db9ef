//! Records arranged for pages: which one is shown, cases in a few words, cases that differ only in M.

use std::collections::BTreeSet;

use super::Entry;
use crate::case::{Case, CaseOp};
use crate::definition::{Experiment, Role};
use crate::format::{DASH, time};
use crate::record::{Opened, Record, ResultEntry, Status};
use crate::verdict::RecordVerdict;

/// The place among its experiment's records of the one that a verdict is of.
pub(super) fn place_of(entry: &Entry, verdict: &RecordVerdict) -> Option<usize> {
    let of =
        |o: &Opened| o.record.run_id == verdict.run_id && o.record.machine.name == verdict.machine;
    entry.records.iter().position(of)
}

pub(super) fn opened_of<'a>(entry: &'a Entry, verdict: &RecordVerdict) -> Option<&'a Opened> {
    entry.records.get(place_of(entry, verdict)?)
}

/// The record that the pages show for an experiment: of the verdict, else the newest.
pub(super) fn shown(entry: &Entry) -> Option<&Opened> {
    let judged = entry.verdict.decisive().and_then(|verdict| opened_of(entry, verdict));
    judged.or(entry.records.last())
}

/// The median time of a profile in a case, in words.
pub(super) fn median(record: &Record, case_key: &str, profile: &str) -> String {
    let summary = record.entry(case_key, profile).and_then(|result| result.summary);
    summary.map_or(DASH.into(), |summary| time(summary.median))
}

/// What the claim compares its subject with, by name.
pub(super) fn rivals(e: &Experiment) -> String {
    let rivals = e.profiles.iter().filter(|p| e.is_rival(p));
    match rivals.map(|p| p.id.as_str()).collect::<Vec<_>>()[..] {
        [only] => only.to_owned(),
        ref several => format!("the fastest of {}", several.join(", ")),
    }
}

/// Where in a case's parts its number of tokens is.
const M: usize = 2;

fn parts(case: &Case) -> [String; 10] {
    let weighs = case.op.has_weights();
    let given = |given: bool, text: String| if given { text } else { String::new() };
    [
        case.op.to_string(),
        match weighs {
            true => format!("{} → {}", case.hidden, case.intermediate),
            false => format!("{} columns", case.intermediate),
        },
        format!("M = {}", case.m),
        case.dtype.to_string(),
        case.weights.map(|kind| kind.to_string()).unwrap_or_default(),
        given(case.op != CaseOp::Copy, format!("{} {}", case.activation, case.numerics)),
        case.arrangement.to_string(),
        given(weighs, case.orientation.to_string()),
        given(case.bias, "bias".into()),
        case.heat.to_string(),
    ]
}

/// Where its activation and numerics are, which a type of elements mostly decides.
const NUMERICS: usize = 5;

/// Names of cases that say only what differs among them.
pub(super) struct Labels {
    named: [bool; 10],
    /// What all have in common.
    pub(super) common: String,
}

impl Labels {
    pub(super) fn of<'a>(cases: impl Iterator<Item = &'a Case>) -> Self {
        let all: Vec<_> = cases.map(parts).collect();
        let mut named = std::array::from_fn(|i| all.iter().any(|parts| parts[i] != all[0][i]));
        let rest = all.iter().map(|parts| joined(parts, |i| named[i] && i != NUMERICS));
        named[NUMERICS] &= rest.collect::<BTreeSet<_>>().len() < all.len();
        let values = |i: usize| {
            let values: BTreeSet<_> = all.iter().map(|parts| parts[i].as_str()).collect();
            values.into_iter().collect::<Vec<_>>().join(" or ")
        };
        let common: [String; 10] = std::array::from_fn(values);
        Self { common: joined(&common, |i| !named[i]), named }
    }

    pub(super) fn case(&self, case: &Case) -> String {
        let label = joined(&parts(case), |i| self.named[i]);
        if label.is_empty() { format!("M = {}", case.m) } else { label }
    }

    /// The same whatever its M; empty where nothing else differs.
    pub(super) fn group(&self, case: &Case) -> String {
        joined(&parts(case), |i| i != M && self.named[i])
    }
}

fn joined(parts: &[String; 10], takes: impl Fn(usize) -> bool) -> String {
    let taken = (0..parts.len()).filter(|&i| takes(i) && !parts[i].is_empty());
    taken.map(|i| parts[i].as_str()).collect::<Vec<_>>().join(", ")
}

/// Cases in groups that differ in M alone, in order of appearance, each group by M.
pub(super) fn groups<'a>(
    labels: &Labels,
    cases: impl Iterator<Item = &'a Case>,
) -> Vec<(String, Vec<&'a Case>)> {
    let mut groups: Vec<(String, Vec<&Case>)> = Vec::new();
    for case in cases {
        let label = labels.group(case);
        match groups.iter_mut().find(|(known, _)| *known == label) {
            Some((_, cases)) => cases.push(case),
            None => groups.push((label, vec![case])),
        }
    }
    groups.iter_mut().for_each(|(_, cases)| cases.sort_by_key(|c| c.m));
    groups
}

/// The cases of a record, in the order in which they were measured.
pub(super) fn cases(record: &Record) -> impl Iterator<Item = &Case> {
    let of_cases = record.results.chunk_by(|a, b| a.case_key == b.case_key);
    of_cases.filter_map(|results| record.case_of(&results[0]))
}

/// The colour and marker of a profile: its place in the definition. One that the definition no longer
/// has comes after all that it has.
pub(super) fn series(experiment: &Experiment, profile: &str) -> usize {
    let at = experiment.profiles.iter().position(|p| p.id == profile);
    at.unwrap_or(experiment.profiles.len())
}

/// Whether a result counts in comparisons.
pub(super) fn ranked(experiment: &Experiment, result: &ResultEntry) -> bool {
    let role = experiment.profile(&result.profile).map(|p| p.role);
    result.status == Status::Ok && role.is_none_or(Role::is_ranked)
}
