//! A bar for each of several ratios, from the one that they are to reach, with a line over its interval.

use super::canvas::{Axis, Canvas, Ink, SMALL, TEXT, Width, positive, shortened};
use crate::record::Interval;

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Its name.
    pub label: String,
    /// Its end is labelled so in a narrow plot and in a wide one, for example `1.20×`.
    pub values: [String; 2],
    /// The ratio with its interval.
    pub ratio: Interval,
    /// Colour in the palette.
    pub series: usize,
}

/// Half the thickness of a bar.
const HALF: f64 = 5.0;
/// The most that labels and values beside bars take.
const BESIDE: f64 = 282.0;
/// A picture of ratios without any text.
const THUMB: (f64, f64) = (240.0, 56.0);

impl Bar {
    /// Bars lie below each other, from `from` to either side; there is no plot of nothing.
    pub fn chart(bars: &[Self], from: f64, width: Width) -> Option<Canvas> {
        let bars = usable(bars);
        let values = spread(&bars, from)?;
        let full = width.pixels() - 1.0;
        // A column of text is as wide as the longest in it.
        let column = |texts: &mut dyn Iterator<Item = &String>, size: f64| {
            let longest = texts.map(|text| text.chars().count()).max().unwrap_or(0);
            (longest as f64 * size * 0.54 + 16.0).min(BESIDE)
        };
        let at = width.pick(0, 1);
        let labels = column(&mut bars.iter().map(|b| &b.label), TEXT);
        let beside = column(&mut bars.iter().map(|b| &b.values[at]), SMALL);
        let (row, down, baseline, pixels, room) = match width {
            Width::Wide => (23.0, 11.0, 15.0, [labels, full - beside], 40),
            Width::Narrow => {
                let room = (full - beside) / (TEXT * 0.54);
                (36.0, 24.0, 14.0, [1.0, full], room as usize)
            }
        };
        let axis = Axis { values, pixels };
        let place = |value: f64| axis.at(value.clamp(values[0], values[1]));
        let zero = axis.at(from);
        let mut canvas = Canvas::new(width.pixels(), row * bars.len() as f64 + 6.0);
        for (i, bar) in bars.iter().enumerate() {
            let top = row * i as f64;
            let middle = top + down;
            let label = shortened(&bar.label, room);
            canvas.text((Ink::Text, TEXT), "start", (1.0, top + baseline), &label);
            let value = shortened(&bar.values[at], 46);
            canvas.text((Ink::Muted, SMALL), "end", (full, top + baseline), &value);
            canvas.rect(Ink::Grid, pixels, [middle - 0.5, middle + 0.5]);
            let to = place(bar.ratio.value);
            let to = if (to - zero).abs() < 1.0 { zero + 1.0 } else { to };
            canvas.rect(Ink::Series(bar.series), [zero, to], [middle - HALF, middle + HALF]);
            if bar.ratio.ci95.into_iter().all(positive) {
                let [low, high] = bar.ratio.ci95.map(place);
                canvas.line(Ink::Text, 1, &[(low, middle), (high, middle)]);
                let cut = bar.ratio.ci95.map(|end| end < values[0] || end > values[1]);
                for (end, _) in [low, high].into_iter().zip(cut).filter(|(_, cut)| !cut) {
                    canvas.line(Ink::Text, 1, &[(end, middle - 3.0), (end, middle + 3.0)]);
                }
            }
            let (above, below) = (middle - HALF - 2.0, middle + HALF + 2.0);
            canvas.line(Ink::Text, 2, &[(zero, above), (zero, below)]);
        }
        Some(canvas)
    }

    /// Ratios at a glance, without text: a column for each, up from `from` or down; none if there is
    /// nothing to draw.
    pub fn thumb(bars: &[Self], from: f64) -> Option<Canvas> {
        let bars = usable(bars);
        let values = spread(&bars, from)?;
        let (width, height) = THUMB;
        let axis = Axis { values, pixels: [height - 2.0, 2.0] };
        let mut canvas = Canvas::new(width, height);
        let column = (width / bars.len() as f64).min(24.0);
        let zero = axis.at(from);
        for (i, bar) in bars.iter().enumerate() {
            let left = column * i as f64;
            let to = axis.at(bar.ratio.value.clamp(values[0], values[1]));
            let to = if (to - zero).abs() < 1.5 { zero - 1.5 } else { to };
            canvas.rect(Ink::Series(bar.series), [left + 1.0, left + column * 0.8], [zero, to]);
        }
        canvas.line(Ink::Text, 1, &[(0.0, zero), (column * bars.len() as f64, zero)]);
        Some(canvas)
    }
}

fn usable(bars: &[Bar]) -> Vec<&Bar> {
    bars.iter().filter(|b| positive(b.ratio.value)).collect()
}

/// What ratios lie within, with where they begin; none of nothing. A tenth at least: what is equal looks so.
fn spread(bars: &[&Bar], from: f64) -> Option<[f64; 2]> {
    let values = || bars.iter().map(|b| b.ratio.value).chain([from]);
    let far = [values().fold(from, f64::min) / 4.0, values().fold(from, f64::max) * 4.0];
    // An interval that reaches far beyond all values is cut: it would press everything else together.
    let near = |v: &f64| positive(*v) && (far[0]..far[1]).contains(v);
    let all = || bars.iter().flat_map(|b| b.ratio.ci95).filter(near).chain(values());
    let low = all().fold(from / 1.02, f64::min);
    let high = all().fold(from * 1.1, f64::max);
    (!bars.is_empty() && positive(from)).then_some([low / 1.005, high * 1.005])
}
