//! The first page: every experiment with its answer, those that were measured first.

use maud::{Markup, html};

use super::evidence::rivals;
use super::page::{ROOT, badge, frame, section, sign};
use super::{Entry, Site, age_in_words, decision, experiment, plots};
use crate::case::DeviceKind;
use crate::format::{day, ratio};
use crate::verdict::VerdictState;

pub(super) fn page(site: &Site) -> String {
    let count = |state| site.experiments.iter().filter(|e| e.verdict.state == state).count();
    let main = html! {
        h1 { "What has been measured" }
        p.lead {
            "Each experiment asks one question, states a claim, and is judged by its records alone."
        }
        p.how {
            "A figure says how many times as fast ours is as the best of the others, in the geometric mean over \
             all cases; in brackets is its 95 % interval. Each column below is a case: blue and upwards where ours \
             reaches the least that the claim asks for, orange and downwards where it does not."
        }
        section aria-labelledby="experiments" {
            h2 #experiments { "Experiments" }
            @if site.experiments.is_empty() { p { "There are none." } }
            @else {
                // The stylesheet hides what was not chosen: no script is needed.
                fieldset.filter {
                    legend.hidden { "Show experiments by verdict" }
                    input #show-all type="radio" name="show" checked;
                    label for="show-all" { "all " strong { (site.experiments.len()) } }
                    @for state in VerdictState::ALL {
                        @let (class, sign) = sign(state);
                        input id={ "show-" (class) } type="radio" name="show";
                        label.{ (class) } for={ "show-" (class) } {
                            span aria-hidden="true" { (sign) " " } (state) " " strong { (count(state)) }
                        }
                    }
                }
            }
            ol.cards.experiments {
                // What there is to see comes first.
                @let (measured, others): (Vec<_>, Vec<_>) =
                    site.experiments.iter().partition(|e| e.verdict.state != VerdictState::NotRun);
                @for entry in measured.into_iter().chain(others) {
                    li.{ "is-" (sign(entry.verdict.state).0) } { (card(entry)) }
                }
            }
        }
        (section("decisions", "Decisions", Some(decision::list(&site.decisions, &site.verdicts()))))
        (section("broken", "Could not be read", (!site.broken.is_empty()).then(|| html! {
            ul { @for text in &site.broken { li { code { (text) } } } }
        })))
    };
    frame(ROOT, "Experiments", &main)
}

fn card(entry: &Entry) -> Markup {
    let e = &entry.experiment;
    html! {
        article.card {
            div.asked {
                p.state { (badge(entry.verdict.state)) }
                h3 { a href=(experiment::path(&e.id)) { (e.title) } }
                p { (e.question) }
                p.meta { (whence(entry)) }
            }
            div.answered {
                (headline(entry))
                @if let Some(thumb) = plots::thumb(entry) { div.thumb { (thumb) } }
            }
        }
    }
}

/// The claim's figure with its interval, or why there is none.
pub(super) fn headline(entry: &Entry) -> Markup {
    let verdict = &entry.verdict;
    match verdict.decisive().filter(|d| d.aggregate.is_some()) {
        Some(_) => {
            let (figure, rest) =
                verdict.headline.split_once(' ').unwrap_or((&verdict.headline, ""));
            html! {
                p.headline { strong { (figure) } " as fast as " (rivals(&entry.experiment)) }
                p.meta { (rest) " · claimed: at least " (entry.experiment.claim.kind.goal()) "×" }
            }
        }
        None => html! {
            p.headline { b { "not measured yet" } }
            p.meta { (verdict.headline) }
        },
    }
}

/// Where and when the record of the verdict was taken, and what has changed since.
pub(super) fn whence(entry: &Entry) -> Markup {
    let machines = &entry.verdict.machines;
    let all = || machines.iter().filter_map(|m| m.aggregate).map(|a| a.value);
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    html! {
        @if let Some(decisive) = machines.first() {
            (decisive.machine)
            @if machines.len() > 1 {
                ", one of " (machines.len()) " machines, " (ratio(low)) " to " (ratio(high))
            }
            " · " time datetime=(day(&decisive.finished)) { (day(&decisive.finished)) }
            " · " (age_in_words(entry.age()))
        } @else {
            (entry.experiment.cases.len()) " cases, on "
            @match entry.experiment.device {
                DeviceKind::Cpu => "a CPU",
                DeviceKind::Cuda => "a CUDA device",
            }
        }
    }
}
