//! The plots of a record.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::chart::{
    Bar, Bars, ChartError, ErrorDots, ErrorRow, Roof, Roofline, RooflinePoint, Sweep, SweepSeries,
};
use super::evidence::{Group, groups, ranked, results_of, series};
use super::page::{figure, key, small_figure};
use crate::case::Case;
use crate::definition::{Experiment, Role};
use crate::format::{ratio, si, time};
use crate::profile::Ceilings;
use crate::record::{Record, ResultEntry, Status};

/// The id of the profile that ratios of a record are relative to: the first baseline that has one.
fn baseline(experiment: &Experiment) -> Option<&str> {
    let first = experiment.profiles.iter().find(|p| p.role == Role::Baseline);
    first.map(|p| p.id.as_str())
}

/// Whether ratios of these cases are worth a line over M: two sizes are better read as bars.
fn sweeps(group: &Group<'_>) -> bool {
    group.cases.iter().map(|c| c.m).collect::<BTreeSet<_>>().len() > 2
}

/// Ratio to the baseline over M, one line per profile; nothing for groups with one size.
pub(super) fn sweep(
    experiment: &Experiment,
    record: &Record,
    group: &Group<'_>,
) -> Result<Option<Markup>, ChartError> {
    let Some(baseline) = baseline(experiment).filter(|_| sweeps(group)) else { return Ok(None) };
    let line = |(i, profile): (usize, &crate::ProfileDef)| {
        let points = group.cases.iter().filter_map(|case| {
            let results = results_of(record, case);
            let result = results.into_iter().find(|r| r.profile == profile.id)?;
            let ratio = record.ratio_to_baseline(experiment, result);
            let value = ratio.filter(|_| result.status == Status::Ok)?.value;
            Some((case.m as f64, value))
        });
        SweepSeries { label: profile.id.clone(), series: i, points: points.collect() }
    };
    let profiles = experiment.profiles.iter().enumerate();
    // The baseline is the line at 1.
    let others = profiles.filter(|(_, p)| p.id != baseline);
    let series: Vec<_> = others.map(line).filter(|s| !s.points.is_empty()).collect();
    let chart = Sweep {
        title: format!("Speed relative to {baseline}: {}", group.label),
        description: format!(
            "A line for each profile over M. {}",
            series.iter().map(spoken).collect::<Vec<_>>().join(" ")
        ),
        x_label: "M, tokens".into(),
        series,
    };
    let legend = html! {
        strong { (group.label) } ": speed over M relative to " b { (baseline) }
        ", the line at 1; above it is faster."
        ul.legend { @for s in &chart.series { li {
                    (key(s.series, &s.label))
                    @if s.is_below() { ", below the plot" }
                } } }
    };
    figure(|width| chart.svg(width), &legend)
}

/// A line in words.
fn spoken(series: &SweepSeries) -> String {
    let ys = || series.points.iter().map(|&(_, y)| y);
    let (low, high) = (ys().fold(f64::INFINITY, f64::min), ys().fold(0.0, f64::max));
    format!("{}: {} to {}.", series.label, ratio(low), ratio(high))
}

/// Times of one case, fastest first.
pub(super) fn bars(
    experiment: &Experiment,
    record: &Record,
    case: &Case,
    caption: &str,
) -> Result<Option<Markup>, ChartError> {
    let mut results: Vec<&ResultEntry> = results_of(record, case);
    results.retain(|r| r.summary.is_some());
    let median = |r: &ResultEntry| r.summary.map_or(f64::INFINITY, |s| s.median);
    results.sort_by(|a, b| median(a).total_cmp(&median(b)));
    let bar = |r: &&ResultEntry| {
        let s = r.summary?;
        let against = record.ratio_to_baseline(experiment, r);
        let against = against.map(|i| format!(" · {}", ratio(i.value)));
        let role = experiment.profile(&r.profile).map(|p| p.role);
        let note = match (r.status, role) {
            (Status::FailedVerification, _) => " (wrong result)",
            (_, Some(Role::Ceiling)) => " (ceiling)",
            (_, Some(Role::Warning)) => " (warning)",
            _ => "",
        };
        Some(Bar {
            label: format!("{}{note}", r.profile),
            value: format!("{}{}", time(s.median), against.unwrap_or_default()),
            median: s.median,
            q1: s.q1,
            q3: s.q3,
            series: series(experiment, &r.profile),
        })
    };
    let bars: Vec<Bar> = results.iter().filter_map(bar).collect();
    let said: Vec<_> = bars.iter().map(|b| format!("{} {}", b.label, b.value)).collect();
    let chart = Bars {
        title: format!("Time per call: {caption}"),
        description: format!("Fastest first: {}.", said.join("; ")),
        bars,
    };
    small_figure(|width| chart.svg(width), &html! { (caption) })
}

