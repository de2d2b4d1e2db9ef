//! Layers with packed weights.

mod gated;
mod linear;
mod mlp;
mod pass;
mod plan;
mod training;

pub use gated::GatedLinear;
pub use mlp::Mlp;
pub(crate) use plan::plan;
pub use training::{LentMlp, Saved};
