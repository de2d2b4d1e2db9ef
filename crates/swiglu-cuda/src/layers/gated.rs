//! The gated linear layer.

use std::convert::Infallible;
use std::sync::Arc;

use swiglu_core::{
    Activation, Arrangement, Element, GatedLinearParams, MatrixMut, MatrixRef, Numerics, Op,
    Orientation, Path, Plan, Problem, WeightLayout,
};

use super::lent::DeviceGatedLinearParams;
use super::weights::{GateUpBuffer, Products, padded};
use crate::device::context::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::graph::CapturedCall;
use crate::device::lt::{LinearWeights, Lt};
use crate::device::memory::{DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::decode_mlp;
use crate::kernels::elementwise::{self, Extent, GateUp, Stored, Tensor};
use crate::kernels::gate::{Formula, GateCode, expect_gate};
use crate::kernels::gated_gemm::{Call, Kernel, Weights};
use crate::kernels::tensor_map::LayerMaps;
use crate::layers::activation::tensor;
use crate::plan::{
    ByTokens, Choice, Way, Why, choose, expect_numerics, expect_way, unfused_rounding,
};

/// A gated linear layer, x `[M, K]` → h `[M, H]`, whose weights are packed for one [`Cuda`] device.
#[derive(Debug)]
pub struct GatedLinear<T> {
    cuda: Cuda,
    problem: Problem,
    path: Option<Path>,
    /// What tests and tuners insist on.
    forced: Option<Choice>,
    pub(super) weights: GateUpBuffer<T>,
    maps: LayerMaps,
    /// What was chosen, on the path asked for, and where only a fused kernel will do.
    choices: ByTokens<Choice>,
    fused: ByTokens<Choice>,
    pub(super) lt: Option<Arc<Lt>>,
}

/// Rounds up to the alignment of a part of a workspace.
pub(super) fn workspace_part(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}

impl<T: Element> GatedLinear<T> {
    /// Packs the weights. Each call runs the plan that is expected to be the fastest for its M and
    /// rounds as asked.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a bias does not fit the weights;
    /// [`swiglu_core::Error::Unsupported`] for numerics of [`crate::expect_numerics`];
    /// [`CudaError::OutOfMemory`].
    pub fn new(cuda: &Cuda, params: &GatedLinearParams<'_, T>) -> Result<Self> {
        Self::build(cuda, params, params.weights.layout().orientation, None, None)
    }

    /// As [`Self::new`], always on one path. The unfused one runs cuBLASLt and the element-wise
    /// kernel; gate and up lie in memory as T between them, so [`swiglu_core::Rounding::Fused`]
    /// becomes [`swiglu_core::Rounding::PreRound`], as [`Self::numerics`] then says, and biases are
    /// rounded to T.
    ///
    /// # Errors
    /// As [`Self::new`]; [`CudaError::LibraryMissing`] for the unfused path without cuBLASLt.
    pub fn with_path(cuda: &Cuda, params: &GatedLinearParams<'_, T>, path: Path) -> Result<Self> {
        Self::build(cuda, params, params.weights.layout().orientation, Some(path), None)
    }

    /// As [`Self::new`], always with one kernel: for tests and tuners.
    pub(crate) fn with_kernel(
        cuda: &Cuda,
        params: &GatedLinearParams<'_, T>,
        kernel: Kernel,
    ) -> Result<Self> {
        let check = kernel.check_problem(cuda.arch(), &params.problem(0), cuda.tf32());
        check.map_err(|why| CudaError::Unsupported {
            what: kernel.to_string(),
            why: why.to_string(),
        })?;
        let orientation = params.weights.layout().orientation;
        let forced = Some(Choice::Fused(kernel));
        Self::build(cuda, params, orientation, Some(Path::Fused), forced)
    }

    /// As [`Self::new`], always by one way: for tests and tuners.
    ///
    /// # Errors
    /// As [`Self::with_path`]; [`CudaError::Unsupported`] where the way computes no such layer.
    pub fn with_way(cuda: &Cuda, params: &GatedLinearParams<'_, T>, way: &Way) -> Result<Self> {
        match way.choice {
            Choice::Fused(kernel) => Self::with_kernel(cuda, params, kernel),
            Choice::Unfused(Stored::Elements) => Self::with_path(cuda, params, Path::Unfused),
            Choice::Unfused(Stored::Sums) => {
                expect_way(cuda, way, &params.problem(0))?;
                // That it is there: as one path among several it may be missing.
                cuda.lt()?;
                let orientation = params.weights.layout().orientation;
                Self::build(cuda, params, orientation, None, Some(way.choice))
            }
            Choice::Decode(_) | Choice::Skinny(_) => Err(CudaError::Unsupported {
                what: way.to_string(),
                why: decode_mlp::Obstacle::NotABlock(params.problem(0).op).to_string(),
            }),
        }
    }

    /// The first half of a feed-forward block: weights are packed `[out, in]`, as decoding needs
    /// them, whichever way they were given.
    pub(super) fn of_block(
        cuda: &Cuda,
        params: &GatedLinearParams<'_, T>,
        path: Option<Path>,
    ) -> Result<Self> {
        Self::build(cuda, params, Orientation::OutIn, path, None)
    }

    /// A layer over weights that stay where they are: nothing is copied, and what is written to them is seen by the next
    /// call. Which kernels take them depends on their layout, which [`Self::plan`] does not know: where the planned
    /// one does not, a call runs another. The fastest take rows that begin at multiples of 16 bytes. Biases have to be
    /// packed: see [`Self::new`].
    ///
    /// # Errors
    /// [`swiglu_core::Error::Unsupported`] for numerics of [`crate::expect_numerics`]; [`CudaError::WrongDevice`].
    ///
    /// # Safety
    /// Foreign memory stays valid until the layer is dropped and its work is done; that of a [`DeviceMatrix`] is kept.
    /// A call may begin to read weights before the kernel in front of it has ended, if that is one of this crate or lets
    /// a programmatic dependent begin in another way: it does not write the weights. No other thread enqueues a write to
    /// the weights while a call of the layer, or a launch of its graph, is being enqueued.
    pub unsafe fn from_device(
        cuda: &Cuda,
        params: &DeviceGatedLinearParams<'_, T>,
    ) -> Result<Self> {
        params.gate.expect_device("gate weight", cuda)?;
        params.up.expect_device("up weight", cuda)?;
        let weights = GateUpBuffer::lent(params);
        let [intermediate, hidden] =
            params.orientation.shape(params.gate.rows(), params.gate.cols());
        let problem =
            Problem::new(Op::GatedLinear, 0, hidden, intermediate, T::DTYPE, params.activation)
                .with_numerics(params.numerics)
                .with_layout(WeightLayout {
                    orientation: params.orientation,
                    arrangement: Arrangement::Separate,
                });
        Self::over(cuda, problem, None, None, |_| Ok(weights))
    }

    fn build(
        cuda: &Cuda,
        params: &GatedLinearParams<'_, T>,
        orientation: Orientation,
        path: Option<Path>,
        forced: Option<Choice>,
    ) -> Result<Self> {
        params.validate()?;
        let pack = |stream: &Stream| GateUpBuffer::new(stream, params, orientation);
        Self::over(cuda, params.problem(0), path, forced, pack)
    }

    fn over(
        cuda: &Cuda,
        mut problem: Problem,
        path: Option<Path>,
        forced: Option<Choice>,
        weights: impl FnOnce(&Stream) -> Result<GateUpBuffer<T>>,
    ) -> Result<Self> {
        expect_numerics(problem.op, problem.numerics)?;
        expect_gate(&problem.activation, problem.dtype)?;
        let lt = match path {
            Some(Path::Fused) => None,
            Some(Path::Unfused) => {
                problem = unfused_rounding(problem);
                Some(cuda.lt()?)
            }
            // Without cuBLASLt there is one path less to choose from: both unfused ways need it.
            None => cuda.lt().ok(),
        };
        let path = if lt.is_none() { Some(Path::Fused) } else { path };
        Ok(Self {
            cuda: cuda.clone(),
            problem,
            path,
            forced,
            weights: weights(&cuda.stream())?,
            maps: LayerMaps::new(),
            choices: ByTokens::new(),
            fused: ByTokens::new(),
            lt,
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
    pub(super) fn problem(&self) -> Problem {
        self.problem
    }
    /// The activation.
    pub fn activation(&self) -> Activation {
        self.problem.activation
    }
    /// The numerics mode.
    pub fn numerics(&self) -> Numerics {
        self.problem.numerics
    }
    /// The path that was asked for, or [`None`] where each call takes the faster one.
    pub fn path(&self) -> Option<Path> {
        self.path
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        let problem = self.problem.with_m(m);
        match self.forced {
            Some(choice) => self.cuda.plan_of(problem, choice, Why::AskedFor),
            None => self.cuda.plan(problem, self.path),
        }
    }

    pub(super) fn choose(&self, m: usize) -> Choice {
        self.forced.unwrap_or_else(|| self.choose_on(m, self.path, &self.choices))
    }

    /// The fused kernel that is chosen where no other way will do.
    pub(super) fn choose_fused(&self, m: usize) -> Choice {
        self.choose_on(m, Some(Path::Fused), &self.fused)
    }

    fn choose_on(&self, m: usize, path: Option<Path>, known: &ByTokens<Choice>) -> Choice {
        let make = || Ok(choose(&self.cuda, &self.problem.with_m(m), path).0);
        let Ok(choice) = known.get::<Infallible>(m, make);
        choice
    }

    /// Does what was chosen; where cuBLASLt does not take this x, or no memory is left for its workspace, the same
    /// by a fused kernel, unless one way was asked for. Nothing of it is remembered: the next call tries again.
    pub(super) fn or_fused(
        &self,
        choice: Choice,
        m: usize,
        mut out: DeviceMatrixMut<'_, T>,
        call: impl Fn(Choice, DeviceMatrixMut<'_, T>) -> Result<()>,
    ) -> Result<()> {
        match call(choice, out.reborrow()) {
            Err(why) if self.hands_over(choice, &why) => call(self.choose_fused(m), out),
            done => done,
        }
    }

    /// Whether a fused kernel does instead what cuBLASLt refused.
    pub(super) fn hands_over(&self, choice: Choice, why: &CudaError) -> bool {
        let refused = matches!(why, CudaError::Unsupported { .. } | CudaError::OutOfMemory { .. });
        refused && self.may_hand_over(choice)
    }

    fn may_hand_over(&self, choice: Choice) -> bool {
        let planned = self.path.is_none() && self.forced.is_none();
        planned && matches!(choice, Choice::Unfused(_))
    }

    /// Bytes of the weights and biases in device memory.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// Bytes of scratch memory that a call with `m` tokens uses: the stream's, or that of [`Self::forward_with`].
    pub fn workspace_bytes(&self, m: usize) -> usize {
        self.bytes_by(m, self.choose(m))
    }

    pub(super) fn bytes_by(&self, m: usize, choice: Choice) -> usize {
        match choice {
            Choice::Fused(_) | Choice::Decode(_) | Choice::Skinny(_) => 0,
            Choice::Unfused(stored) => {
                self.between_bytes(m, stored) + Lt::scratch_bytes(self.cuda.arch())
            }
        }
    }

    fn between_bytes(&self, m: usize, stored: Stored) -> usize {
        workspace_part(m * 2 * padded::<T>(self.intermediate()) * stored.size(T::DTYPE))
    }

    /// Makes the first call with `m` tokens as cheap as every other: compiles or loads its kernels and
    /// reserves its workspace on `stream`. Needed before a capture into a graph, for each number of
    /// tokens that is captured: another number may go another way.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn reserve(&self, stream: &Stream, m: usize) -> Result<()> {
        let choice = self.choose(m);
        self.prepare(choice, m)?;
        self.cuda.reserve_workspace(stream, self.bytes_by(m, choice))
    }

    /// The kernels of a choice, and of the one that it may hand over to.
    pub(super) fn prepare(&self, choice: Choice, m: usize) -> Result<()> {
        if self.may_hand_over(choice) {
            self.prepare_one(self.choose_fused(m), m)?;
        }
        self.prepare_one(choice, m)
    }

    fn prepare_one(&self, choice: Choice, m: usize) -> Result<()> {
        let (act, numerics) = (self.activation(), self.numerics());
        match choice {
            Choice::Fused(kernel) => {
                // Of dense matrices at whole addresses: lent weights decide which kernel takes them.
                let (x, out) = (Tensor::new(0, self.hidden()), Tensor::new(0, self.intermediate()));
                let (weights, maps) = (self.weights.fused(), &self.maps);
                let (code, formula) = (GateCode::new(&act, numerics, T::DTYPE), Formula::new(&act));
                let call = Call { code, formula, m, x, out, weights, saved: None, maps };
                self.launchable(kernel, &call)?.prepare(&self.cuda, &call)
            }
            Choice::Unfused(stored) => {
                let code = GateCode::elementwise(&act, numerics, T::DTYPE);
                elementwise::prepare_forward(&self.cuda, code, stored)
            }
            block @ (Choice::Decode(_) | Choice::Skinny(_)) => Err(self.not_a_block(block)),
        }
    }

    /// Enqueues h = act(x·Wg + bg, x·Wu + bu) on `stream`: without allocation, after the first call
    /// of a size, and without waiting.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`CudaError::WrongDevice`]; [`CudaError::OutOfMemory`] for a
    /// larger workspace; [`CudaError::Capture`] in a capture by other code that finds too small a workspace; what
    /// compiling a kernel on first use, or the driver, reports.
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
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.or_fused(self.choose(x.rows()), x.rows(), out, |choice, out| {
            self.forward_as(stream, scratch, choice, x, out)
        })
    }

    /// As [`Self::forward`] by one way, whatever the plan is, and rounded as that way rounds
    /// ([`Way::numerics`]): for tuners.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`CudaError::Unsupported`] where the way does not compute this problem.
    pub fn forward_by(
        &self,
        stream: &Stream,
        way: &Way,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        expect_way(&self.cuda, way, &self.problem.with_m(x.rows()))?;
        self.forward_as(stream, None, way.choice, x, out)
    }

    fn forward_as(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        choice: Choice,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.expect_call(stream, &x, &out, self.intermediate())?;
        if x.rows() == 0 || self.intermediate() == 0 {
            return Ok(());
        }
        let bytes = self.bytes_by(x.rows(), choice);
        let out = tensor(&out.as_ref());
        self.cuda.with_workspace(stream, scratch, bytes, |work| {
            // SAFETY: the views span memory of this device; `out` is borrowed mutably, and the
            // workspace has the bytes this call uses.
            unsafe { self.enqueue(stream, choice, x, out, None, work.ptr) }
        })
    }

    /// Refuses what does not fit together, and lets the call wait for other streams' work with its memory.
    pub(super) fn expect_call(
        &self,
        stream: &Stream,
        x: &DeviceMatrixRef<'_, T>,
        out: &DeviceMatrixMut<'_, T>,
        out_features: usize,
    ) -> Result<()> {
        self.cuda.expect_stream(stream)?;
        out.expect_shape("output", [x.rows(), out_features])?;
        x.admit("x", [x.rows(), self.hidden()], stream)?;
        out.admit("output", [x.rows(), out_features], stream)?;
        self.weights.admit(stream)
    }

    /// # Safety
    /// `out` is memory of this device for `[M, H]`, `workspace` has [`Self::bytes_by`] of the
    /// choice, and so are the saved matrices, which a fused kernel writes the pre-activations to;
    /// they overlap nothing else that is used before this work is done.
    pub(super) unsafe fn enqueue(
        &self,
        stream: &Stream,
        choice: Choice,
        x: DeviceMatrixRef<'_, T>,
        out: Tensor,
        saved: Option<[Tensor; 2]>,
        workspace: u64,
    ) -> Result<()> {
        let (m, act) = (x.rows(), self.activation());
        let formula = Formula::new(&act);
        match choice {
            Choice::Fused(kernel) => {
                let code = GateCode::new(&act, self.numerics(), T::DTYPE);
                let weights = self.weights.fused();
                let maps = &self.maps;
                let call = Call { code, formula, m, x: tensor(&x), out, weights, saved, maps };
                let kernel = if saved.is_some() { kernel.saving() } else { kernel };
                let kernel = self.launchable(kernel, &call)?;
                // SAFETY: as the caller says; the weights live as long as `self`.
                unsafe { kernel.launch(stream, &call) }
            }
            Choice::Unfused(stored) => {
                let Some(lt) = &self.lt else {
                    return Err(CudaError::Unsupported {
                        what: self.problem.to_string(),
                        why: "without cuBLASLt there is no unfused path".into(),
                    });
                };
                let half = padded::<T>(self.intermediate());
                let gate = Tensor::new(workspace, 2 * half);
                let up_at = workspace + (half * stored.size(T::DTYPE)) as u64;
                let up = Tensor { data: up_at, ..gate };
                let scratch = workspace + self.between_bytes(m, stored) as u64;
                let code = GateCode::elementwise(&act, self.numerics(), T::DTYPE);
                let extent = Extent { rows: m, cols: self.intermediate(), code, formula };
                let inputs = GateUp { gate, up, group: 0, stored };
                let products = self.weights.products(stored);
                // SAFETY: the workspace has room for gate and up and for cuBLASLt; the stream
                // orders the steps.
                unsafe {
                    let between = [workspace, up_at];
                    match stored {
                        Stored::Elements => {
                            self.multiply::<T>(stream, lt, x, &products, between, scratch)
                        }
                        Stored::Sums => {
                            self.multiply::<f32>(stream, lt, x, &products, between, scratch)
                        }
                    }?;
                    elementwise::forward(stream, extent, inputs, out)
                }
            }
            block @ (Choice::Decode(_) | Choice::Skinny(_)) => Err(self.not_a_block(block)),
        }
    }

    /// Enqueues gate and up as values of Y, side by side in rows of both, each padded.
    ///
    /// # Safety
    /// `gate` and `up` have room for them in the workspace, and `scratch` is what cuBLASLt uses.
    unsafe fn multiply<Y: Element>(
        &self,
        stream: &Stream,
        lt: &Lt,
        x: DeviceMatrixRef<'_, T>,
        products: &Products,
        [gate, up]: [u64; 2],
        scratch: u64,
    ) -> Result<()> {
        let row = 2 * padded::<T>(self.intermediate());
        // SAFETY: as the caller says.
        let launch = |weights: &LinearWeights, to: u64| unsafe {
            let (m, features) = (x.rows(), weights.out_features);
            let to = DeviceMatrixMut::<Y>::from_raw_trusted(&self.cuda, to, m, features, row)?;
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

    fn not_a_block(&self, block: Choice) -> CudaError {
        let why = decode_mlp::Obstacle::NotABlock(self.problem.op).to_string();
        CudaError::Unsupported { what: block.to_string(), why }
    }

    /// The weights as kernels take them.
    pub(super) fn weights(&self) -> Weights {
        self.weights.fused()
    }

    /// The kernel that was planned, or the best that takes these addresses: plans know no strides.
    fn launchable(&self, planned: Kernel, call: &Call<'_>) -> Result<Kernel> {
        let Err(why) = planned.check_call(&self.cuda, call) else { return Ok(planned) };
        let problem = self.problem.with_m(call.m);
        let takes = |kernel: &Kernel| {
            Choice::Fused(*kernel).check(&self.cuda, &problem).is_ok()
                && kernel.check_call(&self.cuda, call).is_ok()
        };
        let seconds = |kernel: &Kernel| Choice::Fused(*kernel).seconds(&self.cuda, &problem);
        let by_time = |a: &Kernel, b: &Kernel| seconds(a).total_cmp(&seconds(b));
        let other = match self.forced {
            Some(Choice::Fused(_)) => None,
            _ => Kernel::all().filter(takes).min_by(by_time),
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
        out.expect_shape("output", [x.rows(), self.intermediate()])?;
        let stream = self.cuda.stream();
        let x = DeviceMatrix::from_host(&stream, x)?;
        let mut h = DeviceMatrix::new(&stream, x.rows(), self.intermediate())?;
        self.forward(&stream, x.view(), h.view_mut())?;
        h.view().download(&stream, out)
    }
}
