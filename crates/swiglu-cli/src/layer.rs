//! Either operation with weights, of elements or quantised: parameters on the host, and the layer
//! packed from them.

use swiglu::{
    CoreError, Device, Element, ErrorKind, GatedLinear, GatedLinearParams, HostWeights, MatrixMut,
    MatrixRef, Mlp, MlpParams, MlpWeights, Numerics, Op, Orientation, Path, Plan, Problem,
    QuantizedGatedLinearParams, QuantizedMlpParams, SavePolicy,
};
use swiglu_core::bounds::{self, Reference};
use swiglu_lab::CaseOp;

/// Parameters of either operation, for inputs and outputs of T.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Params<'a, T> {
    GatedLinear(GatedLinearParams<'a, T>),
    Mlp(MlpParams<'a, T>),
    QuantizedGatedLinear(QuantizedGatedLinearParams<'a>),
    QuantizedMlp(QuantizedMlpParams<'a>),
}

impl<'a, T: Element> Params<'a, T> {
    /// The quantised weights of a file, where `device` computes with them; else why not, if there are any.
    pub(crate) fn quantized_in(
        weights: &'a MlpWeights,
        op: CaseOp,
        device: &Device,
    ) -> swiglu::Result<Result<Self, Option<swiglu::Error>>> {
        let params = match op {
            CaseOp::GatedLinear => weights
                .quantized_gated_linear_on(device)
                .and_then(|blocks| Ok(Params::QuantizedGatedLinear(blocks.gated_linear()?))),
            _ => weights.quantized_on(device).and_then(|of| Ok(Params::QuantizedMlp(of.mlp()?))),
        };
        match params {
            Err(why) if why.kind() == ErrorKind::Unsupported => {
                let quantized = op.op().is_some_and(|op| weights.is_quantized(op));
                Ok(Err(quantized.then_some(why)))
            }
            params => params.map(Ok),
        }
    }

    /// The weights of a file as elements; of the activation by itself those of the layer before it.
    pub(crate) fn elements(host: &'a HostWeights<'_, T>, op: CaseOp) -> swiglu::Result<Self> {
        Ok(match op {
            CaseOp::Mlp => Params::Mlp(host.mlp()?),
            _ => Params::GatedLinear(host.gated_linear()?),
        })
    }

    pub(crate) fn problem(&self, m: usize) -> Problem {
        match self {
            Params::GatedLinear(p) => p.problem(m),
            Params::Mlp(p) => p.problem(m),
            Params::QuantizedGatedLinear(p) => p.problem(m, T::DTYPE),
            Params::QuantizedMlp(p) => p.problem(m, T::DTYPE),
        }
    }

    pub(crate) fn with_numerics(mut self, numerics: Numerics) -> Self {
        *match &mut self {
            Params::GatedLinear(p) => &mut p.numerics,
            Params::Mlp(p) => &mut p.gated.numerics,
            Params::QuantizedGatedLinear(p) => &mut p.numerics,
            Params::QuantizedMlp(p) => &mut p.gated.numerics,
        } = numerics;
        self
    }

    /// Refuses NaN and infinities, also those that rounding to `T` has made.
    pub(crate) fn expect_finite(&self) -> swiglu_core::Result<()> {
        match self {
            Params::GatedLinear(p) => p.weights.expect_finite(),
            Params::Mlp(p) => {
                p.gated.weights.expect_finite()?;
                p.down.expect_finite("down weight")
            }
            // Those of files were looked at when they were opened, and nothing is rounded.
            Params::QuantizedGatedLinear(_) | Params::QuantizedMlp(_) => Ok(()),
        }
    }

    /// Packs the layer for a device: by a path, or as the device computes it by itself, which is the only way with
    /// quantised weights; for backward passes too, where something is said of what is kept for them.
    pub(crate) fn pack(
        &self,
        device: &Device,
        path: Option<Path>,
        keep: Option<SavePolicy>,
    ) -> swiglu::Result<Packed> {
        macro_rules! packed {
            ($Layer:ident, $params:expr) => {
                match (keep, path) {
                    (None, None) => $Layer::from_params(device, $params),
                    (None, Some(path)) => $Layer::with_path(device, $params, path),
                    (Some(keep), None) => $Layer::for_training(device, $params, keep),
                    (Some(keep), Some(path)) => {
                        $Layer::for_training_with_path(device, $params, keep, path)
                    }
                }
                .map(Packed::$Layer)
            };
        }
        match self {
            Params::GatedLinear(p) => packed!(GatedLinear, p),
            Params::Mlp(p) => packed!(Mlp, p),
            _ if keep.is_some() => Err(self.without_gradients().into()),
            Params::QuantizedGatedLinear(p) => {
                GatedLinear::from_quantized::<T>(device, p).map(Packed::GatedLinear)
            }
            Params::QuantizedMlp(p) => Mlp::from_quantized::<T>(device, p).map(Packed::Mlp),
        }
    }

    fn without_gradients(&self) -> CoreError {
        CoreError::Unsupported {
            what: format!("training of {}", self.problem(1)),
            why: "quantised weights have no gradients; decode them (--decode-weights)".into(),
        }
    }

    /// How the down weight lies; of a layer without one, as the others.
    pub(crate) fn down_orientation(&self) -> Orientation {
        match self {
            Params::Mlp(p) => p.down_orientation,
            _ => self.problem(1).layout.orientation,
        }
    }

    /// References of all gradients from that of the result.
    pub(crate) fn gradients(
        &self,
        x: MatrixRef<'_, T>,
        out_grad: MatrixRef<'_, T>,
        roundoff: f64,
    ) -> swiglu_core::Result<bounds::Gradients> {
        match self {
            Params::GatedLinear(p) => {
                bounds::gated_linear_backward(x, p, out_grad, T::DTYPE, roundoff)
            }
            Params::Mlp(p) => bounds::mlp_backward(x, p, out_grad, T::DTYPE, roundoff),
            _ => Err(self.without_gradients()),
        }
    }

    /// The float64 result, and what a correct kernel that rounds factors of products by `roundoff` may be off by.
    pub(crate) fn reference(
        &self,
        x: MatrixRef<'_, T>,
        roundoff: f64,
    ) -> swiglu_core::Result<Reference> {
        match self {
            Params::GatedLinear(p) => bounds::gated_linear_with(x, p, roundoff),
            Params::Mlp(p) => bounds::mlp_with(x, p, roundoff),
            Params::QuantizedGatedLinear(p) => bounds::quantized_gated_linear(x, p),
            Params::QuantizedMlp(p) => bounds::quantized_mlp(x, p),
        }
    }
}

pub(crate) fn out_features(problem: &Problem) -> usize {
    if problem.op == Op::Mlp { problem.hidden } else { problem.intermediate }
}

pub(crate) enum Packed {
    GatedLinear(GatedLinear),
    Mlp(Mlp),
}

/// The same of a layer of either operation.
macro_rules! either {
    ($packed:expr, $layer:ident => $value:expr) => {
        match $packed {
            Packed::GatedLinear($layer) => $value,
            Packed::Mlp($layer) => $value,
        }
    };
}
pub(crate) use either;

impl Packed {
    pub(crate) fn plan(&self, m: usize) -> Plan {
        either!(self, layer => layer.plan(m))
    }

    pub(crate) fn forward_into<T: Element>(
        &self,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> swiglu::Result<()> {
        either!(self, layer => layer.forward_into(x, out))
    }
}
