//! A safetensors checkpoint in several files, tied together by `model.safetensors.index.json`.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use crate::bytes::Bytes;
use crate::error::{FormatError, Result};
use crate::safetensors::{self, SafeTensors};
use crate::tensor::Tensor;

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    /// Opened when a tensor in it is first read: a partial download serves the layers it has.
    file: OnceLock<SafeTensors>,
}

/// An index and the shards it names.
#[derive(Debug)]
pub(crate) struct Shards {
    index: PathBuf,
    /// Tensor name to position in `shards`.
    names: BTreeMap<String, usize>,
    shards: Vec<Shard>,
}

impl Shards {
    pub(crate) fn open(index: &Path) -> Result<Self> {
        let bytes = Bytes::map(index)?;
        let dir = index.parent().unwrap_or(Path::new(""));
        Self::parse(&bytes, index, dir)
    }

    fn parse(bytes: &[u8], index: &Path, dir: &Path) -> Result<Self> {
        let parsed: Index = serde_json::from_slice(bytes).map_err(|e| {
            let expected = "a JSON object with weight_map, from tensor names to file names";
            FormatError::malformed(index, e.column() as u64, "index", expected, e)
        })?;
        let mut positions: BTreeMap<&str, usize> = BTreeMap::new();
        let mut shards = Vec::new();
        let mut names = BTreeMap::new();
        for (name, file) in &parsed.weight_map {
            let next = shards.len();
            let position = *positions.entry(file).or_insert(next);
            if position == next {
                let path = dir.join(inside(file, index)?);
                shards.push(Shard { path, file: OnceLock::new() });
            }
            names.insert(name.clone(), position);
        }
        Ok(Self { index: index.to_owned(), names, shards })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// The tensor, or `None` if the index does not name it.
    pub(crate) fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(shard) = self.names.get(name).and_then(|&i| self.shards.get(i)) else {
            return Ok(None);
        };
        let file = match shard.file.get() {
            Some(file) => file,
            None => {
                let file = safetensors::parse(&Bytes::map(&shard.path)?, &shard.path)?;
                shard.file.get_or_init(|| file)
            }
        };
        match file.tensors.iter().find(|t| t.name == name) {
            Some(tensor) => Ok(Some(tensor.clone())),
            None => Err(FormatError::malformed(
                &self.index,
                0,
                format!("weight_map: {name}"),
                format!("a tensor of {}", shard.path.display()),
                "it has none of that name",
            )),
        }
    }
}

/// A shard's name as a path that cannot leave the index's directory.
fn inside<'a>(file: &'a str, index: &Path) -> Result<&'a Path> {
    let path = Path::new(file);
    let normal = path.components().all(|c| matches!(c, Component::Normal(_)));
    // A backslash separates on some systems and not on others; no checkpoint uses one.
    if file.is_empty() || !normal || file.contains(['\\', '\0']) {
        let expected = "a file name inside the index's directory";
        return Err(FormatError::malformed(index, 0, "weight_map", expected, file));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_stay_inside_the_directory() {
        for bad in ["../x.safetensors", "/etc/passwd", "a/../../b", "", ".", "a\\b", "a\0b"] {
            let json = serde_json::json!({ "weight_map": { "t": bad } }).to_string();
            let e = Shards::parse(json.as_bytes(), Path::new("i.json"), Path::new("d"));
            assert!(matches!(e, Err(FormatError::Malformed { .. })), "{bad}");
        }
        let json =
            br#"{"metadata":{},"weight_map":{"a":"x-1.safetensors","b":"sub/x-2.safetensors"}}"#;
        let s = Shards::parse(json, Path::new("i.json"), Path::new("d")).unwrap();
        assert_eq!(s.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(s.shards[1].path, Path::new("d/sub/x-2.safetensors"));
    }

    #[test]
    fn broken_indices_are_refused() {
        for bad in ["", "{", "[]", "{}", r#"{"weight_map":{"a":1}}"#, r#"{"weight_map":[]}"#] {
            let e = Shards::parse(bad.as_bytes(), Path::new("i.json"), Path::new(""));
            assert!(matches!(e, Err(FormatError::Malformed { .. })), "{bad}");
        }
    }
}
