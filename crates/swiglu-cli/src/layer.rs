//! Either operation with weights: parameters on the host, and the layer packed from them.

use swiglu::cuda::{DeviceMatrixMut, DeviceMatrixRef, Stream};
use swiglu::{
    Device, Element, GatedLinear, GatedLinearParams, Matrix, MatrixMut, MatrixRef, Mlp, MlpParams,
    Numerics, Path, Plan, Problem,
};
use swiglu_core::{bounds, oracle};

/// Parameters of either operation.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Params<'a, T> {
    GatedLinear(GatedLinearParams<'a, T>),
    Mlp(MlpParams<'a, T>),
}

impl<'a, T: Element> Params<'a, T> {
    pub(crate) fn gated(&self) -> &GatedLinearParams<'a, T> {
        match self {
            Params::GatedLinear(p) => p,
            Params::Mlp(p) => &p.gated,
        }
    }

    pub(crate) fn problem(&self, m: usize) -> Problem {
        match self {
            Params::GatedLinear(p) => p.problem(m),
            Params::Mlp(p) => p.problem(m),
        }
    }

    /// The same with other numerics.
    pub(crate) fn with_numerics(self, numerics: Numerics) -> Self {
        match self {
            Params::GatedLinear(p) => Params::GatedLinear(GatedLinearParams { numerics, ..p }),
            Params::Mlp(p) => {
                Params::Mlp(MlpParams { gated: GatedLinearParams { numerics, ..p.gated }, ..p })
            }
        }
    }

    /// Columns of the output.
    pub(crate) fn out_features(&self) -> usize {
        match self {
            Params::GatedLinear(p) => p.weights.intermediate(),
            Params::Mlp(p) => p.gated.weights.hidden(),
        }
    }

    /// Refuses NaN and infinities, also those that rounding to `T` has made.
    pub(crate) fn expect_finite(&self) -> swiglu_core::Result<()> {
        self.gated().weights.expect_finite()?;
        match self {
            Params::GatedLinear(_) => Ok(()),
            Params::Mlp(p) => p.down.expect_finite("down weight"),
        }
    }

    /// Packs the layer for a device: by a path, or as the device computes it by itself.
    pub(crate) fn pack(&self, device: &Device, path: Option<Path>) -> swiglu::Result<Packed> {
        Ok(match (self, path) {
            (Params::GatedLinear(p), None) => {
                Packed::GatedLinear(GatedLinear::from_params(device, p)?)
            }
            (Params::GatedLinear(p), Some(path)) => {
                Packed::GatedLinear(GatedLinear::with_path(device, p, path)?)
            }
            (Params::Mlp(p), None) => Packed::Mlp(Mlp::from_params(device, p)?),
            (Params::Mlp(p), Some(path)) => Packed::Mlp(Mlp::with_path(device, p, path)?),
        })
    }

    /// The plain loops.
    pub(crate) fn naive(
        &self,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> swiglu_core::Result<()> {
        match self {
            Params::GatedLinear(p) => swiglu_cpu::naive::gated_linear(p, x, out),
            Params::Mlp(p) => swiglu_cpu::naive::mlp(p, x, out),
        }
    }

    /// The float64 result.
    pub(crate) fn oracle(&self, x: MatrixRef<'_, T>) -> swiglu_core::Result<Matrix<f64>> {
        Ok(match self {
            Params::GatedLinear(p) => oracle::gated_linear(x, p)?.h,
            Params::Mlp(p) => oracle::mlp(x, p)?.y.value,
        })
    }

    /// The float64 result with the error a correct kernel may have that rounds the factors of its
    /// products by `roundoff` relative to them.
    pub(crate) fn reference(
        &self,
        x: MatrixRef<'_, T>,
        roundoff: f64,
    ) -> swiglu_core::Result<bounds::Reference> {
        match self {
            Params::GatedLinear(p) => bounds::gated_linear_with(x, p, roundoff),
            Params::Mlp(p) => bounds::mlp_with(x, p, roundoff),
        }
    }
}

/// A packed layer of either operation.
#[derive(Debug)]
pub(crate) enum Packed {
    GatedLinear(GatedLinear),
    Mlp(Mlp),
}

impl Packed {
    pub(crate) fn plan(&self, m: usize) -> Plan {
        match self {
            Packed::GatedLinear(layer) => layer.plan(m),
            Packed::Mlp(layer) => layer.plan(m),
        }
    }

    pub(crate) fn forward_into<T: Element>(
        &self,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> swiglu::Result<()> {
        match self {
            Packed::GatedLinear(layer) => layer.forward_into(x, out),
            Packed::Mlp(layer) => layer.forward_into(x, out),
        }
    }

    /// Enqueues the layer on a CUDA stream.
    pub(crate) fn forward_on<T: Element>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> swiglu::Result<()> {
        match self {
            Packed::GatedLinear(layer) => layer.forward_on(stream, x, out),
            Packed::Mlp(layer) => layer.forward_on(stream, x, out),
        }
    }
}
