//! safetensors: a JSON header and the bytes of every tensor, without gaps.
//!
//! The header is read here and not with the `safetensors` crate because that crate's errors carry
//! no values, one tensor of a new type or with an odd entry makes it refuse the whole file, repeated names
//! go unnoticed, and offsets near 2⁶⁴ overflow in its length check. What it accepts is accepted here.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::bytes::Bytes;
use crate::error::{FormatError, Result, clip};
use crate::stored::StoredType;
use crate::tensor::{Tensor, overlaps};

/// The reference reader's limit; real headers are below one megabyte.
const MAX_HEADER: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;

/// A parsed file: the tensors borrow its bytes.
#[derive(Debug, Clone)]
pub struct SafeTensors {
    /// The free-form `__metadata__`: what is text in it.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, by their place in the file.
    pub tensors: Vec<Tensor>,
    /// The tensors that cannot be read, with what is wrong: no reason to refuse the others.
    pub faults: BTreeMap<String, FormatError>,
}

/// Parses a file. `path` is only used in errors.
///
/// # Errors
/// [`FormatError::Truncated`] and [`FormatError::Malformed`] where nothing can be read. A tensor whose own entry
/// is wrong is among [`SafeTensors::faults`]; one of an unknown type is no error until it is read.
pub fn parse(bytes: &Bytes, path: &Path) -> Result<SafeTensors> {
    let (json, data_start) = header_text(bytes, path)?;
    let header: Header<'_> = serde_json::from_slice(json).map_err(|e| {
        let at = LENGTH_BYTES + e.column() as u64;
        FormatError::malformed(path, at, "header", "a JSON object of tensors", e)
    })?;
    let file = File { path, data_start, available: bytes.len() as u64 - data_start };
    let mut faults = BTreeMap::new();
    let mut read: BTreeMap<String, Span> = BTreeMap::new();
    for (name, entry) in header.entries {
        let repeated = read.contains_key(&name) || faults.contains_key(&name);
        let span = match repeated {
            true => Err(FormatError::malformed(
                path,
                LENGTH_BYTES,
                "tensor name",
                "each name once",
                &name,
            )),
            false => file.span(&name, entry),
        };
        match span {
            Ok(span) => drop(read.insert(name, span)),
            Err(fault) => drop(faults.insert(name, fault)),
        }
    }
    read.retain(|name, _| !faults.contains_key(name));
    let mut spans: Vec<(String, Span)> = read.into_iter().collect();
    spans.sort_by_key(|(_, s)| (s.begin, s.len));
    file.refuse_overlaps_and_gaps(&spans, &mut faults)?;
    let tensors = spans.into_iter().filter(|(name, _)| !faults.contains_key(name));
    let tensors = tensors
        .map(|(name, Span { stored, shape, begin, len })| {
            // Both bounds are at most the file's length.
            let range = (data_start + begin) as usize..(data_start + begin + len) as usize;
            let data = bytes.slice(range).unwrap_or_else(|| Bytes::from(Vec::new()));
            Tensor { name, stored, shape, data }
        })
        .collect();
    Ok(SafeTensors { metadata: header.metadata, tensors, faults })
}

/// What an entry is checked against.
struct File<'a> {
    path: &'a Path,
    data_start: u64,
    /// Bytes of data.
    available: u64,
}

/// An entry that makes sense by itself.
struct Span {
    stored: StoredType,
    shape: Vec<usize>,
    begin: u64,
    len: u64,
}

impl File<'_> {
    fn bad(&self, name: &str, what: &str, expected: String, given: String) -> FormatError {
        let what = format!("{what} of {}", clip(name, 100));
        FormatError::malformed(self.path, LENGTH_BYTES, what, expected, given)
    }

    fn span(&self, name: &str, entry: &RawValue) -> Result<Span> {
        let entry: Entry = serde_json::from_str(entry.get()).map_err(|e| {
            let expected = "JSON with dtype, shape and data_offsets";
            self.bad(name, "entry", expected.into(), e.to_string())
        })?;
        let [begin, stop] = entry.data_offsets;
        let len = stop.checked_sub(begin).ok_or_else(|| {
            let expected = "[begin, end]".to_owned();
            self.bad(name, "data_offsets", expected, format!("[{begin}, {stop}]"))
        })?;
        if stop > self.available {
            return Err(FormatError::Truncated {
                path: self.path.to_owned(),
                what: format!("data of {}", clip(name, 100)),
                offset: self.data_start.saturating_add(begin),
                needed: len,
                available: self.available.saturating_sub(begin),
            });
        }
        let stored = type_of(&entry.dtype);
        let shape = check_shape(&entry, &stored, len)
            .map_err(|(expected, given)| self.bad(name, "data_offsets", expected, given))?;
        Ok(Span { stored, shape, begin, len })
    }

    /// Data that two tensors share is that of neither. The format has no gaps; where an entry is wrong already,
    /// what it does not name is no gap between others.
    fn refuse_overlaps_and_gaps(
        &self,
        spans: &[(String, Span)],
        faults: &mut BTreeMap<String, FormatError>,
    ) -> Result<()> {
        let whole = faults.is_empty();
        let places: Vec<(u64, u64)> = spans.iter().map(|(_, s)| (s.begin, s.len)).collect();
        for (second, first) in overlaps(&places) {
            for (one, other) in [(second, first), (first, second)] {
                let (name, Span { begin, len, .. }) = &spans[one];
                let expected = format!("bytes that {} has not", clip(&spans[other].0, 60));
                let given = format!("[{begin}, {}]", begin + len);
                let fault = self.bad(name, "data_offsets", expected, given);
                faults.entry(name.clone()).or_insert(fault);
            }
        }
        let mut end = 0u64;
        for (name, Span { begin, len, .. }) in spans {
            if *begin > end && whole {
                let expected = format!("[{end}, …], where the previous tensor ends");
                let given = format!("[{begin}, {}]", begin + len);
                let fault = self.bad(name, "data_offsets", expected, given);
                faults.entry(name.clone()).or_insert(fault);
            }
            end = end.max(begin + len);
        }
        if end == self.available || !whole {
            return Ok(());
        }
        Err(FormatError::malformed(
            self.path,
            self.data_start + end,
            "data",
            format!("{end} bytes, the end of the last tensor"),
            format!("{} bytes", self.available),
        ))
    }
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

struct Header<'a> {
    metadata: BTreeMap<String, String>,
    entries: Vec<(String, &'a RawValue)>,
}

/// Read by hand because a map type would silently keep the last of several equal names.
impl<'de> Deserialize<'de> for Header<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header<'de>, A::Error> {
                let mut header = Header { metadata: BTreeMap::new(), entries: Vec::new() };
                while let Some(key) = map.next_key::<String>()? {
                    let value: &'de RawValue = map.next_value()?;
                    if key == "__metadata__" {
                        header.metadata = texts(value);
                    } else {
                        header.entries.push((key, value));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// What is text in an object. Exporters exist that write null for none, and numbers.
fn texts(metadata: &RawValue) -> BTreeMap<String, String> {
    let all: BTreeMap<String, &RawValue> = serde_json::from_str(metadata.get()).unwrap_or_default();
    let texts = all.into_iter().map(|(key, v)| Some((key, serde_json::from_str(v.get()).ok()?)));
    texts.flatten().collect()
}
