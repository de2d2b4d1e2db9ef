//! What every layer with weights is: what it was asked for, the steps that are chosen for a call, and the scratch memory they use.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use swiglu_core::{
    Activation, Element, MatrixMut, MatrixRef, Numerics, Op, Path, Plan, Problem, SavePolicy,
};

use super::host::through_device;
use super::operands::Operands;
use super::weights::padded;
use crate::device::context::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::graph::CapturedCall;
use crate::device::lt::Lt;
use crate::device::memory::{DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::decode_mlp::{Decode, Design, MOST_TOKENS};
use crate::kernels::down::Down;
use crate::kernels::elementwise::{self, Stored, Tensor};
use crate::kernels::gate::{Formula, GateCode, expect_gate};
use crate::kernels::gated_gemm::Call;
use crate::layers::activation::tensor;
use crate::plan::{
    Algorithm, ByTokens, Candidate, Choices, Planner, Steps, Why, choose, expect_candidate,
    explain, unfused_rounding,
};

/// A layer over weights in the memory of one [`Cuda`] device: a [`GatedLinear`](crate::GatedLinear) or an
/// [`Mlp`](crate::Mlp). Each call runs the steps that are expected to be the fastest for its M and round as asked.
pub struct Layer<K, T> {
    pub(super) cuda: Cuda,
    /// With no tokens.
    pub(super) problem: Problem,
    pub(super) asked: Asked,
    pub(super) operands: Operands<T>,
    pub(super) lt: Option<Arc<Lt>>,
    /// What is chosen of all, of the steps to h, and where only a fused kernel will do for h.
    whole: Arc<Choices>,
    pub(super) stepwise: Arc<Choices>,
    fused: Arc<Choices>,
    /// What is kept for a backward pass, of a layer that was made for training.
    policy: Option<SavePolicy>,
    /// How few tokens are launched by the decode kernel that was chosen for them.
    decodes: ByTokens<Option<Decode>>,
    kind: PhantomData<fn() -> K>,
}

/// What a layer was asked to be computed by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Asked {
    /// The fastest, on this path if one is named.
    Path(Option<Path>),
    /// These steps and no others.
    Steps(Steps),
    /// Few tokens by this design of the decode kernel where it computes them, or, without one, step by step.
    Design(Option<Design>),
}

/// Rounds up to the alignment of a part of a workspace.
fn workspace_part(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}

impl<K, T: Element> Layer<K, T> {
    /// `operands` is what packs the weights, on the device's own stream.
    pub(super) fn over(
        cuda: &Cuda,
        problem: Problem,
        asked: Asked,
        operands: impl FnOnce(&Stream) -> Result<Operands<T>>,
    ) -> Result<Self> {
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
            Asked::Steps(steps) if steps.stored().is_some() => (asked, Some(cuda.lt()?)),
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
        let whole = planner.choices(&whole, path, lent);
        // Of all numbers of tokens the same kernels are asked for.
        if problem.numerics.batch_invariant && whole.choose(planner, 1).1 == Why::NoFusedKernel {
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
            stepwise: planner.choices(&of_h, path, lent),
            fused: planner.choices(&of_h, Some(Path::Fused), lent),
            policy: None,
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
        Self::over(&self.cuda, problem, asked, |stream| {
            let packed = host.packed(stream, problem.activation, problem.numerics)?;
            Ok(Operands::Dense(Box::new(packed)))
        })
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
            Asked::Steps(steps) => Some(steps.path()),
            Asked::Design(_) => None,
        }
    }

    /// The planner that chooses for this layer, whatever planners have followed it.
    pub(super) fn planner(&self) -> &Planner {
        self.whole.planner(&self.cuda)
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        let (planner, steps) = (self.planner(), self.choose(m));
        let reason = match self.asked {
            Asked::Path(path) => {
                let (to_h, why) = self.whole.choose(planner, m);
                let mut reason = explain(to_h, why, &self.whole.problem(m), planner);
                if let Some(lent) = self.operands.lent() {
                    let packed = choose(planner, &self.problem.with_m(m), path).0;
                    if let Err(obstacle) = lent.check(&packed, T::DTYPE) {
                        reason += &format!("; packed weights would go by {packed}: {obstacle}");
                    }
                }
                reason
            }
            _ => explain(steps, Why::AskedFor, &self.problem.with_m(m), planner),
        };
        self.cuda.plan_of(self.problem.with_m(m), steps, reason)
    }