/// All results under the ceilings.
pub(super) fn roofline(
    experiment: &Experiment,
    record: &Record,
    ceilings: &Ceilings,
) -> Result<Option<Markup>, ChartError> {
    let memory = ceilings.memory.iter().map(|c| Roof::Memory {
        label: format!("{}: {}", c.name, si(c.per_second, "B/s")),
        bytes: c.per_second,
    });
    let used = |c: &&crate::profile::Ceiling| {
        record.cases.values().any(|f| ceilings.compute_of(f.case.dtype) == Some(*c))
    };
    let compute = ceilings.compute.iter().filter(used).map(|c| Roof::Compute {
        label: format!("{}: {}", c.name, si(c.per_second, "FLOP/s")),
        flops: c.per_second,
    });
    let results = || record.results.iter().filter(|r| ranked(experiment, r));
    let points = results().filter_map(|r| {
        Some(RooflinePoint {
            series: series(experiment, &r.profile),
            intensity: r.flops / r.bytes,
            flops: r.gflops()? * 1e9,
        })
    });
    let chart = Roofline {
        title: "Rates under the ceilings of the machine".into(),
        description: format!(
            "Operations per second over operations per byte, of {} results. The slope is memory, the \
             level arithmetic, both measured.",
            results().count()
        ),
        roofs: memory.chain(compute).collect(),
        points: points.collect(),
    };
    let caption = html! {
        strong { "Roofline." } " Each point is a case; lines are what this machine was measured to do. \
        Bytes are those each way must move, so a point above the slope found data in a cache."
        (legend(experiment, record, |r| ranked(experiment, r)))
    };
    figure(|width| chart.svg(width), &caption)
}

/// The signs of profiles with a result that counts.
fn legend(
    experiment: &Experiment,
    record: &Record,
    counts: impl Fn(&ResultEntry) -> bool,
) -> Markup {
    let drawn = |id: &str| record.results.iter().any(|r| r.profile == id && counts(r));
    html! {
        ul.legend {
            @for (i, profile) in experiment.profiles.iter().enumerate() {
                @if drawn(&profile.id) { li { (key(i, &profile.id)) } }
            }
        }
    }
}

/// The largest error of each profile, by dtype and numerics of the cases.
pub(super) fn errors(experiment: &Experiment, record: &Record) -> Result<Vec<Markup>, ChartError> {
    let mut modes: Vec<String> = Vec::new();
    let mode = |r: &ResultEntry| {
        record
            .case_of(r)
            .map(|case| format!("{} {}", case.dtype, case.numerics))
            .unwrap_or_default()
    };
    for result in record.results.iter().filter(|r| r.error.is_some()) {
        if !modes.contains(&mode(result)) {
            modes.push(mode(result));
        }
    }
    let mut figures = Vec::new();
    for name in modes {
        let rows = experiment.profiles.iter().enumerate().filter_map(|(i, profile)| {
            let of = |r: &&ResultEntry| r.profile == profile.id && mode(r) == name;
            let errors =
                record.results.iter().filter(of).filter_map(|r| {
                    Some((r.error?.relative_frobenius?, r.error?.frobenius_limit?))
                });
            // The case nearest to its limit.
            let (error, limit) = errors.max_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)))?;
            Some(ErrorRow { label: profile.id.clone(), error, limit, series: i })
        });
        let chart = ErrorDots {
            title: format!("Error against float64: {name}"),
            description: "The largest relative Frobenius error of each profile, and its limit."
                .into(),
            rows: rows.collect(),
        };
        let caption = html! { strong { (name) } };
        figures.extend(small_figure(|width| chart.svg(width), &caption)?);
    }
    Ok(figures)
}

/// All plots of times: a sweep for each group that has one, bars for the cases of the others.
pub(super) struct Times {
    pub(super) sweeps: Vec<Markup>,
    /// Of cases that are in no sweep.
    pub(super) bars: Vec<Markup>,
    /// Of cases that are in one too.
    pub(super) more_bars: Vec<Markup>,
}

pub(super) fn times(experiment: &Experiment, record: &Record) -> Result<Times, ChartError> {
    let mut out = Times { sweeps: Vec::new(), bars: Vec::new(), more_bars: Vec::new() };
    for group in groups(record) {
        let sweep = sweep(experiment, record, &group)?;
        for case in &group.cases {
            let caption = format!("M = {}, {}", case.m, group.label);
            let bars = bars(experiment, record, case, &caption)?;
            if sweep.is_some() { out.more_bars.extend(bars) } else { out.bars.extend(bars) }
        }
        out.sweeps.extend(sweep);
    }
    Ok(out)
}
