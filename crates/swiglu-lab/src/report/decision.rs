//! Pages of decisions.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::page::{FOLDER, badge, frame, prose, section};
use super::{Site, experiment};
use crate::decision::Decision;
use crate::verdict::Verdict;

/// Its place in the site.
pub(super) fn path(id: &str) -> String {
    format!("decisions/{id}.html")
}

/// Decisions are listed for a page in the root of the site.
pub(super) fn list(decisions: &[Decision], verdicts: &BTreeMap<String, Verdict>) -> Markup {
    html! {
        @if decisions.is_empty() { p { "There are none." } }
        ol.cards {
            @for d in decisions {
                @let doubts = d.doubts(verdicts);
                li {
                    article.card {
                        (state(d, &doubts))
                        h3 { a href=(path(&d.id)) { (d.title) } }
                        p { (d.claim) }
                        p.meta { time datetime=(d.date) { (d.date) } }
                    }
                }
            }
        }
    }
}

pub(super) fn page(
    site: &Site,
    decision: &Decision,
    verdicts: &BTreeMap<String, Verdict>,
) -> String {
    let doubts = decision.doubts(verdicts);
    let evidence = html! {
        ul.plain {
            @for id in &decision.experiments {
                @match site.experiments.iter().find(|e| e.experiment.id == *id) {
                    Some(e) => li {
                        (badge(e.verdict.state)) " "
                        a href={ "../" (experiment::path(id)) } { (e.experiment.title) }
                        span.sub { (e.verdict.headline) }
                    },
                    None => li { (id) ", which is not defined" },
                }
            }
        }
    };
    let main = html! {
        header.page {
            (state(decision, &doubts))
            h1 { (decision.title) }
            p.lead { (decision.claim) }
            p.meta { (decision.id) " · " time datetime=(decision.date) { (decision.date) } }
        }
        @if !doubts.is_empty() {
            section.warning aria-labelledby="doubts" {
                h2 #doubts { "Its evidence does not carry it any more" }
                ul { @for doubt in &doubts { li { (doubt) } } }
            }
        }
        section.prose aria-label="Text" { (prose(&decision.body)) }
        (section("evidence", "Rests on", Some(evidence)))
    };
    frame(FOLDER, &decision.title, &main)
}

/// What was decided, and whether its evidence still carries it.
fn state(decision: &Decision, doubts: &[String]) -> Markup {
    html! {
        p.state {
            span.badge.none { (decision.status) }
            @if !doubts.is_empty() {
                " " span.badge.open { span aria-hidden="true" { "⚠ " } "doubted" }
            }
        }
    }
}
