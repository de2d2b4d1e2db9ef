//! Borrowed and owned row-major matrices with a row stride.

use std::ops::{Index, IndexMut, Range};

use zerocopy::{FromBytes, FromZeros};

use crate::dtype::Element;
use crate::error::{Error, Result};

fn span(what: &str, rows: usize, cols: usize, row_stride: usize) -> Result<usize> {
    if rows == 0 || cols == 0 {
        return Ok(0);
    }
    (rows - 1)
        .checked_mul(row_stride)
        .and_then(|n| n.checked_add(cols))
        .filter(|&n| n <= isize::MAX as usize)
        .ok_or_else(|| Error::TooLarge { what: what.to_owned(), rows, cols, row_stride })
}

fn check(what: &str, rows: usize, cols: usize, row_stride: usize, given: usize) -> Result<()> {
    let needed = span(what, rows, cols, row_stride)?;
    if needed > given {
        return Err(Error::BufferTooShort {
            what: what.to_owned(),
            rows,
            cols,
            row_stride,
            needed,
            given,
        });
    }
    Ok(())
}

/// How many there are in a range, which must lie within `0..len`.
pub(crate) fn expect_within(what: &'static str, range: &Range<usize>, len: usize) -> Result<usize> {
    if range.start <= range.end && range.end <= len {
        return Ok(range.end - range.start);
    }
    let (given, expected) = (format!("{}..{}", range.start, range.end), format!("within 0..{len}"));
    Err(Error::OutOfRange { what, given, expected })
}

/// A borrowed `[rows, cols]` matrix: columns are adjacent, rows are `row_stride` elements apart.
///
/// Any row stride is accepted that stays inside the buffer, also one smaller than `cols`
/// (overlapping windows) and 0 (one row repeated).
#[derive(Debug, Clone, Copy)]
pub struct MatrixRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T> MatrixRef<'a, T> {
    /// A dense matrix over `data`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `data` does not have exactly `rows · cols` elements.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Result<Self> {
        Self::named("matrix", data, rows, cols)
    }

    /// As [`Self::new`], with a name for the error: one of several matrices that a layer is made of.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn named(what: &str, data: &'a [T], rows: usize, cols: usize) -> Result<Self> {
        match rows.checked_mul(cols) {
            Some(n) if n == data.len() => Ok(Self { data, rows, cols, row_stride: cols }),
            _ => Err(Error::Shape {
                what: what.into(),
                expected: format!("{rows}×{cols} elements"),
                given: format!("{} elements", data.len()),
            }),
        }
    }

    /// A matrix of one row.
    pub fn row_vector(data: &'a [T]) -> Self {
        Self { data, rows: 1, cols: data.len(), row_stride: data.len() }
    }

    /// A matrix whose rows start `row_stride` elements apart.
    ///
    /// # Errors
    /// [`Error::BufferTooShort`] if the last row would end past the buffer.
    pub fn with_stride(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Result<Self> {
        check("matrix", rows, cols, row_stride, data.len())?;
        Ok(Self { data, rows, cols, row_stride })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// Elements between the starts of two rows.
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }
    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }
    /// The buffer behind the view; row `i` starts at `i · row_stride`.
    pub fn as_slice(&self) -> &'a [T] {
        self.data
    }

    /// Row `i`.
    ///
    /// # Panics
    /// If `i` is not below [`Self::rows`].
    #[inline]
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        if self.cols == 0 {
            return &[];
        }
        &self.data[i * self.row_stride..][..self.cols]
    }

    /// Rows `range`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix.
    pub fn rows_range(&self, range: Range<usize>) -> Result<Self> {
        let rows = expect_within("row range", &range, self.rows)?;
        let offset = if rows == 0 || self.cols == 0 { 0 } else { range.start * self.row_stride };
        Ok(Self { data: &self.data[offset..], rows, ..*self })
    }

    /// Columns `range` of every row: a chunk view, without copying.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix.
    pub fn cols_range(&self, range: Range<usize>) -> Result<Self> {
        let cols = expect_within("column range", &range, self.cols)?;
        let offset = if self.rows == 0 || cols == 0 { 0 } else { range.start };
        Ok(Self { data: &self.data[offset..], cols, ..*self })
    }

    /// Refuses a shape other than `expected`, naming the argument.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn expect_shape(&self, what: &str, expected: [usize; 2]) -> Result<()> {
        if self.shape() == expected {
            Ok(())
        } else {
            Err(Error::shape(what, expected, self.shape()))
        }
    }
}

