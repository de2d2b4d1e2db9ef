//! What is done when a device has nothing left to do, and why that may have to wait: synchronising a context ends every
//! capture of its streams, those of other threads too. Captures that other libraries began are not known here.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::context::Context;
use crate::driver::cu;

type Work = Box<dyn FnOnce() + Send>;

/// Of one device.
#[derive(Default)]
struct Waiting {
    /// Under way.
    captures: usize,
    /// For the last of them to end.
    work: Vec<(Arc<Context>, Work)>,
}

/// By ordinal: contexts of a device are one, however often it is retained.
static DEVICES: LazyLock<Mutex<HashMap<usize, Arc<Mutex<Waiting>>>>> =
    LazyLock::new(Mutex::default);

fn waiting(context: &Context) -> Arc<Mutex<Waiting>> {
    lock(&DEVICES).entry(context.ordinal).or_default().clone()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for all work of the context, then does this.
fn finish(context: &Context, work: Work) {
    // Where it cannot be current the process ends, and the driver has freed everything.
    if context.bind().is_ok() {
        // SAFETY: the context is current.
        let _ = unsafe { cu!(context.driver, cuCtxSynchronize()) };
        work();
    }
}

/// Does `work` when everything that was enqueued has run: now, or when no stream of the device is in capture any more.
pub(crate) fn when_idle(context: &Arc<Context>, work: impl FnOnce() + Send + 'static) {
    let waiting = waiting(context);
    // A capture that begins meanwhile waits here.
    let mut waiting = lock(&waiting);
    if waiting.captures == 0 {
        finish(context, Box::new(work));
    } else {
        waiting.work.push((context.clone(), Box::new(work)));
    }
}

/// A capture: from before it begins until it has ended.
pub(crate) struct Capturing(Arc<Mutex<Waiting>>);

impl Capturing {
    pub(crate) fn new(context: &Context) -> Self {
        let waiting = waiting(context);
        lock(&waiting).captures += 1;
        Self(waiting)
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        let mut waiting = lock(&self.0);
        waiting.captures -= 1;
        if waiting.captures == 0 {
            for (context, work) in std::mem::take(&mut waiting.work) {
                finish(&context, work);
            }
        }
    }
}
