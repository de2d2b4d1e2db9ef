//! The report as its readers have it: pages of a made-up lab, plots, a browser, and the document of figures.

// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod browser;
mod charts;
mod made_up;
mod measured;
mod pages;
