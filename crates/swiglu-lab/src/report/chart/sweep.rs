//! Speed over a size, as a ratio to one way of computing it.

use plotters::coord::combinators::BindKeyPoints;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::canvas::{
    ChartError, Drawn, Ink, Meaning, SMALL, Width, marker, positive, shortened, svg, text,
};

/// One way of computing the cases.
#[derive(Debug, Clone, PartialEq)]
pub struct SweepSeries {
    /// Its name.
    pub label: String,
    /// Colour and marker.
    pub series: usize,
    /// Size and ratio, in order of size.
    pub points: Vec<(f64, f64)>,
}

/// Ratios over a size: above 1 is faster than the baseline.
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    /// What is compared.
    pub title: String,
    /// What is shown, in a sentence.
    pub description: String,
    /// What the horizontal axis counts.
    pub x_label: String,
    /// Each a line.
    pub series: Vec<SweepSeries>,
}

/// Slower than this is not drawn: one hopeless way would press all others into a line.
const LOWEST: f64 = 0.2;

/// Ratios that a reader takes in at a glance.
const TICKS: [f64; 17] =
    [0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.7, 0.85, 1.0, 1.15, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0];

impl SweepSeries {
    /// Whether some of its points are below what is drawn.
    pub fn is_below(&self) -> bool {
        self.points.iter().any(|&(_, y)| positive(y) && y < LOWEST)
    }
}

impl Sweep {
    /// The SVG element; none without at least two sizes to compare.
    ///
    /// # Errors
    /// [`ChartError`] if the drawing library fails.
    pub fn svg(&self, width: Width) -> Result<Option<String>, ChartError> {
        let all = || {
            let points = self.series.iter().flat_map(|s| s.points.iter().copied());
            points.filter(|&(x, y)| positive(x) && positive(y))
        };
        let mut sizes: Vec<f64> = all().map(|(x, _)| x).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        let (Some(&first), Some(&last)) = (sizes.first(), sizes.last()) else { return Ok(None) };
        if first == last {
            return Ok(None);
        }
        let low = all().map(|(_, y)| y).filter(|y| *y >= LOWEST).fold(0.9, f64::min) / 1.06;
        let high = all().map(|(_, y)| y).fold(1.1, f64::max) * 1.06;
        let room = if width == Width::Narrow { 5 } else { 10 };
        let (x_ticks, y_ticks) = (thinned(&sizes, room), ratio_ticks(low, high));
        let size = (width.pixels(), if width == Width::Narrow { 250 } else { 330 });
        let meaning = Meaning { title: &self.title, description: &self.description };
        svg(&meaning, size, |area| {
            let mut chart = ChartBuilder::on(area)
                .margin_right(14)
                .margin_top(10)
                .x_label_area_size(38)
                .y_label_area_size(46)
                .build_cartesian_2d(
                    (first / 1.15..last * 1.15).log_scale().with_key_points(x_ticks),
                    (low..high).log_scale().with_key_points(y_ticks),
                )?;
            let label = text(Ink::Muted, SMALL, HPos::Center, VPos::Top);
            chart
                .configure_mesh()
                .bold_line_style(Ink::Grid.line(1))
                .light_line_style(TRANSPARENT)
                .axis_style(Ink::Grid.line(1))
                .label_style(text(Ink::Muted, SMALL, HPos::Center, VPos::Center))
                .x_label_formatter(&|x| size_label(*x))
                .y_label_formatter(&|y| format!("{}×", short(*y)))
                .draw()?;
            area.draw(&Text::new(
                shortened(&self.x_label, 40),
                ((size.0 + 46) / 2, size.1 - 14),
                label,
            ))?;
            let one = [(first / 1.15, 1.0), (last * 1.15, 1.0)];
            chart.draw_series(LineSeries::new(one, Ink::Text.line(2)))?;
            for series in &self.series {
                let ink = Ink::Series(series.series);
                let points = series.points.iter().copied();
                let inside = |&(x, y): &(f64, f64)| positive(x) && positive(y) && y >= LOWEST;
                let points: Vec<_> = points.filter(inside).collect();
                chart.draw_series(LineSeries::new(points.iter().copied(), ink.line(2)))?;
                let at: Vec<_> = points.iter().map(|p| chart.backend_coord(p)).collect();
                at.into_iter()
                    .try_for_each(|p| -> Drawn { marker(series.series).draw(area, p, ink) })?;
            }
            Ok(())
        })
        .map(Some)
    }
}

/// At most `room` of the sizes, the first and the last among them, evenly by position on the axis.
fn thinned(sizes: &[f64], room: usize) -> Vec<f64> {
    let (Some(first), Some(last)) = (sizes.first(), sizes.last()) else { return Vec::new() };
    let step = (last / first).ln() / room as f64;
    let mut kept: Vec<f64> = vec![*first];
    for &size in &sizes[1..] {
        let from_last = (last / size).ln();
        let from_kept = kept.last().map_or(f64::INFINITY, |k| (size / k).ln());
        if from_kept >= step * 0.9 && (from_last >= step * 0.9 || size == *last) {
            kept.push(size);
        }
    }
    if kept.last() != Some(last) {
        kept.push(*last);
    }
    kept
}

/// About five round ratios within the limits, 1 always among them.
fn ratio_ticks(low: f64, high: f64) -> Vec<f64> {
    let fine: Vec<f64> = if high / low < 1.5 {
        (10..=40).map(|i| f64::from(i) * 0.05).collect()
    } else {
        TICKS.to_vec()
    };
    let inside: Vec<f64> = fine.into_iter().filter(|t| (low..=high).contains(t)).collect();
    let every = inside.len().div_ceil(8).max(1);
    let one = inside.iter().position(|&t| t == 1.0).unwrap_or_default();
    inside.iter().enumerate().filter(|(i, _)| i % every == one % every).map(|(_, &t)| t).collect()
}

fn short(x: f64) -> String {
    let text = format!("{x:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn size_label(x: f64) -> String {
    let whole = x.round();
    match whole {
        w if w >= 1024.0 && (w / 1024.0).fract() == 0.0 => format!("{}k", w / 1024.0),
        w => format!("{w}"),
    }
}
