//! Shared, sliceable bytes: a mapped file, an owned buffer or an embedded file.

use std::any::TypeId;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::Mmap;
use swiglu_core::Element;

use crate::error::{FormatError, Result};

enum Store {
    Map(Mmap),
    Owned(Vec<u8>),
    Shared(Arc<[u8]>),
    Static(&'static [u8]),
}

impl Store {
    fn as_slice(&self) -> &[u8] {
        match self {
            Store::Map(m) => m,
            Store::Owned(v) => v,
            Store::Shared(a) => a,
            Store::Static(s) => s,
        }
    }
}

/// A range of a file's bytes that keeps the file alive; cloning is cheap.
///
/// A mapped file must not be changed by another process while it is in use: the values read
/// would change, and a file that is cut short ends the process with a bus error. Model files are
/// replaced by renaming, which is safe.
#[derive(Clone)]
pub struct Bytes {
    store: Arc<Store>,
    range: Range<usize>,
}

impl Bytes {
    fn new(store: Store) -> Self {
        let range = 0..store.as_slice().len();
        Self { store: Arc::new(store), range }
    }

    /// Maps a file.
    ///
    /// # Errors
    /// [`FormatError::NotAFile`] for anything but a regular file; [`FormatError::Io`].
    pub fn map(path: &Path) -> Result<Self> {
        // Asked before opening: opening a pipe would wait for a writer.
        let kind = std::fs::metadata(path).map_err(FormatError::io(path, "open"))?;
        if !kind.is_file() {
            let found = if kind.is_dir() { "is a directory" } else { "is a device or pipe" };
            return Err(FormatError::NotAFile { path: path.to_owned(), found });
        }
        let file = File::open(path).map_err(FormatError::io(path, "open"))?;
        if kind.len() == 0 {
            return Ok(Self::new(Store::Owned(Vec::new())));
        }
        // SAFETY: the map is private to this process and only read. Another process that changes
        // the file under it is outside what can be prevented; the type's documentation says so,
        // and every value read from it is of a type for which any bit pattern is valid.
        let map = unsafe { Mmap::map(&file) }.map_err(FormatError::io(path, "map"))?;
        Ok(Self::new(Store::Map(map)))
    }

    /// A part of these bytes; `None` if it leaves them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        (start <= end && end <= self.range.end)
            .then(|| Self { store: Arc::clone(&self.store), range: start..end })
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.store.as_slice()[self.range.clone()]
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({:?})", self.range)
    }
}

impl From<&'static [u8]> for Bytes {
    fn from(bytes: &'static [u8]) -> Self {
        Self::new(Store::Static(bytes))
    }
}

impl<const N: usize> From<&'static [u8; N]> for Bytes {
    fn from(bytes: &'static [u8; N]) -> Self {
        Self::new(Store::Static(bytes))
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Store::Owned(bytes))
    }
}

impl From<Arc<[u8]>> for Bytes {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self::new(Store::Shared(bytes))
    }
}

/// Text without the byte-order mark that some editors put before it.
pub(crate) fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// Little-endian bytes as elements, where the machine's byte order and the address allow it.
pub(crate) fn as_elements<T: Element>(bytes: &[u8]) -> Option<&[T]> {
    let plain = [TypeId::of::<f32>(), TypeId::of::<f16>(), TypeId::of::<bf16>()];
    if cfg!(target_endian = "big") || !plain.contains(&TypeId::of::<T>()) {
        return None;
    }
    // SAFETY: T is f32, f16 or bf16, for which every bit pattern is a valid value; `align_to`
    // takes care of alignment and length.
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    (before.is_empty() && after.is_empty()).then_some(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_inside() {
        let b = Bytes::from(vec![0, 1, 2, 3, 4]);
        let inner = b.slice(1..4).unwrap();
        assert_eq!(&*inner, &[1, 2, 3]);
        assert_eq!(&*inner.slice(2..3).unwrap(), &[3]);
        assert!(inner.slice(2..4).is_none());
        assert!(inner.slice(usize::MAX..usize::MAX).is_none());
        #[expect(clippy::reversed_empty_ranges)]
        let reversed = inner.slice(2..1);
        assert!(reversed.is_none());
    }

    #[test]
    fn misaligned_and_ragged_bytes_are_not_borrowed() {
        let words = [1.0f32, 2.0];
        // SAFETY: any f32 is four bytes.
        let (_, bytes, _) = unsafe { words.align_to::<u8>() };
        assert_eq!(as_elements::<f32>(bytes), Some(&words[..]));
        assert!(as_elements::<f32>(&bytes[1..5]).is_none());
        assert!(as_elements::<f32>(&bytes[..7]).is_none());
        assert!(as_elements::<bf16>(&bytes[2..6]).is_some());
    }
}
