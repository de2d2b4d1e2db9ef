//! Weights in device memory that stay where they are.

use std::sync::Arc;

use swiglu_core::{
    Activation, Arrangement, Element, Error, Numerics, Op, Orientation, Problem, WeightLayout,
};

use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::memory::{Allocation, DeviceMatrixRef};

/// Weights of a gated linear layer in device memory, and what is computed with them.
///
/// Gate and up are `[H, K]` ([`Orientation::OutIn`]) or `[K, H]`, with one row stride; biases, if there are any, values of T.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct DeviceGatedLinearParams<'a, T> {
    pub(super) gate: DeviceMatrixRef<'a, T>,
    pub(super) up: DeviceMatrixRef<'a, T>,
    pub(super) orientation: Orientation,
    pub(super) activation: Activation,
    pub(super) numerics: Numerics,
    /// Of gate and up, `[1, H]`.
    pub(super) biases: [Option<DeviceMatrixRef<'a, T>>; 2],
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
        Ok(Self { gate, up, orientation, activation, numerics, biases: [None; 2] })
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

    /// Biases bg and bu, `[1, H]` each.
    ///
    /// # Errors
    /// [`Error::Shape`] for others.
    pub fn biases(
        self,
        gate: Option<DeviceMatrixRef<'a, T>>,
        up: Option<DeviceMatrixRef<'a, T>>,
    ) -> Result<Self> {
        let [intermediate, _] = self.orientation.shape(self.gate.rows(), self.gate.cols());
        for (what, bias) in [("gate bias", gate), ("up bias", up)] {
            bias.map_or(Ok(()), |bias| bias.expect_shape(what, [1, intermediate]))?;
        }
        Ok(Self { biases: [gate, up], ..self })
    }

    pub(super) fn problem(&self) -> Problem {
        let [intermediate, hidden] = self.orientation.shape(self.gate.rows(), self.gate.cols());
        let layout =
            WeightLayout { orientation: self.orientation, arrangement: Arrangement::Separate };
        let act = self.activation;
        Problem::new(Op::GatedLinear, 0, hidden, intermediate, T::DTYPE, act)
            .with_numerics(self.numerics)
            .with_layout(layout)
            .with_bias(self.biases.iter().any(Option::is_some))
    }

    pub(super) fn expect_device(&self, cuda: &Cuda) -> Result<()> {
        self.gate.expect_device("gate weight", cuda)?;
        self.up.expect_device("up weight", cuda)?;
        self.biases.iter().flatten().try_for_each(|bias| bias.expect_device("bias", cuda))
    }

    /// What knows the streams that use the weights, as far as they are ours.
    pub(super) fn memory(&self) -> Vec<Arc<Allocation>> {
        let mut memory: Vec<Arc<Allocation>> = Vec::new();
        let all = [self.gate, self.up].into_iter().chain(self.biases.into_iter().flatten());
        for allocation in all.filter_map(|matrix| matrix.allocation()) {
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
    /// `[1, K]`.
    pub(super) down_bias: Option<DeviceMatrixRef<'a, T>>,
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
        Ok(Self { gated, down, down_orientation, down_bias: None })
    }

    /// The bias bd, `[1, K]`.
    ///
    /// # Errors
    /// [`Error::Shape`] for another.
    pub fn down_bias(self, bias: DeviceMatrixRef<'a, T>) -> Result<Self> {
        let [_, hidden] =
            self.gated.orientation.shape(self.gated.gate.rows(), self.gated.gate.cols());
        bias.expect_shape("down bias", [1, hidden])?;
        Ok(Self { down_bias: Some(bias), ..self })
    }
}