    /// The design of the decode kernel that `m` tokens go through; none where they go step by step.
    pub fn design(&self, m: usize) -> Option<Design> {
        self.choose(m).design()
    }

    /// Bytes of the weights and biases in device memory that are the layer's own: none of lent ones.
    pub fn weight_bytes(&self) -> usize {
        self.operands.bytes()
    }

    /// Tokens that one pass computes: all, but of quantised weights a few.
    fn pass(&self, m: usize) -> usize {
        if self.problem.quantized.is_some() { m.min(MOST_TOKENS) } else { m }
    }

    pub(super) fn choose(&self, m: usize) -> Steps {
        let m = self.pass(m);
        match self.asked {
            Asked::Steps(steps) => steps,
            Asked::Design(design) if m <= MOST_TOKENS => {
                // Quantised weights have no other way: the call is refused.
                let computes = |design: &Design| {
                    self.problem.quantized.is_some() || self.decode_by(*design, m).is_some()
                };
                design.filter(computes).map_or_else(|| self.step_by_step(m), Steps::decode)
            }
            Asked::Path(_) | Asked::Design(_) => self.of_choices(&self.whole, m),
        }
    }

    fn of_choices(&self, choices: &Choices, m: usize) -> Steps {
        choices.get(choices.planner(&self.cuda), m).of(self.problem.op)
    }

    /// The steps to h, then cuBLASLt: what takes every x, and weights however they lie.
    pub(super) fn step_by_step(&self, m: usize) -> Steps {
        self.of_choices(&self.stepwise, m)
    }

    /// What is chosen where no other steps to h will do than a fused kernel.
    pub(super) fn choose_fused(&self, m: usize) -> Steps {
        self.of_choices(&self.fused, m)
    }

    /// Whether a fused kernel does instead what cuBLASLt refused: where cuBLASLt does not take this x, or no memory is
    /// left for its workspace, unless one way was asked for. Nothing of it is remembered: the next call tries again.
    pub(super) fn hands_over(&self, steps: Steps, why: &CudaError) -> bool {
        let refused = matches!(why, CudaError::Unsupported { .. } | CudaError::OutOfMemory { .. });
        refused && self.may_hand_over(steps)
    }

    pub(super) fn may_hand_over(&self, steps: Steps) -> bool {
        self.asked == Asked::Path(None) && steps.stored().is_some()
    }

    /// Elements from row to row of h in the workspace.
    pub(super) fn h_stride(&self) -> usize {
        self.operands.h_stride(self.problem.intermediate)
    }

    pub(super) fn h_bytes(&self, m: usize) -> usize {
        match self.problem.op {
            Op::Mlp => workspace_part(self.pass(m) * self.h_stride() * size_of::<T>()),
            _ => 0,
        }
    }

    pub(super) fn between_bytes(&self, m: usize, stored: Stored) -> usize {
        workspace_part(m * 2 * padded::<T>(self.problem.intermediate) * stored.size(T::DTYPE))
    }

    /// Bytes of scratch memory that a call with `m` tokens uses: the stream's, or that of [`Self::forward_with`].
    pub fn workspace_bytes(&self, m: usize) -> usize {
        let chosen = self.choose(m);
        let bytes = self.bytes_by(m, chosen);
        match self.falls_back(chosen) {
            true => bytes.max(self.bytes_by(m, self.step_by_step(m))),
            false => bytes,
        }
    }

    /// Whether an x that the steps do not take goes step by step.
    fn falls_back(&self, steps: Steps) -> bool {
        steps.design().is_some() && self.problem.quantized.is_none()
    }

    /// h first, and behind it what the steps use one after the other. An empty call has no steps.
    pub(super) fn bytes_by(&self, m: usize, steps: Steps) -> usize {
        let between = |stored| self.between_bytes(m, stored);
        self.bytes_with(m, steps, between)
    }

    /// The same where gate and up are saved by the caller.
    pub(super) fn bytes_saving(&self, m: usize, steps: Steps) -> usize {
        self.bytes_with(m, steps, |_| 0)
    }

