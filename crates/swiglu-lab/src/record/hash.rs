//! Canonical JSON and its hash.

use serde_json::Value;
use sha2::{Digest, Sha256};

/// JSON without blanks and with the keys of every object sorted: equal values are equal text.
pub fn canonical(value: &Value) -> String {
    let mut out = String::new();
    write(value, &mut out);
    out
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => {
            // Sorted here: whether the map is depends on a feature that any crate may switch on.
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            out.push('{');
            for (i, key) in keys.into_iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                out.push_str(&Value::String(key.clone()).to_string());
                out.push(':');
                write(&map[key], out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write(item, out);
            }
            out.push(']');
        }
        leaf => out.push_str(&leaf.to_string()),
    }
}

/// SHA-256 of the canonical JSON, in hexadecimal; the key `content_hash` of the outermost object is
/// left out.
pub fn content_hash(value: &Value) -> String {
    let mut value = value.clone();
    if let Some(map) = value.as_object_mut() {
        map.remove("content_hash");
    }
    hex(&Sha256::digest(canonical(&value)))
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn order_and_blanks_do_not_matter() {
        let a: Value = serde_json::from_str(r#"{"b": [1, 2.50], "a": "x\n"}"#).unwrap();
        assert_eq!(canonical(&a), r#"{"a":"x\n","b":[1,2.5]}"#);
        let b = json!({"a": "x\n", "b": [1, 2.5], "content_hash": "whatever"});
        assert_eq!(content_hash(&a), content_hash(&b));
        assert_ne!(content_hash(&a), content_hash(&json!({"a": "x\n", "b": [2.5, 1]})));
    }

    #[test]
    fn numbers_survive_a_round_trip() {
        for x in [0.1 + 0.2, 1e-310, 123_456_789.123_456_79, 5e-324, 1.0] {
            let text = json!(x).to_string();
            let back: Value = serde_json::from_str(&text).unwrap();
            assert_eq!((back.as_f64(), back.to_string()), (Some(x), text));
        }
    }
}
