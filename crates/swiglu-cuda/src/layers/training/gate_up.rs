//! The first half of a block's backward pass: from ∂L/∂y to ∂L/∂gate and ∂L/∂up, and h once more where it is wanted.

use swiglu_core::{Accumulate, Element, Orientation};

use super::part;
use super::products::{Multiply, Run};
use crate::device::error::{CudaError, Result};
use crate::device::lt::{LinearWeights, Lt};
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::dgated_gemm::{Call as DgatedCall, Kernel as DgatedKernel, RowFactors};
use crate::kernels::elementwise::Tensor;
use crate::kernels::gate::Formula;
use crate::layers::activation::tensor;
use crate::layers::down::DownBuffer;
use crate::layers::layer::{Asked, Layer};
use crate::layers::operands::Dense;
use crate::layers::weights::padded;
use crate::plan::differentiated;

/// What the first half of a block's backward pass reads and writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockTensors {
    pub(super) m: usize,
    pub(super) dy: Tensor,
    pub(super) saved: [Tensor; 2],
    pub(super) grads: [Tensor; 2],
    pub(super) h: Option<Tensor>,
    pub(super) scale: Option<RowFactors>,
}

impl<K, T: Element> Layer<K, T> {
    /// Bytes of scratch memory that [`Self::backward_gate_up`] uses for `m` tokens in dense matrices that begin at multiples of
    /// 16 bytes: none where one kernel computes all of it.
    pub fn backward_gate_up_bytes(&self, m: usize) -> usize {
        let (k, h) = (self.problem.hidden, self.problem.intermediate);
        let fused = self.operands.dense().ok().and_then(|dense| {
            let dense_rows = |cols| Tensor::new(0, cols);
            let saved = [dense_rows(h); 2];
            let (dy, h) = (dense_rows(k), Some(saved[0]));
            let io = BlockTensors { m, dy, saved, grads: saved, h, scale: None };
            self.dgated_kernel(&self.dgated_call(dense.down().ok()?, io, dense))
        });
        match fused {
            Some(_) => 0,
            None => part([m, padded::<T>(h), size_of::<T>()])
                .saturating_add(Lt::scratch_bytes(self.cuda.arch())),
        }
    }

    /// Enqueues the first half of a block's backward pass, for a caller that computes the products with gradients of gate and
    /// up itself: from ∂L/∂y, gate and up the gradients of gate and up, and h once more where it has a place, which ∂L/∂Wd
    /// needs. Gradients may not lie where gate and up do.
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
        h: Option<DeviceMatrixMut<'_, T>>,
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
        let written = [("gradient of the gate", &grads[0]), ("gradient of the up", &grads[1])];
        written.iter().try_for_each(|(what, to)| to.admit(what, shape, stream))?;
        h.iter().try_for_each(|h| h.admit("h", shape, stream))?;
        self.operands.admit(stream)?;
        let lt = self.cuda.lt()?;
        let io = BlockTensors {
            m,
            dy: tensor(&out_grad),
            saved: inputs.map(|m| tensor(&m)),
            grads: [&grads[0], &grads[1]].map(|m| tensor(&m.as_ref())),
            h: h.map(|h| tensor(&h.as_ref())),
            scale: None,
        };
        let fused = self.dgated_kernel(&self.dgated_call(down, io, dense));
        let dh = match fused {
            Some(_) => 0,
            None => part([m, padded::<T>(self.problem.intermediate), size_of::<T>()]),
        };
        let bytes = if fused.is_some() { 0 } else { dh + Lt::scratch_bytes(self.cuda.arch()) };
        self.cuda.with_workspace(stream, scratch.as_deref(), bytes, |work| {
            let dh_at = Tensor::new(work.ptr, padded::<T>(self.problem.intermediate));
            let (cuda, scratch) = (&self.cuda, work.ptr + dh as u64);
            let accumulate = Accumulate::Overwrite;
            let run =
                Run { layer: self, by: Multiply { cuda, stream, lt: &lt, scratch, accumulate } };
            // SAFETY: the views span memory of this device and were admitted; what is written is borrowed mutably or is a
            // part of the workspace of its own; the weights live as long as `self`.
            unsafe {
                match fused {
                    Some(kernel) => kernel.launch(stream, &self.dgated_call(down, io, dense)),
                    None => run.through_block(down, io, dh_at),
                }
            }
        })
    }

    /// How the weight of the down projection was given, or gate and up where there is none.
    pub(in crate::layers) fn down_lies(&self) -> Result<Orientation> {
        let down = self.operands.dense()?.down.as_ref();
        Ok(down.map_or(self.problem.layout.orientation, DownBuffer::given))
    }

    /// Refuses a gradient of the output of another shape, or whose rows overlap.
    pub(super) fn admit_out_grad(
        &self,
        out_grad: &DeviceMatrixRef<'_, T>,
        m: usize,
        stream: &Stream,
    ) -> Result<()> {
        out_grad.admit("gradient of the output", [m, self.out_features()], stream)?;
        expect_rows_apart("a gradient of the output", out_grad)
    }

    pub(super) fn dgated_call<'a>(
        &self,
        down: LinearWeights,
        io: BlockTensors,
        dense: &'a Dense<T>,
    ) -> DgatedCall<'a> {
        let BlockTensors { m, dy, saved, grads, h, scale } = io;
        DgatedCall {
            code: self.code(),
            formula: Formula::new(&self.problem.activation),
            m,
            out_grad: dy,
            down,
            inputs: saved,
            grads,
            h,
            scale,
            maps: &dense.down_maps,
        }
    }

    /// The kernel that computes gradients of gate and up in the product's epilogue, where one takes this call.
    pub(super) fn dgated_kernel(&self, call: &DgatedCall<'_>) -> Option<DgatedKernel> {
        let path = if let Asked::Path(path) = self.asked { path } else { None };
        differentiated(self.planner(), &self.problem.with_m(call.m), path, call)
    }
}

/// Refuses rows that overlap.
pub(super) fn expect_rows_apart<T: Element>(
    what: &str,
    matrix: &DeviceMatrixRef<'_, T>,
) -> Result<()> {
    let rows = matrix.rows();
    if rows <= 1 || matrix.row_stride() >= matrix.cols() {
        return Ok(());
    }
    let what = format!("{what} whose {rows} rows overlap");
    let why = "products read rows of their own; copy it to a dense matrix".into();
    Err(CudaError::Unsupported { what, why })
}
