//! Errors that carry the file, what was given and what was expected.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Result with [`FormatError`].
pub type Result<T, E = FormatError> = std::result::Result<T, E>;

/// Why a file, tensor or layer was refused. `path` is `<memory>` for data that came as bytes.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A directory, device or pipe where a regular file is needed.
    #[error("{}: {found}, expected a regular file", path.display())]
    NotAFile {
        /// The path given.
        path: PathBuf,
        /// What is there instead.
        found: &'static str,
    },
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was attempted, as a verb: `open`, `write`.
        action: &'static str,
        /// The system's reason.
        source: Arc<io::Error>,
    },
    /// Neither the content nor the extension is one that is read here.
    #[error("{}: unknown format: {why}; expected {expected}", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// What was seen.
        why: String,
        /// The formats that would be accepted.
        expected: &'static str,
    },
    /// Something else that is recognised: what a failed download leaves, or a format that others read.
    #[error("{}: {found}; {help}", path.display())]
    Recognised {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What to do.
        help: String,
    },
    /// A directory without a model in it.
    #[error(
        "{}: no model here: expected model.safetensors, its index or a GGUF file, found {found}{help}",
        path.display()
    )]
    NoModel {
        /// The directory.
        path: PathBuf,
        /// Some of the files that are there.
        found: String,
        /// What to do, where there is something; begins with a semicolon.
        help: String,
    },
    /// A file of a model in several that is not there, and is needed.
    #[error(
        "{}: this part of the model is not there, and is needed: {why}; a partial download serves only \
         the layers it has: fetch this file",
        path.display()
    )]
    MissingPart {
        /// The file that is missing.
        path: PathBuf,
        /// For what.
        why: String,
    },
    /// The file ends before something it announces.
    #[error(
        "{}: truncated: {what} at byte {offset} needs {needed} bytes, the file has {available} there; \
         fetch or write the whole file again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// What was being read.
        what: String,
        /// Where it starts.
        offset: u64,
        /// Bytes it needs.
        needed: u64,
        /// Bytes left at `offset`.
        available: u64,
    },
    /// The file breaks the rules of its format.
    #[error("{}: malformed: {what} (byte {offset}): expected {expected}, given {given}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field in question.
        what: String,
        /// Where it is.
        offset: u64,
        /// What the format allows.
        expected: String,
        /// What the file says.
        given: String,
    },
    /// A tensor of an element type that is not read here.
    #[error("{}: {tensor} has element type {dtype}; readable are {supported}", path.display())]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type, as the file names it.
        dtype: String,
        /// What would have been readable, and what to do.
        supported: &'static str,
    },
    /// Quantised weights that need more than their codes and the scales that are read here.
    #[error("{}: {tensor} as {dtype}: {why}", path.display())]
    Quantization {
        /// The file.
        path: PathBuf,
        /// The weight.
        tensor: String,
        /// Its type, as the file names it.
        dtype: String,
        /// What is missing or not read, and what would have been.
        why: String,
    },
    /// A tensor that is not in the file.
    #[error("{}: no tensor `{name}`; {near}", path.display())]
    TensorNotFound {
        /// The file.
        path: PathBuf,
        /// The name asked for.
        name: String,
        /// The names closest to it.
        near: String,
    },
    /// A file with several tensors, and none was named.
    #[error("{}: has {count} tensors, name one as FILE#TENSOR: {names}", path.display())]
    TensorNotNamed {
        /// The file.
        path: PathBuf,
        /// Tensors in it.
        count: usize,
        /// Their names, at most a dozen.
        names: String,
    },
    /// A layer the file does not have.
    #[error("{}: layer {layer} given, the file has layers {available}", path.display())]
    LayerOutOfRange {
        /// The file.
        path: PathBuf,
        /// The layer asked for.
        layer: usize,
        /// The layers that are there, as ranges.
        available: String,
    },
    /// No tensor follows a known naming convention.
    #[error("{}: no gated feed-forward layer found; tried {tried}; the file has {present}", path.display())]
    NoLayer {
        /// The file.
        path: PathBuf,
        /// The conventions that were tried.
        tried: &'static str,
        /// Some of the tensor names.
        present: String,
    },
    /// A layer of which a part is missing.
    #[error("{}: layer {layer} is incomplete: {missing}; found {found}", path.display())]
    IncompleteLayer {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: usize,
        /// What is missing.
        missing: String,
        /// What is there.
        found: String,
    },
    /// A feed-forward block without a gate: h = act(x·W₁), y = h·W₂.
    #[error(
        "{}: layer {layer}: {first} and {second} are a block without a gate, which is no gated linear \
         unit: there is nothing in it to compute here",
        path.display()
    )]
    Ungated {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: usize,
        /// The weight before the activation.
        first: String,
        /// The weight behind it.
        second: String,
    },
    /// An expert the layer does not have.
    #[error("{}: expert {expert} given, {available}", path.display())]
    ExpertOutOfRange {
        /// The file.
        path: PathBuf,
        /// The expert asked for.
        expert: usize,
        /// The experts that are there.
        available: String,
    },
    /// A file that can be read in more than one way.
    #[error("{}: {what} is ambiguous: {why}; say which: {choices}", path.display())]
    Ambiguous {
        /// The file.
        path: PathBuf,
        /// What cannot be decided.
        what: &'static str,
        /// Why not.
        why: String,
        /// The choices, as they can be given.
        choices: String,
    },
    /// A model's configuration that cannot be read.
    #[error(
        "{}: the model's configuration {why}; correct it, or LoadOptions::without_config does without it \
         (then Weights::activation and, for a packed tensor, LoadOptions::with_arrangement say what it \
         would have)",
        path.display()
    )]
    Configuration {
        /// The configuration.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A key of a configuration that may change the block's mathematics, and is not understood.
    #[error(
        "{}: `{key}` = {value} may change what the block computes and is not understood here; \
         LoadOptions::with_ignored({key}) computes without it",
        path.display()
    )]
    NotUnderstood {
        /// The configuration.
        path: PathBuf,
        /// The key, with those of the objects around it.
        key: String,
        /// Its value.
        value: String,
    },
    /// A key that is understood, and asks for something that is not computed here.
    #[error(
        "{}: `{key}` = {value}: {why}; LoadOptions::with_ignored({key}) computes without it",
        path.display()
    )]
    NotComputed {
        /// The configuration.
        path: PathBuf,
        /// The key, with those of the objects around it.
        key: String,
        /// Its value.
        value: String,
        /// What it asks for.
        why: &'static str,
    },
    /// A key of a configuration that the tensors contradict.
    #[error(
        "{}: `{key}` = {value}, but {why}; LoadOptions::with_ignored({key}) goes by the tensors, LoadOptions::without_config does without \
         the configuration",
        path.display()
    )]
    Contradicted {
        /// The configuration.
        path: PathBuf,
        /// The key, with those of the objects around it.
        key: String,
        /// Its value.
        value: String,
        /// What the tensors say.
        why: String,
    },
    /// A tensor of the block that the block as it is computed here has no place for.
    #[error("{}: {tensor} is in the block: {why}; LoadOptions::with_ignored({tensor}) computes without it", path.display())]
    Unused {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What it is, as far as its name says.
        why: &'static str,
    },
    /// A model that does not say which activation its block has, or names one that is not known.
    #[error(
        "{}: {why}; Weights::activation chooses one of: {}",
        path.display(),
        swiglu_core::ACTIVATION_NAMES
    )]
    UnknownActivation {
        /// The configuration, or the model.
        path: PathBuf,
        /// What it says.
        why: String,
    },
    /// Options that contradict each other or the file.
    #[error("{}: {what}: {why}", path.display())]
    Contradiction {
        /// The file.
        path: PathBuf,
        /// The options in question.
        what: &'static str,
        /// Why they cannot hold.
        why: String,
    },
    /// A tensor whose shape does not fit its place in the layer.
    #[error("{}: {tensor}: expected shape {expected}, given {given}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape that would have been right.
        expected: String,
        /// Its shape.
        given: String,
    },
    /// An output that would overwrite a file.
    #[error("{}: exists already; remove it or allow overwriting", path.display())]
    AlreadyExists {
        /// The file.
        path: PathBuf,
    },
    /// Refused by the core types.
    #[error(transparent)]
    Core(#[from] swiglu_core::Error),
}

