//! Whether this process was forked off one that had used CUDA: the driver's state is not valid in it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::error::{CudaError, Result};

static FORKED: AtomicBool = AtomicBool::new(false);

#[cfg(unix)]
extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Watches for forks from now on: called before the driver is initialised.
pub(crate) fn watch() {
    static WATCHED: OnceLock<()> = OnceLock::new();
    WATCHED.get_or_init(|| {
        // SAFETY: the handler is a function that only stores to an atomic, which a handler may. Where it cannot be
        // registered for lack of memory, the driver's own errors remain.
        #[cfg(unix)]
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Whether this process was forked off. What is dropped here is the parent's: nothing is given back, and no lock is taken,
/// which a thread of the parent may have held at the fork.
pub(crate) fn is_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Refuses a process that was forked off.
pub(crate) fn expect_no_fork() -> Result<()> {
    if is_child() { Err(CudaError::Forked) } else { Ok(()) }
}

#[cfg(all(test, unix))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use crate::common::device;
    use crate::{Cuda, CudaError, DeviceBuffer, PinnedMatrix, Result, Stream};

    const FORKS: usize = 40;
    /// Seconds after which a child that waits for ever is ended.
    const PATIENCE: libc::c_uint = 20;

    /// What has to be given back, each by a lock.
    fn held(cuda: &Cuda, stream: Stream) -> Result<impl Sized> {
        let buffer = DeviceBuffer::<f32>::zeros(&stream, 4)?;
        Ok((buffer, PinnedMatrix::<f32>::zeros(cuda, 1, 4)?, stream))
    }

    #[test]
    fn a_child_is_refused_and_waits_for_nothing_and_the_parent_goes_on() {
        let Some(cuda) = device() else { return };
        let buffer = DeviceBuffer::<f32>::zeros(&cuda.stream(), 4).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // At a fork one of them has a lock.
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        drop(held(&cuda, cuda.new_stream().unwrap()).unwrap());
                    }
                });
            }
            let statuses: Vec<_> = (0..FORKS).map(|_| in_child(&cuda).unwrap()).collect();
            done.store(true, Ordering::Relaxed);
            assert_eq!(statuses, [0; FORKS]);
        });
        assert_eq!(buffer.to_host().unwrap(), [0.0; 4]);
    }

    /// How a child ends that uses what its parent has.
    fn in_child(cuda: &Cuda) -> Result<i32> {
        let held = held(cuda, cuda.new_stream()?)?;
        // SAFETY: the child calls nothing that waits for a thread it does not have, and ends without running destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child after a while.
            unsafe { libc::alarm(PATIENCE) };
            let refused = matches!(cuda.stream().synchronize(), Err(CudaError::Forked))
                && matches!(Cuda::device_count(), Err(CudaError::Forked));
            drop(held);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: a child of this process, a valid place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        Ok(status)
    }
}
