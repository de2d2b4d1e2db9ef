//! The header: a Python dictionary literal with three keys.

use std::path::Path;

use super::MAGIC;
use crate::error::{FormatError, Result, clip};

/// NumPy refuses more than 10000 bytes; a header that is read here is below 200.
const MAX_HEADER: u64 = 65_536;
/// NumPy's own limit.
const MAX_RANK: usize = 64;

pub(super) struct Header {
    pub(super) descr: String,
    pub(super) fortran_order: bool,
    pub(super) shape: Vec<u64>,
    /// Where data starts.
    pub(super) end: usize,
}

pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Header> {
    let truncated = |what: &str, offset: u64, needed: u64| FormatError::Truncated {
        path: path.to_owned(),
        what: what.to_owned(),
        offset,
        needed,
        available: (bytes.len() as u64).saturating_sub(offset),
    };
    let Some(magic) = bytes.first_chunk::<8>() else {
        return Err(truncated("magic and version", 0, 8));
    };
    if magic[..6] != *MAGIC {
        let given = magic[..6].escape_ascii();
        return Err(FormatError::malformed(path, 0, "magic", "\\x93NUMPY", given));
    }
    let (len, start) = match (magic[6], magic[7]) {
        (1, 0) => {
            let len = bytes[8..].first_chunk().ok_or_else(|| truncated("header length", 8, 2))?;
            (u64::from(u16::from_le_bytes(*len)), 10usize)
        }
        (2 | 3, 0) => {
            let len = bytes[8..].first_chunk().ok_or_else(|| truncated("header length", 8, 4))?;
            (u64::from(u32::from_le_bytes(*len)), 12)
        }
        (major, minor) => {
            let given = format!("{major}.{minor}");
            return Err(FormatError::malformed(path, 6, "version", "1.0, 2.0 or 3.0", given));
        }
    };
    if len > MAX_HEADER {
        let expected = format!("at most {MAX_HEADER} bytes");
        return Err(FormatError::malformed(path, 8, "header length", expected, len));
    }
    let end = start + len as usize;
    let text = bytes.get(start..end).ok_or_else(|| truncated("header", start as u64, len))?;
    let mut literal = Literal { text, at: 0 };
    let (descr, fortran_order, shape) = literal.dictionary().map_err(|expected| {
        let at = literal.at.min(text.len());
        let given = clip(String::from_utf8_lossy(&text[at..]).trim_end(), 40);
        FormatError::malformed(path, (start + at) as u64, "header", expected, given)
    })?;
    Ok(Header { descr, fortran_order, shape, end })
}

/// A reader of the one literal that occurs; on failure, what was expected.
struct Literal<'a> {
    text: &'a [u8],
    at: usize,
}

type Parsed<T> = std::result::Result<T, &'static str>;

impl Literal<'_> {
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn word(&mut self, word: &str) -> bool {
        self.peek();
        let found = self.text[self.at..].starts_with(word.as_bytes());
        self.at += if found { word.len() } else { 0 };
        found
    }

    fn dictionary(&mut self) -> Parsed<(String, bool, Vec<u64>)> {
        let (mut descr, mut order, mut shape) = (None, None, None);
        if !self.eat(b'{') {
            return Err("a dictionary");
        }
        while !self.eat(b'}') {
            let key = self.string()?;
            if !self.eat(b':') {
                return Err("`:` after a key");
            }
            let repeated = match key.as_str() {
                "descr" => descr.replace(self.descr()?).is_some(),
                "fortran_order" => order.replace(self.boolean()?).is_some(),
                "shape" => shape.replace(self.tuple()?).is_some(),
                _ => return Err("the keys descr, fortran_order and shape"),
            };
            if repeated {
                return Err("each key once");
            }
            if !self.eat(b',') && self.peek() != Some(b'}') {
                return Err("`,` or `}` after a value");
            }
        }
        if self.peek().is_some() {
            return Err("nothing after the dictionary");
        }
        match (descr, order, shape) {
            (Some(d), Some(o), Some(s)) => Ok((d, o, s)),
            _ => Err("the keys descr, fortran_order and shape"),
        }
    }

    fn string(&mut self) -> Parsed<String> {
        let quote = self.peek().filter(|b| matches!(b, b'\'' | b'"')).ok_or("a quoted string")?;
        let rest = &self.text[self.at + 1..];
        let end = rest.iter().position(|&b| b == quote || b == b'\\').ok_or("a closing quote")?;
        if rest[end] == b'\\' {
            return Err("a string without escapes");
        }
        let text = std::str::from_utf8(&rest[..end]).map_err(|_| "UTF-8 text")?;
        let text = text.to_owned();
        self.at += end + 2;
        Ok(text)
    }

    /// A plain type, or the list of a record's fields as it stands.
    fn descr(&mut self) -> Parsed<String> {
        if self.peek() != Some(b'[') {
            return self.string();
        }
        let (start, mut depth) = (self.at, 0usize);
        loop {
            match self.peek() {
                Some(b'\'' | b'"') => drop(self.string()?),
                Some(byte) => {
                    depth += usize::from(byte == b'[');
                    depth -= usize::from(byte == b']');
                    self.at += 1;
                }
                None => return Err("the end of a list"),
            }
            if depth == 0 {
                return Ok(String::from_utf8_lossy(&self.text[start..self.at]).into_owned());
            }
        }
    }

    fn boolean(&mut self) -> Parsed<bool> {
        if self.word("True") {
            Ok(true)
        } else if self.word("False") {
            Ok(false)
        } else {
            Err("True or False")
        }
    }

    fn tuple(&mut self) -> Parsed<Vec<u64>> {
        if !self.eat(b'(') {
            return Err("a tuple of extents");
        }
        let mut out = Vec::new();
        while !self.eat(b')') {
            out.push(self.number()?);
            if out.len() > MAX_RANK {
                return Err("at most 64 extents");
            }
            if !self.eat(b',') && self.peek() != Some(b')') {
                return Err("`,` or `)` after an extent");
            }
        }
        Ok(out)
    }

    fn number(&mut self) -> Parsed<u64> {
        let mut value: Option<u64> = None;
        while let Some(digit) = self.peek().filter(u8::is_ascii_digit) {
            value = Some(
                value
                    .unwrap_or(0)
                    .checked_mul(10)
                    .and_then(|v| v.checked_add(u64::from(digit - b'0')))
                    .ok_or("an extent below 2^64")?,
            );
            self.at += 1;
        }
        // Python 2 wrote long integers with a suffix.
        self.eat(b'L');
        value.ok_or("an extent: a whole number from 0 on")
    }
}
