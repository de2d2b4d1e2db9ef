//! safetensors: a JSON header and the bytes of every tensor, without gaps.
//!
//! The header is read here and not with the `safetensors` crate because that crate's errors carry
//! no values, one tensor of a new type makes it refuse the whole file, repeated names go
//! unnoticed, and offsets near 2⁶⁴ overflow in its length check. What it accepts is accepted here.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use crate::bytes::Bytes;
use crate::error::{FormatError, Result, clip};
use crate::stored::StoredType;
use crate::tensor::Tensor;

/// The reference reader's limit; real headers are below one megabyte.
const MAX_HEADER: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;

/// A parsed file: the tensors borrow its bytes.
#[derive(Debug, Clone)]
pub struct SafeTensors {
    /// The free-form `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, by their place in the file.
    pub tensors: Vec<Tensor>,
}

/// Parses a file. `path` is only used in errors.
///
/// # Errors
/// [`FormatError::Truncated`] and [`FormatError::Malformed`]. A tensor of an unknown type is no
/// error until it is read.
pub fn parse(bytes: &Bytes, path: &Path) -> Result<SafeTensors> {
    let (json, data_start) = header_text(bytes, path)?;
    let header: Header = serde_json::from_slice(json).map_err(|e| {
        let at = LENGTH_BYTES + e.column() as u64;
        FormatError::malformed(path, at, "header", "a JSON object of tensors", e)
    })?;
    let mut entries = header.entries;
    entries.sort_by_key(|(_, e)| e.data_offsets);
    refuse_repeated(&entries, path)?;

    let available = bytes.len() as u64 - data_start;
    let mut tensors = Vec::new();
    let mut end = 0u64;
    for (name, entry) in entries {
        let [begin, stop] = entry.data_offsets;
        let bad = |expected: String, given: String| {
            let what = format!("data_offsets of {}", clip(&name, 100));
            FormatError::malformed(path, LENGTH_BYTES, what, expected, given)
        };
        if begin != end || stop < begin {
            let expected = format!("[{end}, …], where the previous tensor ends");
            return Err(bad(expected, format!("[{begin}, {stop}]")));
        }
        if stop > available {
            return Err(FormatError::Truncated {
                path: path.to_owned(),
                what: format!("data of {}", clip(&name, 100)),
                offset: data_start.saturating_add(begin),
                needed: stop - begin,
                available: available.saturating_sub(begin),
            });
        }
        let stored = type_of(&entry.dtype);
        let shape = check_shape(&entry, &stored, stop - begin).map_err(|e| bad(e.0, e.1))?;
        // Both bounds are at most the file's length.
        let range = (data_start + begin) as usize..(data_start + stop) as usize;
        let data = bytes.slice(range).unwrap_or_else(|| Bytes::from(Vec::new()));
        tensors.push(Tensor { name, stored, shape, data });
        end = stop;
    }
    if end != available {
        return Err(FormatError::malformed(
            path,
            data_start + end,
            "data",
            format!("{end} bytes, the end of the last tensor"),
            format!("{available} bytes"),
        ));
    }
    Ok(SafeTensors { metadata: header.metadata, tensors })
}

/// The header's JSON and the offset at which data starts.
fn header_text<'a>(bytes: &'a Bytes, path: &Path) -> Result<(&'a [u8], u64)> {
    let truncated = |what: &str, offset: u64, needed: u64| FormatError::Truncated {
        path: path.to_owned(),
        what: what.to_owned(),
        offset,
        needed,
        available: bytes.len() as u64 - offset.min(bytes.len() as u64),
    };
    let Some(len) = bytes.first_chunk::<8>() else {
        return Err(truncated("header length", 0, LENGTH_BYTES));
    };
    let len = u64::from_le_bytes(*len);
    if len > MAX_HEADER {
        let expected = format!("at most {MAX_HEADER} bytes");
        return Err(FormatError::malformed(path, 0, "header length", expected, len));
    }
    let start = LENGTH_BYTES + len;
    match bytes.get(LENGTH_BYTES as usize..start as usize) {
        Some(json) => Ok((json, start)),
        None => Err(truncated("header", LENGTH_BYTES, len)),
    }
}

fn refuse_repeated(entries: &[(String, Entry)], path: &Path) -> Result<()> {
    let mut names: Vec<&str> = entries.iter().map(|(n, _)| n.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(w) => {
            Err(FormatError::malformed(path, LENGTH_BYTES, "tensor name", "each name once", w[0]))
        }
        None => Ok(()),
    }
}

/// The shape as extents, checked against the bytes; on failure what was expected and given.
fn check_shape(
    entry: &Entry,
    stored: &StoredType,
    len: u64,
) -> std::result::Result<Vec<usize>, (String, String)> {
    let given = || clip(&format!("{} {:?} in {len} bytes", entry.dtype, entry.shape), 120);
    let shape: Option<Vec<usize>> = entry.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let count = entry.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let (Some(shape), Some(count)) = (shape, count) else {
        return Err(("fewer than 2^64 elements".into(), given()));
    };
    // An unknown type's size is unknown; such a tensor is never read.
    let Some((_, size)) = stored.size() else { return Ok(shape) };
    match count.checked_mul(size as u64) {
        Some(n) if n == len => Ok(shape),
        Some(n) => Err((format!("{n} bytes"), given())),
        None => Err(("fewer than 2^64 bytes".into(), given())),
    }
}

fn type_of(name: &str) -> StoredType {
    match name {
        "F64" => StoredType::F64,
        "F32" => StoredType::F32,
        "F16" => StoredType::F16,
        "BF16" => StoredType::Bf16,
        "I8" => StoredType::I8,
        "U8" => StoredType::U8,
        "F8_E4M3" => StoredType::F8E4m3,
        "F8_E5M2" => StoredType::F8E5m2,
        "F8_E8M0" => StoredType::F8E8m0,
        other => StoredType::Other(clip(other, 40)),
    }
}

#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

struct Header {
    metadata: BTreeMap<String, String>,
    entries: Vec<(String, Entry)>,
}

/// Read by hand because a map type would silently keep the last of several equal names.
impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header { metadata: BTreeMap::new(), entries: Vec::new() };
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        // Exporters exist that write null for none.
                        let given: Option<BTreeMap<String, String>> = map.next_value()?;
                        header.metadata = given.unwrap_or_default();
                    } else {
                        header.entries.push((key, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}
