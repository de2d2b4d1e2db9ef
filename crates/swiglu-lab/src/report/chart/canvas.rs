//! What all plots share: size, colours, text, markers, and the way to an SVG document.

use std::fmt::Write as _;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use thiserror::Error;

use super::PALETTE;

/// A plot that could not be drawn.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the plot `{title}` could not be drawn: {reason}")]
pub struct ChartError {
    /// The plot's title.
    pub title: String,
    /// What the drawing library said.
    pub reason: String,
}

/// The width a plot is made for. Text keeps its size in both; a scaled picture's would not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// A phone's column.
    Narrow,
    /// A page's column.
    Wide,
}

impl Width {
    /// Pixels.
    pub const fn pixels(self) -> i32 {
        match self {
            Width::Narrow => 344,
            Width::Wide => 760,
        }
    }
}

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Drawn<T = ()> = Result<T, DrawingAreaErrorKind<std::io::Error>>;

/// The library divides sizes by this on the way to SVG.
const POINT: f64 = 1.24;
pub(super) const TEXT: f64 = 12.5;
pub(super) const SMALL: f64 = 11.5;

/// Marks a colour of ours in the library's output: no other colour begins like this.
const MARK: &str = "#FE00";
const INKS: [(Ink, &str); 4] = [
    (Ink::Text, "--ink"),
    (Ink::Muted, "--muted"),
    (Ink::Grid, "--grid"),
    (Ink::Surface, "--surface"),
];
/// Colours of series in the palette.
pub(super) const COLOURS: usize = 9;

/// What something is drawn with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ink {
    Text,
    Muted,
    Grid,
    Surface,
    /// The n-th colour of the palette, again from the first after the last.
    Series(usize),
}

impl Ink {
    pub(super) fn colour(self) -> RGBColor {
        let code = match self {
            Ink::Series(n) => n % COLOURS,
            fixed => 0x80 + INKS.iter().position(|(ink, _)| *ink == fixed).unwrap_or_default(),
        };
        RGBColor(0xFE, 0x00, code as u8)
    }

    pub(super) fn fill(self) -> ShapeStyle {
        self.colour().filled()
    }

    pub(super) fn line(self, width: u32) -> ShapeStyle {
        self.colour().stroke_width(width)
    }
}

fn variable(code: usize) -> Option<String> {
    match code.checked_sub(0x80) {
        Some(fixed) => INKS.get(fixed).map(|(_, name)| (*name).to_owned()),
        None => (code < COLOURS).then(|| format!("--c{code}")),
    }
}

/// Text in a size in pixels.
pub(super) fn text(ink: Ink, size: f64, h: HPos, v: VPos) -> TextStyle<'static> {
    let font = ("sans-serif", size * POINT).into_font();
    TextStyle { pos: Pos::new(h, v), color: ink.colour().to_backend_color(), font }
}

/// A sign that tells a series from others without its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    /// ●
    Circle,
    /// ■
    Square,
    /// ▲
    Triangle,
    /// ◆
    Diamond,
    /// ○
    Ring,
    /// □
    Box,
    /// ▼
    Down,
}

impl Marker {
    const ALL: [Marker; 7] = [
        Marker::Circle,
        Marker::Square,
        Marker::Triangle,
        Marker::Diamond,
        Marker::Ring,
        Marker::Box,
        Marker::Down,
    ];

    /// The sign as text, for a legend.
    pub const fn glyph(self) -> &'static str {
        match self {
            Marker::Circle => "●",
            Marker::Square => "■",
            Marker::Triangle => "▲",
            Marker::Diamond => "◆",
            Marker::Ring => "○",
            Marker::Box => "□",
            Marker::Down => "▼",
        }
    }

    /// Draws it around a point.
    pub(super) fn draw(self, area: &Area<'_>, (x, y): (i32, i32), ink: Ink) -> Drawn {
        const R: i32 = 4;
        match self {
            Marker::Circle => area.draw(&Circle::new((x, y), R, ink.fill())),
            Marker::Ring => {
                area.draw(&Circle::new((x, y), R, Ink::Surface.fill()))?;
                area.draw(&Circle::new((x, y), R, ink.line(2)))
            }
            Marker::Square => {
                area.draw(&Rectangle::new([(x - R, y - R), (x + R, y + R)], ink.fill()))
            }
            Marker::Box => {
                let corners = [(x - R, y - R), (x + R, y - R), (x + R, y + R), (x - R, y + R)];
                area.draw(&Polygon::new(corners, Ink::Surface.fill()))?;
                let closed = corners.into_iter().chain([corners[0], corners[1]]);
                area.draw(&PathElement::new(closed.collect::<Vec<_>>(), ink.line(2)))
            }
            Marker::Triangle => area.draw(&Polygon::new(
                [(x, y - R - 1), (x + R + 1, y + R), (x - R - 1, y + R)],
                ink.fill(),
            )),
            Marker::Down => area.draw(&Polygon::new(
                [(x, y + R + 1), (x + R + 1, y - R), (x - R - 1, y - R)],
                ink.fill(),
            )),
            Marker::Diamond => {
                let r = R + 1;
                area.draw(&Polygon::new(
                    [(x, y - r), (x + r, y), (x, y + r), (x - r, y)],
                    ink.fill(),
                ))
            }
        }
    }
}

