//! Weights quantised in blocks, as GGUF files hold them: the block types and their decoding,
//! matrices of them, and the parameters of layers that compute with them as they are.

mod blocks;
mod matrix;
mod params;

pub use blocks::*;
pub use matrix::QuantizedRef;
pub use params::{QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedTypes};
