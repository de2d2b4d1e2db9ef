//! Bounded little-endian reading.

use std::path::Path;

use crate::error::{FormatError, Result};

/// The longest key or tensor name; the format allows keys of 65535 bytes.
const MAX_NAME: u64 = 65_535;

/// A position in a byte slice that is never moved past its end.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], path: &'a Path) -> Self {
        Self { bytes, at: 0, path }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn offset(&self) -> u64 {
        self.at as u64
    }

    /// Checks that `count` items of at least `least` bytes could follow.
    pub(super) fn expect_room(&self, what: &str, count: u64, least: u64) -> Result<()> {
        let available = (self.bytes.len() - self.at) as u64;
        match count.checked_mul(least) {
            Some(needed) if needed <= available => Ok(()),
            Some(needed) => Err(FormatError::Truncated {
                path: self.path.to_owned(),
                what: if count == 1 { what.to_owned() } else { format!("{count} {what}") },
                offset: self.offset(),
                needed,
                available,
            }),
            None => {
                let expected = format!("at most {}, for which there is room", available / least);
                Err(FormatError::malformed(self.path, self.offset(), what, expected, count))
            }
        }
    }

    pub(super) fn take(&mut self, what: &str, len: u64) -> Result<&'a [u8]> {
        self.expect_room(what, 1, len)?;
        // `len` is at most the slice's length, so it fits a usize.
        let end = self.at + len as usize;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(what, N as u64)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A length-prefixed string of any length that the file holds.
    pub(super) fn string_bytes(&mut self, what: &str) -> Result<&'a [u8]> {
        let len = self.u64(what)?;
        self.take(what, len)
    }

    /// A key or tensor name. Broken UTF-8 in one is no reason to refuse the others.
    pub(super) fn name(&mut self, what: &str) -> Result<String> {
        let start = self.offset();
        let bytes = self.string_bytes(what)?;
        if bytes.len() as u64 > MAX_NAME {
            let expected = format!("at most {MAX_NAME} bytes");
            return Err(FormatError::malformed(self.path, start, what, expected, bytes.len()));
        }
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }
}
