//! A forward pass that keeps what a backward pass needs.

use swiglu_core::Element;

use super::gated::GatedLinear;
use crate::device::error::Result;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::Stored;
use crate::layers::activation::tensor;
use crate::plan::Steps;

impl<T: Element> GatedLinear<T> {
    /// As [`Self::forward`], and writes the pre-activations x·Wg + bg and x·Wu + bu, each `[M, H]`,
    /// as values of T: what [`crate::Cuda::activation_backward`] takes. h is rounded as without;
    /// with [`swiglu_core::Rounding::Fused`] it follows from the pre-activations before their
    /// rounding, in 16-bit types always by a fused kernel. Before a capture into a graph, make the same
    /// call once.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_saving(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        mut out: DeviceMatrixMut<'_, T>,
        gate: DeviceMatrixMut<'_, T>,
        up: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let (m, shape) = (x.rows(), [x.rows(), self.intermediate()]);
        self.expect_call(stream, &x, &out)?;
        for (what, saved) in [("gate", &gate), ("up", &up)] {
            saved.admit(what, shape, stream)?;
        }
        if shape.contains(&0) {
            return Ok(());
        }
        let saved = [&gate, &up].map(|m| tensor(&m.as_ref()));
        let mut by = |steps: Steps| {
            let bytes = self.bytes_saving(m, steps);
            self.cuda().with_workspace(stream, None, bytes, |work| {
                let out = out.reborrow();
                // SAFETY: the views span memory of this device; all but x are borrowed mutably; the weights live as
                // long as `self`, and the workspace has what the steps use.
                unsafe { self.enqueue(stream, steps, x, out, Some(saved), work) }
            })
        };
        match self.choose(m) {
            // Nothing else writes them rounded and h from what they were before.
            steps if steps.stored() == Some(Stored::Sums) => by(self.choose_fused(m)),
            steps => match by(steps) {
                Err(why) if self.hands_over(steps, &why) => by(self.choose_fused(m)),
                done => done,
            },
        }
    }
}
