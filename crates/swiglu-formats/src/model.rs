//! A model file of any format: its tensors by name and what it says about itself.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::bytes::Bytes;
use crate::config::Config;
use crate::error::{FormatError, Result, list};
use crate::shards::Shards;
use crate::tensor::Tensor;
use crate::{gguf, npy, safetensors};

/// The path in errors about data that came as bytes.
pub(crate) const MEMORY: &str = "<memory>";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The formats that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileFormat {
    /// One safetensors file.
    SafeTensors,
    /// An index of safetensors files.
    SafeTensorsIndex,
    /// GGUF.
    Gguf,
    /// npy: one array, not a model.
    Npy,
}

impl fmt::Display for FileFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            FileFormat::SafeTensors => "safetensors",
            FileFormat::SafeTensorsIndex => "sharded safetensors",
            FileFormat::Gguf => "GGUF",
            FileFormat::Npy => "npy",
        })
    }
}

impl FileFormat {
    /// The format, by content first and extension second.
    ///
    /// # Errors
    /// [`FormatError::UnknownFormat`].
    pub fn detect(bytes: &[u8], path: &Path) -> Result<Self> {
        if bytes.starts_with(gguf::MAGIC) {
            return Ok(FileFormat::Gguf);
        }
        if bytes.starts_with(npy::MAGIC) {
            return Ok(FileFormat::Npy);
        }
        // A header length, then a JSON object.
        if bytes.len() > 8 && bytes[8] == b'{' && bytes[4..8] == [0; 4] {
            return Ok(FileFormat::SafeTensors);
        }
        if bytes.first() == Some(&b'{') {
            return Ok(FileFormat::SafeTensorsIndex);
        }
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => Ok(FileFormat::SafeTensors),
            Some("json") => Ok(FileFormat::SafeTensorsIndex),
            Some("gguf") => Ok(FileFormat::Gguf),
            Some("npy") => Ok(FileFormat::Npy),
            _ => Err(FormatError::UnknownFormat {
                path: path.to_owned(),
                why: seen(bytes),
                expected: "safetensors, an index of safetensors, GGUF or npy",
            }),
        }
    }
}

fn seen(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "the file is empty".into();
    }
    if bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(&[0x80, 2]) {
        return "it looks like a PyTorch or NumPy archive; convert it to safetensors".into();
    }
    format!("it starts with \"{}\"", bytes[..bytes.len().min(8)].escape_ascii())
}

#[derive(Debug)]
enum Tensors {
    Whole(BTreeMap<String, Tensor>),
    Sharded(Shards),
}

/// An open model file.
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    format: FileFormat,
    tensors: Tensors,
    /// What the file says about its model.
    own: Config,
    /// That and what stands beside it, once it is read.
    beside: OnceLock<Config>,
}

impl Model {
    /// Opens a file, an index, or a directory that holds `model.safetensors.index.json` or
    /// `model.safetensors`.
    ///
    /// # Errors
    /// Any [`FormatError`] of opening and parsing.
    pub fn open(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { in_directory(path)? } else { path.to_owned() };
        let bytes = Bytes::map(&path)?;
        let format = FileFormat::detect(&bytes, &path)?;
        if format == FileFormat::SafeTensorsIndex {
            let tensors = Tensors::Sharded(Shards::open(&path)?);
            let own = Config::none(&path);
            return Ok(Self { path, format, tensors, own, beside: OnceLock::new() });
        }
        Self::parse(&bytes, format, &path)
    }

    /// Reads a whole model file that is in memory.
    ///
    /// # Errors
    /// Any [`FormatError`] of parsing.
    pub fn from_bytes(bytes: &Bytes) -> Result<Self> {
        let path = Path::new(MEMORY);
        Self::parse(bytes, FileFormat::detect(bytes, path)?, path)
    }

    pub(crate) fn from_safetensors(bytes: &Bytes) -> Result<Self> {
        Self::parse(bytes, FileFormat::SafeTensors, Path::new(MEMORY))
    }

    fn parse(bytes: &Bytes, format: FileFormat, path: &Path) -> Result<Self> {
        let (tensors, own) = match format {
            FileFormat::SafeTensors => {
                let file = safetensors::parse(bytes, path)?;
                (file.tensors, Config::from_metadata(&file.metadata, path))
            }
            FileFormat::Gguf => {
                let file = gguf::parse(bytes, path)?;
                let own = Config::from_gguf(&file, path);
                (file.tensors, own)
            }
            other => {
                return Err(FormatError::UnknownFormat {
                    path: path.to_owned(),
                    why: format!("{other} does not hold a model"),
                    expected: "safetensors or GGUF",
                });
            }
        };
        let tensors = tensors.into_iter().map(|t| (t.name.clone(), t)).collect();
        let tensors = Tensors::Whole(tensors);
        Ok(Self { path: path.to_owned(), format, tensors, own, beside: OnceLock::new() })
    }

    /// The file, or `<memory>`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format.
    pub fn format(&self) -> FileFormat {
        self.format
    }

    /// What the model says about itself: the file, and the `config.json` beside safetensors.
    ///
    /// # Errors
    /// [`FormatError::Configuration`].
    pub(crate) fn config(&self) -> Result<&Config> {
        if let Some(config) = self.beside.get() {
            return Ok(config);
        }
        let beside = self.format != FileFormat::Gguf && self.path != Path::new(MEMORY);
        let own = self.own.clone();
        let config = if beside { own.beside(&self.path)? } else { own };
        Ok(self.beside.get_or_init(|| config))
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> Vec<&str> {
        match &self.tensors {
            Tensors::Whole(map) => map.keys().map(String::as_str).collect(),
            Tensors::Sharded(shards) => shards.names().collect(),
        }
    }

    /// A tensor by name; the shard that holds it is opened if need be.
    ///
    /// # Errors
    /// [`FormatError::TensorNotFound`] with the nearest names; errors of opening a shard.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let found = match &self.tensors {
            Tensors::Whole(map) => map.get(name).cloned(),
            Tensors::Sharded(shards) => shards.tensor(name)?,
        };
        found.ok_or_else(|| FormatError::TensorNotFound {
            path: self.path.clone(),
            name: crate::error::clip(name, 200),
            near: near(name, &self.names()),
        })
    }
}

fn in_directory(dir: &Path) -> Result<PathBuf> {
    for name in [INDEX, SINGLE] {
        let path = dir.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    let entries = std::fs::read_dir(dir).map_err(FormatError::io(dir, "list"))?;
    let mut found: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    found.sort();
    let found = list(found.iter().map(String::as_str), 8);
    Err(FormatError::NoModel { path: dir.to_owned(), found })
}

/// The names closest to `name`, for an error.
fn near(name: &str, names: &[&str]) -> String {
    let mut scored: Vec<(usize, &str)> = names.iter().map(|n| (distance(name, n), *n)).collect();
    scored.sort();
    match scored.len() {
        0 => "the file has no tensors".into(),
        _ => format!("nearest: {}", list(scored.iter().take(3).map(|s| s.1), 3)),
    }
}

/// Levenshtein distance over bytes, of names clipped to a length that real ones stay below.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let (a, b) = (&a[..a.len().min(128)], &b[..b.len().min(128)]);
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_names_come_first() {
        assert_eq!(distance("kitten", "sitting"), 3);
        let names = ["model.norm.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "x"];
        let text = near("blk.2.ffn_up.weight", &names);
        assert!(text.starts_with("nearest: blk.0.ffn_up.weight, blk.1.ffn_up.weight"), "{text}");
    }
}
