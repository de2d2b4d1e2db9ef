//! JSON as Python programs write it.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::bytes::without_mark;
use crate::error::clip;

/// Reads JSON with what Python's `json` writes or reads beside the standard: a byte-order mark,
/// UTF-16, `NaN` and `Infinity` (which become strings of these words, see [`number`]),
/// a comma behind the last element. Bytes that are no text are replaced: they stand in names of
/// files, not in keys. A key that an object has twice, with two values, is an error of data.
pub(crate) fn parse(bytes: &[u8]) -> serde_json::Result<Value> {
    let text = text(bytes);
    let read = serde_json::from_str(&text);
    let read = read.or_else(|error| match serde_json::from_str(&strict(&text)) {
        // The position is that of the file as it is.
        Err(again) if !again.is_data() => Err(error),
        read => read,
    });
    read.map(|Once(value)| value)
}

/// Read by hand because a map type would silently keep the last of several equal keys.
struct Once(Value);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OnceVisitor).map(Self)
    }
}

struct OnceVisitor;

impl<'de> Visitor<'de> for OnceVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Once(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(items.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((key, Once(value))) = map.next_entry::<String, _>()? {
            // The same twice says it once.
            if let Some(first) = object.get(&key).filter(|first| **first != value) {
                let [first, value] = [first, &value].map(|v| clip(&v.to_string(), 60));
                let key = clip(&key, 100);
                return Err(A::Error::custom(format!("has `{key}` twice, as {first} and {value}")));
            }
            object.insert(key, value);
        }
        Ok(object.into())
    }
}

/// A number, also an infinite one; NaN is none.
pub(crate) fn number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(word) if word == INFINITY.0 => Some(f64::INFINITY),
        Some(word) if word == INFINITY.1 => Some(f64::NEG_INFINITY),
        _ => value.as_f64(),
    }
}

const INFINITY: (&str, &str) = ("Infinity", "-Infinity");
const NAN: &str = "NaN";

fn text(bytes: &[u8]) -> String {
    let wide = |from: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = bytes[2..].as_chunks::<2>().0.iter().copied().map(from).collect();
        String::from_utf16_lossy(&units)
    };
    match bytes {
        [0xff, 0xfe, ..] => wide(u16::from_le_bytes),
        [0xfe, 0xff, ..] => wide(u16::from_be_bytes),
        _ => String::from_utf8_lossy(without_mark(bytes)).into_owned(),
    }
}

/// The same without words that JSON lacks and without commas that nothing follows.
fn strict(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut quoted) = (text, false);
    while let Some(c) = rest.chars().next() {
        let mut taken = c.len_utf8();
        match c {
            '\\' if quoted => taken += rest[1..].chars().next().map_or(0, char::len_utf8),
            '"' => quoted = !quoted,
            ',' if !quoted && rest[1..].trim_start().starts_with(['}', ']']) => {
                rest = &rest[1..];
                continue;
            }
            _ if !quoted => {
                if let Some(word) =
                    [INFINITY.1, INFINITY.0, NAN].iter().find(|w| rest.starts_with(**w))
                {
                    out.extend(["\"", word, "\""]);
                    rest = &rest[word.len()..];
                    continue;
                }
            }
            _ => {}
        }
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_python_writes_is_read() {
        for (given, expected) in [
            ("\u{feff}{\"a\": 1}", json!({"a": 1})),
            (
                r#"{"a": NaN, "b": [-Infinity, Infinity]}"#,
                json!({"a": "NaN", "b": ["-Infinity", "Infinity"]}),
            ),
            ("{\"a\": [1, 2,\n],\n}", json!({"a": [1, 2]})),
            (r#"{"a": "NaN, \", ]", "b": 1,}"#, json!({"a": "NaN, \", ]", "b": 1})),
            (r#"{"a": 1000000000000000019884624838656}"#, json!({"a": 1e30})),
        ] {
            assert_eq!(parse(given.as_bytes()).unwrap(), expected, "{given}");
        }
        let utf16: Vec<u8> =
            "\u{feff}{\"a\": 1}".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(parse(&utf16).unwrap(), json!({"a": 1}));
        assert_eq!(parse(b"{\"a\": \"mod\xe8le\"}").unwrap(), json!({"a": "mod\u{fffd}le"}));
    }

    #[test]
    fn a_key_has_one_value() {
        for (given, said) in [
            (r#"{"a": 1, "b": 2, "a": 3}"#, "has `a` twice, as 1 and 3 at line 1"),
            (r#"{"o": [{"a": {"x": 1}, "a": null}]}"#, "has `a` twice, as {\"x\":1} and null"),
            // Among what only Python reads.
            ("{\"a\": NaN,\n\"a\": 1,}", "has `a` twice, as \"NaN\" and 1"),
        ] {
            let error = parse(given.as_bytes()).unwrap_err();
            assert!(error.is_data() && error.to_string().contains(said), "{error}");
        }
        assert_eq!(parse(br#"{"a": [1.5], "a": [1.5]}"#).unwrap(), json!({"a": [1.5]}));
    }

    #[test]
    fn infinity_is_a_number_and_nan_is_none() {
        let read = parse(br#"[7, -0.5, Infinity, -Infinity, NaN, "7", null, true]"#).unwrap();
        let numbers: Vec<_> = read.as_array().unwrap().iter().map(number).collect();
        let inf = f64::INFINITY;
        let expected = [Some(7.0), Some(-0.5), Some(inf), Some(-inf), None, None, None, None];
        assert_eq!(numbers, expected);
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for bad in ["", "{", "{\"a\" 1}", "\"\\", "nan", ",}", "[1,,]", "{\"a\": Nan}"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(parse(&vec![b'['; 1 << 20]).is_err());
        assert!(parse(&[0xff, 0xfe, 0x7b]).is_err());
    }
}
