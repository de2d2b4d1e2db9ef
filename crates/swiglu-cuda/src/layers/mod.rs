//! Layers whose weights lie in a device's memory: the only floor that users see.

pub(crate) mod activation;
mod choice;
mod down;
mod gated;
mod gradients;
mod host;
mod layer;
mod lent;
mod mlp;
mod operands;
mod quantized;
mod run;
mod training;
mod weights;

pub use activation::{DeviceGateUp, DeviceGateUpMut};
pub use gated::{GatedLinear, GatedLinearKind};
pub use gradients::{DeviceGradientMut, DeviceGradientsMut};
pub use layer::Layer;
pub use lent::{DeviceGatedLinearParams, DeviceMlpParams};
pub use mlp::{Mlp, MlpKind};
pub use quantized::{expect_quantized, quantized_tokens, quantized_types};
pub use training::{DeviceKeptMut, HostSaved};
