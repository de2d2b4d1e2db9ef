//! A device file with its defines.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::Serialize;

/// A device file that is part of this program. Its launcher declares it:
/// `static FILE: KernelFile = kernel_file!("portable", "x.cu");`, where its folder below `device/` comes first.
#[derive(Debug, Eq)]
pub struct KernelFile {
    name: &'static str,
    text: &'static str,
}

impl KernelFile {
    /// A file by its name and text.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text }
    }
    /// The file's name, for example `elementwise.cu`.
    pub fn name(&self) -> &'static str {
        self.name
    }
    /// The file's text.
    pub fn text(&self) -> &'static str {
        self.text
    }
}

impl PartialEq for KernelFile {
    /// Launches compare files: texts of thousands of lines only where the files are not one.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.name == other.name && self.text == other.text
    }
}

macro_rules! kernel_file {
    ($folder:literal, $name:literal) => {
        $crate::device::jit::KernelFile::new(
            $name,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/device/", $folder, "/", $name)),
        )
    };
}
pub(crate) use kernel_file;

/// What a define stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A number.
    Int(i64),
    /// A word, for example the name of a type.
    Word(&'static str),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Int(value) => value.fmt(f),
            Value::Word(word) => word.fmt(f),
        }
    }
}

macro_rules! value_from {
    ($($T:ty),*) => {
        $(impl From<$T> for Value {
            fn from(value: $T) -> Self {
                Value::Int(i64::from(value))
            }
        })*
    };
}
value_from!(bool, i8, u8, i16, u16, i32, u32, i64);

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Value::Int(value.cast_signed() as i64)
    }
}

impl From<&'static str> for Value {
    fn from(word: &'static str) -> Self {
        Value::Word(word)
    }
}

/// The option `-Dname=value`.
pub type Define = (&'static str, Value);

/// A define: `define("TILE_M", 128)`.
pub fn define(name: &'static str, value: impl Into<Value>) -> Define {
    (name, value.into())
}

/// The most defines a variant has.
const MAX_DEFINES: usize = 18;

/// A device file with an ordered list of defines: what is compiled, for one architecture, into one
/// module. It is a small value without heap memory, and its hash is computed once.
#[derive(Clone, Copy)]
pub struct Variant {
    file: &'static KernelFile,
    defines: [Define; MAX_DEFINES],
    count: usize,
    hash: u64,
}

impl Variant {
    /// `file` compiled with `defines`. More than 18 defines do not compile.
    pub fn new<const N: usize>(file: &'static KernelFile, defines: [Define; N]) -> Self {
        const { assert!(N <= MAX_DEFINES, "a variant has at most 18 defines") };
        let mut all = [("", Value::Int(0)); MAX_DEFINES];
        all[..N].copy_from_slice(&defines);
        let mut hash = Words::default();
        hash.text(file.name);
        for (name, value) in defines {
            hash.text(name);
            match value {
                Value::Int(value) => hash.word(value.cast_unsigned()),
                Value::Word(word) => hash.text(word),
            }
        }
        Self { file, defines: all, count: N, hash: hash.0 }
    }

    /// The device file.
    pub fn file(&self) -> &'static KernelFile {
        self.file
    }

    /// The defines, in order.
    pub fn defines(&self) -> &[Define] {
        &self.defines[..self.count]
    }

    /// A hash of this variant and an entry point of it.
    pub(crate) fn hash_with(&self, entry: &str) -> u64 {
        let mut hash = Words(self.hash);
        hash.text(entry);
        hash.0
    }
}

impl PartialEq for Variant {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.file == other.file && self.defines() == other.defines()
    }
}

impl Eq for Variant {}

impl Hash for Variant {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Display for Variant {
    /// `elementwise.cu (T=bf16, LAYOUT=2)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file.name)?;
        for (i, (name, value)) in self.defines().iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { " (" } else { ", " })?;
        }
        f.write_str(if self.count == 0 { "" } else { ")" })
    }
}

impl fmt::Debug for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Variant({self})")
    }
}

/// A hash over words of eight bytes: a lookup happens on every launch, and the texts are short.
#[derive(Default)]
struct Words(u64);

impl Words {
    fn word(&mut self, word: u64) {
        // The multiplier is 2⁶⁴ over the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn text(&mut self, text: &str) {
        self.word(text.len() as u64);
        for chunk in text.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static FILE: KernelFile = KernelFile::new("a.cu", "");
    static OTHER: KernelFile = KernelFile::new("b.cu", "");

    #[test]
    fn variants_differ_by_file_name_value_and_order() {
        let all = [
            Variant::new(&FILE, []),
            Variant::new(&OTHER, []),
            Variant::new(&FILE, [define("A", 1)]),
            Variant::new(&FILE, [define("A", 2)]),
            Variant::new(&FILE, [define("B", 1)]),
            Variant::new(&FILE, [define("A", "x")]),
            Variant::new(&FILE, [define("A", 1), define("B", 2)]),
            Variant::new(&FILE, [define("B", 2), define("A", 1)]),
        ];
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                assert_eq!(a == b, i == j, "{a} {b}");
                assert_eq!(a.hash_with("f") == b.hash_with("f"), i == j, "{a} {b}");
            }
            assert_ne!(a.hash_with("f"), a.hash_with("g"));
        }
        assert_eq!(all[6].to_string(), "a.cu (A=1, B=2)");
        assert_eq!(all[0].to_string(), "a.cu");
    }
}
