//! The page of an experiment: answer, plot, table, boundary, decision; then how that came about.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::evidence::{Labels, cases, groups, place_of, ranked, rivals, series, shown};
use super::index::{headline, whence};
use super::page::{
    FOLDER, badge, columns, folded, folded_if_many, frame, key, or_dash, prose, section, table,
};
use super::{Entry, Site, age_in_words, decision, evidence, plots, run};
use crate::case::Case;
use crate::decision::Decision;
use crate::definition::{ClaimKind, Experiment};
use crate::format::{DASH, day, interval, ratio, time};
use crate::profile::analyse_result;
use crate::record::{Opened, QUICK, Record, ResultEntry, Status};
use crate::verdict::RecordVerdict;

/// Its place in the site.
pub(super) fn path(id: &str) -> String {
    format!("experiments/{id}.html")
}

pub(super) fn page(site: &Site, entry: &Entry) -> String {
    let e = &entry.experiment;
    let decisive = entry.verdict.decisive();
    let main = html! {
        header.page {
            p.state { (badge(entry.verdict.state)) }
            h1 { (e.title) }
            p.lead { (e.question) }
            div.answer {
                (headline(entry))
                @if decisive.is_some_and(|d| d.aggregate.is_some()) {
                    p {
                        "Ours is " b { (e.claim.subject) }
                        @if e.cases.len() > 1 { "; the figure is the geometric mean of all cases" }
                        ", in brackets is its 95 % interval."
                    }
                }
                p.meta { (whence(entry)) }
            }
            @if let Some(undecided) = decisive.and_then(|d| d.undecided.as_ref()) {
                p.note { "What would decide it: " (undecided.text) "." }
            }
            @if let Some(decisive) = decisive { (exceptions(e, decisive)) }
        }
        @if let Some(decisive) = decisive {
            @if let Some(plot) = plots::answer(entry, decisive) { (plot) }
            @if let Some(record) = shown(entry) { (claimed(e, decisive, &record.record)) }
        }
        @if shown(entry).is_none() { (section("planned", "What is to be measured", Some(planned(e)))) }
        (section("boundary", "What this does not cover", Some(prose(&e.boundary))))
        (section("decisions", "Decisions that rest on it", decisions(site, e)))
        (section("claim", "Claim and judgement", Some(judgement(entry))))
        @if let Some(opened) = shown(entry) { (everything(e, opened)) }
        (section("why", "Why it matters", Some(prose(&e.why))))
        (section("runs", "Runs", Some(runs(entry))))
    };
    frame(FOLDER, &e.title, &main)
}

/// Cases below the floor, each with its figure.
fn exceptions(e: &Experiment, verdict: &RecordVerdict) -> Markup {
    let labels = Labels::of(e.cases.iter());
    let case = |key: &str| e.cases.iter().find(|c| c.key() == key);
    html! {
        @if let (false, Some(floor)) = (verdict.exceptions.is_empty(), e.claim.floor) {
            @let count = verdict.exceptions.len();
            p.note { "Below " (floor) ", where the claim allows " (e.claim.exceptions) ":" }
            (folded_if_many(count, html! { (count) " cases" }, &html! { ul.note {
                @for found in &verdict.exceptions {
                    @let crate::record::Interval { value, ci95: [low, high] } = found.ratio;
                    li {
                        (case(&found.case_key).map_or(found.case_key.clone(), |c| labels.case(c)))
                        (format!(": {value:.3}× [{low:.3}, {high:.3}] of {}", found.against))
                    }
                }
            } }))
        }
    }
}

/// The claim case by case: ours and the best rival.
fn claimed(e: &Experiment, verdict: &RecordVerdict, record: &Record) -> Markup {
    let labels = Labels::of(e.cases.iter());
    let row = |case: &Case| {
        let key = case.key();
        let found = verdict.case(&key);
        let below = found.is_some_and(|f| e.claim.floor.is_some_and(|floor| f.ratio.value < floor));
        vec![
            html! {
                (labels.case(case))
                @if let Some(model) = &case.model { " " span.meta { (model) } }
            },
            html! {
                span.wrong[below] { (found.map_or(DASH.to_owned(), |f| interval(f.ratio))) }
                @if below { span.sub { "below the floor" } }
            },
            html! { (evidence::median(record, &key, &e.claim.subject)) },
            or_dash(found.map(|f| evidence::median(record, &key, &f.against))),
            html! { span.key { (found.map_or(DASH, |f| &f.against)) } },
        ]
    };
    let columns = columns("case|#ratio|#ours|#best of the others|which");
    let all = table(&format!("All cases: {}", labels.common), &columns, e.cases.iter().map(row));
    html! {
        (folded_if_many(e.cases.len(), html! { "All " (e.cases.len()) " cases" }, &all))
        (words())
    }
}

