//! How long each way takes: a bar to the median, a line from the first to the third quartile.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::canvas::{
    ChartError, Ink, Meaning, SMALL, TEXT, Width, positive, rows_height, shortened, svg, text,
};

/// One way of computing a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Its name.
    pub label: String,
    /// What the bar's end is labelled with, for example `12.3 µs · 1.20×`.
    pub value: String,
    /// Median time.
    pub median: f64,
    /// first quartile.
    pub q1: f64,
    /// third quartile.
    pub q3: f64,
    /// Colour in the palette.
    pub series: usize,
}

/// Times of one case.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// The case.
    pub title: String,
    /// What is shown, in a sentence.
    pub description: String,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

/// A bar of more than so many times the shortest is broken.
const LONGEST: f64 = 6.0;
const ROW: i32 = 36;
const THICK: i32 = 10;

impl Bars {
    /// The SVG element; none if no bar has a finite positive time.
    ///
    /// # Errors
    /// [`ChartError`] if the drawing library fails.
    pub fn svg(&self, width: Width) -> Result<Option<String>, ChartError> {
        let bars: Vec<&Bar> = self.bars.iter().filter(|b| positive(b.median)).collect();
        // Neither a long tail nor one hopeless way may squeeze the others: the one is cut at a third
        // beyond the longest bar, the other is drawn as a broken bar.
        let fastest = bars.iter().map(|b| b.median).fold(f64::INFINITY, f64::min);
        let longest = bars.iter().map(|b| b.median).fold(0.0, f64::max);
        let tail = bars.iter().map(|b| b.q3).filter(|p| p.is_finite()).fold(longest, f64::max);
        let end = tail.min(longest * 1.33).min(fastest * LONGEST);
        if bars.is_empty() {
            return Ok(None);
        }
        let size = (width.pixels(), rows_height(bars.len(), ROW) + 6);
        let meaning = Meaning { title: &self.title, description: &self.description };
        let full = size.0 - 2;
        let x = |value: f64| (value.clamp(0.0, end) / end * f64::from(full)).round() as i32 + 1;
        svg(&meaning, size, |area| {
            for (i, bar) in (0..).zip(&bars) {
                let top = i * ROW + 2;
                let (middle, ink) = (top + 22, Ink::Series(bar.series));
                let limit = if width == Width::Narrow { 30 } else { 64 };
                area.draw(&Text::new(
                    shortened(&bar.label, limit),
                    (1, top + 12),
                    text(Ink::Text, TEXT, HPos::Left, VPos::Bottom),
                ))?;
                area.draw(&Text::new(
                    shortened(&bar.value, 40),
                    (full, top + 12),
                    text(Ink::Muted, SMALL, HPos::Right, VPos::Bottom),
                ))?;
                let half = THICK / 2;
                let track = [(1, middle - half), (full, middle + half)];
                area.draw(&Rectangle::new(track, Ink::Grid.colour().mix(0.45).filled()))?;
                let to = x(bar.median).max(2);
                area.draw(&Rectangle::new([(1, middle - half), (to, middle + half)], ink.fill()))?;
                if bar.median > end {
                    for x in [full - 26, full - 18] {
                        let gap = [(x, middle + half + 1), (x + 6, middle - half - 1)];
                        area.draw(&PathElement::new(gap, Ink::Surface.line(3)))?;
                    }
                } else if positive(bar.q1) && positive(bar.q3) {
                    let (low, high) = (x(bar.q1), x(bar.q3));
                    let line = Ink::Text.line(1);
                    for (from, to) in [
                        ((low, middle), (high, middle)),
                        ((low, middle - 3), (low, middle + 3)),
                        ((high, middle - 3), (high, middle + 3)),
                    ] {
                        area.draw(&PathElement::new([from, to], line))?;
                    }
                }
            }
            Ok(())
        })
        .map(Some)
    }
}
