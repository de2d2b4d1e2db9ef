//! Scratch memory of a stream, reused by every call on it.

use cudarc::driver::sys::CUstream;

use crate::context::Cuda;
use crate::error::{CudaError, Result};
use crate::memory::Memory;
use crate::stream::Stream;

/// One stream's scratch memory. It only grows.
#[derive(Default)]
pub(crate) struct Scratch {
    ptr: u64,
    bytes: usize,
    /// Whether a captured graph may hold the address.
    captured: bool,
}

impl Scratch {
    /// Frees the memory: in the order of a stream of ours, or at the end of the device.
    pub(crate) fn release(self, memory: &Memory, stream: Option<CUstream>) {
        match stream {
            Some(stream) if !self.captured => memory.free(self.ptr, stream),
            _ => memory.retire(self.ptr),
        }
    }
}

impl Cuda {
    /// Runs `enqueue` with the address of at least `bytes` bytes of scratch memory, aligned to 256
    /// bytes, with arbitrary contents.
    ///
    /// The stream's scratch memory is locked until `enqueue` returns: the kernels of two calls on
    /// one stream, made by two threads, do not interleave. `enqueue` must not ask for scratch memory
    /// of the same stream again.
    pub(crate) fn with_workspace<R>(
        &self,
        stream: &Stream,
        bytes: usize,
        enqueue: impl FnOnce(u64) -> Result<R>,
    ) -> Result<R> {
        let mut scratch = stream.inner().scratch.lock().unwrap_or_else(|e| e.into_inner());
        if bytes > 0 {
            self.prepare(stream, &mut scratch, bytes)?;
        }
        enqueue(scratch.ptr)
    }

    /// Makes sure that calls which need up to `bytes` bytes of scratch memory on `stream` allocate
    /// nothing: necessary before they are captured.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Capture`] in a capture that finds too little.
    pub fn reserve_workspace(&self, stream: &Stream, bytes: usize) -> Result<()> {
        self.with_workspace(stream, bytes, |_| Ok(()))
    }

    fn prepare(&self, stream: &Stream, scratch: &mut Scratch, bytes: usize) -> Result<()> {
        let capturing = stream.is_capturing()?;
        if bytes > scratch.bytes {
            if capturing {
                return Err(CudaError::Capture {
                    what: format!("growing the workspace from {} to {bytes} bytes", scratch.bytes),
                    hint: "run the same call once before, or reserve the workspace",
                });
            }
            let memory = self.memory();
            let rounded = bytes.checked_next_multiple_of(1 << 16).unwrap_or(bytes);
            let ptr = memory.alloc(rounded, stream.handle())?;
            // The old memory goes after the new is there, so that a failure changes nothing.
            let old = std::mem::replace(scratch, Scratch { ptr, bytes: rounded, captured: false });
            old.release(memory, Some(stream.handle()));
        }
        scratch.captured |= capturing;
        Ok(())
    }
}
