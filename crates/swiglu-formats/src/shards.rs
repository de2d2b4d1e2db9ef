//! A safetensors checkpoint in several files, tied together by `model.safetensors.index.json`.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use serde_json::value::RawValue;

use crate::bytes::{Bytes, without_mark};
use crate::comfy::Notes;
use crate::error::{FormatError, Result, clip, list};
use crate::parts::{Parts, open_shard, with_prefix};
use crate::tensor::Tensor;

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    /// Opened when a tensor in it is first read: a partial download serves the layers it has.
    file: OnceLock<Parts>,
}

/// An index and the shards it names.
#[derive(Debug)]
pub(crate) struct Shards {
    index: PathBuf,
    /// Tensor name to position in `shards`, or why it has none.
    names: BTreeMap<String, Result<usize>>,
    shards: Vec<Shard>,
}

impl Shards {
    pub(crate) fn open(index: &Path) -> Result<Self> {
        let bytes = Bytes::map(index)?;
        let dir = index.parent().unwrap_or(Path::new(""));
        Self::parse(&bytes, index, dir)
    }

    fn parse(bytes: &[u8], index: &Path, dir: &Path) -> Result<Self> {
        let malformed = |e: serde_json::Error| {
            let expected = "a JSON object with weight_map, from tensor names to file names";
            FormatError::malformed(index, e.column() as u64, "index", expected, e)
        };
        let keys: BTreeMap<String, &RawValue> =
            serde_json::from_slice(without_mark(bytes)).map_err(malformed)?;
        let Some(map) = keys.get("weight_map") else { return Err(no_index(&keys, index)) };
        let map: BTreeMap<String, &RawValue> =
            serde_json::from_str(map.get()).map_err(malformed)?;
        let mut positions: BTreeMap<String, usize> = BTreeMap::new();
        let mut shards = Vec::new();
        let mut names = BTreeMap::new();
        for (name, file) in map {
            let position = inside(file, index).map(|file| {
                let path = dir.join(&file);
                *positions.entry(file).or_insert_with(|| {
                    shards.push(Shard { path, file: OnceLock::new() });
                    shards.len() - 1
                })
            });
            names.insert(name, position);
        }
        Ok(Self { index: index.to_owned(), names, shards })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Whether all shards are there; `None` if none is.
    pub(crate) fn present(&self) -> Option<bool> {
        let there = self.files().filter(|file| file.is_file()).count();
        (there > 0).then_some(there == self.shards.len())
    }

    /// The names that begin with `prefix`.
    pub(crate) fn names_with<'a>(&'a self, prefix: &str) -> impl Iterator<Item = &'a str> {
        with_prefix(&self.names, prefix)
    }

    /// What the header of the shard of a tensor that was read says of quantised weights.
    pub(crate) fn notes(&self, name: &str) -> &[Notes] {
        let shard = self.names.get(name).and_then(|at| self.shards.get(*at.as_ref().ok()?));
        shard.and_then(|shard| shard.file.get()).map_or(&[], Parts::notes)
    }

    /// What cannot be read, wherever it is: entries that name no file, and files that are not there.
    pub(crate) fn defects(&self) -> Vec<String> {
        let entry = |(name, at): (&String, &Result<usize>)| {
            Some(format!("{}: {}", clip(name, 100), at.as_ref().err()?))
        };
        let mut out: Vec<String> = self.names.iter().filter_map(entry).collect();
        for (at, shard) in self.shards.iter().enumerate() {
            if !shard.path.is_file() {
                let of = self.names.iter().filter(|(_, to)| to.as_ref().ok() == Some(&at));
                let names: Vec<&str> = of.map(|(name, _)| name.as_str()).collect();
                let file = shard.path.display();
                out.push(format!(
                    "{file} is not there; the index says that it has {}",
                    list(names, 3)
                ));
            }
        }
        out
    }

    /// The tensor, or `None` if the index does not name it.
    pub(crate) fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(position) = self.names.get(name) else { return Ok(None) };
        let Some(shard) = self.shards.get(position.clone()?) else { return Ok(None) };
        let file = match shard.file.get() {
            Some(file) => file,
            None => {
                let file = open_shard(&shard.path, || {
                    let index = self.index.file_name().unwrap_or_default().to_string_lossy();
                    format!("{index} says that {} is in it", clip(name, 100))
                })?;
                shard.file.get_or_init(|| Parts::shard(file))
            }
        };
        match file.tensor(name)? {
            Some(tensor) => Ok(Some(tensor)),
            None => Err(FormatError::malformed(
                &self.index,
                0,
                format!("weight_map: {}", clip(name, 200)),
                format!("a tensor of {}", shard.path.display()),
                "it has none of that name",
            )),
        }
    }
}

