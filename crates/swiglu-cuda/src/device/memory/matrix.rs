//! Borrowed matrices in device memory, ours and foreign.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use swiglu_core::{Error, Matrix, MatrixMut, MatrixRef};

use super::copy::{self, Direction, Rows};
use super::view::View;
use super::{Access, Allocation, DeviceBuffer, DeviceData};
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::stream::Stream;

macro_rules! view_accessors {
    ($T:ty) => {
        /// Rows.
        pub fn rows(&self) -> usize {
            self.view.rows
        }
        /// Columns.
        pub fn cols(&self) -> usize {
            self.view.cols
        }
        /// Elements between the starts of two rows.
        pub fn row_stride(&self) -> usize {
            self.view.row_stride
        }
        /// `[rows, cols]`.
        pub fn shape(&self) -> [usize; 2] {
            [self.view.rows, self.view.cols]
        }
        /// The address of the first element.
        pub fn device_ptr(&self) -> u64 {
            self.view.ptr
        }
        /// Number of the device that the memory belongs to.
        pub fn ordinal(&self) -> usize {
            self.view.ordinal
        }
        /// Addresses from the first byte of the first row to the end of the last one.
        pub fn byte_range(&self) -> Range<u64> {
            self.view.byte_range::<$T>()
        }
        /// Refuses a shape other than `expected`, naming the argument.
        ///
        /// # Errors
        /// [`Error::Shape`].
        pub fn expect_shape(&self, what: &str, expected: [usize; 2]) -> Result<()> {
            self.view.expect_shape(what, expected)
        }
        /// Refuses memory of another device, naming the argument.
        ///
        /// # Errors
        /// [`CudaError::WrongDevice`].
        pub fn expect_device(&self, what: &str, cuda: &Cuda) -> Result<()> {
            self.view.expect_device(what, cuda)
        }
    };
}

/// A borrowed `[rows, cols]` matrix in device memory; rows are `row_stride` elements apart.
#[derive(Clone, Copy)]
pub struct DeviceMatrixRef<'a, T> {
    view: View<'a>,
    memory: PhantomData<&'a T>,
}

impl<'a, T: DeviceData> DeviceMatrixRef<'a, T> {
    /// A dense matrix over a whole buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] if the buffer does not have exactly `rows · cols` elements.
    pub fn new(buffer: &'a DeviceBuffer<T>, rows: usize, cols: usize) -> Result<Self> {
        expect_elements(buffer.len(), rows, cols)?;
        Self::with_stride(buffer, rows, cols, cols)
    }

    /// A matrix whose rows start `row_stride` elements apart. Any stride is accepted that stays
    /// inside the buffer, also one smaller than `cols`.
    ///
    /// # Errors
    /// [`Error::BufferTooShort`], [`Error::TooLarge`].
    pub fn with_stride(
        buffer: &'a DeviceBuffer<T>,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self> {
        Ok(Self::over(View::in_buffer("matrix", buffer, [rows, cols, row_stride])?))
    }

