//! GGUF versions 2 and 3, little endian.

mod cursor;
pub mod metadata;
/// Block-quantised types and their decoding.
pub use swiglu_core::quant;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::bytes::Bytes;
use crate::error::{FormatError, Result, clip};
use crate::stored::StoredType;
use crate::tensor::Tensor;
use cursor::Cursor;
use metadata::Value;
use quant::BlockType;

/// The first bytes of every GGUF file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
/// The shortest tensor header: an empty name, one dimension.
const LEAST_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;
const DEFAULT_ALIGNMENT: u64 = 32;

/// A parsed file: the tensors borrow its bytes.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// 2 or 3.
    pub version: u32,
    /// The metadata, without the contents of arrays.
    pub metadata: BTreeMap<String, Value>,
    /// The tensors in the order of the file. Shapes are row-major: the file's `ne` reversed.
    pub tensors: Vec<Tensor>,
}

impl Gguf {
    /// The model's architecture, for example `llama`.
    pub fn architecture(&self) -> Option<&str> {
        self.metadata.get("general.architecture").and_then(Value::as_str)
    }

    /// An integer under the architecture's own prefix, for example `embedding_length`.
    pub fn architecture_value(&self, key: &str) -> Option<u64> {
        self.metadata.get(&format!("{}.{key}", self.architecture()?)).and_then(Value::as_u64)
    }
}

/// Parses a file. `path` is only used in errors.
///
/// # Errors
/// [`FormatError::Truncated`] and [`FormatError::Malformed`]. A tensor of an unknown type is no
/// error until it is read.
pub fn parse(bytes: &Bytes, path: &Path) -> Result<Gguf> {
    let mut cursor = Cursor::new(bytes, path);
    let magic = cursor.take("magic", 4)?;
    if magic != MAGIC {
        let given = magic.escape_ascii();
        return Err(FormatError::malformed(path, 0, "magic", "GGUF", given));
    }
    let version = read_version(&mut cursor, path)?;
    let tensor_count = cursor.u64("tensor count")?;
    let pair_count = cursor.u64("metadata count")?;
    cursor.expect_room("tensors", tensor_count, LEAST_TENSOR)?;
    let metadata = metadata::read(&mut cursor, pair_count, path)?;
    let alignment = read_alignment(&metadata, path)?;

    cursor.expect_room("tensors", tensor_count, LEAST_TENSOR)?;
    let mut headers = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..tensor_count {
        let at = cursor.offset();
        let header = read_header(&mut cursor, alignment, path)?;
        if !names.insert(header.name.clone()) {
            let expected = "each name once";
            return Err(FormatError::malformed(path, at, "tensor name", expected, header.name));
        }
        headers.push(header);
    }
    let start = (cursor.position() as u64).next_multiple_of(alignment);
    let tensors =
        headers.iter().map(|h| h.locate(bytes, start, path)).collect::<Result<Vec<_>>>()?;
    refuse_overlap(&headers, path)?;
    Ok(Gguf { version, metadata, tensors })
}

fn read_version(cursor: &mut Cursor<'_>, path: &Path) -> Result<u32> {
    let version = cursor.u32("version")?;
    if version == 2 || version == 3 {
        return Ok(version);
    }
    let given = match version.swap_bytes() {
        v @ 1..=3 => format!("version {v} in big-endian order; convert the file to little endian"),
        _ => version.to_string(),
    };
    Err(FormatError::malformed(path, 4, "version", "2 or 3", given))
}

fn read_alignment(metadata: &BTreeMap<String, Value>, path: &Path) -> Result<u64> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    // Bounded so that rounding up to it cannot overflow.
    match value.as_u64() {
        Some(a) if a.is_power_of_two() && a <= u64::from(u32::MAX) => Ok(a),
        _ => Err(FormatError::malformed(
            path,
            0,
            "general.alignment",
            "a power of two below 2^32",
            format!("{value:?}"),
        )),
    }
}

struct Header {
    name: String,
    stored: StoredType,
    shape: Vec<usize>,
    /// Bytes, unless the type is unknown.
    len: Option<u64>,
    offset: u64,
    at: u64,
}

