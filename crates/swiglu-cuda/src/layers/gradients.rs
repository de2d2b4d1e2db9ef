//! Where the gradients of a layer go.

use swiglu_core::{Accumulate, DType, Element, Error, GradientShapes};

use crate::device::error::{CudaError, Result};
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::Tensor;
use crate::layers::activation::tensor;

/// Where the gradient of a weight goes: values of T, or of f32, which it is summed in.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceGradientMut<'a, T> {
    /// Values of T.
    Element(DeviceMatrixMut<'a, T>),
    /// Values of f32.
    F32(DeviceMatrixMut<'a, f32>),
}

/// Where the gradients of a layer go, and what they go through: what has no place is not computed. Those of weights have the
/// shapes of the weights as the layer was given them: for [`swiglu_core::Orientation::OutIn`] ∂L/∂Wg and ∂L/∂Wu are `[H, K]` and ∂L/∂Wd is `[K, H]`.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceGradientsMut<'a, T> {
    /// ∂L/∂x, `[M, K]`: always overwritten.
    pub dx: Option<DeviceMatrixMut<'a, T>>,
    /// ∂L/∂Wg.
    pub gate: Option<DeviceGradientMut<'a, T>>,
    /// ∂L/∂Wu.
    pub up: Option<DeviceGradientMut<'a, T>>,
    /// ∂L/∂Wd, of a block.
    pub down: Option<DeviceGradientMut<'a, T>>,
    /// ∂L/∂bg, `[1, H]`.
    pub gate_bias: Option<DeviceMatrixMut<'a, f32>>,
    /// ∂L/∂bu, `[1, H]`.
    pub up_bias: Option<DeviceMatrixMut<'a, f32>>,
    /// ∂L/∂bd, `[1, K]`, of a block.
    pub down_bias: Option<DeviceMatrixMut<'a, f32>>,
    /// What each row of a block's result was multiplied with, `[1, M]` factors s, where the gradient that is given is that of
    /// s ⊙ y: as a router weighs the tokens of an expert. All gradients are then those through the product. h times its factor has
    /// to be finite in T.
    pub row_scale: Option<DeviceMatrixRef<'a, f32>>,
    /// ∂L/∂s of each row, `[1, M]`, of a block: always overwritten. It does not depend on the factors, and y need not be kept for
    /// it.
    pub row_scale_grad: Option<DeviceMatrixMut<'a, f32>>,
    /// Whether gradients of weights and biases replace what is there or are added to it.
    pub accumulate: Accumulate,
    /// Whether products of gate and of up stay apart, as those of two linear maps, wherever in memory weights and gradients lie;
    /// ∂L/∂x is then rounded to T between two, a third of the memory traffic of a sum in f32. Otherwise it is one product where
    /// the weights of gate and up are one matrix of whole vectors of 16 bytes, and a sum in f32 where they are not.
    pub apart: bool,
}

impl<T> Default for DeviceGradientsMut<'_, T> {
    fn default() -> Self {
        Self {
            dx: None,
            gate: None,
            up: None,
            down: None,
            gate_bias: None,
            up_bias: None,
            down_bias: None,
            row_scale: None,
            row_scale_grad: None,
            accumulate: Accumulate::Overwrite,
            apart: false,
        }
    }
}

impl<T: Element> DeviceGradientMut<'_, T> {
    pub(super) fn admit(&self, what: &str, shape: [usize; 2], stream: &Stream) -> Result<()> {
        match self {
            DeviceGradientMut::Element(m) => m.admit(what, shape, stream),
            DeviceGradientMut::F32(m) => m.admit(what, shape, stream),
        }
    }

    pub(super) fn place(&self) -> Place {
        match self {
            DeviceGradientMut::Element(m) => Place { at: tensor(&m.as_ref()), dtype: T::DTYPE },
            DeviceGradientMut::F32(m) => Place { at: tensor(&m.as_ref()), dtype: DType::F32 },
        }
    }
}

