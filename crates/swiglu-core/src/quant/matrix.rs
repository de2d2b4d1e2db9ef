//! Matrices of quantised weights.

use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::matrix::Matrix;
use crate::quant::BlockType;

/// A matrix of quantised weights as GGUF lays them: a row is one output feature, whole blocks along
/// the inputs (`[out, in]`), rows one behind the other.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedRef<'a> {
    block: BlockType,
    rows: usize,
    cols: usize,
    data: &'a [u8],
}

impl<'a> QuantizedRef<'a> {
    /// A `[rows, cols]` matrix over `data`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if rows are not whole blocks, [`Error::TooLarge`] if the extents do not
    /// fit the address space, [`Error::Shape`] if `data` has another length than they need.
    pub fn new(block: BlockType, data: &'a [u8], rows: usize, cols: usize) -> Result<Self> {
        if !cols.is_multiple_of(block.elements()) {
            return Err(Error::OutOfRange {
                what: "columns of quantised weights",
                given: cols.to_string(),
                expected: format!("whole {block} blocks of {}", block.elements()),
            });
        }
        let bytes = rows
            .checked_mul(cols / block.elements())
            .and_then(|blocks| blocks.checked_mul(block.bytes()))
            .ok_or_else(|| Error::TooLarge {
                what: "quantised weights".into(),
                rows,
                cols,
                row_stride: cols,
            })?;
        if bytes != data.len() {
            return Err(Error::Shape {
                what: "quantised weights".into(),
                expected: format!("{rows}×{cols} as {block}, {bytes} bytes"),
                given: format!("{} bytes", data.len()),
            });
        }
        Ok(Self { block, rows, cols, data })
    }

    /// The type of the blocks.
    pub fn block(&self) -> BlockType {
        self.block
    }
    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }
    /// The blocks, row by row.
    pub fn bytes(&self) -> &'a [u8] {
        self.data
    }
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.cols / self.block.elements() * self.block.bytes()
    }

    /// The blocks of row `r`.
    ///
    /// # Panics
    /// If `r` is not below [`Self::rows`].
    pub fn row(&self, r: usize) -> &'a [u8] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        let len = self.row_bytes();
        &self.data[r * len..][..len]
    }

    /// Rows `start..start + count`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix.
    pub fn rows_range(&self, start: usize, count: usize) -> Result<Self> {
        let end = start.checked_add(count).filter(|&end| end <= self.rows);
        let Some(end) = end else {
            return Err(Error::OutOfRange {
                what: "row range",
                given: format!("{start}..{start}+{count}"),
                expected: format!("within 0..{}", self.rows),
            });
        };
        let len = self.row_bytes();
        Ok(Self { rows: count, data: &self.data[start * len..end * len], ..*self })
    }

    /// The values, each exact in `f32` or rounded to it once, then rounded to T.
    ///
    /// # Errors
    /// [`Error::TooLarge`] or [`Error::Unavailable`] if there is no room for them.
    pub fn to_matrix<T: Element>(&self) -> Result<Matrix<T>> {
        let mut out = Matrix::zeros(self.rows, self.cols)?;
        let mut values = out.as_mut_slice().iter_mut();
        self.block.decode(self.data, |v| {
            if let Some(place) = values.next() {
                *place = T::from_f32(v);
            }
        });
        Ok(out)
    }

    /// Refuses NaN and infinities, which only scales and minima can hold, naming the first value that
    /// is one.
    ///
    /// # Errors
    /// [`Error::NonFinite`].
    pub fn expect_finite(&self, what: &str) -> Result<()> {
        for row in 0..self.rows {
            let (mut col, mut first) = (0, None);
            self.block.decode(self.row(row), |v| {
                if !v.is_finite() && first.is_none() {
                    first = Some((col, f64::from(v)));
                }
                col += 1;
            });
            if let Some((col, value)) = first {
                return Err(Error::NonFinite { what: what.to_owned(), row, col, value });
            }
        }
        Ok(())
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

/// An owned matrix of quantised weights: see [`QuantizedRef`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedMatrix {
    block: BlockType,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
}

impl QuantizedMatrix {
    /// A `[rows, cols]` matrix over `data`.
    ///
    /// # Errors
    /// As [`QuantizedRef::new`].
    pub fn from_vec(block: BlockType, data: Vec<u8>, rows: usize, cols: usize) -> Result<Self> {
        QuantizedRef::new(block, &data, rows, cols)?;
        Ok(Self { block, rows, cols, data })
    }

    /// A borrowed view.
    pub fn view(&self) -> QuantizedRef<'_> {
        QuantizedRef { block: self.block, rows: self.rows, cols: self.cols, data: &self.data }
    }

    /// The blocks, row by row.
    pub fn into_vec(self) -> Vec<u8> {
        self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_blocks_and_lengths_are_checked() {
        let data = vec![0u8; 3 * 2 * 34];
        let m = QuantizedRef::new(BlockType::Q8_0, &data, 3, 64).unwrap();
        assert_eq!((m.shape(), m.row_bytes(), m.row(2).len()), ([3, 64], 68, 68));
        assert_eq!(m.rows_range(1, 2).unwrap().bytes().as_ptr(), m.row(1).as_ptr());
        assert_eq!(m.rows_range(3, 0).unwrap().shape(), [0, 64]);
        assert!(m.rows_range(2, 2).is_err() && m.rows_range(usize::MAX, 2).is_err());
        assert!(matches!(
            QuantizedRef::new(BlockType::Q8_0, &data, 3, 65),
            Err(Error::OutOfRange { .. })
        ));
        let e = QuantizedRef::new(BlockType::Q8_0, &data[1..], 3, 64).unwrap_err().to_string();
        assert!(e.contains("204 bytes") && e.contains("203 bytes"), "{e}");
        assert!(matches!(
            QuantizedRef::new(BlockType::Q8_0, &data, usize::MAX, 64),
            Err(Error::TooLarge { .. })
        ));
        for [rows, cols] in [[0, 64], [5, 0]] {
            let none = QuantizedRef::new(BlockType::Q4_K, &[], rows, cols * 4).unwrap();
            assert_eq!(none.to_matrix::<f32>().unwrap().shape(), [rows, cols * 4]);
        }
    }

    #[test]
    fn a_scale_that_is_no_number_is_located() {
        let mut data = vec![0u8; 2 * 2 * 18];
        data[3 * 18..][..2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        let m = QuantizedRef::new(BlockType::Q4_0, &data, 2, 64).unwrap();
        // 0 of the nibbles is −8 after the bias, so every value of the block is −∞.
        assert!(matches!(m.expect_finite("w"), Err(Error::NonFinite { row: 1, col: 32, .. })));
        assert!(
            QuantizedRef::new(BlockType::Q4_0, &data[..36], 1, 64)
                .unwrap()
                .expect_finite("w")
                .is_ok()
        );
    }
}
