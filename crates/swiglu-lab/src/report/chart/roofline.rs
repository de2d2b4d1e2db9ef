//! Rates over arithmetic intensity, under what was measured as the most a machine can do.

use super::canvas::{Axis, Canvas, Ink, SMALL, Series, Width, positive, shortened};
use crate::format::si;
use crate::profile::Ceiling;

impl Series {
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