impl<'a, T: Element> MatrixRef<'a, T> {
    /// A dense matrix over its elements' bytes as files have them, little-endian: a mapped file's, without a copy.
    ///
    /// ```
    /// use swiglu_core::{MatrixRef, bf16};
    ///
    /// #[repr(align(2))]
    /// struct Mapped([u8; 4]);
    /// let m = MatrixRef::<bf16>::from_le_bytes(&Mapped([0x80, 0x3f, 0x00, 0xc0]).0, 1, 2)?.to_dtype::<f32>()?;
    /// assert_eq!(m.as_slice(), [1.0, -2.0]);
    /// # Ok::<(), swiglu_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if there are not exactly the bytes of `rows · cols` elements; [`Error::Misaligned`] if they begin
    /// where no element may; [`Error::Unsupported`] on a big-endian machine.
    pub fn from_le_bytes(bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self> {
        let what = || format!("matrix of {}", T::DTYPE);
        if cfg!(target_endian = "big") {
            let why =
                "the bytes of this machine's numbers are in another order; decode them".into();
            return Err(Error::Unsupported { what: what(), why });
        }
        let size = size_of::<T>();
        if rows.checked_mul(cols).and_then(|n| n.checked_mul(size)) != Some(bytes.len()) {
            return Err(Error::Shape {
                what: what(),
                expected: format!("{rows}×{cols} elements of {size} bytes"),
                given: format!("{} bytes", bytes.len()),
            });
        }
        let data = <[T]>::ref_from_bytes(bytes);
        let data = data.map_err(|_| Error::Misaligned { what: what(), required: size })?;
        Self::new(data, rows, cols)
    }

    /// The values of row `i`, exactly.
    pub(crate) fn widen_row(&self, i: usize, to: &mut [f64]) {
        T::widen(self.row(i), 1, to);
    }

    /// The values of column `j`, exactly.
    pub(crate) fn widen_column(&self, j: usize, to: &mut [f64]) {
        match self.row_stride {
            // Rows that are all the same one.
            0 => to.iter_mut().zip(0..self.rows).for_each(|(to, i)| *to = self.row(i)[j].to_f64()),
            stride => T::widen(self.data.get(j..).unwrap_or_default(), stride, to),
        }
    }

    /// Refuses NaN and infinities, naming the first one.
    ///
    /// # Errors
    /// [`Error::NonFinite`].
    pub fn expect_finite(&self, what: &str) -> Result<()> {
        for r in 0..rows_with_elements(self.rows, self.cols) {
            if let Some(c) = self.row(r).iter().position(|v| !v.to_f32().is_finite()) {
                return Err(Error::NonFinite {
                    what: what.to_owned(),
                    row: r,
                    col: c,
                    value: self.row(r)[c].to_f64(),
                });
            }
        }
        Ok(())
    }

    /// A dense copy in another element type; narrowing rounds once.
    ///
    /// # Errors
    /// As [`Matrix::room`].
    pub fn to_dtype<U: Element>(&self) -> Result<Matrix<U>> {
        let mut out = Matrix::room(self.rows, self.cols)?;
        for r in 0..rows_with_elements(self.rows, self.cols) {
            out.extend(self.row(r).iter().map(|v| U::from_f32(v.to_f32())));
        }
        Ok(Matrix { data: out, rows: self.rows, cols: self.cols })
    }
}

/// Rows to go through: none where they have no columns, of which there may be as many as there are numbers.
pub(crate) fn rows_with_elements(rows: usize, cols: usize) -> usize {
    if cols == 0 { 0 } else { rows }
}

/// A mutably borrowed `[rows, cols]` matrix; rows do not overlap.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T> MatrixMut<'a, T> {
    /// A dense matrix over `data`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `data` does not have exactly `rows · cols` elements.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self> {
        MatrixRef::new(data, rows, cols)?;
        Ok(Self { data, rows, cols, row_stride: cols })
    }

    /// A matrix whose rows start `row_stride` elements apart.
    ///
    /// # Errors
    /// [`Error::BufferTooShort`]; [`Error::OverlappingRows`] if rows would overlap.
    pub fn with_stride(
        data: &'a mut [T],
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Result<Self> {
        check("output", rows, cols, row_stride, data.len())?;
        if rows > 1 && row_stride < cols {
            return Err(Error::OverlappingRows { what: "output".into(), cols, row_stride });
        }
        Ok(Self { data, rows, cols, row_stride })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// Elements between the starts of two rows.
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }
    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }
    /// The buffer behind the view.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        self.data
    }
    /// A shorter borrow of the same view.
    pub fn reborrow(&mut self) -> MatrixMut<'_, T> {
        MatrixMut { data: self.data, rows: self.rows, cols: self.cols, row_stride: self.row_stride }
    }
    /// A shared view.
    pub fn as_ref(&self) -> MatrixRef<'_, T> {
        MatrixRef { data: self.data, rows: self.rows, cols: self.cols, row_stride: self.row_stride }
    }

    /// Row `i`.
    ///
    /// # Panics
    /// If `i` is not below [`Self::rows`].
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        if self.cols == 0 {
            return &mut [];
        }
        &mut self.data[i * self.row_stride..][..self.cols]
    }

    /// Refuses a shape other than `expected`, naming the argument.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn expect_shape(&self, what: &str, expected: [usize; 2]) -> Result<()> {
        self.as_ref().expect_shape(what, expected)
    }
}

/// Elements of a matrix whose bytes fit the address space.
fn elements<T>(rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols)
        .filter(|n| n.checked_mul(size_of::<T>()).is_some_and(|b| b <= isize::MAX as usize))
        .ok_or_else(|| Error::TooLarge { what: "matrix".into(), rows, cols, row_stride: cols })
}

