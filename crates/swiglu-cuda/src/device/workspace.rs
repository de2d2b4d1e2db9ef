//! Scratch memory of a stream, reused by every call on it.

use cudarc::driver::sys::CUstream;

use crate::device::context::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::memory::Memory;
use crate::device::stream::Stream;

/// One stream's scratch memory. It only grows.
#[derive(Default)]
pub(crate) struct Scratch {
    ptr: u64,
    bytes: usize,
    /// Whether a captured graph may hold the address.
    captured: bool,
}

/// Bytes before the scratch memory that calls do not get: words that are 0 when the memory is new,
/// where the blocks of a grid wait for each other. They leave them so that the next launch can.
const BARRIERS: usize = 256;

/// The address of the stream's barrier word, from that of its scratch memory. Kernels of one stream
/// run one after the other, and a captured graph keeps the memory it was captured with.
pub(crate) fn barrier_of(workspace: u64) -> u64 {
    workspace - BARRIERS as u64
}

impl Scratch {
    /// The address that calls get; 0 if there is no memory yet.
    fn usable(&self) -> u64 {
        if self.ptr == 0 { 0 } else { self.ptr + BARRIERS as u64 }
    }

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
        enqueue(scratch.usable())
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
            let ptr = memory.alloc(rounded.saturating_add(BARRIERS), stream.handle())?;
            let driver = stream.cuda().driver();
            // SAFETY: memory that was just allocated, of at least so many bytes.
            let zeroed = unsafe { cu!(driver, cuMemsetD8Async(ptr, 0, BARRIERS, stream.handle())) };
            if let Err(e) = zeroed {
                memory.free(ptr, stream.handle());
                return Err(e);
            }
            // The old memory goes after the new is there, so that a failure changes nothing.
            let old = std::mem::replace(scratch, Scratch { ptr, bytes: rounded, captured: false });
            old.release(memory, Some(stream.handle()));
        }
        scratch.captured |= capturing;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::device;

    /// The workspace's address and size.
    fn now(stream: &Stream) -> (u64, usize) {
        let scratch = stream.inner().scratch.lock().unwrap();
        (scratch.usable(), scratch.bytes)
    }

    #[test]
    fn it_grows_and_is_reused() {
        let Some(cuda) = device() else { return };
        let stream = cuda.new_stream().unwrap();
        assert_eq!(cuda.with_workspace(&stream, 0, Ok).unwrap(), 0);
        let first = cuda.with_workspace(&stream, 100, Ok).unwrap();
        assert!(first != 0 && first.is_multiple_of(256));
        assert_eq!(cuda.with_workspace(&stream, 50_000, Ok).unwrap(), first);
        cuda.reserve_workspace(&stream, 1 << 20).unwrap();
        let (grown, bytes) = now(&stream);
        assert!(bytes >= 1 << 20);
        assert_eq!(cuda.with_workspace(&stream, 1 << 20, Ok).unwrap(), grown);
        let other = cuda.new_stream().unwrap();
        assert_ne!(cuda.with_workspace(&other, 100, Ok).unwrap(), grown);
        // SAFETY: the stream outlives the device's last use of it here.
        let borrowed = unsafe { cuda.borrow_stream(0) };
        let kept = cuda.with_workspace(&borrowed, 100, Ok).unwrap();
        drop(borrowed);
        // SAFETY: as above.
        let again = unsafe { cuda.borrow_stream(0) };
        assert_eq!(cuda.with_workspace(&again, 100, Ok).unwrap(), kept);
    }

    #[test]
    fn what_a_graph_may_use_is_not_given_away() {
        let Some(cuda) = device() else { return };
        let stream = cuda.new_stream().unwrap();
        let use_it = || cuda.with_workspace(&stream, 1 << 16, |_| Ok(()));
        let error = stream.capture(use_it).unwrap_err();
        assert!(error.to_string().contains("from 0 to 65536 bytes"), "{error}");
        use_it().unwrap();
        let (captured, _) = now(&stream);
        let graph = stream.capture(use_it).unwrap();
        cuda.reserve_workspace(&stream, 1 << 22).unwrap();
        assert_ne!(now(&stream).0, captured);
        // The address still belongs to this device: nobody else can get it.
        // SAFETY: only asked for, never used.
        let view = unsafe { crate::DeviceMatrixRef::<f32>::from_raw(&cuda, captured, 1, 1, 1) };
        view.unwrap();
        // SAFETY: nothing but the workspace is used.
        unsafe { graph.launch(&stream) }.unwrap();
        stream.synchronize().unwrap();
    }

    #[test]
    fn calls_on_one_stream_do_not_interleave() {
        let Some(cuda) = device() else { return };
        let stream = cuda.new_stream().unwrap();
        let inside = std::sync::atomic::AtomicBool::new(false);
        let call = || {
            for _ in 0..200 {
                let exclusive = |_| {
                    use std::sync::atomic::Ordering::SeqCst;
                    assert!(!inside.swap(true, SeqCst));
                    std::thread::yield_now();
                    inside.store(false, SeqCst);
                    Ok(())
                };
                cuda.with_workspace(&stream, 64, exclusive).unwrap();
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(call);
            }
        });
    }
}
