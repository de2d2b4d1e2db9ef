//! Cache-line aligned memory, on huge pages where it is large.

use memmap2::MmapMut;
use swiglu_core::{Error, Result};

/// One cache line, which is also the widest vector.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// From this size on a buffer is mapped by itself and asks for huge pages: with 4 KiB pages,
/// streaming weights spends several per cent of the bandwidth on address translation.
const MAPPED_FROM: usize = 1 << 20;

enum Memory {
    Lines(Vec<Line>),
    Mapped(MmapMut),
}

/// Zeroed bytes, 64-byte aligned.
pub(crate) struct Buffer {
    memory: Memory,
    bytes: usize,
}

impl Buffer {
    /// No bytes.
    pub(crate) fn empty() -> Self {
        Self { memory: Memory::Lines(Vec::new()), bytes: 0 }
    }

    /// This memory if it has at least `bytes` bytes, whatever stands in them, else `bytes` zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system refuses the memory.
    pub(crate) fn or_zeroed(self, bytes: usize) -> Result<Self> {
        if self.bytes >= bytes {
            return Ok(self);
        }
        drop(self);
        Self::zeroed(bytes)
    }

    /// `bytes` zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system refuses the memory.
    pub(crate) fn zeroed(bytes: usize) -> Result<Self> {
        let refused =
            |why: String| Error::OutOfMemory { what: format!("a buffer of {bytes} bytes"), why };
        if bytes < MAPPED_FROM {
            let (mut lines, count) = (Vec::new(), bytes.div_ceil(64));
            lines.try_reserve_exact(count).map_err(|e| refused(e.to_string()))?;
            lines.resize(count, Line([0; 64]));
            return Ok(Self { memory: Memory::Lines(lines), bytes });
        }
        let map = MmapMut::map_anon(bytes).map_err(|e| refused(e.to_string()))?;
        // Advice only: without huge pages the buffer works as well, a little slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { memory: Memory::Mapped(map), bytes })
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        match &self.memory {
            Memory::Lines(v) => v.as_ptr().cast(),
            Memory::Mapped(m) => m.as_ptr(),
        }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        match &mut self.memory {
            Memory::Lines(v) => v.as_mut_ptr().cast(),
            Memory::Mapped(m) => m.as_mut_ptr(),
        }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory holds so many bytes, which were zeros when it was made, and is borrowed with the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.bytes) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}
