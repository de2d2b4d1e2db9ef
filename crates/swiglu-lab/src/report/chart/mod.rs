//! Plots as SVG that follow the page: colours are variables of `palette.css`, so one drawing serves light
//! and dark. Each is drawn for two widths, so that text keeps its size.

mod bars;
mod canvas;
mod roofline;
mod sweep;

pub use bars::Bar;
pub use canvas::{Canvas, Series, Width, glyph};

/// The variables that plots refer to.
pub const PALETTE: &str = include_str!("palette.css");
