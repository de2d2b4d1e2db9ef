//! Where in a file something is, for messages.

use std::ops::Range;
use std::path::Path;

use serde::de::DeserializeOwned;
use toml::Spanned;

use crate::error::{LabError, Result};

/// A source text and its file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    source: &'a str,
    pub(crate) path: &'a Path,
}

/// The text of a file.
///
/// # Errors
/// [`LabError::Io`], and [`LabError::Definition`] at the first byte that is not UTF-8.
pub(crate) fn text_of(path: &Path) -> Result<String> {
    // What is no file, a pipe say, might never end.
    let found = std::fs::metadata(path).map_err(LabError::io("read", path))?;
    if !found.is_file() {
        let why = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is no file");
        return Err(LabError::io("read", path)(why));
    }
    let bytes = std::fs::read(path).map_err(LabError::io("read", path))?;
    String::from_utf8(bytes).map_err(|error| {
        let (text, bytes) = error.as_bytes().split_at(error.utf8_error().valid_up_to());
        let before = String::from_utf8_lossy(text);
        let byte = bytes.first().copied().unwrap_or_default();
        let message = format!("the byte 0x{byte:02x} is no UTF-8: expected a text in UTF-8");
        Place::new(&before, path).at(before.len()..before.len(), message)
    })
}

impl<'a> Place<'a> {
    pub(crate) fn new(source: &'a str, path: &'a Path) -> Self {
        Self { source, path }
    }

    /// An error at a range of bytes.
    pub(crate) fn at(&self, span: Range<usize>, message: impl Into<String>) -> LabError {
        let before = self.source.get(..span.start).unwrap_or(self.source);
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        LabError::Definition {
            path: self.path.to_path_buf(),
            line: before.matches('\n').count() + 1,
            column,
            message: message.into(),
        }
    }

    /// An error at a value unless something holds.
    pub(crate) fn expect<T>(
        &self,
        holds: bool,
        value: &Spanned<T>,
        message: impl Into<String>,
    ) -> Result<()> {
        if holds { Ok(()) } else { Err(self.at(value.span(), message)) }
    }

    /// A sentence is a text without the blanks around it, and an error unless it has words in it.
    pub(crate) fn sentence(&self, what: &str, text: &Spanned<String>) -> Result<String> {
        let words = text.get_ref().trim();
        self.expect(!words.is_empty(), text, format!("{what} is empty: expected a sentence"))?;
        Ok(words.to_owned())
    }

    /// The source read as TOML.
    pub(crate) fn toml<T: DeserializeOwned>(&self) -> Result<T> {
        toml::from_str(self.source).map_err(|error| {
            self.at(error.span().unwrap_or(0..0), error.message().trim().replace('\n', ", "))
        })
    }
}

/// What such a name consists of.
pub(crate) const NAME: &str =
    "at most 80 lowercase letters, digits, -, _ and ., a letter or digit first";

/// Whether `s` can be part of a file name and of a command line everywhere.
pub(crate) fn is_name(s: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    !s.is_empty() && s.len() <= 80 && s.chars().all(allowed) && s.starts_with(char::is_alphanumeric)
}
