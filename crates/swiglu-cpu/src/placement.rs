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

/// Moves this thread off processor `caller` if it runs there and may run elsewhere; the processor that it moved to.
#[cfg(target_os = "linux")]
pub(crate) fn leave(caller: usize) -> Option<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    if current() != caller || caller >= CpuSet::MAX_CPU {
        return None;
    }
    let allowed = sched_getaffinity(None).ok()?;
    let mut elsewhere = allowed;
    elsewhere.unset(caller);
    if elsewhere.count() == 0 {
        return None;
    }
    // Moving is an improvement, not a need: where the system refuses, the work is done here.
    sched_setaffinity(None, &elsewhere).ok()?;
    let there = current();
    let _ = sched_setaffinity(None, &allowed);
    Some(there)
}

/// Not known on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn current() -> usize {
    usize::MAX
}

/// Nothing to move by on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn leave(_: usize) -> Option<usize> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::*;

    #[test]
    fn a_thread_moves_away_and_stays_free_to_run_anywhere() {
        let before = sched_getaffinity(None).unwrap();
        if before.count() < 2 {
            return swiglu_testing::not_run("this process may run on one processor only");
        }
        // The system may move the thread between the two calls; it does not do so every time.
        let mut moves = (0..1000).map(|_| current()).map(|here| (here, leave(here)));
        let (here, there) = moves.find(|(_, there)| there.is_some()).unwrap();
        assert_ne!(Some(here), there);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }

    #[test]
    fn a_thread_stays_where_its_caller_is_not() {
        let before = sched_getaffinity(None).unwrap();
        assert_eq!(leave(usize::MAX), None);
        // Nowhere else to go: the thread, which is this test's own, is bound to one processor.
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|&cpu| before.is_set(cpu)).unwrap());
        sched_setaffinity(None, &one).unwrap();
        let moved = leave(current());
        let bound = sched_getaffinity(None).unwrap();
        sched_setaffinity(None, &before).unwrap();
        assert_eq!((moved, bound), (None, one));
    }
}
