//! Keeping a helper off its caller's processor.
//!
//! A helper is woken by the caller, and the system likes to run it where it was woken. A call of a
//! millisecond is over before the two are parted, so without help one processor does all the work
//! while another idles: seen for seconds on end on a two-processor virtual machine. A helper that
//! finds itself on its caller's processor therefore moves once and may then run anywhere again.

/// The processor this thread runs on.
#[cfg(target_os = "linux")]
pub(crate) fn current() -> usize {
    rustix::thread::sched_getcpu()
}

/// Moves this thread off processor `caller` if it runs there and may run elsewhere.
#[cfg(target_os = "linux")]
pub(crate) fn leave(caller: usize) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    if current() != caller || caller >= CpuSet::MAX_CPU {
        return;
    }
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut elsewhere = allowed;
    elsewhere.unset(caller);
    if elsewhere.count() == 0 {
        return;
    }
    // Moving is an improvement, not a need: where the system refuses, the work is done here.
    if sched_setaffinity(None, &elsewhere).is_ok() {
        let _ = sched_setaffinity(None, &allowed);
    }
}

/// Not known on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn current() -> usize {
    usize::MAX
}

/// Nothing to move by on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn leave(_: usize) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_moves_away_and_stays_free_to_run_anywhere() {
        let before = rustix::thread::sched_getaffinity(None).unwrap();
        let here = current();
        leave(here);
        assert_eq!(rustix::thread::sched_getaffinity(None).unwrap(), before);
        leave(usize::MAX);
        assert_eq!(rustix::thread::sched_getaffinity(None).unwrap(), before);
    }
}
