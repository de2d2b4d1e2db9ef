//! NumPy's `.npy`: one array with a small header.
//!
//! Read: versions 1.0, 2.0 and 3.0, `<f4`, `<f2` and `<f8`, C order and, for matrices, Fortran
//! order. bfloat16 has no descriptor in this format: NumPy writes it as the opaque `|V2`, which
//! is refused, because two bytes may be anything.

mod header;
mod write;

use std::path::Path;

use crate::bytes::Bytes;
use crate::error::{FormatError, Result};
use crate::stored::StoredType;
use crate::tensor::Tensor;
pub use write::{write, write_f64};

/// The first bytes of every npy file.
pub(crate) const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// A parsed array.
#[derive(Debug, Clone)]
pub struct Npy {
    /// The array, under the name `array`. In Fortran order the shape is still the logical one.
    pub tensor: Tensor,
    /// Whether the first extent is the adjacent one.
    pub fortran_order: bool,
}

/// Parses a file. `path` is only used in errors.
///
/// # Errors
/// [`FormatError::Truncated`], [`FormatError::Malformed`] and, for other element types,
/// [`FormatError::UnsupportedDtype`].
pub fn parse(bytes: &Bytes, path: &Path) -> Result<Npy> {
    let header = header::parse(bytes, path)?;
    let stored = type_of(&header.descr, path)?;
    let size = stored.block().map_or(0, |(_, bytes)| bytes as u64);
    let count = header.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let shape: Option<Vec<usize>> = header.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let (Some(needed), Some(shape)) = (count.and_then(|n| n.checked_mul(size)), shape) else {
        let given = format!("{:?}", header.shape);
        return Err(FormatError::malformed(path, 10, "shape", "fewer than 2^64 bytes", given));
    };
    let available = (bytes.len() - header.end) as u64;
    if available < needed {
        return Err(FormatError::Truncated {
            path: path.to_owned(),
            what: format!("{stored} data of shape {shape:?}"),
            offset: header.end as u64,
            needed,
            available,
        });
    }
    if available > needed {
        let expected = format!("{needed} bytes of {stored} {shape:?}");
        let given = format!("{available} bytes");
        return Err(FormatError::malformed(path, header.end as u64, "data", expected, given));
    }
    let data = bytes.slice(header.end..bytes.len()).unwrap_or_else(|| Bytes::from(Vec::new()));
    let tensor = Tensor { name: "array".into(), stored, shape, data };
    Ok(Npy { tensor, fortran_order: header.fortran_order })
}

fn type_of(descr: &str, path: &Path) -> Result<StoredType> {
    let supported = match descr {
        "<f4" => return Ok(StoredType::F32),
        "<f2" => return Ok(StoredType::F16),
        "<f8" => return Ok(StoredType::F64),
        "|V2" => {
            "'<f4', '<f2' and '<f8'; if this is bfloat16, save it as float32 or in safetensors"
        }
        ">f4" | ">f2" | ">f8" => {
            "'<f4', '<f2' and '<f8'; save it in little-endian order, for example a.astype('<f4')"
        }
        _ => "'<f4', '<f2' and '<f8'; save it as one of these, for example a.astype('<f4')",
    };
    Err(FormatError::UnsupportedDtype {
        path: path.to_owned(),
        tensor: "the array".into(),
        dtype: format!("'{}'", crate::error::clip(descr, 60)),
        supported,
    })
}
