//! Training: a forward pass that keeps gate and up, or the gate alone, and the backward pass over them.
//!
//! ∂L/∂gate, ∂L/∂up and h come from one kernel, the product dy·Wdᵀ with the activation's derivative as its epilogue, or
//! where that takes no such layer from the product in memory and an element-wise pass. The other products are cuBLASLt's.

mod backward;
mod gate_up;
mod host;
mod kept;
mod products;
mod saving;
mod scratch;
mod weight_gradient;

pub use host::HostSaved;
pub use kept::{DeviceKept, DeviceKeptMut};

use super::{part, product};
