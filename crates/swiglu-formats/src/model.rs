//! A model file of any format: its tensors by name and what it says about itself.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::bytes::{Bytes, without_mark};
use crate::comfy::Notes;
use crate::config::Config;
use crate::directory::{index_beside, model_in};
use crate::error::{FormatError, Result, list};
use crate::parts::{self, Parts};
use crate::recognise::{Wanted, refuse_others};
use crate::shards::Shards;
use crate::tensor::Tensor;
use crate::{gguf, npy, safetensors};

/// The path in errors about data that came as bytes.
pub(crate) const MEMORY: &str = "<memory>";

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
    /// [`FormatError::Recognised`] for something else that is known; [`FormatError::UnknownFormat`].
    pub fn detect(bytes: &[u8], path: &Path) -> Result<Self> {
        Self::of(bytes, path, Wanted::Model)
    }

    pub(crate) fn of(bytes: &[u8], path: &Path, wanted: Wanted) -> Result<Self> {
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
        refuse_others(bytes, path, wanted)?;
        if without_mark(bytes).trim_ascii_start().first() == Some(&b'{') {
            return Ok(FileFormat::SafeTensorsIndex);
        }
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => Ok(FileFormat::SafeTensors),
            Some("json") => Ok(FileFormat::SafeTensorsIndex),
            Some("gguf") => Ok(FileFormat::Gguf),
            Some("npy") if wanted == Wanted::Model => Ok(FileFormat::Npy),
            _ => Err(FormatError::UnknownFormat {
                path: path.to_owned(),
                why: format!("it starts with \"{}\"", bytes[..bytes.len().min(8)].escape_ascii()),
                expected: match wanted {
                    Wanted::Model => "safetensors, an index of safetensors, or GGUF",
                    Wanted::Matrix => {
                        "npy, or a tensor of safetensors or GGUF; raw values become npy by \
                         `np.save('x.npy', np.fromfile(FILE, '<f4').reshape(-1, COLUMNS))`"
                    }
                },
            }),
        }
    }
}

#[derive(Debug)]
enum Tensors {
    Parts(Parts),
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
    /// Opens a file, an index, or a directory with a model in it: `model.safetensors.index.json`,
    /// `model.safetensors`, or the only file, index or set of parts under another name. A part of a split GGUF
    /// and a shard of safetensors are opened with the others beside them.
    ///
    /// # Errors
    /// Any [`FormatError`] of opening and parsing.
    pub fn open(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { model_in(path)? } else { path.to_owned() };
        let bytes = Bytes::map(&path)?;
        let (format, path) = match FileFormat::detect(&bytes, &path)? {
            FileFormat::SafeTensors => match index_beside(&path) {
                Some(index) => (FileFormat::SafeTensorsIndex, index),
                None => (FileFormat::SafeTensors, path),
            },
            other => (other, path),
        };
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

    /// Reads the parts of a split GGUF that are in memory, in their order.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_gguf_parts(parts: &[Bytes]) -> Result<Self> {
        let path = Path::new(MEMORY);
        let (parts, own) = parts::gguf_in_memory(parts, path)?;
        let (tensors, format) = (Tensors::Parts(parts), FileFormat::Gguf);
        Ok(Self { path: path.to_owned(), format, tensors, own, beside: OnceLock::new() })
    }

    pub(crate) fn from_safetensors(bytes: &Bytes) -> Result<Self> {
        Self::parse(bytes, FileFormat::SafeTensors, Path::new(MEMORY))
    }

    fn parse(bytes: &Bytes, format: FileFormat, path: &Path) -> Result<Self> {
        let (parts, own) = match format {
            FileFormat::SafeTensors => {
                let file = safetensors::parse(bytes, path)?;
                let own = Config::from_metadata(&file.metadata, path);
                (parts::safetensors(file, path), own)
            }
            FileFormat::Gguf => parts::gguf(gguf::parse(bytes, path)?, path)?,
            other => {
                return Err(FormatError::UnknownFormat {
                    path: path.to_owned(),
                    why: format!("{other} does not hold a model"),
                    expected: "safetensors or GGUF",
                });
            }
        };
        let tensors = Tensors::Parts(parts);
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
            Tensors::Parts(parts) => parts.names().collect(),
            Tensors::Sharded(shards) => shards.names().collect(),
        }
    }

    /// The tensors' names that begin with `prefix`, sorted.
    pub(crate) fn names_with(&self, prefix: &str) -> Vec<&str> {
        match &self.tensors {
            Tensors::Parts(parts) => parts.names_with(prefix).collect(),
            Tensors::Sharded(shards) => shards.names_with(prefix).collect(),
        }
    }

    /// What the header of the file of a tensor that was read says of quantised weights.
    pub(crate) fn notes(&self, name: &str) -> &[Notes] {
        match &self.tensors {
            Tensors::Parts(parts) => parts.notes(),
            Tensors::Sharded(shards) => shards.notes(name),
        }
    }

    /// What cannot be read, wherever it is in the model: no reason to refuse what does not need it.
    pub(crate) fn defects(&self) -> Vec<String> {
        match &self.tensors {
            Tensors::Parts(parts) => parts.defects(),
            Tensors::Sharded(shards) => shards.defects(),
        }
    }

    /// A tensor by name; the shard that holds it is opened if need be.
    ///
    /// # Errors
    /// [`FormatError::TensorNotFound`] with the nearest names; errors of opening a shard.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let found = match &self.tensors {
            Tensors::Parts(parts) => parts.tensor(name)?,
            Tensors::Sharded(shards) => shards.tensor(name)?,
        };
        found.ok_or_else(|| {
            self.explain(FormatError::TensorNotFound {
                path: self.path.clone(),
                name: crate::error::clip(name, 200),
                near: near(name, &self.names()),
            })
        })
    }

    /// No tensor, or an error if `what` may be in a part that is not there.
    pub(crate) fn none<T>(&self, what: &str) -> Result<Option<T>> {
        self.lacking(format!("{what} is not in the others"))?;
        Ok(None)
    }

    /// The reason for not finding something: where parts are missing, that.
    pub(crate) fn explain(&self, error: FormatError) -> FormatError {
        let why = match &error {
            FormatError::NoLayer { .. } => "no layer is in the others".into(),
            FormatError::LayerOutOfRange { layer, available, .. } => {
                format!("layer {layer} is not in the others, which have {available}")
            }
            FormatError::IncompleteLayer { layer, missing, .. } => {
                format!("layer {layer} is not whole in the others: {missing}")
            }
            FormatError::TensorNotFound { name, .. } => format!("`{name}` is not in the others"),
            _ => return error,
        };
        self.lacking(why).err().unwrap_or(error)
    }

    fn lacking(&self, why: String) -> Result<()> {
        match &self.tensors {
            Tensors::Parts(parts) => parts.none(why),
            // The index says what is where.
            Tensors::Sharded(_) => Ok(()),
        }
    }
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
