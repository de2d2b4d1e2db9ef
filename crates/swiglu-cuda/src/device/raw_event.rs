//! An event of the driver, and calls that captures do not forbid.

use std::ffi::c_int;
use std::sync::Arc;

use crate::device::context::Context;
use crate::device::driver::{Driver, cu};
use crate::device::error::Result;
use crate::device::sys::{CUevent, CUstreamCaptureMode};

/// An event of the driver.
pub(crate) struct RawEvent {
    pub(crate) raw: CUevent,
    pub(crate) context: Arc<Context>,
}

// SAFETY: an event handle may be used from any thread; the driver synchronises.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    /// An event that is recorded nowhere yet. Without times it costs the device less.
    pub(crate) fn new(context: &Arc<Context>, timed: bool) -> Result<Self> {
        const DISABLE_TIMING: u32 = 2;
        context.bind()?;
        let mut raw: CUevent = std::ptr::null_mut();
        let flags = if timed { 0 } else { DISABLE_TIMING };
        // SAFETY: `raw` is a valid place for the handle; the context is current.
        unsafe { cu!(context.driver, cuEventCreate(&mut raw, flags)) }?;
        Ok(Self { raw, context: context.clone() })
    }

    /// The handle alone, which somebody else destroys.
    pub(crate) fn into_raw(mut self) -> CUevent {
        std::mem::replace(&mut self.raw, std::ptr::null_mut())
    }

    /// Whether everything before the mark is done.
    pub(crate) fn is_done(&self) -> bool {
        // SAFETY: the handle is valid while `self` lives.
        let query = |driver: &Driver| unsafe { (driver.cuEventQuery)(self.raw) };
        self.context.bind().is_ok() && relaxed(self.context.driver, query) == 0
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.context.bind().is_ok() {
            // SAFETY: created by `new` and destroyed once; the driver keeps it until it has passed.
            let _ = unsafe { cu!(self.context.driver, cuEventDestroy(self.raw)) };
        }
    }
}

/// Calls the driver so that captures of this thread do not forbid it: only for what has no effect on them.
pub(crate) fn relaxed(driver: &Driver, call: impl FnOnce(&Driver) -> c_int) -> c_int {
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: a valid place for a mode, which is exchanged with that of this thread.
    let exchanged = unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&mut mode) } == 0;
    let outcome = call(driver);
    if exchanged {
        // SAFETY: as above; `mode` holds what it was before.
        unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&mut mode) };
    }
    outcome
}
