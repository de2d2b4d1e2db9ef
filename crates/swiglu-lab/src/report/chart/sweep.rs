//! Speed over a size, as a ratio to one way of computing it.

use super::canvas::{Axis, Canvas, Ink, Series, Width};

/// Slower than this is not drawn: one hopeless way would press all others into a line.
const LOWEST: f64 = 0.2;

/// So many markers tell a line from others; of more points some have none.
const MARKERS: usize = 40;

/// Ratios that a reader takes in at a glance.
const TICKS: [f64; 17] =
    [0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.7, 0.85, 1.0, 1.15, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0];

impl Series {
    /// Some points of it are below what is drawn over sizes.
    pub fn is_below(&self) -> bool {
        self.usable().any(|(_, y)| y < LOWEST)
    }

    /// Each series is a line of ratios over a size: above 1 is faster than the baseline. There is no plot
    /// without at least two sizes to compare.
    pub fn sweep(all: &[Self], width: Width) -> Option<Canvas> {
        let points = || all.iter().flat_map(Series::usable);
        let mut sizes: Vec<f64> = points().map(|(x, _)| x).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        let (&first, &last) = (sizes.first()?, sizes.last()?);
        if first == last {
            return None;
        }
        let drawn = || points().map(|(_, y)| y).filter(|y| *y >= LOWEST);
        let low = drawn().fold(0.9, f64::min) / 1.06;
        let high = drawn().fold(1.1, f64::max) * 1.06;
        let (full, height) = (width.pixels(), width.pick(250.0, 330.0));
        let x = Axis { values: [first / 1.15, last * 1.15], pixels: [48.0, full - 12.0] };
        let y = Axis { values: [low, high], pixels: [height - 38.0, 10.0] };
        let sizes = thinned(&sizes, width.pick(5, 10)).into_iter();
        let (mut x_ticks, ratios) = (sizes.map(|m| (m, size_label(m))), ratio_ticks(low, high));
        let mut y_ticks = ratios.into_iter().map(|r| (r, format!("{}×", short(r))));
        let mut canvas = Canvas::new(full, height);
        canvas.axes((&x, &mut x_ticks), (&y, &mut y_ticks), "M, tokens");
        canvas.line(Ink::Text, 2, &[(x.pixels[0], y.at(1.0)), (x.pixels[1], y.at(1.0))]);
        // The first, which are ours, over the others.
        for series in all.iter().rev() {
            let points = series.usable().filter(|p| p.1 >= LOWEST);
            let points: Vec<_> = points.map(|(a, b)| (x.at(a), y.at(b))).collect();
            canvas.line(Ink::Series(series.series), 2, &points);
            // Markers that touch hide the line.
            let every = points.len().div_ceil(MARKERS).max(1);
            points.into_iter().step_by(every).for_each(|at| canvas.marker(series.series, at));
        }
        Some(canvas)
    }
}

/// At most `room` of the sizes, the first and the last among them, evenly by position on the axis.
fn thinned(sizes: &[f64], room: usize) -> Vec<f64> {
    let (Some(first), Some(last)) = (sizes.first(), sizes.last()) else { return Vec::new() };
    let step = (last / first).ln() / room as f64 * 0.9;
    let mut kept: Vec<f64> = vec![*first];
    for &size in &sizes[1..] {
        let from_kept = kept.last().map_or(f64::INFINITY, |k| (size / k).ln());
        if size == *last || (from_kept >= step && (last / size).ln() >= step) {
            kept.push(size);
        }
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
    let (whole, thousands) = (x.round(), x.round() / 1024.0);
    let is_round = thousands >= 1.0 && thousands.fract() == 0.0;
    if is_round { format!("{thousands}k") } else { whole.to_string() }
}
