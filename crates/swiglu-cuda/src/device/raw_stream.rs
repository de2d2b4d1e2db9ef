//! A stream of the driver as memory remembers it: what was enqueued on it can be waited for, also after it has ended.

mod held;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::device::sys::{CUstream, CUstreamCaptureStatus};

use crate::device::context::Context;
use crate::device::driver::{Driver, cu};
use crate::device::error::{CudaError, Result};
use crate::device::memory::{Access, Allocation};
use crate::device::raw_event::{RawEvent, relaxed};
use crate::device::workspace::Scratch;
pub(crate) use held::Held;

/// What is known of the order of a stream's work.
struct State {
    phase: Phase,
    /// Behind all work but that of a live stream since; [`None`] where there was none, or no mark could be made.
    mark: Option<RawEvent>,
    /// What a capture of ours uses, while there is one.
    log: Option<CaptureLog>,
    /// The capture by other code in which this borrow began.
    begun_in: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Work may be enqueued at any time: the mark is made when somebody waits.
    Live,
    /// In a capture of ours: the mark was made before it.
    Captured,
    /// Nobody enqueues any more: the mark was made behind the last work.
    Ended,
    /// Ended without a mark behind its last work.
    Lost,
}

/// The memory that the calls of a capture use.
pub(crate) struct CaptureLog {
    /// The thread that captures.
    by: ThreadId,
    pub(crate) uses: Vec<(Arc<Allocation>, Access)>,
    /// Scratch memory of the graph to be.
    pub(crate) scratch: Option<Scratch>,
}

impl CaptureLog {
    fn new() -> Self {
        Self { by: std::thread::current().id(), uses: Vec::new(), scratch: None }
    }

    fn note(&mut self, allocation: &Arc<Allocation>, access: Access) {
        match self.uses.iter_mut().find(|(known, _)| Arc::ptr_eq(known, allocation)) {
            Some((_, known)) => *known = (*known).max(access),
            None => self.uses.push((allocation.clone(), access)),
        }
    }
}

/// See the module.
pub(crate) struct RawStream {
    handle: CUstream,
    context: Arc<Context>,
    owned: bool,
    /// The one thread for which a per-thread handle means this stream.
    thread: Option<ThreadId>,
    state: Mutex<State>,
    /// Of `state`: whether it is captured, and whether it has ended, for calls that find neither.
    captured: AtomicBool,
    ended: AtomicBool,
    /// Calls that are enqueuing work or waiting for it. A capture of ours begins when there are none.
    inside: AtomicUsize,
    /// Whether a capture of ours is about to begin.
    closing: AtomicBool,
}

