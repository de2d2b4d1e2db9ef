//! The static site: what was asked, what was measured, what it says.

pub mod chart;
