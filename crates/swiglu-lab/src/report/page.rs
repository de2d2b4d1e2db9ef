//! What every page has: the frame, badges, figures, prose.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use pulldown_cmark::{Event, Parser, Tag, TagEnd};

use super::chart::{ChartError, Width, marker};
use crate::verdict::VerdictState;

/// Where a page lies, as the way back to the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    Root,
    Folder,
}

impl Depth {
    pub(super) const fn root(self) -> &'static str {
        match self {
            Depth::Root => "",
            Depth::Folder => "../",
        }
    }
}

/// A whole page.
pub(super) fn frame(depth: Depth, title: &str, main: &Markup) -> String {
    let root = depth.root();
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
                        are medians of interleaved turns; every sample is in the record."
                    }
                }
            }
        }
    }
    .into_string()
}

/// A state as a word with a sign, so that its colour is not needed.
pub(super) fn badge(state: VerdictState) -> Markup {
    let (class, sign) = match state {
        VerdictState::Supported => ("good", "✓"),
        VerdictState::Refuted => ("bad", "✕"),
        VerdictState::Inconclusive => ("open", "≈"),
        VerdictState::NotRun => ("none", "○"),
    };
    html! { span class={ "badge " (class) } { span aria-hidden="true" { (sign) " " } (state) } }
}

/// The badge of evidence that is not of the present code or definition.
pub(super) fn stale_badge(why: Option<&str>) -> Markup {
    html! {
        @if let Some(why) = why {
            span.badge.open title=(why) { span aria-hidden="true" { "⟲ " } "stale" }
        }
    }
}

/// A plot in both widths, of which the stylesheet shows one; nothing if there is nothing to plot.
pub(super) fn figure(
    draw: impl Fn(Width) -> Result<Option<String>, ChartError>,
    caption: &Markup,
) -> Result<Option<Markup>, ChartError> {
    let (Some(narrow), Some(wide)) = (draw(Width::Narrow)?, draw(Width::Wide)?) else {
        return Ok(None);
    };
    Ok(Some(html! {
        figure {
            div.narrow { (PreEscaped(narrow)) }
            div.wide { (PreEscaped(wide)) }
            figcaption { (caption) }
        }
    }))
}

/// A plot in the narrow width only, for rows of small ones.
pub(super) fn small_figure(
    draw: impl Fn(Width) -> Result<Option<String>, ChartError>,
    caption: &Markup,
) -> Result<Option<Markup>, ChartError> {
    let Some(svg) = draw(Width::Narrow)? else { return Ok(None) };
    Ok(Some(html! { figure.small { figcaption { (caption) } (PreEscaped(svg)) } }))
}

/// A profile's colour and marker, and its name.
pub(super) fn key(series: usize, label: &str) -> Markup {
    html! {
        span.key {
            span.mark style={ "color:var(--c" (series % 9) ")" } aria-hidden="true" {
                (marker(series).glyph())
            }
            " " (label)
        }
    }
}

/// A table that scrolls by itself where it is too wide, by keyboard too.
pub(super) fn scroll(label: &str, table: &Markup) -> Markup {
    html! { div.scroll role="region" aria-label=(label) tabindex="0" { (table) } }
}

/// Markdown as HTML. Definitions and decisions are text: HTML in them is shown, not obeyed; links
/// lead to the web or are text; headings begin at the second level, since the page has the first.
pub(super) fn prose(text: &str) -> Markup {
    let mut links = Vec::new();
    let mut images = 0usize;
    let events = Parser::new(text).filter_map(|event| match event {
        Event::Html(html) | Event::InlineHtml(html) => Some(Event::Text(html)),
        Event::Start(Tag::HtmlBlock) => Some(Event::Start(Tag::Paragraph)),
        Event::End(TagEnd::HtmlBlock) => Some(Event::End(TagEnd::Paragraph)),
        Event::Start(Tag::Heading { level, id, classes, attrs }) => {
            let level = level.max(pulldown_cmark::HeadingLevel::H2);
            Some(Event::Start(Tag::Heading { level, id, classes, attrs }))
        }
        Event::End(TagEnd::Heading(level)) => {
            Some(Event::End(TagEnd::Heading(level.max(pulldown_cmark::HeadingLevel::H2))))
        }
        Event::Start(Tag::Link { ref dest_url, .. }) => {
            let outside = dest_url.starts_with("https://") || dest_url.starts_with("http://");
            links.push(outside);
            outside.then_some(event)
        }
        Event::End(TagEnd::Link) => links.pop().unwrap_or(false).then_some(event),
        // A page that needs the network for a picture does not open from disk.
        Event::Start(Tag::Image { .. }) => {
            images += 1;
            None
        }
        Event::End(TagEnd::Image) => {
            images = images.saturating_sub(1);
            None
        }
        event => Some(event),
    });
    let mut out = String::new();
    pulldown_cmark::html::push_html(&mut out, events);
    PreEscaped(out)
}
