//! Errors against float64, each beside the limit that was derived for it.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::canvas::{
    ChartError, Ink, Meaning, SMALL, TEXT, Width, marker, positive, rows_height, shortened, svg,
    text,
};

/// The error of one way, and its limit.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorRow {
    /// Its name.
    pub label: String,
    /// Relative Frobenius error.
    pub error: f64,
    /// The most that is accepted.
    pub limit: f64,
    /// Colour and marker.
    pub series: usize,
}

/// Errors of ways with one numerics mode.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorDots {
    /// The mode.
    pub title: String,
    /// What is shown, in a sentence.
    pub description: String,
    /// From top to bottom.
    pub rows: Vec<ErrorRow>,
}

const ROW: i32 = 34;

impl ErrorDots {
    /// The SVG element; none without an error to show. An exact result has none on this axis.
    ///
    /// # Errors
    /// [`ChartError`] if the drawing library fails.
    pub fn svg(&self, width: Width) -> Result<Option<String>, ChartError> {
        let rows: Vec<_> = self.rows.iter().filter(|r| positive(r.error)).collect();
        if rows.is_empty() {
            return Ok(None);
        }
        let values = || rows.iter().flat_map(|r| [r.error, r.limit]).filter(|v| positive(*v));
        // Whole powers of ten at both ends are the only ticks that the axis needs.
        let low = values().fold(f64::INFINITY, f64::min).log10().floor();
        let high = values().fold(0.0, f64::max).log10().ceil().max(low + 1.0);
        let size = (width.pixels(), rows_height(rows.len(), ROW) + 26);
        let (left, right) = (8.0, f64::from(size.0) - 8.0);
        let x = |v: f64| (left + (v.log10() - low) / (high - low) * (right - left)).round() as i32;
        let meaning = Meaning { title: &self.title, description: &self.description };
        svg(&meaning, size, |area| {
            let bottom = rows_height(rows.len(), ROW) + 6;
            for power in (low as i32)..=(high as i32) {
                let at = x(10f64.powi(power));
                area.draw(&PathElement::new([(at, 0), (at, bottom)], Ink::Grid.line(1)))?;
                let anchor = match power {
                    p if p == low as i32 => HPos::Left,
                    p if p == high as i32 => HPos::Right,
                    _ => HPos::Center,
                };
                let style = text(Ink::Muted, SMALL, anchor, VPos::Top);
                area.draw(&Text::new(format!("1e{power}"), (at, bottom + 4), style))?;
            }
            for (i, row) in (0..).zip(&rows) {
                let top = i * ROW + 2;
                let middle = top + 23;
                let chars = if width == Width::Narrow { 40 } else { 80 };
                let style = text(Ink::Text, TEXT, HPos::Left, VPos::Bottom);
                area.draw(&Text::new(shortened(&row.label, chars), (8, top + 13), style))?;
                if positive(row.limit) {
                    let limit = x(row.limit);
                    let ends = [(x(row.error), middle), (limit, middle)];
                    area.draw(&PathElement::new(ends, Ink::Muted.line(1)))?;
                    let tick = [(limit, middle - 6), (limit, middle + 6)];
                    area.draw(&PathElement::new(tick, Ink::Text.line(2)))?;
                }
                marker(row.series).draw(area, (x(row.error), middle), Ink::Series(row.series))?;
            }
            Ok(())
        })
        .map(Some)
    }
}
