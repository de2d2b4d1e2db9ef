//! One tensor of a file.

use std::path::Path;
use std::sync::Arc;

use swiglu_core::{Element, Matrix, MatrixRef, QuantizedRef};

use crate::bytes::{Bytes, as_elements};
use crate::error::{FormatError, Result};
use crate::stored::{READABLE, StoredType};

const MAX_EMPTY_EXTENT: usize = i32::MAX as usize;

/// A tensor as it lies in its file.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// How elements are stored.
    pub stored: StoredType,
    /// Extents, the last one adjacent in memory, in every format.
    pub shape: Vec<usize>,
    /// The bytes, borrowed from the file. Their number fits type and shape; empty for types that
    /// cannot be read.
    pub data: Bytes,
}

impl Tensor {
    pub(crate) fn expect_readable(&self, path: &Path) -> Result<(usize, usize)> {
        self.stored.block().ok_or_else(|| FormatError::UnsupportedDtype {
            path: path.to_owned(),
            tensor: self.name.clone(),
            dtype: self.stored.to_string(),
            supported: READABLE,
        })
    }

    /// Entry `index` of the first dimension: one expert of a stack.
    pub(crate) fn entry(&self, index: usize, path: &Path) -> Result<Tensor> {
        let (elements, bytes) = match self.stored.size() {
            Some(size) => size,
            None => self.expect_readable(path)?,
        };
        let one = || FormatError::shape(path, &self.name, "a stack of whole blocks", &self.shape);
        let (&count, inner) = self.shape.split_first().ok_or_else(one)?;
        if index >= count {
            return Err(FormatError::ExpertOutOfRange {
                path: path.to_owned(),
                expert: index,
                available: format!("{} stacks {count} experts", self.name),
            });
        }
        let len = inner
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .filter(|n| n.is_multiple_of(elements))
            .and_then(|n| (n / elements).checked_mul(bytes))
            .ok_or_else(one)?;
        // With `index` below `count`, the end is at most the whole tensor's length.
        let data = self.data.slice(index * len..index * len + len).ok_or_else(one)?;
        Ok(Tensor {
            name: self.name.clone(),
            stored: self.stored.clone(),
            shape: inner.to_vec(),
            data,
        })
    }

    /// As a matrix: two extents; with `flatten`, all but the last are rows.
    pub(crate) fn into_matrix(self, path: &Path, flatten: bool) -> Result<StoredMatrix> {
        self.expect_readable(path)?;
        let (rows, cols) = match self.shape.split_last() {
            Some((&cols, leading)) if flatten || leading.len() == 1 => {
                (leading.iter().try_fold(1usize, |n, &d| n.checked_mul(d)), cols)
            }
            _ => (None, 0),
        };
        let Some(rows) = rows else {
            let expected = match flatten {
                true => {
                    "at least one extent, the last of which is the columns, and fewer than 2^64 rows"
                }
                false => "two extents",
            };
            return Err(FormatError::shape(path, &self.name, expected, &self.shape));
        };
        // Without elements the data does not bound the other extent, and loops run over rows.
        if (rows == 0 || cols == 0) && rows.max(cols) > MAX_EMPTY_EXTENT {
            let expected = "extents below 2^31 where there are no elements";
            return Err(FormatError::shape(path, &self.name, expected, &self.shape));
        }
        let Tensor { name, stored, data, .. } = self;
        Ok(StoredMatrix { name, stored, rows, cols, data, scales: Arc::new([]) })
    }

    /// All elements in order, as `f32`.
    pub(crate) fn to_vec_f32(&self, path: &Path) -> Result<Vec<f32>> {
        self.expect_readable(path)?;
        let mut out = Matrix::room(1, decoded_len(&self.stored, self.data.len()))?;
        self.stored.decode(&self.data, &mut out);
        Ok(out)
    }
}

/// Which of these (offset, length) lie in bytes that an earlier one has too, each with that one.
pub(crate) fn overlaps(places: &[(u64, u64)]) -> Vec<(usize, usize)> {
    let mut order: Vec<usize> = (0..places.len()).filter(|&i| places[i].1 > 0).collect();
    order.sort_by_key(|&i| places[i]);
    let mut furthest: Option<(u64, usize)> = None;
    let mut out = Vec::new();
    for i in order {
        let (begin, len) = places[i];
        let end = begin.saturating_add(len);
        match furthest {
            Some((stop, owner)) if begin < stop => {
                out.push((i, owner));
                if end > stop {
                    furthest = Some((end, i));
                }
            }
            _ => furthest = Some((end, i)),
        }
    }
    out
}

/// Elements in `len` bytes: what decoding will write, known without trusting a shape.
fn decoded_len(stored: &StoredType, len: usize) -> usize {
    stored.block().map_or(0, |(elements, bytes)| len / bytes * elements)
}

