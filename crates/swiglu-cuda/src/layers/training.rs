//! Training: a forward pass that keeps gate and up, and the backward pass over them.
//!
//! ∂L/∂gate, ∂L/∂up and h come from one kernel, the product dy·Wdᵀ with the activation's derivative as its epilogue, or
//! where that takes no such layer from the product in memory and an element-wise pass. The other products are cuBLASLt's.

use swiglu_core::{Accumulate, DType, Element, GradientShapes, Op, Orientation, Path};

use super::gradients::{DeviceGradientMut, DeviceGradientsMut, Place};
use super::layer::{Asked, Layer};
use super::operands::Dense;
use super::weights::{DownBuffer, Products, padded};
use crate::device::error::{CudaError, Result};
use crate::device::lt::{LinearWeights, Lt, Product};
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::elementwise::{self, Extent, GateUp, Stored, Tensor};
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::gate::{Formula, GateCode};
use crate::kernels::sm90_dgated_gemm::{self as dgated, Call as DgatedCall, Config};
use crate::kernels::sums::{column_sums, round_sums};
use crate::layers::activation::tensor;
use crate::plan::{Planner, Steps};

/// A matrix that is multiplied with, of values of T.
#[derive(Debug, Clone, Copy)]
struct Factor {
    at: Tensor,
    shape: [usize; 2],
}

/// The parts of the scratch memory of a backward pass: all are of bytes from `h` on.
#[derive(Debug, Clone, Copy)]
struct Parts {
    h: usize,
    dh: usize,
    /// Gate and up, or their gradients, where they have no place of the caller's.
    gate_up: usize,
    /// f32 sums of ∂L/∂x.
    dx: usize,
    lt: usize,
}

impl Parts {
    fn total(&self) -> usize {
        self.h + self.dh + self.gate_up + self.dx + self.lt
    }
}

fn part(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}

impl<K, T: Element> Layer<K, T> {
    /// As [`Self::forward`], and writes the pre-activations x·Wg + bg and x·Wu + bu, each `[M, H]`,
    /// as values of T: what [`crate::Cuda::activation_backward`] and [`Self::backward`] take. h is rounded as without;
    /// with [`swiglu_core::Rounding::Fused`] it follows from the pre-activations before their
    /// rounding, in 16-bit types always by a fused kernel. Before a capture into a graph, make the same
    /// call once.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`CudaError::Unsupported`] for quantised weights.
    pub fn forward_saving(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        gate: DeviceMatrixMut<'_, T>,
        up: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.saving(stream, None, x, out, [gate, up])
    }

    /// The same in scratch memory of the caller, of at least [`Self::training_bytes`].
    ///
    /// # Errors
    /// As [`Self::forward_saving`]; [`swiglu_core::Error::OutOfRange`] for too little scratch memory.
    pub fn forward_saving_with(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        gate: DeviceMatrixMut<'_, T>,
        up: DeviceMatrixMut<'_, T>,
        scratch: &mut DeviceScratch<'_>,
    ) -> Result<()> {
        self.saving(stream, Some(scratch), x, out, [gate, up])
    }