impl FormatError {
    /// The file in question, or the model's directory; `<memory>` for data that came as bytes.
    pub fn path(&self) -> Option<&Path> {
        use FormatError as E;
        match self {
            E::NotAFile { path, .. }
            | E::Io { path, .. }
            | E::UnknownFormat { path, .. }
            | E::Recognised { path, .. }
            | E::NoModel { path, .. }
            | E::MissingPart { path, .. }
            | E::Truncated { path, .. }
            | E::Malformed { path, .. }
            | E::UnsupportedDtype { path, .. }
            | E::Quantization { path, .. }
            | E::TensorNotFound { path, .. }
            | E::TensorNotNamed { path, .. }
            | E::LayerOutOfRange { path, .. }
            | E::NoLayer { path, .. }
            | E::IncompleteLayer { path, .. }
            | E::Ungated { path, .. }
            | E::ExpertOutOfRange { path, .. }
            | E::Ambiguous { path, .. }
            | E::Configuration { path, .. }
            | E::NotUnderstood { path, .. }
            | E::NotComputed { path, .. }
            | E::Contradicted { path, .. }
            | E::Unused { path, .. }
            | E::UnknownActivation { path, .. }
            | E::Contradiction { path, .. }
            | E::Shape { path, .. }
            | E::AlreadyExists { path, .. } => Some(path),
            E::Core(_) => None,
        }
    }

