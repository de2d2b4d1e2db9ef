//! Device memory that knows which streams use it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::sys::CUdeviceptr;

use super::Memory;
use crate::device::error::Result;
use crate::device::fork::is_child;
use crate::device::raw_stream::RawStream;

/// What work does with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Blocks of device memory that are used and freed together, and the streams that use them.
///
/// A stream that uses memory waits for the others' work with it, but only where they differ, and marks are made only
/// then: what all happens on one stream costs nothing, and neither do readers of memory that is not written any more.
pub(crate) struct Allocation {
    memory: Arc<Memory>,
    /// In whose order blocks are allocated, and freed while it lives.
    home: Arc<RawStream>,
    blocks: Mutex<Vec<CUdeviceptr>>,
    bytes: AtomicUsize,
    uses: Mutex<Uses>,
    /// Whether a graph that was captured by other code may use it.
    kept: AtomicBool,
}

/// All but the writer have waited for what it wrote.
#[derive(Default)]
struct Uses {
    /// The stream of the last write, unless that is known to be done; of memory in parts every one that has written.
    writers: Vec<Arc<RawStream>>,
    readers: Vec<Arc<RawStream>>,
    /// Whether several borrows may use parts of it at the same time: then no use comes behind all others.
    in_parts: bool,
}

impl Uses {
    fn is_written_on(&self, stream: &Arc<RawStream>) -> bool {
        self.writers.iter().any(|writer| Arc::ptr_eq(writer, stream))
    }
}

fn add(to: &mut Vec<Arc<RawStream>>, stream: &Arc<RawStream>) {
    to.retain(|other| !other.is_over());
    if !to.iter().any(|other| Arc::ptr_eq(other, stream)) {
        to.push(stream.clone());
    }
}

impl Allocation {
    /// Without a block yet.
    pub(crate) fn new(memory: &Arc<Memory>, home: &Arc<RawStream>) -> Arc<Self> {
        Arc::new(Self {
            memory: memory.clone(),
            home: home.clone(),
            blocks: Mutex::default(),
            bytes: AtomicUsize::new(0),
            uses: Mutex::default(),
            kept: AtomicBool::new(false),
        })
    }

    /// Of all blocks.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a block, which work on the home stream may use from now on; 0 for no bytes.
    pub(crate) fn add_block(&self, bytes: usize) -> Result<CUdeviceptr> {
        let ptr = self.memory.alloc(bytes, &self.home)?;
        if ptr != 0 {
            self.blocks.lock().unwrap_or_else(PoisonError::into_inner).push(ptr);
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            add(&mut self.uses().writers, &self.home);
        }
        Ok(ptr)
    }

    /// Lets work that is enqueued on `stream` next wait for what other streams do with this memory, as far as it has to.
    /// While `stream` is captured by us, it is the graph that will.
    ///
    /// Whoever calls this holds a borrow of the memory until the work is enqueued, so that no other use comes between, or of
    /// [a part](Self::use_in_parts).
    pub(crate) fn order(self: &Arc<Self>, stream: &Arc<RawStream>, access: Access) -> Result<()> {
        if stream.log(self, access) {
            return Ok(());
        }
        let mut uses = self.uses();
        let is_here = |other: &Arc<RawStream>| Arc::ptr_eq(other, stream);
        let wait = |others: &[Arc<RawStream>]| {
            others
                .iter()
                .filter(|other| !is_here(other))
                .try_for_each(|other| stream.wait_for(other))
        };
        let (written_here, whole) = (uses.is_written_on(stream), !uses.in_parts);
        match access {
            Access::Read if whole && (written_here || uses.readers.iter().any(is_here)) => {}
            Access::Write if whole && written_here && uses.readers.is_empty() => {}
            Access::Read => {
                wait(&uses.writers)?;
                add(&mut uses.readers, stream);
            }
            Access::Write => {
                wait(&uses.writers)?;
                wait(&uses.readers)?;
                if whole {
                    uses.writers.clear();
                    uses.readers.clear();
                }
                add(&mut uses.writers, stream);
            }
        }
        Ok(())
    }

    /// Lets several borrows use parts of the memory from now on, each on a stream of its own: of two that come at the same time
    /// neither sees the other's work.
    pub(crate) fn use_in_parts(&self) {
        self.uses().in_parts = true;
    }

    /// Notes that all work on `stream` is done: what it wrote need not be waited for. Of memory in parts others may have
    /// enqueued more.
    pub(crate) fn settle(&self, stream: &Arc<RawStream>) {
        let mut uses = self.uses();
        if !uses.in_parts && uses.is_written_on(stream) {
            uses.writers.clear();
        }
    }

    /// Keeps the memory, when it is dropped, until the device is.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    /// Whether `stream` was the last to write.
    pub(crate) fn is_written_on(&self, stream: &Arc<RawStream>) -> bool {
        self.uses().is_written_on(stream)
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("home", &self.home.handle()).finish_non_exhaustive()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if is_child() {
            return;
        }
        let blocks = std::mem::take(self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner));
        if blocks.is_empty() {
            return;
        }
        let uses = std::mem::take(self.uses.get_mut().unwrap_or_else(PoisonError::into_inner));
        let users = uses.writers.into_iter().chain(uses.readers).collect();
        let freed = Freed { blocks, home: self.home.clone(), users };
        if *self.kept.get_mut() { self.memory.retire(freed) } else { self.memory.free(freed) }
    }
}

/// Memory to be given back, behind what uses it.
pub(crate) struct Freed {
    pub(crate) blocks: Vec<CUdeviceptr>,
    pub(crate) home: Arc<RawStream>,
    pub(crate) users: Vec<Arc<RawStream>>,
}
