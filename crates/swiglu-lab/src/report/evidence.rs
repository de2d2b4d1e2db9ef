//! Records arranged for pages: which one is shown, cases that differ only in M, profiles as series.

use swiglu_core::DType;

use super::Entry;
use crate::case::{Case, CaseOp, Heat};
use crate::definition::{Experiment, Role};
use crate::profile::{Ceiling, Ceilings};
use crate::record::{Opened, Record, ResultEntry, Status};

/// The record that the pages show for an experiment: of the verdict, else the newest.
pub(super) fn shown(entry: &Entry) -> Option<&Opened> {
    let judged = entry.verdict.decisive();
    let of = |o: &&Opened| {
        judged.is_some_and(|j| o.record.run_id == j.run_id && o.record.machine.name == j.machine)
    };
    entry.records.iter().find(of).or(entry.records.last())
}

/// Cases that differ in M alone.
pub(super) struct Group<'a> {
    /// What they have in common.
    pub(super) label: String,
    pub(super) cases: Vec<&'a Case>,
}

/// What a case is without its M.
fn label(case: &Case) -> String {
    let mut out = match case.op {
        CaseOp::GatedLinear | CaseOp::Mlp => {
            format!("{} {} → {}", case.op, case.hidden, case.intermediate)
        }
        CaseOp::Activation | CaseOp::ActivationBackward | CaseOp::Copy => {
            format!("{} × {}", case.op, case.intermediate)
        }
    };
    if let Some(model) = &case.model {
        out += &format!(" ({model})");
    }
    out += &format!(", {}", case.dtype);
    if let Some(block) = case.weights {
        out += &format!(" with {block} weights");
    }
    if case.op != CaseOp::Copy {
        out += &format!(", {} {}", case.activation, case.numerics);
    }
    if case.arrangement != swiglu_core::Arrangement::Separate {
        out += &format!(", {}", case.arrangement);
    }
    if case.op.has_weights() && case.orientation != swiglu_core::Orientation::OutIn {
        out += &format!(", {}", case.orientation);
    }
    if case.bias {
        out += ", bias";
    }
    if case.heat == Heat::Hot {
        out += ", hot";
    }
    out
}

/// The cases of a record in groups, both in order of appearance, each group by M.
pub(super) fn groups(record: &Record) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for entry in &record.results {
        let Some(case) = record.case_of(entry) else { continue };
        let label = label(case);
        let at = groups.iter().position(|g| g.label == label).unwrap_or_else(|| {
            groups.push(Group { label, cases: Vec::new() });
            groups.len() - 1
        });
        let cases = &mut groups[at].cases;
        if !cases.iter().any(|c| c.key() == entry.case_key) {
            cases.push(case);
        }
    }
    groups.iter_mut().for_each(|g| g.cases.sort_by_key(|c| c.m));
    groups
}

/// The results of a case, in the order of the definition's profiles.
pub(super) fn results_of<'a>(record: &'a Record, case: &Case) -> Vec<&'a ResultEntry> {
    let key = case.key();
    record.results.iter().filter(|r| r.case_key == key).collect()
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

/// The ceilings of a record: those measured beside it, else the fastest of the profiles that are
/// there as ceilings.
pub(super) fn ceilings(experiment: &Experiment, record: &Record) -> Ceilings {
    if let Some(ceilings) = &record.ceilings {
        return ceilings.clone();
    }
    let of_ceilings = || {
        record.results.iter().filter(|r| {
            let role = experiment.profile(&r.profile).map(|p| p.role);
            r.status == Status::Ok && role == Some(Role::Ceiling)
        })
    };
    // A profile without arithmetic moves bytes, all others multiply.
    let op = |r: &ResultEntry| record.case_of(r).map(|c| c.op);
    let copies = of_ceilings().filter(|r| r.flops == 0.0 || op(r) == Some(CaseOp::Copy));
    let memory = copies.filter_map(|r| Some((r.profile.as_str(), r.gbps()? * 1e9)));
    let memory = fastest(memory);
    let compute = DType::ALL.iter().filter_map(|&dtype| {
        let multiplies = |case: &Case| case.dtype == dtype && case.op.has_weights();
        let products =
            of_ceilings().filter(|r| r.flops > 0.0 && record.case_of(r).is_some_and(multiplies));
        let rates = products.filter_map(|r| Some((r.profile.as_str(), r.gflops()? * 1e9)));
        let (name, per_second) = fastest(rates)?;
        Some(Ceiling { name: format!("{dtype} {name}"), per_second })
    });
    Ceilings {
        memory: memory.map(|(name, per_second)| Ceiling { name: name.into(), per_second }),
        compute: compute.collect(),
        ..Ceilings::default()
    }
}

fn fastest<'a>(rates: impl Iterator<Item = (&'a str, f64)>) -> Option<(&'a str, f64)> {
    rates.max_by(|a, b| a.1.total_cmp(&b.1))
}
