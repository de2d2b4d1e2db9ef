//! What a device leaves behind when its last handle is dropped: modules and libraries cannot be unloaded while their
//! kernels run, and unloading may wait for the device, which ends captures, those of other code too. So a drop only notes
//! it, and it is done when a device is opened, or when [`release_unused`] is called.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use crate::device::sys::CUevent;

use crate::device::context::Retained;
use crate::device::driver::cu;
use crate::device::raw_event::relaxed;

type Work = Box<dyn FnOnce() + Send>;

/// Work for the time when streams have passed their last marks.
#[derive(Default)]
pub(crate) struct Leftovers {
    marks: Vec<Mark>,
    work: Vec<Work>,
    /// Whether a stream has ended whose last work nobody can mark: nothing is unloaded then.
    unmarked: bool,
}

/// An event, to be destroyed.
struct Mark(CUevent);

// SAFETY: an event handle may be used from any thread; the driver synchronises.
unsafe impl Send for Mark {}

impl Leftovers {
    pub(crate) fn add_work(&mut self, work: impl FnOnce() + Send + 'static) {
        self.work.push(Box::new(work));
    }

    pub(crate) fn set_unmarked(&mut self) {
        self.unmarked = true;
    }

    /// Adds the mark behind the last work of a stream. Those that have passed are taken away.
    pub(crate) fn add_mark(&mut self, context: &Retained, mark: CUevent) {
        self.marks.retain(|mark| !context.has_passed(mark.0));
        self.marks.push(Mark(mark));
    }

    /// Does the work if all marks have passed; else it is as it was.
    fn finish(&mut self, context: &Retained) -> bool {
        if self.unmarked || context.bind().is_err() {
            return false;
        }
        self.marks.retain(|mark| !context.has_passed(mark.0));
        if !self.marks.is_empty() {
            return false;
        }
        self.work.drain(..).for_each(|work| work());
        true
    }
}

impl Retained {
    /// Whether an event's work is done; then the event is destroyed.
    fn has_passed(&self, event: CUevent) -> bool {
        // SAFETY: an event that only its `Mark` still knows; destroyed once, as the mark goes then.
        unsafe {
            relaxed(self.driver, |d| (d.cuEventQuery)(event)) == 0
                && cu!(self.driver, cuEventDestroy(event)).is_ok()
        }
    }
}

/// Read while a capture of ours is under way, on whichever device.
pub(crate) static CAPTURES: RwLock<()> = RwLock::new(());

static LEFT: Mutex<Vec<(Arc<Retained>, Leftovers)>> = Mutex::new(Vec::new());

fn left() -> MutexGuard<'static, Vec<(Arc<Retained>, Leftovers)>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes what is left of a device.
pub(crate) fn leave(context: &Arc<Retained>, leftovers: Leftovers) {
    if !leftovers.work.is_empty() || !leftovers.marks.is_empty() {
        left().push((context.clone(), leftovers));
    }
}

/// Unloads the kernels of devices whose last handle was dropped, where all their work is done, and frees memory that
/// a graph could still have used. [`Cuda::new`](crate::Cuda::new) does it too.
///
/// Call it outside of captures: unloading may wait for the device.
pub fn release_unused() {
    let _alone = match CAPTURES.try_write() {
        Ok(alone) => alone,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        // It would end a capture of ours: another time.
        Err(TryLockError::WouldBlock) => return,
    };
    // Taken out: work that drops the last handle of another device comes back here.
    let all = std::mem::take(&mut *left());
    for (context, mut leftovers) in all {
        if !leftovers.finish(&context) {
            left().push((context, leftovers));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::common::options;
    use crate::{Cuda, DeviceBuffer};

    #[test]
    fn what_is_left_is_released_once_and_when_the_device_is_done() {
        let Some(options) = options() else { return };
        static DONE: AtomicU32 = AtomicU32::new(0);
        let cuda = Cuda::with_options(&options).unwrap();
        cuda.context().leave_work(|| {
            DONE.fetch_add(1, Ordering::Relaxed);
        });
        let stream = cuda.new_stream().unwrap();
        let mut buffer = DeviceBuffer::<f32>::new(&stream, 1 << 20).unwrap();
        buffer.poison(0).unwrap();
        drop((buffer, stream));
        assert_eq!(DONE.load(Ordering::Relaxed), 0);
        drop(cuda);
        // Tests beside this one open devices too, which releases as well.
        while DONE.load(Ordering::Relaxed) == 0 {
            release_unused();
            std::thread::yield_now();
        }
        release_unused();
        assert_eq!(DONE.load(Ordering::Relaxed), 1);
    }
}
