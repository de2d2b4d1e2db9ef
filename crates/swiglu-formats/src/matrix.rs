//! A matrix of any readable element type, from a file.

use std::ffi::OsStr;
use std::path::Path;

use half::{bf16, f16};
use swiglu_core::{Element, Matrix};

use crate::bytes::Bytes;
use crate::error::{FormatError, Result, list};
use crate::model::{FileFormat, Model};
use crate::npy;
use crate::recognise::Wanted;
use crate::stored::{StoredType, narrow};
use crate::tensor::{StoredMatrix, Tensor};

/// A matrix in the element type its file stores; quantised ones are decoded to `f32`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum DynMatrix {
    /// IEEE binary32, or decoded from a quantised type.
    F32(Matrix<f32>),
    /// IEEE binary16.
    F16(Matrix<f16>),
    /// bfloat16.
    Bf16(Matrix<bf16>),
    /// IEEE binary64.
    F64(Matrix<f64>),
}

impl DynMatrix {
    fn new(m: &StoredMatrix) -> Result<Self> {
        Ok(match m.stored {
            StoredType::F16 => DynMatrix::F16(m.to_matrix()?),
            StoredType::Bf16 => DynMatrix::Bf16(m.to_matrix()?),
            StoredType::F64 => DynMatrix::F64(m.to_matrix_f64()?),
            _ => DynMatrix::F32(m.to_matrix()?),
        })
    }

    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            DynMatrix::F32(m) => m.shape(),
            DynMatrix::F16(m) => m.shape(),
            DynMatrix::Bf16(m) => m.shape(),
            DynMatrix::F64(m) => m.shape(),
        }
    }

    /// The element type's short name: `f32`, `f16`, `bf16` or `f64`.
    pub fn dtype_name(&self) -> &'static str {
        match self {
            DynMatrix::F32(_) => "f32",
            DynMatrix::F16(_) => "f16",
            DynMatrix::Bf16(_) => "bf16",
            DynMatrix::F64(_) => "f64",
        }
    }

    /// A copy with elements of type `T`, each rounded at most once.
    ///
    /// # Errors
    /// [`swiglu_core::Error::OutOfMemory`] if there is no memory for it.
    pub fn to<T: Element>(&self) -> swiglu_core::Result<Matrix<T>> {
        match self {
            DynMatrix::F32(m) => m.view().to_dtype(),
            DynMatrix::F16(m) => m.view().to_dtype(),
            DynMatrix::Bf16(m) => m.view().to_dtype(),
            DynMatrix::F64(m) => map(m, narrow),
        }
    }

    /// A copy in float64, without rounding.
    ///
    /// # Errors
    /// As [`Self::to`].
    pub fn to_f64(&self) -> swiglu_core::Result<Matrix<f64>> {
        match self {
            DynMatrix::F32(m) => map(m, f64::from),
            DynMatrix::F16(m) => map(m, f16::to_f64),
            DynMatrix::Bf16(m) => map(m, bf16::to_f64),
            DynMatrix::F64(m) => m.try_clone(),
        }
    }

    /// Refuses NaN and infinities, naming the first one.
    ///
    /// # Errors
    /// [`swiglu_core::Error::NonFinite`].
    pub fn expect_finite(&self, what: &str) -> swiglu_core::Result<()> {
        let m = match self {
            DynMatrix::F32(m) => return m.view().expect_finite(what),
            DynMatrix::F16(m) => return m.view().expect_finite(what),
            DynMatrix::Bf16(m) => return m.view().expect_finite(what),
            DynMatrix::F64(m) => m,
        };
        let Some(i) = m.as_slice().iter().position(|v| !v.is_finite()) else { return Ok(()) };
        let (row, col, value) = (i / m.cols(), i % m.cols(), m.as_slice()[i]);
        Err(swiglu_core::Error::NonFinite { what: what.to_owned(), row, col, value })
    }

    /// The transpose, whose row r is column `column(r)` of this.
    fn transposed(&self, column: impl Fn(usize) -> usize) -> swiglu_core::Result<Self> {
        Ok(match self {
            DynMatrix::F32(m) => DynMatrix::F32(transpose(m, column)?),
            DynMatrix::F16(m) => DynMatrix::F16(transpose(m, column)?),
            DynMatrix::Bf16(m) => DynMatrix::Bf16(transpose(m, column)?),
            DynMatrix::F64(m) => DynMatrix::F64(transpose(m, column)?),
        })
    }
}

fn map<A: Copy + Default, B: Copy + Default>(
    m: &Matrix<A>,
    f: fn(A) -> B,
) -> swiglu_core::Result<Matrix<B>> {
    Matrix::from_values(m.as_slice().iter().map(|&v| f(v)), m.rows(), m.cols())
}

fn transpose<T: Copy + Default>(
    m: &Matrix<T>,
    column: impl Fn(usize) -> usize,
) -> swiglu_core::Result<Matrix<T>> {
    let [rows, cols] = m.shape();
    let source = m.as_slice();
    if source.is_empty() {
        return Matrix::from_vec(Vec::new(), cols, rows);
    }
    let values = (0..cols).map(column).flat_map(|c| (0..rows).map(move |r| source[r * cols + c]));
    Matrix::from_values(values, cols, rows)
}

