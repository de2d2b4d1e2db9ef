//! Layers whose weights are packed for a device.

mod cost;
mod down;
mod gated;
mod mlp;
mod plan;
mod quantized;
mod saving;
mod weights;

pub(crate) use cost::Machine;
pub(crate) use down::Down;
pub use gated::GatedLinear;
pub use mlp::Mlp;
pub(crate) use plan::Choice;
pub use plan::{Candidate, Way, expect_numerics, expect_row_steps};
pub use quantized::{QuantizedMlp, expect_quantized, quantized_tokens, quantized_types};
