//! Canonical JSON and its hash.

use serde_json::Value;

use crate::files::sha256;

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
    sha256(canonical(&value))
}
