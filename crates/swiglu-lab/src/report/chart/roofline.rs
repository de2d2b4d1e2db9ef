//! Rates over arithmetic intensity, under what was measured as the most a machine can do.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::canvas::{
    ChartError, Drawn, Ink, Meaning, SMALL, Width, marker, positive, shortened, svg, text,
};

/// A ceiling.
#[derive(Debug, Clone, PartialEq)]
pub enum Roof {
    /// Bytes per second: a slope.
    Memory {
        /// What was measured.
        label: String,
        /// Bytes per second.
        bytes: f64,
    },
    /// Operations per second: a level.
    Compute {
        /// What was measured.
        label: String,
        /// Operations per second.
        flops: f64,
    },
}

/// One result.
#[derive(Debug, Clone, PartialEq)]
pub struct RooflinePoint {
    /// Colour and marker.
    pub series: usize,
    /// Operations per byte.
    pub intensity: f64,
    /// Operations per second.
    pub flops: f64,
}

/// Results under the ceilings of the machine they ran on.
#[derive(Debug, Clone, PartialEq)]
pub struct Roofline {
    /// What is shown.
    pub title: String,
    /// What is shown, in a sentence.
    pub description: String,
    /// What was measured as the most.
    pub roofs: Vec<Roof>,
    /// The results.
    pub points: Vec<RooflinePoint>,
}

/// Room for the labels of the vertical axis.
const AXIS: i32 = 66;

impl Roofline {
    /// The SVG element; none without a result, or without a ceiling to see it under.
    ///
    /// # Errors
    /// [`ChartError`] if the drawing library fails.
    pub fn svg(&self, width: Width) -> Result<Option<String>, ChartError> {
        let usable = |p: &&RooflinePoint| positive(p.intensity) && positive(p.flops);
        let points: Vec<_> = self.points.iter().filter(usable).collect();
        let slope = self.roofs.iter().filter_map(Roof::bytes).fold(0.0, f64::max);
        let level = self.roofs.iter().filter_map(Roof::flops).fold(0.0, f64::max);
        if points.is_empty() || !positive(slope) {
            return Ok(None);
        }
        let xs = || points.iter().map(|p| p.intensity);
        let ys = || points.iter().map(|p| p.flops);
        // Where the slope meets the level is the point of the picture: it is always inside.
        let ridge = if positive(level) { level / slope } else { xs().fold(0.0, f64::max) };
        let left = xs().fold(ridge, f64::min) / 2.0;
        let right = xs().fold(ridge, f64::max) * 2.5;
        let top = ys().fold(if positive(level) { level } else { slope * right }, f64::max) * 1.9;
        let bottom = ys().fold(slope * left, f64::min) / 1.6;
        let frame = Frame { left, right, bottom, top, slope, level };
        let size = (width.pixels(), if width == Width::Narrow { 280 } else { 380 });
        let meaning = Meaning { title: &self.title, description: &self.description };
        svg(&meaning, size, |area| {
            let mut chart = ChartBuilder::on(area)
                .margin_right(14)
                .margin_top(10)
                .x_label_area_size(38)
                .y_label_area_size(AXIS)
                .build_cartesian_2d((left..right).log_scale(), (bottom..top).log_scale())?;
            chart
                .configure_mesh()
                .x_labels(if width == Width::Narrow { 5 } else { 9 })
                .y_labels(6)
                .bold_line_style(Ink::Grid.line(1))
                .light_line_style(TRANSPARENT)
                .axis_style(Ink::Grid.line(1))
                .label_style(text(Ink::Muted, SMALL, HPos::Center, VPos::Center))
                .x_label_formatter(&|x| plain(*x))
                .y_label_formatter(&|y| rate(*y))
                .draw()?;
            area.draw(&Text::new(
                "operations per byte (compulsory traffic)",
                ((size.0 + AXIS) / 2, size.1 - 14),
                text(Ink::Muted, SMALL, HPos::Center, VPos::Top),
            ))?;
            let limit = if width == Width::Narrow { 30 } else { 60 };
            let mut labels = Vec::new();
            for roof in &self.roofs {
                let Some([from, to]) = frame.line(roof) else { continue };
                chart.draw_series(LineSeries::new([from, to], Ink::Text.line(2)))?;
                let (start, end) = (chart.backend_coord(&from), chart.backend_coord(&to));
                // The highest level is labelled above its line, the others below: they are close.
                let (at, h, v) = match roof {
                    Roof::Memory { .. } => {
                        ((start.0 + 22, start.1.min(size.1 - 44) - 2), HPos::Left, VPos::Bottom)
                    }
                    Roof::Compute { flops, .. } if *flops < level => {
                        ((end.0 - 2, end.1 + 5), HPos::Right, VPos::Top)
                    }
                    Roof::Compute { .. } => ((end.0 - 2, end.1 - 4), HPos::Right, VPos::Bottom),
                };
                labels.push(Text::new(
                    shortened(roof.label(), limit),
                    at,
                    text(Ink::Text, SMALL, h, v),
                ));
            }
            points.iter().try_for_each(|p| -> Drawn {
                let at = chart.backend_coord(&(p.intensity, p.flops));
                marker(p.series).draw(area, at, Ink::Series(p.series))
            })?;
            // Over the points: their halo keeps labels readable, and a point shows around it.
            labels.iter().try_for_each(|label| area.draw(label))
        })
        .map(Some)
    }
}

/// What is in the picture, and the highest of either kind of roof.
struct Frame {
    left: f64,
    right: f64,
    bottom: f64,
    top: f64,
    slope: f64,
    level: f64,
}

impl Frame {
    /// The part of a roof that is in the picture and under the others.
    fn line(&self, roof: &Roof) -> Option<[(f64, f64); 2]> {
        match roof {
            Roof::Memory { bytes, .. } if positive(*bytes) => {
                let ridge = if positive(self.level) { self.level / bytes } else { self.right };
                let end = ridge.min(self.right).min(self.top / bytes);
                let start = self.left.max(self.bottom / bytes);
                Some([(start, bytes * start), (end, bytes * end)])
            }
            Roof::Compute { flops, .. } if positive(*flops) => {
                let start = (flops / self.slope).clamp(self.left, self.right);
                Some([(start, *flops), (self.right, *flops)])
            }
            _ => None,
        }
    }
}

impl Roof {
    fn label(&self) -> &str {
        match self {
            Roof::Memory { label, .. } | Roof::Compute { label, .. } => label,
        }
    }

    fn bytes(&self) -> Option<f64> {
        match self {
            Roof::Memory { bytes, .. } => Some(*bytes),
            Roof::Compute { .. } => None,
        }
    }

    fn flops(&self) -> Option<f64> {
        match self {
            Roof::Compute { flops, .. } => Some(*flops),
            Roof::Memory { .. } => None,
        }
    }
}

fn plain(x: f64) -> String {
    match x {
        x if x >= 1e3 => format!("{}k", x / 1e3),
        x if x >= 1.0 => format!("{x:.0}"),
        // A tick is a power of ten, whose decimal form is short once rounding is cut off.
        x => format!("{x:.4}").trim_end_matches('0').to_owned(),
    }
}

fn rate(flops: f64) -> String {
    match flops {
        f if f >= 1e15 => format!("{} PF/s", plain(f / 1e15)),
        f if f >= 1e12 => format!("{} TF/s", plain(f / 1e12)),
        f if f >= 1e9 => format!("{} GF/s", plain(f / 1e9)),
        f => format!("{} MF/s", plain(f / 1e6)),
    }
}
