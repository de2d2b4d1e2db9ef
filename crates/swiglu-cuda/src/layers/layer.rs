//! What every layer with weights is: what it was asked for, and a call.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use swiglu_core::{
    Activation, Element, MatrixMut, MatrixRef, Numerics, Op, Orientation, Path, Problem, SavePolicy,
};

use super::host::through_device;
use super::operands::Operands;
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::graph::CapturedCall;
use crate::device::lt::Lt;
use crate::device::memory::{DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::decode_mlp::{Decode, Design};
use crate::kernels::gate::{GateCode, expect_gate};
use crate::kernels::gated_gemm::Kernel;
use crate::kernels::tensor_map::addressable;
use crate::layers::activation::tensor;
use crate::plan::{
    Algorithm, ByTokens, Candidate, Choices, Planner, Why, expect_candidate, unfused_rounding,
};

/// A layer over weights in the memory of one [`Cuda`] device: a [`GatedLinear`](crate::GatedLinear) or an
/// [`Mlp`](crate::Mlp). Each call runs the algorithm that is expected to be the fastest for its M and rounds as asked.
pub struct Layer<K, T> {
    pub(super) cuda: Cuda,
    /// With no tokens.
    pub(super) problem: Problem,
    pub(super) asked: Asked,
    pub(super) operands: Operands<T>,
    pub(super) lt: Option<Arc<Lt>>,
    /// What is chosen of all, of those for h, and where only a fused kernel will do for h.
    pub(super) whole: Arc<Choices>,
    pub(super) stepwise: Arc<Choices>,
    pub(super) fused: Arc<Choices>,
    /// What is kept for a backward pass, of a layer that was made for training.
    policy: Option<SavePolicy>,
    /// Which of all layers of this process it is.
    pub(super) id: u64,
    /// How few tokens are launched by the decode kernel that was chosen for them.
    pub(super) decodes: ByTokens<Option<Decode>>,
    kind: PhantomData<fn() -> K>,
}

/// What a layer was asked to be computed by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Asked {
    /// The fastest, on this path if one is named.
    Path(Option<Path>),
    /// This algorithm and no other.
    Algorithm(Algorithm),
    /// Few tokens by this design of the decode kernel where it computes them, or, without one, step by step.
    Design(Option<Design>),
}