/// The cases and ways of an experiment that nobody has run.
fn planned(e: &Experiment) -> Markup {
    let labels = Labels::of(e.cases.iter());
    let row = |(label, cases): &(String, Vec<&Case>)| {
        let sizes: Vec<_> = cases.iter().map(|case| case.m.to_string()).collect();
        vec![
            html! { @if label.is_empty() { "all" } @else { (label) } },
            html! { (sizes.join(", ")) },
        ]
    };
    let (caption, groups) =
        (format!("All cases: {}", labels.common), groups(&labels, e.cases.iter()));
    html! {
        (table(&caption, &columns("case|M, tokens"), groups.iter().map(row)))
        (profiles(e))
        (words())
    }
}

/// What names of cases and ways stand for.
fn words() -> Markup {
    folded("What the words mean", &prose(include_str!("words.md")))
}

/// What the claim asks for, and why it is judged so.
fn judgement(entry: &Entry) -> Markup {
    html! {
        blockquote { p { (entry.experiment.claim.text) } }
        p { (in_words(&entry.experiment)) }
        @for verdict in &entry.verdict.machines {
            @let said: Vec<&String> = verdict.reasons.iter().chain(&verdict.marks).collect();
            @if !said.is_empty() {
                (folded(
                    html! { "Reasons and marks on " (verdict.machine) " (" (said.len()) ")" },
                    &html! { ul.reasons { @for text in said { li { (text) } } } },
                ))
            }
        }
        @if !entry.refused.is_empty() {
            (folded("Files that are no records", &html! {
                ul { @for refused in &entry.refused { li { code { (refused) } } } }
            }))
        }
    }
}

/// The claim's test in a sentence.
fn in_words(e: &Experiment) -> Markup {
    let claim = &e.claim;
    let reaches = match claim.kind {
        ClaimKind::Faster { goal } if goal > 1.0 => {
            format!("the whole interval is at least 1, and the estimate at least {goal}")
        }
        kind => format!("the whole interval is at least {}", kind.limit()),
    };
    html! {
        "In each case, the time of " b { (rivals(e)) } " is divided by that of " b { (claim.subject) }
        ". It is supported if, of the geometric mean over all cases, " (reaches)
        @if let Some(floor) = claim.floor {
            @match claim.exceptions {
                0 => ", and no case is below ",
                n => { ", and at most " b { (n) } " cases are below " }
            }
            b { (floor) }
        }
        "."
        @if let Some(records) = &e.records {
            " The records are those of " a href={ "../" (path(records)) } { (records) } "."
        }
    }
}

/// All ways, not only those of the claim.
fn everything(e: &Experiment, opened: &Opened) -> Markup {
    let record = &opened.record;
    let sweeps = plots::sweeps(e, record);
    let of_subject = record.results.iter().filter(|r| r.profile == e.claim.subject);
    let labels = Labels::of(cases(record));
    let analysis = |r: &ResultEntry| {
        let case = record.case_of(r)?;
        let found = analyse_result(e, case, r, &record.ceilings_of(e, case))?;
        Some((labels.case(case), found.text))
    };
    let analyses: Vec<_> = of_subject.filter_map(analysis).collect();
    let machine = html! {
        @if let Some(roofline) = plots::roofline(e, record) { (roofline) }
        @if !analyses.is_empty() {
            (folded(html! { "What binds " (e.claim.subject) ", case by case" }, &html! {
                dl.analyses { @for (case, text) in &analyses { dt { (case) } dd { (text) } } }
            }))
        }
    };
    let all = html! {
        p.meta {
            "Of " a href={ "../" (run::path(opened, "html")) } { "run " (record.run_id) } " on "
            (record.machine.name) ", " (run::place(record)) ", " (day(&record.finished))
            @if record.protocol.quick { "; " (QUICK) }
            @if !record.complete { ", not complete" }
            "."
        }
        @for sweep in &sweeps { (sweep) }
        @if sweeps.is_empty() { (medians(e, record)) }
        @else { (folded("Median times of all ways", &medians(e, record))) }
        (folded("Who competes, and how each is asked", &profiles(e)))
        (absent(record))
    };
    let is_there = !machine.0.is_empty();
    html! {
        (section("results", "All ways", Some(all)))
        (section("machine", "Against the machine", is_there.then_some(machine)))
    }
}

/// Medians of all profiles with the largest error of each, as a part of its limit.
fn medians(e: &Experiment, record: &Record) -> Markup {
    let labels = Labels::of(cases(record));
    let measured = |id: &str| record.results.iter().any(|r| r.profile == id && r.summary.is_some());
    let shown: Vec<_> = e.profiles.iter().filter(|p| measured(&p.id)).collect();
    let mut columns = columns("case");
    columns.extend(shown.iter().map(|p| (key(series(e, &p.id), &p.id), true)));
    let row = |case: &Case| {
        let of = |id: &str| record.entry(&case.key(), id);
        let times = shown.iter().filter_map(|p| of(&p.id)).filter(|r| ranked(e, r));
        let best = times.filter_map(|r| Some(r.summary?.median)).fold(f64::INFINITY, f64::min);
        let cells = shown.iter().map(|p| median(e, record, of(&p.id), best));
        std::iter::once(html! { (labels.case(case)) }).chain(cells).collect()
    };
    let error = |id: &str| {
        let of = record.results.iter().filter(|r| r.profile == id).filter_map(|r| r.error);
        let parts = of.filter_map(|e| Some(e.relative_frobenius? / e.frobenius_limit?));
        or_dash(parts.max_by(f64::total_cmp).map(|part| format!("{part:.2}")))
    };
    let errors = shown.iter().map(|p| error(&p.id));
    let last = std::iter::once(html! { "largest error, of its limit" }).chain(errors).collect();
    let caption =
        format!("Median time per call, and speed relative to the baseline: {}", labels.common);
    table(&caption, &columns, cases(record).map(row).chain([last]))
}

