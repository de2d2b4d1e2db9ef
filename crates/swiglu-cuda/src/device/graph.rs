//! Work that is captured once and launched as one unit.

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLockReadGuard};

use crate::device::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::device::context::Context;
use crate::device::cuda::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::leftovers::CAPTURES;
use crate::device::memory::{
    Access, Allocation, DeviceData, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef,
};
use crate::device::raw_event::RawEvent;
use crate::device::stream::Stream;

impl Stream {
    /// Records what `enqueue` puts on this stream into a graph, without executing it.
    ///
    /// Kernels must be compiled before: run the same calls once, on any stream, or `reserve`. The graph has scratch memory
    /// of its own, and keeps the weights and matrices that the calls use, but not foreign memory. It begins when calls of other
    /// threads that are in progress on this stream have returned, and those that come until it ends are refused.
    ///
    /// # Errors
    /// What `enqueue` returns; [`CudaError::Capture`] if the stream is already in capture or is the
    /// legacy default stream; what the driver reports.
    pub fn capture<E: From<CudaError>>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let mut capture = Capture::begin(self)?;
        let outcome = enqueue();
        let ended = capture.end();
        outcome?;
        Ok(ended?)
    }

    /// Captures one call with an input and an output of the graph's own, so that launching it is safe. The closure must
    /// use no foreign memory: [`Self::capture`] is for that.
    pub(crate) fn capture_call<T: DeviceData, E: From<CudaError>>(
        &self,
        x: DeviceMatrix<T>,
        mut out: DeviceMatrix<T>,
        enqueue: impl FnOnce(DeviceMatrixRef<'_, T>, DeviceMatrixMut<'_, T>) -> Result<(), E>,
    ) -> Result<CapturedCall<T>, E> {
        let graph = self.capture(|| enqueue(x.view(), out.view_mut()))?;
        Ok(CapturedCall { graph, x, out })
    }
}

/// A capture that has begun.
struct Capture<'a> {
    stream: &'a Stream,
    ended: bool,
    _noted: RwLockReadGuard<'static, ()>,
}

thread_local! {
    /// Captures that this thread has begun and not ended.
    static BEGUN: Cell<usize> = const { Cell::new(0) };
}

/// Refuses, in a capture of ours by this thread, what no stream can do meanwhile.
///
/// # Errors
/// [`CudaError::Capture`].
pub(crate) fn expect_no_capture(what: &str, hint: &'static str) -> Result<()> {
    match BEGUN.get() {
        0 => Ok(()),
        _ => Err(CudaError::Capture { what: what.to_owned(), hint }),
    }
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self> {
        let handle = stream.enter()?;
        if handle.is_null() {
            return Err(CudaError::Capture {
                what: "capturing the legacy default stream".into(),
                hint: "use another stream; the driver captures any but this one",
            });
        }
        stream.refuse_capture("a second capture", "end the first one before")?;
        // Calls that cannot be captured are refused on this thread only: other threads may go on
        // allocating on other streams.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let raw = stream.raw_stream();
        let noted = raw.alone(|| {
            let noted = CAPTURES.read().unwrap_or_else(PoisonError::into_inner);
            raw.begin_log()?;
            // SAFETY: a valid stream that is not in capture.
            let begun = unsafe { cu!(stream.cuda().driver(), cuStreamBeginCapture(handle, mode)) };
            begun.inspect_err(|_| drop(raw.end_log()))?;
            Ok(noted)
        })?;
        BEGUN.set(BEGUN.get() + 1);
        Ok(Self { stream, ended: false, _noted: noted })
    }

    fn end(&mut self) -> Result<Graph> {
        self.ended = true;
        BEGUN.set(BEGUN.get() - 1);
        let (cuda, raw_stream) = (self.stream.cuda(), self.stream.raw_stream());
        let mut raw: CUgraph = std::ptr::null_mut();
        let bound = cuda.bind();
        // SAFETY: a stream whose capture this thread began, a valid place for the graph.
        let ended = bound.and_then(|()| unsafe {
            cu!(cuda.driver(), cuStreamEndCapture(raw_stream.handle(), &mut raw))
        });
        let uses = raw_stream.end_log().map(|log| log.uses).unwrap_or_default();
        ended?;
        let template = Template { raw, context: cuda.context().clone() };
        let mut raw: CUgraphExec = std::ptr::null_mut();
        // SAFETY: a valid place, a graph that was just captured, no flags.
        unsafe { cu!(cuda.driver(), cuGraphInstantiateWithFlags(&mut raw, template.raw, 0)) }?;
        Ok(Graph { raw, cuda: cuda.clone(), uses })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // Also where `enqueue` panics; the stream would stay unusable.
        if !self.ended {
            let _ = self.end();
        }
    }
}

