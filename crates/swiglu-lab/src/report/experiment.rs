//! The page of an experiment: question, evidence, plots, boundary, how to run it.

use maud::{Markup, html};

use super::evidence::{ceilings, shown};
use super::page::{Depth, badge, frame, key, prose, scroll};
use super::{Entry, ReportError, Site, decision, plots, run, tables};
use crate::definition::{Against, Claim, ClaimKind, Experiment};
use crate::format::day;
use crate::profile::analyse_result;
use crate::record::{Opened, QUICK, Record};
use crate::verdict::RecordVerdict;

/// Its place in the site.
pub(super) fn path(id: &str) -> String {
    format!("experiments/{id}.html")
}

/// Analyses that are shown at once; the others open.
const SHOWN_ANALYSES: usize = 3;

pub(super) fn page(site: &Site, entry: &Entry) -> Result<String, ReportError> {
    let e = &entry.experiment;
    let record = shown(entry);
    let main = html! {
        header.page {
            p.state { (badge(entry.verdict.state)) }
            h1 { (e.title) }
            p.lead { (e.question) }
            p.headline { (entry.verdict.headline) }
        }
        section aria-labelledby="why" {
            h2 #why { "Why it matters" }
            (prose(&e.why))
        }
        section aria-labelledby="claim" {
            h2 #claim { "Claim" }
            blockquote { p { (e.claim.text) } }
            p { (in_words(&e.claim)) }
        }
        section aria-labelledby="evidence" {
            h2 #evidence { "Evidence" }
            @if entry.verdict.machines.is_empty() { p { "There is no complete run yet." } }
            div.evidence {
                @for verdict in &entry.verdict.machines { (card(entry, verdict)) }
            }
            @if !entry.refused.is_empty() {
                h3 { "Refused" }
                ul { @for text in &entry.refused { li { code { (text) } } } }
            }
        }
        @if let Some(opened) = record { (results(e, opened)?) }
        (profiles(e))
        section aria-labelledby="boundary" {
            h2 #boundary { "What the evidence does not cover" }
            (prose(&e.boundary))
        }
        (how_to_run(e))
        section aria-labelledby="runs" {
            h2 #runs { "Runs" }
            (runs(entry))
        }
        @if !e.decisions.is_empty() {
            section aria-labelledby="decisions" {
                h2 #decisions { "Decisions that rest on it" }
                (decisions(site, e))
            }
        }
    };
    Ok(frame(Depth::Folder, &e.title, &main))
}

/// The claim's test in a sentence.
fn in_words(claim: &Claim) -> Markup {
    let against = match &claim.against {
        Against::Profiles(ids) if ids.len() == 1 => ids[0].clone(),
        Against::Profiles(ids) => format!("the fastest of {}", ids.join(", ")),
        Against::Best(roles) => {
            let names: Vec<_> = roles.iter().map(|r| r.name()).collect();
            format!("the fastest {}", names.join(" or "))
        }
    };
    let reaches = match claim.kind {
        ClaimKind::Faster { goal: 1.0 } => "the whole interval is at least 1".to_owned(),
        ClaimKind::Faster { goal } => {
            format!("the whole interval is at least 1, and the estimate at least {goal}")
        }
        ClaimKind::NotSlower | ClaimKind::Reaches { .. } => {
            format!("the whole interval is at least {}", claim.kind.limit())
        }
    };
    html! {
        "In each case, the time of " b { (against) } " is divided by that of " b { (claim.subject) }
        ". It is supported if, of the geometric mean over all cases, " (reaches)
        @if let Some(floor) = claim.floor {
            @match claim.exceptions {
                0 => ", and no case is below ",
                n => { ", and at most " b { (n) } " cases are below " }
            }
            b { (floor) }
        }
        "."
    }
}

fn card(entry: &Entry, verdict: &RecordVerdict) -> Markup {
    let of =
        |o: &&Opened| o.record.run_id == verdict.run_id && o.record.machine.name == verdict.machine;
    let opened = entry.records.iter().find(of);
    let device = opened.map(|o| {
        let m = &o.record.machine;
        m.gpu.clone().unwrap_or_else(|| m.cpu.clone())
    });
    html! {
        article.card {
            p.state { (badge(verdict.state)) }
            h3 { (verdict.machine) }
            @if let Some(a) = verdict.aggregate { p.figure { (tables::interval(a)) } }
            p.meta {
                @if let Some(device) = device { (device) " · " }
                (verdict.cases.len()) " cases compared · " (day(&verdict.finished)) " · "
                @if let Some(o) = opened {
                    a href={ "../" (run::path(o)) } { "run " (verdict.run_id) }
                } @else { "run " (verdict.run_id) }
            }
            @if !verdict.reasons.is_empty() {
                ul.reasons { @for reason in &verdict.reasons { li { (reason) } } }
            }
        }
    }
}

