//! A model in numbered parts of which each has tensors of its own: split GGUF, and shards of safetensors without
//! their index.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::{Path, PathBuf};

use crate::bytes::Bytes;
use crate::comfy::Notes;
use crate::config::Config;
use crate::directory::Numbered;
use crate::error::{FormatError, Result, clip};
use crate::gguf::{self, Gguf};
use crate::model::FileFormat;
use crate::recognise::AGAIN;
use crate::safetensors::{self, SafeTensors};
use crate::shards::Shards;
use crate::tensor::Tensor;

/// The tensors of all parts that are there. The names in one that is not there are unknown.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    tensors: BTreeMap<String, Result<Tensor>>,
    /// The first part that could not be opened, and why.
    absent: Option<FormatError>,
    /// What their headers say of quantised weights.
    notes: Vec<Notes>,
}

impl Parts {
    /// Of one GGUF file.
    fn whole(file: Gguf) -> Self {
        let mut out = Self::default();
        out.add(file.tensors, file.faults, Path::new(""));
        out
    }

    /// Of one safetensors file.
    pub(crate) fn shard(file: SafeTensors) -> Self {
        let mut out = Self::default();
        out.add_shard(file, Path::new(""));
        out
    }

    fn add_shard(&mut self, file: SafeTensors, path: &Path) {
        self.notes.extend(Notes::of(&file.metadata));
        self.add(file.tensors, file.faults, path);
    }

    fn add(&mut self, tensors: Vec<Tensor>, faults: BTreeMap<String, FormatError>, path: &Path) {
        let tensors = tensors.into_iter().map(|t| (t.name.clone(), Ok(t)));
        for (name, tensor) in tensors.chain(faults.into_iter().map(|(name, e)| (name, Err(e)))) {
            let again = self.tensors.contains_key(&name).then(|| {
                FormatError::malformed(path, 0, "tensor name", "each name in one part", &name)
            });
            self.tensors.insert(name, again.map_or(tensor, Err));
        }
    }

    fn lack(&mut self, why: FormatError) {
        self.absent.get_or_insert(why);
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The names that begin with `prefix`.
    pub(crate) fn names_with<'a>(&'a self, prefix: &str) -> impl Iterator<Item = &'a str> {
        with_prefix(&self.tensors, prefix)
    }

    /// What the headers say of quantised weights.
    pub(crate) fn notes(&self) -> &[Notes] {
        &self.notes
    }

    /// What cannot be read, wherever it is: tensors whose entries are wrong, and a part that is not there.
    pub(crate) fn defects(&self) -> Vec<String> {
        let entries = self.tensors.values().filter_map(|t| t.as_ref().err());
        entries.chain(&self.absent).map(ToString::to_string).collect()
    }

    /// The tensor, or `None` if no part that is there has it.
    pub(crate) fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(found) = self.tensors.get(name) else { return Ok(None) };
        match self.absent.is_some().then(|| self.cut_off(name)).flatten() {
            Some(more) => {
                let why =
                    format!("other layers have {more} too, with what is like {}", clip(name, 100));
                self.none(why).map(|()| None)
            }
            None => found.clone().map(Some),
        }
    }

    /// What a part that is not there may have, beside the layer of `name`: a layer of the same kind has it.
    fn cut_off(&self, name: &str) -> Option<String> {
        let (block, number, rest) = numbered_block(name)?;
        let module = rest.split(['.', '_']).next()?;
        let mut others: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for other in self.names() {
            if let Some((b, n, r)) = numbered_block(other)
                && b == block
                && n != number
                && r.split(['.', '_']).next() == Some(module)
            {
                others.entry(n).or_default().push(r);
            }
        }
        let alike = others.into_values().filter(|names| names.contains(&rest));
        let lacking =
            alike.flatten().find(|r| !self.tensors.contains_key(&format!("{block}{number}.{r}")));
        lacking.map(|r| clip(r, 100))
    }

    /// An error if a part is missing, for without it `why`.
    pub(crate) fn none(&self, why: String) -> Result<()> {
        match &self.absent {
            Some(FormatError::MissingPart { path, .. }) => {
                Err(FormatError::MissingPart { path: path.clone(), why })
            }
            Some(other) => Err(other.clone()),
            None => Ok(()),
        }
    }
}

/// Of a map's keys those that begin with `prefix`.
pub(crate) fn with_prefix<'a, V>(
    map: &'a BTreeMap<String, V>,
    prefix: &str,
) -> impl Iterator<Item = &'a str> {
    let prefix = prefix.to_owned();
    let from = map.range::<str, _>((Bound::Included(prefix.as_str()), Bound::Unbounded));
    from.map(|(name, _)| name.as_str()).take_while(move |name| name.starts_with(&prefix))
}

/// `model.layers.12.mlp.up.weight` as `model.layers.`, `12` and `mlp.up.weight`.
fn numbered_block(name: &str) -> Option<(&str, &str, &str)> {
    let mut at = 0;
    for part in name.split('.') {
        let end = at + part.len();
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            return Some((&name[..at], part, name.get(end + 1..)?));
        }
        at = end + 1;
    }
    None
}

/// What a split GGUF says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Split {
    /// From 0.
    no: usize,
    count: usize,
    /// Tensors of all parts together.
    tensors: Option<u64>,
}

