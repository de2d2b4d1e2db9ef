//! The forward pass that keeps gate and up.

use swiglu_core::{Element, Op};

use crate::device::error::Result;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::elementwise::Stored;
use crate::layers::activation::tensor;
use crate::layers::layer::Layer;
use crate::plan::Steps;

impl<K, T: Element> Layer<K, T> {
    /// As [`Self::forward`], and writes the pre-activations x·Wg + bg and x·Wu + bu, each `[M, H]`,
    /// as values of T: what [`crate::Cuda::activation_backward`] and [`Self::backward`] take. h is rounded as without;
    /// with [`swiglu_core::Rounding::Fused`] it follows from the pre-activations before their
    /// rounding, in 16-bit types always by a fused kernel. Before a capture into a graph, make the same
    /// call once.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`crate::CudaError::Unsupported`] for quantised weights.
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
}
