//! The whole backward pass.

use swiglu_core::{DType, Element, GradientShapes, Op};

use super::gate_up::{BlockTensors, expect_rows_apart};
use super::kept::{DeviceKept, Kept};
use super::products::{Factor, Multiply, Run, backwards};
use super::scratch::{Parts, Placed};
use crate::device::error::Result;
use crate::device::memory::DeviceMatrixRef;
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::dgated_gemm::{Kernel as DgatedKernel, RowFactors};
use crate::kernels::elementwise::Tensor;
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::sums::{column_sums, round_sums, row_dots};
use crate::layers::activation::tensor;
use crate::layers::gradients::{DeviceGradientsMut, Place};
use crate::layers::layer::Layer;
use crate::layers::operands::Dense;

impl<K, T: Element> Layer<K, T> {
    /// Bytes of scratch memory that [`Self::backward`] uses for these matrices.
    ///
    /// # Errors
    /// [`crate::CudaError::Unsupported`] for quantised weights.
    pub fn backward_bytes(
        &self,
        out_grad: &DeviceMatrixRef<'_, T>,
        kept: &DeviceKept<'_, T>,
        into: &DeviceGradientsMut<'_, T>,
    ) -> Result<usize> {
        let dense = self.operands.dense()?;
        let passes = self.backward_passes(dense, out_grad, kept.tensors(), into)?;
        Ok(passes.parts.total())
    }

    /// How a backward pass goes, where everything lies that it reads and writes, and what scratch memory it takes.
    fn backward_passes(
        &self,
        dense: &Dense<T>,
        out_grad: &DeviceMatrixRef<'_, T>,
        kept: Kept,
        into: &DeviceGradientsMut<'_, T>,
    ) -> Result<Passes> {
        let m = out_grad.rows();
        let placed = Placed::new(self, m, dense, kept, into);
        // Scratch memory lies at whole addresses, wherever that is.
        let [saved, grads] = placed.at(0);
        let h = into.down.is_some().then(|| Tensor::new(0, placed.half));
        let of_factors = into.row_scale_grad.is_some();
        let scaled = into.row_scale.is_some() || of_factors;
        let scale = scaled.then_some(RowFactors { factors: 0, dots: 0 });
        let io = BlockTensors { m, dy: tensor(out_grad), saved, grads, h, scale };
        let fused = match self.problem.op {
            Op::Mlp => self.dgated_kernel(&self.dgated_call(dense.down()?, io, dense)),
            _ => None,
        };
        let dots = match fused {
            _ if !of_factors => 0,
            Some(kernel) => self.problem.intermediate.div_ceil(kernel.columns_of_dots()),
            // Without features nothing is scaled.
            None => self.problem.intermediate.min(1),
        };
        // ∂L/∂Wd needs h, and step by step a factor's gradient does.
        let wants_h = into.down.is_some() || fused.is_none() && of_factors;
        let parts = placed.needs(fused.is_none(), wants_h, dots).parts(&self.cuda);
        Ok(Passes { placed, fused, wants_h, dots, parts })
    }

