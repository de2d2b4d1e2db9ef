//! Borrowed matrices with a stride for each of their dimensions.

use std::borrow::Cow;

use crate::error::{Error, Result};
use crate::matrix::{Matrix, MatrixRef};

/// A borrowed `[rows, cols]` matrix whose elements lie any number of elements apart, also none: a gradient that is
/// transposed, or one value for all elements.
#[derive(Debug, Clone, Copy)]
pub struct StridedRef<'a, T> {
    data: &'a [T],
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<'a, T> StridedRef<'a, T> {
    /// A matrix whose rows and columns start so many elements apart.
    ///
    /// # Errors
    /// [`Error::BufferTooShort`] if the last element lies outside `data`; [`Error::TooLarge`] if it lies outside the address
    /// space.
    pub fn new(
        data: &'a [T],
        [rows, cols]: [usize; 2],
        [row_stride, col_stride]: [usize; 2],
    ) -> Result<Self> {
        let what = || "matrix".to_owned();
        let needed = match rows.min(cols) {
            0 => Some(0),
            _ => (rows - 1).checked_mul(row_stride).and_then(|last_row| {
                (cols - 1).checked_mul(col_stride)?.checked_add(last_row)?.checked_add(1)
            }),
        };
        match needed {
            None => Err(Error::TooLarge { what: what(), rows, cols, row_stride }),
            Some(needed) if needed > data.len() => {
                let given = data.len();
                Err(Error::BufferTooShort { what: what(), rows, cols, row_stride, needed, given })
            }
            Some(_) => Ok(Self { data, shape: [rows, cols], strides: [row_stride, col_stride] }),
        }
    }

    /// The matrix with rows and columns exchanged.
    #[must_use]
    pub fn transposed(self) -> Self {
        let ([rows, cols], [row_stride, col_stride]) = (self.shape, self.strides);
        Self { shape: [cols, rows], strides: [col_stride, row_stride], ..self }
    }

    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Elements between the starts of two rows, and of two columns.
    pub fn strides(&self) -> [usize; 2] {
        self.strides
    }
}

impl<'a, T: Copy + Default> StridedRef<'a, T> {
    /// The element in a row and column.
    ///
    /// # Panics
    /// If there is none.
    pub fn at(&self, row: usize, col: usize) -> T {
        let [rows, cols] = self.shape;
        assert!(row < rows && col < cols, "[{row}, {col}] of [{rows}, {cols}]");
        self.data[row * self.strides[0] + col * self.strides[1]]
    }

    /// The matrix by rows of adjacent elements, where it lies so; else nothing.
    pub fn as_rows(&self) -> Option<MatrixRef<'a, T>> {
        let ([rows, cols], [row_stride, col_stride]) = (self.shape, self.strides);
        let adjacent = col_stride == 1 || cols <= 1;
        MatrixRef::with_stride(self.data, rows, cols, row_stride).ok().filter(|_| adjacent)
    }

    /// The matrix by rows of adjacent elements: borrowed where it lies so, else copied.
    ///
    /// # Errors
    /// As [`Matrix::room`].
    pub fn to_rows(&self) -> Result<AdjacentRows<'a, T>> {
        match self.as_rows() {
            Some(rows) => {
                Ok(AdjacentRows(Cow::Borrowed(rows.as_slice()), rows.shape(), rows.row_stride()))
            }
            None => {
                let [rows, cols] = self.shape;
                let values = (0..rows).flat_map(|r| (0..cols).map(move |c| self.at(r, c)));
                let dense = Matrix::from_values(values, rows, cols)?;
                Ok(AdjacentRows(Cow::Owned(dense.into_vec()), self.shape, cols))
            }
        }
    }
}

/// What [`StridedRef::to_rows`] gives.
#[derive(Debug)]
pub struct AdjacentRows<'a, T: Clone>(Cow<'a, [T]>, [usize; 2], usize);

impl<T: Copy> AdjacentRows<'_, T> {
    /// The matrix.
    ///
    /// # Errors
    /// None that a matrix of this shape has not had when it was made.
    pub fn view(&self) -> Result<MatrixRef<'_, T>> {
        MatrixRef::with_stride(&self.0, self.1[0], self.1[1], self.2)
    }
}

impl<'a, T> From<MatrixRef<'a, T>> for StridedRef<'a, T> {
    fn from(m: MatrixRef<'a, T>) -> Self {
        Self { data: m.as_slice(), shape: m.shape(), strides: [m.row_stride(), 1] }
    }
}

impl<'a, T: Copy + Default> From<&'a Matrix<T>> for StridedRef<'a, T> {
    fn from(m: &'a Matrix<T>) -> Self {
        m.view().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_lie_where_the_strides_say() {
        let data: Vec<f32> = (0u8..12).map(f32::from).collect();
        let by_columns = StridedRef::new(&data, [3, 4], [1, 3]).unwrap();
        assert_eq!((by_columns.at(2, 3), by_columns.at(0, 1)), (11.0, 3.0));
        assert!(by_columns.as_rows().is_none());
        let rows = by_columns.to_rows().unwrap();
        assert_eq!(rows.view().unwrap().row(1), [1.0, 4.0, 7.0, 10.0]);
        let back = by_columns.transposed();
        assert_eq!((back.shape(), back.at(3, 2)), ([4, 3], 11.0));
        assert_eq!(back.as_rows().unwrap().row(1), [3.0, 4.0, 5.0]);
        let one = StridedRef::new(&data[7..8], [3, 4], [0, 0]).unwrap();
        assert_eq!(one.to_rows().unwrap().view().unwrap().row(2), [7.0; 4]);
        let same_rows = StridedRef::new(&data[..4], [3, 4], [0, 1]).unwrap();
        assert_eq!(same_rows.as_rows().unwrap().row(2), [0.0, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let data = [0.0f32; 12];
        let refused = |shape, strides| StridedRef::new(&data, shape, strides).unwrap_err();
        assert!(matches!(refused([3, 4], [1, 4]), Error::BufferTooShort { needed: 15, .. }));
        assert!(matches!(refused([2, 2], [usize::MAX, 1]), Error::TooLarge { .. }));
        assert!(StridedRef::new(&data[..0], [0, 9], [9, 1]).is_ok());
    }
}
