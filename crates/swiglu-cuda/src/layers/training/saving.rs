//! The forward pass that keeps gate and up.

use swiglu_core::{Element, SavePolicy};

use super::kept::DeviceKeptMut;
use super::part;
use crate::device::error::Result;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::elementwise::Tensor;
use crate::layers::layer::Layer;
use crate::layers::weights::padded;
use crate::plan::{Among, Steps, saving};

impl<K, T: Element> Layer<K, T> {
    /// As [`Self::forward`], and writes the pre-activations x·Wg + bg and x·Wu + bu, each `[M, H]`,
    /// as values of T, or the first alone: what [`crate::Cuda::activation_backward`] and [`Self::backward`] take. h is rounded
    /// as without; with [`swiglu_core::Rounding::Fused`] it follows from the pre-activations before their
    /// rounding, in 16-bit types always by a fused kernel. Before a capture into a graph, make the same
    /// call once.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`crate::CudaError::Unsupported`] for quantised weights.
    pub fn forward_saving<'k>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        kept: impl Into<DeviceKeptMut<'k, T>>,
    ) -> Result<()> {
        self.saving(stream, None, x, out, kept.into())
    }

    /// The same in scratch memory of the caller, of at least [`Self::training_bytes`].
    ///
    /// # Errors
    /// As [`Self::forward_saving`]; [`swiglu_core::Error::OutOfRange`] for too little scratch memory.
    pub fn forward_saving_with<'k>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        kept: impl Into<DeviceKeptMut<'k, T>>,
        scratch: &mut DeviceScratch<'_>,
    ) -> Result<()> {
        self.saving(stream, Some(scratch), x, out, kept.into())
    }

    fn saving(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        x: DeviceMatrixRef<'_, T>,
        mut out: DeviceMatrixMut<'_, T>,
        kept: DeviceKeptMut<'_, T>,
    ) -> Result<()> {
        let (m, shape) = (x.rows(), [x.rows(), self.intermediate()]);
        self.operands.dense()?;
        self.expect_call(stream, &x, &out)?;
        kept.admit(shape, stream)?;
        if shape.contains(&0) {
            // Without features between, the result is the bias of the down projection.
            return self.forward(stream, x, out);
        }
        let kept = kept.tensors();
        let mut by = |steps: Steps| {
            let steps_use = self.bytes_saving(m, steps);
            let bytes = steps_use + if kept.up.is_none() { self.up_bytes(m) } else { 0 };
            self.cuda.with_workspace(stream, scratch, bytes, |work| {
                let out = out.reborrow();
                let behind = Tensor::new(work.ptr + steps_use as u64, self.up_stride());
                let saved = Some([kept.gate, kept.up.unwrap_or(behind)]);
                // SAFETY: the views span memory of this device; all but x are borrowed mutably; the weights live as
                // long as `self`, and the workspace has what the steps use, and behind it an up that is not kept.
                unsafe { self.enqueue(stream, steps, x, out, saved, work) }
            })
        };
        let chosen = self.saving_steps(m);
        match by(chosen) {
            Err(why) if self.hands_over(chosen, &why) => by(self.choose_fused(m)),
            done => done,
        }
    }

    /// The steps that save `m` tokens.
    pub(super) fn saving_steps(&self, m: usize) -> Steps {
        let chosen = |among| match among {
            Among::All => (self.choose(m), ()),
            Among::StepByStep => (self.step_by_step(m), ()),
            Among::Fused => (self.choose_fused(m), ()),
        };
        saving(self.problem.op, self.problem.hidden, chosen).0
    }

    /// Elements from row to row of an up in scratch memory.
    pub(super) fn up_stride(&self) -> usize {
        padded::<T>(self.problem.intermediate)
    }

    /// Bytes of an up that is not kept. Kernels store both: a form that stores the gate alone would be one more of each to
    /// compile and to measure, and save no memory, of which the backward pass takes more from the same stream.
    pub(super) fn up_bytes(&self, m: usize) -> usize {
        part(m * self.up_stride() * size_of::<T>())
    }

    /// Bytes of scratch memory that [`Self::forward_saving_with`] uses for `m` tokens where it keeps what the policy says;
    /// with [`SavePolicy::Recompute`], which keeps nothing, those of [`Self::forward_with`].
    pub fn training_bytes(&self, m: usize, policy: SavePolicy) -> usize {
        let beside = match policy {
            SavePolicy::Save => 0,
            SavePolicy::SaveGate => self.up_bytes(m),
            _ => return self.workspace_bytes(m),
        };
        let chosen = self.saving_steps(m);
        let fused = if self.may_hand_over(chosen) { self.choose_fused(m) } else { chosen };
        self.bytes_saving(m, chosen).max(self.bytes_saving(m, fused)) + beside
    }
}
