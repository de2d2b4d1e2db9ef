//! Metadata: key-value pairs of thirteen types.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::cursor::Cursor;
use crate::error::{FormatError, Result, clip};

/// Arrays of arrays are legal; nobody nests them deeper than this.
const MAX_DEPTH: usize = 8;
/// No model has more layers than this.
pub const MAX_ITEMS: u64 = 1024;
/// The shortest pair: an empty key, a type, one byte.
const LEAST_PAIR: u64 = 8 + 4 + 1;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Any unsigned integer.
    Uint(u64),
    /// Any signed integer.
    Int(i64),
    /// Either float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// Text.
    String(String),
    /// An array. Short ones of numbers are kept, such as a limit for each layer; a vocabulary is not.
    Array {
        /// Elements.
        len: u64,
        /// The numbers or booleans, where there are at most [`MAX_ITEMS`].
        items: Option<Vec<Value>>,
    },
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Uint(v) => v.fmt(f),
            Value::Int(v) => v.fmt(f),
            Value::Float(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::String(v) => write!(f, "the text {:?}", clip(v, 60)),
            Value::Array { len, .. } => write!(f, "an array of {len}"),
        }
    }
}

impl Value {
    /// The value as an unsigned integer, if it is one.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::Uint(v) => Some(*v),
            Value::Int(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// The value as text, if it is.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }
}

pub(super) fn read(
    cursor: &mut Cursor<'_>,
    count: u64,
    path: &Path,
) -> Result<BTreeMap<String, Value>> {
    cursor.expect_room("metadata pairs", count, LEAST_PAIR)?;
    let mut out = BTreeMap::new();
    for _ in 0..count {
        let at = cursor.offset();
        let key = cursor.name("metadata key")?;
        let kind = cursor.u32("metadata type")?;
        let value = read_value(cursor, kind, path)?;
        // The same twice says it once, and no layer depends on a vocabulary.
        let again = out.get(&key).is_some_and(|first| *first != value);
        if again && !key.starts_with("tokenizer.") {
            return Err(FormatError::malformed(path, at, "metadata key", "each key once", key));
        }
        out.insert(key, value);
    }
    Ok(out)
}

/// Bytes of a scalar type; `None` for strings, arrays and unknown types.
fn scalar_size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn read_value(cursor: &mut Cursor<'_>, kind: u32, path: &Path) -> Result<Value> {
    let at = cursor.offset();
    if let Some(size) = scalar_size(kind) {
        let bytes = cursor.take("metadata value", size)?;
        let mut wide = [0u8; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        return Ok(scalar(kind, wide));
    }
    match kind {
        8 => {
            let bytes = cursor.string_bytes("metadata string")?;
            // Text is only ever shown or compared: broken UTF-8 in it is no reason to refuse.
            Ok(Value::String(String::from_utf8_lossy(bytes).into_owned()))
        }
        9 => read_array(cursor, path),
        _ => Err(FormatError::malformed(path, at, "metadata type", "0 to 12", kind)),
    }
}

fn scalar(kind: u32, wide: [u8; 8]) -> Value {
    let bits = u64::from_le_bytes(wide);
    match kind {
        // Sign extension of the low bytes: truncation is the point.
        1 => Value::Int(i64::from(wide[0].cast_signed())),
        3 => Value::Int(i64::from((bits as u16).cast_signed())),
        5 => Value::Int(i64::from((bits as u32).cast_signed())),
        11 => Value::Int(bits.cast_signed()),
        6 => Value::Float(f64::from(f32::from_bits(bits as u32))),
        12 => Value::Float(f64::from_bits(bits)),
        // Any other byte is no boolean, and stays the number that it is.
        7 if bits <= 1 => Value::Bool(bits == 1),
        _ => Value::Uint(bits),
    }
}

fn read_array(cursor: &mut Cursor<'_>, path: &Path) -> Result<Value> {
    let mut ahead = cursor.clone();
    let kind = ahead.u32("array type")?;
    let len = skip_array(cursor, path, MAX_DEPTH)?;
    let kept = len <= MAX_ITEMS && scalar_size(kind).is_some();
    let mut items = || {
        ahead.u64("array length")?;
        (0..len).map(|_| read_value(&mut ahead, kind, path)).collect::<Result<Vec<_>>>()
    };
    // Booleans other than 0 and 1 in an array state nothing: they are no reason to refuse the file.
    Ok(Value::Array { len, items: if kept { items().ok() } else { None } })
}

fn skip_array(cursor: &mut Cursor<'_>, path: &Path, depth: usize) -> Result<u64> {
    let at = cursor.offset();
    let kind = cursor.u32("array type")?;
    let len = cursor.u64("array length")?;
    if let Some(size) = scalar_size(kind) {
        cursor.expect_room("array elements", len, size)?;
        cursor.take("array", len * size)?;
        return Ok(len);
    }
    match (kind, depth) {
        (8, _) => {
            cursor.expect_room("strings", len, 8)?;
            for _ in 0..len {
                cursor.string_bytes("string in array")?;
            }
        }
        (9, 0) => {
            let expected = format!("at most {MAX_DEPTH} levels of arrays");
            return Err(FormatError::malformed(path, at, "array", expected, "more"));
        }
        (9, _) => {
            cursor.expect_room("arrays", len, 12)?;
            for _ in 0..len {
                skip_array(cursor, path, depth - 1)?;
            }
        }
        _ => return Err(FormatError::malformed(path, at, "array type", "0 to 12", kind)),
    }
    Ok(len)
}
