//! Matrices of quantised weights.

use std::ops::Range;

use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::matrix::{Matrix, expect_within, rows_with_elements};
use crate::quant::{BlockType, QuantizedType, SCALE_BLOCK};

/// A matrix of quantised weights, `[out, in]`: a row is one output feature, rows lie one behind the
/// other. Blocks, as GGUF has them, are whole along the inputs and hold their scales; weights of 8 bits
/// have theirs beside them.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedRef<'a> {
    kind: QuantizedType,
    rows: usize,
    cols: usize,
    data: &'a [u8],
    /// As many as [`QuantizedType::scales`] says, row by row.
    scales: &'a [f32],
}

impl<'a> QuantizedRef<'a> {
    /// A `[rows, cols]` matrix of blocks over `data`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if rows are not whole blocks, [`Error::TooLarge`] if the extents do not
    /// fit the address space, [`Error::Shape`] if `data` has another length than they need.
    pub fn new(block: BlockType, data: &'a [u8], rows: usize, cols: usize) -> Result<Self> {
        Self::scaled(block.into(), data, &[], rows, cols)
    }

    /// A `[rows, cols]` matrix over `data`, with the scales beside it that its type has
    /// ([`QuantizedType::scales`]; none for blocks).
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Shape`] for another number of scales.
    pub fn scaled(
        kind: QuantizedType,
        data: &'a [u8],
        scales: &'a [f32],
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        kind.expect_columns(cols)?;
        let bytes = kind.data_bytes(rows, cols).ok_or_else(|| Error::TooLarge {
            what: "quantised weights".into(),
            rows,
            cols,
            row_stride: cols,
        })?;
        if bytes != data.len() {
            return Err(Error::Shape {
                what: "quantised weights".into(),
                expected: format!("{rows}×{cols} as {kind}, {bytes} bytes"),
                given: format!("{} bytes", data.len()),
            });
        }
        let [down, across] = kind.scales(rows, cols);
        if down * across != scales.len() {
            return Err(Error::Shape {
                what: format!("scales of {rows}×{cols} weights as {kind}"),
                expected: format!("[{down}, {across}]"),
                given: format!("{} scales", scales.len()),
            });
        }
        Ok(Self { kind, rows, cols, data, scales })
    }

    /// How the weights are stored.
    pub fn kind(&self) -> QuantizedType {
        self.kind
    }
    /// The scales beside the weights, row by row.
    pub fn scales(&self) -> &'a [f32] {
        self.scales
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
    /// Blocks or codes, row by row.
    pub fn bytes(&self) -> &'a [u8] {
        self.data
    }
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        match self.kind {
            QuantizedType::Block(block) => self.cols / block.elements() * block.bytes(),
            _ => self.cols,
        }
    }

    /// The blocks or codes of row `r`.
    ///
    /// # Panics
    /// If `r` is not below [`Self::rows`].
    pub fn row(&self, r: usize) -> &'a [u8] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        let len = self.row_bytes();
        &self.data[r * len..][..len]
    }

    /// The scales of row `r`, each of as many columns as the second value says; none for blocks.
    pub fn row_scales(&self, r: usize) -> (&'a [f32], usize) {
        let [_, across] = self.kind.scales(self.rows, self.cols);
        match self.kind {
            QuantizedType::Block(_) => (&[], 0),
            QuantizedType::F8E4m3Blocks => {
                (&self.scales[r / SCALE_BLOCK * across..][..across], SCALE_BLOCK)
            }
            _ => (&self.scales[r..][..1], self.cols),
        }
    }

    /// Rows `range`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range leaves the matrix, or begins within rows that share scales.
    pub fn rows_range(&self, range: Range<usize>) -> Result<Self> {
        let count = expect_within("row range", &range, self.rows)?;
        let Range { start, end } = range;
        let shared = if self.kind == QuantizedType::F8E4m3Blocks { SCALE_BLOCK } else { 1 };
        if !start.is_multiple_of(shared) {
            return Err(Error::OutOfRange {
                what: "first row of a range",
                given: start.to_string(),
                expected: format!("a multiple of {shared}, the rows that share scales"),
            });
        }
        let len = self.row_bytes();
        let [_, across] = self.kind.scales(self.rows, self.cols);
        let [down, _] = self.kind.scales(count, self.cols);
        let scales = match self.scales.get(start / shared * across..) {
            Some(rest) => &rest[..down * across],
            None => &[],
        };
        Ok(Self { rows: count, data: &self.data[start * len..end * len], scales, ..*self })
    }

    /// The values of row `r` as the two terms whose sum each is, without any rounding: `scale · q` and
    /// the minimum, 0 for types without one.
    ///
    /// # Panics
    /// If `r` is not below [`Self::rows`].
    pub fn terms(&self, r: usize, mut emit: impl FnMut(f64, f64)) {
        let row = self.row(r);
        match self.kind {
            QuantizedType::Block(block) => {
                block.terms(row, |product, minimum| emit(product.into(), minimum.into()));
            }
            kind => {
                let (scales, columns) = self.row_scales(r);
                for (codes, &scale) in row.chunks(columns.max(1)).zip(scales) {
                    // 24 bits by 8: exact in float64.
                    let value = |&code: &u8| f64::from(scale) * f64::from(kind.code(code));
                    codes.iter().map(value).for_each(|v| emit(v, 0.0));
                }
            }
        }
    }

    /// The values of row `r`, each exact in `f32` or rounded to it once.
    fn decode_row(&self, r: usize, mut emit: impl FnMut(f32)) {
        match self.kind {
            QuantizedType::Block(block) => block.decode(self.row(r), emit),
            _ => self.terms(r, |value, _| emit(value as f32)),
        }
    }

    /// The values, each exact in `f32` or rounded to it once, then rounded to T.
    ///
    /// # Errors
    /// [`Error::TooLarge`] or [`Error::OutOfMemory`] if there is no room for them.
    pub fn to_matrix<T: Element>(&self) -> Result<Matrix<T>> {
        let mut out = Matrix::zeros(self.rows, self.cols)?;
        let mut values = out.as_mut_slice().iter_mut();
        for r in 0..self.rows {
            self.decode_row(r, |v| {
                if let Some(place) = values.next() {
                    *place = T::from_f32(v);
                }
            });
        }
        Ok(out)
    }

    /// Refuses NaN and infinities, naming the first scale beside the weights that is one, else the first
    /// value.
    ///
    /// # Errors
    /// [`Error::NonFinite`].
    pub fn expect_finite(&self, what: &str) -> Result<()> {
        let across = self.kind.scales(self.rows, self.cols)[1].max(1);
        if let Some(at) = self.scales.iter().position(|scale| !scale.is_finite()) {
            let (what, value) = (format!("scale of {what}"), f64::from(self.scales[at]));
            return Err(Error::NonFinite { what, row: at / across, col: at % across, value });
        }
        for row in 0..rows_with_elements(self.rows, self.cols) {
            let (mut col, mut first) = (0, None);
            self.decode_row(row, |v| {
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
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedMatrix {
    kind: QuantizedType,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
    scales: Vec<f32>,
}

impl QuantizedMatrix {
    /// A `[rows, cols]` matrix of blocks over `data`.
    ///
    /// # Errors
    /// As [`QuantizedRef::new`].
    pub fn from_vec(block: BlockType, data: Vec<u8>, rows: usize, cols: usize) -> Result<Self> {
        Self::scaled(block.into(), data, Vec::new(), rows, cols)
    }

    /// A `[rows, cols]` matrix over `data` and the scales beside it.
    ///
    /// # Errors
    /// As [`QuantizedRef::scaled`].
    pub fn scaled(
        kind: QuantizedType,
        data: Vec<u8>,
        scales: Vec<f32>,
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        QuantizedRef::scaled(kind, &data, &scales, rows, cols)?;
        Ok(Self { kind, rows, cols, data, scales })
    }

    /// A borrowed view.
    pub fn view(&self) -> QuantizedRef<'_> {
        let Self { kind, rows, cols, ref data, ref scales } = *self;
        QuantizedRef { kind, rows, cols, data, scales }
    }

    /// Blocks or codes, row by row.
    pub fn into_vec(self) -> Vec<u8> {
        self.data
    }

    /// Blocks or codes, and the scales beside them.
    pub fn into_parts(self) -> (Vec<u8>, Vec<f32>) {
        (self.data, self.scales)
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
        assert_eq!(m.rows_range(1..3).unwrap().bytes().as_ptr(), m.row(1).as_ptr());
        assert_eq!(m.rows_range(3..3).unwrap().shape(), [0, 64]);
        assert!(m.rows_range(2..4).is_err() && m.rows_range(usize::MAX..usize::MAX).is_err());
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

    #[test]
    fn a_scale_beside_the_weights_is_named_itself() {
        let data = vec![0u8; 130 * 200];
        let scales = [1.0, 1.0, 1.0, f32::NAN];
        let m = QuantizedRef::scaled(QuantizedType::F8E4m3Blocks, &data, &scales, 130, 200);
        let error = m.unwrap().expect_finite("w").unwrap_err().to_string();
        assert_eq!(error, "scale of w[1, 1] is NaN: expected finite numbers");
    }

    #[test]
    fn scales_beside_the_weights_are_counted_and_exact() {
        let codes: Vec<u8> = (0..130 * 200).map(|i| (i % 251) as u8).collect();
        let of = |kind, scales: &[f32]| {
            let m = QuantizedRef::scaled(kind, &codes, scales, 130, 200)?;
            let mut values = Vec::new();
            m.terms(129, |value, minimum| values.push(value + minimum));
            Ok::<_, Error>(values)
        };
        let scales: Vec<f32> = (0..130).map(|r| 0.1 + r as f32).collect();
        let row = &codes[129 * 200..];
        let expected: Vec<f64> =
            row.iter().map(|&c| f64::from(scales[129]) * f64::from(c.cast_signed())).collect();
        assert_eq!(of(QuantizedType::I8, &scales).unwrap(), expected);
        // Two by two blocks; row 129 is in the lower ones.
        let blocks = [1.0, 2.0, 0.3, -7.0f32];
        let value = |(col, &c): (usize, &u8)| {
            let scale = if col < 128 { blocks[2] } else { blocks[3] };
            f64::from(scale) * f64::from(crate::quant::e4m3_to_f32(c))
        };
        let expected: Vec<f64> = row.iter().enumerate().map(value).collect();
        let given = of(QuantizedType::F8E4m3Blocks, &blocks).unwrap();
        let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
        assert_eq!(given.len(), 200);
        assert!(given.iter().zip(&expected).all(same));

        for (kind, expected) in [
            (QuantizedType::I8, "[130, 1]"),
            (QuantizedType::F8E4m3, "[130, 1]"),
            (QuantizedType::F8E4m3Blocks, "[2, 2]"),
        ] {
            let e = of(kind, &[1.0; 3]).unwrap_err().to_string();
            assert!(e.contains(expected) && e.contains("3 scales"), "{e}");
        }
        let block = QuantizedType::Block(BlockType::Q8_0);
        assert!(QuantizedRef::scaled(block, &[0; 34], &[1.0], 1, 32).is_err());
        assert_eq!(QuantizedType::F8E4m3Blocks.bytes(130, 200), 130.0 * 200.0 + 16.0);
    }

    #[test]
    fn ranges_of_rows_take_their_scales() {
        let (codes, scales) = (vec![0x38; 300], [1.0, 2.0, 3.0f32]);
        let m = QuantizedRef::scaled(QuantizedType::F8E4m3Blocks, &codes, &scales, 300, 1).unwrap();
        let first = |m: QuantizedRef<'_>, row| {
            let mut value = f64::NAN;
            m.terms(row, |v, _| value = v);
            value
        };
        let part = m.rows_range(128..300).unwrap();
        assert_eq!((first(part, 0), first(part, 127), first(part, 128)), (2.0, 2.0, 3.0));
        assert_eq!(m.rows_range(256..300).unwrap().scales(), [3.0]);
        let e = m.rows_range(150..300).unwrap_err().to_string();
        assert!(e.contains("150") && e.contains("multiple of 128"), "{e}");
        let scales: Vec<f32> = (0..300).map(|r| r as f32).collect();
        let m = QuantizedRef::scaled(QuantizedType::F8E4m3, &codes, &scales, 300, 1).unwrap();
        assert_eq!(first(m.rows_range(150..300).unwrap(), 3), 153.0);
        assert!(m.rows_range(300..300).unwrap().scales().is_empty());
    }
}
