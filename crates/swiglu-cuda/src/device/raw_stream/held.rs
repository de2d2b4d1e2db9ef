//! Calls that work on a stream while no other thread's capture may begin: what they enqueue would become part of it, and
//! waiting for it be refused while a copy still reads or writes the host's memory.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::RawStream;
use crate::device::error::Result;
use crate::device::sys::CUstream;

/// A call that is enqueuing work on a stream, or waiting for it.
pub(crate) struct Held<'a>(&'a RawStream);

impl Held<'_> {
    pub(crate) fn handle(&self) -> CUstream {
        self.0.handle
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

thread_local! {
    /// Streams that this thread holds over several calls, by address.
    static HELD: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// As [`Held`], over several calls of one thread.
pub(crate) struct HeldOver<'a>(Held<'a>);

impl Drop for HeldOver<'_> {
    fn drop(&mut self) {
        let address = self.0.0.address();
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|&other| other == address) {
                held.remove(at);
            }
        });
    }
}

impl RawStream {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// As [`Self::enter`]; no other thread's capture by [`Stream::capture`](crate::Stream::capture) begins while the result lives.
    pub(crate) fn hold(&self) -> Result<Held<'_>> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        let held = Held(self);
        // Either sees the other: this the capture that is about to begin, or that one this call.
        if self.closing.load(Ordering::SeqCst) && !self.is_this_threads() {
            return Err(Self::of_another_thread());
        }
        self.enter()?;
        Ok(held)
    }

    /// Whether a call of this thread holds the stream over this one, or its capture is under way.
    #[cold]
    fn is_this_threads(&self) -> bool {
        // Where a thread ends, what it drops finds no list.
        let held = HELD.try_with(|held| held.borrow().contains(&self.address()));
        held.unwrap_or(false) || self.logged(|_| ()).is_some()
    }

    /// The same, for calls of this thread that hold the stream themselves.
    pub(crate) fn hold_over(&self) -> Result<HeldOver<'_>> {
        let held = self.hold()?;
        let _ = HELD.try_with(|held| held.borrow_mut().push(self.address()));
        Ok(HeldOver(held))
    }

    /// Lets `begin` begin a capture when no call is enqueuing work any more, and refuses those of other threads meanwhile.
    pub(crate) fn alone<R>(&self, begin: impl FnOnce() -> Result<R>) -> Result<R> {
        struct Open<'a>(&'a AtomicBool);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::SeqCst);
            }
        }
        if self.closing.swap(true, Ordering::SeqCst) {
            return Err(Self::of_another_thread());
        }
        let _open = Open(&self.closing);
        let mut turns = 0u32;
        while self.inside.load(Ordering::SeqCst) > 0 {
            // Enqueuing takes microseconds; a call that waits for the device, any time.
            match turns {
                ..100 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            turns = turns.saturating_add(1);
        }
        begin()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crate::common;

    use super::*;

    #[test]
    fn a_capture_waits_for_who_is_inside_and_refuses_the_rest() {
        let Some(cuda) = common::device() else { return };
        let stream = cuda.new_stream().unwrap();
        let raw = stream.raw_stream();
        let elsewhere = |call: &(dyn Fn() -> bool + Sync)| {
            thread::scope(|scope| scope.spawn(call).join().unwrap())
        };
        let begun = AtomicBool::new(false);
        let over = raw.hold_over().unwrap();
        thread::scope(|scope| {
            let begun = &begun;
            let begin = || {
                begun.store(true, Ordering::SeqCst);
                Ok(())
            };
            let capture = scope.spawn(move || raw.alone(begin));
            while !raw.closing.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            assert!(raw.hold().is_ok(), "a call within another of this thread");
            assert!(elsewhere(&|| raw.hold().is_err()) && !begun.load(Ordering::SeqCst));
            drop(over);
            capture.join().unwrap().unwrap();
        });
        assert!(begun.load(Ordering::SeqCst) && elsewhere(&|| raw.hold().is_ok()));
    }

    #[test]
    fn what_a_capture_uses_is_what_its_own_thread_does() {
        let Some(cuda) = common::device() else { return };
        let stream = cuda.new_stream().unwrap();
        let raw = stream.raw_stream();
        raw.alone(|| raw.begin_log()).unwrap();
        thread::scope(|scope| {
            let other = || (raw.logged(|_| ()).is_none(), raw.hold().is_err());
            assert_eq!(scope.spawn(other).join().unwrap(), (true, true));
        });
        // Another thread that would begin one too changes nothing for this one.
        raw.closing.store(true, Ordering::SeqCst);
        assert!(raw.hold().is_ok() && raw.logged(|_| ()).is_some());
        raw.closing.store(false, Ordering::SeqCst);
        assert!(raw.end_log().is_some() && raw.logged(|_| ()).is_none());
    }
}
