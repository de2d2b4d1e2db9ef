//! Arrays of other libraries: where they lie, and as what they are computed with.
#![expect(
    clippy::cast_possible_wrap,
    reason = "extents and addresses of arrays that exist, whose libraries count in signed numbers"
)]

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;
use swiglu::cuda::{Cuda, DeviceMatrixMut, DeviceMatrixRef};
use swiglu::{CoreError, DType, Element, Matrix, MatrixMut, MatrixRef};

use crate::array::Array;
use crate::dlpack::{self, Managed};
use crate::error::Failure;

/// A number for each dimension: what calls describe has few, and needs no memory of the heap.
pub(crate) type Extents<T> = SmallVec<[T; 4]>;

/// A strided array that somebody else keeps alive: the caller for the time of a call, or [`Managed`].
pub(crate) struct Tensor {
    pub(crate) address: usize,
    pub(crate) shape: Extents<usize>,
    /// In elements.
    pub(crate) strides: Extents<isize>,
    pub(crate) dtype: DType,
    pub(crate) writable: bool,
    pub(crate) _owner: Option<Managed>,
}

/// `(address, shape, strides, dtype, writable)`, as Python says where an array lies.
type Described = (usize, Vec<usize>, Vec<isize>, String, bool);

impl<'py> FromPyObject<'_, 'py> for Tensor {
    type Error = Failure;

    /// A description in a tuple, an [`Array`], or what has `__dlpack__` in the host's memory.
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> Result<Self, Failure> {
        if object.is_instance_of::<PyTuple>() {
            let (address, shape, strides, dtype, writable): Described = object.extract()?;
            let dtype = dtype.parse()?;
            let (shape, strides) = (shape.into(), strides.into());
            return Ok(Self { address, shape, strides, dtype, writable, _owner: None });
        }
        match object.cast::<Array>() {
            Ok(array) => Ok(array.get().tensor()),
            Err(_) => dlpack::import(&object),
        }
    }
}

/// Rows of adjacent elements: borrowed, or copied because they lie otherwise.
pub(crate) enum Rows<'a, T> {
    Borrowed(MatrixRef<'a, T>),
    Copied(Matrix<T>),
    /// One row so many times, as in the gradient of a sum.
    Repeated(Matrix<T>, usize),
}

impl<T: Element> Rows<'_, T> {
    pub(crate) fn view(&self) -> MatrixRef<'_, T> {
        match self {
            Rows::Borrowed(view) => *view,
            Rows::Copied(matrix) => matrix.view(),
            Rows::Repeated(row, rows) => {
                MatrixRef::with_stride(row.as_slice(), *rows, row.cols(), 0)
                    .unwrap_or_else(|_| unreachable!("rows without a distance lie in one"))
            }
        }
    }
}

/// Rows, columns, and elements between rows, where one stride says it.
struct Flat {
    rows: usize,
    cols: usize,
    row_stride: Option<usize>,
}

impl Tensor {
    pub(crate) fn shape_text(&self) -> String {
        format!("{:?}", self.shape)
    }

    /// All dimensions but the last are rows.
    fn flat(&self, what: &str) -> Result<Flat, CoreError> {
        let Some((&cols, leading)) = self.shape.split_last() else {
            let (expected, given) = ("[..., features]".into(), "a scalar".into());
            return Err(CoreError::Shape { what: what.into(), expected, given });
        };
        let too_large =
            || CoreError::TooLarge { what: what.into(), rows: usize::MAX, cols, row_stride: cols };
        let product = |a: usize, &b: &usize| a.checked_mul(b).filter(|n| *n <= isize::MAX as usize);
        let rows = leading.iter().try_fold(1, product).ok_or_else(too_large)?;
        if rows == 0 || cols == 0 {
            return Ok(Flat { rows, cols, row_stride: Some(cols) });
        }
        if self.address == 0 {
            let (what, why) = (format!("{what} without memory"), "its storage was freed".into());
            return Err(CoreError::Unsupported { what, why });
        }
        let adjacent = cols == 1 || self.strides.last() == Some(&1);
        let mut row_stride = None;
        let mut inside = 1;
        for (&n, &stride) in leading.iter().zip(&self.strides).rev().filter(|&(&n, _)| n > 1) {
            let first = *row_stride.get_or_insert(stride);
            if first.checked_mul(inside) != Some(stride) {
                return Ok(Flat { rows, cols, row_stride: None });
            }
            inside *= n as isize;
        }
        let row_stride = usize::try_from(row_stride.unwrap_or(cols as isize)).ok();
        Ok(Flat { rows, cols, row_stride: row_stride.filter(|_| adjacent) })
    }