fn median(e: &Experiment, record: &Record, result: Option<&ResultEntry>, best: f64) -> Markup {
    let Some((result, summary)) = result.and_then(|r| Some((r, r.summary?))) else {
        return html! { (DASH) };
    };
    let first = ranked(e, result) && summary.median <= best;
    let wrong = result.status == Status::FailedVerification;
    html! {
        span.best[first].wrong[wrong] { (time(summary.median)) }
        @if first { span.hidden { " fastest" } }
        @if wrong { span.sub { "wrong result" } }
        @else if let Some(r) = record.ratio_to_baseline(e, result) { span.sub { (ratio(r.value)) } }
    }
}

/// What became of profiles that have no result that counts, once for each reason.
fn absent(record: &Record) -> Markup {
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    for r in record.results.iter().filter(|r| r.status != Status::Ok) {
        let reason = r.reason.as_deref().unwrap_or("no reason was given");
        *lines.entry(format!("{} ({}): {reason}", r.profile, r.status)).or_default() += 1;
    }
    let list =
        html! { ul { @for (line, count) in &lines { li { (line) " – " (count) " cases" } } } };
    html! {
        @if !lines.is_empty() {
            (folded(html! { "Without a result that counts (" (lines.len()) ")" }, &list))
        }
    }
}

fn profiles(e: &Experiment) -> Markup {
    let row = |(i, p): (usize, &crate::ProfileDef)| {
        vec![
            key(i, &p.id),
            html! { (p.peer) },
            html! { (p.role) },
            html! { span.key { @for (name, value) in &p.options { code { (name) "=" (value) } " " } } },
        ]
    };
    let rows = e.profiles.iter().enumerate().map(row);
    table("Who competes, and how each is asked", &columns("profile|peer|role|options"), rows)
}

/// Every run with what it says and where it ran, and how to start one.
fn runs(entry: &Entry) -> Markup {
    let id = &entry.experiment.id;
    let verdict_of = |place| {
        let mut all = entry.verdict.machines.iter();
        all.find(|verdict| place_of(entry, verdict) == Some(place))
    };
    let row = |(place, opened): (usize, &Opened)| {
        let r = &opened.record;
        let verdict = verdict_of(place);
        let state = match (r.protocol.quick, r.complete) {
            (true, _) => QUICK,
            (_, false) => "not complete",
            _ => "does not count",
        };
        vec![
            html! { a href={ "../" (run::path(opened, "html")) } { (r.run_id) } },
            html! { (r.machine.name) ", " (run::place(r)) },
            html! { @match verdict { Some(v) => (badge(v.state)), None => (state) } },
            or_dash(verdict.and_then(|v| v.aggregate).map(interval)),
            or_dash(verdict.map(|v| v.exceptions.len().to_string())),
            html! {
                span.key { (day(&r.finished)) " at " (r.code.short()) }
                span.sub.key { (age_in_words(entry.ages.get(place).copied().flatten())) }
            },
        ]
    };
    let rows = entry.records.iter().enumerate().rev().map(row);
    let columns = columns("run|where|verdict|#ratio|#exceptions|measured");
    html! {
        @if entry.records.is_empty() { p { "There is no run yet." } }
        @else {
            (table("Of each machine the newest complete run counts, and the worst of them decides", &columns, rows))
        }
        h3 { "How to run it" }
        p {
            "From the root of the repository, on a machine that is otherwise idle. The same id goes \
             on with a run that was stopped."
        }
        pre tabindex="0" aria-label="Commands" {
            code {
                "cargo build --release\n"
                "target/release/swiglu lab run " (id) " --run-id NAME\n"
                "target/release/swiglu lab report --out report"
            }
        }
    }
}

/// Those that the definition names, and those that name it.
fn decisions(site: &Site, e: &Experiment) -> Option<Markup> {
    let named = |d: &&Decision| e.decisions.contains(&d.id) || d.experiments.contains(&e.id);
    let written: Vec<_> = site.decisions.iter().filter(named).collect();
    let is_missing = |id: &&String| !written.iter().any(|d| d.id == **id);
    let missing: Vec<_> = e.decisions.iter().filter(is_missing).collect();
    let list = html! {
        ul {
            @for d in &written {
                li { a href={ "../" (decision::path(&d.id)) } { (d.title) } ", " (d.status) }
            }
            @for id in &missing { li { (id) ", which is not written" } }
        }
    };
    (!written.is_empty() || !missing.is_empty()).then_some(list)
}