    /// A matrix in memory that someone else allocated, for example a PyTorch tensor's
    /// `data_ptr()`. The driver is asked whose memory it is and how far it reaches.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`] for host memory and other devices,
    /// [`CudaError::OutsideAllocation`], [`CudaError::Misaligned`], [`Error::TooLarge`].
    ///
    /// # Safety
    /// The memory stays allocated for `'a` and until the work enqueued with the view is done, and
    /// holds elements of type `T`.
    pub unsafe fn from_raw(
        cuda: &Cuda,
        ptr: u64,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self> {
        Ok(Self::over(View::foreign::<T>("matrix", cuda, ptr, [rows, cols, row_stride])?))
    }

    /// As [`Self::from_raw`], without asking the driver whose memory it is: for callers that know.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`], [`Error::TooLarge`].
    ///
    /// # Safety
    /// As [`Self::from_raw`], and the memory is `cuda`'s and reaches to the end of the last row.
    pub unsafe fn from_raw_trusted(
        cuda: &Cuda,
        ptr: u64,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self> {
        Ok(Self::over(View::trusted::<T>("matrix", cuda, ptr, [rows, cols, row_stride])?))
    }

    pub(super) fn over(view: View<'a>) -> Self {
        Self { view, memory: PhantomData }
    }

    view_accessors!(T);

    /// What the matrix lies in, if that is ours.
    pub(crate) fn allocation(&self) -> Option<&'a Arc<Allocation>> {
        self.view.memory
    }

    /// Lets work enqueued on `stream` next read the matrix, behind what other streams write to it; or refuses another
    /// shape or device, naming the argument.
    pub(crate) fn admit(&self, what: &str, shape: [usize; 2], stream: &Stream) -> Result<()> {
        self.view.admit(what, shape, stream, Access::Read)
    }

    /// Rows `range`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix.
    pub fn rows_range(&self, range: Range<usize>) -> Result<Self> {
        Ok(Self::over(self.view.part::<T>("row range", range, true)?))
    }

    /// Columns `range` of every row, without copying.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix.
    pub fn cols_range(&self, range: Range<usize>) -> Result<Self> {
        Ok(Self::over(self.view.part::<T>("column range", range, false)?))
    }

    /// Copies the matrix into `target`, whose gaps between rows stay as they are. Waits for the
    /// stream.
    ///
    /// # Errors
    /// [`Error::Shape`], [`CudaError::WrongDevice`], [`CudaError::Capture`].
    pub fn download(&self, stream: &Stream, mut target: MatrixMut<'_, T>) -> Result<()> {
        self.admit("matrix to download", self.shape(), stream)?;
        target.expect_shape("target of a download", self.shape())?;
        let copy = Rows {
            direction: Direction::ToHost,
            device: self.view.ptr,
            device_pitch: self.view.row_stride.saturating_mul(size_of::<T>()),
            host_pitch: target.row_stride().saturating_mul(size_of::<T>()),
            host: target.as_mut_slice().as_mut_ptr().cast(),
            width: self.view.cols * size_of::<T>(),
            rows: self.view.rows,
        };
        // SAFETY: both views were checked to span their rows when they were made; the host's is
        // borrowed mutably, and its rows do not overlap.
        unsafe { copy::rows(stream, &copy) }
    }

    /// A copy on the host. Waits for the stream.
    ///
    /// # Errors
    /// As [`Self::download`]; [`Error::OutOfMemory`] without host memory for it.
    pub fn to_host(&self, stream: &Stream) -> Result<Matrix<T>>
    where
        T: Default,
    {
        let [rows, cols] = self.shape();
        let mut values = Matrix::room(rows, cols)?;
        values.resize(rows * cols, T::default());
        let mut matrix = Matrix::from_vec(values, rows, cols)?;
        self.download(stream, matrix.view_mut())?;
        Ok(matrix)
    }
}

/// A mutably borrowed `[rows, cols]` matrix in device memory; rows do not overlap.
pub struct DeviceMatrixMut<'a, T> {
    view: View<'a>,
    memory: PhantomData<&'a mut T>,
}

impl<'a, T: DeviceData> DeviceMatrixMut<'a, T> {
    /// A dense matrix over a whole buffer.
    ///
    /// # Errors
    /// [`Error::Shape`] if the buffer does not have exactly `rows · cols` elements.
    pub fn new(buffer: &'a mut DeviceBuffer<T>, rows: usize, cols: usize) -> Result<Self> {
        expect_elements(buffer.len(), rows, cols)?;
        Self::with_stride(buffer, rows, cols, cols)
    }

    /// A matrix whose rows start `row_stride` elements apart.
    ///
    /// # Errors
    /// [`Error::BufferTooShort`], [`Error::TooLarge`]; [`Error::OverlappingRows`].
    pub fn with_stride(
        buffer: &'a mut DeviceBuffer<T>,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self> {
        let view = View::in_buffer("output", buffer, [rows, cols, row_stride])?;
        Ok(Self::over(view.refuse_overlapping_rows("output")?))
    }

