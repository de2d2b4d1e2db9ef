//! Scratch memory of a stream, reused by every call on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::context::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::memory::{Access, Allocation, Memory};
use crate::device::raw_stream::RawStream;
use crate::device::stream::Stream;

/// Scratch memory of a stream or of a graph.
#[derive(Clone)]
pub(crate) struct Scratch {
    allocation: Arc<Allocation>,
    /// What calls get.
    ptr: u64,
    bytes: usize,
}

/// Bytes before the scratch memory that calls do not get: words that are 0 when the memory is new,
/// where the blocks of a grid wait for each other. They leave them so that the next launch can.
const BARRIERS: usize = 256;

/// The address of the barrier word, from that of its scratch memory. Kernels of one stream run one after the other, and so
/// do launches of one graph, which has scratch memory of its own.
pub(crate) fn barrier_of(workspace: u64) -> u64 {
    workspace - BARRIERS as u64
}

impl Scratch {
    fn new(memory: &Arc<Memory>, home: &Arc<RawStream>, bytes: usize) -> Result<Self> {
        let bytes = bytes.checked_next_multiple_of(1 << 16).unwrap_or(bytes);
        let allocation = Allocation::new(memory, home);
        let ptr = allocation.add_block(bytes.saturating_add(BARRIERS))?;
        // SAFETY: memory that was just allocated on this stream, of at least so many bytes.
        unsafe { cu!(memory.driver(), cuMemsetD8Async(ptr, 0, BARRIERS, home.handle())) }?;
        Ok(Self { allocation, ptr: ptr + BARRIERS as u64, bytes })
    }
}

/// Scratch memory that no stream has now.
#[derive(Default)]
pub(crate) struct ScratchPool(Mutex<Vec<Scratch>>);

impl ScratchPool {
    /// More than this is given back to the device.
    const MOST: usize = 16;

    fn pool(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn put(&self, scratch: Scratch) {
        let mut pool = self.pool();
        pool.push(scratch);
        if pool.len() > Self::MOST {
            // The oldest: a stream that comes back has used it lately.
            pool.remove(0);
        }
    }

    /// At least `bytes` bytes: what `stream` had if possible, which then waits for nobody, else the smallest.
    fn take(&self, stream: &Arc<RawStream>, bytes: usize) -> Option<Scratch> {
        let mut pool = self.pool();
        let enough = pool.iter().enumerate().filter(|(_, scratch)| scratch.bytes >= bytes);
        let rank = |scratch: &Scratch| (!scratch.allocation.is_written_on(stream), scratch.bytes);
        let (at, _) = enough.min_by_key(|(_, scratch)| rank(scratch))?;
        Some(pool.swap_remove(at))
    }

    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.pool());
        drop(all);
    }
}

impl Cuda {
    /// Runs `enqueue` with the address of at least `bytes` bytes of scratch memory, aligned to 256
    /// bytes, with arbitrary contents; 0 for no bytes.
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
        let mut own = stream.inner().scratch();
        let ptr = match bytes {
            0 => 0,
            _ => self.scratch(stream, &mut own, bytes)?,
        };
        enqueue(ptr)
    }

    /// Makes sure that calls which need up to `bytes` bytes of scratch memory on `stream` allocate nothing. A capture by
    /// [`Stream::capture`] does without: its graph gets scratch memory of its own.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Capture`] in a capture by other code that finds too little.
    pub fn reserve_workspace(&self, stream: &Stream, bytes: usize) -> Result<()> {
        self.with_workspace(stream, bytes, |_| Ok(()))
    }

    fn scratch(&self, stream: &Stream, own: &mut Option<Scratch>, bytes: usize) -> Result<u64> {
        let (raw, memory) = (stream.raw_stream(), self.memory());
        raw.enter()?;
        if let Some(known) = raw.logged(|log| log.scratch.clone()) {
            return Self::of_graph(memory, raw, known, bytes);
        }
        let capturing = raw.is_capturing()?;
        match own {
            Some(scratch) if scratch.bytes >= bytes => {}
            _ if capturing => {
                let bytes_now = own.as_ref().map_or(0, |scratch| scratch.bytes);
                return Err(CudaError::Capture {
                    what: format!("growing the workspace from {bytes_now} to {bytes} bytes"),
                    hint: "run the same call once before on this stream, or reserve the workspace",
                });
            }
            _ => {
                let made = match self.scratch_pool().take(raw, bytes) {
                    Some(pooled) => pooled,
                    None => Scratch::new(memory, raw, bytes)?,
                };
                made.allocation.order(raw, Access::Write)?;
                // The old memory goes after the new is there, so that a failure changes nothing.
                *own = Some(made);
            }
        }
        let Some(scratch) = own else { return Ok(0) };
        if capturing {
            scratch.allocation.keep();
        }
        Ok(scratch.ptr)
    }

    /// Scratch memory of the graph that `raw` is captured into.
    fn of_graph(
        memory: &Arc<Memory>,
        raw: &Arc<RawStream>,
        known: Option<Scratch>,
        bytes: usize,
    ) -> Result<u64> {
        let scratch = match known {
            Some(scratch) if scratch.bytes >= bytes => scratch,
            // Calls captured before keep the smaller one, which the log knows.
            _ => Scratch::new(memory, memory.internal()?, bytes)?,
        };
        scratch.allocation.order(raw, Access::Write)?;
        let ptr = scratch.ptr;
        raw.logged(|log| log.scratch = Some(scratch));
        Ok(ptr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::device;

    /// The workspace's address and size.
    fn now(stream: &Stream) -> (u64, usize) {
        let scratch = stream.inner().scratch();
        scratch.as_ref().map_or((0, 0), |scratch| (scratch.ptr, scratch.bytes))
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
        // SAFETY: the legacy default stream is always valid.
        let borrowed = unsafe { cuda.borrow_stream(0) }.unwrap();
        let kept = cuda.with_workspace(&borrowed, 100, Ok).unwrap();
        drop(borrowed);
        // SAFETY: as above; 1 is another name for it.
        let again = unsafe { cuda.borrow_stream(1) }.unwrap();
        assert_eq!(cuda.with_workspace(&again, 100, Ok).unwrap(), kept);
    }

    #[test]
    fn a_graph_has_scratch_memory_of_its_own() {
        let Some(cuda) = device() else { return };
        let stream = cuda.new_stream().unwrap();
        let own = cuda.with_workspace(&stream, 1 << 16, Ok).unwrap();
        let captured = std::cell::Cell::new([0; 2]);
        let graph = stream.capture(|| {
            let small = cuda.with_workspace(&stream, 1 << 16, Ok)?;
            let large = cuda.with_workspace(&stream, 1 << 22, Ok)?;
            assert_eq!(cuda.with_workspace(&stream, 1 << 16, Ok)?, large);
            captured.set([small, large]);
            Ok::<(), CudaError>(())
        });
        let graph = graph.unwrap();
        assert_eq!(cuda.with_workspace(&stream, 1 << 16, Ok).unwrap(), own);
        // The addresses still belong to this device: nobody else can get them.
        for ptr in captured.get() {
            assert_ne!(ptr, own);
            // SAFETY: only asked for, never used.
            unsafe { crate::DeviceMatrixRef::<f32>::from_raw(&cuda, ptr, 1, 1, 1) }.unwrap();
        }
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
