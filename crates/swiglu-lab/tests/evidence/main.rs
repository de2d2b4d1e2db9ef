//! Definitions, records and what is said of them, of a made-up lab.

// A helper of a test ends by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod cases;
mod code;
mod decisions;
mod definitions;
mod gate;
mod made_up;
mod profile;
mod ready;
mod store;
mod verdicts;
