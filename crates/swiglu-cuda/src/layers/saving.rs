//! A forward pass that keeps what a backward pass needs.

use swiglu_core::Element;

use super::gated::GatedLinear;
use crate::device::error::Result;
use crate::device::lt::Lt;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::{self, Extent, GateUp, Stored, Tensor};
use crate::kernels::gate::{Formula, GateCode};
use crate::layers::activation::tensor;
use crate::plan::Choice;

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
        out: DeviceMatrixMut<'_, T>,
        mut gate: DeviceMatrixMut<'_, T>,
        mut up: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let shape = [x.rows(), self.intermediate()];
        self.expect_call(stream, &x, &out, self.intermediate())?;
        for (what, saved) in [("gate", &gate), ("up", &up)] {
            saved.admit(what, shape, stream)?;
        }
        if shape.contains(&0) {
            return Ok(());
        }
        // Nothing else writes them rounded and h from what they were before.
        let choice = match self.choose(x.rows()) {
            Choice::Unfused(Stored::Sums) => self.choose_fused(x.rows()),
            other => other,
        };
        let (out, saved) = (tensor(&out.as_ref()), [&gate, &up].map(|m| tensor(&m.as_ref())));
        // SAFETY: the views span memory of this device; all but x are borrowed mutably. A fused kernel uses no
        // workspace.
        let fused = |choice| unsafe { self.enqueue(stream, choice, x, out, Some(saved), 0) };
        let (Choice::Unfused(stored), Some(lt)) = (choice, &self.lt) else {
            return fused(choice);
        };
        match self.save_unfused(stream, lt, stored, x, out, [gate.reborrow(), up.reborrow()]) {
            Err(why) if self.hands_over(choice, &why) => fused(self.choose_fused(x.rows())),
            done => done,
        }
    }

    fn save_unfused(
        &self,
        stream: &Stream,
        lt: &Lt,
        stored: Stored,
        x: DeviceMatrixRef<'_, T>,
        out: Tensor,
        [gate, up]: [DeviceMatrixMut<'_, T>; 2],
    ) -> Result<()> {
        let code = GateCode::elementwise(&self.activation(), self.numerics(), T::DTYPE);
        let formula = Formula::new(&self.activation());
        let extent = Extent { rows: x.rows(), cols: self.intermediate(), code, formula };
        let saved = [&gate, &up].map(|m| tensor(&m.as_ref()));
        let [gate_weights, up_weights] = self.weights.halves();
        let bytes = Lt::scratch_bytes(self.cuda().arch());
        self.cuda().with_workspace(stream, None, bytes, |work| {
            let scratch = work.ptr;
            // SAFETY: the views span memory of this device, all but x borrowed mutably; the weights live as long
            // as `self`, the workspace has what cuBLASLt uses, and the stream orders the three steps.
            unsafe {
                lt.launch(stream, x, &gate_weights, gate, scratch)?;
                lt.launch(stream, x, &up_weights, up, scratch)?;
                let [gate, up] = saved;
                elementwise::forward(stream, extent, GateUp { gate, up, group: 0, stored }, out)
            }
        })
    }
}