    /// `[rows, columns]` and the elements between rows, for kernels that cannot copy.
    pub(crate) fn strided(&self, what: &str) -> Result<[usize; 3], CoreError> {
        let flat = self.flat(what)?;
        let row_stride = flat.row_stride.ok_or_else(|| CoreError::Unsupported {
            what: format!("{what} of shape {:?} and strides {:?}", self.shape, self.strides),
            why: "kernels read rows of adjacent elements; copy it (`contiguous()`)".into(),
        })?;
        Ok([flat.rows, flat.cols, row_stride])
    }

    /// Whether kernels that cannot copy take it.
    pub(crate) fn is_rows(&self) -> bool {
        self.flat("").is_ok_and(|flat| flat.row_stride.is_some())
    }

    /// Whether its elements lie one after the other.
    pub(crate) fn is_dense(&self) -> bool {
        let dense = |flat: &Flat| flat.rows <= 1 || flat.row_stride == Some(flat.cols);
        self.flat("").is_ok_and(|flat| flat.row_stride.is_some() && dense(&flat))
    }

    /// Whether no element of it can be one of another's.
    pub(crate) fn is_apart(&self, other: &Self) -> bool {
        disjoint(&self.bytes(), &other.bytes())
    }

    /// The first half of the columns, and the other.
    pub(crate) fn column_halves(&self, what: &str) -> Result<[Self; 2], CoreError> {
        self.halves(what, self.shape.len().wrapping_sub(1))
    }

    /// The first half of a matrix's rows, and the other.
    pub(crate) fn row_halves(&self, what: &str) -> Result<[Self; 2], CoreError> {
        self.halves(what, 0)
    }

    fn halves(&self, what: &str, dim: usize) -> Result<[Self; 2], CoreError> {
        let both = self.shape.get(dim).copied().filter(|both| both.is_multiple_of(2));
        let Some((half, &stride)) = both.map(|both| both / 2).zip(self.strides.get(dim)) else {
            let (expected, given) = ("an even number of features".into(), self.shape_text());
            return Err(CoreError::Shape { what: what.into(), expected, given });
        };
        let mut shape = self.shape.clone();
        shape[dim] = half;
        let behind = half as isize * stride * self.dtype.size() as isize;
        Ok([0, behind].map(|offset| Self {
            address: self.address.wrapping_add_signed(offset),
            shape: shape.clone(),
            strides: self.strides.clone(),
            dtype: self.dtype,
            writable: self.writable,
            _owner: None,
        }))
    }

    pub(crate) fn expect_type<T: Element>(&self, what: &str) -> Result<(), CoreError> {
        let (expected, given) = (T::DTYPE, self.dtype);
        match expected == given {
            true => Ok(()),
            false => Err(CoreError::DType { what: what.into(), expected, given }),
        }
    }