fn read_header(cursor: &mut Cursor<'_>, alignment: u64, path: &Path) -> Result<Header> {
    let at = cursor.offset();
    let name = cursor.name("tensor name")?;
    let bad = |what: &str, expected: String, given: String| {
        let what = format!("{what} of {}", clip(&name, 100));
        Err(FormatError::malformed(path, at, what, expected, given))
    };
    let rank = cursor.u32("rank")?;
    if !(1..=4).contains(&rank) {
        return bad("rank", "1 to 4".into(), rank.to_string());
    }
    let mut ne = Vec::new();
    for _ in 0..rank {
        ne.push(cursor.u64("dimension")?);
    }
    let stored = type_of(cursor.u32("tensor type")?);
    let offset = cursor.u64("tensor offset")?;
    if !offset.is_multiple_of(alignment) {
        return bad("offset", format!("a multiple of {alignment}"), offset.to_string());
    }
    let count = ne.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let shape: Option<Vec<usize>> = ne.iter().rev().map(|&d| usize::try_from(d).ok()).collect();
    let (Some(count), Some(shape)) = (count, shape) else {
        return bad("shape", "fewer than 2^64 elements".into(), format!("ne = {ne:?}"));
    };
    let len = match stored.block() {
        None => None,
        Some((elements, bytes)) => {
            if !ne[0].is_multiple_of(elements as u64) {
                let expected = format!("rows of whole {stored} blocks of {elements}");
                return bad("shape", expected, format!("ne = {ne:?}"));
            }
            match (count / elements as u64).checked_mul(bytes as u64) {
                Some(len) => Some(len),
                None => {
                    return bad("shape", "fewer than 2^64 bytes".into(), format!("ne = {ne:?}"));
                }
            }
        }
    };
    Ok(Header { name, stored, shape, len, offset, at })
}

impl Header {
    fn locate(&self, bytes: &Bytes, start: u64, path: &Path) -> Result<Tensor> {
        let begin = start.checked_add(self.offset);
        let end = begin.and_then(|b| b.checked_add(self.len.unwrap_or(0)));
        let range = match (begin, end) {
            (Some(b), Some(e)) => usize::try_from(b).ok().zip(usize::try_from(e).ok()),
            _ => None,
        };
        // A tensor without elements may stand where the data would start if there were any.
        let data = match range {
            _ if self.len == Some(0) => bytes.slice(0..0),
            Some((b, e)) => bytes.slice(b..e),
            None => None,
        };
        let Some(data) = data else {
            return Err(FormatError::Truncated {
                path: path.to_owned(),
                what: format!("data of {}", clip(&self.name, 100)),
                offset: begin.unwrap_or(u64::MAX),
                needed: self.len.unwrap_or(0),
                available: (bytes.len() as u64).saturating_sub(begin.unwrap_or(u64::MAX)),
            });
        };
        Ok(Tensor {
            name: self.name.clone(),
            stored: self.stored.clone(),
            shape: self.shape.clone(),
            data,
        })
    }
}

fn refuse_overlap(headers: &[Header], path: &Path) -> Result<()> {
    let mut spans: Vec<(u64, u64, &Header)> =
        headers.iter().filter_map(|h| Some((h.offset, h.len?, h))).filter(|s| s.1 > 0).collect();
    spans.sort_by_key(|&(offset, ..)| offset);
    for pair in spans.windows(2) {
        let [(a, len, first), (b, _, second)] = pair else { continue };
        // The sum was checked when the data was located.
        if a + len > *b {
            return Err(FormatError::malformed(
                path,
                second.at,
                format!("offset of {}", clip(&second.name, 100)),
                format!("{} or more, the end of {}", a + len, clip(&first.name, 100)),
                b,
            ));
        }
    }
    Ok(())
}

fn type_of(id: u32) -> StoredType {
    if let Some(block) = BlockType::ALL.into_iter().find(|b| b.id() == id) {
        return StoredType::Block(block);
    }
    match id {
        0 => StoredType::F32,
        1 => StoredType::F16,
        28 => StoredType::F64,
        30 => StoredType::Bf16,
        _ => StoredType::Other(match UNREADABLE.iter().find(|&&(known, _)| known == id) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("number {id}"),
        }),
    }
}

/// Types that exist and are not decoded, so that errors can name them.
const UNREADABLE: [(u32, &str); 7] =
    [(9, "Q8_1"), (15, "Q8_K"), (24, "I8"), (25, "I16"), (26, "I32"), (27, "I64"), (41, "Q1_0")];
