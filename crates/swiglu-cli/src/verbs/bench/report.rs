//! What a benchmark found: rows for machines, and a table for people.

use std::collections::BTreeSet;

use anyhow::Result;
use comfy_table::Cell;
use serde::Serialize;
use swiglu::Arrangement;
use swiglu_lab::profile::Class;
use swiglu_lab::record::Record;
use swiglu_lab::{Case, Experiment, Heat, ResultEntry, Role, Status};

use crate::ceilings::Floor;
use crate::table::{self, Table, number, or_dash};
use crate::terminal::Terminal;
use crate::verbs::lab::places::{OUR_PEERS, OWN};

/// One way of computing a case: its result as records have it, beside what the machine can do.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    case: String,
    role: Role,
    #[serde(flatten)]
    result: ResultEntry,
    gbytes_per_s: Option<f64>,
    gflops: Option<f64>,
    /// What binds the case: `memory`, `cache` or `compute`.
    bound: Option<Class>,
    /// The least time that the ceilings allow ÷ the median time.
    fraction: Option<f64>,
    /// How often the way's median fits into that of the baseline.
    ratio: Option<f64>,
    /// Whether this program computes so.
    #[serde(skip)]
    pub(super) ours: bool,
    /// Whether another program does.
    #[serde(skip)]
    pub(super) theirs: bool,
    /// Whether operations are those of linear maps.
    #[serde(skip)]
    linear: bool,
}

/// `mlp 1x896x4864 f32 Q4_0`: a case, with what is not as usual.
pub(super) fn name(case: &Case) -> String {
    let mut name = format!("{} {}x", case.op, case.m);
    if case.op.has_weights() {
        name += &format!("{}x", case.hidden);
    }
    name += &format!("{} {}", case.intermediate, case.dtype);
    if let Some(weights) = case.weights {
        name += &format!(" {weights}");
    }
    if case.arrangement != Arrangement::Separate {
        name += " packed";
    }
    if case.heat == Heat::Hot {
        name += " hot";
    }
    name
}

/// The rows of one case. Where reading the same bytes took its turns, that is the limit of memory.
pub(super) fn rows(experiment: &Experiment, record: &Record, case: &Case) -> Vec<Row> {
    let key = case.key();
    let profile = |r: &ResultEntry| experiment.profile(&r.profile);
    let work = [case.compulsory_bytes(), case.flops()];
    let ceilings = record.ceilings_of(experiment, case);
    let floor = case.problem().and_then(|p| Floor::of(&p, work, case.heat, &ceilings));
    let row = |r: &ResultEntry| {
        let role = profile(r).map_or(Role::Peer, |p| p.role);
        let ours = profile(r).is_some_and(|p| p.peer == OWN);
        let theirs = profile(r).is_some_and(|p| !OUR_PEERS.contains(&p.peer.as_str()));
        let floor = floor.filter(|_| role != Role::Ceiling || ours);
        let ranked = r.status == Status::Ok && role.is_ranked();
        let ratio = record.ratio_to_baseline(experiment, r).filter(|_| ranked);
        Row {
            case: name(case),
            role,
            gbytes_per_s: r.gbps(),
            gflops: r.gflops(),
            bound: floor.map(|f| f.bound),
            fraction: floor.zip(r.summary).map(|(floor, s)| floor.us / s.median),
            ratio: ratio.map(|ratio| ratio.value),
            ours,
            theirs,
            linear: case.op.has_weights(),
            result: r.clone(),
        }
    };
    record.results.iter().filter(|r| r.case_key == key).map(row).collect()
}

impl Row {
    pub(super) fn is_ok(&self) -> bool {
        self.result.status == Status::Ok
    }

    pub(super) fn is_measured(&self) -> bool {
        self.result.summary.is_some()
    }

    /// Whether whoever computes so crashed, or gave no answer.
    pub(super) fn is_broken(&self) -> bool {
        self.result.status == Status::Failed
    }

    /// Why there is no result, or a wrong one.
    pub(super) fn complaint(&self) -> Option<String> {
        let ResultEntry { profile, status, reason, .. } = &self.result;
        let reason = reason.as_deref().filter(|_| !self.is_ok())?;
        Some(format!("{profile}: {status}: {reason}"))
    }

    fn rate(&self) -> Option<String> {
        // Operations of linear maps where these bind, and bytes everywhere else, also of what reads alone.
        match self.bound {
            Some(Class::Compute) if self.linear => {
                self.gflops.map(|rate| format!("{} GFLOP/s", number(rate)))
            }
            _ => self.gbytes_per_s.map(|rate| format!("{} GB/s", number(rate))),
        }
    }

    fn of_ceiling(&self) -> Option<String> {
        let bound = match self.bound? {
            Class::Compute => "arithmetic",
            Class::Cache => "caches",
            _ => "memory",
        };
        self.fraction.map(|fraction| format!("{:.0} % {bound}", 100.0 * fraction))
    }

    fn ratio(&self) -> Cell {
        match self.role {
            Role::Baseline if self.is_ok() && self.ratio.is_none() => Cell::new("base"),
            _ => or_dash(self.ratio.map(table::ratio)),
        }
    }
}

/// The table, and under it what is missing or wrong.
pub(super) fn show(rows: &[Row], terminal: &mut Terminal) -> Result<()> {
    let error = |r: &Row| r.result.error.and_then(|e| e.relative_frobenius);
    Table::of(rows)
        .group("case", |r| &r.case)
        .text("way", |r| &r.result.profile)
        .number("median", |r| or_dash(r.result.summary.map(|s| table::time(s.median))))
        .number("quartiles", |r| or_dash(r.result.summary.map(table::quartiles)))
        .number("rate", |r| or_dash(r.rate()))
        .number("of ceiling", |r| or_dash(r.of_ceiling()))
        .number("ratio", Row::ratio)
        .number("error", |r| or_dash(error(r).map(table::error)))
        .text("", |r| match r.result.status {
            Status::Ok => table::verdict(true),
            Status::FailedVerification => table::verdict(false),
            other => table::open(other),
        })
        .print(terminal)?;
    // What is missing is missing in every case: told once, with the first of them.
    let mut told = BTreeSet::new();
    for row in rows {
        if let Some(complaint) = row.complaint().filter(|text| told.insert(text.clone())) {
            writeln!(terminal, "{complaint} ({})", row.case)?;
        }
    }
    beyond(rows).map_or(Ok(()), |why| writeln!(terminal, "{why}"))
}

/// Why a share of a ceiling may be more than all of it, if one is as the table rounds it.
fn beyond(rows: &[Row]) -> Option<&'static str> {
    let is_beyond = |row: &Row| row.fraction.is_some_and(|fraction| fraction > 1.005);
    rows.iter().any(is_beyond).then_some(
        "more than 100 %: the machine was slower when the ceiling was measured, or the data fit in caches",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_ceiling_is_explained_once() {
        let row = |fraction| Row {
            case: String::new(),
            role: Role::Ours,
            result: ResultEntry::default(),
            gbytes_per_s: None,
            gflops: None,
            bound: Some(Class::Memory),
            fraction,
            ratio: None,
            ours: true,
            theirs: false,
            linear: true,
        };
        assert_eq!(beyond(&[row(None), row(Some(1.004))]), None);
        assert!(beyond(&[row(Some(0.5)), row(Some(1.2)), row(Some(1.3))]).is_some());
    }
}
