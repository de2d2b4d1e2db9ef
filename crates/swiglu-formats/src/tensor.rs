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
        let none = || Arc::new([]);
        Ok(StoredMatrix {
            name,
            stored,
            rows,
            cols,
            data,
            scales: none(),
            offsets: none(),
            factor: 1.0,
        })
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
    /// The scales of [`StoredType::Scaled`], as many as [`swiglu_core::QuantizedType::scales`] says, or of
    /// [`StoredType::Coded`]; else none.
    pub(crate) scales: Arc<[f32]>,
    /// The offsets of [`StoredType::Coded`] that has them, one for each scale; else none.
    pub(crate) offsets: Arc<[f32]>,
    /// What every value is multiplied by.
    pub(crate) factor: f32,
}

impl StoredMatrix {
    /// The matrix with every value multiplied by `factor`: what the file states beside the tensor.
    #[must_use]
    pub(crate) fn scaled_by(self, factor: f32) -> Self {
        Self { factor: self.factor * factor, ..self }
    }

    /// The upper and the lower half of the rows; none where scales are shared.
    pub(crate) fn row_halves(&self) -> Option<[Self; 2]> {
        let (rows, len) = (self.rows / 2, self.row_bytes() * (self.rows / 2));
        let plain = self.rows.is_multiple_of(2) && self.scales.is_empty();
        let half = |start: usize| {
            let data = self.data.slice(start..start + len)?;
            Some(Self { rows, data, ..self.clone() })
        };
        if plain { Some([half(0)?, half(len)?]) } else { None }
    }

    /// What every stored value is multiplied by: 1 unless the file says so.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// The elements without a copy, if they are stored as `T`, lie aligned and have no factor.
    pub fn view<T: Element>(&self) -> Option<MatrixRef<'_, T>> {
        if self.stored.dtype() != Some(T::DTYPE) || self.factor != 1.0 {
            return None;
        }
        MatrixRef::new(as_elements(&self.data)?, self.rows, self.cols).ok()
    }

    /// The blocks or codes without a copy, if the elements are quantised in a form that kernels may take
    /// and have no factor: rows along the inputs where the matrix is `[out, in]`, as GGUF files have it.
    pub fn quantized(&self) -> Option<QuantizedRef<'_>> {
        if self.factor != 1.0 {
            return None;
        }
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

    /// The elements as `T`; values that are quantised or have a factor are `f32` first, so narrowing rounds
    /// their `f32`.
    ///
    /// # Errors
    /// [`FormatError::Core`] if there is no memory for them, or the extents do not fit the data, which a
    /// parsed file excludes.
    pub fn to_matrix<T: Element>(&self) -> Result<Matrix<T>> {
        if self.is_computed() {
            let mut out = Matrix::room(self.rows, self.cols)?;
            self.for_each_row(|_, values| {
                out.extend(values.iter().map(|&v| T::from_f32(v as f32)));
                Ok(())
            })?;
            return Ok(Matrix::from_vec(out, self.rows, self.cols)?);
        }
        if matches!(self.stored, StoredType::Scaled(_)) {
            return Ok(self.codes()?.to_matrix()?);
        }
        let mut out = Matrix::room(self.rows, self.cols)?;
        self.stored.decode(&self.data, &mut out);
        Ok(Matrix::from_vec(out, self.rows, self.cols)?)
    }

    /// The elements as float64, exactly as stored (quantised ones in blocks as their `f32`) and times their
    /// factor.
    ///
    /// # Errors
    /// As [`Self::to_matrix`].
    pub fn to_matrix_f64(&self) -> Result<Matrix<f64>> {
        let mut out = Matrix::room(self.rows, self.cols)?;
        self.for_each_row(|_, values| {
            out.extend_from_slice(values);
            Ok(())
        })?;
        Ok(Matrix::from_vec(out, self.rows, self.cols)?)
    }

    /// Whether a value is more than what the bytes, or a kernel's type of weights, say.
    fn is_computed(&self) -> bool {
        matches!(self.stored, StoredType::Coded(_)) || self.factor != 1.0
    }

    /// Gives each row's values as float64. Row by row, so that neither checking a large layer nor types
    /// that are decoded by way of `f32` need a decoded copy of it.
    fn for_each_row(&self, mut each: impl FnMut(usize, &[f64]) -> Result<()>) -> Result<()> {
        let codes = match self.stored {
            StoredType::Scaled(_) => Some(self.codes()?),
            _ => None,
        };
        let row_bytes = self.row_bytes();
        let mut values: Vec<f64> = Vec::new();
        for row in 0..self.rows {
            values.clear();
            let Some(part) = self.data.get(row * row_bytes..(row + 1) * row_bytes) else { break };
            match (&codes, &self.stored) {
                (Some(codes), _) => codes.terms(row, |value, _| values.push(value)),
                (None, StoredType::Coded(coded)) => {
                    let beside = [&self.scales[..], &self.offsets[..]];
                    coded.row(row, part, self.cols, beside, &mut values);
                }
                (None, stored) => stored.decode_f64(part, &mut values),
            }
            if self.factor != 1.0 {
                values.iter_mut().for_each(|v| *v *= f64::from(self.factor));
            }
            each(row, &values)?;
        }
        Ok(())
    }

    fn row_bytes(&self) -> usize {
        let (elements, bytes) = self.stored.block().unwrap_or((1, 1));
        self.cols / elements * bytes
    }

    /// Refuses NaN and infinities, naming a factor or scale that is one, else the first value.
    ///
    /// # Errors
    /// [`swiglu_core::Error::NonFinite`], as [`FormatError::Core`].
    pub fn expect_finite(&self) -> Result<()> {
        let refuse = |what: String, row, col, value: f64| -> Result<()> {
            Err(swiglu_core::Error::NonFinite { what, row, col, value }.into())
        };
        if !self.factor.is_finite() {
            return refuse(format!("the factor of {}", self.name), 0, 0, self.factor.into());
        }
        if let StoredType::Coded(coded) = self.stored {
            let across = coded.scales(self.rows, self.cols)[1].max(1);
            for (what, all) in [("scale", &self.scales), ("offset", &self.offsets)] {
                if let Some(at) = all.iter().position(|v| !v.is_finite()) {
                    let what = format!("{what} of {}", self.name);
                    return refuse(what, at / across, at % across, all[at].into());
                }
            }
        }
        if matches!(self.stored, StoredType::Scaled(_)) {
            self.codes()?.expect_finite(&self.name)?;
            if self.factor == 1.0 {
                return Ok(());
            }
        }
        // What is computed becomes an `f32`, which may overflow.
        let narrow = self.is_computed();
        let lost = |v: f64| if narrow { !(v as f32).is_finite() } else { !v.is_finite() };
        self.for_each_row(|row, values| match values.iter().position(|&v| lost(v)) {
            Some(col) => refuse(self.name.clone(), row, col, values[col]),
            None => Ok(()),
        })
    }
}