fn results(e: &Experiment, opened: &Opened) -> Result<Markup, ReportError> {
    let record = &opened.record;
    let times = plots::times(e, record)?;
    let ceilings = ceilings(e, record);
    let roofline = plots::roofline(e, record, &ceilings)?;
    let errors = plots::errors(e, record)?;
    Ok(html! {
        section aria-labelledby="results" {
            h2 #results { "Results" }
            p.meta {
                "Of " a href={ "../" (run::path(opened)) } { "run " (record.run_id) } " on "
                (record.machine.name) ", " (day(&record.finished))
                @if record.protocol.quick { "; " (QUICK) }
                @if !record.complete { ", not complete" }
                "."
            }
            @for figure in &times.sweeps { (figure) }
            @if !times.bars.is_empty() {
                h3 { "Time per call" }
                p.meta { "Bars end at the median, lines reach over the middle half of the samples." }
                div.figures { @for figure in &times.bars { (figure) } }
            }
            @if !times.more_bars.is_empty() {
                details {
                    summary { "Time per call, case by case (" (times.more_bars.len()) ")" }
                    div.figures { @for figure in &times.more_bars { (figure) } }
                }
            }
            h3 { "Medians" }
            (tables::medians(e, record))
            (tables::absent(record))
        }
        @if let Some(roofline) = roofline {
            section aria-labelledby="roofline" {
                h2 #roofline { "Against the machine" }
                (roofline)
            }
        }
        (analyses(e, record))
        @if !errors.is_empty() {
            section aria-labelledby="errors" {
                h2 #errors { "Correctness" }
                p {
                    "The case of each profile that is nearest to its limit: the sign is its error against \
                     float64, the bar the limit that was derived for it."
                }
                div.figures { @for figure in &errors { (figure) } }
            }
        }
    })
}

/// What binds the subject of the claim, case by case.
fn analyses(e: &Experiment, record: &Record) -> Markup {
    let ceilings = ceilings(e, record);
    let of_subject = record.results.iter().filter(|r| r.profile == e.claim.subject);
    let texts: Vec<_> = of_subject
        .filter_map(|r| {
            let case = record.case_of(r)?;
            Some((r.case_key.as_str(), analyse_result(e, case, r, &ceilings)?.text))
        })
        .collect();
    let list = |texts: &[(&str, String)]| {
        html! { dl.analyses { @for (case, text) in texts { dt { (case) } dd { (text) } } } }
    };
    let (first, rest) = texts.split_at(texts.len().min(SHOWN_ANALYSES));
    html! {
        @if !texts.is_empty() {
            section aria-labelledby="analysis" {
                h2 #analysis { "What binds " (e.claim.subject) }
                (list(first))
                @if !rest.is_empty() {
                    details { summary { (rest.len()) " more cases" } (list(rest)) }
                }
            }
        }
    }
}

fn profiles(e: &Experiment) -> Markup {
    let table = html! {
        table {
            caption { span { "Who competes, and how each is asked" } }
            thead {
                tr {
                    th scope="col" { "profile" } th scope="col" { "peer" }
                    th scope="col" { "role" } th scope="col" { "options" }
                }
            }
            tbody {
                @for (i, p) in e.profiles.iter().enumerate() {
                    tr {
                        th scope="row" { (key(i, &p.id)) }
                        td { (p.peer) }
                        td { (p.role) }
                        td {
                            @for (name, value) in &p.options { code { (name) "=" (value) } " " }
                        }
                    }
                }
            }
        }
    };
    html! {
        section aria-labelledby="profiles" {
            h2 #profiles { "Profiles" }
            (scroll("Profiles", &table))
        }
    }
}

fn how_to_run(e: &Experiment) -> Markup {
    html! {
        section aria-labelledby="run" {
            h2 #run { "How to run it" }
            p {
                "From the root of the repository, on a machine that is otherwise idle. The same id goes \
                 on with a run that was stopped."
            }
            pre tabindex="0" aria-label="Commands" {
                code {
                    "cargo build --release\n"
                    "target/release/swiglu lab run " (e.id) " --run-id NAME\n"
                    "target/release/swiglu lab report --out report"
                }
            }
        }
    }
}

fn runs(entry: &Entry) -> Markup {
    html! {
        @if entry.records.is_empty() { p { "None." } }
        ul {
            @for opened in entry.records.iter().rev() {
                @let r = &opened.record;
                li {
                    a href={ "../" (run::path(opened)) } { (r.run_id) } ", " (r.machine.name) ", "
                    time datetime=(r.finished) { (day(&r.finished)) }
                    @if !r.complete { ", not complete" }
                    @if r.protocol.quick { "; " (QUICK) }
                }
            }
        }
    }
}

fn decisions(site: &Site, e: &Experiment) -> Markup {
    html! {
        ul {
            @for id in &e.decisions {
                @match site.decisions.iter().find(|d| d.id == *id) {
                    Some(d) => li { a href={ "../" (decision::path(id)) } { (d.title) } ", " (d.status) },
                    None => li { (id) ", which is not written" },
                }
            }
        }
    }
}
