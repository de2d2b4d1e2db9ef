//! The feed-forward block: for a few tokens a decode kernel, else the steps of the gated linear layer, then the
//! down projection, by a kernel of ours for few tokens where that was measured to be faster, else by cuBLASLt.

use swiglu_core::quant::QuantizedMlpParams;
use swiglu_core::{Element, MlpParams, Op, Orientation, Path};

use super::down::DownBuffer;
use super::layer::{Asked, Layer};
use super::lent::DeviceMlpParams;
use super::operands::{Dense, Operands};
use super::quantized::QuantizedWeights;
use super::weights::GateUpBuffer;
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::kernels::decode_mlp::{Decode, Design, MOST_TOKENS};
use crate::plan::{Planner, expect_computed};

/// What [`Mlp`] is a [`Layer`] of.
#[derive(Debug)]
pub enum MlpKind {}

/// A feed-forward block, x `[M, K]` → y `[M, K]`, over weights in the memory of one [`Cuda`] device.
pub type Mlp<T> = Layer<MlpKind, T>;

impl<T: Element> Mlp<T> {
    /// Packs the weights, `[out, in]`, as decoding needs them, whichever way they are given.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree; [`crate::CudaError::OutOfMemory`];
    /// [`crate::CudaError::LibraryMissing`] without cuBLASLt, which computes the down projection.
    pub fn new(cuda: &Cuda, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::build(cuda, params, Asked::Path(None))
    }

    /// As [`Self::new`], with h always on one path. The decode kernels are fused.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cuda: &Cuda, params: &MlpParams<'_, T>, path: Path) -> Result<Self> {
        Self::build(cuda, params, Asked::Path(Some(path)))
    }

    /// As [`Self::new`], with few tokens always by one design of the decode kernel, where it computes
    /// them, or, with none, always step by step: for tests and measurements.
    ///
    /// # Errors
    /// As [`Self::new`]; [`CudaError::Unsupported`] where the design computes the block for no number
    /// of tokens.
    pub fn with_design(
        cuda: &Cuda,
        params: &MlpParams<'_, T>,
        design: Option<Design>,
    ) -> Result<Self> {
        if let Some(design) = design {
            let limits = Planner::of(cuda).limits();
            let check = |m| Decode::check_problem(design, &params.problem(m), limits).map(drop);
            let refused = (1..=MOST_TOKENS).map(check).reduce(|so_far, next| so_far.or(next));
            if let Some(Err(why)) = refused {
                let (what, why) = (design.to_string(), why.to_string());
                return Err(CudaError::Unsupported { what, why });
            }
        }
        Self::build(cuda, params, Asked::Design(design))
    }

    /// A block over weights that stay where they are: see [`GatedLinear::from_device`](crate::GatedLinear::from_device).
    /// The kernels for few tokens take weights `[out, in]` whose rows begin and end at multiples of 16 bytes; others go
    /// step by step.
    ///
    /// # Errors
    /// As for a gated linear layer; [`crate::CudaError::LibraryMissing`] without cuBLASLt.
    ///
    /// # Safety
    /// As for a gated linear layer.
    pub unsafe fn from_device(cuda: &Cuda, params: &DeviceMlpParams<'_, T>) -> Result<Self> {
        params.gated.expect_device(cuda)?;
        params.down.expect_device("down weight", cuda)?;
        params.down_bias.map_or(Ok(()), |bias| bias.expect_device("down bias", cuda))?;
        let mut gate_up = GateUpBuffer::lent(&params.gated);
        let memory = [Some(params.down), params.down_bias].into_iter().flatten();
        memory.for_each(|matrix| gate_up.add_memory(matrix.allocation()));
        let down = DownBuffer::lent(params.down, params.down_orientation, params.down_bias);
        let gated = params.gated.problem();
        let bias = gated.bias || params.down_bias.is_some();
        let problem = gated.with_op(Op::Mlp).with_bias(bias);
        let dense = Box::new(Dense::new(gate_up, Some(down)));
        Self::over(cuda, problem, Asked::Path(None), |_| Ok(Operands::Dense(dense)))
    }

    /// A block with weights of a type in [`crate::quantized_types`], and with x and y of T, f16 or bf16. Products are
    /// in T with sums in f32; the weights are exact, and so are codes of 8 bits before their scales, which multiply sums
    /// in f32.
    ///
    /// It is made for few tokens: more than 16 are computed 16 at a time, each time from all weights. So it
    /// needs no memory beside the weights, whatever M is, and many tokens take long: decode the weights for
    /// these.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree; [`CudaError::Unsupported`] for other types
    /// of weights, for T = f32, for batch-invariant numerics, and where the device has too little shared memory;
    /// [`CudaError::OutOfMemory`].
    pub fn from_quantized(cuda: &Cuda, params: &QuantizedMlpParams<'_>) -> Result<Self> {
        Self::quantized(cuda, params, Asked::Path(Some(Path::Fused)))
    }

    /// As [`Self::from_quantized`], always by one design of the decode kernel: for tests and measurements. A call
    /// with more tokens than the design takes is refused.
    ///
    /// # Errors
    /// As [`Self::from_quantized`].
    pub fn from_quantized_by(
        cuda: &Cuda,
        params: &QuantizedMlpParams<'_>,
        design: Design,
    ) -> Result<Self> {
        Self::quantized(cuda, params, Asked::Design(Some(design)))
    }

    fn build(cuda: &Cuda, params: &MlpParams<'_, T>, asked: Asked) -> Result<Self> {
        params.validate()?;
        expect_computed(&params.problem(0))?;
        Self::over(cuda, params.problem(0), asked, |stream| {
            let gate_up = GateUpBuffer::new(stream, &params.gated, Orientation::OutIn)?;
            let (orientation, bias) = (params.down_orientation, params.down_bias);
            let memory = gate_up.allocation();
            let down = DownBuffer::new(memory, stream, params.down, orientation, bias)?;
            Ok(Operands::Dense(Box::new(Dense::new(gate_up, Some(down)))))
        })
    }

    fn quantized(cuda: &Cuda, params: &QuantizedMlpParams<'_>, asked: Asked) -> Result<Self> {
        params.validate()?;
        let problem = params.problem(1, T::DTYPE);
        expect_computed(&problem)?;
        let layer = Self::over(cuda, problem, asked, |stream| {
            let weights = QuantizedWeights::new(stream, params, &problem)?;
            Ok(Operands::Quantized(Box::new(weights)))
        })?;
        if problem.hidden > 0 && problem.intermediate > 0 {
            // Some design takes as many tokens as any: fewer take less of everything. One that was asked for
            // may take fewer; a call with more is refused.
            let m = if matches!(asked, Asked::Design(_)) { 1 } else { MOST_TOKENS };
            layer.expect_decode(None, m)?;
        }
        Ok(layer)
    }
}
