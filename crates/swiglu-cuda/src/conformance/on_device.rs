//! What of a case lies on a device: matrices as they lie on the host, gradients, and the streams they are used on.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use swiglu_core::{Element, GradientMut, MatrixMut, MatrixRef};

use crate::DeviceGradientMut;
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result as CudaResult};
use crate::device::memory::{DeviceBuffer, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;

/// The gradient of a weight on the device.
pub(super) enum Gradient<T> {
    Element(OnDevice<T>),
    F32(OnDevice<f32>),
}

impl<T: Element> Gradient<T> {
    pub(super) fn new(stream: &Stream, host: &GradientMut<'_, T>) -> CudaResult<Self> {
        match host {
            GradientMut::Element(host) => OnDevice::new(stream, host.as_ref()).map(Self::Element),
            GradientMut::F32(host) => OnDevice::new(stream, host.as_ref()).map(Self::F32),
            other => Err(unknown(other)),
        }
    }

    pub(super) fn copy_to(&self, host: &mut GradientMut<'_, T>) -> CudaResult<()> {
        match (self, host) {
            (Self::Element(from), GradientMut::Element(to)) => from.copy_to(to),
            (Self::F32(from), GradientMut::F32(to)) => from.copy_to(to),
            (_, other) => Err(unknown(other)),
        }
    }
}

pub(super) fn unknown<T: Element>(place: &GradientMut<'_, T>) -> CudaError {
    CudaError::Unsupported { what: format!("{place:?}"), why: "no such place is known".into() }
}

pub(super) fn place<T: Element>(
    gradient: &mut CudaResult<Option<Gradient<T>>>,
) -> CudaResult<Option<DeviceGradientMut<'_, T>>> {
    match gradient {
        Err(error) => Err(error.clone()),
        Ok(None) => Ok(None),
        Ok(Some(Gradient::Element(m))) => Ok(Some(DeviceGradientMut::Element(m.view_mut()?))),
        Ok(Some(Gradient::F32(m))) => Ok(Some(DeviceGradientMut::F32(m.view_mut()?))),
    }
}

/// As many streams as cases were ever computed at the same time, each used by many of them. A call has the
/// workspace of its stream to itself, also while it compiles kernels: threads with one stream would do so one after
/// the other.
#[derive(Debug, Clone, Default)]
pub(super) struct Streams(Arc<Mutex<Vec<Stream>>>);

/// A stream of [`Streams`], which is given back when this is dropped.
pub(super) struct Taken<'a> {
    idle: &'a Streams,
    stream: Stream,
}

impl Streams {
    fn idle(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take(&self, cuda: &Cuda) -> CudaResult<Taken<'_>> {
        let idle = self.idle().pop();
        let stream = idle.map_or_else(|| cuda.new_stream(), Ok)?;
        Ok(Taken { idle: self, stream })
    }
}

impl Deref for Taken<'_> {
    type Target = Stream;
    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.idle.idle().push(self.stream.clone());
    }
}

/// Elements before a matrix: none in the common case, else one or three, which is 2 to 12 bytes.
pub(super) fn lead<T>(matrix: &MatrixRef<'_, T>) -> usize {
    [0, 0, 0, 1, 3][(matrix.rows() * 7 + matrix.cols() * 3 + matrix.row_stride()) % 5]
}

/// A matrix on the device as it lies on the host, with its stride and with what is between its rows.
/// It starts some elements into its allocation: not every caller's matrix is aligned.
pub(super) struct OnDevice<T> {
    pub(super) buffer: DeviceBuffer<T>,
    lead: usize,
    pub(super) rows: usize,
    cols: usize,
    stride: usize,
}

impl<T: Element> OnDevice<T> {
    pub(super) fn new(stream: &Stream, host: MatrixRef<'_, T>) -> CudaResult<Self> {
        Self::at(stream, host, lead(&host))
    }

    pub(super) fn at(stream: &Stream, host: MatrixRef<'_, T>, lead: usize) -> CudaResult<Self> {
        let (rows, cols, stride) = (host.rows(), host.cols(), host.row_stride());
        let mut values = vec![T::from_f32(f32::NAN); lead];
        values.extend_from_slice(host.as_slice());
        let buffer = DeviceBuffer::from_host(stream, &values)?;
        Ok(Self { buffer, lead, rows, cols, stride })
    }

    pub(super) fn address(&self) -> u64 {
        self.buffer.device_ptr() + (self.lead * size_of::<T>()) as u64
    }

    pub(super) fn view(&self) -> CudaResult<DeviceMatrixRef<'_, T>> {
        let cuda = self.buffer.stream().cuda();
        // SAFETY: the matrix lies in the buffer, which outlives the view.
        unsafe {
            DeviceMatrixRef::from_raw(cuda, self.address(), self.rows, self.cols, self.stride)
        }
    }

    pub(super) fn view_mut(&mut self) -> CudaResult<DeviceMatrixMut<'_, T>> {
        let cuda = self.buffer.stream().cuda();
        // SAFETY: as in `view`, and the buffer is borrowed mutably.
        unsafe {
            DeviceMatrixMut::from_raw(cuda, self.address(), self.rows, self.cols, self.stride)
        }
    }

    /// Everything, also what is between the rows.
    pub(super) fn copy_to(&self, host: &mut MatrixMut<'_, T>) -> CudaResult<()> {
        host.as_mut_slice().copy_from_slice(&self.buffer.to_host()?[self.lead..]);
        Ok(())
    }
}
