//! Plots as SVG that follow the page: colours are CSS variables, so one drawing serves light and dark.
//!
//! The drawing library knows only fixed colours. It is given colours that nothing else uses, and these
//! are replaced by references to the variables of `palette.css` in what it wrote.

mod bars;
mod canvas;
mod errors;
mod roofline;
mod sweep;

pub use bars::{Bar, Bars};
pub use canvas::{ChartError, Marker, Width, marker, standalone};
pub use errors::{ErrorDots, ErrorRow};
pub use roofline::{Roof, Roofline, RooflinePoint};
pub use sweep::{Sweep, SweepSeries};

/// The variables that plots refer to.
pub const PALETTE: &str = include_str!("palette.css");

#[cfg(test)]
mod tests;
