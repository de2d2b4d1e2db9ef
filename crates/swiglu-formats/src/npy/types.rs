//! Element types: what is read, and for everything else its name and the call that converts it.

use std::path::Path;

use crate::error::{FormatError, Result, clip};
use crate::stored::StoredType;

/// What is read of a descriptor.
pub(super) struct Kind {
    pub(super) stored: StoredType,
    /// Bytes of an element.
    pub(super) size: usize,
    /// Whether the most significant byte comes first.
    pub(super) big: bool,
}

/// The type of a descriptor such as `<f4`: byte order, kind, bytes.
pub(super) fn of(descr: &str, path: &Path) -> Result<Kind> {
    let read = |stored, size, big| Ok(Kind { stored, size, big });
    match descr {
        "<f4" => read(StoredType::F32, 4, false),
        "<f2" => read(StoredType::F16, 2, false),
        "<f8" => read(StoredType::F64, 8, false),
        ">f4" => read(StoredType::F32, 4, true),
        ">f2" => read(StoredType::F16, 2, true),
        ">f8" => read(StoredType::F64, 8, true),
        // Not of NumPy, which writes two bytes of an unknown type, and not to be mistaken.
        "bfloat16" | "<bfloat16" => read(StoredType::Bf16, 2, false),
        _ => {
            let (name, supported) = refused(descr);
            Err(FormatError::UnsupportedDtype {
                path: path.to_owned(),
                tensor: "the array".into(),
                dtype: format!("{name} ({})", clip(descr, 60)),
                supported,
            })
        }
    }
}

const AS_FLOAT: &str =
    "float32, float16 and float64: save it as one, np.save(FILE, a.astype(np.float32))";

/// Its name, and what to do.
fn refused(descr: &str) -> (&'static str, &'static str) {
    if descr.starts_with('[') {
        let help =
            "arrays of one number each: save the field that is meant, np.save(FILE, a['NAME'])";
        return ("a record of several fields", help);
    }
    let plain = descr.trim_start_matches(['<', '>', '|', '=']);
    let bytes: String = plain.chars().skip(1).collect();
    match (plain.chars().next(), bytes.as_str()) {
        (Some('V'), "2") => (
            "two bytes of a type that npy has no name for, as bfloat16 is saved",
            "float32, float16 and float64: save bfloat16 as np.save(FILE, a.astype(np.float32)), or make it \
             that of this file: np.load(FILE).view(ml_dtypes.bfloat16).astype(np.float32)",
        ),
        (Some('V' | 'f'), "1") => (
            "one byte of a type that npy has no name for, as float8 is saved",
            "float32, float16 and float64: save float8 as np.save(FILE, a.astype(np.float32))",
        ),
        (Some('V'), _) => ("bytes of a type that npy has no name for", AS_FLOAT),
        (Some('f'), "12" | "16") => ("long double, which differs by machine", AS_FLOAT),
        (Some('f'), _) => ("a float of another size, or without a byte order", AS_FLOAT),
        (Some('i'), _) => ("signed integers", AS_FLOAT),
        (Some('u'), _) => ("unsigned integers", AS_FLOAT),
        (Some('b'), _) => ("booleans", AS_FLOAT),
        (Some('c'), _) => (
            "complex numbers",
            "float32, float16 and float64: save the part that is meant, np.save(FILE, a.real.astype(np.float32))",
        ),
        (Some('O'), _) => (
            "pickled Python objects",
            "float32, float16 and float64: save arrays of one shape, np.save(FILE, np.stack(list(a)).astype(np.float32))",
        ),
        (Some('S' | 'U' | 'a'), _) => ("text", AS_FLOAT),
        (Some('M' | 'm'), _) => ("dates or times", AS_FLOAT),
        _ => ("an unknown type", AS_FLOAT),
    }
}
