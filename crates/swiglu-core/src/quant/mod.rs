//! Weights quantised in blocks, as GGUF files hold them: the block types and their decoding,
//! matrices of them, and the parameters of layers that compute with them as they are.

mod blocks;
mod encode;
mod matrix;
mod params;

pub use blocks::*;
pub use matrix::{QuantizedMatrix, QuantizedRef};
pub use params::{QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedTypes};
