//! The tests of what this crate offers, as one program: each by itself would compile the layers of every type again.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod activation_bits;
mod added;
mod ceilings;
mod conformance;
mod invariance;
mod properties;
mod quantized;
mod row_scale;
mod training;
