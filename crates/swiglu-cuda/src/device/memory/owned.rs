//! A matrix in device memory of its own.

use swiglu_core::{Matrix, MatrixRef};

use super::view::{View, span};
use super::{DeviceBuffer, DeviceData, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::error::Result;
use crate::device::stream::Stream;

/// An owned dense `[rows, cols]` matrix in device memory.
#[derive(Debug)]
pub struct DeviceMatrix<T> {
    buffer: DeviceBuffer<T>,
    rows: usize,
    cols: usize,
}

impl<T: DeviceData> DeviceMatrix<T> {
    /// A matrix with arbitrary contents.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`](crate::CudaError::OutOfMemory), [`CudaError::Capture`](crate::CudaError::Capture),
    /// [`Error::TooLarge`](swiglu_core::Error::TooLarge).
    pub fn new(stream: &Stream, rows: usize, cols: usize) -> Result<Self> {
        span::<T>("matrix", rows, cols, cols)?;
        Ok(Self { buffer: DeviceBuffer::new(stream, rows * cols)?, rows, cols })
    }

    /// A matrix of zeros.
    ///
    /// # Errors
    /// As [`DeviceMatrix::new`].
    pub fn zeros(stream: &Stream, rows: usize, cols: usize) -> Result<Self> {
        let mut matrix = Self::new(stream, rows, cols)?;
        matrix.buffer.poison(0)?;
        Ok(matrix)
    }

    /// A dense copy of `source`. Waits for the stream.
    ///
    /// # Errors
    /// As [`DeviceMatrix::new`].
    pub fn from_host(stream: &Stream, source: MatrixRef<'_, T>) -> Result<Self> {
        let mut matrix = Self::new(stream, source.rows(), source.cols())?;
        matrix.view_mut().upload(stream, source)?;
        Ok(matrix)
    }

    /// A copy on the host. Waits for the matrix's stream.
    ///
    /// # Errors
    /// As [`DeviceMatrixRef::to_host`].
    pub fn to_host(&self) -> Result<Matrix<T>>
    where
        T: Default,
    {
        self.view().to_host(self.buffer.stream())
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }
    /// The memory behind it.
    pub fn buffer(&self) -> &DeviceBuffer<T> {
        &self.buffer
    }
    /// The memory behind it.
    pub fn buffer_mut(&mut self) -> &mut DeviceBuffer<T> {
        &mut self.buffer
    }

    fn whole(&self) -> View<'_> {
        View {
            ptr: self.buffer.device_ptr(),
            rows: self.rows,
            cols: self.cols,
            row_stride: self.cols,
            ordinal: self.buffer.stream().cuda().ordinal(),
            memory: Some(self.buffer.allocation()),
        }
    }

    /// A shared view of all of it.
    pub fn view(&self) -> DeviceMatrixRef<'_, T> {
        DeviceMatrixRef::over(self.whole())
    }

    /// A mutable view of all of it.
    pub fn view_mut(&mut self) -> DeviceMatrixMut<'_, T> {
        DeviceMatrixMut::over(self.whole())
    }
}