// SAFETY: a stream handle may be used from any thread, and where not `enter` refuses; the driver synchronises.
unsafe impl Send for RawStream {}
// SAFETY: as above; what changes is behind a lock or atomic.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// The handle that means another stream on every thread.
    pub(crate) const PER_THREAD: u64 = 2;

    /// A new stream that waits for no other.
    pub(crate) fn create(context: &Arc<Context>) -> Result<Self> {
        const NON_BLOCKING: u32 = 1;
        context.bind()?;
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: `handle` is a valid place for the handle; the context is current.
        unsafe { cu!(context.driver, cuStreamCreateWithPriority(&mut handle, NON_BLOCKING, 0)) }?;
        Ok(Self::new(context, handle, true))
    }

    /// A stream of somebody else.
    pub(crate) fn borrow(context: &Arc<Context>, raw: u64) -> Self {
        Self::new(context, raw as CUstream, false)
    }

    fn new(context: &Arc<Context>, handle: CUstream, owned: bool) -> Self {
        let per_thread = handle as u64 == Self::PER_THREAD;
        Self {
            handle,
            context: context.clone(),
            owned,
            thread: per_thread.then(|| std::thread::current().id()),
            state: Mutex::new(State { phase: Phase::Live, mark: None, log: None, begun_in: None }),
            captured: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            inside: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
        }
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }

    pub(crate) fn is_owned(&self) -> bool {
        self.owned
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_here(&self) -> bool {
        self.thread.is_none_or(|thread| thread == std::thread::current().id())
    }

    /// Makes the context current, for work that is about to be enqueued.
    pub(crate) fn enter(&self) -> Result<CUstream> {
        self.context.bind()?;
        if self.ended.load(Ordering::Acquire) {
            return Err(self.refused("it was given back: borrow it again"));
        }
        if !self.is_here() {
            return Err(
                self.refused("it belongs to another thread: give each thread a stream of its own")
            );
        }
        if self.captured.load(Ordering::SeqCst) && self.is_captured_elsewhere() {
            return Err(Self::of_another_thread());
        }
        Ok(self.handle)
    }

    #[cold]
    fn of_another_thread() -> CudaError {
        CudaError::Capture {
            what: "work of another thread on the stream".into(),
            hint: "it would become part of that thread's graph; take another stream, or wait for the end of the capture",
        }
    }

    #[cold]
    fn refused(&self, why: &str) -> CudaError {
        let what = format!("work on the borrowed stream {:#x}", self.handle as u64);
        CudaError::Unsupported { what, why: why.to_owned() }
    }

    /// Whether calls are recorded into a graph, by whomever. Only where the context is current.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a valid stream, a valid place for the result.
        unsafe { cu!(self.context.driver, cuStreamIsCapturing(self.handle, &mut status)) }?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The number of the capture that calls are recorded by, if one is under way. Only where the context is current.
    pub(crate) fn capture_id(&self) -> Result<Option<u64>> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, none) = (0, std::ptr::null_mut());
        // SAFETY: a valid stream, valid places for two results; the driver takes null for others.
        unsafe {
            cu!(
                self.context.driver,
                cuStreamGetCaptureInfo(
                    self.handle,
                    &mut status,
                    &mut id,
                    none,
                    std::ptr::null_mut(),
                    std::ptr::null_mut()
                )
            )
        }?;
        Ok((status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE).then_some(id))
    }

    /// Whether more work can be enqueued here, by this thread and outside a capture.
    pub(crate) fn takes_work(&self) -> bool {
        !self.captured.load(Ordering::Acquire)
            && self.enter().is_ok()
            && self.is_capturing().is_ok_and(|capturing| !capturing)
    }

    /// Makes the mark behind all work so far.
    fn record(&self, state: &mut State) -> Result<()> {
        let mark = match state.mark.take() {
            Some(mark) => mark,
            None => RawEvent::new(&self.context, false)?,
        };
        // SAFETY: both handles are valid and of this context.
        unsafe { cu!(self.context.driver, cuEventRecord(mark.raw, self.handle)) }?;
        state.mark = Some(mark);
        Ok(())
    }

    /// Lets work that is enqueued here from now on wait for all that was enqueued on `other` so far.
    pub(crate) fn wait_for(&self, other: &RawStream) -> Result<()> {
        let refused =
            |hint| CudaError::Capture { what: "waiting for another stream's work".into(), hint };
        let _held = self.hold()?;
        let mut state = other.state();
        match state.phase {
            Phase::Captured | Phase::Ended => {}
            Phase::Lost => {
                return Err(refused(
                    "that stream ended unmarked; borrow it again, on its own thread",
                ));
            }
            Phase::Live if !other.is_here() => {
                return Err(
                    other.refused("only its own thread can mark it: give it back there first")
                );
            }
            Phase::Live if other.is_capturing()? => {
                return Err(refused(
                    "that stream is captured by other code; end its capture first",
                ));
            }
            Phase::Live => other.record(&mut state)?,
        }
        let Some(mark) = &state.mark else { return Ok(()) };
        if self.is_capturing()? {
            // A graph cannot depend on work outside of it; done work needs no dependency.
            let hint = "run both streams' work to its end before the capture, with `synchronize`";
            return if mark.is_done() { Ok(()) } else { Err(refused(hint)) };
        }
        // SAFETY: both handles are valid.
        unsafe { cu!(self.context.driver, cuStreamWaitEvent(self.handle, mark.raw, 0)) }
    }

    /// Whether all that was ever enqueued is done, and no more will be.
    pub(crate) fn is_over(&self) -> bool {
        let state = self.state();
        state.phase == Phase::Ended && state.mark.as_ref().is_none_or(RawEvent::is_done)
    }

    /// Whether a mark behind the last work is, or will be, left to this context.
    pub(crate) fn is_marked_in(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context) && self.state().phase == Phase::Ended
    }

    /// Whether all that was enqueued is done now.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state();
        let marked = || state.mark.as_ref().is_none_or(RawEvent::is_done);
        match state.phase {
            Phase::Ended => marked(),
            Phase::Captured | Phase::Lost => false,
            // A query of a captured stream would end the capture.
            Phase::Live if !self.takes_work() => false,
            Phase::Live => {
                // SAFETY: a live stream's handle is valid.
                let query = |driver: &Driver| unsafe { (driver.cuStreamQuery)(self.handle) };
                relaxed(self.context.driver, query) == 0
            }
        }
    }

    /// Marks the end of the stream's work: nobody enqueues any more.
    pub(crate) fn end(&self) {
        let _turn = self.context.turns.write().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state();
        if matches!(state.phase, Phase::Ended | Phase::Lost) {
            return;
        }
        self.ended.store(true, Ordering::Release);
        if state.phase == Phase::Captured {
            // The mark was made before our capture, whose end ends the stream.
            return;
        }
        let bound = self.context.bind().is_ok();
        let capture = (bound && self.is_here()).then(|| self.capture_id());
        state.phase = match capture {
            Some(Ok(None)) if self.record(&mut state).is_ok() => Phase::Ended,
            // All of this borrow was captured by other code: what was before has the mark of then.
            Some(Ok(Some(id))) if state.begun_in == Some(id) => Phase::Ended,
            _ => Phase::Lost,
        };
        if self.owned && bound {
            // SAFETY: created by `create` and destroyed once; work that is there still completes.
            let _ = unsafe { cu!(self.context.driver, cuStreamDestroy(self.handle)) };
        }
    }

    /// Begins again with a borrowed handle. It may mean another stream than before, which waits for the old one's work.
    pub(crate) fn resume(&self) -> Result<()> {
        let mut state = self.state();
        self.context.bind()?;
        if let Some(mark) = &state.mark
            && !self.is_capturing()?
        {
            // SAFETY: both handles are valid.
            unsafe { cu!(self.context.driver, cuStreamWaitEvent(self.handle, mark.raw, 0)) }?;
        }
        state.begun_in = self.capture_id().ok().flatten();
        if state.phase != Phase::Captured {
            state.phase = Phase::Live;
        }
        self.ended.store(false, Ordering::Release);
        Ok(())
    }

    /// Starts to log what is used: a capture is about to begin.
    pub(crate) fn begin_log(&self) -> Result<()> {
        let _turn = self.context.turns.write().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state();
        // Also where another thread has begun one meanwhile: its log stays.
        if state.phase != Phase::Live || self.is_capturing()? {
            let what = "a second capture".into();
            return Err(CudaError::Capture { what, hint: "end the first one before" });
        }
        self.record(&mut state)?;
        state.phase = Phase::Captured;
        state.log = Some(CaptureLog::new());
        self.captured.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// What was used since [`Self::begin_log`].
    pub(crate) fn end_log(&self) -> Option<CaptureLog> {
        let mut state = self.state();
        self.captured.store(false, Ordering::Release);
        state.phase = if self.ended.load(Ordering::Acquire) { Phase::Ended } else { Phase::Live };
        state.log.take()
    }

    /// Logs a use, if a capture of ours is under way.
    pub(crate) fn log(&self, allocation: &Arc<Allocation>, access: Access) -> bool {
        self.logged(|log| log.note(allocation, access)).is_some()
    }

    /// Whether another thread captures it, by ours.
    #[cold]
    fn is_captured_elsewhere(&self) -> bool {
        let here = std::thread::current().id();
        self.state().log.as_ref().is_some_and(|log| log.by != here)
    }

    /// Does something with the log of a capture of ours, if this thread has one under way: what others use is none of its.
    pub(crate) fn logged<R>(&self, work: impl FnOnce(&mut CaptureLog) -> R) -> Option<R> {
        if !self.captured.load(Ordering::SeqCst) {
            return None;
        }
        let here = std::thread::current().id();
        self.state().log.as_mut().filter(|log| log.by == here).map(work)
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if state.phase == Phase::Lost {
            self.context.leave_unmarked();
        }
        if let Some(mark) = state.mark.take().filter(|mark| !mark.is_done()) {
            self.context.leave_mark(mark.into_raw());
        }
    }
}
