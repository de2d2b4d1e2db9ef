//! Streams, events and captured graphs.

use std::fmt;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{
    CUevent, CUgraph, CUgraphExec, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use crate::device::context::{Context, Cuda};
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::idle::Capturing;
use crate::device::memory::Memory;
use crate::device::workspace::Scratch;

/// Work in order on one device. Clones are the same stream.
#[derive(Clone)]
pub struct Stream {
    cuda: Cuda,
    inner: Arc<StreamInner>,
}

/// What all clones of a stream share. It does not hold the [`Cuda`], which holds it.
pub(crate) struct StreamInner {
    raw: CUstream,
    owned: bool,
    memory: Arc<Memory>,
    pub(crate) scratch: Mutex<Scratch>,
}

// SAFETY: a stream handle may be used from any thread; the driver synchronises.
unsafe impl Send for StreamInner {}
// SAFETY: as above; the only mutable field is behind a lock.
unsafe impl Sync for StreamInner {}

impl StreamInner {
    pub(crate) fn create(memory: &Arc<Memory>) -> Result<Self> {
        const NON_BLOCKING: u32 = 1;
        memory.context().bind()?;
        let mut raw: CUstream = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the handle; the context is current.
        unsafe { cu!(memory.driver(), cuStreamCreateWithPriority(&mut raw, NON_BLOCKING, 0)) }?;
        Ok(Self { raw, owned: true, memory: memory.clone(), scratch: Mutex::default() })
    }

    pub(crate) fn borrow(memory: &Arc<Memory>, raw: u64) -> Self {
        Self {
            raw: raw as CUstream,
            owned: false,
            memory: memory.clone(),
            scratch: Mutex::default(),
        }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        let scratch = std::mem::take(self.scratch.get_mut().unwrap_or_else(|e| e.into_inner()));
        scratch.release(&self.memory, self.owned.then_some(self.raw));
        if self.owned && self.memory.context().bind().is_ok() {
            // SAFETY: created by `create` and destroyed once. Pending work still completes.
            let _ = unsafe { cu!(self.memory.driver(), cuStreamDestroy(self.raw)) };
        }
    }
}

impl Stream {
    pub(crate) fn new(cuda: Cuda, inner: Arc<StreamInner>) -> Self {
        Self { cuda, inner }
    }

    /// The device.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The driver's handle as an integer, for other libraries.
    pub fn raw(&self) -> u64 {
        self.inner.raw as u64
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.inner.raw
    }

    pub(crate) fn inner(&self) -> &Arc<StreamInner> {
        &self.inner
    }

    /// Waits until everything enqueued so far is done.
    ///
    /// # Errors
    /// [`CudaError::Capture`]; an earlier kernel's failure, which the driver reports here.
    pub fn synchronize(&self) -> Result<()> {
        self.cuda.bind()?;
        self.refuse_capture("waiting for the stream", "wait after the capture")?;
        // SAFETY: the handle is valid while `self` lives.
        unsafe { cu!(self.cuda.driver(), cuStreamSynchronize(self.handle())) }
    }

    /// Whether calls are being recorded into a graph instead of executed.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn is_capturing(&self) -> Result<bool> {
        self.cuda.memory().is_capturing(self.handle())
    }

    pub(crate) fn refuse_capture(&self, what: &str, hint: &'static str) -> Result<()> {
        match self.is_capturing()? {
            true => Err(CudaError::Capture { what: what.to_owned(), hint }),
            false => Ok(()),
        }
    }

    /// A mark after everything enqueued so far.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn record(&self) -> Result<Event> {
        self.cuda.bind()?;
        let driver = self.cuda.driver();
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the handle; the context is current.
        unsafe { cu!(driver, cuEventCreate(&mut raw, 0)) }?;
        let event = Event { raw, context: self.cuda.context().clone() };
        // SAFETY: both handles are valid and of this context.
        unsafe { cu!(driver, cuEventRecord(raw, self.handle())) }?;
        Ok(event)
    }

    /// Lets work enqueued from now on wait for `event`, which may be of another stream or device.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.cuda.bind()?;
        // SAFETY: both handles are valid.
        unsafe { cu!(self.cuda.driver(), cuStreamWaitEvent(self.handle(), event.raw, 0)) }
    }

    /// Records what `enqueue` puts on this stream into a graph, without executing it.
    ///
    /// Kernels must be compiled and workspaces reserved before: run the same calls once. While another thread drops a
    /// device's last handle, and waits for the device, this waits for it; what a drop has to wait for during the
    /// capture is done at its end.
    ///
    /// # Errors
    /// What `enqueue` returns; [`CudaError::Capture`] if the stream is already in capture or is the
    /// legacy default stream; what the driver reports.
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        if self.handle().is_null() {
            return Err(CudaError::Capture {
                what: "capturing the legacy default stream".into(),
                hint: "use another stream; the driver captures any but this one",
            });
        }
        self.refuse_capture("a second capture", "end the first one before")?;
        self.cuda.bind()?;
        let driver = self.cuda.driver();
        // Calls that cannot be captured are refused on this thread only: other threads may go on
        // allocating on other streams.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let capturing = Capturing::new();
        // SAFETY: a valid stream that is not in capture.
        unsafe { cu!(driver, cuStreamBeginCapture(self.handle(), mode)) }?;
        // Ends the capture also where `enqueue` panics; the stream would stay unusable.
        let mut capture = Capture { stream: self, ended: false, _capturing: capturing };
        let outcome = enqueue();
        let template = capture.end();
        outcome?;
        let template = template?;
        let mut raw: CUgraphExec = std::ptr::null_mut();
        // SAFETY: a valid place, a graph that was just captured, no flags.
        unsafe { cu!(driver, cuGraphInstantiateWithFlags(&mut raw, template.raw, 0)) }?;
        Ok(Graph { raw, cuda: self.cuda.clone(), _stream: self.inner.clone() })
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.cuda.ordinal())
            .field("raw", &format_args!("{:#x}", self.raw()))
            .field("owned", &self.inner.owned)
            .finish()
    }
}