    fn saving(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        x: DeviceMatrixRef<'_, T>,
        mut out: DeviceMatrixMut<'_, T>,
        [gate, up]: [DeviceMatrixMut<'_, T>; 2],
    ) -> Result<()> {
        let (m, shape) = (x.rows(), [x.rows(), self.intermediate()]);
        self.operands.dense()?;
        self.expect_call(stream, &x, &out)?;
        for (what, saved) in [("gate", &gate), ("up", &up)] {
            saved.admit(what, shape, stream)?;
        }
        if shape.contains(&0) {
            // Without features between, the result is the bias of the down projection.
            return self.forward(stream, x, out);
        }
        let saved = [&gate, &up].map(|m| tensor(&m.as_ref()));
        let mut by = |steps: Steps| {
            let bytes = self.bytes_saving(m, steps);
            self.cuda.with_workspace(stream, scratch, bytes, |work| {
                let out = out.reborrow();
                // SAFETY: the views span memory of this device; all but x are borrowed mutably; the weights live as
                // long as `self`, and the workspace has what the steps use.
                unsafe { self.enqueue(stream, steps, x, out, Some(saved), work) }
            })
        };
        let chosen = self.saving_steps(m);
        match by(chosen) {
            Err(why) if self.hands_over(chosen, &why) => by(self.choose_fused(m)),
            done => done,
        }
    }

    /// The steps that save `m` tokens.
    fn saving_steps(&self, m: usize) -> Steps {
        let chosen = match self.problem.op {
            Op::Mlp if self.problem.hidden == 0 => self.choose_fused(m),
            // A decode kernel keeps gate and up to itself.
            Op::Mlp => self.step_by_step(m),
            _ => self.choose(m),
        };
        match chosen.stored() {
            // Nothing else writes them rounded and h from what they were before.
            Some(Stored::Sums) => self.choose_fused(m),
            _ => chosen,
        }
    }

    /// Bytes of scratch memory that [`Self::forward_saving_with`] uses for `m` tokens.
    pub fn training_bytes(&self, m: usize) -> usize {
        let chosen = self.saving_steps(m);
        let fused = if self.may_hand_over(chosen) { self.choose_fused(m) } else { chosen };
        self.bytes_saving(m, chosen).max(self.bytes_saving(m, fused))
    }

    /// Bytes of scratch memory that [`Self::backward_gate_up`] uses for `m` tokens in dense matrices that begin at multiples of
    /// 16 bytes: none where one kernel computes all of it.
    pub fn backward_bytes(&self, m: usize) -> usize {
        let (k, h) = (self.problem.hidden, self.problem.intermediate);
        let fused = self.operands.dense().ok().and_then(|dense| {
            let dense_rows = |cols| Tensor::new(0, cols);
            let (saved, h) = ([dense_rows(h); 2], dense_rows(h));
            let io = BlockTensors { m, dy: dense_rows(k), saved, grads: saved, h };
            self.dgated_config(&self.dgated_call(dense.down().ok()?, io, dense))
        });
        match fused {
            Some(_) => 0,
            None => part(m * padded::<T>(h) * size_of::<T>()) + Lt::scratch_bytes(self.cuda.arch()),
        }
    }

    /// Enqueues the first half of a block's backward pass, for a caller that computes the products with gradients of gate and
    /// up itself: from ∂L/∂y, gate and up the gradients of gate and up, and h once more, which ∂L/∂Wd needs. Gradients may
    /// not lie where gate and up do.
    ///
    /// # Errors
    /// As [`Self::backward`]; [`CudaError::Unsupported`] for a gated linear layer: that is
    /// [`crate::Cuda::activation_backward`]; [`swiglu_core::Error::OutOfRange`] for too little scratch memory.
    pub fn backward_gate_up(
        &self,
        stream: &Stream,
        out_grad: DeviceMatrixRef<'_, T>,
        inputs: [DeviceMatrixRef<'_, T>; 2],
        grads: [DeviceMatrixMut<'_, T>; 2],
        h: DeviceMatrixMut<'_, T>,
        scratch: Option<&mut DeviceScratch<'_>>,
    ) -> Result<()> {
        let (m, shape) = (out_grad.rows(), [out_grad.rows(), self.problem.intermediate]);
        let dense = self.operands.dense()?;
        let Some(down) = dense.down.as_ref().map(DownBuffer::linear) else {
            let what = "the backward pass through a down projection of a gated linear layer".into();
            let why =
                "it has none; Cuda::activation_backward gives the gradients of gate and up".into();
            return Err(CudaError::Unsupported { what, why });
        };
        self.cuda.expect_stream(stream)?;
        self.admit_out_grad(&out_grad, m, stream)?;
        for (what, saved) in ["gate", "up"].iter().zip(&inputs) {
            saved.admit(what, shape, stream)?;
        }
        let written =
            [("gradient of the gate", &grads[0]), ("gradient of the up", &grads[1]), ("h", &h)];
        written.iter().try_for_each(|(what, to)| to.admit(what, shape, stream))?;
        self.operands.admit(stream)?;
        let lt = self.cuda.lt()?;
        let io = BlockTensors {
            m,
            dy: tensor(&out_grad),
            saved: inputs.map(|m| tensor(&m)),
            grads: [&grads[0], &grads[1]].map(|m| tensor(&m.as_ref())),
            h: tensor(&h.as_ref()),
        };
        let fused = self.dgated_config(&self.dgated_call(down, io, dense));
        let dh = match fused {
            Some(_) => 0,
            None => part(m * padded::<T>(self.problem.intermediate) * size_of::<T>()),
        };
        let bytes = if fused.is_some() { 0 } else { dh + Lt::scratch_bytes(self.cuda.arch()) };
        self.cuda.with_workspace(stream, scratch.as_deref(), bytes, |work| {
            let dh_at = Tensor::new(work.ptr, padded::<T>(self.problem.intermediate));
            let accumulate = Accumulate::Overwrite;
            let run =
                Run { layer: self, stream, lt: &lt, scratch: work.ptr + dh as u64, accumulate };
            // SAFETY: the views span memory of this device and were admitted; what is written is borrowed mutably or is a
            // part of the workspace of its own; the weights live as long as `self`.
            unsafe {
                match fused {
                    Some(config) => {
                        dgated::launch(stream, config, &self.dgated_call(down, io, dense))
                    }
                    None => run.through_block(down, io, dh_at),
                }
            }
        })
    }

    /// How the weight of the down projection was given, or gate and up where there is none.
    pub(super) fn down_lies(&self) -> Result<Orientation> {
        let down = self.operands.dense()?.down.as_ref();
        Ok(down.map_or(self.problem.layout.orientation, DownBuffer::given))
    }

    /// Refuses a gradient of the output of another shape, or whose rows overlap.
    fn admit_out_grad(
        &self,
        out_grad: &DeviceMatrixRef<'_, T>,
        m: usize,
        stream: &Stream,
    ) -> Result<()> {
        out_grad.admit("gradient of the output", [m, self.out_features()], stream)?;
        expect_rows_apart("a gradient of the output", out_grad)
    }

    /// Enqueues the gradients that `into` has places for, from ∂L/∂y (of a gated linear layer ∂L/∂h), and from gate and up
    /// as [`Self::forward_saving`] left them, which are consumed, also by a call that fails: what they hold afterwards is their
    /// gradients or anything else. In a block h is computed again.
    ///
    /// Weights must not have changed since the forward pass. Without tokens, gradients of weights become zeros, or stay
    /// where they are added to.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`CudaError::WrongDevice`]; [`CudaError::Unsupported`] for quantised weights, and for
    /// rows of ∂L/∂y, or of x, that overlap; [`CudaError::LibraryMissing`] without cuBLASLt; what compiling a kernel on first use, or
    /// the driver, reports.
    pub fn backward(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out_grad: DeviceMatrixRef<'_, T>,
        gate: DeviceMatrixMut<'_, T>,
        up: DeviceMatrixMut<'_, T>,
        into: DeviceGradientsMut<'_, T>,
    ) -> Result<()> {
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        let dense = self.operands.dense()?;
        self.cuda.expect_stream(stream)?;
        let block = self.problem.op == Op::Mlp;
        x.admit("x", [m, k], stream)?;
        if into.gate.is_some() || into.up.is_some() {
            expect_rows_apart("x", &x)?;
        }
        self.admit_out_grad(&out_grad, m, stream)?;
        for (what, saved) in [("gate", &gate), ("up", &up)] {
            saved.admit(what, [m, h], stream)?;
        }
        let down = if block { Some(dense.down()?) } else { None };
        let lie = self.problem.layout.orientation;
        let down_lies = self.down_lies()?;
        into.admit(m, &GradientShapes::new(&self.problem, down_lies), stream)?;
        self.operands.admit(stream)?;

        let lt = self.cuda.lt()?;
        let saved = [&gate, &up].map(|m| tensor(&m.as_ref()));
        let dy = tensor(&out_grad);
        let products = dense.gate_up.products(Stored::Elements);
        let half = padded::<T>(h);
        // One product over both weights gives ∂L/∂x, where both gradients lie as both weights do.
        let both = match products {
            Products::Both(both) if h > 0 && k > 0 => Some(both),
            _ => None,
        };
        let size = size_of::<T>() as u64;
        let together = |[gate, up]: [Tensor; 2]| {
            half == h && gate.stride == up.stride && up.data == gate.data + h as u64 * size
        };
        let move_grads = both.is_some() && into.dx.is_some() && !together(saved);
        let sums = into.dx.is_some() && both.is_none() && T::DTYPE != DType::F32;
        let moved_to = |at: u64| [0, half as u64 * size].map(|b| Tensor::new(at + b, 2 * half));
        // Scratch memory lies at whole addresses, wherever that is.
        let grads = if move_grads { moved_to(0) } else { saved };
        let io = BlockTensors { m, dy, saved, grads, h: Tensor::new(0, half) };
        let fused = down.and_then(|down| self.dgated_config(&self.dgated_call(down, io, dense)));
        let parts = Parts {
            h: if block { part(m * half * size_of::<T>()) } else { 0 },
            dh: if block && fused.is_none() { part(m * half * size_of::<T>()) } else { 0 },
            gate_up: if move_grads { part(m * 2 * half * size_of::<T>()) } else { 0 },
            dx: if sums { part(m * k * size_of::<f32>()) } else { 0 },
            lt: Lt::scratch_bytes(self.cuda.arch()),
        };
        self.cuda.with_workspace(stream, None, parts.total(), |work| {
            let at = |offset: usize| work.ptr + offset as u64;
            let h_at = Tensor::new(at(0), half);
            let dh_at = Tensor::new(at(parts.h), half);
            let moved = at(parts.h + parts.dh);
            let grads = if move_grads { moved_to(moved) } else { saved };
            let sums_at = Tensor::new(at(parts.h + parts.dh + parts.gate_up), k);
            let scratch = at(parts.total() - parts.lt);
            let run = Run { layer: self, stream, lt: &lt, scratch, accumulate: into.accumulate };
            // SAFETY: the views span memory of this device and were admitted; all that is written is borrowed mutably or
            // is a part of the workspace of its own; the weights live as long as `self`.
            unsafe {
                match down {
                    Some(down) => {
                        let io = BlockTensors { m, dy, saved, grads, h: h_at };
                        match fused {
                            Some(config) => {
                                dgated::launch(stream, config, &self.dgated_call(down, io, dense))?;
                            }
                            None => run.through_block(down, io, dh_at)?,
                        }
                    }
                    None => run.through_activation(m, dy, saved, grads)?,
                }
                let [gate, up] = grads.map(|at| Factor { at, shape: [m, h] });
                let x = Factor { at: tensor(&x), shape: [m, k] };
                if let Some(dx) = &into.dx {
                    let dx = Place { at: tensor(&dx.as_ref()), dtype: T::DTYPE };
                    match both {
                        Some(both) => {
                            if half > h {
                                let pads = [gate.at, up.at]
                                    .map(|t| Tensor { data: t.data + h as u64 * size, ..t });
                                for pad in pads {
                                    fill_rows(stream, T::DTYPE, pad, [m, half - h], None)?;
                                }
                            }
                            let grads = Factor { at: gate.at, shape: [m, 2 * half] };
                            run.map(grads, backwards(&both), dx, false)?;
                        }
                        None => {
                            let to =
                                if sums { Place { at: sums_at, dtype: DType::F32 } } else { dx };
                            let [gate_w, up_w] = dense.gate_up.halves();
                            run.map(gate, backwards(&gate_w), to, false)?;
                            run.map(up, backwards(&up_w), to, true)?;
                            if sums {
                                round_sums(stream, T::DTYPE, sums_at, dx.at, [m, k])?;
                            }
                        }
                    }
                }
                run.weights(&into, x, [gate, up], lie)?;
                if let Some(down) = &into.down {
                    let h = Factor { at: h_at, shape: [m, h] };
                    let dy = Factor { at: dy, shape: [m, k] };
                    run.weight(h, dy, down_lies, down.place())?;
                }
                let add = into.accumulate;
                for (bias, of) in [(&into.gate_bias, gate), (&into.up_bias, up)] {
                    if let Some(bias) = bias {
                        column_sums(stream, T::DTYPE, of.at, of.shape, bias.device_ptr(), add)?;
                    }
                }
                if let Some(bias) = &into.down_bias {
                    column_sums(stream, T::DTYPE, dy, [m, k], bias.device_ptr(), add)?;
                }
            }
            Ok(())
        })
    }

    fn dgated_call<'a>(
        &self,
        down: LinearWeights,
        io: BlockTensors,
        dense: &'a Dense<T>,
    ) -> DgatedCall<'a> {
        let BlockTensors { m, dy, saved, grads, h } = io;
        DgatedCall {
            code: self.code(),
            formula: Formula::new(&self.problem.activation),
            m,
            out_grad: dy,
            down,
            inputs: saved,
            grads,
            h,
            maps: &dense.down_maps,
        }
    }

    /// The tile of the kernel that computes gradients of gate and up in the product's epilogue, where it takes this call.
    fn dgated_config(&self, call: &DgatedCall<'_>) -> Option<Config> {
        let planner = Planner::of(&self.cuda);
        let unfused = matches!(self.asked, Asked::Path(Some(Path::Unfused)));
        let k = call.down.out_features;
        let computes = dgated::check(self.cuda.arch(), T::DTYPE, k).is_ok()
            && dgated::check_call(call).is_ok();
        let takes = !unfused && !planner.portable_kernels && computes;
        takes.then(|| Config::of(k))
    }
}

/// What the first half of a block's backward pass reads and writes.
#[derive(Debug, Clone, Copy)]
struct BlockTensors {
    m: usize,
    dy: Tensor,
    saved: [Tensor; 2],
    grads: [Tensor; 2],
    h: Tensor,
}

/// Refuses rows that overlap.
fn expect_rows_apart<T: Element>(what: &str, matrix: &DeviceMatrixRef<'_, T>) -> Result<()> {
    let rows = matrix.rows();
    if rows <= 1 || matrix.row_stride() >= matrix.cols() {
        return Ok(());
    }
    let what = format!("{what} whose {rows} rows overlap");
    let why = "products read rows of their own; copy it to a dense matrix".into();
    Err(CudaError::Unsupported { what, why })
}

/// The same weights as a map from its results to its inputs.
fn backwards(w: &LinearWeights) -> LinearWeights {
    LinearWeights {
        orientation: match w.orientation {
            Orientation::OutIn => Orientation::InOut,
            Orientation::InOut => Orientation::OutIn,
        },
        in_features: w.out_features,
        out_features: w.in_features,
        bias: None,
        ..*w
    }
}

/// A backward pass while it is enqueued.
struct Run<'a, K, T> {
    layer: &'a Layer<K, T>,
    stream: &'a Stream,
    lt: &'a Lt,
    scratch: u64,
    accumulate: Accumulate,
}