impl<'a, T: Element> DeviceGradientsMut<'a, T> {
    swiglu_core::setters! {
        /// A place for ∂L/∂x.
        with_dx(dx: DeviceMatrixMut<'a, T>, Some(dx));
        /// A place for ∂L/∂Wg in values of T.
        with_gate(gate: DeviceMatrixMut<'a, T>, Some(DeviceGradientMut::Element(gate)));
        /// A place for ∂L/∂Wu in values of T.
        with_up(up: DeviceMatrixMut<'a, T>, Some(DeviceGradientMut::Element(up)));
        /// A place for ∂L/∂Wd in values of T.
        with_down(down: DeviceMatrixMut<'a, T>, Some(DeviceGradientMut::Element(down)));
        /// A place for ∂L/∂Wg in f32.
        with_gate_f32(gate: DeviceMatrixMut<'a, f32>, Some(DeviceGradientMut::F32(gate)));
        /// A place for ∂L/∂Wu in f32.
        with_up_f32(up: DeviceMatrixMut<'a, f32>, Some(DeviceGradientMut::F32(up)));
        /// A place for ∂L/∂Wd in f32.
        with_down_f32(down: DeviceMatrixMut<'a, f32>, Some(DeviceGradientMut::F32(down)));
        /// A place for ∂L/∂bg.
        with_gate_bias(gate_bias: DeviceMatrixMut<'a, f32>, Some(gate_bias));
        /// A place for ∂L/∂bu.
        with_up_bias(up_bias: DeviceMatrixMut<'a, f32>, Some(up_bias));
        /// A place for ∂L/∂bd.
        with_down_bias(down_bias: DeviceMatrixMut<'a, f32>, Some(down_bias));
        /// The factors of a block's rows.
        with_row_scale(row_scale: DeviceMatrixRef<'a, f32>, Some(row_scale));
        /// A place for the gradient of each row's factor.
        with_row_scale_grad(row_scale_grad: DeviceMatrixMut<'a, f32>, Some(row_scale_grad));
        /// Adds to what is there, or replaces it.
        with_accumulate(accumulate: Accumulate);
        /// Keeps products of gate and of up apart.
        with_apart(apart: bool);
    }

    /// Refuses what does not fit, and lets the call wait for other streams' work with the memory.
    pub(super) fn admit(&self, m: usize, shapes: &GradientShapes, stream: &Stream) -> Result<()> {
        let GradientShapes { gate_up, down, hidden, intermediate, .. } = *shapes;
        if let Some(dx) = &self.dx {
            dx.admit("dx", [m, hidden], stream)?;
        }
        for (what, place) in [("dw_gate", &self.gate), ("dw_up", &self.up)] {
            place.as_ref().map_or(Ok(()), |place| place.admit(what, gate_up, stream))?;
        }
        match (&self.down, &self.down_bias, down) {
            (down, bias, Some(shape)) => {
                down.as_ref().map_or(Ok(()), |place| place.admit("dw_down", shape, stream))?;
                bias.as_ref().map_or(Ok(()), |b| b.admit("db_down", [1, hidden], stream))?;
            }
            (None, None, None) => {}
            (.., None) => {
                return Err(CudaError::Core(Error::Shape {
                    what: "gradient of the down projection".into(),
                    expected: "none: the layer has no down projection".into(),
                    given: "a place for one".into(),
                }));
            }
        }
        shapes.expect_row_scale(self.row_scale.is_some() || self.row_scale_grad.is_some())?;
        self.row_scale.as_ref().map_or(Ok(()), |s| s.admit("row scale", [1, m], stream))?;
        self.row_scale_grad.as_ref().map_or(Ok(()), |s| s.admit("d_row_scale", [1, m], stream))?;
        for (what, place) in [("db_gate", &self.gate_bias), ("db_up", &self.up_bias)] {
            place.as_ref().map_or(Ok(()), |b| b.admit(what, [1, intermediate], stream))?;
        }
        Ok(())
    }
}

/// A matrix in memory and the type of its values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Place {
    pub(super) at: Tensor,
    pub(super) dtype: DType,
}
