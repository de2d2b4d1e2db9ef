//! Plots as SVG that follow the page: colours are variables of `palette.css`, so one drawing serves light
//! and dark. Each is drawn for two widths, so that text keeps its size.

mod bars;
mod canvas;
mod roofline;
mod sweep;

pub use bars::{Bar, Bars};
pub use canvas::{Series, Width, glyph};
pub use roofline::Roofline;
pub use sweep::Sweep;

/// The variables that plots refer to.
pub const PALETTE: &str = include_str!("palette.css");
