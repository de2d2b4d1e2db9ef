//! Layers with packed weights.

mod gated;
mod linear;
mod mlp;
mod pass;

pub use gated::GatedLinear;
pub use mlp::Mlp;
