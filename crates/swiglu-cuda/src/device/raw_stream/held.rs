//! Calls that work on a stream while no other thread's capture may begin: what they enqueue would become part of it, and
//! waiting for it be refused while a copy still reads or writes the host's memory.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

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
        HELD.with_borrow_mut(|held| {
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
        if self.closing.load(Ordering::SeqCst) && !HELD.with_borrow(|h| h.contains(&self.address()))
        {
            return Err(Self::of_another_thread());
        }
        self.enter()?;
        Ok(held)
    }

    /// The same, for calls of this thread that hold the stream themselves.
    pub(crate) fn hold_over(&self) -> Result<HeldOver<'_>> {
        let held = self.hold()?;
        HELD.with_borrow_mut(|held| held.push(self.address()));
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
        while self.inside.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        begin()
    }
}
