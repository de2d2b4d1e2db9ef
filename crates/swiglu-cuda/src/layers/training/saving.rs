//! The forward pass that keeps gate and up.

use swiglu_core::{Element, Op, SavePolicy};

use super::kept::DeviceKeptMut;
use super::part;
use crate::device::error::Result;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::elementwise::Tensor;
use crate::layers::activation::tensor;
use crate::layers::layer::Layer;
use crate::layers::run::Saves;
use crate::layers::weights::padded;
use crate::plan::Algorithm;

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
        self.saving(stream, None, x, Some(out), kept.into())
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
        self.saving(stream, Some(scratch), x, Some(out), kept.into())
    }

    /// Enqueues the pre-activations of [`Self::forward_saving`] alone, to the same bits: what a backward pass begins with
    /// where nothing was kept. `scratch`: the caller's, of [`Self::training_bytes`] with [`SavePolicy::Recompute`].
    ///
    /// # Errors
    /// As [`Self::forward_saving_with`].
    pub fn pre_activations<'k>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        kept: impl Into<DeviceKeptMut<'k, T>>,
        scratch: Option<&mut DeviceScratch<'_>>,
    ) -> Result<()> {
        self.saving(stream, scratch.as_deref(), x, None, kept.into())
    }

    fn saving(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        x: DeviceMatrixRef<'_, T>,
        out: Option<DeviceMatrixMut<'_, T>>,
        kept: DeviceKeptMut<'_, T>,
    ) -> Result<()> {
        let (m, shape) = (x.rows(), [x.rows(), self.intermediate()]);
        self.operands.dense()?;
        self.expect_call(stream, &x, out.as_ref())?;
        kept.admit(shape, stream)?;
        if shape.contains(&0) {
            // Without features between, the result is the bias of the down projection.
            return out.map_or(Ok(()), |out| self.forward(stream, x, out));
        }
        let (kept, out) = (kept.tensors(), out.map(|out| tensor(&out.as_ref())));
        let beside = if kept.up.is_none() { self.up_bytes(m) } else { 0 };
        let h = if out.is_none() { self.unwanted_h_bytes(m) } else { 0 };
        let by = |algorithm: Algorithm| {
            let steps_use = self.bytes_saving(m, algorithm);
            self.cuda.with_workspace(stream, scratch, steps_use + beside + h, |work| {
                let behind = |bytes: usize| Tensor::new(work.ptr + bytes as u64, self.up_stride());
                let at = [kept.gate, kept.up.unwrap_or(behind(steps_use))];
                let saved = Some(Saves { at, alone: out.is_none() });
                let y = out.unwrap_or(behind(steps_use + beside));
                // SAFETY: the views span memory of this device; all but x were borrowed mutably by the caller; the weights
                // live as long as `self`, and the workspace has what the algorithm uses, behind it an up that is not kept, and
                // an h that is nobody's.
                unsafe { self.enqueue(stream, algorithm, x, y, saved, work) }
            })
        };
        let chosen = self.saving_algorithm(m);
        match by(chosen) {
            Err(why) if self.hands_over(chosen, &why) => by(self.choose_fused(m)),
            done => done,
        }
    }

    /// The algorithm that saves `m` tokens, as plans choose it.
    pub(super) fn saving_algorithm(&self, m: usize) -> Algorithm {
        let block = self.problem.op == Op::Mlp;
        let chosen = if block { self.step_by_step(m) } else { self.choose(m) };
        if chosen.check_saving().is_ok() { chosen } else { self.choose_fused(m) }
    }

    /// Elements from row to row of an up in scratch memory.
    pub(super) fn up_stride(&self) -> usize {
        padded::<T>(self.problem.intermediate)
    }

    /// Bytes of an up that is not kept. Kernels store both: a form that stores the gate alone would be one more of each to
    /// compile and to measure, and save no memory, of which the backward pass takes more from the same stream.
    pub(super) fn up_bytes(&self, m: usize) -> usize {
        part([m, self.up_stride(), size_of::<T>()])
    }

    /// Bytes of an h that kernels write beside gate and up and nobody wants. A block has room for one anyway.
    pub(super) fn unwanted_h_bytes(&self, m: usize) -> usize {
        if self.problem.op == Op::Mlp { 0 } else { self.up_bytes(m) }
    }

    /// Bytes of scratch memory that [`Self::forward_saving_with`] uses for `m` tokens where it keeps what the policy says;
    /// with [`SavePolicy::Recompute`], which keeps nothing, those of [`Self::forward_with`] and [`Self::pre_activations`].
    pub fn training_bytes(&self, m: usize, policy: SavePolicy) -> usize {
        let (least, beside) = match policy {
            SavePolicy::Save => (0, 0),
            SavePolicy::SaveGate => (0, self.up_bytes(m)),
            _ => (self.workspace_bytes(m), self.unwanted_h_bytes(m)),
        };
        let chosen = self.saving_algorithm(m);
        let fused = if self.may_hand_over(chosen) { self.choose_fused(m) } else { chosen };
        let saving = self.bytes_saving(m, chosen).max(self.bytes_saving(m, fused));
        least.max(saving.saturating_add(beside))
    }
}