    /// A matrix in memory that someone else allocated; see [`DeviceMatrixRef::from_raw`].
    ///
    /// # Errors
    /// As [`DeviceMatrixRef::from_raw`]; [`Error::OverlappingRows`].
    ///
    /// # Safety
    /// As [`DeviceMatrixRef::from_raw`], and nothing else uses the memory for as long.
    pub unsafe fn from_raw(
        cuda: &Cuda,
        ptr: u64,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self> {
        let view = View::foreign::<T>("output", cuda, ptr, [rows, cols, row_stride])?;
        Ok(Self::over(view.refuse_overlapping_rows("output")?))
    }

    /// As [`Self::from_raw`], without asking the driver whose memory it is: for callers that know.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`], [`Error::TooLarge`]; [`Error::OverlappingRows`].
    ///
    /// # Safety
    /// As [`Self::from_raw`], and the memory is `cuda`'s and reaches to the end of the last row.
    pub unsafe fn from_raw_trusted(
        cuda: &Cuda,
        ptr: u64,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self> {
        let view = View::trusted::<T>("output", cuda, ptr, [rows, cols, row_stride])?;
        Ok(Self::over(view.refuse_overlapping_rows("output")?))
    }

    pub(super) fn over(view: View<'a>) -> Self {
        Self { view, memory: PhantomData }
    }

    view_accessors!(T);

    /// Lets work enqueued on `stream` next write the matrix, behind what other streams do with it; or refuses another
    /// shape or device, naming the argument.
    pub(crate) fn admit(&self, what: &str, shape: [usize; 2], stream: &Stream) -> Result<()> {
        self.view.admit(what, shape, stream, Access::Write)
    }

    /// Rows `range`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix.
    pub fn rows_range(self, range: Range<usize>) -> Result<Self> {
        Ok(Self::over(self.view.part::<T>("row range", range, true)?))
    }

    /// Columns `range` of every row.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix.
    pub fn cols_range(self, range: Range<usize>) -> Result<Self> {
        Ok(Self::over(self.view.part::<T>("column range", range, false)?))
    }

    /// The first `row` rows, and the others.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there are fewer.
    pub fn split_rows(self, row: usize) -> Result<(Self, Self)> {
        self.split(row, "row to split at", true)
    }

    /// The first `column` columns of every row, and the others.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there are fewer.
    pub fn split_cols(self, column: usize) -> Result<(Self, Self)> {
        self.split(column, "column to split at", false)
    }

    /// Two views without an element in common.
    fn split(self, at: usize, what: &'static str, of_rows: bool) -> Result<(Self, Self)> {
        let view = self.view;
        let end = if of_rows { view.rows } else { view.cols };
        let first = view.part::<T>(what, 0..at, of_rows)?;
        view.memory.inspect(|memory| memory.use_in_parts());
        Ok((Self::over(first), Self::over(view.part::<T>(what, at..end, of_rows)?)))
    }

    /// A shorter borrow of the same view.
    pub fn reborrow(&mut self) -> DeviceMatrixMut<'_, T> {
        DeviceMatrixMut::over(self.view)
    }

    /// A shared view.
    pub fn as_ref(&self) -> DeviceMatrixRef<'_, T> {
        DeviceMatrixRef::over(self.view)
    }

    /// Overwrites the matrix with `source`; gaps between rows stay as they are. Waits for the
    /// stream.
    ///
    /// # Errors
    /// [`Error::Shape`], [`CudaError::WrongDevice`], [`CudaError::Capture`].
    pub fn upload(&mut self, stream: &Stream, source: MatrixRef<'_, T>) -> Result<()> {
        let copy = self.copy_from(stream, source)?;
        // SAFETY: both views were checked to span their rows when they were made; the host's is
        // borrowed, and rows of the device's do not overlap.
        unsafe { copy::rows(stream, &copy) }?;
        // An empty copy has waited for nothing.
        if !self.shape().contains(&0) {
            self.view.settle(stream);
        }
        Ok(())
    }

    /// As [`Self::upload`], without waiting; where it fails, a part of the copy may be enqueued.
    ///
    /// # Safety
    /// The source stays as it is until the stream has been waited for.
    pub(crate) unsafe fn send(&mut self, stream: &Stream, source: MatrixRef<'_, T>) -> Result<()> {
        let copy = self.copy_from(stream, source)?;
        // SAFETY: as in `upload`, but that the caller vouches for the time after.
        unsafe { copy::enqueue(stream, &copy) }
    }

    fn copy_from(&self, stream: &Stream, source: MatrixRef<'_, T>) -> Result<Rows> {
        self.admit("matrix to upload to", self.shape(), stream)?;
        source.expect_shape("source of an upload", self.shape())?;
        Ok(Rows {
            direction: Direction::ToDevice,
            device: self.view.ptr,
            device_pitch: self.view.row_stride.saturating_mul(size_of::<T>()),
            // Only read: the direction says so.
            host: source.as_slice().as_ptr().cast_mut().cast(),
            host_pitch: source.row_stride().saturating_mul(size_of::<T>()),
            width: self.view.cols * size_of::<T>(),
            rows: self.view.rows,
        })
    }
}

fn expect_elements(given: usize, rows: usize, cols: usize) -> Result<()> {
    match rows.checked_mul(cols) {
        Some(n) if n == given => Ok(()),
        _ => Err(CudaError::Core(Error::Shape {
            what: "matrix".into(),
            expected: format!("{rows}×{cols} elements"),
            given: format!("{given} elements"),
        })),
    }
}

impl<T> fmt::Debug for DeviceMatrixRef<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.fmt(f)
    }
}

impl<T> fmt::Debug for DeviceMatrixMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.fmt(f)
    }
}
