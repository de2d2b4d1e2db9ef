//! The first page: every experiment with its state.

use maud::{Markup, html};

use super::page::{Depth, badge, frame};
use super::{Entry, Site, decision, experiment};
use crate::format::day;
use crate::verdict::VerdictState;

pub(super) fn page(site: &Site) -> String {
    let count = |state| site.experiments.iter().filter(|e| e.verdict.state == state).count();
    let main = html! {
        h1 { "What has been measured" }
        p.lead {
            "Each experiment asks one question, states a claim, and is judged by its records alone."
        }
        ul.counts aria-label="Experiments by state" {
            @for state in VerdictState::ALL {
                li { (badge(state)) " " strong { (count(state)) } }
            }
        }
        section aria-labelledby="experiments" {
            h2 #experiments { "Experiments" }
            @if site.experiments.is_empty() { p { "There are none." } }
            ol.cards {
                @for entry in &site.experiments { li { (card(entry)) } }
            }
        }
        section aria-labelledby="decisions" {
            h2 #decisions { "Decisions" }
            (decision::list(Depth::Root, &site.decisions, &site.verdicts()))
        }
        @if !site.broken.is_empty() {
            section aria-labelledby="broken" {
                h2 #broken { "Could not be read" }
                ul { @for text in &site.broken { li { code { (text) } } } }
            }
        }
    };
    frame(Depth::Root, "Experiments", &main)
}

fn card(entry: &Entry) -> Markup {
    let e = &entry.experiment;
    let newest = entry.records.last().map(|o| day(&o.record.finished));
    let runs = match entry.records.len() {
        0 => "no runs".to_owned(),
        1 => "1 run".to_owned(),
        n => format!("{n} runs"),
    };
    html! {
        article.card {
            p.state { (badge(entry.verdict.state)) }
            h3 { a href=(experiment::path(&e.id)) { (e.title) } }
            p { (e.question) }
            p.headline { (entry.verdict.headline) }
            p.meta {
                (e.device) " · " (e.cases.len()) " cases · " (e.profiles.len()) " profiles · " (runs)
                @if let Some(day) = newest { " · " time datetime=(day) { (day) } }
            }
        }
    }
}