impl<K, T: Element> Layer<K, T> {
    /// `operands` is what packs the weights, on the device's own stream.
    pub(super) fn over(
        cuda: &Cuda,
        problem: Problem,
        asked: Asked,
        operands: impl FnOnce(&Stream) -> Result<Operands<T>>,
    ) -> Result<Self> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let mut problem = problem.with_m(0);
        expect_gate(&problem.activation, problem.dtype)?;
        // A block's down projection needs cuBLASLt, however h is computed; without it a gated linear layer has one path
        // less to choose from.
        let needed = problem.op == Op::Mlp && problem.quantized.is_none();
        let (asked, lt) = match asked {
            Asked::Path(Some(Path::Unfused)) => {
                problem = unfused_rounding(problem);
                (asked, Some(cuda.lt()?))
            }
            Asked::Algorithm(algorithm) if algorithm.stored().is_some() => {
                (asked, Some(cuda.lt()?))
            }
            _ if needed => (asked, Some(cuda.lt()?)),
            Asked::Path(None) => match cuda.lt() {
                Ok(lt) => (asked, Some(lt)),
                Err(_) => (Asked::Path(Some(Path::Fused)), None),
            },
            _ => (asked, None),
        };
        let operands = operands(&cuda.stream())?;
        let path = if let Asked::Path(path) = asked { path } else { None };
        let (planner, lent, of_h) = (Planner::of(cuda), operands.lent(), operands.to_h(problem));
        let whole = if lent.is_none_or(|lent| lent.is_whole) { problem } else { of_h };
        let whole = Choices::of(planner, &whole, path, lent);
        // Of all numbers of tokens the same kernels are asked for.
        if problem.numerics.batch_invariant && whole.choose(1).1 == Why::NoFusedKernel {
            let what = format!("computing {problem}");
            let why = "no kernel whose sums do not follow the number of tokens takes the weights as they lie; pack \
                       them, or leave out that it is to be batch-invariant"
                .into();
            return Err(CudaError::Unsupported { what, why });
        }
        Ok(Self {
            cuda: cuda.clone(),
            problem,
            asked,
            operands,
            lt,
            whole,
            stepwise: Choices::of(planner, &of_h, path, lent),
            fused: Choices::of(planner, &of_h, Some(Path::Fused), lent),
            policy: None,
            id: MADE.fetch_add(1, Ordering::Relaxed),
            decodes: ByTokens::new(),
            kind: PhantomData,
        })
    }

    /// The layer as one that is trained, which keeps what the policy says between the passes.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for quantised weights.
    pub fn for_training(self, policy: SavePolicy) -> Result<Self> {
        self.operands.dense()?;
        Ok(Self { policy: Some(policy), ..self })
    }

    /// What is kept between the passes, of a layer that was made for training.
    pub fn policy(&self) -> Option<SavePolicy> {
        self.policy
    }

    /// Refuses parameters of `given`, with a down weight that lies so, for a layer that is to take the place of this one: only
    /// values may differ.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], also for quantised weights.
    pub fn expect_update(&self, given: &Problem, down: Orientation) -> Result<()> {
        let rounded = match self.asked {
            Asked::Path(Some(Path::Unfused)) => unfused_rounding(*given),
            _ => *given,
        };
        self.problem.expect_update(&rounded)?;
        let lies = self.down_lies()?;
        if self.problem.op == Op::Mlp && lies != down {
            return Err(CudaError::Unsupported {
                what: format!("an update by a down weight that lies {down}"),
                why: format!("the layer's lies {lies}; make another layer"),
            });
        }
        Ok(())
    }

    /// This layer over a copy of its weights, packed as those that are given on the host. It is made once, through the host,
    /// behind what `stream` has been given to do, as for example to write the weights, and needs the lent ones no more, nor
    /// sees what is written to them.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Unsupported`] for quantised weights, which are packed already; what a copy
    /// reports.
    pub fn packed(&self, stream: &Stream) -> Result<Self> {
        self.cuda.expect_stream(stream)?;
        let (dense, problem, asked) = (self.operands.dense()?, self.problem, self.asked);
        let host = dense.to_host(stream)?;
        let packed = Self::over(&self.cuda, problem, asked, |stream| {
            let packed = host.packed(stream, problem.activation, problem.numerics)?;
            Ok(Operands::Dense(Box::new(packed)))
        })?;
        Ok(Self { policy: self.policy, ..packed })
    }

    /// The device.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }
    /// K.
    pub fn hidden(&self) -> usize {
        self.problem.hidden
    }
    /// H.
    pub fn intermediate(&self) -> usize {
        self.problem.intermediate
    }
    /// Features of a row of the output: H of a gated linear layer, K of a block.
    pub fn out_features(&self) -> usize {
        match self.problem.op {
            Op::Mlp => self.problem.hidden,
            _ => self.problem.intermediate,
        }
    }
    /// The activation.
    pub fn activation(&self) -> Activation {
        self.problem.activation
    }
    /// The numerics mode. A block adds the bias of its down projection as a value of T.
    pub fn numerics(&self) -> Numerics {
        self.problem.numerics
    }
    /// The path that was asked for, or [`None`] where each call takes the faster one.
    pub fn path(&self) -> Option<Path> {
        match self.asked {
            Asked::Path(path) => path,
            Asked::Algorithm(algorithm) => Some(algorithm.path()),
            Asked::Design(_) => None,
        }
    }

    pub(super) fn code(&self) -> GateCode {
        GateCode::new(&self.problem.activation, self.problem.numerics, T::DTYPE)
    }

    /// Enqueues h = act(x·Wg + bg, x·Wu + bu), or of a block y = h·Wd + bd, on `stream`: without allocation, after the
    /// first call of a size, and without waiting.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`CudaError::WrongDevice`]; [`CudaError::OutOfMemory`] for a
    /// larger workspace; [`CudaError::Capture`] in a capture by other code that finds too small a workspace;
    /// [`CudaError::Unsupported`] with quantised weights for an x whose rows are not whole 16 bytes, one of which does not
    /// fit into shared memory; what compiling a kernel on first use, or the driver, reports.
    pub fn forward(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.forward_in(stream, None, x, out)
    }

    /// As [`Self::forward`], in scratch memory of the caller, of at least [`Self::workspace_bytes`]: warmed up on one
    /// stream, the same call can be captured by other code on another, and its graph launched on a third.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`swiglu_core::Error::OutOfRange`] for too little scratch memory.
    pub fn forward_with(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        scratch: &mut DeviceScratch<'_>,
    ) -> Result<()> {
        self.forward_in(stream, Some(scratch), x, out)
    }

    fn forward_in(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        x: DeviceMatrixRef<'_, T>,
        mut out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let m = x.rows();
        let algorithm = self.choose(m);
        match self.run(stream, scratch, algorithm, x, out.reborrow()) {
            Err(why) if self.hands_over(algorithm, &why) => {
                self.run(stream, scratch, self.choose_fused(m), x, out)
            }
            done => done,
        }
    }

    /// As [`Self::forward`] by one candidate, whatever the plan is, and rounded as that rounds
    /// ([`Candidate::numerics`]): for tuners.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`CudaError::Unsupported`] where the candidate does not compute this problem, or does not
    /// take the weights as they lie.
    pub fn forward_by(
        &self,
        stream: &Stream,
        candidate: &Candidate,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let problem = self.problem.with_m(x.rows());
        let algorithm = expect_candidate(&self.cuda, candidate, &problem)?;
        let lent = self.operands.lent().map_or(Ok(()), |lent| lent.check(&algorithm, T::DTYPE));
        let decode = algorithm.design().and_then(|design| self.decode_by(design, x.rows()));
        let by_tma = algorithm.kernel_of_h().is_some_and(Kernel::needs_tma);
        let why = match (lent, decode) {
            (Err(why), _) => why.to_string(),
            // Another kernel would take its place, and what was verified and timed would be that one's.
            _ if by_tma && !addressable(tensor(&x), x.rows()) => {
                "TMA takes no rows of x at other addresses than multiples of 16 bytes".into()
            }
            (Ok(()), Some(decode)) if self.problem.quantized.is_none() => {
                match decode.check_x(tensor(&x), &problem) {
                    Err(why) => why.to_string(),
                    Ok(()) => return self.run(stream, None, algorithm, x, out),
                }
            }
            _ => return self.run(stream, None, algorithm, x, out),
        };
        Err(CudaError::Unsupported { what: candidate.to_string(), why })
    }

    /// Captures a call with `x` on `stream` as a graph that owns both matrices and keeps the weights, with scratch memory
    /// of its own: it can be launched on every stream, also after this layer was dropped.
    ///
    /// # Errors
    /// As [`Self::forward`] and [`Stream::capture`].
    pub fn capture(
        &self,
        stream: &Stream,
        x: DeviceMatrix<T>,
        out: DeviceMatrix<T>,
    ) -> Result<CapturedCall<T>> {
        self.reserve(stream, x.rows())?;
        stream.capture_call(x, out, |x, out| self.forward(stream, x, out))
    }

    /// [`Self::forward`] for matrices on the host, which are copied to the device and back: through memory that is kept
    /// for the next call ([`Cuda::trim`] frees it), and with one wait at the end.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_host(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        out.expect_shape("output", [x.rows(), self.out_features()])?;
        through_device(&self.cuda, (x, None), out, |stream, x, _, y| self.forward(stream, x, y))
    }
}

impl<K, T> fmt::Debug for Layer<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer")
            .field("cuda", &self.cuda)
            .field("problem", &self.problem)
            .field("asked", &self.asked)
            .finish_non_exhaustive()
    }
}
