//! Canonical JSON and its hash.

use serde_json::Value;

use crate::files::sha256;

/// JSON without blanks and with the keys of every object sorted: equal values are equal text.
pub fn canonical(value: &Value) -> String {
    let mut value = value.clone();
    // Whether it is sorted already depends on a feature that any crate may switch on.
    value.sort_all_objects();
    value.to_string()
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