impl Split {
    /// None of a file that is whole. One that says otherwise, and not which part it is, is damaged.
    fn of(file: &Gguf, path: &Path) -> Result<Option<Self>> {
        let value = |key: &str| file.metadata.get(key).and_then(gguf::metadata::Value::as_u64);
        let size = |key: &str| {
            let size = value(key).and_then(|v| usize::try_from(v).ok());
            size.ok_or_else(|| {
                let given = file.metadata.get(key).map_or("nothing".into(), ToString::to_string);
                FormatError::malformed(path, 0, key, "the number of a part, or of parts", given)
            })
        };
        let stated = file.metadata.contains_key("split.count");
        let count = if stated { size("split.count")? } else { 1 };
        let tensors = value("split.tensors.count");
        Ok(if count > 1 { Some(Self { no: size("split.no")?, count, tensors }) } else { None })
    }
}

/// A GGUF file at `path` with the parts beside it, and what the first of them says about the model.
pub(crate) fn gguf(file: Gguf, path: &Path) -> Result<(Parts, Config)> {
    let Some(split) = Split::of(&file, path)? else {
        let own = Config::from_gguf(&file, path);
        return Ok((Parts::whole(file), own));
    };
    let numbered = Numbered::of(path).filter(|n| (n.no, n.count) == (split.no + 1, split.count));
    gguf_parts(file, path, split, |no| {
        let part = path.with_file_name(numbered?.name(no + 1));
        Some((open(&part, FileFormat::Gguf, || "it is a part of a split GGUF".into()), part))
    })
}

/// As [`gguf`], of parts in memory in their order.
pub(crate) fn gguf_in_memory(parts: &[Bytes], path: &Path) -> Result<(Parts, Config)> {
    let Some(first) = parts.first() else {
        return Err(FormatError::recognised(path, "no parts were given", "give at least one"));
    };
    let file = gguf::parse(first, path)?;
    let Some(split) = Split::of(&file, path)? else { return gguf(file, path) };
    gguf_parts(file, path, split, |no| Some((Ok(parts.get(no)?.clone()), path.to_owned())))
}

/// `given` is one of them; `part` finds another by its number.
fn gguf_parts(
    given: Gguf,
    path: &Path,
    split: Split,
    part: impl Fn(usize) -> Option<(Result<Bytes>, PathBuf)>,
) -> Result<(Parts, Config)> {
    let alone = || {
        let found =
            format!("part {} of {} of a split GGUF", split.no.saturating_add(1), split.count);
        let help = "the others are looked for beside it, as NAME-00001-of-0000N.gguf: give all their names again";
        FormatError::recognised(path, found, help)
    };
    let read = |bytes: Result<Bytes>, path: &Path, no: usize| {
        let file = gguf::parse(&bytes?, path)?;
        let said = Split::of(&file, path)?;
        if said == Some(Split { no, ..split }) {
            return Ok(file);
        }
        let expected = format!("part {} of {}, as the others say", no + 1, split.count);
        let given = said.map_or("another model".into(), |s| format!("{s:?}"));
        Err(FormatError::malformed(path, 0, "split.no and split.count", expected, given))
    };
    let mut out = Parts::default();
    let mut config = None;
    let mut given = Some(given);
    for no in 0..split.count {
        let own = given.take_if(|_| no == split.no).map(|file| (Ok(file), path.to_owned()));
        let found = own.or_else(|| part(no).map(|(bytes, at)| (read(bytes, &at, no), at)));
        // Where one has no place, the others have none either.
        let last = found.is_none();
        match found.unwrap_or_else(|| (Err(alone()), path.to_owned())) {
            (Ok(file), at) => {
                config.get_or_insert_with(|| Config::from_gguf(&file, &at));
                out.add(file.tensors, file.faults, &at);
            }
            (Err(FormatError::MissingPart { path, .. }), _) if no == 0 => {
                let why = "the first one says what model it is".into();
                return Err(FormatError::MissingPart { path, why });
            }
            (Err(why), _) if no == 0 => return Err(why),
            (Err(why), _) => out.lack(why),
        }
        if last {
            break;
        }
    }
    Ok((out, config.unwrap_or_else(|| Config::none(path))))
}

/// A shard of safetensors without its index, with the others beside it.
pub(crate) fn safetensors(file: SafeTensors, path: &Path) -> Parts {
    let mut out = Parts::shard(file);
    let Some(numbered) = Numbered::of(path) else { return out };
    for no in (1..=numbered.count).filter(|&no| no != numbered.no) {
        let part = path.with_file_name(numbered.name(no));
        match open_shard(&part, || "no index says what is in it".into()) {
            Ok(file) => out.add_shard(file, &part),
            Err(why) => out.lack(why),
        }
    }
    out
}

/// A shard; if it is not there, `why` it is needed.
pub(crate) fn open_shard(path: &Path, why: impl FnOnce() -> String) -> Result<SafeTensors> {
    safetensors::parse(&open(path, FileFormat::SafeTensors, why)?, path)
}

/// A part of a model, looked at before it is parsed.
fn open(path: &Path, format: FileFormat, why: impl FnOnce() -> String) -> Result<Bytes> {
    if !path.exists() {
        return Err(FormatError::MissingPart { path: path.to_owned(), why: why() });
    }
    let bytes = Bytes::map(path)?;
    match FileFormat::detect(&bytes, path)? {
        found if found == format => Ok(bytes),
        // Which says what the JSON is instead.
        FileFormat::SafeTensorsIndex => Shards::open(path).map(|_| bytes),
        found => {
            let help = format!("a part of {format} is expected here: {AGAIN}");
            Err(FormatError::recognised(path, format!("{found}"), &help))
        }
    }
}
