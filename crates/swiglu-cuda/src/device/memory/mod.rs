//! Device memory: the allocator, buffers, and matrices in them.

mod allocation;
mod buffer;
mod copy;
mod matrix;
mod owned;
mod pinned;
mod view;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::device::sys::{CUdevice_attribute as Attribute, CUdeviceptr};

use crate::device::context::Context;
use crate::device::driver::{Driver, OUT_OF_MEMORY, cu};
use crate::device::error::{CudaError, Result};
use crate::device::fork::is_child;
use crate::device::raw_event::relaxed;
use crate::device::raw_stream::RawStream;

use allocation::Freed;
pub(crate) use allocation::{Access, Allocation};
pub use buffer::{DeviceBuffer, DeviceData};
pub use matrix::{DeviceMatrixMut, DeviceMatrixRef};
pub use owned::DeviceMatrix;
use pinned::Pinned;
pub use pinned::PinnedMatrix;

/// Allocates and frees a device's memory. Freeing enqueues, and never waits.
pub(crate) struct Memory {
    context: Arc<Context>,
    /// Whether memory is allocated and freed in stream order.
    pools: bool,
    /// Frees memory whose own stream has ended or is captured, and has that of graphs.
    internal: OnceLock<Arc<RawStream>>,
    waiting: Mutex<Waiting>,
    /// Whether something waits to be freed, for calls that find nothing.
    any: AtomicBool,
    /// Of the host.
    pinned: Pinned,
}

#[derive(Default)]
struct Waiting {
    /// For a capture to end or, without pools, for work to be done.
    freed: Vec<Freed>,
    /// For the device to be dropped: a graph of other code may use it.
    retired: Vec<CUdeviceptr>,
}

impl Memory {
    pub(crate) fn new(context: Arc<Context>, plain: bool) -> Result<Self> {
        let pools = !plain
            && context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        let (internal, waiting, any, pinned) = Default::default();
        Ok(Self { context, pools, internal, waiting, any, pinned })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.context.driver
    }

    /// A stream that nobody else has.
    pub(crate) fn internal(&self) -> Result<&Arc<RawStream>> {
        if let Some(stream) = self.internal.get() {
            return Ok(stream);
        }
        let made = Arc::new(RawStream::create(&self.context)?);
        let stream = self.internal.get_or_init(|| made.clone());
        if !Arc::ptr_eq(stream, &made) {
            made.end();
        }
        Ok(stream)
    }

    /// Free and total bytes.
    pub(crate) fn info(&self) -> Result<(usize, usize)> {
        self.context.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places for the results.
        unsafe { cu!(self.driver(), cuMemGetInfo(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// Memory that work enqueued on `stream` from now on may use; 0 for no bytes.
    fn alloc(&self, bytes: usize, stream: &RawStream) -> Result<CUdeviceptr> {
        if bytes == 0 {
            return Ok(0);
        }
        let held = stream.hold()?;
        if stream.is_capturing()? {
            return Err(CudaError::Capture {
                what: format!("allocating {bytes} bytes"),
                hint: "allocate before the capture",
            });
        }
        self.drain();
        let mut ptr: CUdeviceptr = 0;
        // A graph's scratch memory is allocated by a thread that captures another stream.
        let code = relaxed(self.driver(), |driver| match self.pools {
            // SAFETY: a valid place for the address, a valid stream.
            true => unsafe { (driver.cuMemAllocAsync)(&mut ptr, bytes, held.handle()) },
            // SAFETY: a valid place for the address.
            false => unsafe { (driver.cuMemAlloc)(&mut ptr, bytes) },
        });
        if code == OUT_OF_MEMORY {
            let (free, total) = self.info().unwrap_or((0, 0));
            return Err(CudaError::OutOfMemory { bytes, free, total });
        }
        self.driver().check("cuMemAlloc", code)?;
        Ok(ptr)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives memory back behind what uses it, now or by a later [`Self::drain`].
    fn free(&self, freed: Freed) {
        if let Err(freed) = self.try_free(freed) {
            self.waiting().freed.push(freed);
            self.any.store(true, Ordering::Release);
        }
    }

    /// Frees what waited for a capture to end, or for work to be done.
    pub(crate) fn drain(&self) {
        if !self.any.swap(false, Ordering::AcqRel) {
            return;
        }
        // Unlocked: what cannot be freed yet goes back.
        let all = std::mem::take(&mut self.waiting().freed);
        all.into_iter().for_each(|freed| self.free(freed));
    }

    fn try_free(&self, mut freed: Freed) -> std::result::Result<(), Freed> {
        // Made before the turn, as a stream that is not needed ends.
        let _ = self.internal();
        let _turn = self.context.turns.read().unwrap_or_else(PoisonError::into_inner);
        let Ok(on) = self.behind(&freed) else { return Err(freed) };
        let Ok(held) = on.as_ref().map(|on| on.hold()).transpose() else { return Err(freed) };
        for ptr in freed.blocks.drain(..) {
            relaxed(self.driver(), |driver| match &held {
                // SAFETY: allocated by `alloc` and freed once, behind all that uses it.
                Some(held) => unsafe { (driver.cuMemFreeAsync)(ptr, held.handle()) },
                // SAFETY: allocated by `alloc` and freed once; nothing uses it any more.
                None => unsafe { (driver.cuMemFree)(ptr) },
            });
        }
        Ok(())
    }

    /// A stream whose work comes behind all that uses the memory; none is needed if that is done.
    fn behind(&self, freed: &Freed) -> Result<Option<Arc<RawStream>>> {
        let mut users = freed.users.iter().chain([&freed.home]);
        self.context.bind()?;
        if !self.pools {
            return match users.all(|user| user.is_idle()) {
                true => Ok(None),
                false => Err(CudaError::Capture {
                    what: "freeing memory that is in use".into(),
                    hint: "it is freed later",
                }),
            };
        }
        let on = if freed.home.takes_work() { &freed.home } else { self.internal()? };
        users.filter(|user| !Arc::ptr_eq(user, on)).try_for_each(|user| on.wait_for(user))?;
        Ok(Some(on.clone()))
    }

    /// Keeps memory until the device is dropped.
    fn retire(&self, freed: Freed) {
        self.waiting().retired.extend(freed.blocks);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if is_child() {
            return;
        }
        self.drain();
        let waiting =
            std::mem::take(self.waiting.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Some(internal) = self.internal.get() {
            internal.end();
        }
        // What nothing orders stays allocated.
        let ordered = |freed: &Freed| {
            let mut users = freed.users.iter().chain([&freed.home]);
            users.all(|stream| stream.is_marked_in(&self.context))
        };
        let blocks = waiting.freed.into_iter().filter(ordered).flat_map(|freed| freed.blocks);
        let left: Vec<CUdeviceptr> = blocks.chain(waiting.retired).collect();
        let pinned = self.pinned.take_all();
        if left.is_empty() && pinned.is_empty() {
            return;
        }
        let driver = self.driver();
        self.context.leave_work(move || {
            pinned.into_iter().for_each(|block| block.free(driver));
            for ptr in left {
                // SAFETY: allocated by `alloc`, freed once, and nothing uses it any more.
                let _ = unsafe { cu!(driver, cuMemFree(ptr)) };
            }
        });
    }
}
