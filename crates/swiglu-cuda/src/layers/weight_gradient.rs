//! The gradient of one weight, for a caller that computes the rest of a backward pass itself.

use swiglu_core::{Accumulate, Element, Orientation};

use super::gradients::DeviceGradientMut;
use crate::device::context::Cuda;
use crate::device::error::Result;
use crate::device::lt::{LinearWeights, Lt, Product};
use crate::device::memory::DeviceMatrixRef;
use crate::device::stream::Stream;
use crate::device::workspace::DeviceScratch;
use crate::kernels::fill_rows::fill_rows;

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
        into.admit("gradient of the weights", [features, k], stream)?;
        if features == 0 || k == 0 {
            return Ok(());
        }
        if m == 0 {
            let (place, shape) = (into.place(), [features, k]);
            return match accumulate {
                Accumulate::Add => Ok(()),
                // SAFETY: the view spans memory of this device, which is borrowed mutably.
                _ => unsafe { fill_rows(stream, place.dtype, place.at, shape, None) },
            };
        }
        let factor = LinearWeights {
            ptr: inputs.device_ptr(),
            orientation: Orientation::InOut,
            in_features: m,
            out_features: k,
            row_stride: inputs.row_stride(),
            bias: None,
        };
        let accumulate = accumulate == Accumulate::Add;
        let product = Product { transposed: true, accumulate, fixed: false };
        let lt = self.lt()?;
        self.with_workspace(stream, scratch.as_deref(), self.weight_gradient_bytes(), |work| {
            // SAFETY: the views span memory of this device and were admitted; what is written is borrowed mutably; the
            // workspace is as large as the product asks.
            unsafe {
                match into {
                    DeviceGradientMut::Element(to) => {
                        lt.product(stream, grads, &factor, to, product, work.ptr)
                    }
                    DeviceGradientMut::F32(to) => {
                        lt.product(stream, grads, &factor, to, product, work.ptr)
                    }
                }
            }
        })
    }
}
