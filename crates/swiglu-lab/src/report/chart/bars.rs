//! A bar for each of several values, with a line over its spread: times from nothing, ratios from the one
//! that they are to reach.

use super::canvas::{Axis, Canvas, Ink, SMALL, TEXT, Width, positive, shortened};

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Its name.
    pub label: String,
    /// What the bar's end is labelled with, for example `12.3 µs · 1.20×`.
    pub value: String,
    /// The median time, or the ratio.
    pub median: f64,
    /// First quartile, or the lower end of the interval.
    pub q1: f64,
    /// Third quartile, or the upper end.
    pub q3: f64,
    /// Colour in the palette.
    pub series: usize,
}

/// Values beside each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// What they are of.
    pub title: String,
    /// What is shown, in a sentence.
    pub description: String,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

/// A bar of more than so many times the shortest is broken.
const LONGEST: f64 = 6.0;
/// Half the thickness of a bar.
const HALF: f64 = 5.0;
/// The most that labels and values beside bars take.
const BESIDE: f64 = 282.0;
/// A picture of ratios without any text.
const THUMB: (f64, f64) = (240.0, 56.0);

impl Bars {
    fn usable(&self) -> Vec<&Bar> {
        self.bars.iter().filter(|b| positive(b.median)).collect()
    }

    /// Times as an SVG element, bars from 0; none if no bar has a finite positive time.
    pub fn svg(&self, width: Width) -> Option<String> {
        let bars = self.usable();
        // Neither a long tail nor one hopeless way may squeeze the others: the one is cut at a third
        // beyond the longest bar, the other is drawn as a broken bar.
        let fastest = bars.iter().map(|b| b.median).fold(f64::INFINITY, f64::min);
        let longest = bars.iter().map(|b| b.median).fold(0.0, f64::max);
        let tail = bars.iter().map(|b| b.q3).filter(|p| p.is_finite()).fold(longest, f64::max);
        let end = tail.min(longest * 1.33).min(fastest * LONGEST);
        let place = |value: f64, [from, to]: [f64; 2]| from + value.min(end) / end * (to - from);
        self.draw(&bars, width, false, 0.0, end, place)
    }

    /// Ratios as an SVG element, bars from `from` to either side; none if there is nothing to draw.
    pub fn ratios(&self, from: f64, width: Width) -> Option<String> {
        let bars = self.usable();
        let values = spread(&bars, from)?;
        let place =
            |value: f64, pixels| Axis { values, pixels }.at(value.clamp(values[0], values[1]));
        self.draw(&bars, width, width == Width::Wide, from, values[1], place)
    }

    fn draw(
        &self,
        bars: &[&Bar],
        width: Width,
        beside: bool,
        from: f64,
        end: f64,
        place: impl Fn(f64, [f64; 2]) -> f64,
    ) -> Option<String> {
        if bars.is_empty() {
            return None;
        }
        let full = width.pixels() - 1.0;
        // A column of text is as wide as the longest in it.
        let column = |of: fn(&Bar) -> &str, size: f64| {
            let longest = bars.iter().map(|bar| of(bar).chars().count()).max().unwrap_or(0);
            (longest as f64 * size * 0.54 + 16.0).min(BESIDE)
        };
        let (labels, values) = (column(|b| &b.label, TEXT), column(|b| &b.value, SMALL));
        let (row, down, baseline, pixels, room) = match beside {
            true => (23.0, 11.0, 15.0, [labels, full - values], 40),
            false => {
                let room = (full - values) / (TEXT * 0.54);
                (36.0, 24.0, 14.0, [1.0, full], room as usize)
            }
        };
        let height = row * bars.len() as f64 + 6.0;
        let mut canvas = Canvas::new(width.pixels(), height);
        for (i, bar) in bars.iter().enumerate() {
            let top = row * i as f64;
            let middle = top + down;
            let around = [middle - HALF, middle + HALF];
            let label = shortened(&bar.label, room);
            canvas.text((Ink::Text, TEXT), "start", (1.0, top + baseline), &label);
            let value = shortened(&bar.value, 46);
            canvas.text((Ink::Muted, SMALL), "end", (full, top + baseline), &value);
            canvas.rect(Ink::Grid, pixels, [middle - 0.5, middle + 0.5]);
            let (start, to) = (place(from, pixels), place(bar.median, pixels));
            let to = if (to - start).abs() < 1.0 { start + 1.0 } else { to };
            canvas.rect(Ink::Series(bar.series), [start, to], around);
            if bar.median > end {
                for x in [pixels[1] - 26.0, pixels[1] - 18.0] {
                    let gap = [(x, middle + HALF + 1.0), (x + 6.0, middle - HALF - 1.0)];
                    canvas.line(Ink::Surface, 3, &gap);
                }
            } else if positive(bar.q1) && positive(bar.q3) {
                let (low, high) = (place(bar.q1, pixels), place(bar.q3, pixels));
                let tick = |x: f64| [(x, middle - 3.0), (x, middle + 3.0)];
                canvas.line(Ink::Text, 1, &[(low, middle), (high, middle)]);
                canvas.line(Ink::Text, 1, &tick(low));
                canvas.line(Ink::Text, 1, &tick(high));
            }
            if from > 0.0 {
                let at = place(from, pixels);
                let (above, below) = (middle - HALF - 2.0, middle + HALF + 2.0);
                canvas.line(Ink::Text, 2, &[(at, above), (at, below)]);
            }
        }
        Some(canvas.finish(&self.title, &self.description))
    }

    /// Ratios at a glance, without text: a column for each, up from `from` or down; none if there is
    /// nothing to draw.
    pub fn thumb(&self, from: f64) -> Option<String> {
        let bars = self.usable();
        let values = spread(&bars, from)?;
        let (width, height) = THUMB;
        let axis = Axis { values, pixels: [height - 2.0, 2.0] };
        let mut canvas = Canvas::new(width, height);
        let column = (width / bars.len() as f64).min(24.0);
        let zero = axis.at(from);
        for (i, bar) in bars.iter().enumerate() {
            let left = column * i as f64;
            let to = axis.at(bar.median.clamp(values[0], values[1]));
            let to = if (to - zero).abs() < 1.5 { zero - 1.5 } else { to };
            canvas.rect(Ink::Series(bar.series), [left + 1.0, left + column * 0.8], [zero, to]);
        }
        canvas.line(Ink::Text, 1, &[(0.0, zero), (column * bars.len() as f64, zero)]);
        Some(canvas.finish(&self.title, &self.description))
    }
}

/// What ratios lie within, with where they begin; none of nothing. A tenth at least: what is equal looks so.
fn spread(bars: &[&Bar], from: f64) -> Option<[f64; 2]> {
    let within =
        |limit: f64| move |v: &f64| positive(*v) && (from / limit..from * limit).contains(v);
    // An interval that reaches far is cut: it would press everything else together.
    let all =
        || bars.iter().flat_map(|b| [b.q1, b.q3].into_iter().filter(within(4.0)).chain([b.median]));
    let low = all().fold(from / 1.02, f64::min);
    let high = all().fold(from * 1.1, f64::max);
    (!bars.is_empty() && positive(from)).then_some([low / 1.005, high * 1.005])
}
