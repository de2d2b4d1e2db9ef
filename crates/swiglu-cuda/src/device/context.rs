//! The primary context of a device, and what is left behind in it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::device::driver::{Driver, cu};
use crate::device::error::Result;
use crate::device::facts::device_attribute;
use crate::device::fork::{expect_no_fork, is_child};
use crate::device::leftovers::{self, Leftovers};
use crate::device::sys::{CUcontext, CUdevice, CUdevice_attribute as Attribute, CUevent};

/// A device's primary context, of everything that was made in it. What cannot go while work runs is left behind.
pub(crate) struct Context {
    pub(crate) driver: &'static Driver,
    pub(crate) ordinal: usize,
    retained: Arc<Retained>,
    leftovers: Mutex<Leftovers>,
    /// Read while memory is given back on a stream; written where a stream ends, or a capture of ours begins on one.
    pub(crate) turns: RwLock<()>,
}

/// A retained primary context.
pub(crate) struct Retained {
    pub(crate) driver: &'static Driver,
    device: CUdevice,
    raw: CUcontext,
}

// SAFETY: a context handle may be used from any thread; the driver synchronises.
unsafe impl Send for Retained {}
// SAFETY: as above; the fields are never written after construction.
unsafe impl Sync for Retained {}

impl Retained {
    fn is_current(&self) -> bool {
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: `current` is a valid place for the handle.
        let found = unsafe { cu!(self.driver, cuCtxGetCurrent(&mut current)) };
        found.is_ok() && current == self.raw
    }

    /// Makes the context current on this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        expect_no_fork()?;
        if self.is_current() {
            return Ok(());
        }
        // SAFETY: the context is retained while `self` lives.
        unsafe { cu!(self.driver, cuCtxSetCurrent(self.raw)) }
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        if !is_child() {
            // SAFETY: retained once by `Context::retain`. At process exit the driver may refuse: nothing is left to
            // release then.
            let _ = unsafe { cu!(self.driver, cuDevicePrimaryCtxRelease(self.device)) };
        }
    }
}

impl Context {
    pub(crate) fn retain(
        driver: &'static Driver,
        device: CUdevice,
        ordinal: usize,
    ) -> Result<Self> {
        let mut raw: CUcontext = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the handle, `device` came from the driver.
        unsafe { cu!(driver, cuDevicePrimaryCtxRetain(&mut raw, device)) }?;
        let retained = Arc::new(Retained { driver, device, raw });
        let (leftovers, turns) = Default::default();
        Ok(Self { driver, ordinal, retained, leftovers, turns })
    }

    /// Whether it is current on this thread.
    pub(crate) fn is_current(&self) -> bool {
        self.retained.is_current()
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// [`CudaError::Forked`] in a process that was forked off; what the driver reports.
    pub(crate) fn bind(&self) -> Result<()> {
        self.retained.bind()
    }

    pub(crate) fn attribute(&self, attribute: Attribute) -> Result<u32> {
        device_attribute(self.driver, self.retained.device, attribute)
    }

    fn leftovers(&self) -> MutexGuard<'_, Leftovers> {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves something to be done, with the context current, when the device has no handle and no work any more.
    pub(crate) fn leave_work(&self, work: impl FnOnce() + Send + 'static) {
        if is_child() {
            return std::mem::forget(work);
        }
        self.leftovers().add_work(work);
    }

    /// Leaves it so: a stream has ended whose last work nobody can mark.
    pub(crate) fn leave_unmarked(&self) {
        if !is_child() {
            self.leftovers().set_unmarked();
        }
    }

    /// Leaves the mark behind the last work of a stream.
    pub(crate) fn leave_mark(&self, mark: CUevent) {
        if self.bind().is_ok() {
            self.leftovers().add_mark(&self.retained, mark);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let leftovers = self.leftovers.get_mut().unwrap_or_else(PoisonError::into_inner);
        let leftovers = std::mem::take(leftovers);
        if is_child() {
            return std::mem::forget(leftovers);
        }
        leftovers::leave(&self.retained, leftovers);
    }
}
