//! The plots of a record.

use std::collections::BTreeSet;

use maud::{Markup, PreEscaped, html};

use super::Entry;
use super::chart::{Bar, Series};
use super::evidence::{Labels, cases, groups, ranked};
use super::page::{MANY, figure, key};
use crate::case::Case;
use crate::definition::{Experiment, Role};
use crate::format::{interval, ratio};
use crate::record::{Record, Status};
use crate::verdict::RecordVerdict;

/// Of more bars than a screen has, the least are shown: so many.
const LEAST: usize = 12;

/// The claim's ratio in each case, from the limit that it must reach; with the rival where there is room.
fn claimed(entry: &Entry, verdict: &RecordVerdict) -> Vec<Bar> {
    let e = &entry.experiment;
    let (limit, labels) = (e.claim.kind.limit(), Labels::of(e.cases.iter()));
    let bar = |case: &Case| {
        let found = verdict.case(&case.key())?;
        Some(Bar {
            label: labels.case(case),
            values: [
                ratio(found.ratio.value),
                format!("{} of {}", interval(found.ratio), found.against),
            ],
            ratio: found.ratio,
            series: usize::from(found.ratio.value < limit),
        })
    };
    e.cases.iter().filter_map(bar).collect()
}

/// These texts say what such bars are of, and what they show.
fn said(entry: &Entry, bars: &[Bar]) -> [String; 2] {
    let claim = &entry.experiment.claim;
    let (limit, behind) = (claim.kind.limit(), bars.iter().filter(|b| b.series > 0).count());
    let description = format!("Speed in {} cases, {behind} of them below {limit}.", bars.len());
    [format!("{}, case by case", claim.subject), description]
}

/// It shows the claim's ratios at a glance.
pub(super) fn thumb(entry: &Entry) -> Option<Markup> {
    let bars = claimed(entry, entry.verdict.decisive()?);
    let [title, description] = said(entry, &bars);
    let drawn = Bar::thumb(&bars, entry.experiment.claim.kind.limit())?;
    Some(PreEscaped(drawn.finish(&title, &description)))
}

/// It shows the claim's ratios in full.
pub(super) fn answer(entry: &Entry, verdict: &RecordVerdict) -> Option<Markup> {
    let claim = &entry.experiment.claim;
    let limit = claim.kind.limit();
    let caption = html! {
        "How many times as fast " b { (claim.subject) } " is, case by case. Bars begin at " (limit)
        @if claim.kind.goal() > limit { "; in the mean the claim asks for " (claim.kind.goal()) }
        @else { ", the least that the claim asks for" }
        @if verdict.cases.len() > MANY { "; of " (verdict.cases.len()) " cases the least " (LEAST) }
        ". Blue is above it, orange below; thin lines are 95 % intervals."
    };
    let mut bars = claimed(entry, verdict);
    let said = said(entry, &bars);
    if bars.len() > MANY {
        bars.sort_by(|a, b| a.ratio.value.total_cmp(&b.ratio.value));
        bars.truncate(LEAST);
    }
    figure(said, |width| Bar::chart(&bars, limit, width), &caption)
}

/// Ratio to the baseline over M, one line per profile, for each group of more than two sizes.
pub(super) fn sweeps(experiment: &Experiment, record: &Record) -> Vec<Markup> {
    let labels = Labels::of(cases(record));
    let groups = groups(&labels, cases(record));
    groups.iter().filter_map(|(label, cases)| sweep(experiment, record, label, cases)).collect()
}

fn sweep(experiment: &Experiment, record: &Record, label: &str, cases: &[&Case]) -> Option<Markup> {
    let baseline = &experiment.profiles.iter().find(|p| p.role == Role::Baseline)?.id;
    // Two sizes are no line.
    if cases.iter().map(|c| c.m).collect::<BTreeSet<_>>().len() < 3 {
        return None;
    }
    let line = |(i, profile): (usize, &crate::ProfileDef)| {
        let points = cases.iter().filter_map(|case| {
            let result = record.entry(&case.key(), &profile.id)?;
            let ratio = record.ratio_to_baseline(experiment, result);
            Some((case.m as f64, ratio.filter(|_| result.status == Status::Ok)?.value))
        });
        Series { label: profile.id.clone(), series: i, points: points.collect() }
    };
    let profiles = experiment.profiles.iter().enumerate();
    // The baseline is the line at 1.
    let others = profiles.filter(|(_, p)| p.id != *baseline);
    let series: Vec<_> = others.map(line).filter(|s| !s.points.is_empty()).collect();
    let title = format!("Speed relative to {baseline}: {label}");
    let spoken: Vec<_> = series.iter().map(spoken).collect();
    let description = format!("A line for each profile over M. {}", spoken.join(" "));
    let legend = html! {
        @if !label.is_empty() { strong { (label) } ": " }
        "speed over M relative to " b { (baseline) } ", the line at 1; above it is faster."
        ul.legend {
            @for s in &series {
                li { (key(s.series, &s.label)) @if s.is_below() { ", below the plot" } }
            }
        }
    };
    figure([title, description], |width| Series::sweep(&series, width), &legend)
}

/// A line in words.
fn spoken(series: &Series) -> String {
    let ys = || series.points.iter().map(|&(_, y)| y);
    let (low, high) = (ys().fold(f64::INFINITY, f64::min), ys().fold(0.0, f64::max));
    format!("{}: {} to {}.", series.label, ratio(low), ratio(high))
}

/// All results under the ceilings.
pub(super) fn roofline(experiment: &Experiment, record: &Record) -> Option<Markup> {
    let ceilings = record.ceilings.as_ref()?;
    let used = |c: &&crate::profile::Ceiling| {
        record.cases.values().any(|f| ceilings.compute_of(f.case.dtype) == Some(*c))
    };
    let results = || record.results.iter().filter(|r| ranked(experiment, r));
    let of = |(series, profile): (usize, &crate::ProfileDef)| {
        let own = results().filter(|r| r.profile == profile.id);
        let points = own.filter_map(|r| Some((r.flops / r.bytes, r.gflops()? * 1e9)));
        Series { label: profile.id.clone(), series, points: points.collect() }
    };
    let series = experiment.profiles.iter().enumerate().map(of);
    let series: Vec<_> = series.filter(|s| !s.points.is_empty()).collect();
    let description = format!(
        "Operations per second over operations per byte, of {} results. The slope is memory, the level \
         arithmetic, both measured.",
        results().count()
    );
    let compute: Vec<_> = ceilings.compute.iter().filter(used).collect();
    let draw = |width| Series::roofline(&series, ceilings.memory.as_ref(), &compute, width);
    let caption = html! {
        strong { "Roofline." } " Each point is a case; lines are what this machine was measured to do. \
        Bytes are those each way must move, so a point above the slope found data in a cache."
        ul.legend {
            @for s in &series { li { (key(s.series, &s.label)) } }
        }
    };
    figure(["Rates under the ceilings of the machine".into(), description], draw, &caption)
}
