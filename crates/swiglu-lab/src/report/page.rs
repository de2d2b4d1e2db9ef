//! What every page has: the frame, badges, figures, prose.

use maud::{DOCTYPE, Markup, PreEscaped, Render, html};
use pulldown_cmark::HeadingLevel::H2;
use pulldown_cmark::{Event, Parser, Tag, TagEnd};

use super::chart::{Canvas, Width, glyph};
use crate::format::DASH;
use crate::verdict::VerdictState;

/// The way back to the root of the site from a page in it, and from one in a folder.
pub(super) const ROOT: &str = "";
pub(super) const FOLDER: &str = "../";

/// A whole page, `root` away from the root.
pub(super) fn frame(root: &str, title: &str, main: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · swiglu lab" }
                link rel="stylesheet" href={ (root) "style.css" };
            }
            body {
                a.skip href="#main" { "Skip to content" }
                header.site {
                    nav aria-label="Site" {
                        a.home href={ (root) "index.html" } { "swiglu lab" }
                        a href={ (root) "index.html#experiments" } { "Experiments" }
                        a href={ (root) "index.html#decisions" } { "Decisions" }
                    }
                }
                main #main { (main) }
                footer.site {
                    p {
                        "Made by " code { "swiglu lab report" } " from definitions and records. Times \
                        are medians of interleaved turns."
                    }
                }
            }
        }
    }
    .into_string()
}

/// The class of a state's colour, and its sign.
pub(super) const fn sign(state: VerdictState) -> (&'static str, &'static str) {
    match state {
        VerdictState::Supported => ("good", "✓"),
        VerdictState::Refuted => ("bad", "✕"),
        VerdictState::Inconclusive => ("open", "≈"),
        VerdictState::NotRun => ("none", "○"),
    }
}

/// A state as a word with a sign, so that its colour is not needed.
pub(super) fn badge(state: VerdictState) -> Markup {
    let (class, sign) = sign(state);
    html! { span class={ "badge " (class) } { span aria-hidden="true" { (sign) " " } (state) } }
}

/// A plot is drawn in both widths, of which the stylesheet shows one, with its title and description; there is
/// no figure if there is nothing to plot.
pub(super) fn figure(
    [title, description]: [String; 2],
    draw: impl Fn(Width) -> Option<Canvas>,
    caption: &Markup,
) -> Option<Markup> {
    let drawn = |width| Some(PreEscaped(draw(width)?.finish(&title, &description)));
    let (narrow, wide) = (drawn(Width::Narrow)?, drawn(Width::Wide)?);
    Some(html! {
        figure { div.narrow { (narrow) } div.wide { (wide) } figcaption { (caption) } }
    })
}

/// A profile's colour and marker, and its name.
pub(super) fn key(series: usize, label: &str) -> Markup {
    html! {
        span.key {
            span.mark style={ "color:var(--c" (series % 9) ")" } aria-hidden="true" {
                (glyph(series))
            }
            " " (label)
        }
    }
}

/// The head of a column, and whether numbers are below it.
pub(super) type Column = (Markup, bool);

/// Heads are words with `|` between them; those of numbers begin with `#`.
pub(super) fn columns(heads: &str) -> Vec<Column> {
    let column = |head: &str| (head.trim_start_matches('#').render(), head.starts_with('#'));
    heads.split('|').map(column).collect()
}

/// A table that scrolls by itself where it is too wide, by keyboard too. The first cell of a row names it.
pub(super) fn table(
    caption: &str,
    columns: &[Column],
    rows: impl Iterator<Item = Vec<Markup>>,
) -> Markup {
    html! {
        div.scroll role="region" aria-label=(caption) tabindex="0" {
            table {
                caption { span { (caption) } }
                thead { tr { @for (head, n) in columns { th.n[*n] scope="col" { (head) } } } }
                tbody {
                    @for row in rows {
                        tr {
                            @for (i, (cell, (_, n))) in row.iter().zip(columns).enumerate() {
                                @if i == 0 { th scope="row" { (cell) } }
                                @else { td.n[*n] { (cell) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

pub(super) fn or_dash(text: Option<String>) -> Markup {
    html! { (text.unwrap_or_else(|| DASH.into())) }
}

/// What is not for everybody, closed until somebody asks.
pub(super) fn folded(summary: impl Render, content: &Markup) -> Markup {
    html! { details { summary { (summary) } (content) } }
}

/// More than a screen of lines.
pub(super) const MANY: usize = 60;

/// The same of more lines than a screen has, of fewer as it is.
pub(super) fn folded_if_many(lines: usize, summary: impl Render, content: &Markup) -> Markup {
    if lines > MANY {
        folded(summary, content)
    } else {
        html! { (content) }
    }
}

/// A section with its heading; nothing if there is nothing in it.
pub(super) fn section(id: &str, heading: impl Render, content: Option<Markup>) -> Markup {
    html! {
        @if let Some(content) = content {
            section aria-labelledby=(id) { h2 id=(id) { (heading) } (content) }
        }
    }
}

/// Markdown as HTML. Definitions and decisions are text: HTML in them is shown, not obeyed; links
/// lead to the web or are text; headings begin at the second level, since the page has the first.
pub(super) fn prose(text: &str) -> Markup {
    let mut links = Vec::new();
    let events = Parser::new(text).filter_map(|event| match event {
        Event::Html(html) | Event::InlineHtml(html) => Some(Event::Text(html)),
        Event::Start(Tag::HtmlBlock) => Some(Event::Start(Tag::Paragraph)),
        Event::End(TagEnd::HtmlBlock) => Some(Event::End(TagEnd::Paragraph)),
        Event::Start(Tag::Heading { level, id, classes, attrs }) => {
            Some(Event::Start(Tag::Heading { level: level.max(H2), id, classes, attrs }))
        }
        Event::End(TagEnd::Heading(level)) => Some(Event::End(TagEnd::Heading(level.max(H2)))),
        Event::Start(Tag::Link { ref dest_url, .. }) => {
            let outside = dest_url.starts_with("https://") || dest_url.starts_with("http://");
            links.push(outside);
            outside.then_some(event)
        }
        Event::End(TagEnd::Link) => links.pop().unwrap_or(false).then_some(event),
        // A page that needs the network for a picture does not open from disk.
        Event::Start(Tag::Image { .. }) | Event::End(TagEnd::Image) => None,
        event => Some(event),
    });
    let mut out = String::new();
    pulldown_cmark::html::push_html(&mut out, events);
    PreEscaped(out)
}
