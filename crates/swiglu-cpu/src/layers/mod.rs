//! Layers with packed weights.

mod gated;
mod linear;
mod mlp;
mod pass;
mod plan;

pub use gated::GatedLinear;
#[cfg(test)]
pub(crate) use linear::Linear;
pub use mlp::Mlp;
pub(crate) use plan::plan;
