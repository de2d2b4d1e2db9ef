//! Where the files of a model lie: in a directory, beside an index, in numbered parts.

use std::path::{Path, PathBuf};

use crate::bytes::Bytes;
use crate::error::{FormatError, Result, list};
use crate::recognise::torch_command;
use crate::safetensors;
use crate::shards::Shards;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// More parts than any model has.
const MAX_PARTS: usize = 10_000;

/// The name of a part: `model-00001-of-00003.safetensors`, with whatever is before and behind the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numbered<'a> {
    head: &'a str,
    width: usize,
    /// From 1.
    pub(crate) no: usize,
    pub(crate) count: usize,
    tail: &'a str,
}

impl<'a> Numbered<'a> {
    pub(crate) fn of(path: &'a Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let (front, back) = name.rsplit_once("-of-")?;
        let (head, no) = front.rsplit_once('-')?;
        let (count, tail) = back.split_at(back.find('.')?);
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().ok())?;
        let (no, count): (usize, usize) = (digits(no)?, digits(count)?);
        let width = front.len() - head.len() - 1;
        ((1..=count).contains(&no) && count <= MAX_PARTS).then_some(Self {
            head,
            width,
            no,
            count,
            tail,
        })
    }

    /// The name of another part.
    pub(crate) fn name(&self, no: usize) -> String {
        let Self { head, width, count, tail, .. } = self;
        format!("{head}-{no:0width$}-of-{count:0width$}{tail}")
    }
}

/// The model file of a directory: an index, a file, or a part of a set.
pub(crate) fn model_in(dir: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(dir).map_err(FormatError::io(dir, "list"))?;
    let mut all: Vec<String> =
        entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
    all.sort();
    let files: Vec<&str> =
        all.iter().map(String::as_str).filter(|name| dir.join(name).is_file()).collect();
    let has = |name: &str| files.contains(&name);
    if has(INDEX) {
        if Shards::open(&dir.join(INDEX)).is_ok_and(|s| s.present() == Some(true)) {
            return Ok(dir.join(INDEX));
        }
        if has(SINGLE) && is_safetensors(&dir.join(SINGLE)) {
            return Ok(dir.join(SINGLE));
        }
    }
    let candidates = candidates(dir, &files)?;
    let usual = [INDEX, SINGLE].into_iter().find(|name| candidates.contains(name));
    match (usual, candidates.as_slice()) {
        (Some(name), _) | (None, &[name]) => Ok(dir.join(name)),
        // An index that names nothing that is there says what is missing.
        (None, []) => match files.iter().find(|name| is_index(name)) {
            Some(index) => Ok(dir.join(index)),
            None => Err(no_model(dir, &all)),
        },
        (None, several) => Err(FormatError::Ambiguous {
            path: dir.to_owned(),
            what: "the model",
            why: "several files here may hold one".into(),
            choices: list(several.iter().copied(), 12),
        }),
    }
}

/// Everything that could be opened, one name for each set of files. A damaged index is an error: what it would name may lack
/// a part of the model.
fn candidates<'a>(dir: &Path, files: &[&'a str]) -> Result<Vec<&'a str>> {
    let mut covered: Vec<PathBuf> = Vec::new();
    let mut out: Vec<&str> = Vec::new();
    for name in files.iter().filter(|name| is_index(name)) {
        let shards = Shards::open(&dir.join(name))?;
        if shards.present().is_some() {
            covered.extend(shards.files().map(Path::to_owned));
            out.push(name);
        }
    }
    covered.sort();
    for name in files {
        let model = [".safetensors", ".gguf"].iter().any(|end| name.ends_with(end));
        if !model || covered.binary_search(&dir.join(name)).is_ok() {
            continue;
        }
        // The first part that is there stands for all.
        let part = Numbered::of(Path::new(name));
        let first = part
            .and_then(|n| (1..=n.count).map(|no| n.name(no)).find(|p| files.contains(&p.as_str())));
        if first.is_none_or(|first| first == **name) {
            out.push(name);
        }
    }
    Ok(out)
}

fn is_index(name: &str) -> bool {
    name.contains(".safetensors.index.") && name.ends_with(".json")
}

fn is_safetensors(path: &Path) -> bool {
    Bytes::map(path).is_ok_and(|bytes| safetensors::parse(&bytes, path).is_ok())
}

/// The index beside a file that names it as one of its shards.
pub(crate) fn index_beside(file: &Path) -> Option<PathBuf> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|name| is_index(name))
        .collect();
    names.sort();
    let indices = names.iter().map(|name| file.with_file_name(name));
    indices.into_iter().find(|index| {
        Shards::open(index).is_ok_and(|s| s.files().any(|f| f.file_name() == file.file_name()))
    })
}

fn no_model(dir: &Path, all: &[String]) -> FormatError {
    let ends = |ends: &[&str]| all.iter().find(|name| ends.iter().any(|end| name.ends_with(end)));
    let help = if let Some(name) = ends(&[".bin", ".pt", ".pth", ".ckpt"]) {
        let stem = name.split_once(['-', '.']).map_or(name.as_str(), |(stem, _)| stem);
        let end = name.rsplit_once('.').map_or("", |(_, end)| end);
        let plain = stem.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let pattern = if plain { format!("{stem}*.{end}") } else { format!("*.{end}") };
        format!("; files of PyTorch are not read, convert them: {}", torch_command(&pattern))
    } else if let Some(name) = ends(&[".incomplete", ".part", ".aria2", ".crdownload"]) {
        format!("; {name} is a download that has not ended: let it end, or start it again")
    } else if dir.join("snapshots").is_dir() {
        "; this is a folder of the Hugging Face cache: give the one below snapshots".into()
    } else {
        String::new()
    };
    let found = list(all.iter().map(String::as_str), 8);
    FormatError::NoModel { path: dir.to_owned(), found, help }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_by_number_and_count() {
        let of = |name| {
            Numbered::of(Path::new(name)).map(|n: Numbered<'_>| (n.no, n.count, n.name(n.count)))
        };
        let last = |name: &str| name.to_owned();
        assert_eq!(of("a/m-00002-of-00003.gguf"), Some((2, 3, last("m-00003-of-00003.gguf"))));
        assert_eq!(
            of("model-00001-of-00002.fp16.safetensors"),
            Some((1, 2, last("model-00002-of-00002.fp16.safetensors")))
        );
        assert_eq!(of("model.fp16-1-of-12.gguf"), Some((1, 12, last("model.fp16-12-of-12.gguf"))));
        for other in [
            "model.gguf",
            "a-00000-of-00002.gguf",
            "a-00003-of-00002.gguf",
            "a-1-of-99999.gguf",
            "-of-.gguf",
            "a--of-2.gguf",
            "a-1-of-2",
            "a-+1-of-2.gguf",
            "a-1-of-99999999999999999999.gguf",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
