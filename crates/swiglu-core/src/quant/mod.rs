//! Quantised weights: in blocks, as GGUF files hold them, and as 8 bits with scales beside them, as
//! safetensors files do; their decoding, matrices of them, and the parameters of layers that compute
//! with them as they are.

mod blocks;
mod decode;
mod encode;
mod matrix;
mod params;
mod scaled;

pub use blocks::BlockType;
pub(crate) use blocks::Scale;
pub use decode::{
    decode_q4_0, decode_q4_1, decode_q4_k, decode_q5_0, decode_q5_1, decode_q5_k, decode_q6_k,
    decode_q8_0,
};
pub use matrix::{QuantizedMatrix, QuantizedRef};
pub use params::{QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedTypes};
pub use scaled::{QuantizedType, SCALE_BLOCK, e4m3_from_f32, e4m3_to_f32};