    /// As a matrix of rows, without a copy where they lie so.
    ///
    /// # Safety
    /// The description is true of memory of the host that is not written while the result lives.
    pub(crate) unsafe fn rows<T: Element>(&self, what: &str) -> Result<Rows<'_, T>, CoreError> {
        self.expect_type::<T>(what)?;
        let Flat { rows, cols, row_stride } = self.flat(what)?;
        if rows == 0 || cols == 0 {
            return Ok(Rows::Borrowed(MatrixRef::named(what, &[], rows, cols)?));
        }
        match row_stride {
            Some(stride) if self.address.is_multiple_of(align_of::<T>()) => {
                let len = (rows - 1) * stride + cols;
                // SAFETY: the caller's: the array begins at the address, is aligned, and this is its extent.
                let data = unsafe { std::slice::from_raw_parts(self.address as *const T, len) };
                Ok(Rows::Borrowed(MatrixRef::with_stride(data, rows, cols, stride)?))
            }
            _ if self.strides.iter().all(|&stride| stride == 0) => {
                // SAFETY: the array has a first element, which may be unaligned.
                let value = unsafe { (self.address as *const T).read_unaligned() };
                let mut row = Matrix::zeros(1, cols)?;
                row.as_mut_slice().fill(value);
                Ok(Rows::Repeated(row, rows))
            }
            _ => {
                let mut copy = Matrix::zeros(rows, cols)?;
                for (row, values) in copy.as_mut_slice().chunks_exact_mut(cols).enumerate() {
                    for (value, place) in values.iter_mut().zip(self.row(row)) {
                        // SAFETY: the place of an element, which may be unaligned.
                        *value = unsafe { (place as *const T).read_unaligned() };
                    }
                }
                Ok(Rows::Copied(copy))
            }
        }
    }

    /// Lets `write` fill the array: in place where its rows are adjacent and no input lies there, else through a matrix.
    ///
    /// # Safety
    /// The description is true of memory of the host that nothing else reads or writes meanwhile but `inputs`.
    pub(crate) unsafe fn fill<T: Element>(
        &self,
        what: &str,
        inputs: &[&Tensor],
        write: impl FnOnce(MatrixMut<'_, T>) -> swiglu::Result<()>,
    ) -> swiglu::Result<()> {
        self.expect_type::<T>(what)?;
        if !self.writable {
            let (what, why) = (format!("writing to {what}"), "the array is read-only".into());
            return Err(CoreError::Unsupported { what, why }.into());
        }
        let Flat { rows, cols, row_stride } = self.flat(what)?;
        if rows == 0 || cols == 0 {
            return write(Matrix::zeros(rows, cols)?.view_mut());
        }
        let repeated = self.shape.iter().zip(&self.strides).any(|(&n, &s)| n > 1 && s == 0);
        if repeated {
            return Err(
                CoreError::OverlappingRows { what: what.into(), cols, row_stride: 0 }.into()
            );
        }
        let apart = inputs.iter().all(|input| disjoint(&input.bytes(), &self.bytes()));
        match row_stride {
            Some(stride) if apart && self.address.is_multiple_of(align_of::<T>()) => {
                let len = (rows - 1) * stride + cols;
                // SAFETY: the caller's; no input lies there.
                let data = unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, len) };
                write(MatrixMut::with_stride(data, rows, cols, stride)?)
            }
            _ => {
                let mut whole = Matrix::zeros(rows, cols)?;
                write(whole.view_mut())?;
                for (row, values) in whole.as_slice().chunks_exact(cols).enumerate() {
                    for (value, place) in values.iter().zip(self.row(row)) {
                        // SAFETY: the place of an element, which may be unaligned.
                        unsafe { (place as *mut T).write_unaligned(*value) };
                    }
                }
                Ok(())
            }
        }
    }

    /// The addresses of a row's elements, without an end.
    fn row(&self, row: usize) -> impl Iterator<Item = isize> {
        let size = self.dtype.size() as isize;
        let leading = self.shape.len().saturating_sub(1);
        let mut rest = row;
        let mut first = self.address as isize;
        for (&n, &stride) in self.shape[..leading].iter().zip(&self.strides).rev() {
            first += (rest % n) as isize * stride * size;
            rest /= n;
        }
        let step = self.strides.last().map_or(0, |&stride| stride * size);
        (0..).map(move |col: isize| first.wrapping_add(col.wrapping_mul(step)))
    }

    /// The addresses between which its elements lie.
    fn bytes(&self) -> Range<isize> {
        let first = self.address as isize;
        if self.shape.contains(&0) {
            return first..first;
        }
        let (mut low, mut high) = (0, 0);
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            let far = (n as isize - 1) * stride;
            low += far.min(0);
            high += far.max(0);
        }
        let size = self.dtype.size() as isize;
        first + low * size..first + (high + 1) * size
    }
}

fn disjoint(a: &Range<isize>, b: &Range<isize>) -> bool {
    a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start
}

/// A tensor as kernels of a CUDA device read it.
///
/// # Safety
/// As [`DeviceMatrixRef::from_raw_trusted`].
pub(crate) unsafe fn matrix<'a, T: Element>(
    cuda: &Cuda,
    what: &str,
    tensor: &'a Tensor,
) -> Result<DeviceMatrixRef<'a, T>, Failure> {
    tensor.expect_type::<T>(what)?;
    let [rows, cols, stride] = tensor.strided(what)?;
    // SAFETY: the caller's.
    let view = unsafe {
        DeviceMatrixRef::from_raw_trusted(cuda, tensor.address as u64, rows, cols, stride)
    };
    Ok(view?)
}

/// As they write it.
///
/// # Safety
/// As [`DeviceMatrixMut::from_raw_trusted`].
pub(crate) unsafe fn matrix_mut<'a, T: Element>(
    cuda: &Cuda,
    what: &str,
    tensor: &'a Tensor,
) -> Result<DeviceMatrixMut<'a, T>, Failure> {
    tensor.expect_type::<T>(what)?;
    let [rows, cols, stride] = tensor.strided(what)?;
    // SAFETY: the caller's.
    let view = unsafe {
        DeviceMatrixMut::from_raw_trusted(cuda, tensor.address as u64, rows, cols, stride)
    };
    Ok(view?)
}
