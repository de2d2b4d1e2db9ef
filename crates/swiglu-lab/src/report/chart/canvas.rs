//! What all plots share: size, colours, text, markers, axes, and the way to an SVG document.

use maud::{Markup, html};

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
    pub fn pixels(self) -> f64 {
        self.pick(344.0, 760.0)
    }

    /// One of two values.
    pub(super) fn pick<T>(self, narrow: T, wide: T) -> T {
        match self {
            Width::Narrow => narrow,
            Width::Wide => wide,
        }
    }
}

pub(super) const TEXT: f64 = 12.5;
pub(super) const SMALL: f64 = 11.5;
/// Colours of series in the palette.
const COLOURS: usize = 9;

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
    /// As a declaration: not every renderer resolves variables in attributes.
    fn declared(self, property: &str) -> String {
        let name = match self {
            Ink::Text => "ink".to_owned(),
            Ink::Muted => "muted".to_owned(),
            Ink::Grid => "grid".to_owned(),
            Ink::Surface => "surface".to_owned(),
            Ink::Series(n) => format!("c{}", n % COLOURS),
        };
        format!("{property}:var(--{name})")
    }
}

/// The sign of a series, which tells it from others without its colour: as text for a legend, as corners
/// around the middle (none of what is round), and whether it is hollow. Colours and signs repeat after
/// different numbers of series, so that a pair of both is unique among many.
type Sign = (&'static str, &'static [(f64, f64)], bool);

const SIGNS: [Sign; 7] = [
    ("●", &[], false),
    ("■", &SQUARE, false),
    ("▲", &[(0.0, -5.0), (5.0, 4.0), (-5.0, 4.0)], false),
    ("◆", &[(0.0, -5.0), (5.0, 0.0), (0.0, 5.0), (-5.0, 0.0)], false),
    ("○", &[], true),
    ("□", &SQUARE, true),
    ("▼", &[(0.0, 5.0), (5.0, -4.0), (-5.0, -4.0)], false),
];
const SQUARE: [(f64, f64); 4] = [(-4.0, -4.0), (4.0, -4.0), (4.0, 4.0), (-4.0, 4.0)];

/// The sign of the n-th series in a legend.
pub fn glyph(series: usize) -> &'static str {
    SIGNS[series % SIGNS.len()].0
}

/// A logarithmic axis: from the lowest to the highest value between two pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    pub(super) values: [f64; 2],
    pub(super) pixels: [f64; 2],
}

impl Axis {
    pub(super) fn at(&self, value: f64) -> f64 {
        let ([low, high], [from, to]) = (self.values, self.pixels);
        from + (value / low).ln() / (high / low).ln() * (to - from)
    }
}

/// These values are labelled on an axis.
type Ticks<'a> = (&'a Axis, &'a mut dyn Iterator<Item = (f64, String)>);

/// `Canvas` is a plot in the making.
#[derive(Debug, Clone, PartialEq)]
pub struct Canvas {
    size: (f64, f64),
    body: String,
}

impl Canvas {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self { size: (width, height), body: String::new() }
    }

    fn add(&mut self, element: Markup) {
        self.body += &element.into_string();
    }

    pub(super) fn rect(&mut self, ink: Ink, [left, right]: [f64; 2], [top, bottom]: [f64; 2]) {
        let (width, height) = ((right - left).abs(), (bottom - top).abs());
        self.add(html! {
            rect x=(short(left.min(right))) y=(short(top.min(bottom))) width=(short(width))
                height=(short(height)) style=(ink.declared("fill")) {}
        });
    }

    pub(super) fn line(&mut self, ink: Ink, width: u32, points: &[(f64, f64)]) {
        let points = joined(points);
        self.add(html! {
            polyline points=(points) fill="none" stroke-width=(width) style=(ink.declared("stroke")) {}
        });
    }

    /// Text that begins (`start`), is centred (`middle`) or ends (`end`) at a point of its baseline.
    pub(super) fn text(
        &mut self,
        (ink, size): (Ink, f64),
        anchor: &str,
        (x, y): (f64, f64),
        text: &str,
    ) {
        self.add(html! {
            text x=(short(x)) y=(short(y)) font-size=(size) text-anchor=(anchor)
                style=(ink.declared("fill")) { (clean(text)) }
        });
    }

    pub(super) fn marker(&mut self, series: usize, (x, y): (f64, f64)) {
        let ((_, corners, hollow), ink) = (SIGNS[series % SIGNS.len()], Ink::Series(series));
        let style = match hollow {
            true => {
                let (fill, stroke) = (Ink::Surface.declared("fill"), ink.declared("stroke"));
                format!("{fill};{stroke};stroke-width:2")
            }
            false => ink.declared("fill"),
        };
        let corners: Vec<_> = corners.iter().map(|(a, b)| (x + a, y + b)).collect();
        self.add(html! {
            @if corners.is_empty() { circle cx=(short(x)) cy=(short(y)) r="4" style=(style) {} }
            @else { polygon points=(joined(&corners)) style=(style) {} }
        });
    }

    /// The grid of both axes with labels at its lines, and what the horizontal one counts.
    pub(super) fn axes(&mut self, (x, x_ticks): Ticks<'_>, (y, y_ticks): Ticks<'_>, name: &str) {
        let ([left, right], [bottom, top]) = (x.pixels, y.pixels);
        for (at, label) in x_ticks.map(|(value, label)| (x.at(value), label)) {
            self.line(Ink::Grid, 1, &[(at, top), (at, bottom)]);
            self.text((Ink::Muted, SMALL), "middle", (at, bottom + 15.0), &label);
        }
        for (at, label) in y_ticks.map(|(value, label)| (y.at(value), label)) {
            self.line(Ink::Grid, 1, &[(left, at), (right, at)]);
            self.text((Ink::Muted, SMALL), "end", (left - 6.0, at + 4.0), &label);
        }
        self.text((Ink::Muted, SMALL), "middle", ((left + right) / 2.0, bottom + 32.0), name);
    }

    /// The SVG element, which says what it is to those who do not see it.
    pub fn finish(self, title: &str, description: &str) -> String {
        let (title, description) = (clean(title), clean(description));
        let ((width, height), body) = (self.size, maud::PreEscaped(self.body));
        // Elements that describe by reference need names unique in a page; a label does not.
        html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (width) " " (height) }
                width=(width) height=(height) role="img" aria-label={ (title) ". " (description) }
            {
                title { (title) }
                desc { (description) }
                (body)
            }
        }
        .into_string()
    }
}

fn joined(points: &[(f64, f64)]) -> String {
    let points: Vec<_> =
        points.iter().map(|&(x, y)| format!("{},{}", short(x), short(y))).collect();
    points.join(" ")
}

fn short(pixels: f64) -> f64 {
    (pixels * 10.0).round() / 10.0
}

/// Without what XML does not allow at all.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// At most `limit` characters, the last one `…` if some are left out.
pub(super) fn shortened(text: &str, limit: usize) -> String {
    if text.chars().count() <= limit {
        return text.to_owned();
    }
    text.chars().take(limit.saturating_sub(1)).chain(['…']).collect()
}

/// Whether a number can lie on a logarithmic axis.
pub(super) fn positive(x: f64) -> bool {
    x.is_finite() && x > 0.0
}