/// JSON of another kind: a model's configuration, or what a server answers.
fn no_index(keys: &BTreeMap<String, &RawValue>, path: &Path) -> FormatError {
    let text = |key: &str| -> Option<String> { serde_json::from_str(keys.get(key)?.get()).ok() };
    let said = ["error", "message", "detail"].into_iter().find_map(text);
    let (found, help) = match said {
        Some(said) => (
            format!("JSON that says {:?}, as a server answers", clip(&said, 100)),
            "download the file again",
        ),
        None => {
            let keys = list(keys.keys().map(String::as_str), 4);
            (
                format!("JSON without weight_map, so no index; it has {keys}"),
                "give the model's file, its index or its directory",
            )
        }
    };
    FormatError::recognised(path, found, help)
}

/// A shard's name as a path that cannot leave the index's directory.
fn inside(file: &RawValue, index: &Path) -> Result<String> {
    let bad = |given: &str| {
        let expected = "a file name inside the index's directory";
        FormatError::malformed(index, 0, "weight_map", expected, given)
    };
    let file: String = serde_json::from_str(file.get()).map_err(|_| bad(file.get()))?;
    let normal = Path::new(&file).components().all(|c| matches!(c, Component::Normal(_)));
    // A backslash separates on some systems and not on others; no checkpoint uses one.
    if file.is_empty() || !normal || file.contains(['\\', '\0']) {
        return Err(bad(&file));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_stay_inside_the_directory() {
        for bad in ["../x.safetensors", "/etc/passwd", "a/../../b", "", ".", "a\\b", "a\0b"] {
            let json = serde_json::json!({ "weight_map": { "t": bad } }).to_string();
            let s = Shards::parse(json.as_bytes(), Path::new("i.json"), Path::new("d")).unwrap();
            assert!(matches!(s.tensor("t"), Err(FormatError::Malformed { .. })), "{bad}");
            assert_eq!(s.files().count(), 0);
        }
        let json =
            br#"{"metadata":{},"weight_map":{"a":"x-1.safetensors","b":"sub/x-2.safetensors"}}"#;
        let s = Shards::parse(json, Path::new("i.json"), Path::new("d")).unwrap();
        assert_eq!(s.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(s.shards[1].path, Path::new("d/sub/x-2.safetensors"));
    }

    #[test]
    fn broken_indices_are_refused() {
        let parse = |text: &str| Shards::parse(text.as_bytes(), Path::new("i.json"), Path::new(""));
        for bad in ["", "{", "[]", r#"{"weight_map":[]}"#, "{\"weight_map\":{}}x"] {
            assert!(matches!(parse(bad), Err(FormatError::Malformed { .. })), "{bad}");
        }
        for (other, said) in [
            ("{}", "it has nothing"),
            (r#"{"model_type":"llama"}"#, "it has model_type"),
            (r#"{"error":"Repository not found"}"#, "says \"Repository not found\""),
        ] {
            let e = parse(other).unwrap_err().to_string();
            assert!(e.contains(said), "{e}");
        }
    }

    #[test]
    fn an_odd_entry_stops_nothing_but_itself() {
        let json = "\u{feff}{\"weight_map\":{\"a\":1,\"b\":\"x.safetensors\"}}";
        let s = Shards::parse(json.as_bytes(), Path::new("i.json"), Path::new("nowhere")).unwrap();
        assert!(matches!(s.tensor("a"), Err(FormatError::Malformed { .. })));
        let e = s.tensor("b").unwrap_err();
        assert!(
            matches!(&e, FormatError::MissingPart { path, .. } if path.ends_with("x.safetensors")),
            "{e}"
        );
    }
}
