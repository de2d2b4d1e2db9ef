//! Scratch memory of a stream, reused by every call on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::cuda::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::memory::{Access, Allocation, DeviceBuffer, DeviceData, Memory};
use crate::device::raw_event::relaxed;
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

impl Scratch {
    fn work(&self) -> Work {
        Work { ptr: self.ptr, barrier: self.ptr - BARRIERS as u64 }
    }

    fn new(memory: &Arc<Memory>, home: &Arc<RawStream>, bytes: usize) -> Result<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(1 << 16).unwrap_or(bytes);
        let allocation = Allocation::new(memory, home);
        let ptr = allocation.add_block(bytes.saturating_add(BARRIERS))?;
        let held = home.hold()?;
        // SAFETY: memory that was just allocated on this stream, of at least so many bytes.
        unsafe { cu!(memory.driver(), cuMemsetD8Async(ptr, 0, BARRIERS, held.handle())) }?;
        Ok(Self { allocation, ptr: ptr + BARRIERS as u64, bytes })
    }
}

/// Scratch memory that no stream has now, and words for graphs of other code.
#[derive(Default)]
pub(crate) struct ScratchPool {
    idle: Mutex<Vec<Scratch>>,
    words: Mutex<Words>,
}

/// Words of zeros that are given out once, for graphs whose end nobody tells.
#[derive(Default)]
struct Words {
    blocks: Vec<Scratch>,
    /// Given out of the last block.
    given: usize,
}

impl ScratchPool {
    /// Apart, so that waiting at one does not slow another down.
    const WORD: usize = 32;
    const WORDS: usize = 2048;

    /// A word of zeros. While other code captures it may allocate, beside the capture, and wait for that.
    fn word(&self, memory: &Arc<Memory>) -> Result<u64> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if words.blocks.is_empty() || words.given == Self::WORDS {
            let (bytes, internal) = (Self::WORD * Self::WORDS, memory.internal()?);
            let block = Scratch::new(memory, internal, bytes)?;
            // SAFETY: memory of the block, on its own stream, which is waited for.
            let code = relaxed(memory.driver(), |driver| unsafe {
                let zeroed = (driver.cuMemsetD8Async)(block.ptr, 0, bytes, internal.handle());
                if zeroed == 0 { (driver.cuStreamSynchronize)(internal.handle()) } else { zeroed }
            });
            memory.driver().check("cuMemsetD8Async", code)?;
            words.blocks.push(block);
            words.given = 0;
        }
        words.given += 1;
        let last = words.blocks.last().map_or(0, |block| block.ptr);
        Ok(last + (Self::WORD * (words.given - 1)) as u64)
    }

    /// More than this is given back to the device.
    const MOST: usize = 16;

    fn pool(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn put(&self, scratch: Scratch) {
        // A graph of other code may use it: it stays allocated, and nobody else gets it.
        if scratch.allocation.is_kept() {
            return;
        }
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

    /// Drops the largest that `stream` had: to make room for a larger one.
    fn drop_largest_of(&self, stream: &Arc<RawStream>) {
        let mut pool = self.pool();
        let its = pool.iter().enumerate().filter(|(_, s)| s.allocation.is_written_on(stream));
        let largest = its.max_by_key(|(_, scratch)| scratch.bytes).map(|(at, _)| at);
        drop(largest.map(|at| pool.swap_remove(at)));
    }

    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.pool());
        drop(all);
    }
}

/// Scratch memory of the caller, for one call or for many in a row: see [`crate::Mlp::forward_with`].
///
/// Calls that may run at the same time, on two streams or from two graphs, need one each.
#[derive(Debug)]
pub struct DeviceScratch<'a> {
    ptr: u64,
    bytes: usize,
    ordinal: usize,
    memory: Option<&'a Arc<Allocation>>,
}

impl<'a> DeviceScratch<'a> {
    /// A whole buffer.
    pub fn new<T: DeviceData>(buffer: &'a mut DeviceBuffer<T>) -> Self {
        let (ptr, bytes) = (buffer.device_ptr(), buffer.len() * size_of::<T>());
        let ordinal = buffer.stream().cuda().ordinal();
        Self { ptr, bytes, ordinal, memory: Some(buffer.allocation()) }
    }

    /// Memory that someone else allocated, at a multiple of 256 bytes.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`].
    ///
    /// # Safety
    /// So many bytes from `ptr` on are memory of this device, and nothing else uses them until the work that is enqueued
    /// with them, or captured, is done.
    pub unsafe fn from_raw(cuda: &Cuda, ptr: u64, bytes: usize) -> Result<Self> {
        const ALIGNMENT: usize = 256;
        if !ptr.is_multiple_of(ALIGNMENT as u64) {
            let (what, required) = ("scratch memory".into(), ALIGNMENT);
            return Err(CudaError::Misaligned { what, ptr, required });
        }
        Ok(Self { ptr, bytes, ordinal: cuda.ordinal(), memory: None })
    }

    fn admit(&self, stream: &Stream, bytes: usize) -> Result<()> {
        if self.bytes < bytes {
            return Err(swiglu_core::Error::OutOfRange {
                what: "bytes of scratch memory",
                given: self.bytes.to_string(),
                expected: format!(
                    "at least {bytes}, as workspace_bytes says, in training training_bytes, backward_bytes or backward_gate_up_bytes"
                ),
            }
            .into());
        }
        if self.ordinal != stream.cuda().ordinal() {
            return Err(CudaError::WrongDevice {
                what: "scratch memory".into(),
                expected: format!("device {}", stream.cuda().ordinal()),
                given: format!("device {}", self.ordinal),
            });
        }
        self.memory.map_or(Ok(()), |memory| memory.order(stream.raw_stream(), Access::Write))
    }
}

