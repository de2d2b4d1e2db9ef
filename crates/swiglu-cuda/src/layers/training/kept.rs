//! What is kept between the passes, and the up that was not kept, computed again.

use swiglu_core::{DType, Element};

use super::products::{Factor, Run};
use crate::device::error::Result;
use crate::device::memory::DeviceMatrixMut;
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
        Kept { gate: at(&self.gate), up: self.up.as_ref().map(at) }
    }
}

/// The same as addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) gate: Tensor,
    pub(super) up: Option<Tensor>,
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
