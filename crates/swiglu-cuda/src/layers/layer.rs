//! What every layer with weights does: it chooses the steps of a call and enqueues them.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use swiglu_core::{Activation, Element, MatrixMut, MatrixRef, Numerics, Op, Path, Plan, Problem};

use super::operands::Operands;
use super::weights::{Products, padded};
use crate::device::context::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::graph::CapturedCall;
use crate::device::lt::{LinearWeights, Lt};
use crate::device::memory::{DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::{DeviceScratch, Work};
use crate::kernels::decode_mlp::{Call as DecodeCall, Decode, Design, MOST_TOKENS};
use crate::kernels::down::{Down, DownCall};
use crate::kernels::elementwise::{self, Extent, GateUp, Stored, Tensor};
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::gate::{Formula, GateCode, expect_gate};
use crate::kernels::gated_gemm::{Call, Kernel};
use crate::layers::activation::tensor;
use crate::plan::{
    Algorithm, ByTokens, Candidate, Planner, Steps, Why, best_kernel, choose, expect_candidate,
    expect_numerics, unfused_rounding,
};

/// A layer over weights in the memory of one [`Cuda`] device: a [`GatedLinear`](crate::GatedLinear) or an
/// [`Mlp`](crate::Mlp). Each call runs the steps that are expected to be the fastest for its M and round as asked.
pub struct Layer<K, T> {
    cuda: Cuda,
    /// With no tokens.
    problem: Problem,
    asked: Asked,
    pub(super) operands: Operands<T>,
    lt: Option<Arc<Lt>>,
    /// What was chosen for a number of tokens: of all, step by step, and where only a fused kernel will do for h.
    chosen: ByTokens<Steps>,
    stepwise: ByTokens<Steps>,
    fused: ByTokens<Steps>,
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
        expect_numerics(problem.op, problem.numerics)?;
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
        Ok(Self {
            cuda: cuda.clone(),
            problem,
            asked,
            operands: operands(&cuda.stream())?,
            lt,
            chosen: ByTokens::new(),
            stepwise: ByTokens::new(),
            fused: ByTokens::new(),
            decodes: ByTokens::new(),
            kind: PhantomData,
        })
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
        let (dense, problem) = (self.operands.dense()?, self.problem);
        let asked = match (self.asked, self.operands.is_lent()) {
            // What the biases of lent weights asked for.
            (Asked::Path(Some(Path::Fused)), true) => Asked::Path(None),
            (asked, _) => asked,
        };
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

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        let problem = self.problem.with_m(m);
        match self.asked {
            Asked::Path(path) if self.operands.is_whole() => self.cuda.plan(problem, path),
            Asked::Path(_) => self.cuda.plan_of(problem, self.choose(m), Why::Lent),
            _ => self.cuda.plan_of(problem, self.choose(m), Why::AskedFor),
        }
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
        let make = || {
            let problem = self.problem.with_m(m);
            Ok(match self.asked {
                Asked::Steps(steps) => steps,
                Asked::Design(design) if m <= MOST_TOKENS => {
                    let computes = |design: &Design| {
                        let limits = Planner::of(&self.cuda).limits();
                        // Quantised weights have no other way: the call is refused.
                        problem.quantized.is_some()
                            || Decode::check_problem(*design, &problem, limits).is_ok()
                    };
                    design.filter(computes).map_or_else(|| self.step_by_step(m), Steps::decode)
                }
                _ if !self.operands.is_whole() => self.step_by_step(m),
                Asked::Path(path) => choose(Planner::of(&self.cuda), &problem, path).0,
                Asked::Design(_) => choose(Planner::of(&self.cuda), &problem, None).0,
            })
        };
        let Ok(steps) = self.chosen.get::<Infallible>(m, make);
        steps
    }

    /// The steps to h, then cuBLASLt: what takes every x, and weights however they lie.
    fn step_by_step(&self, m: usize) -> Steps {
        let path = if let Asked::Path(path) = self.asked { path } else { None };
        let make = || {
            let problem = self.problem_of_h(m);
            Ok(choose(Planner::of(&self.cuda), &problem, path).0.of(self.problem.op))
        };
        let Ok(steps) = self.stepwise.get::<Infallible>(m, make);
        steps
    }

    /// What is chosen where no other steps to h will do than a fused kernel.
    pub(super) fn choose_fused(&self, m: usize) -> Steps {
        let make = || {
            let problem = self.problem_of_h(m);
            Ok(choose(Planner::of(&self.cuda), &problem, Some(Path::Fused)).0.of(self.problem.op))
        };
        let Ok(steps) = self.fused.get::<Infallible>(m, make);
        steps
    }

    fn problem_of_h(&self, m: usize) -> Problem {
        let mut problem = self.problem.with_m(m).with_op(Op::GatedLinear);
        if let Operands::Dense(dense) = &self.operands {
            let weights = dense.gate_up.fused();
            problem.layout.orientation = weights.orientation;
            problem.bias = weights.biases.is_some();
        }
        problem
    }

    /// Whether a fused kernel does instead what cuBLASLt refused: where cuBLASLt does not take this x, or no memory is
    /// left for its workspace, unless one way was asked for. Nothing of it is remembered: the next call tries again.
    pub(super) fn hands_over(&self, steps: Steps, why: &CudaError) -> bool {
        let refused = matches!(why, CudaError::Unsupported { .. } | CudaError::OutOfMemory { .. });
        refused && self.may_hand_over(steps)
    }

    fn may_hand_over(&self, steps: Steps) -> bool {
        self.asked == Asked::Path(None) && steps.stored().is_some()
    }

    /// Elements from row to row of h in the workspace.
    fn h_stride(&self) -> usize {
        self.operands.h_stride(self.problem.intermediate)
    }

    fn h_bytes(&self, m: usize) -> usize {
        match self.problem.op {
            Op::Mlp => workspace_part(self.pass(m) * self.h_stride() * size_of::<T>()),
            _ => 0,
        }
    }

    fn between_bytes(&self, m: usize, stored: Stored) -> usize {
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
    fn bytes_by(&self, m: usize, steps: Steps) -> usize {
        let between = |stored| self.between_bytes(m, stored);
        self.bytes_with(m, steps, between)
    }

    /// The same where gate and up are saved by the caller.
    pub(super) fn bytes_saving(&self, m: usize, steps: Steps) -> usize {
        self.bytes_with(m, steps, |_| 0)
    }

    fn bytes_with(&self, m: usize, steps: Steps, between: impl Fn(Stored) -> usize) -> usize {
        if m == 0 || self.problem.hidden.min(self.problem.intermediate) == 0 {
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
    fn decode_by(&self, design: Design, m: usize) -> Option<Decode> {
        let fitted = || {
            let problem = self.problem.with_m(m);
            let limits = Planner::of(&self.cuda).limits();
            Ok(Decode::check_problem(design, &problem, limits).ok())
        };
        let Ok(decode) = match self.choose(m).design() == Some(design) {
            true => self.decodes.get::<Infallible>(m, fitted),
            // Only tuners ask for another.
            false => fitted(),
        };
        decode
    }

    fn code(&self) -> GateCode {
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
        let few = steps.design().is_some() || steps.is_pair();
        let why = match &self.operands {
            _ if few && !self.operands.is_whole() => {
                "the weights are lent, and do not lie as kernels for few tokens read them"
            }
            Operands::Dense(dense) if !dense.gate_up.multiplies(steps.stored()) => {
                "cuBLASLt takes no lent biases of 16 bits beside sums of f32"
            }
            _ => match steps.design().map(|design| self.decode_by(design, x.rows())) {
                Some(Some(decode)) if self.problem.quantized.is_none() => {
                    match decode.check_x(tensor(&x), &problem) {
                        Err(why) => &why.to_string(),
                        Ok(()) => return self.run(stream, None, steps, x, out),
                    }
                }
                _ => return self.run(stream, None, steps, x, out),
            },
        };
        Err(CudaError::Unsupported { what: candidate.to_string(), why: why.into() })
    }

    fn run(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        steps: Steps,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.expect_call(stream, &x, &out)?;
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        if m == 0 || out.cols() == 0 {
            return Ok(());
        }
        if h == 0 {
            let (out, bias) = (tensor(&out.as_ref()), self.operands.down_bias());
            // SAFETY: `out` spans memory of this device and is borrowed mutably; the bias lives as
            // long as `self`.
            return unsafe { fill_rows(stream, T::DTYPE, out, [m, k], bias) };
        }
        if self.problem.quantized.is_some() {
            return self.run_passes(stream, scratch, steps, x, out);
        }
        let decode = steps.design().map(|design| self.decode_by(design, m));
        let problem = self.problem.with_m(m);
        let takes = |decode: &Decode| decode.check_x(tensor(&x), &problem).is_ok();
        let (steps, decode) = match decode.map(|decode| decode.filter(takes)) {
            None => (steps, None),
            Some(Some(decode)) => (steps, Some(decode)),
            Some(None) => (self.step_by_step(m), None),
        };
        let bytes = self.bytes_by(m, steps);
        self.cuda.with_workspace(stream, scratch, bytes, |work| {
            // SAFETY: the views span memory of this device; `out` is borrowed mutably, the weights live as long as
            // `self`, and the workspace has the bytes that these steps use.
            unsafe { self.enqueue(stream, steps, decode, x, out, None, work) }
        })
    }

    /// Quantised weights, a few tokens at a time.
    fn run_passes(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        steps: Steps,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let m = x.rows();
        // Others than planned are asked for by tuners: each pass by what was asked for.
        let asked = steps.design().filter(|_| steps != self.choose(m));
        let out = out.as_ref();
        self.cuda.with_workspace(stream, scratch, self.h_bytes(m), |work| {
            let mut first = 0;
            while first < m {
                let from = |t: Tensor, stride: usize| Tensor {
                    data: t.data + (first * stride * size_of::<T>()) as u64,
                    ..t
                };
                let x = from(tensor(&x), x.row_stride());
                let y = from(tensor(&out), out.row_stride());
                let (rows, decode) = self.next_pass(asked, MOST_TOKENS.min(m - first), x)?;
                // SAFETY: the views span memory of this device, `out` is borrowed mutably by the caller, the
                // weights live as long as `self`, and the workspace has room for h behind the call's own word.
                unsafe { self.decode(stream, decode, rows, [x, y], work) }?;
                first += rows;
            }
            Ok(())
        })
    }

    /// How many of the next `rows` tokens are computed together, and how. Rows that cannot be read in
    /// place must fit into shared memory, and fewer do.
    fn next_pass(&self, asked: Option<Design>, rows: usize, x: Tensor) -> Result<(usize, Decode)> {
        let problem = self.problem.with_m(rows);
        let decode = self.expect_decode(asked, rows)?;
        match decode.check_x(x, &problem) {
            Ok(()) => Ok((rows, decode)),
            Err(_) if rows > 1 => self.next_pass(asked, rows.div_ceil(2), x),
            Err(why) => {
                Err(CudaError::Unsupported { what: problem.to_string(), why: why.to_string() })
            }
        }
    }

    /// The launches for quantised weights, or why there are none.
    pub(super) fn expect_decode(&self, asked: Option<Design>, m: usize) -> Result<Decode> {
        // What speaks against the design that needs the least.
        let planned = || self.choose(m).design().unwrap_or(Design::TwoLaunches);
        let design = asked.unwrap_or_else(planned);
        if let Some(decode) = self.decode_by(design, m) {
            return Ok(decode);
        }
        let problem = self.problem.with_m(m);
        let limits = Planner::of(&self.cuda).limits();
        let fitted = Decode::check_problem(design, &problem, limits);
        fitted.map_err(|why| CudaError::Unsupported {
            what: problem.to_string(),
            why: why.to_string(),
        })
    }

    /// Refuses what does not fit together, and lets the call wait for other streams' work with its memory.
    pub(super) fn expect_call(
        &self,
        stream: &Stream,
        x: &DeviceMatrixRef<'_, T>,
        out: &DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let shape = [x.rows(), self.out_features()];
        self.cuda.expect_stream(stream)?;
        out.expect_shape("output", shape)?;
        x.admit("x", [x.rows(), self.hidden()], stream)?;
        out.admit("output", shape, stream)?;
        self.operands.admit(stream)
    }

    /// # Safety
    /// `out` is memory of this device for the output, `work` has [`Self::bytes_by`] of the steps, and so are the saved
    /// matrices, which take gate and up; they overlap nothing else that is used before this work is done. `decode` is
    /// how the design of the steps launches this x.
    pub(super) unsafe fn enqueue(
        &self,
        stream: &Stream,
        steps: Steps,
        decode: Option<Decode>,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        saved: Option<[Tensor; 2]>,
        work: Work,
    ) -> Result<()> {
        let m = x.rows();
        let y = tensor(&out.as_ref());
        if let Some(decode) = decode {
            // SAFETY: as the caller says.
            return unsafe { self.decode(stream, decode, m, [tensor(&x), y], work) };
        }
        let dense = self.operands.dense()?;
        let block = self.problem.op == Op::Mlp;
        let h = if block { Tensor::new(work.ptr, self.h_stride()) } else { y };
        let behind = work.ptr + self.h_bytes(m) as u64;
        let half = padded::<T>(self.problem.intermediate);
        let (act, numerics) = (self.problem.activation, self.problem.numerics);
        let formula = Formula::new(&act);
        // Where gate and up lie between two steps.
        let between = |stored: Stored| {
            saved.unwrap_or_else(|| {
                let up = behind + (half * stored.size(T::DTYPE)) as u64;
                [behind, up].map(|at| Tensor::new(at, 2 * half))
            })
        };
        for step in steps.iter() {
            match step {
                Algorithm::Gated(kernel) => {
                    let (weights, maps) = (dense.gate_up.fused(), &dense.maps);
                    let (code, x) = (self.code(), tensor(&x));
                    let call = Call { code, formula, m, x, out: h, weights, saved, maps };
                    let kernel = if saved.is_some() { kernel.saving() } else { kernel };
                    let kernel = self.launchable(kernel, &call)?;
                    // SAFETY: as the caller says; the weights live as long as `self`.
                    unsafe { kernel.launch(stream, &call) }?;
                }
                Algorithm::Products(stored) => {
                    let products = match saved {
                        Some(_) => Products::Each(dense.gate_up.halves()),
                        None => dense.gate_up.products(stored),
                    };
                    let scratch = match saved {
                        Some(_) => behind,
                        None => behind + self.between_bytes(m, stored) as u64,
                    };
                    let to = between(stored);
                    // SAFETY: as the caller says; the workspace has room for gate and up and for cuBLASLt.
                    unsafe {
                        match stored {
                            Stored::Elements => {
                                self.multiply::<T>(stream, x, &products, to, scratch)
                            }
                            Stored::Sums => self.multiply::<f32>(stream, x, &products, to, scratch),
                        }
                    }?;
                }
                Algorithm::Elementwise(stored) => {
                    let code = GateCode::elementwise(&act, numerics, T::DTYPE);
                    let cols = self.problem.intermediate;
                    let extent = Extent { rows: m, cols, code, formula };
                    let [gate, up] = between(stored);
                    let inputs = GateUp { gate, up, group: 0, stored };
                    // SAFETY: as the caller says; the stream orders the steps.
                    unsafe { elementwise::forward(stream, extent, inputs, h) }?;
                }
                Algorithm::Down(down) => {
                    let weights = dense.down()?;
                    let maps = &dense.down_maps;
                    let call = DownCall { dtype: T::DTYPE, m, h, weights, y, maps };
                    // SAFETY: as the caller says; the stream orders the steps.
                    unsafe {
                        if !down.launch(stream, &call)? {
                            let stride = self.h_stride();
                            let (at, k) = (work.ptr, self.problem.intermediate);
                            let h = DeviceMatrixRef::<T>::from_raw_trusted(
                                &self.cuda, at, m, k, stride,
                            )?;
                            let y = DeviceMatrixMut::<T>::from_raw_trusted(
                                &self.cuda,
                                y.data,
                                m,
                                self.problem.hidden,
                                out.row_stride(),
                            )?;
                            self.lt()?.launch(stream, h, &weights, y, behind)?;
                        }
                    }
                }
                Algorithm::Decode(design) => {
                    let what = design.to_string();
                    return Err(CudaError::Unsupported { what, why: "it takes no such x".into() });
                }
            }
        }
        Ok(())
    }

    fn lt(&self) -> Result<&Lt> {
        self.lt.as_deref().ok_or_else(|| CudaError::Unsupported {
            what: self.problem.to_string(),
            why: "without cuBLASLt there is no unfused path".into(),
        })
    }

    /// Enqueues the decode kernel for `m` tokens of x, to y.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn decode(
        &self,
        stream: &Stream,
        decode: Decode,
        m: usize,
        [x, y]: [Tensor; 2],
        work: Work,
    ) -> Result<()> {
        let call = DecodeCall {
            code: self.code(),
            formula: Formula::new(&self.problem.activation),
            m,
            x,
            h: Tensor::new(work.ptr, self.h_stride()),
            y,
            weights: self.operands.block()?,
            barrier: work.barrier,
        };
        // SAFETY: as the caller says; the workspace has room for h, beside a word of the call's own.
        unsafe { decode.launch(stream, &call) }
    }

    /// Enqueues gate and up as values of Y.
    ///
    /// # Safety
    /// `gate` and `up` have room for them, and `scratch` is what cuBLASLt uses.
    unsafe fn multiply<Y: Element>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        products: &Products,
        [gate, up]: [Tensor; 2],
        scratch: u64,
    ) -> Result<()> {
        let lt = self.lt()?;
        // SAFETY: as the caller says.
        let launch = |weights: &LinearWeights, to: Tensor| unsafe {
            let (m, features) = (x.rows(), weights.out_features);
            let to = DeviceMatrixMut::<Y>::from_raw_trusted(
                &self.cuda,
                to.data,
                m,
                features,
                to.stride.unsigned_abs() as usize,
            )?;
            lt.launch(stream, x, weights, to, scratch)
        };
        match products {
            Products::Both(both) => launch(both, gate),
            Products::Each([gate_weights, up_weights]) => {
                launch(gate_weights, gate)?;
                launch(up_weights, up)
            }
        }
    }

    /// The kernel that was planned, or the best that takes these addresses: plans know no strides.
    fn launchable(&self, planned: Kernel, call: &Call<'_>) -> Result<Kernel> {
        let Err(why) = planned.check_call(&self.cuda, call) else { return Ok(planned) };
        let takes = |kernel: &Kernel| kernel.check_call(&self.cuda, call).is_ok();
        let problem = self.problem_of_h(call.m);
        let other = match self.asked {
            Asked::Steps(steps) if steps.kernel_of_h().is_some() => None,
            _ => best_kernel(Planner::of(&self.cuda), &problem, takes),
        };
        other.ok_or_else(|| CudaError::Unsupported { what: planned.to_string(), why })
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

    /// [`Self::forward`] for matrices on the host, which are copied to the device and back.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_host(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        out.expect_shape("output", [x.rows(), self.out_features()])?;
        let stream = self.cuda.stream();
        let x = DeviceMatrix::from_host(&stream, x)?;
        let mut y = DeviceMatrix::new(&stream, x.rows(), self.out_features())?;
        self.forward(&stream, x.view(), y.view_mut())?;
        y.view().download(&stream, out)
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
