//! What ways of computing cases came to: ratios over a size, and rates over arithmetic intensity under what was measured
//! as the most a machine can do.

use super::canvas::{Axis, Canvas, Ink, SMALL, Width, positive, shortened};
use crate::format::si;
use crate::profile::Ceiling;

/// Slower than this is not drawn: one hopeless way would press all others into a line.
const LOWEST: f64 = 0.2;

/// So many markers tell a line from others; of more points some have none.
const MARKERS: usize = 40;

/// Ratios that a reader takes in at a glance.
const TICKS: [f64; 17] =
    [0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.7, 0.85, 1.0, 1.15, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0];

/// What one way of computing the cases came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name.
    pub label: String,
    /// Colour and marker.
    pub series: usize,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    /// Those that have a place on logarithmic axes.
    fn usable(&self) -> impl Iterator<Item = (f64, f64)> {
        self.points.iter().copied().filter(|&(x, y)| positive(x) && positive(y))
    }

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

    /// Results lie under the ceilings of the machine they ran on, operations per second over operations per
    /// byte: memory's is a slope, those of arithmetic are levels. There is no plot without a result, or without
    /// memory's ceiling to see it under.
    pub fn roofline(
        all: &[Self],
        memory: Option<&Ceiling>,
        compute: &[&Ceiling],
        width: Width,
    ) -> Option<Canvas> {
        let points = all.iter().flat_map(|s| s.usable().map(|(x, y)| (s.series, x, y)));
        let points: Vec<(usize, f64, f64)> = points.collect();
        let memory = memory.filter(|c| positive(c.per_second))?;
        let slope = memory.per_second;
        let levels: Vec<_> = compute.iter().filter(|c| positive(c.per_second)).collect();
        let highest = levels.iter().map(|c| c.per_second).max_by(f64::total_cmp);
        if points.is_empty() {
            return None;
        }
        let xs = || points.iter().map(|p| p.1);
        let ys = || points.iter().map(|p| p.2);
        // Where the slope meets the level is the point of the picture: it is always inside.
        let ridge = highest.map_or_else(|| xs().fold(0.0, f64::max), |level| level / slope);
        let (left, right) = (xs().fold(ridge, f64::min) / 2.0, xs().fold(ridge, f64::max) * 2.5);
        let top = ys().fold(highest.unwrap_or(slope * right), f64::max) * 1.9;
        let bottom = ys().fold(slope * left, f64::min) / 1.6;
        let (full, height) = (width.pixels(), width.pick(280.0, 380.0));
        let x = Axis { values: [left, right], pixels: [86.0, full - 18.0] };
        let y = Axis { values: [bottom, top], pixels: [height - 38.0, 10.0] };
        let mut x_ticks = ticks(x.values, width.pick(5, 9)).map(|v| (v, v.to_string()));
        let mut y_ticks = ticks(y.values, 6).map(|v| (v, rate(v)));
        let mut canvas = Canvas::new(full, height);
        let counted = "operations per byte (compulsory traffic)";
        canvas.axes((&x, &mut x_ticks), (&y, &mut y_ticks), counted);
        let end = ridge.min(right).min(top / slope);
        let start = left.max(bottom / slope);
        let at = |a: f64, b: f64| (x.at(a), y.at(b));
        canvas.line(Ink::Text, 2, &[at(start, slope * start), at(end, slope * end)]);
        // Beside the middle of the slope, which is emptier than its lower end.
        let middle = (start * end).sqrt();
        let (a, b) = at(middle, slope * middle);
        let text = format!("{}: {}", memory.name, si(slope, "B/s"));
        let room = full - 18.0 - text.chars().count() as f64 * SMALL * 0.54;
        let mut labels = vec![(text, "start", ((a + 10.0).min(room), b + 14.0))];
        for ceiling in levels {
            let level = ceiling.per_second;
            let from = (level / slope).clamp(left, right);
            canvas.line(Ink::Text, 2, &[at(from, level), at(right, level)]);
            // The highest level is labelled above its line, the others below: they are close.
            let off = if Some(level) == highest { -5.0 } else { 14.0 };
            let (a, b) = at(right, level);
            let text = format!("{}: {}", ceiling.name, si(level, "FLOP/s"));
            labels.push((text, "end", (a - 2.0, b + off)));
        }
        points.iter().for_each(|&(series, x, y)| canvas.marker(series, at(x, y)));
        // Over the points: their halo keeps labels readable, and a point shows around it.
        for (text, anchor, at) in labels {
            canvas.text((Ink::Text, SMALL), anchor, at, &shortened(&text, width.pick(39, 60)));
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

fn rate(flops: f64) -> String {
    let scales = [(1e15, "P"), (1e12, "T"), (1e9, "G")];
    let found = scales.into_iter().find(|(scale, _)| flops >= *scale);
    let (scale, prefix) = found.unwrap_or((1e6, "M"));
    format!("{} {prefix}FLOP/s", flops / scale)
}

/// Powers of ten within the limits, with 2 and 5 between them where there are few, at most about `room`.
fn ticks([low, high]: [f64; 2], room: usize) -> impl Iterator<Item = f64> {
    let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
    let steps: &[f64] = if (high / low).log10() < 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let all = decades.flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)));
    let inside: Vec<f64> = all.filter(|t| (low..=high).contains(t)).collect();
    let every = inside.len().div_ceil(room).max(1);
    inside.into_iter().step_by(every)
}
