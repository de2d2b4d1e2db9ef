//! Plots as SVG that follow the page: colours are variables of `palette.css`, so one drawing serves light
//! and dark. Each is drawn for two widths, so that text keeps its size.

mod bars;
mod canvas;
mod series;

pub use bars::Bar;
pub use canvas::{Canvas, Width, glyph};
pub use series::Series;

/// The variables that plots refer to.
pub const PALETTE: &str = include_str!("palette.css");
