//! The whole backward pass.

use swiglu_core::{DType, Element, GradientShapes, Op};

use super::gate_up::{BlockTensors, expect_rows_apart};
use super::part;
use super::products::{Factor, Run, backwards};
use crate::device::error::Result;
use crate::device::lt::Lt;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::{Stored, Tensor};
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::sm90_dgated_gemm as dgated;
use crate::kernels::sums::{column_sums, round_sums};
use crate::layers::activation::tensor;
use crate::layers::gradients::{DeviceGradientsMut, Place};
use crate::layers::layer::Layer;
use crate::layers::weights::{Products, padded};

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

impl<K, T: Element> Layer<K, T> {
    /// Enqueues the gradients that `into` has places for, from ∂L/∂y (of a gated linear layer ∂L/∂h), and from gate and up
    /// as [`Self::forward_saving`] left them, which are consumed, also by a call that fails: what they hold afterwards is their
    /// gradients or anything else. In a block h is computed again.
    ///
    /// Weights must not have changed since the forward pass. Without tokens, gradients of weights become zeros, or stay
    /// where they are added to.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`crate::CudaError::WrongDevice`]; [`crate::CudaError::Unsupported`] for quantised weights, and for
    /// rows of ∂L/∂y, or of x, that overlap; [`crate::CudaError::LibraryMissing`] without cuBLASLt; what compiling a kernel on first use, or
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
}