// SAFETY of all of these: as for `Layer::backward`, whose tensors these are.
impl<K, T: Element> Run<'_, K, T> {
    fn extent(&self, m: usize) -> Extent {
        let problem = &self.layer.problem;
        Extent {
            rows: m,
            cols: problem.intermediate,
            code: GateCode::elementwise(&problem.activation, problem.numerics, T::DTYPE),
            formula: Formula::new(&problem.activation),
        }
    }

    /// Gradients of gate and up from that of h.
    unsafe fn through_activation(
        &self,
        m: usize,
        dh: Tensor,
        [gate, up]: [Tensor; 2],
        grads: [Tensor; 2],
    ) -> Result<()> {
        let stored = Stored::Elements;
        let inputs = GateUp { gate, up, group: 0, stored };
        let grads = GateUp { gate: grads[0], up: grads[1], group: 0, stored };
        if m == 0 || self.layer.problem.intermediate == 0 {
            return Ok(());
        }
        // SAFETY: as the caller says.
        unsafe { elementwise::backward(self.stream, self.extent(m), dh, inputs, grads) }
    }

    /// Gradients of gate and up from that of y, and h, step by step.
    unsafe fn through_block(
        &self,
        down: LinearWeights,
        io: BlockTensors,
        dh: Tensor,
    ) -> Result<()> {
        let BlockTensors { m, dy, saved, grads, h } = io;
        if m == 0 || down.in_features == 0 {
            return Ok(());
        }
        let product = Place { at: dh, dtype: T::DTYPE };
        let dy = Factor { at: dy, shape: [m, down.out_features] };
        // SAFETY: as the caller says.
        unsafe {
            self.map(dy, backwards(&down), product, false)?;
            // h first: the gradients may take the place of gate and up.
            let inputs =
                GateUp { gate: saved[0], up: saved[1], group: 0, stored: Stored::Elements };
            elementwise::forward(self.stream, self.extent(m), inputs, h)?;
            self.through_activation(m, dh, saved, grads)
        }
    }

    /// y = x·W, or y += x·W.
    unsafe fn map(&self, x: Factor, w: LinearWeights, y: Place, add: bool) -> Result<()> {
        let product = Product { accumulate: add, ..Product::default() };
        // SAFETY: as the caller says.
        unsafe { self.product(x, w, y, [x.shape[0], w.out_features], product) }
    }

    /// The gradients of gate's and up's weights: both at once where factors and results allow it.
    unsafe fn weights(
        &self,
        into: &DeviceGradientsMut<'_, T>,
        x: Factor,
        [gate, up]: [Factor; 2],
        lie: Orientation,
    ) -> Result<()> {
        let [m, h] = gate.shape;
        let places =
            [&into.gate, &into.up].map(|place| place.as_ref().map(DeviceGradientMut::place));
        let size = size_of::<T>() as u64;
        if let ([Some(first), Some(second)], Orientation::OutIn) = (places, lie) {
            let rows = h as u64 * first.at.stride.unsigned_abs() * first.dtype.size() as u64;
            let together = gate.at.stride == up.at.stride
                && up.at.data == gate.at.data + h as u64 * size
                && (first.dtype, first.at.stride) == (second.dtype, second.at.stride)
                && second.at.data == first.at.data + rows;
            if together && h > 0 {
                let both = Factor { at: gate.at, shape: [m, 2 * h] };
                // SAFETY: as the caller says.
                return unsafe { self.weight(x, both, lie, first) };
            }
        }
        for (place, grad) in places.into_iter().zip([gate, up]) {
            if let Some(place) = place {
                // SAFETY: as the caller says.
                unsafe { self.weight(x, grad, lie, place) }?;
            }
        }
        Ok(())
    }

    /// The gradient of weights from the features of `inputs` to those of `grads`.
    unsafe fn weight(
        &self,
        inputs: Factor,
        grads: Factor,
        lie: Orientation,
        to: Place,
    ) -> Result<()> {
        let [left, right] = match lie {
            Orientation::OutIn => [grads, inputs],
            Orientation::InOut => [inputs, grads],
        };
        let w = LinearWeights {
            ptr: right.at.data,
            orientation: Orientation::InOut,
            in_features: right.shape[0],
            out_features: right.shape[1],
            row_stride: right.at.stride.unsigned_abs() as usize,
            bias: None,
        };
        let accumulate = self.accumulate == Accumulate::Add;
        let product = Product { transposed: true, accumulate, fixed: false };
        // SAFETY: as the caller says.
        unsafe { self.product(left, w, to, [left.shape[1], right.shape[1]], product) }
    }

    unsafe fn product(
        &self,
        x: Factor,
        w: LinearWeights,
        y: Place,
        [rows, cols]: [usize; 2],
        product: Product,
    ) -> Result<()> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        // SAFETY: as the caller says.
        unsafe {
            if w.in_features == 0 {
                return match product.accumulate {
                    true => Ok(()),
                    false => fill_rows(self.stream, y.dtype, y.at, [rows, cols], None),
                };
            }
            match y.dtype {
                DType::F32 => self.product_of::<f32>(x, w, y.at, [rows, cols], product),
                _ => self.product_of::<T>(x, w, y.at, [rows, cols], product),
            }
        }
    }

    unsafe fn product_of<Y: Element>(
        &self,
        x: Factor,
        w: LinearWeights,
        y: Tensor,
        [rows, cols]: [usize; 2],
        product: Product,
    ) -> Result<()> {
        let cuda = &self.layer.cuda;
        let stride = |t: Tensor| t.stride.unsigned_abs() as usize;
        // SAFETY: as the caller says.
        unsafe {
            let [x_rows, x_cols] = x.shape;
            let x = DeviceMatrixRef::<T>::from_raw_trusted(
                cuda,
                x.at.data,
                x_rows,
                x_cols,
                stride(x.at),
            )?;
            let y = DeviceMatrixMut::<Y>::from_raw_trusted(cuda, y.data, rows, cols, stride(y))?;
            self.lt.product(self.stream, x, &w, y, product, self.scratch)
        }
    }
}