    /// The tensor, key, field or option in question, where there is one.
    pub fn what(&self) -> Option<&str> {
        use FormatError as E;
        match self {
            E::Truncated { what, .. } | E::Malformed { what, .. } => Some(what),
            E::Ambiguous { what, .. } | E::Contradiction { what, .. } => Some(what),
            E::UnsupportedDtype { tensor, .. }
            | E::Quantization { tensor, .. }
            | E::TensorNotFound { name: tensor, .. }
            | E::Unused { tensor, .. }
            | E::Shape { tensor, .. } => Some(tensor),
            E::NotUnderstood { key, .. }
            | E::NotComputed { key, .. }
            | E::Contradicted { key, .. } => Some(key),
            E::Core(error) => error.what(),
            _ => None,
        }
    }

    /// What was given and what was expected, where there are both.
    pub fn given_and_expected(&self) -> Option<[String; 2]> {
        use FormatError as E;
        match self {
            E::NotAFile { found, .. } => Some([(*found).into(), "a regular file".into()]),
            E::UnknownFormat { why, expected, .. } => Some([why.clone(), (*expected).into()]),
            E::NoModel { found, .. } => {
                Some([found.clone(), "model.safetensors, its index or a GGUF file".into()])
            }
            E::Truncated { needed, available, .. } => {
                Some([format!("{available} bytes"), format!("{needed} bytes")])
            }
            E::Malformed { given, expected, .. } | E::Shape { given, expected, .. } => {
                Some([given.clone(), expected.clone()])
            }
            E::UnsupportedDtype { dtype, supported, .. } => {
                Some([dtype.clone(), (*supported).into()])
            }
            E::LayerOutOfRange { layer, available, .. } => {
                Some([format!("layer {layer}"), format!("layers {available}")])
            }
            E::ExpertOutOfRange { expert, available, .. } => {
                Some([format!("expert {expert}"), available.clone()])
            }
            E::Core(error) => error.given_and_expected(),
            _ => None,
        }
    }

    pub(crate) fn malformed(
        path: &Path,
        offset: u64,
        what: impl Into<String>,
        expected: impl Into<String>,
        given: impl ToString,
    ) -> Self {
        FormatError::Malformed {
            path: path.to_owned(),
            what: what.into(),
            offset,
            expected: expected.into(),
            given: clip(&given.to_string(), 120),
        }
    }

    pub(crate) fn shape(
        path: &Path,
        tensor: &str,
        expected: impl Into<String>,
        given: &[usize],
    ) -> Self {
        FormatError::Shape {
            path: path.to_owned(),
            tensor: clip(tensor, 200),
            expected: expected.into(),
            given: format!("{given:?}"),
        }
    }

    pub(crate) fn recognised(path: &Path, found: impl Into<String>, help: &str) -> Self {
        let (found, help) = (found.into(), help.into());
        FormatError::Recognised { path: path.to_owned(), found, help }
    }

    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| FormatError::Io { path, action, source: Arc::new(source) }
    }
}

/// At most `max` characters of text that came from a file: errors stay readable whatever is in it.
pub(crate) fn clip(text: &str, max: usize) -> String {
    // Control characters would move a terminal's cursor.
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    let mut out: String = text.chars().take(max).map(shown).collect();
    if text.chars().nth(max).is_some() {
        out.push('…');
    }
    out
}

/// A list of names for an error text: at most `max` of them, each clipped.
pub(crate) fn list<'a>(names: impl IntoIterator<Item = &'a str>, max: usize) -> String {
    let mut names = names.into_iter();
    let mut out: Vec<String> = names.by_ref().take(max).map(|n| clip(n, 100)).collect();
    let rest = names.count();
    if out.is_empty() {
        return "nothing".into();
    }
    if rest > 0 {
        out.push(format!("and {rest} more"));
    }
    out.join(", ")
}

/// Sorted numbers as ranges: `0 to 3, 7`.
pub(crate) fn ranges(numbers: impl IntoIterator<Item = usize>) -> String {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for n in numbers {
        match spans.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(n) => *end = n,
            _ => spans.push((n, n)),
        }
    }
    let spans: Vec<String> = spans
        .iter()
        .map(|&(a, b)| if a == b { a.to_string() } else { format!("{a} to {b}") })
        .collect();
    list(spans.iter().map(String::as_str), 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_listed_as_ranges() {
        assert_eq!(ranges(0..31), "0 to 30");
        assert_eq!(ranges([0, 1, 2, 7]), "0 to 2, 7");
        assert_eq!(ranges([usize::MAX]), usize::MAX.to_string());
        assert_eq!(ranges([]), "nothing");
    }

    #[test]
    fn names_from_files_are_clipped() {
        assert_eq!(clip("äöü", 2), "äö…");
        assert_eq!(clip("a\u{1b}[2J\n", 9), "a\u{fffd}[2J\u{fffd}");
        assert_eq!(list(["a", "b", "c"], 2), "a, b, and 1 more");
    }
}