/// What a call works in.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    /// Scratch memory, aligned to 256 bytes, with arbitrary contents.
    pub(crate) ptr: u64,
    /// The address of a word that is 0, where the blocks of a grid wait for each other, and that nothing else uses as
    /// long as the kernels of a stream, or launches of a graph, run one after the other.
    pub(crate) barrier: u64,
}

impl Cuda {
    /// Runs `enqueue` with at least `bytes` bytes of scratch memory: the caller's, or the stream's own; with zeros for no
    /// bytes.
    ///
    /// The stream's scratch memory is locked until `enqueue` returns: the kernels of two calls on
    /// one stream, made by two threads, do not interleave. `enqueue` must not ask for scratch memory
    /// of the same stream again.
    pub(crate) fn with_workspace<R>(
        &self,
        stream: &Stream,
        lent: Option<&DeviceScratch<'_>>,
        bytes: usize,
        enqueue: impl FnOnce(Work) -> Result<R>,
    ) -> Result<R> {
        let mut own = stream.inner().scratch();
        // No other thread's capture begins between the kernels of a call.
        let _held = stream.raw_stream().hold_over()?;
        if bytes == 0 {
            return enqueue(Work { ptr: 0, barrier: 0 });
        }
        enqueue(match lent {
            None => self.scratch(stream, &mut own, bytes)?,
            Some(lent) => {
                lent.admit(stream, bytes)?;
                let Work { barrier, .. } = self.scratch(stream, &mut own, 0)?;
                Work { ptr: lent.ptr, barrier }
            }
        })
    }

    /// Runs `enqueue` with so many bytes of device memory beside the stream's scratch memory: of the pool, to which they go
    /// back for whatever is enqueued later.
    pub(crate) fn with_staging<R>(
        &self,
        stream: &Stream,
        bytes: usize,
        enqueue: impl FnOnce(u64) -> Result<R>,
    ) -> Result<R> {
        if bytes == 0 {
            return enqueue(0);
        }
        let (raw, pool) = (stream.raw_stream(), self.scratch_pool());
        raw.enter()?;
        let staging = match pool.take(raw, bytes) {
            Some(pooled) => pooled,
            None => {
                pool.drop_largest_of(raw);
                Scratch::new(self.memory(), raw, bytes)?
            }
        };
        staging.allocation.order(raw, Access::Write)?;
        let outcome = enqueue(staging.ptr);
        pool.put(staging);
        outcome
    }

    /// Makes sure that calls which need up to `bytes` bytes of scratch memory on `stream` allocate nothing. A capture by
    /// [`Stream::capture`] does without: its graph gets scratch memory of its own.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Capture`] in a capture by other code that finds too little.
    pub fn reserve_workspace(&self, stream: &Stream, bytes: usize) -> Result<()> {
        self.with_workspace(stream, None, bytes, |_| Ok(()))
    }

    /// The stream's scratch memory, or a graph's; for no bytes any, or none, with a word to wait at.
    fn scratch(&self, stream: &Stream, own: &mut Option<Scratch>, bytes: usize) -> Result<Work> {
        let (raw, memory) = (stream.raw_stream(), self.memory());
        raw.enter()?;
        if let Some(known) = raw.logged(|log| log.scratch.clone()) {
            return Self::of_graph(memory, raw, known, bytes);
        }
        if let Some(capture) = raw.capture_id()? {
            return self.of_foreign_graph(stream, own, bytes, capture);
        }
        // A graph of other code has the bytes of what is kept, but not its word to wait at.
        let is_taken = |own: &Scratch| bytes > 0 && own.allocation.is_kept();
        if own.as_ref().is_none_or(|own| own.bytes < bytes || is_taken(own)) {
            let made = match self.scratch_pool().take(raw, bytes) {
                Some(pooled) => pooled,
                None => Scratch::new(memory, raw, bytes)?,
            };
            made.allocation.order(raw, Access::Write)?;
            // The old memory goes after the new is there, so that a failure changes nothing.
            *own = Some(made);
        }
        Ok(own.as_ref().map_or(Work { ptr: 0, barrier: 0 }, Scratch::work))
    }

    /// Scratch memory of the graph that `raw` is captured into.
    fn of_graph(
        memory: &Arc<Memory>,
        raw: &Arc<RawStream>,
        known: Option<Scratch>,
        bytes: usize,
    ) -> Result<Work> {
        let scratch = match known {
            Some(scratch) if scratch.bytes >= bytes => scratch,
            // Calls captured before keep the smaller one, which the log knows.
            _ => Scratch::new(memory, memory.internal()?, bytes)?,
        };
        scratch.allocation.order(raw, Access::Write)?;
        let work = scratch.work();
        raw.logged(|log| log.scratch = Some(scratch));
        Ok(work)
    }

    /// The stream's scratch memory for a graph of other code, which may be launched on any stream: it has a word of its
    /// own. The stream keeps its memory for good.
    fn of_foreign_graph(
        &self,
        stream: &Stream,
        own: &Option<Scratch>,
        bytes: usize,
        capture: u64,
    ) -> Result<Work> {
        let ptr = match own {
            _ if bytes == 0 => 0,
            Some(scratch) if scratch.bytes >= bytes => {
                scratch.allocation.keep();
                scratch.ptr
            }
            _ => {
                let now = own.as_ref().map_or(0, |scratch| scratch.bytes);
                return Err(CudaError::Capture {
                    what: format!("growing the workspace from {now} to {bytes} bytes"),
                    hint: "hold one borrow of the stream from a call like it to the end of the capture, \
                           or lend scratch memory with `forward_with`",
                });
            }
        };
        let barrier =
            stream.inner().word_of(capture, || self.scratch_pool().word(self.memory()))?;
        Ok(Work { ptr, barrier })
    }
}

#[cfg(test)]
mod tests;
