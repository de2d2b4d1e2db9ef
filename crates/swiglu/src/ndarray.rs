//! Conversions from `ndarray` views, without copying. Columns must be adjacent.
//!
//! A dense array converts safely. A window of columns is best taken after the conversion, with
//! [`MatrixRef::cols_range`]: the whole array is then known to be borrowed. A view that is
//! already a window converts with [`strided`] and [`strided_mut`], whose caller vouches for the
//! elements between its rows: `ndarray` can hand those out to others at the same time.
//!
//! ```
//! use ndarray::Array2;
//! use swiglu::ndarray::dense;
//!
//! let both = Array2::from_shape_fn((3, 8), |(r, c)| (8 * r + c) as f32);
//! let right_half = dense(both.view())?.cols_range(4..8)?;
//! assert_eq!(right_half.row(1), [12.0, 13.0, 14.0, 15.0]);
//! # Ok::<(), swiglu::Error>(())
//! ```

use ndarray::{ArrayView2, ArrayViewMut2};
use swiglu_core::{Error as CoreError, MatrixMut, MatrixRef};

use crate::error::Result;

/// A matrix over a dense, row-major view.
///
/// # Errors
/// [`swiglu_core::Error::Unsupported`] for any other view.
pub fn dense<T>(view: ArrayView2<'_, T>) -> Result<MatrixRef<'_, T>> {
    let (rows, cols) = view.dim();
    let strides = strides(view.strides());
    match view.to_slice() {
        Some(data) => Ok(MatrixRef::new(data, rows, cols)?),
        None => Err(not_dense(rows, cols, strides)),
    }
}

/// A mutable matrix over a dense, row-major view.
///
/// # Errors
/// [`swiglu_core::Error::Unsupported`] for any other view.
pub fn dense_mut<T>(view: ArrayViewMut2<'_, T>) -> Result<MatrixMut<'_, T>> {
    let (rows, cols) = view.dim();
    let strides = strides(view.strides());
    match view.into_slice() {
        Some(data) => Ok(MatrixMut::new(data, rows, cols)?),
        None => Err(not_dense(rows, cols, strides)),
    }
}

/// A matrix over a view with any non-negative row stride.
///
/// # Safety
/// For as long as the result lives, no one writes the elements between the rows: those from the
/// first row's start to the last row's end that are not in the view. They belong to someone else
/// only where a mutable array was split by columns.
///
/// # Errors
/// [`swiglu_core::Error::Unsupported`] if columns are not adjacent or rows run backwards.
pub unsafe fn strided<T>(view: ArrayView2<'_, T>) -> Result<MatrixRef<'_, T>> {
    let (rows, cols) = view.dim();
    let (stride, len) = span(rows, cols, strides(view.strides()))?;
    // SAFETY: the first and last element of the span are elements of the view, so the span is
    // within one allocation that lives as long as the view's lifetime; the elements are
    // initialised like the array's; the caller rules out writers to those between the rows.
    let data = unsafe { std::slice::from_raw_parts(view.as_ptr(), len) };
    Ok(MatrixRef::with_stride(data, rows, cols, stride)?)
}

/// A mutable matrix over a view with any row stride of at least its columns.
///
/// # Safety
/// For as long as the result lives, no one reads or writes the elements between the rows; see
/// [`strided`].
///
/// # Errors
/// [`swiglu_core::Error::Unsupported`] if columns are not adjacent or rows run backwards.
pub unsafe fn strided_mut<T>(mut view: ArrayViewMut2<'_, T>) -> Result<MatrixMut<'_, T>> {
    let (rows, cols) = view.dim();
    let (stride, len) = span(rows, cols, strides(view.strides()))?;
    // SAFETY: as in `strided`; the view is consumed, so its own elements have no other user, and
    // the caller rules out any for those between the rows.
    let data = unsafe { std::slice::from_raw_parts_mut(view.as_mut_ptr(), len) };
    Ok(MatrixMut::with_stride(data, rows, cols, stride)?)
}

/// Row and column stride.
fn strides(of: &[isize]) -> [isize; 2] {
    [of[0], of[1]]
}

fn refuse(rows: usize, cols: usize, [row, col]: [isize; 2], why: &str) -> crate::Error {
    CoreError::Unsupported {
        what: format!("a {rows}×{cols} view with strides ({row}, {col})"),
        why: why.to_owned(),
    }
    .into()
}

fn not_dense(rows: usize, cols: usize, strides: [isize; 2]) -> crate::Error {
    let why = "expected a dense row-major array; convert the whole array and take the columns \
               with cols_range, use ndarray::strided, or copy with as_standard_layout";
    refuse(rows, cols, strides, why)
}

/// The row stride and the elements from the first to the last of the view.
fn span(rows: usize, cols: usize, strides: [isize; 2]) -> Result<(usize, usize)> {
    if rows == 0 || cols == 0 {
        return Ok((cols, 0));
    }
    if strides[1] != 1 && cols > 1 {
        let why = "columns must be adjacent (stride 1); copy with as_standard_layout";
        return Err(refuse(rows, cols, strides, why));
    }
    // The stride of a single row says nothing, and may be anything.
    let stride = if rows == 1 { cols.cast_signed() } else { strides[0] };
    match usize::try_from(stride) {
        // Every element is in one allocation, so the span does not overflow.
        Ok(stride) => Ok((stride, (rows - 1) * stride + cols)),
        Err(_) => Err(refuse(rows, cols, strides, "rows run backwards; copy it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array2, s};

    fn counted() -> Array2<f32> {
        Array2::from_shape_fn((4, 6), |(r, c)| (10 * r + c) as f32)
    }

    #[test]
    fn dense_views_convert_and_others_say_what_to_do() {
        let a = counted();
        assert_eq!(dense(a.view()).unwrap().row(2)[5], 25.0);
        for view in [a.slice(s![.., 1..3]), a.t(), a.slice(s![..;-1, ..])] {
            let error = dense(view).unwrap_err().to_string();
            assert!(error.contains("strides") && error.contains("cols_range"), "{error}");
        }
        let mut a = counted();
        dense_mut(a.view_mut()).unwrap().row_mut(1)[0] = -1.0;
        assert_eq!(a[[1, 0]], -1.0);
        assert!(dense_mut(a.slice_mut(s![.., ..2])).is_err());
    }

    #[test]
    fn strided_views_keep_their_row_stride() {
        let a = counted();
        // SAFETY: `a` is borrowed whole and not mutably.
        let m = unsafe { strided(a.slice(s![..;2, 1..4])) }.unwrap();
        assert_eq!((m.shape(), m.row_stride()), ([2, 3], 12));
        assert_eq!(m.row(1), [21.0, 22.0, 23.0]);

        let mut a = counted();
        // SAFETY: `a` is borrowed mutably and nothing else looks at it.
        let mut m = unsafe { strided_mut(a.slice_mut(s![.., 4..])) }.unwrap();
        m.row_mut(3).fill(7.0);
        assert_eq!((a[[3, 3]], a[[3, 4]], a[[3, 5]]), (33.0, 7.0, 7.0));
    }

    #[test]
    fn views_without_adjacent_columns_are_refused() {
        let a = counted();
        for view in [a.t(), a.slice(s![.., ..;2]), a.slice(s![..;-1, ..])] {
            // SAFETY: `a` is borrowed whole and not mutably.
            assert!(unsafe { strided(view) }.is_err());
        }
    }

    #[test]
    fn repeated_and_empty_views_are_matrices() {
        let row = Array2::from_shape_vec((1, 3), vec![1.0f32, 2.0, 3.0]).unwrap();
        // SAFETY: `row` is borrowed whole and not mutably.
        let m = unsafe { strided(row.broadcast((5, 3)).unwrap()) }.unwrap();
        assert_eq!((m.rows(), m.row_stride(), m.row(4)), (5, 0, &[1.0, 2.0, 3.0][..]));
        let none = Array2::<f32>::zeros((0, 3));
        assert_eq!(dense(none.view()).unwrap().shape(), [0, 3]);
        // SAFETY: there are no elements.
        assert_eq!(unsafe { strided(none.view()) }.unwrap().shape(), [0, 3]);
    }
}