    fn bytes_with(&self, m: usize, steps: Steps, between: impl Fn(Stored) -> usize) -> usize {
        if m == 0 || self.problem.intermediate == 0 {
            return 0;
        }
        let scratch = Lt::scratch_bytes(self.cuda.arch());
        let used = |step| match step {
            Algorithm::Products(stored) => between(stored) + scratch,
            Algorithm::Down(Down::CublasLt) => scratch,
            Algorithm::Gated(_)
            | Algorithm::Elementwise(_)
            | Algorithm::Down(_)
            | Algorithm::Decode(_) => 0,
        };
        self.h_bytes(m) + steps.iter().map(used).max().unwrap_or(0)
    }

    /// Makes the first call with `m` tokens as cheap as every other: compiles or loads its kernels and
    /// reserves its workspace on `stream`. Needed before a capture into a graph, for each number of
    /// tokens that is captured: another number may go another way. Where few tokens are decoded, so is each smaller number.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn reserve(&self, stream: &Stream, m: usize) -> Result<()> {
        let empty = self.problem.hidden.min(self.problem.intermediate) == 0;
        if m == 0 || empty && self.problem.op == Op::Mlp {
            return Ok(());
        }
        for m in 1..=m.min(MOST_TOKENS) {
            if self.problem.quantized.is_some() {
                self.expect_decode(None, m)?.prepare(&self.cuda, self.code())?;
            } else if let Some(decode) = self.choose(m).design().and_then(|d| self.decode_by(d, m))
            {
                decode.prepare(&self.cuda, self.code())?;
            }
        }
        let chosen = self.choose(m);
        if self.may_hand_over(chosen) {
            self.prepare(self.choose_fused(m), m)?;
        }
        if self.falls_back(chosen) {
            self.prepare(self.step_by_step(m), m)?;
        }
        self.prepare(chosen, m)?;
        self.cuda.reserve_workspace(stream, self.workspace_bytes(m))
    }

    /// The kernels of steps, but for the decode kernel's.
    fn prepare(&self, steps: Steps, m: usize) -> Result<()> {
        let problem = self.problem.with_m(m);
        let act = self.problem.activation;
        for step in steps.iter() {
            match step {
                Algorithm::Gated(kernel) => {
                    // Of dense matrices at whole addresses: lent weights decide which kernel takes them.
                    let out = Tensor::new(0, self.problem.intermediate);
                    let x = Tensor::new(0, self.problem.hidden);
                    let dense = self.operands.dense()?;
                    let (weights, maps) = (dense.gate_up.fused(), &dense.maps);
                    let (code, formula) = (self.code(), Formula::new(&act));
                    let call = Call { code, formula, m, x, out, weights, saved: None, maps };
                    self.launchable(kernel, &call)?.prepare(&self.cuda, &call)?;
                }
                Algorithm::Elementwise(stored) => {
                    let code = GateCode::elementwise(&act, self.numerics(), T::DTYPE);
                    elementwise::prepare_forward(&self.cuda, code, stored)?;
                }
                Algorithm::Down(down) => down.prepare(&self.cuda, &problem)?,
                Algorithm::Products(_) | Algorithm::Decode(_) => {}
            }
        }
        Ok(())
    }

    /// How a design launches `m` tokens, where it computes them.
    pub(super) fn decode_by(&self, design: Design, m: usize) -> Option<Decode> {
        let fitted = || {
            let problem = self.problem.with_m(m);
            let limits = Planner::of(&self.cuda).limits();
            Ok(Decode::check_problem(design, &problem, limits).ok())
        };
        let planned = match self.asked {
            Asked::Design(design) => design,
            _ => self.choose(m).design(),
        };
        let Ok(decode) = match planned == Some(design) {
            true => self.decodes.get::<Infallible>(m, fitted),
            // Only tuners ask for another.
            false => fitted(),
        };
        decode
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
        let steps = self.choose(m);
        match self.run(stream, scratch, steps, x, out.reborrow()) {
            Err(why) if self.hands_over(steps, &why) => {
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
        let steps = expect_candidate(&self.cuda, candidate, &problem)?;
        let lent = self.operands.lent().map_or(Ok(()), |lent| lent.check(&steps, T::DTYPE));
        let decode = steps.design().and_then(|design| self.decode_by(design, x.rows()));
        let why = match (lent, decode) {
            (Err(why), _) => why.to_string(),
            (Ok(()), Some(decode)) if self.problem.quantized.is_none() => {
                match decode.check_x(tensor(&x), &problem) {
                    Err(why) => why.to_string(),
                    Ok(()) => return self.run(stream, None, steps, x, out),
                }
            }
            _ => return self.run(stream, None, steps, x, out),
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
