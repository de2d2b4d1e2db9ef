//! NumPy's `.npy`: one array with a small header.
//!
//! Read: versions 1.0, 2.0 and 3.0, floats of 2, 4 and 8 bytes in either byte order, C and Fortran order.
//! bfloat16 has no descriptor in this format: NumPy writes it as the opaque `<V2` or `|V2`, which
//! is refused, because two bytes may be anything.

mod header;
mod types;
mod write;

use std::path::Path;

use swiglu_core::Matrix;

use crate::bytes::Bytes;
use crate::error::{FormatError, Result};
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
    let types::Kind { stored, size, big } = types::of(&header.descr, path)?;
    let count = header.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let shape: Option<Vec<usize>> = header.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let (Some(needed), Some(shape)) = (count.and_then(|n| n.checked_mul(size as u64)), shape)
    else {
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
    let data = bytes.slice(header.end..bytes.len()).unwrap_or_else(|| Bytes::from(Vec::new()));
    if available > needed {
        // Both are at most the file's length.
        let more = data.get(needed as usize..).unwrap_or_default();
        let given = match more.starts_with(MAGIC) {
            true => "another array behind it; np.save each to a file of its own".into(),
            false => format!("{available} bytes"),
        };
        let expected = format!("{needed} bytes of {stored} {shape:?}");
        return Err(FormatError::malformed(path, header.end as u64, "data", expected, given));
    }
    let data = if big { swapped(&data, size)? } else { data };
    let tensor = Tensor { name: "array".into(), stored, shape, data };
    Ok(Npy { tensor, fortran_order: header.fortran_order })
}

/// Elements of `size` bytes in the other byte order.
fn swapped(data: &[u8], size: usize) -> Result<Bytes> {
    let mut out = Matrix::<u8>::room(1, data.len())?;
    out.extend(data.chunks_exact(size).flat_map(|element| element.iter().rev()));
    Ok(Bytes::from(out))
}
