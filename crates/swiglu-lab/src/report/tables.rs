//! Tables of results.

use maud::{Markup, html};

use super::evidence::{Group, groups, ranked, results_of, series};
use super::page::{key, scroll};
use crate::definition::Experiment;
use crate::format::{DASH, error, number, ratio, time};
use crate::record::{Interval, Record, ResultEntry, Status};

/// Medians of all profiles, a table for each group of cases with a row for each M.
pub(super) fn medians(experiment: &Experiment, record: &Record) -> Markup {
    html! {
        @for group in groups(record) {
            (scroll(&format!("Times of {}", group.label), &of_group(experiment, record, &group)))
        }
    }
}

fn of_group(experiment: &Experiment, record: &Record, group: &Group<'_>) -> Markup {
    let all: Vec<_> = group.cases.iter().map(|case| results_of(record, case)).collect();
    let has = |id: &str| all.iter().flatten().any(|r| r.profile == id && r.summary.is_some());
    let profiles: Vec<_> = experiment.profiles.iter().filter(|p| has(&p.id)).collect();
    html! {
        table {
            caption {
                span { (group.label) ": median time per call, and speed relative to the baseline" }
            }
            thead {
                tr {
                    th scope="col" { "M" }
                    @for p in &profiles {
                        th.n scope="col" { (key(series(experiment, &p.id), &p.id)) }
                    }
                }
            }
            tbody {
                @for (case, results) in group.cases.iter().zip(&all) {
                    tr {
                        th.n scope="row" { (case.m) }
                        @for p in &profiles {
                            (median(experiment, record, results, results.iter().find(|r| r.profile == p.id)))
                        }
                    }
                }
            }
        }
    }
}

fn median(
    experiment: &Experiment,
    record: &Record,
    all: &[&ResultEntry],
    result: Option<&&ResultEntry>,
) -> Markup {
    let Some((result, summary)) = result.and_then(|r| Some((r, r.summary?))) else {
        return html! { td.n { (DASH) } };
    };
    let times = all.iter().filter(|r| ranked(experiment, r)).filter_map(|r| r.summary);
    let best = times.map(|s| s.median).fold(f64::INFINITY, f64::min);
    let first = ranked(experiment, result) && summary.median <= best;
    let wrong = result.status == Status::FailedVerification;
    html! {
        td.n.best[first].wrong[wrong] {
            (time(summary.median))
            @if first { span.hidden { " fastest" } }
            @if wrong { span.sub { "wrong result" } }
            @else if let Some(r) = record.ratio_to_baseline(experiment, result) { span.sub { (ratio(r.value)) } }
        }
    }
}

/// `1.20× [1.18, 1.22]`.
pub(super) fn interval(i: Interval) -> String {
    format!("{} [{}, {}]", ratio(i.value), number(i.ci95[0]), number(i.ci95[1]))
}

/// Every result of a record, with everything that was worked out of its samples.
pub(super) fn all_results(experiment: &Experiment, record: &Record) -> Markup {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| DASH.into());
    html! {
        table.dense {
            caption {
                span {
                    "Every result. Ratios are relative to the baseline with their 95 % confidence \
                     interval; error is the relative Frobenius error against float64, as a part of its \
                     limit too."
                }
            }
            thead {
                tr {
                    th scope="col" { "case" }
                    th scope="col" { "profile" }
                    th scope="col" { "status" }
                    @for name in ["median", "quartiles", "least", "samples", "GB/s", "GFLOP/s", "ratio",
                        "error", "of limit"]
                    {
                        th.n scope="col" { (name) }
                    }
                }
            }
            tbody {
                @for r in &record.results {
                    @let s = r.summary;
                    @let e = r.error;
                    tr.wrong[r.status == Status::FailedVerification] {
                        th.case scope="row" { (r.case_key) }
                        td { (key(series(experiment, &r.profile), &r.profile)) }
                        td.status {
                            (r.status)
                            @if let Some(reason) = &r.reason { span.sub { (reason) } }
                            @for note in r.plan.iter().chain(&r.notes) { span.sub { (note) } }
                        }
                        td.n { (or_dash(s.map(|s| time(s.median)))) }
                        td.n { (or_dash(s.map(|s| format!("{} – {}", time(s.q1), time(s.q3))))) }
                        td.n { (or_dash(s.map(|s| time(s.min)))) }
                        td.n { (or_dash(s.map(|s| s.n.to_string()))) }
                        td.n { (or_dash(r.gbps().map(number))) }
                        td.n { (or_dash(r.gflops().map(number))) }
                        td.n { (or_dash(record.ratio_to_baseline(experiment, r).map(interval))) }
                        td.n { (or_dash(e.and_then(|e| e.relative_frobenius).map(error))) }
                        td.n {
                            (or_dash(e.and_then(|e| {
                                Some(number(e.relative_frobenius? / e.frobenius_limit?))
                            })))
                        }
                    }
                }
            }
        }
    }
}

/// What became of profiles that have no time, once for each reason.
pub(super) fn absent(record: &Record) -> Markup {
    let mut lines: Vec<(String, usize)> = Vec::new();
    for r in record.results.iter().filter(|r| r.status != Status::Ok) {
        let reason = r.reason.as_deref().unwrap_or("no reason was given");
        let line = format!("{} ({}): {reason}", r.profile, r.status);
        match lines.iter_mut().find(|(l, _)| *l == line) {
            Some((_, count)) => *count += 1,
            None => lines.push((line, 1)),
        }
    }
    html! {
        @if !lines.is_empty() {
            h3 { "Without a result that counts" }
            ul {
                @for (line, count) in &lines {
                    li { (line) @if *count > 1 { " – " (count) " cases" } }
                }
            }
        }
    }
}
