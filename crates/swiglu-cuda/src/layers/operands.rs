//! What a layer multiplies with, as its steps take it.

use swiglu_core::{Activation, Element, Numerics, Op, Orientation, Problem};

use super::down::{DownBuffer, HostDown};
use super::quantized::QuantizedWeights;
use super::weights::{GateUpBuffer, HostWeights, padded};
use crate::device::error::{CudaError, Result};
use crate::device::lt::LinearWeights;
use crate::device::memory::Access;
use crate::device::stream::Stream;
use crate::kernels::decode_mlp::{BlockWeights, Scales};
use crate::kernels::tensor_map::LayerMaps;
use crate::plan::Lent;

/// Weights and biases in device memory.
#[derive(Debug)]
pub(super) enum Operands<T> {
    Dense(Box<Dense<T>>),
    Quantized(Box<QuantizedWeights<T>>),
}

/// Weights of T: packed by us, or lent by the caller.
#[derive(Debug)]
pub(super) struct Dense<T> {
    pub(super) gate_up: GateUpBuffer<T>,
    pub(super) maps: LayerMaps,
    /// Of a block.
    pub(super) down: Option<DownBuffer<T>>,
    /// Of h and the down weight.
    pub(super) down_maps: LayerMaps,
}

impl<T: Element> Dense<T> {
    pub(super) fn new(gate_up: GateUpBuffer<T>, down: Option<DownBuffer<T>>) -> Self {
        Self { gate_up, maps: LayerMaps::new(), down, down_maps: LayerMaps::new() }
    }

    /// The weights on the host, behind what `stream` has been given to do.
    pub(super) fn to_host(&self, stream: &Stream) -> Result<HostDense<T>> {
        let gate_up = self.gate_up.to_host(stream)?;
        let down = self.down.as_ref().map(|down| down.to_host(stream)).transpose()?;
        Ok(HostDense { gate_up, down })
    }

    /// The down projection of a block.
    pub(super) fn down(&self) -> Result<LinearWeights> {
        self.down.as_ref().map(DownBuffer::linear).ok_or_else(no_such_weights)
    }

    fn block(&self) -> Result<BlockWeights> {
        let (w, down) = (self.gate_up.fused(), self.down()?);
        Ok(BlockWeights {
            gate: w.gate,
            up: w.up,
            down: down.ptr,
            gate_stride: w.row_stride * size_of::<T>(),
            down_stride: down.row_stride * size_of::<T>(),
            scales: Scales::default(),
            hidden: w.hidden,
            intermediate: w.intermediate,
            biases: w.biases,
            down_bias: down.bias,
        })
    }
}

/// Dense weights on the host.
pub(super) struct HostDense<T> {
    gate_up: HostWeights<T>,
    down: Option<HostDown<T>>,
}

impl<T: Element> HostDense<T> {
    pub(super) fn packed(
        &self,
        stream: &Stream,
        activation: Activation,
        numerics: Numerics,
    ) -> Result<Dense<T>> {
        let (params, orientation) =
            (self.gate_up.params(activation, numerics)?, self.gate_up.orientation);
        let Some(down) = &self.down else {
            return Ok(Dense::new(GateUpBuffer::new(stream, &params, orientation)?, None));
        };
        let gate_up = GateUpBuffer::new(stream, &params, Orientation::OutIn)?;
        let down = down.packed(gate_up.allocation(), stream)?;
        Ok(Dense::new(gate_up, Some(down)))
    }
}

/// An algorithm is checked against the problem before its steps are enqueued.
fn no_such_weights() -> CudaError {
    let what = "a step of another layer's weights".into();
    CudaError::Unsupported { what, why: "take a candidate of this layer's problem".into() }
}

impl<T: Element> Operands<T> {
    pub(super) fn dense(&self) -> Result<&Dense<T>> {
        match self {
            Operands::Dense(dense) => Ok(dense),
            Operands::Quantized(_) => Err(no_such_weights()),
        }
    }

    /// As the decode kernels take them.
    pub(super) fn block(&self) -> Result<BlockWeights> {
        match self {
            Operands::Dense(dense) => dense.block(),
            Operands::Quantized(quantized) => Ok(quantized.block()),
        }
    }

    /// The address of the bias of a block's down projection.
    pub(super) fn down_bias(&self) -> Option<u64> {
        match self {
            Operands::Dense(dense) => dense.down.as_ref()?.linear().bias,
            Operands::Quantized(quantized) => quantized.block().down_bias,
        }
    }

    /// How the weights lie, if they are a caller's.
    pub(super) fn lent(&self) -> Option<Lent> {
        let Operands::Dense(dense) = self else { return None };
        let (gate_up, down) = (&dense.gate_up, &dense.down);
        gate_up.is_lent().then(|| Lent {
            copy_bytes: gate_up.copy_bytes(),
            // A gated linear layer has no kernels that need it.
            is_whole: down.as_ref().is_none_or(|down| gate_up.is_whole() && down.is_whole()),
            biased: gate_up.fused().biases.is_some(),
        })
    }

    /// The problem of what computes h.
    pub(super) fn to_h(&self, problem: Problem) -> Problem {
        let mut problem = problem.with_op(Op::GatedLinear);
        if let Operands::Dense(dense) = self {
            let weights = dense.gate_up.fused();
            problem.layout.orientation = weights.orientation;
            problem.bias = weights.biases.is_some();
        }
        problem
    }

    /// Bytes of all that is packed; none of lent weights.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Operands::Dense(dense) => dense.gate_up.bytes(),
            Operands::Quantized(quantized) => quantized.bytes(),
        }
    }

    /// Elements from row to row of h, which the weights decide the padding of.
    pub(super) fn h_stride(&self, intermediate: usize) -> usize {
        padded::<T>(match self {
            Operands::Dense(_) => intermediate,
            Operands::Quantized(_) => QuantizedWeights::<T>::whole_units(intermediate),
        })
    }

    /// Lets work enqueued on `stream` next read the weights, behind what other streams write to them.
    pub(super) fn admit(&self, stream: &Stream) -> Result<()> {
        match self {
            Operands::Dense(dense) => dense.gate_up.admit(stream),
            Operands::Quantized(quantized) => {
                quantized.allocation().order(stream.raw_stream(), Access::Read)
            }
        }
    }
}
