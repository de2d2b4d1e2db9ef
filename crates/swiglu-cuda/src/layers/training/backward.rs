//! The whole backward pass.

use swiglu_core::{DType, Element, GradientShapes, Op};

use super::gate_up::{BlockTensors, expect_rows_apart};
use super::kept::DeviceKeptMut;
use super::products::{Factor, Multiply, Run, backwards};
use super::scratch::Placed;
use crate::device::error::Result;
use crate::device::memory::DeviceMatrixRef;
use crate::device::stream::Stream;
use crate::kernels::elementwise::Tensor;
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::sums::{column_sums, round_sums};
use crate::layers::activation::tensor;
use crate::layers::gradients::{DeviceGradientsMut, Place};
use crate::layers::layer::Layer;

impl<K, T: Element> Layer<K, T> {
    /// Enqueues the gradients that `into` has places for, from ∂L/∂y (of a gated linear layer ∂L/∂h), and from gate and up
    /// as [`Self::forward_saving`] left them, which are consumed, also by a call that fails: what they hold afterwards is their
    /// gradients or anything else. An up that was not kept is computed again from x, by a product whose sums have an order of
    /// their own: to the bits that the forward pass had where these do not depend on the order. In a block whose
    /// ∂L/∂Wd is wanted h is computed again.
    ///
    /// Weights must not have changed since the forward pass. Without tokens, gradients of weights become zeros, or stay
    /// where they are added to.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`crate::CudaError::WrongDevice`]; [`crate::CudaError::Unsupported`] for quantised weights, and for
    /// rows of ∂L/∂y, or of x, that overlap; [`crate::CudaError::LibraryMissing`] without cuBLASLt; what compiling a kernel on first use, or
    /// the driver, reports.
    pub fn backward<'k>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out_grad: DeviceMatrixRef<'_, T>,
        kept: impl Into<DeviceKeptMut<'k, T>>,
        into: DeviceGradientsMut<'_, T>,
    ) -> Result<()> {
        let kept = kept.into();
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        let dense = self.operands.dense()?;
        self.cuda.expect_stream(stream)?;
        let block = self.problem.op == Op::Mlp;
        x.admit("x", [m, k], stream)?;
        if into.gate.is_some() || into.up.is_some() || kept.up.is_none() {
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
        let (kept, x, dy) = (kept.tensors(), tensor(&x), tensor(&out_grad));
        let size = size_of::<T>() as u64;
        let placed = Placed::new(self, m, dense, kept, into.dx.is_some());
        let Placed { half, both, up_again, round_dx, .. } = placed;
        // Scratch memory lies at whole addresses, wherever that is.
        let [saved, grads] = placed.at(0);
        // Only ∂L/∂Wd needs h.
        let h_at = |at| into.down.is_some().then(|| Tensor::new(at, half));
        let io = BlockTensors { m, dy, saved, grads, h: h_at(0) };
        let fused = down.and_then(|down| self.dgated_kernel(&self.dgated_call(down, io, dense)));
        let parts = placed.needs(fused.is_none(), into.down.is_some()).parts(&self.cuda);
        self.cuda.with_workspace(stream, None, parts.total(), |work| {
            let at = |offset: usize| work.ptr + offset as u64;
            let activated = h_at(at(0));
            let dh_at = Tensor::new(at(parts.h), half);
            let [saved, grads] = placed.at(at(parts.h + parts.dh));
            let sums_at = |cols| Tensor::new(at(parts.h + parts.dh + parts.gate_up), cols);
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
                        let io = BlockTensors { m, dy, saved, grads, h: activated };
                        match fused {
                            Some(kernel) => {
                                kernel.launch(stream, &self.dgated_call(down, io, dense))?;
                            }
                            None => run.through_block(down, io, dh_at)?,
                        }
                    }
                    None => run.through_activation(m, dy, saved, grads)?,
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
}
