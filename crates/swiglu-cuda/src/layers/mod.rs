//! Layers whose weights are packed for a device.

mod gated;
mod mlp;
mod plan;
mod weights;

pub use gated::GatedLinear;
pub use mlp::Mlp;
pub use plan::Candidate;