/// A matrix as it lies in its file, decoded on request.
#[derive(Debug, Clone)]
pub struct StoredMatrix {
    /// The tensor's name.
    pub name: String,
    /// How elements are stored; always a readable type.
    pub stored: StoredType,
    /// Rows.
    pub rows: usize,
    /// Columns, adjacent in memory. A whole number of blocks.
    pub cols: usize,
    /// The bytes, row by row.
    pub data: Bytes,
    /// The scales of [`StoredType::Scaled`], as many as [`swiglu_core::QuantizedType::scales`] says; else none.
    pub(crate) scales: Arc<[f32]>,
}

impl StoredMatrix {
    /// The elements without a copy, if they are stored as `T` and lie aligned.
    pub fn view<T: Element>(&self) -> Option<MatrixRef<'_, T>> {
        if self.stored.dtype() != Some(T::DTYPE) {
            return None;
        }
        MatrixRef::new(as_elements(&self.data)?, self.rows, self.cols).ok()
    }

    /// The blocks or codes without a copy, if the elements are quantised: rows along the inputs where the
    /// matrix is `[out, in]`, as GGUF files have it.
    pub fn quantized(&self) -> Option<QuantizedRef<'_>> {
        match self.stored {
            StoredType::Block(block) => {
                QuantizedRef::new(block, &self.data, self.rows, self.cols).ok()
            }
            StoredType::Scaled(_) => self.codes().ok(),
            _ => None,
        }
    }

    /// Codes with their scales.
    fn codes(&self) -> Result<QuantizedRef<'_>> {
        let StoredType::Scaled(kind) = self.stored else {
            return Err(swiglu_core::Error::Unsupported {
                what: format!("{} as {}", self.name, self.stored),
                why: "it has no scales beside it".into(),
            }
            .into());
        };
        Ok(QuantizedRef::scaled(kind, &self.data, &self.scales, self.rows, self.cols)?)
    }

    /// The elements as `T`; quantised values are `f32` first, so narrowing rounds their `f32`.
    ///
    /// # Errors
    /// [`FormatError::Core`] if there is no memory for them, or the extents do not fit the data, which a
    /// parsed file excludes.
    pub fn to_matrix<T: Element>(&self) -> Result<Matrix<T>> {
        if matches!(self.stored, StoredType::Scaled(_)) {
            return Ok(self.codes()?.to_matrix()?);
        }
        let mut out = Matrix::room(self.rows, self.cols)?;
        self.stored.decode(&self.data, &mut out);
        Ok(Matrix::from_vec(out, self.rows, self.cols)?)
    }

    /// The elements as float64, exactly as stored (quantised ones in blocks as their `f32`).
    ///
    /// # Errors
    /// As [`Self::to_matrix`].
    pub fn to_matrix_f64(&self) -> Result<Matrix<f64>> {
        if matches!(self.stored, StoredType::Scaled(_)) {
            let (codes, mut values) = (self.codes()?, Matrix::room(self.rows, self.cols)?);
            (0..self.rows).for_each(|r| codes.terms(r, |value, _| values.push(value)));
            return Ok(Matrix::from_vec(values, self.rows, self.cols)?);
        }
        let mut out = Matrix::room(self.rows, self.cols)?;
        // Row by row: types that are decoded by way of `f32` need room for that too.
        let row_bytes = self.row_bytes().max(1);
        self.data.chunks(row_bytes).for_each(|row| self.stored.decode_f64(row, &mut out));
        Ok(Matrix::from_vec(out, self.rows, self.cols)?)
    }

    fn row_bytes(&self) -> usize {
        let (elements, bytes) = self.stored.block().unwrap_or((1, 1));
        self.cols / elements * bytes
    }

    /// Refuses NaN and infinities, naming the first one.
    ///
    /// # Errors
    /// [`swiglu_core::Error::NonFinite`], as [`FormatError::Core`].
    pub fn expect_finite(&self) -> Result<()> {
        if matches!(self.stored, StoredType::Scaled(_)) {
            return Ok(self.codes()?.expect_finite(&self.name)?);
        }
        // Row by row, so that checking a large layer does not need a decoded copy of it.
        let row_bytes = self.row_bytes();
        let mut values: Vec<f64> = Vec::new();
        for row in 0..self.rows {
            let Some(part) = self.data.get(row * row_bytes..(row + 1) * row_bytes) else { break };
            values.clear();
            self.stored.decode_f64(part, &mut values);
            if let Some(col) = values.iter().position(|v| !v.is_finite()) {
                return Err(swiglu_core::Error::NonFinite {
                    what: self.name.clone(),
                    row,
                    col,
                    value: values[col],
                }
                .into());
            }
        }
        Ok(())
    }
}
