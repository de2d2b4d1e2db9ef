//! Either operation with quantised weights: as [`crate::layer::Params`], for blocks.

use swiglu::{
    Activation, CoreError, Device, Element, GatedLinear, MatrixRef, Mlp, MlpWeights, Numerics,
    Problem, QuantizedGatedLinearParams, QuantizedMatrix, QuantizedMlpParams, QuantizedType,
};
use swiglu_core::bounds;
use swiglu_core::random::quantized_matrix;

use crate::args::LayerOp;
use crate::layer::Packed;
use crate::random::SyntheticLayer;

/// Quantised parameters of either operation.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks<'a> {
    GatedLinear(QuantizedGatedLinearParams<'a>),
    Mlp(QuantizedMlpParams<'a>),
}

impl<'a> Blocks<'a> {
    /// Those of a file, where `device` computes with them; else why not, if there are any.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn of_file(
        weights: &'a MlpWeights,
        op: LayerOp,
        device: &Device,
    ) -> swiglu::Result<Result<Self, Option<CoreError>>> {
        let blocks = match op {
            LayerOp::GatedLinear => weights
                .quantized_gated_linear_on(device)
                .map(|blocks| Blocks::GatedLinear(blocks.gated_linear())),
            LayerOp::Mlp => {
                weights.quantized_on(device).and_then(|blocks| Ok(Blocks::Mlp(blocks.mlp()?)))
            }
        };
        match blocks {
            Ok(blocks) => Ok(Ok(blocks)),
            Err(swiglu::Error::Core(why @ CoreError::Unsupported { .. })) => {
                Ok(Err(weights.is_quantized(op.into()).then_some(why)))
            }
            Err(error) => Err(error),
        }
    }
}

impl Blocks<'_> {
    /// The problem of `m` tokens of T.
    pub(crate) fn problem<T: Element>(&self, m: usize) -> Problem {
        match self {
            Blocks::GatedLinear(p) => p.problem(m, T::DTYPE),
            Blocks::Mlp(p) => p.problem(m, T::DTYPE),
        }
    }

    /// The same with other numerics.
    pub(crate) fn with_numerics(self, numerics: Numerics) -> Self {
        match self {
            Blocks::GatedLinear(p) => {
                Blocks::GatedLinear(QuantizedGatedLinearParams { numerics, ..p })
            }
            Blocks::Mlp(p) => Blocks::Mlp(QuantizedMlpParams {
                gated: QuantizedGatedLinearParams { numerics, ..p.gated },
                ..p
            }),
        }
    }

    /// The type of gate and up.
    pub(crate) fn gate_up(&self) -> QuantizedType {
        match self {
            Blocks::GatedLinear(p) => p.gate.kind(),
            Blocks::Mlp(p) => p.gated.gate.kind(),
        }
    }

    /// Columns of the output.
    pub(crate) fn out_features(&self) -> usize {
        match self {
            Blocks::GatedLinear(p) => p.intermediate(),
            Blocks::Mlp(p) => p.gated.hidden(),
        }
    }

    /// Packs the layer for a device, for inputs and outputs of T.
    pub(crate) fn pack<T: Element>(&self, device: &Device) -> swiglu::Result<Packed> {
        Ok(match self {
            Blocks::GatedLinear(p) => {
                Packed::GatedLinear(GatedLinear::from_quantized::<T>(device, p)?)
            }
            Blocks::Mlp(p) => Packed::Mlp(Mlp::from_quantized::<T>(device, p)?),
        })
    }

    /// The float64 result with the error a correct kernel may have.
    pub(crate) fn reference<T: Element>(
        &self,
        x: MatrixRef<'_, T>,
    ) -> swiglu_core::Result<bounds::Reference> {
        match self {
            Blocks::GatedLinear(p) => bounds::quantized_gated_linear(x, p),
            Blocks::Mlp(p) => bounds::quantized_mlp(x, p),
        }
    }
}

/// A layer of random quantised weights in memory.
pub(crate) struct SyntheticBlocks {
    gate: QuantizedMatrix,
    up: QuantizedMatrix,
    down: Option<QuantizedMatrix>,
}

impl SyntheticBlocks {
    /// Random weights whose values have a variance of about 1 / inputs.
    pub(crate) fn random(
        seeds: [u64; 3],
        op: LayerOp,
        kind: QuantizedType,
        [hidden, intermediate]: [usize; 2],
    ) -> swiglu_core::Result<Self> {
        let weight = |seed, rows, cols: usize| {
            quantized_matrix(seed, kind, rows, cols, 1.0 / (cols.max(1) as f32).sqrt())
        };
        let [gate, up, down] = seeds;
        Ok(Self {
            gate: weight(gate, intermediate, hidden)?,
            up: weight(up, intermediate, hidden)?,
            down: match op {
                LayerOp::GatedLinear => None,
                LayerOp::Mlp => Some(weight(down, hidden, intermediate)?),
            },
        })
    }

    /// As parameters, with biases of gate, up and down where there are any.
    pub(crate) fn params<'a>(
        &'a self,
        activation: Activation,
        numerics: Numerics,
        biases: Option<&'a [Vec<f32>; 3]>,
    ) -> Blocks<'a> {
        let bias = |which: usize| biases.map(|b| b[which].as_slice());
        let gated = QuantizedGatedLinearParams {
            gate: self.gate.view(),
            up: self.up.view(),
            gate_bias: bias(0),
            up_bias: bias(1),
            activation,
            numerics,
        };
        match &self.down {
            None => Blocks::GatedLinear(gated),
            Some(down) => {
                Blocks::Mlp(QuantizedMlpParams { gated, down: down.view(), down_bias: bias(2) })
            }
        }
    }

    /// The values as T, to compute with in the usual way.
    pub(crate) fn decode<T: Element>(&self) -> swiglu_core::Result<SyntheticLayer<T>> {
        let down = self.down.as_ref().map(|down| down.view().to_matrix()).transpose()?;
        let (gate, up) = (self.gate.view().to_matrix()?, self.up.view().to_matrix()?);
        Ok(SyntheticLayer::of(gate, up, down))
    }
}
