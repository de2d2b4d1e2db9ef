//! Layers whose weights are packed for a device: the only floor that users see.

pub(crate) mod activation;
mod down;
mod gated;
mod lent;
mod mlp;
mod quantized;
mod saving;
mod weights;

pub use activation::{DeviceGateUp, DeviceGateUpMut};
pub(crate) use down::Down;
pub use gated::GatedLinear;
pub use lent::{DeviceGatedLinearParams, DeviceMlpParams};
pub use mlp::Mlp;
pub use quantized::{QuantizedMlp, expect_quantized, quantized_tokens, quantized_types};