/// The marker of the n-th series. Colours and markers repeat after different numbers of series, so
/// that a pair of both is unique among many.
pub fn marker(series: usize) -> Marker {
    Marker::ALL[series % Marker::ALL.len()]
}

/// What a plot is, said to those who do not see it.
pub(super) struct Meaning<'a> {
    pub(super) title: &'a str,
    pub(super) description: &'a str,
}

/// Draws on an area of this size and returns the SVG element.
pub(super) fn svg(
    meaning: &Meaning<'_>,
    (width, height): (i32, i32),
    draw: impl FnOnce(&Area<'_>) -> Drawn,
) -> Result<String, ChartError> {
    let mut out = String::new();
    let size = (width.unsigned_abs(), height.unsigned_abs());
    {
        let area = SVGBackend::with_string(&mut out, size).into_drawing_area();
        draw(&area)
            .and_then(|()| area.present())
            .map_err(|e| ChartError { title: meaning.title.to_owned(), reason: e.to_string() })?;
    }
    Ok(themed(&named(&out, meaning, width, height)))
}

/// Replaces the library's opening tag by one that scales and has a name and a description.
fn named(svg: &str, meaning: &Meaning<'_>, width: i32, height: i32) -> String {
    let body = svg.split_once('>').map_or("", |(_, body)| body);
    // Elements that describe by reference need names unique in a page; a label does not.
    let (title, description) = (escape(meaning.title), escape(meaning.description));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"{title}. {description}\">\n\
         <title>{title}</title>\n<desc>{description}</desc>\n{}",
        body.trim_start()
    )
}

/// Replaces marked colours by the palette's variables.
fn themed(svg: &str) -> String {
    let mut out = String::with_capacity(svg.len() * 2);
    let mut rest = svg;
    while let Some(at) = rest.find(MARK) {
        let code = rest.get(at + MARK.len()..at + MARK.len() + 2);
        let name = code.and_then(|c| usize::from_str_radix(c, 16).ok()).and_then(variable);
        // The attribute is `fill="#FE00nn"` or `stroke="#FE00nn"`.
        let attribute = ["fill=\"", "stroke=\""].into_iter().find(|a| rest[..at].ends_with(a));
        let end = at + MARK.len() + 2;
        match (name, attribute) {
            (Some(name), Some(attribute)) if rest[end..].starts_with('"') => {
                out.push_str(&rest[..at - attribute.len()]);
                // A style, because not every renderer resolves variables in attributes.
                let property = attribute.trim_end_matches("=\"");
                let _ = write!(out, "style=\"{property}:var({name})\"");
                rest = &rest[end + 1..];
            }
            _ => {
                out.push_str(&rest[..at + MARK.len()]);
                rest = &rest[at + MARK.len()..];
            }
        }
    }
    out + rest
}

/// A plot as a file of its own: under its title, with the palette in it, on its own background.
pub fn standalone(svg: &str, title: &str) -> String {
    const MARGIN: f64 = 16.0;
    const HEADING: f64 = 44.0;
    let sizes = svg.split_once("viewBox=\"").and_then(|(_, rest)| rest.split_once('"'));
    let mut sizes = sizes.map_or("", |(sizes, _)| sizes).split(' ').skip(2);
    let mut size = || sizes.next().and_then(|n| n.parse().ok()).unwrap_or(0.0);
    let (width, height) = (size() + 2.0 * MARGIN, size() + HEADING + MARGIN);
    // The heading is the name of the plot inside already: it is not read out twice.
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\">\n<style>\n{PALETTE}svg {{ background: var(--surface) }}\n\
         text {{ font-family: system-ui, sans-serif; paint-order: stroke; stroke: var(--surface); \
         stroke-width: 3px; stroke-linejoin: round }}\n</style>\n\
         <text x=\"{MARGIN}\" y=\"28\" font-size=\"15\" font-weight=\"bold\" aria-hidden=\"true\" \
         style=\"fill:var(--ink)\">{}</text>\n\
         <g transform=\"translate({MARGIN} {HEADING})\">\n{svg}</g>\n</svg>\n",
        escape(title)
    )
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // Not allowed in XML at all.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// At most `limit` characters, the last one `…` if some are left out.
pub(super) fn shortened(text: &str, limit: usize) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    if text.chars().count() <= limit {
        return clean.collect();
    }
    clean.take(limit.saturating_sub(1)).chain(['…']).collect()
}

/// The height of so many rows.
pub(super) fn rows_height(rows: usize, row: i32) -> i32 {
    i32::try_from(rows).unwrap_or(i32::MAX / row).min(i32::MAX / row - 2) * row
}

/// Whether a number can lie on a logarithmic axis.
pub(super) fn positive(x: f64) -> bool {
    x.is_finite() && x > 0.0
}
