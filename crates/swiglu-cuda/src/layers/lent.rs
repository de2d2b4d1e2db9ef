//! Weights in device memory that stay where they are.

use std::sync::Arc;

use swiglu_core::{Activation, Element, Error, Numerics, Orientation};

use crate::device::error::Result;
use crate::device::memory::{Allocation, DeviceMatrixRef};

/// Weights of a gated linear layer in device memory, and what is computed with them.
///
/// Gate and up are `[H, K]` ([`Orientation::OutIn`]) or `[K, H]`, with one row stride.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct DeviceGatedLinearParams<'a, T> {
    pub(super) gate: DeviceMatrixRef<'a, T>,
    pub(super) up: DeviceMatrixRef<'a, T>,
    pub(super) orientation: Orientation,
    pub(super) activation: Activation,
    pub(super) numerics: Numerics,
}

impl<'a, T: Element> DeviceGatedLinearParams<'a, T> {
    /// Two matrices.
    ///
    /// # Errors
    /// [`Error::Shape`] unless their shapes agree; [`Error::Unsupported`] unless their row strides do.
    pub fn separate(
        gate: DeviceMatrixRef<'a, T>,
        up: DeviceMatrixRef<'a, T>,
        orientation: Orientation,
        activation: Activation,
    ) -> Result<Self> {
        up.expect_shape("up weight", gate.shape())?;
        if gate.rows() > 1 && gate.row_stride() != up.row_stride() {
            let [gate, up] = [gate.row_stride(), up.row_stride()];
            return Err(Error::Unsupported {
                what: format!("gate and up weights with rows {gate} and {up} elements apart"),
                why: "kernels read both with one stride; copy one of them, or pack the layer"
                    .into(),
            }
            .into());
        }
        let numerics = Numerics::default_for(T::DTYPE);
        Ok(Self { gate, up, orientation, activation, numerics })
    }

    /// One matrix, `[2H, K]` or `[K, 2H]`, whose first half is the gate.
    ///
    /// # Errors
    /// [`Error::Shape`] for an odd number of features.
    pub fn packed(
        both: DeviceMatrixRef<'a, T>,
        orientation: Orientation,
        activation: Activation,
    ) -> Result<Self> {
        let [features, hidden] = orientation.shape(both.rows(), both.cols());
        if !features.is_multiple_of(2) {
            return Err(Error::Shape {
                what: "gate and up weights".into(),
                expected: "an even number of features".into(),
                given: format!("{features} features of {hidden}"),
            }
            .into());
        }
        let half = features / 2;
        let part = |range| match orientation {
            Orientation::OutIn => both.rows_range(range),
            Orientation::InOut => both.cols_range(range),
        };
        Self::separate(part(0..half)?, part(half..features)?, orientation, activation)
    }

    /// Another numerics mode than the element type's default.
    #[must_use]
    pub fn numerics(self, numerics: Numerics) -> Self {
        Self { numerics, ..self }
    }

    /// What knows the streams that use the weights, as far as they are ours.
    pub(super) fn memory(&self) -> Vec<Arc<Allocation>> {
        let mut memory: Vec<Arc<Allocation>> = Vec::new();
        for allocation in [self.gate, self.up].iter().filter_map(DeviceMatrixRef::allocation) {
            if !memory.iter().any(|known| Arc::ptr_eq(known, allocation)) {
                memory.push(allocation.clone());
            }
        }
        memory
    }
}

/// Weights of a feed-forward block in device memory, and what is computed with them.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct DeviceMlpParams<'a, T> {
    pub(super) gated: DeviceGatedLinearParams<'a, T>,
    pub(super) down: DeviceMatrixRef<'a, T>,
    pub(super) down_orientation: Orientation,
}

impl<'a, T: Element> DeviceMlpParams<'a, T> {
    /// A gated linear layer and the down weight, `[K, H]` ([`Orientation::OutIn`]) or `[H, K]`.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the shapes agree.
    pub fn new(
        gated: DeviceGatedLinearParams<'a, T>,
        down: DeviceMatrixRef<'a, T>,
        down_orientation: Orientation,
    ) -> Result<Self> {
        let [intermediate, hidden] = gated.orientation.shape(gated.gate.rows(), gated.gate.cols());
        down.expect_shape("down weight", down_orientation.shape(hidden, intermediate))?;
        Ok(Self { gated, down, down_orientation })
    }
}
