//! What is kept between the passes, and the up that was not kept, computed again.

use swiglu_core::{DType, Element};

use super::products::{Factor, Run};
use crate::device::error::Result;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::{Stored, Tensor};
use crate::kernels::sums::round_sums;
use crate::layers::activation::tensor;
use crate::layers::gradients::Place;
use crate::layers::layer::Layer;
use crate::layers::operands::Dense;
use crate::plan::up_again;

/// Where the pre-activations lie between the passes, `[M, H]` each: both, as [`swiglu_core::SavePolicy::Save`] keeps them, or
/// the gate alone, as [`swiglu_core::SavePolicy::SaveGate`] does. `[gate, up]` and `gate` convert into it.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceKeptMut<'a, T> {
    /// x·Wg + bg.
    pub gate: DeviceMatrixMut<'a, T>,
    /// x·Wu + bu, or nothing where the backward pass computes it again.
    pub up: Option<DeviceMatrixMut<'a, T>>,
}

impl<'a, T> From<[DeviceMatrixMut<'a, T>; 2]> for DeviceKeptMut<'a, T> {
    fn from([gate, up]: [DeviceMatrixMut<'a, T>; 2]) -> Self {
        Self { gate, up: Some(up) }
    }
}

impl<'a, T> From<DeviceMatrixMut<'a, T>> for DeviceKeptMut<'a, T> {
    fn from(gate: DeviceMatrixMut<'a, T>) -> Self {
        Self { gate, up: None }
    }
}

impl<T: Element> DeviceKeptMut<'_, T> {
    pub(super) fn admit(&self, shape: [usize; 2], stream: &Stream) -> Result<()> {
        self.gate.admit("gate", shape, stream)?;
        self.up.as_ref().map_or(Ok(()), |up| up.admit("up", shape, stream))
    }

    pub(super) fn tensors(&self) -> Kept {
        let at = |m: &DeviceMatrixMut<'_, T>| tensor(&m.as_ref());
        Kept { gate: at(&self.gate), up: self.up.as_ref().map(at), stays: false }
    }
}

/// The pre-activations that a backward pass takes: memory that it may write, so that their gradients take their place, or
/// borrowed, so that another backward pass can follow. What [`DeviceKeptMut`] is made from converts into it, and
/// `[gate, up]` of matrices that stay as they are.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceKept<'a, T> {
    /// What it holds afterwards is gradients or anything else.
    Consumed(DeviceKeptMut<'a, T>),
    /// Gate and up, which stay as they are; their gradients lie in scratch memory.
    Borrowed([DeviceMatrixRef<'a, T>; 2]),
}

impl<'a, T, K: Into<DeviceKeptMut<'a, T>>> From<K> for DeviceKept<'a, T> {
    fn from(kept: K) -> Self {
        Self::Consumed(kept.into())
    }
}

impl<'a, T> From<[DeviceMatrixRef<'a, T>; 2]> for DeviceKept<'a, T> {
    fn from(kept: [DeviceMatrixRef<'a, T>; 2]) -> Self {
        Self::Borrowed(kept)
    }
}

impl<T: Element> DeviceKept<'_, T> {
    pub(super) fn admit(&self, shape: [usize; 2], stream: &Stream) -> Result<()> {
        match self {
            Self::Consumed(kept) => kept.admit(shape, stream),
            Self::Borrowed([gate, up]) => {
                gate.admit("gate", shape, stream)?;
                up.admit("up", shape, stream)
            }
        }
    }

    pub(super) fn tensors(&self) -> Kept {
        match self {
            Self::Consumed(kept) => kept.tensors(),
            Self::Borrowed([gate, up]) => {
                Kept { gate: tensor(gate), up: Some(tensor(up)), stays: true }
            }
        }
    }
}

/// The same as addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) gate: Tensor,
    pub(super) up: Option<Tensor>,
    /// Whether they stay as they are in the backward pass.
    pub(super) stays: bool,
}

impl<K, T: Element> Layer<K, T> {
    /// What the product that computes up again is stored as.
    pub(super) fn up_again(&self, m: usize, dense: &Dense<T>) -> Stored {
        up_again(self.saving_algorithm(m), dense.gate_up.has_biases_of_sums())
    }
}

impl<K, T: Element> Run<'_, K, T> {
    /// up = x·Wu + bu, to where the forward pass of another policy would have kept it; `sums` is memory for it in f32.
    ///
    /// # Safety
    /// As for `Layer::backward`, whose tensors these are.
    pub(super) unsafe fn up(
        &self,
        x: Factor,
        dense: &Dense<T>,
        stored: Stored,
        [up, sums]: [Tensor; 2],
    ) -> Result<()> {
        let weights = dense.gate_up.up(stored);
        let (shape, product) = ([x.shape[0], weights.out_features], self.layer.product());
        // SAFETY: as the caller says.
        unsafe {
            match stored {
                Stored::Elements => {
                    let up = Place { at: up, dtype: T::DTYPE };
                    self.by.product::<T>(x, weights, up, shape, product)
                }
                Stored::Sums => {
                    let to = Place { at: sums, dtype: DType::F32 };
                    self.by.product::<T>(x, weights, to, shape, product)?;
                    round_sums(self.by.stream, T::DTYPE, sums, up, shape)
                }
            }
        }
    }
}
