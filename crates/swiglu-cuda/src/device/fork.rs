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

/// Refuses a process that was forked off.
pub(crate) fn expect_no_fork() -> Result<()> {
    if FORKED.load(Ordering::Relaxed) { Err(CudaError::Forked) } else { Ok(()) }
}

#[cfg(all(test, unix))]
mod tests {
    use crate::common::device;
    use crate::{Cuda, CudaError, DeviceBuffer};

    #[test]
    fn a_child_is_refused_and_the_parent_is_not() {
        let Some(cuda) = device() else { return };
        let buffer = DeviceBuffer::<f32>::zeros(&cuda.stream(), 4).unwrap();
        // SAFETY: the child calls nothing that waits for a thread it does not have, and ends without running destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = matches!(cuda.stream().synchronize(), Err(CudaError::Forked))
                && matches!(Cuda::device_count(), Err(CudaError::Forked));
            drop(buffer);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: a child of this process, a valid place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(buffer.to_host().unwrap(), [0.0; 4]);
    }
}
