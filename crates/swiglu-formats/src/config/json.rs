//! JSON as Python programs write it.

use serde_json::Value;

use crate::bytes::without_mark;

/// Reads JSON with what Python's `json` writes or reads beside the standard: a byte-order mark,
/// UTF-16, `NaN` and `Infinity` (which become strings of these words, see [`number`]),
/// a comma behind the last element. Bytes that are no text are replaced: they stand in names of
/// files, not in keys.
pub(crate) fn parse(bytes: &[u8]) -> serde_json::Result<Value> {
    let text = text(bytes);
    serde_json::from_str(&text).or_else(|error| match serde_json::from_str(&strict(&text)) {
        Ok(value) => Ok(value),
        // The position is that of the file as it is.
        Err(_) => Err(error),
    })
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
