//! What is done when a device has nothing left to do, and why that may have to wait: synchronising a context ends every
//! capture of its streams, those of other threads too. Captures that other libraries began are not known here.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::context::Context;
use crate::device::driver::cu;

type Work = Box<dyn FnOnce() + Send>;

struct Waiting {
    /// Under way.
    captures: usize,
    /// For the last of them to end.
    work: Vec<(Arc<Context>, Work)>,
}

/// Of all devices: a thread that captures on one may not wait for another either.
static WAITING: Mutex<Waiting> = Mutex::new(Waiting { captures: 0, work: Vec::new() });

fn waiting() -> MutexGuard<'static, Waiting> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waiting {
    /// Does what waits, unless something is captured. What a device was not waited for stays: another library may
    /// capture there, and at the end of a process there is no device any more.
    fn finish(&mut self) {
        if self.captures > 0 {
            return;
        }
        let mut waited_for: Vec<(usize, bool)> = Vec::new();
        for (context, work) in std::mem::take(&mut self.work) {
            let known = waited_for.iter().find(|(ordinal, _)| *ordinal == context.ordinal);
            let idle = known.map_or_else(|| synchronize(&context), |(_, idle)| *idle);
            waited_for.push((context.ordinal, idle));
            // That of another device may have become current since.
            if idle && context.bind().is_ok() {
                work();
            } else {
                self.work.push((context, work));
            }
        }
    }
}

/// Waits for all work of a context, which is current then, or says that it could not.
fn synchronize(context: &Context) -> bool {
    // SAFETY: the context is current.
    context.bind().is_ok() && unsafe { cu!(context.driver, cuCtxSynchronize()) }.is_ok()
}

/// Does `work`, with the context current, when everything that was enqueued has run: now, or when no stream is in a
/// capture of ours any more.
pub(crate) fn when_idle(context: &Arc<Context>, work: impl FnOnce() + Send + 'static) {
    let mut waiting = waiting();
    waiting.work.push((context.clone(), Box::new(work)));
    waiting.finish();
}

/// A capture: from before it begins until it has ended.
pub(crate) struct Capturing(());

impl Capturing {
    /// Waits for a thread that waits for a device.
    pub(crate) fn new() -> Self {
        waiting().captures += 1;
        Self(())
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        let mut waiting = waiting();
        waiting.captures -= 1;
        waiting.finish();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::common::device;

    #[test]
    fn work_waits_for_the_last_capture_and_is_done_once() {
        let Some(cuda) = device() else { return };
        let count = Arc::new(AtomicU32::new(0));
        let work = || {
            let count = count.clone();
            when_idle(cuda.context(), move || {
                count.fetch_add(1, Ordering::Relaxed);
            });
        };
        let done = || count.load(Ordering::Relaxed);
        // Tests beside this one capture too.
        let wait_for = |all: u32| {
            while done() < all {
                drop(Capturing::new());
                std::thread::yield_now();
            }
            assert_eq!(done(), all);
        };
        let first = Capturing::new();
        let second = Capturing::new();
        work();
        work();
        drop(first);
        assert_eq!(done(), 0);
        drop(second);
        wait_for(2);
        work();
        wait_for(3);
    }
}
