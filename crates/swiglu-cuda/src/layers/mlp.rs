//! The feed-forward block: for a few tokens the decode kernel, else the gated linear layer, then the
//! down projection, by a kernel of ours for few tokens where that was measured to be faster, else by cuBLASLt.

use std::convert::Infallible;
use std::sync::Arc;

use swiglu_core::{Element, MatrixMut, MatrixRef, MlpParams, Numerics, Op, Path, Plan, Problem};

use super::down::{Down, DownCall};
use super::gated::{GatedLinear, workspace_part};
use super::lent::DeviceMlpParams;
use super::weights::{DownBuffer, padded};
use crate::device::context::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::graph::CapturedCall;
use crate::device::lt::Lt;
use crate::device::memory::{DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::{DeviceScratch, Work};
use crate::kernels::decode_mlp::{
    BlockWeights, Call as DecodeCall, Decode, Design, MOST_TOKENS, Scales,
};
use crate::kernels::elementwise::Tensor;
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::gate::{Formula, GateCode};
use crate::kernels::tensor_map::LayerMaps;
use crate::layers::activation::tensor;
use crate::plan::{
    ByTokens, Choice, Way, Why, choose, expect_numerics, expect_row_steps, expect_way,
};

/// A feed-forward block, x `[M, K]` → y `[M, K]`, whose weights are packed for one [`Cuda`] device.
#[derive(Debug)]
pub struct Mlp<T> {
    gated: GatedLinear<T>,
    down: DownBuffer<T>,
    /// Of h and the down weight.
    down_maps: LayerMaps,
    lt: Arc<Lt>,
    problem: Problem,
    /// Whether the kernels for few tokens take the weights as they lie.
    is_whole: bool,
    /// What runs for one, two, … tokens: where a call takes microseconds, choosing should not.
    few: [Choice; MOST_TOKENS],
    /// What was chosen for other numbers of tokens.
    choices: ByTokens<Choice>,
    /// How few tokens are launched by the design that was chosen for them, where it computes them.
    decodes: ByTokens<Option<Decode>>,
}

impl<T: Element> Mlp<T> {
    /// Packs the weights; see [`GatedLinear::new`].
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree; [`swiglu_core::Error::Unsupported`] for
    /// numerics of [`crate::expect_numerics`]; [`crate::CudaError::OutOfMemory`];
    /// [`crate::CudaError::LibraryMissing`] without cuBLASLt, which computes the down projection.
    pub fn new(cuda: &Cuda, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::build(cuda, params, None)
    }

    /// As [`Self::new`], with the gated linear layer always on one path. The decode kernel is fused.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cuda: &Cuda, params: &MlpParams<'_, T>, path: Path) -> Result<Self> {
        Self::build(cuda, params, Some(path))
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
        let mut mlp = Self::build(cuda, params, None)?;
        let mut computes = design.is_none();
        for m in 1..=MOST_TOKENS {
            let problem = mlp.problem.with_m(m);
            let check = |d| Decode::check_problem(d, &problem, cuda.decode_limits());
            mlp.few[m - 1] = match design.map(|d| (d, check(d))) {
                Some((d, Ok(_))) => Choice::Decode(d),
                Some((d, Err(why))) if m == MOST_TOKENS && !computes => {
                    let (what, why) = (d.to_string(), why.to_string());
                    return Err(CudaError::Unsupported { what, why });
                }
                _ => mlp.gated.choose(m),
            };
            computes |= matches!(mlp.few[m - 1], Choice::Decode(_));
        }
        Ok(mlp)
    }

    /// A block over weights that stay where they are: see [`GatedLinear::from_device`]. The kernels for few tokens take
    /// weights `[out, in]` whose rows begin and end at multiples of 16 bytes; others go step by step.
    ///
    /// # Errors
    /// As [`GatedLinear::from_device`]; [`crate::CudaError::LibraryMissing`] without cuBLASLt.
    ///
    /// # Safety
    /// As [`GatedLinear::from_device`].
    pub unsafe fn from_device(cuda: &Cuda, params: &DeviceMlpParams<'_, T>) -> Result<Self> {
        params.down.expect_device("down weight", cuda)?;
        expect_numerics(Op::Mlp, params.gated.numerics)?;
        // SAFETY: as the caller says.
        let mut gated = unsafe { GatedLinear::from_device(cuda, &params.gated) }?;
        gated.weights.add_memory(params.down.allocation());
        let down = DownBuffer::lent(params.down, params.down_orientation);
        let problem = gated.problem().with_op(Op::Mlp);
        let is_whole = gated.weights.is_whole() && down.is_whole();
        Self::over(gated, down, problem, is_whole)
    }

    fn build(cuda: &Cuda, params: &MlpParams<'_, T>, path: Option<Path>) -> Result<Self> {
        params.validate()?;
        expect_row_steps(params.rows.steps)?;
        expect_numerics(Op::Mlp, params.gated.numerics)?;
        let gated = GatedLinear::of_block(cuda, &params.gated, path)?;
        let (allocation, stream) = (gated.weights.allocation(), cuda.stream());
        let (orientation, bias) = (params.down_orientation, params.down_bias);
        let down = DownBuffer::new(allocation, &stream, params.down, orientation, bias)?;
        let problem = params.problem(0).with_numerics(gated.numerics());
        // Packed rows are padded with zeros.
        Self::over(gated, down, problem, true)
    }

    fn over(
        gated: GatedLinear<T>,
        down: DownBuffer<T>,
        problem: Problem,
        is_whole: bool,
    ) -> Result<Self> {
        let (cuda, path) = (gated.cuda(), gated.path());
        let lt = cuda.lt()?;
        let few = std::array::from_fn(|i| {
            let m = i + 1;
            match is_whole {
                true => choose(cuda, &problem.with_m(m), path).0,
                false => gated.choose(m),
            }
        });
        let (choices, decodes) = (ByTokens::new(), ByTokens::new());
        let down_maps = LayerMaps::new();
        Ok(Self { gated, down, down_maps, lt, problem, is_whole, few, choices, decodes })
    }

    /// The gated linear layer.
    pub fn gated(&self) -> &GatedLinear<T> {
        &self.gated
    }
    /// The device.
    pub fn cuda(&self) -> &Cuda {
        self.gated.cuda()
    }
    /// The numerics mode. The down projection's bias is added as a value of T.
    pub fn numerics(&self) -> Numerics {
        self.problem.numerics
    }

    /// The design of the decode kernel that `m` tokens go through; none where they go step by step.
    pub fn design(&self, m: usize) -> Option<Design> {
        match self.choose(m) {
            Choice::Decode(design) => Some(design),
            Choice::Fused(_) | Choice::Unfused(_) | Choice::Skinny(_) => None,
        }
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        let problem = self.problem.with_m(m);
        match self.is_whole {
            true => self.cuda().plan(problem, self.gated.path()),
            false => self.cuda().plan_of(problem, self.choose(m), Why::Lent),
        }
    }

    /// Elements from row to row of h in the workspace.
    fn h_stride(&self) -> usize {
        padded::<T>(self.problem.intermediate)
    }

    fn h_bytes(&self, m: usize) -> usize {
        workspace_part(m * self.h_stride() * size_of::<T>())
    }

    /// Bytes of the weights and biases in device memory.
    pub fn weight_bytes(&self) -> usize {
        self.gated.weight_bytes()
    }

    /// Bytes of scratch memory that a call with `m` tokens uses: the stream's, or that of [`Self::forward_with`].
    pub fn workspace_bytes(&self, m: usize) -> usize {
        // An x that the planned kernel does not take goes step by step.
        let steps = (self.gated.choose(m), Down::CublasLt);
        let ways = [self.steps(m), steps].map(|(choice, down)| self.bytes_by(m, choice, down));
        ways.into_iter().max().unwrap_or(0)
    }

    /// What runs step by step for `m` tokens. Also where few are decoded: an x that the kernel does not take goes that way.
    fn steps(&self, m: usize) -> (Choice, Down) {
        match self.choose(m) {
            Choice::Decode(_) => (self.gated.choose(m), Down::CublasLt),
            steps => Down::after(steps),
        }
    }

    fn bytes_by(&self, m: usize, choice: Choice, down: Down) -> usize {
        // Gate, up and the down projection use what lies behind h one after the other.
        let scratch = match down {
            Down::CublasLt => Lt::scratch_bytes(self.cuda().arch()),
            Down::Skinny { .. } | Down::Registers => 0,
        };
        self.h_bytes(m) + self.gated.bytes_by(m, choice).max(scratch)
    }

    fn choose(&self, m: usize) -> Choice {
        let few = m.checked_sub(1).and_then(|i| self.few.get(i));
        let planned = || {
            let problem = self.problem.with_m(m);
            Ok(match self.is_whole {
                true => choose(self.cuda(), &problem, self.gated.path()).0,
                false => self.gated.choose(m),
            })
        };
        few.copied().unwrap_or_else(|| {
            let Ok(choice) = self.choices.get::<Infallible>(m, planned);
            choice
        })
    }

    /// How a design launches `m` tokens, where it computes them.
    fn decode_by(&self, design: Design, m: usize) -> Option<Decode> {
        let fitted = || {
            let problem = self.problem.with_m(m);
            Ok(Decode::check_problem(design, &problem, self.cuda().decode_limits()).ok())
        };
        let is_chosen =
            m.checked_sub(1).and_then(|i| self.few.get(i)) == Some(&Choice::Decode(design));
        let Ok(decode) = match is_chosen {
            true => self.decodes.get::<Infallible>(m, fitted),
            // Only tuners ask for another.
            false => fitted(),
        };
        decode
    }

    fn code(&self) -> GateCode {
        GateCode::new(&self.gated.activation(), self.numerics(), T::DTYPE)
    }

    /// As [`GatedLinear::reserve`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn reserve(&self, stream: &Stream, m: usize) -> Result<()> {
        for (i, choice) in self.few.iter().enumerate().take(m) {
            let Choice::Decode(design) = *choice else { continue };
            if let Some(decode) = self.decode_by(design, i + 1) {
                decode.prepare(self.cuda(), self.code())?;
            }
        }
        let (choice, down) = self.steps(m);
        self.gated.prepare(choice, m)?;
        down.prepare(self.cuda(), &self.problem.with_m(m))?;
        self.cuda().reserve_workspace(stream, self.bytes_by(m, choice, down))
    }

    /// Enqueues y = act(x·Wg + bg, x·Wu + bu)·Wd + bd on `stream`.
    ///
    /// # Errors
    /// As [`GatedLinear::forward`].
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
        self.gated.or_fused(self.choose(x.rows()), x.rows(), out, |choice, out| {
            self.forward_as(stream, scratch, choice, x, out)
        })
    }

    /// As [`Self::forward`], with the gated linear layer by one way: for tuners.
    ///
    /// # Errors
    /// As [`GatedLinear::forward_by`].
    pub fn forward_by(
        &self,
        stream: &Stream,
        way: &Way,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let problem = self.problem.with_m(x.rows());
        expect_way(self.cuda(), way, &problem)?;
        if !self.is_whole && matches!(way.choice, Choice::Decode(_) | Choice::Skinny(_)) {
            let why = "the weights are lent, and do not lie as kernels for few tokens read them";
            return Err(CudaError::Unsupported { what: way.to_string(), why: why.into() });
        }
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
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        self.gated.expect_call(stream, &x, &out, k)?;
        if m == 0 || k == 0 {
            return Ok(());
        }
        let down = self.down.linear();
        if h == 0 {
            let out = tensor(&out.as_ref());
            // SAFETY: `out` spans memory of this device and is borrowed mutably; the bias lives as
            // long as `self`.
            return unsafe { fill_rows(stream, T::DTYPE, out, [m, k], down.bias) };
        }
        let problem = self.problem.with_m(m);
        let choice = match choice {
            Choice::Decode(design) => {
                let takes = |decode: &Decode| decode.check_x(tensor(&x), &problem).is_ok();
                match self.decode_by(design, m).filter(takes) {
                    Some(decode) => return self.decode(stream, scratch, decode, x, out),
                    None => self.gated.choose(m),
                }
            }
            steps => steps,
        };
        let (choice, by) = Down::after(choice);
        let bytes = self.bytes_by(m, choice, by);
        self.cuda().with_workspace(stream, scratch, bytes, |Work { ptr: workspace, .. }| {
            let scratch = workspace + self.h_bytes(m) as u64;
            let hidden = Tensor::new(workspace, self.h_stride());
            // SAFETY: the workspace has room for h and for what the steps use behind it; the
            // stream orders them.
            unsafe {
                self.gated.enqueue(stream, choice, x, hidden, None, scratch)?;
                let (y, maps) = (tensor(&out.as_ref()), &self.down_maps);
                let call = DownCall { dtype: T::DTYPE, m, h: hidden, weights: down, y, maps };
                if by.launch(stream, &call)? {
                    return Ok(());
                }
                let stride = self.h_stride();
                let h =
                    DeviceMatrixRef::<T>::from_raw_trusted(self.cuda(), workspace, m, h, stride)?;
                self.lt.launch(stream, h, &down, out, scratch)
            }
        })
    }

    /// Enqueues the decode kernel, which takes this x; shapes have been checked.
    fn decode(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        decode: Decode,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let (m, w, down) = (x.rows(), self.gated.weights(), self.down.linear());
        let weights = BlockWeights {
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
        };
        self.cuda().with_workspace(stream, scratch, self.h_bytes(m), |work| {
            let call = DecodeCall {
                code: self.code(),
                formula: Formula::new(&self.gated.activation()),
                m,
                x: tensor(&x),
                h: Tensor::new(work.ptr, self.h_stride()),
                y: tensor(&out.as_ref()),
                weights,
                barrier: work.barrier,
            };
            // SAFETY: the views span memory of this device, `out` is borrowed mutably, the weights
            // live as long as `self`, and the workspace has room for h, beside a word of the call's own.
            unsafe { decode.launch(stream, &call) }
        })
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
        x.expect_shape("x", [x.rows(), self.problem.hidden])?;
        out.expect_shape("output", [x.rows(), self.problem.hidden])?;
        let stream = self.cuda().stream();
        let x = DeviceMatrix::from_host(&stream, x)?;
        let mut y = DeviceMatrix::new(&stream, x.rows(), self.problem.hidden)?;
        self.forward(&stream, x.view(), y.view_mut())?;
        y.view().download(&stream, out)
    }
}
