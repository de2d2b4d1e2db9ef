//! Products over tokens.

use swiglu_core::{Accumulate, Element, GradientMut, MatrixRef, Orientation, Result, RowScale};

use super::super::linear::{AddedTo, Stored, Target};
use super::super::pass::{linear_map, of_columns_bytes, out_rows};
use super::zero;
use crate::cpu::Cpu;
use crate::order::Order;
use crate::panels::{Panels, Part};
use crate::rows::Source;
use crate::weights::Weights;

/// The right factor of a product over tokens, packed as weights; its memory goes back to the device.
pub(super) struct Factor<'c, T: Element> {
    cpu: &'c Cpu,
    weights: Weights<T>,
}

impl<'c, T: Element> Factor<'c, T> {
    pub(super) fn pack(cpu: &'c Cpu, right: MatrixRef<'_, T>) -> Result<Self> {
        let (inputs, orientation) = (right.rows(), Orientation::InOut);
        let part = Part { inputs, orientation, locate: &|column| (right, column) };
        let memory = cpu.workspaces().take(Panels::<T>::linear_bytes(cpu, right.cols(), inputs))?;
        let panels = Panels::linear(cpu, memory, right.cols(), &[part], None)?;
        Ok(Self { cpu, weights: Weights::Dense(panels) })
    }

    /// leftᵀ·right, to its place. Each sum is one accumulator over the tokens in order.
    pub(super) fn times(
        &self,
        left: MatrixRef<'_, T>,
        place: &mut GradientMut<'_, T>,
        accumulate: Accumulate,
    ) -> Result<()> {
        let scale = RowScale::None;
        match (place, accumulate) {
            (GradientMut::Element(m), Accumulate::Add) => {
                self.times_to(left, &AddedTo { out: out_rows(m), scale })
            }
            (GradientMut::F32(m), Accumulate::Add) => {
                self.times_to(left, &AddedTo { out: out_rows(m), scale })
            }
            (GradientMut::Element(m), _) => self.times_to(left, &Stored(out_rows(m))),
            (GradientMut::F32(m), _) => self.times_to(left, &Stored(out_rows(m))),
            (other, _) => unreachable!("{other:?} is computed nowhere"),
        }
    }

    fn times_to(&self, left: MatrixRef<'_, T>, target: &impl Target) -> Result<()> {
        let ordered = (&self.weights, Order::Common);
        let bytes = of_columns_bytes(self.cpu, ordered, left.cols());
        self.cpu.workspaces().with(bytes, |work| {
            let left = Source::Columns(left);
            linear_map(self.cpu, ordered, work, left, |row| target.epilogue(None, row));
            Ok(())
        })
    }
}

impl<T: Element> Drop for Factor<'_, T> {
    fn drop(&mut self) {
        self.cpu.workspaces().give_back(self.weights.take_memory());
    }
}

impl Cpu {
    /// The gradient of the weights `[N, K]` of a linear map over M tokens, from that of its results, `[M, N]`, and its inputs,
    /// `[M, K]`: gradsᵀ·inputs, to its place or onto what that holds. Each sum is one of `f32` over the tokens in order, and
    /// rounded once, with what it is added to. For a caller that computes the rest of a backward pass itself; a layer that is
    /// made for training has [`crate::Mlp::backward_into`].
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`swiglu_core::Error::OutOfMemory`].
    pub fn weight_gradient<T: Element>(
        &self,
        grads: MatrixRef<'_, T>,
        inputs: MatrixRef<'_, T>,
        mut into: GradientMut<'_, T>,
        accumulate: Accumulate,
    ) -> Result<()> {
        let ([m, features], k) = (grads.shape(), inputs.cols());
        inputs.expect_shape("inputs", [m, k])?;
        into.expect_shape("gradient of the weights", [features, k])?;
        if features == 0 || k == 0 {
            return Ok(());
        }
        if m == 0 {
            if accumulate == Accumulate::Overwrite {
                zero(&mut into);
            }
            return Ok(());
        }
        Factor::pack(self, inputs)?.times(grads, &mut into, accumulate)
    }
}