/// What a capture gave, from which graphs are made.
struct Template {
    raw: CUgraph,
    context: Arc<Context>,
}

impl Drop for Template {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.context.bind().is_ok() {
            // SAFETY: made by a capture and destroyed once.
            let _ = unsafe { cu!(self.context.driver, cuGraphDestroy(self.raw)) };
        }
    }
}

/// Captured work that can be launched again and again as one unit.
///
/// It keeps the device's kernels alive, and the memory of the layers and matrices that the captured calls used, with
/// scratch memory of its own. Launches of one graph run one after the other, also on different streams.
pub struct Graph {
    raw: CUgraphExec,
    cuda: Cuda,
    uses: Vec<(Arc<Allocation>, Access)>,
}

// SAFETY: the handle may be moved between threads; it is not used concurrently, see `Graph::launch`.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the graph on `stream`, which need not be the one it was captured on, behind what other streams do with the
    /// memory that it uses.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`] for a stream of another device; what the driver reports.
    ///
    /// # Safety
    /// Foreign memory that the captured calls used is still there until the graph has run. At the same time no other thread
    /// launches the graph, enqueues work with the matrices it writes, or writes those it reads.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        if stream.cuda().ordinal() != self.cuda.ordinal() {
            return Err(CudaError::WrongDevice {
                what: "stream of a graph".into(),
                expected: format!("device {}", self.cuda.ordinal()),
                given: format!("device {}", stream.cuda().ordinal()),
            });
        }
        let held = stream.raw_stream().hold()?;
        let handle = held.handle();
        // Of a stream of another handle of the device this one has no mark, and the kernels are this one's.
        let is_elsewhere = !Arc::ptr_eq(stream.cuda().context(), self.cuda.context());
        if is_elsewhere && stream.is_capturing()? {
            return Err(CudaError::Capture {
                what: "launching a graph of another handle of the device".into(),
                hint: "its kernels end with that handle: capture it on a stream of that one",
            });
        }
        for (allocation, access) in &self.uses {
            allocation.order(stream.raw_stream(), *access)?;
        }
        // SAFETY: valid handles; the graph keeps the memory behind the nodes, or the caller vouches for it.
        unsafe { cu!(self.cuda.driver(), cuGraphLaunch(self.raw, handle)) }?;
        if is_elsewhere {
            let mark = RawEvent::new(self.cuda.context(), false)?;
            // SAFETY: both handles are valid and of the device's one primary context.
            unsafe { cu!(self.cuda.driver(), cuEventRecord(mark.raw, handle)) }?;
            self.cuda.context().leave_mark(mark.into_raw());
        }
        Ok(())
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("device", &self.cuda.ordinal()).finish_non_exhaustive()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // SAFETY: made by `capture` and destroyed once; launches in flight still complete.
            let _ = unsafe { cu!(self.cuda.driver(), cuGraphExecDestroy(self.raw)) };
        }
    }
}

/// A call of a layer as a graph, which owns its input and output.
#[derive(Debug)]
pub struct CapturedCall<T> {
    graph: Graph,
    x: DeviceMatrix<T>,
    out: DeviceMatrix<T>,
}

impl<T: DeviceData> CapturedCall<T> {
    /// The input, to be written before a launch.
    pub fn x_mut(&mut self) -> DeviceMatrixMut<'_, T> {
        self.x.view_mut()
    }

    /// The output of the last launch.
    pub fn out(&self) -> &DeviceMatrix<T> {
        &self.out
    }

    /// Enqueues the call on `stream`, which may be another one each time.
    ///
    /// # Errors
    /// As [`Graph::launch`].
    pub fn launch(&mut self, stream: &Stream) -> Result<()> {
        // SAFETY: the call used only memory of the layer, of the graph, and of the matrices that this owns, borrowed
        // mutably here.
        unsafe { self.graph.launch(stream) }
    }
}
