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
/// A higher version is no version.
const MAX_VERSION: u32 = 99;

/// A parsed file: the tensors borrow its bytes.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// 2 or 3.
    pub version: u32,
    /// The metadata, without the contents of arrays.
    pub metadata: BTreeMap<String, Value>,
    /// The tensors in the order of the file. Shapes are row-major: the file's `ne` reversed.
    pub tensors: Vec<Tensor>,
    /// The tensors that cannot be read, with what is wrong: no reason to refuse the others.
    pub faults: BTreeMap<String, FormatError>,
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
/// [`FormatError::Truncated`] and [`FormatError::Malformed`] where nothing can be read. A tensor whose own entry
/// is wrong is among [`Gguf::faults`]; one of an unknown type is no error until it is read.
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
    let mut faults = BTreeMap::new();
    let mut names = BTreeSet::new();
    for _ in 0..tensor_count {
        let at = cursor.offset();
        let raw = Raw::read(&mut cursor)?;
        if !names.insert(raw.name.clone()) {
            let expected = "each name once";
            let fault = FormatError::malformed(path, at, "tensor name", expected, &raw.name);
            faults.insert(raw.name, fault);
            continue;
        }
        match raw.check(alignment, path) {
            Ok(header) => headers.push(header),
            Err(fault) => drop(faults.insert(raw.name, fault)),
        }
    }
    let start = (cursor.position() as u64).next_multiple_of(alignment);
    let mut tensors = Vec::new();
    let mut places = Vec::new();
    for header in headers {
        match header.locate(bytes, start, path) {
            Ok(tensor) => {
                tensors.push(tensor);
                places.push((header.offset, header.len.unwrap_or(0)));
            }
            Err(fault) => drop(faults.insert(header.name, fault)),
        }
    }
    for (second, first) in crate::tensor::overlaps(&places) {
        for (one, other) in [(second, first), (first, second)] {
            let (name, other) = (&tensors[one].name, &tensors[other].name);
            let what = format!("data of {}", clip(name, 100));
            let given = format!("bytes that {} has too", clip(other, 60));
            let fault = FormatError::malformed(
                path,
                start + places[one].0,
                what,
                "bytes of its own",
                given,
            );
            faults.entry(name.clone()).or_insert(fault);
        }
    }
    tensors.retain(|t| !faults.contains_key(&t.name));
    Ok(Gguf { version, metadata, tensors, faults })
}

fn read_version(cursor: &mut Cursor<'_>, path: &Path) -> Result<u32> {
    let version = cursor.u32("version")?;
    if version == 2 || version == 3 {
        return Ok(version);
    }
    let given = match (version, version.swap_bytes()) {
        (_, v @ 1..=3) => format!(
            "version {v} in big-endian order; `gguf-convert-endian FILE little` of the Python package gguf converts it"
        ),
        (0 | 1, _) => {
            format!("{version}, of early 2023; convert the model again with a current llama.cpp")
        }
        (4..=MAX_VERSION, _) => {
            format!("{version}, which is newer than this program; write it as version 3")
        }
        _ => format!("{version}, which no file has: it is damaged"),
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
            value,
        )),
    }
}

/// A tensor's entry as it stands, of which nothing is believed.
struct Raw {
    name: String,
    ne: Vec<u64>,
    rank: u32,
    kind: u32,
    offset: u64,
    at: u64,
}

/// An entry that makes sense by itself.
struct Header {
    name: String,
    stored: StoredType,
    shape: Vec<usize>,
    /// Bytes, unless the type is unknown.
    len: Option<u64>,
    offset: u64,
}

impl Raw {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        let at = cursor.offset();
        let name = cursor.name("tensor name")?;
        let rank = cursor.u32("rank")?;
        cursor.expect_room("dimensions", u64::from(rank), 8)?;
        let ne = (0..rank).map(|_| cursor.u64("dimension")).collect::<Result<_>>()?;
        let (kind, offset) = (cursor.u32("tensor type")?, cursor.u64("tensor offset")?);
        Ok(Self { name, ne, rank, kind, offset, at })
    }

    fn check(&self, alignment: u64, path: &Path) -> Result<Header> {
        let Self { name, ne, rank, kind, offset, at } = self;
        let bad = |what: &str, expected: String, given: String| {
            let what = format!("{what} of {}", clip(name, 100));
            Err(FormatError::malformed(path, *at, what, expected, given))
        };
        if !(1..=4).contains(rank) {
            return bad("rank", "1 to 4".into(), rank.to_string());
        }
        let stored = type_of(*kind);
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
                        return bad(
                            "shape",
                            "fewer than 2^64 bytes".into(),
                            format!("ne = {ne:?}"),
                        );
                    }
                }
            }
        };
        Ok(Header { name: name.clone(), stored, shape, len, offset: *offset })
    }
}

impl Header {
    fn locate(&self, bytes: &Bytes, start: u64, path: &Path) -> Result<Tensor> {
        // A tensor without elements may stand where the data would start if there were any, and one of an
        // unknown type has no known length: of neither is there anything to read.
        let (Some(len), true) = (self.len, self.len != Some(0)) else {
            return Ok(self.tensor(Bytes::from(Vec::new())));
        };
        let what = || format!("data of {}", clip(&self.name, 100));
        let Some(begin) = start.checked_add(self.offset) else {
            let expected = format!("within the file's {} bytes", bytes.len());
            let given = format!("at offset {}", self.offset);
            return Err(FormatError::malformed(path, start, what(), expected, given));
        };
        let end = begin.checked_add(len);
        let range = end.and_then(|end| Some(begin.try_into().ok()?..end.try_into().ok()?));
        match range.and_then(|range| bytes.slice(range)) {
            Some(data) => Ok(self.tensor(data)),
            None => Err(FormatError::Truncated {
                path: path.to_owned(),
                what: what(),
                offset: begin,
                needed: len,
                available: (bytes.len() as u64).saturating_sub(begin),
            }),
        }
    }

    fn tensor(&self, data: Bytes) -> Tensor {
        let Self { name, stored, shape, .. } = self;
        Tensor { name: name.clone(), stored: stored.clone(), shape: shape.clone(), data }
    }
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