    /// Enqueues the gradients that `into` has places for, from ∂L/∂y (of a gated linear layer ∂L/∂h), and from gate and up
    /// as [`Self::forward_saving`] left them. Those that it may write are consumed, also by a call that fails: what they hold
    /// afterwards is their gradients or anything else. An up that was not kept is computed again from x, by a product whose sums have an order of
    /// their own: to the bits that the forward pass had where these do not depend on the order. In a block whose
    /// ∂L/∂Wd is wanted h is computed again, and step by step also where a row's factor has a gradient. Without `scratch`, of
    /// [`Self::backward_bytes`], the stream's is used.
    ///
    /// Weights must not have changed since the forward pass. Without tokens, gradients of weights become zeros, or stay
    /// where they are added to.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`crate::CudaError::WrongDevice`]; [`crate::CudaError::Unsupported`] for quantised weights, and for
    /// rows of ∂L/∂y, or of x, that overlap; [`swiglu_core::Error::Unsupported`] for a row scale of a gated linear layer;
    /// [`swiglu_core::Error::OutOfRange`] for too little scratch memory; [`crate::CudaError::LibraryMissing`] without cuBLASLt; what compiling a kernel on first use, or
    /// the driver, reports.
    pub fn backward<'k>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out_grad: DeviceMatrixRef<'_, T>,
        kept: impl Into<DeviceKept<'k, T>>,
        into: DeviceGradientsMut<'_, T>,
        scratch: Option<&mut DeviceScratch<'_>>,
    ) -> Result<()> {
        let kept = kept.into();
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        let dense = self.operands.dense()?;
        self.cuda.expect_stream(stream)?;
        let block = self.problem.op == Op::Mlp;
        x.admit("x", [m, k], stream)?;
        let again = matches!(&kept, DeviceKept::Consumed(kept) if kept.up.is_none());
        if into.gate.is_some() || into.up.is_some() || again {
            expect_rows_apart("x", &x)?;
        }
        self.admit_out_grad(&out_grad, m, stream)?;
        kept.admit([m, h], stream)?;
        let down = if block { Some(dense.down()?) } else { None };
        let lie = self.problem.layout.orientation;
        let down_lies = self.down_lies()?;
        into.admit(m, &GradientShapes::new(&self.problem, down_lies), stream)?;
        self.operands.admit(stream)?;

        let lt = self.cuda.lt()?;
        let Passes { placed, fused, wants_h, dots, parts } =
            self.backward_passes(dense, &out_grad, kept.tensors(), &into)?;
        let Placed { half, both, up_again, round_dx, .. } = placed;
        let (x, dy) = (tensor(&x), tensor(&out_grad));
        let size = size_of::<T>() as u64;
        self.cuda.with_workspace(stream, scratch.as_deref(), parts.total(), |work| {
            let at = |offset: usize| work.ptr + offset as u64;
            let activated = wants_h.then(|| Tensor::new(at(0), half));
            let dh_at = Tensor::new(at(parts.h), half);
            let [saved, grads] = placed.at(at(parts.h + parts.dh));
            let dots_at = at(parts.h + parts.dh + parts.gate_up);
            let sums_at = |cols| Tensor::new(dots_at + parts.dots as u64, cols);
            let factors = into.row_scale.as_ref().map(DeviceMatrixRef::device_ptr);
            let scale = (factors.is_some() || dots > 0).then(|| RowFactors {
                factors: factors.unwrap_or(0),
                dots: if dots > 0 { dots_at } else { 0 },
            });
            let scratch = at(parts.total() - parts.lt);
            let by = Multiply {
                cuda: &self.cuda,
                stream,
                lt: &lt,
                scratch,
                accumulate: into.accumulate,
            };
            let run = Run { layer: self, by };
            // SAFETY: the views span memory of this device and were admitted; all that is written is borrowed mutably or
            // is a part of the workspace of its own; the weights live as long as `self`.
            unsafe {
                let x = Factor { at: x, shape: [m, k] };
                if let Some(stored) = up_again {
                    run.up(x, dense, stored, [saved[1], sums_at(half)])?;
                }
                match down {
                    Some(down) => {
                        let io = BlockTensors { m, dy, saved, grads, h: activated, scale };
                        match fused {
                            Some(kernel) => {
                                kernel.launch(stream, &self.dgated_call(down, io, dense))?;
                            }
                            None => run.through_block(down, io, dh_at)?,
                        }
                    }
                    None => run.through_activation(m, dy, saved, grads)?,
                }
                if let (Some(to), Some(down)) = (&into.row_scale_grad, down) {
                    let (dots, dy) = ((dots_at, dots), (dy, down.bias));
                    row_dots(stream, T::DTYPE, dots, dy, [m, k], to.device_ptr())?;
                }
                let [gate, up] = grads.map(|at| Factor { at, shape: [m, h] });
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
                            run.by.map::<T>(grads, backwards(&both), dx, false)?;
                        }
                        None => {
                            let to = match round_dx {
                                true => Place { at: sums_at(k), dtype: DType::F32 },
                                false => dx,
                            };
                            let [gate_w, up_w] = dense.gate_up.halves();
                            run.by.map::<T>(gate, backwards(&gate_w), to, false)?;
                            run.by.map::<T>(up, backwards(&up_w), to, true)?;
                            if round_dx {
                                round_sums(stream, T::DTYPE, sums_at(k), dx.at, [m, k])?;
                            }
                        }
                    }
                }
                run.by.weights(&into, x, [gate, up], lie)?;
                if let (Some(down), Some(at)) = (&into.down, activated) {
                    let h = Factor { at, shape: [m, h] };
                    let dy = Factor { at: dy, shape: [m, k] };
                    run.by.weight::<T>(h, dy, down_lies, down.place())?;
                }
                let add = into.accumulate;
                for (bias, of) in [(&into.gate_bias, gate), (&into.up_bias, up)] {
                    if let Some(bias) = bias {
                        column_sums(
                            stream,
                            T::DTYPE,
                            (of.at, None),
                            of.shape,
                            bias.device_ptr(),
                            add,
                        )?;
                    }
                }
                if let Some(bias) = &into.down_bias {
                    let rows = (dy, factors);
                    column_sums(stream, T::DTYPE, rows, [m, k], bias.device_ptr(), add)?;
                }
            }
            Ok(())
        })
    }
}

struct Passes {
    placed: Placed,
    /// The kernel for gradients of gate and up, where one takes this call.
    fused: Option<DgatedKernel>,
    wants_h: bool,
    /// Sums of h·dh of each row.
    dots: usize,
    parts: Parts,
}
