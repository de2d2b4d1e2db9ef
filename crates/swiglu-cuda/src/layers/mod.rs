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

/// The bytes of a part of scratch memory, of which these are the factors: the next one begins at a whole address. No memory is as
/// large as what a product that is too large gives.
fn part<const N: usize>(factors: [usize; N]) -> usize {
    product(factors).checked_next_multiple_of(256).unwrap_or(usize::MAX)
}

fn product<const N: usize>(factors: [usize; N]) -> usize {
    factors.into_iter().fold(1, usize::saturating_mul)
}

pub use activation::{DeviceGateUp, DeviceGateUpMut};
pub use gated::{GatedLinear, GatedLinearKind};
pub use gradients::{DeviceGradientMut, DeviceGradientsMut};
pub use layer::Layer;
pub use lent::{DeviceGatedLinearParams, DeviceMlpParams};
pub use mlp::{Mlp, MlpKind};
pub use quantized::{expect_quantized, quantized_tokens, quantized_types};
pub use training::{DeviceKept, DeviceKeptMut, HostSaved};
