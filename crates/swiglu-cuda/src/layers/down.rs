//! The down projection in device memory.

use std::marker::PhantomData;
use std::sync::Arc;

use swiglu_core::{Element, Matrix, MatrixRef, Orientation};

use crate::device::error::Result;
use crate::device::lt::LinearWeights;
use crate::device::memory::{Allocation, DeviceBuffer, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::layers::weights::{ALIGNMENT, blocks, download, host_bias, padded};

/// The down projection. Packed it is always `[out, in]`: what the decode kernel streams serves cuBLASLt as well,
/// and so one copy is enough.
#[derive(Debug)]
pub(super) struct DownBuffer<T> {
    weights: LinearWeights,
    /// Of the weight that it was made from.
    given: Orientation,
    element: PhantomData<T>,
}

impl<T: Element> DownBuffer<T> {
    pub(super) fn new(
        allocation: &Arc<Allocation>,
        stream: &Stream,
        weight: MatrixRef<'_, T>,
        orientation: Orientation,
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        // The same exchange of rows and columns, or none, leads back.
        let [out_features, in_features] = orientation.shape(weight.rows(), weight.cols());
        let row_stride = padded::<T>(in_features);
        let mut packed = Matrix::<T>::zeros(out_features, row_stride)?.into_vec();
        match orientation {
            Orientation::OutIn => {
                for (i, row) in packed.chunks_exact_mut(row_stride.max(1)).enumerate() {
                    row[..in_features].copy_from_slice(weight.row(i));
                }
            }
            Orientation::InOut => {
                for inputs in blocks(in_features) {
                    for out in 0..out_features {
                        for i in inputs.clone() {
                            packed[out * row_stride + i] = weight.row(i)[out];
                        }
                    }
                }
            }
        }
        let rounded = |b: &[f32]| b.iter().map(|&b| T::from_f32(b)).collect::<Vec<T>>();
        // The allocation has the memory, whoever holds it.
        let bias =
            bias.map(|b| DeviceBuffer::together(allocation, stream, &rounded(b))).transpose()?;
        let weights = LinearWeights {
            ptr: DeviceBuffer::together(allocation, stream, &packed)?.device_ptr(),
            orientation: Orientation::OutIn,
            in_features,
            out_features,
            row_stride,
            bias: bias.map(|bias| bias.device_ptr()),
        };
        Ok(Self { weights, given: orientation, element: PhantomData })
    }

    /// How the weight was given: its gradient lies so.
    pub(super) fn given(&self) -> Orientation {
        self.given
    }

    /// A weight, and its bias, that stay where they are.
    pub(super) fn lent(
        weight: DeviceMatrixRef<'_, T>,
        orientation: Orientation,
        bias: Option<DeviceMatrixRef<'_, T>>,
    ) -> Self {
        let [out_features, in_features] = orientation.shape(weight.rows(), weight.cols());
        let row_stride = if weight.rows() > 1 { weight.row_stride() } else { weight.cols() };
        let (ptr, bias) = (weight.device_ptr(), bias.map(|bias| bias.device_ptr()));
        let weights =
            LinearWeights { ptr, orientation, in_features, out_features, row_stride, bias };
        Self { weights, given: orientation, element: PhantomData }
    }

    /// As [`GateUpBuffer::is_whole`](super::weights::GateUpBuffer::is_whole).
    pub(super) fn is_whole(&self) -> bool {
        let w = &self.weights;
        let bytes = [w.row_stride, w.in_features].map(|n| (n * size_of::<T>()) as u64);
        w.orientation == Orientation::OutIn
            && [w.ptr, bytes[0], bytes[1]].into_iter().all(|n| n.is_multiple_of(ALIGNMENT as u64))
    }

    pub(super) fn linear(&self) -> LinearWeights {
        self.weights
    }

    /// The weight and its bias on the host.
    pub(super) fn to_host(&self, stream: &Stream) -> Result<HostDown<T>> {
        let w = &self.weights;
        let shape = w.orientation.shape(w.out_features, w.in_features);
        // SAFETY: the weight lives as long as `self`.
        let weight = unsafe { download(stream, w.ptr, shape, w.row_stride) }?;
        let bias = host_bias::<T>(stream, w.bias.unwrap_or(0), w.out_features)?;
        Ok(HostDown { weight, bias, orientation: w.orientation, given: self.given })
    }
}

/// The down projection on the host.
pub(super) struct HostDown<T> {
    weight: Matrix<T>,
    bias: Option<Vec<f32>>,
    orientation: Orientation,
    /// Of the weight that it was made from.
    given: Orientation,
}

impl<T: Element> HostDown<T> {
    pub(super) fn packed(
        &self,
        allocation: &Arc<Allocation>,
        stream: &Stream,
    ) -> Result<DownBuffer<T>> {
        let (weight, bias) = (self.weight.view(), self.bias.as_deref());
        let packed = DownBuffer::new(allocation, stream, weight, self.orientation, bias)?;
        Ok(DownBuffer { given: self.given, ..packed })
    }
}
