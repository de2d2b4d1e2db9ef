//! Whether this thread may compile and load: not while other code captures the stream that it calls for. What the driver
//! does to load would be refused then, and end the capture.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::device::error::{CudaError, Result};

thread_local! {
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, a call of this thread that would compile or load something is refused: see
/// [`BorrowedStream::without_loading`](crate::BorrowedStream::without_loading).
#[derive(Debug)]
pub struct WithoutLoading {
    before: bool,
    _of_this_thread: PhantomData<*const ()>,
}

impl WithoutLoading {
    pub(crate) fn new() -> Self {
        Self { before: REFUSED.replace(true), _of_this_thread: PhantomData }
    }
}

impl Drop for WithoutLoading {
    fn drop(&mut self) {
        REFUSED.set(self.before);
    }
}

/// Asked before something is compiled or loaded.
pub(crate) fn expect_allowed(what: impl FnOnce() -> String) -> Result<()> {
    if !REFUSED.get() {
        return Ok(());
    }
    let hint = "make a call like it before, or reserve the layer for as many tokens";
    Err(CudaError::Capture { what: format!("compiling or loading {}", what()), hint })
}