/// Where the row that is `row`th in C order is in Fortran order, of the extents that count rows.
fn in_fortran_order(extents: &[usize], row: usize) -> usize {
    let (mut rest, mut stride, mut out) = (row, extents.iter().product::<usize>(), 0);
    for &extent in extents.iter().rev() {
        stride /= extent;
        out += rest % extent * stride;
        rest /= extent;
    }
    out
}

/// The file of `FILE.npy`, `FILE.safetensors#TENSOR` or `FILE.gguf#TENSOR`, and the tensor where one is named. A file
/// whose own name has a `#` in it is found first.
pub fn matrix_file(spec: &OsStr) -> (&Path, Option<&OsStr>) {
    match split_at_last_hash(spec) {
        Some((path, tensor)) if !Path::new(spec).is_file() => (Path::new(path), Some(tensor)),
        _ => (Path::new(spec), None),
    }
}

/// What is before and behind the last `#`.
fn split_at_last_hash(spec: &OsStr) -> Option<(&OsStr, &OsStr)> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let bytes = spec.as_bytes();
        let at = bytes.iter().rposition(|&b| b == b'#')?;
        Some((OsStr::from_bytes(&bytes[..at]), OsStr::from_bytes(&bytes[at + 1..])))
    }
    #[cfg(not(unix))]
    {
        let (path, tensor) = spec.to_str()?.rsplit_once('#')?;
        Some((path.as_ref(), tensor.as_ref()))
    }
}

/// Reads a matrix: `FILE.npy`, `FILE.safetensors#TENSOR` or `FILE.gguf#TENSOR`. The tensor may be
/// left out if the file has only one. A vector is read as one row, `[b, t, k]` as `[b·t, k]`, and so on.
///
/// # Errors
/// Any [`FormatError`]; [`FormatError::TensorNotNamed`] lists the tensors to choose from.
pub fn read_matrix(spec: impl AsRef<OsStr>) -> Result<DynMatrix> {
    let (path, tensor) = matrix_file(spec.as_ref());
    // No tensor has a name that is not UTF-8: it is looked for, and reported, as it is shown.
    let tensor = tensor.map(OsStr::to_string_lossy);
    let tensor = tensor.as_deref();
    if path.is_dir() {
        return matrix_of(&Model::open(path)?, tensor);
    }
    let bytes = Bytes::map(path)?;
    if FileFormat::of(&bytes, path, Wanted::Matrix)? != FileFormat::Npy {
        return matrix_of(&Model::open(path)?, tensor);
    }
    match tensor {
        None | Some("") => matrix_from_npy(&bytes, path),
        Some(name) => Err(FormatError::TensorNotFound {
            path: path.to_owned(),
            name: name.to_owned(),
            near: "an npy file holds one array without a name".into(),
        }),
    }
}

/// Reads a matrix out of a safetensors file in memory. With an empty name, its only tensor.
///
/// # Errors
/// As [`read_matrix`].
pub fn matrix_from_safetensors_bytes(bytes: impl Into<Bytes>, tensor: &str) -> Result<DynMatrix> {
    matrix_of(&Model::from_safetensors(&bytes.into())?, Some(tensor))
}

/// Reads the array of an npy file in memory.
///
/// # Errors
/// As [`read_matrix`].
pub fn matrix_from_npy_bytes(bytes: impl Into<Bytes>) -> Result<DynMatrix> {
    matrix_from_npy(&bytes.into(), Path::new(crate::model::MEMORY))
}

fn matrix_from_npy(bytes: &Bytes, path: &Path) -> Result<DynMatrix> {
    let npy::Npy { tensor, fortran_order } = npy::parse(bytes, path)?;
    if !fortran_order || tensor.shape.len() < 2 {
        return DynMatrix::new(&tensor.into_matrix(path, true)?);
    }
    // Read as what it is in C order, with the extents the other way round: k rows of tokens.
    let (lying, leading) = match tensor.shape.split_last() {
        Some((&cols, leading)) => (vec![cols, leading.iter().product()], leading.to_vec()),
        None => (Vec::new(), Vec::new()),
    };
    let lying = Tensor { shape: lying, ..tensor };
    let matrix = DynMatrix::new(&lying.into_matrix(path, true)?)?;
    Ok(matrix.transposed(|row| in_fortran_order(&leading, row))?)
}

fn matrix_of(model: &Model, tensor: Option<&str>) -> Result<DynMatrix> {
    let name = match tensor {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ => {
            let names = model.names();
            match names.as_slice() {
                [only] => (*only).to_owned(),
                _ => {
                    return Err(FormatError::TensorNotNamed {
                        path: model.path().to_owned(),
                        count: names.len(),
                        names: list(names.iter().copied(), 12),
                    });
                }
            }
        }
    };
    DynMatrix::new(&model.tensor(&name)?.into_matrix(model.path(), true)?)
}