struct Capture<'a> {
    stream: &'a Stream,
    ended: bool,
    _capturing: Capturing,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<Template> {
        self.ended = true;
        let cuda = self.stream.cuda();
        let mut raw: CUgraph = std::ptr::null_mut();
        // SAFETY: a stream whose capture this thread began, a valid place for the graph.
        unsafe { cu!(cuda.driver(), cuStreamEndCapture(self.stream.handle(), &mut raw)) }?;
        Ok(Template { raw, context: cuda.context().clone() })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.end();
        }
    }
}

/// A captured graph before it is made executable.
struct Template {
    raw: CUgraph,
    context: Arc<Context>,
}

impl Drop for Template {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.context.bind().is_ok() {
            // SAFETY: made by the end of a capture and destroyed once; executable graphs made from
            // it are independent of it.
            let _ = unsafe { cu!(self.context.driver, cuGraphDestroy(self.raw)) };
        }
    }
}

/// Whether the stream is in a capture.
pub(crate) fn capturing(context: &Context, stream: CUstream) -> Result<bool> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a valid stream, a valid place for the result.
    unsafe { cu!(context.driver, cuStreamIsCapturing(stream, &mut status)) }?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// A mark in a stream.
pub struct Event {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: an event handle may be used from any thread; the driver synchronises.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Waits until everything before the mark is done.
    ///
    /// # Errors
    /// An earlier kernel's failure, which the driver reports here.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the handle is valid while `self` lives.
        unsafe { cu!(self.context.driver, cuEventSynchronize(self.raw)) }
    }

    /// Milliseconds from `start` to this mark, with about half a microsecond of resolution. Waits
    /// for both.
    ///
    /// # Errors
    /// What the driver reports, for example for marks of two devices.
    pub fn elapsed_ms(&self, start: &Event) -> Result<f32> {
        start.synchronize()?;
        self.synchronize()?;
        let mut ms = 0.0;
        // SAFETY: valid handles, a valid place for the result.
        unsafe { cu!(self.context.driver, cuEventElapsedTime(&mut ms, start.raw, self.raw)) }?;
        Ok(ms)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("device", &self.context.ordinal).finish_non_exhaustive()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created by `record` and destroyed once; the driver keeps it until it has
            // passed.
            let _ = unsafe { cu!(self.context.driver, cuEventDestroy(self.raw)) };
        }
    }
}

/// Captured work that can be launched again and again as one unit.
///
/// It keeps the device's kernels and the workspaces that it uses alive, but not the matrices that
/// were given to the captured calls.
pub struct Graph {
    raw: CUgraphExec,
    cuda: Cuda,
    /// Whose workspace the graph uses.
    _stream: Arc<StreamInner>,
}

// SAFETY: the handle may be moved between threads; it is not used concurrently, see `Graph::launch`.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the graph on `stream`, which need not be the one it was captured on.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`] for a stream of another device; what the driver reports.
    ///
    /// # Safety
    /// Every matrix and layer that the captured calls used is still alive until the graph has run,
    /// and nothing else on the stream it was captured from runs at the same time: both would write
    /// to the same workspace.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        if stream.cuda().ordinal() != self.cuda.ordinal() {
            return Err(CudaError::WrongDevice {
                what: "stream of a graph".into(),
                expected: format!("device {}", self.cuda.ordinal()),
                given: format!("device {}", stream.cuda().ordinal()),
            });
        }
        self.cuda.bind()?;
        // SAFETY: valid handles; the caller vouches for the memory behind the nodes.
        unsafe { cu!(self.cuda.driver(), cuGraphLaunch(self.raw, stream.handle())) }
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