/// An owned dense `[rows, cols]` matrix.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Matrix<T> {
    data: Vec<T>,
    rows: usize,
    cols: usize,
}

impl<T> Matrix<T> {
    /// An empty vector with room for a matrix: for sizes that come from outside, because a vector that
    /// grows by itself ends the process where there is no memory.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the extents do not fit the address space; [`Error::OutOfMemory`] if
    /// there is no memory for them.
    pub fn room(rows: usize, cols: usize) -> Result<Vec<T>> {
        let n = elements::<T>(rows, cols)?;
        let mut room = Vec::new();
        room.try_reserve_exact(n).map_err(|e| Error::OutOfMemory {
            what: format!("a {rows}×{cols} matrix"),
            why: e.to_string(),
        })?;
        Ok(room)
    }
}

impl<T: FromZeros> Matrix<T> {
    /// A matrix of zeros. Large ones are pages of the system that nothing has touched.
    ///
    /// # Errors
    /// As [`Self::room`].
    pub fn zeros(rows: usize, cols: usize) -> Result<Self> {
        let n = elements::<T>(rows, cols)?;
        let data = T::new_vec_zeroed(n).map_err(|_| Error::OutOfMemory {
            what: format!("a {rows}×{cols} matrix"),
            why: format!("the system refused {} bytes", n * size_of::<T>()),
        })?;
        Ok(Self { data, rows, cols })
    }
}

impl<T: Copy + Default> Matrix<T> {
    /// A matrix of the first `rows · cols` values, row by row.
    ///
    /// # Errors
    /// As [`Self::room`]; [`Error::Shape`] if there are fewer.
    pub fn from_values(
        values: impl IntoIterator<Item = T>,
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        let mut data = Self::room(rows, cols)?;
        data.extend(values.into_iter().take(rows * cols));
        Self::from_vec(data, rows, cols)
    }

    /// A copy.
    ///
    /// # Errors
    /// As [`Self::room`].
    pub fn try_clone(&self) -> Result<Self> {
        let mut data = Self::room(self.rows, self.cols)?;
        data.extend_from_slice(&self.data);
        Ok(Self { data, rows: self.rows, cols: self.cols })
    }

    /// A matrix over `data`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `data` does not have exactly `rows · cols` elements.
    pub fn from_vec(data: Vec<T>, rows: usize, cols: usize) -> Result<Self> {
        MatrixRef::new(&data, rows, cols)?;
        Ok(Self { data, rows, cols })
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
    /// The elements, row by row.
    pub fn as_slice(&self) -> &[T] {
        &self.data
    }
    /// The elements, row by row.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data
    }
    /// The elements, row by row.
    pub fn into_vec(self) -> Vec<T> {
        self.data
    }
    /// A borrowed view.
    pub fn view(&self) -> MatrixRef<'_, T> {
        MatrixRef { data: &self.data, rows: self.rows, cols: self.cols, row_stride: self.cols }
    }
    /// A mutable view.
    pub fn view_mut(&mut self) -> MatrixMut<'_, T> {
        MatrixMut { data: &mut self.data, rows: self.rows, cols: self.cols, row_stride: self.cols }
    }
}

impl<'a, T: Copy + Default> From<&'a Matrix<T>> for MatrixRef<'a, T> {
    fn from(m: &'a Matrix<T>) -> Self {
        m.view()
    }
}

impl<'a, T: Copy + Default> From<&'a mut Matrix<T>> for MatrixMut<'a, T> {
    fn from(m: &'a mut Matrix<T>) -> Self {
        m.view_mut()
    }
}

impl<'a, T> From<&'a mut MatrixMut<'_, T>> for MatrixMut<'a, T> {
    /// As [`MatrixMut::reborrow`].
    fn from(m: &'a mut MatrixMut<'_, T>) -> Self {
        m.reborrow()
    }
}

impl<T> AsRef<[T]> for Matrix<T> {
    fn as_ref(&self) -> &[T] {
        &self.data
    }
}

impl<T> AsMut<[T]> for Matrix<T> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<T> Matrix<T> {
    #[track_caller]
    fn at(&self, (row, col): (usize, usize)) -> usize {
        assert!(
            row < self.rows && col < self.cols,
            "[{row}, {col}] of [{}, {}]",
            self.rows,
            self.cols
        );
        row * self.cols + col
    }
}

impl<T> Index<(usize, usize)> for Matrix<T> {
    type Output = T;

    /// The element in a row and column.
    ///
    /// # Panics
    /// If there is none.
    #[track_caller]
    fn index(&self, at: (usize, usize)) -> &T {
        &self.data[self.at(at)]
    }
}

impl<T> IndexMut<(usize, usize)> for Matrix<T> {
    #[track_caller]
    fn index_mut(&mut self, at: (usize, usize)) -> &mut T {
        let at = self.at(at);
        &mut self.data[at]
    }
}

#[cfg(test)]
#[path = "matrix_tests.rs"]
mod tests;
