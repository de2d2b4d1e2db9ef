//! The gradient of one weight, for a caller that computes the rest of a backward pass itself.

use swiglu_core::{Accumulate, Element, Orientation};

use super::gate_up::expect_rows_apart;
use super::products::{Factor, Multiply};
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::lt::Lt;
use crate::device::memory::DeviceMatrixRef;
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::layers::activation::tensor;
use crate::layers::gradients::DeviceGradientMut;

impl Cuda {
    /// Bytes of scratch memory of [`Self::weight_gradient`].
    pub fn weight_gradient_bytes(&self) -> usize {
        Lt::scratch_bytes(self.arch())
    }

    /// Enqueues the gradient of the weights `[N, K]` of a linear map over M tokens, from that of its results, `[M, N]`, and
    /// its inputs, `[M, K]`: gradsᵀ·inputs, summed in f32, to its place or onto what that holds. Without `scratch` the
    /// stream's is used. It may not lie where a factor does.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`swiglu_core::Error::OutOfRange`] for too little scratch memory;
    /// [`crate::CudaError::WrongDevice`]; [`crate::CudaError::Unsupported`] for factors whose rows overlap;
    /// [`crate::CudaError::LibraryMissing`] without cuBLASLt; what that or the driver reports.
    pub fn weight_gradient<T: Element>(
        &self,
        stream: &Stream,
        grads: DeviceMatrixRef<'_, T>,
        inputs: DeviceMatrixRef<'_, T>,
        into: DeviceGradientMut<'_, T>,
        accumulate: Accumulate,
        scratch: Option<&mut DeviceScratch<'_>>,
    ) -> Result<()> {
        let ([m, features], k) = (grads.shape(), inputs.cols());
        self.expect_stream(stream)?;
        grads.admit("gradient of the results", [m, features], stream)?;
        inputs.admit("inputs", [m, k], stream)?;
        expect_rows_apart("a gradient of the results", &grads)?;
        expect_rows_apart("inputs", &inputs)?;
        into.admit("gradient of the weights", [features, k], stream)?;
        let factor = |at, shape| Factor { at, shape };
        let (grads, inputs, to) = (tensor(&grads), tensor(&inputs), into.place());
        let lt = self.lt()?;
        self.with_workspace(stream, scratch.as_deref(), self.weight_gradient_bytes(), |work| {
            let by = Multiply { cuda: self, stream, lt: &lt, scratch: work.ptr, accumulate };
            let (grads, inputs) = (factor(grads, [m, features]), factor(inputs, [m, k]));
            // SAFETY: the views span memory of this device and were admitted; what is written is borrowed mutably; the
            // workspace is as large as the product asks.
            unsafe { by.weight::<T>(inputs, grads, Orientation::OutIn, to) }
        })
    }
}
