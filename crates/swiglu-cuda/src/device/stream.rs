//! Streams and events.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::device::sys::CUstream;

use crate::device::cuda::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::fork::is_child;
use crate::device::loading::WithoutLoading;
use crate::device::memory::Memory;
use crate::device::raw_event::RawEvent;
use crate::device::raw_stream::{Held, RawStream};
use crate::device::workspace::{Scratch, ScratchPool};

/// Work in order on one device. Clones are the same stream.
///
/// Matrices and layers know the streams that use them: work with one of them on another stream waits for what was enqueued
/// before on the first.
#[derive(Clone)]
pub struct Stream {
    cuda: Cuda,
    inner: Arc<StreamInner>,
}

/// What all clones of a stream share. It does not hold the [`Cuda`], which holds it.
pub(crate) struct StreamInner {
    raw: Arc<RawStream>,
    pool: Arc<ScratchPool>,
    scratch: Mutex<Option<Scratch>>,
    /// The last capture by other code in which a call needed a word to wait at, and the word.
    word: Mutex<Option<(u64, u64)>>,
}

impl StreamInner {
    pub(crate) fn create(memory: &Memory, pool: &Arc<ScratchPool>) -> Result<Self> {
        Ok(Self::new(RawStream::create(memory.context())?, pool))
    }

    fn new(raw: RawStream, pool: &Arc<ScratchPool>) -> Self {
        Self {
            raw: Arc::new(raw),
            pool: pool.clone(),
            scratch: Mutex::default(),
            word: Mutex::default(),
        }
    }

    /// The stream's own scratch memory, locked.
    pub(crate) fn scratch(&self) -> MutexGuard<'_, Option<Scratch>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The word of a capture by other code: made for its first call.
    pub(crate) fn word_of(&self, capture: u64, make: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let mut known = self.word.lock().unwrap_or_else(PoisonError::into_inner);
        match *known {
            Some((of, word)) if of == capture => Ok(word),
            _ => {
                let word = make()?;
                *known = Some((capture, word));
                Ok(word)
            }
        }
    }

    /// Marks the end of the stream's work, and lets others have its scratch memory.
    fn end(&self) {
        self.raw.end();
        if let Some(scratch) = self.scratch().take() {
            self.pool.put(scratch);
        }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if !is_child() {
            self.end();
        }
    }
}

/// The borrowed streams of a device, by handle, and by thread where the handle is one for every thread.
#[derive(Default)]
pub(crate) struct Borrowed(Mutex<Table>);

type Key = (u64, Option<ThreadId>);

#[derive(Default)]
struct Table {
    /// With the number of guards.
    streams: HashMap<Key, (Arc<StreamInner>, usize)>,
    /// Given back, the oldest first.
    idle: Vec<Key>,
}

impl Borrowed {
    /// Streams that nobody borrows now and that are still known.
    const MOST_IDLE: usize = 64;

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn borrow(
        &self,
        cuda: &Cuda,
        raw: u64,
        memory: &Memory,
        pool: &Arc<ScratchPool>,
    ) -> Result<BorrowedStream> {
        const LEGACY: u64 = 1;
        let raw = if raw == LEGACY { 0 } else { raw };
        let key = key_of(raw);
        let mut table = self.table();
        let Table { streams, idle } = &mut *table;
        let (inner, guards) = streams.entry(key).or_insert_with(|| {
            let raw = RawStream::borrow(memory.context(), raw);
            (Arc::new(StreamInner::new(raw, pool)), 0)
        });
        if *guards == 0 {
            if let Err(why) = inner.raw.resume() {
                if !idle.contains(&key) {
                    streams.remove(&key);
                }
                return Err(why);
            }
            idle.retain(|known| *known != key);
        }
        *guards += 1;
        Ok(BorrowedStream { stream: Stream::new(cuda.clone(), inner.clone()), key })
    }

    fn give_back(&self, key: Key) {
        let mut table = self.table();
        let Some((inner, guards)) = table.streams.get_mut(&key) else { return };
        *guards -= 1;
        if *guards > 0 {
            return;
        }
        inner.end();
        table.idle.push(key);
        if table.idle.len() > Self::MOST_IDLE {
            let oldest = table.idle.remove(0);
            table.streams.remove(&oldest);
        }
    }
}

fn key_of(raw: u64) -> Key {
    (raw, (raw == RawStream::PER_THREAD).then(|| std::thread::current().id()))
}

/// A stream of somebody else, for as long as this guard lives: clones of the stream are refused after that, and what uses
/// memory of the stream's work waits for a mark that was made then.
#[derive(Debug)]
pub struct BorrowedStream {
    stream: Stream,
    key: Key,
}

impl BorrowedStream {
    /// If the stream is being captured: as long as the result lives, calls of this thread that would compile or load a
    /// kernel are refused with [`CudaError::Capture`]. Else the driver would refuse, and the capture be lost.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn without_loading(&self) -> Result<Option<WithoutLoading>> {
        Ok(self.stream.is_capturing()?.then(WithoutLoading::new))
    }
}

impl Deref for BorrowedStream {
    type Target = Stream;
    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for BorrowedStream {
    fn drop(&mut self) {
        if !is_child() {
            self.stream.cuda.borrowed().give_back(self.key);
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
        self.inner.raw.handle() as u64
    }

    pub(crate) fn raw_stream(&self) -> &Arc<RawStream> {
        &self.inner.raw
    }

    pub(crate) fn inner(&self) -> &Arc<StreamInner> {
        &self.inner
    }

    /// Makes the context current, for work that is about to be enqueued on the handle.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a borrowed stream that was given back or belongs to another thread;
    /// [`CudaError::Forked`].
    pub(crate) fn enter(&self) -> Result<CUstream> {
        self.inner.raw.enter()
    }

    /// Waits until everything enqueued so far is done.
    ///
    /// # Errors
    /// [`CudaError::Capture`]; an earlier kernel's failure, which the driver reports here.
    pub fn synchronize(&self) -> Result<()> {
        let held = self.inner.raw.hold()?;
        self.refuse_capture("waiting for the stream", "wait after the capture")?;
        self.wait_for_all(&held)
    }

    /// Waits for what is enqueued on a stream that is held, and that nothing captured when it was.
    pub(crate) fn wait_for_all(&self, held: &Held<'_>) -> Result<()> {
        self.cuda.memory().drain();
        // SAFETY: the handle is valid, as it is held.
        unsafe { cu!(self.cuda.driver(), cuStreamSynchronize(held.handle())) }
    }

    /// Whether calls are being recorded into a graph instead of executed.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn is_capturing(&self) -> Result<bool> {
        self.enter()?;
        self.inner.raw.is_capturing()
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
    /// [`CudaError::Capture`] in a capture of ours; what the driver reports.
    pub fn record(&self) -> Result<Event> {
        let held = self.inner.raw.hold()?;
        if self.inner.raw.logged(|_| ()).is_some() {
            let hint = "a graph knows the memory of one stream only; mark it before or after";
            return Err(CudaError::Capture { what: "marking a stream".into(), hint });
        }
        let event = RawEvent::new(self.cuda.context(), true)?;
        // SAFETY: both handles are valid and of this context.
        unsafe { cu!(self.cuda.driver(), cuEventRecord(event.raw, held.handle())) }?;
        Ok(Event(event))
    }

    /// Lets work enqueued from now on wait for `event`, which may be of another stream or device.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let held = self.inner.raw.hold()?;
        // SAFETY: both handles are valid.
        unsafe { cu!(self.cuda.driver(), cuStreamWaitEvent(held.handle(), event.0.raw, 0)) }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.cuda.ordinal())
            .field("raw", &format_args!("{:#x}", self.raw()))
            .field("owned", &self.inner.raw.is_owned())
            .finish()
    }
}

/// A mark in a stream.
pub struct Event(RawEvent);

impl Event {
    /// Waits until everything before the mark is done.
    ///
    /// # Errors
    /// An earlier kernel's failure, which the driver reports here.
    pub fn synchronize(&self) -> Result<()> {
        let RawEvent { raw, context } = &self.0;
        context.bind()?;
        // SAFETY: the handle is valid while `self` lives.
        unsafe { cu!(context.driver, cuEventSynchronize(*raw)) }
    }

    /// Milliseconds from `start` to this mark, with about half a microsecond of resolution. Waits
    /// for both.
    ///
    /// # Errors
    /// What the driver reports, for example for marks of two devices.
    pub fn elapsed_ms(&self, start: &Event) -> Result<f32> {
        start.synchronize()?;
        self.synchronize()?;
        let (mut ms, RawEvent { raw, context }) = (0.0, &self.0);
        // SAFETY: valid handles, a valid place for the result.
        unsafe { cu!(context.driver, cuEventElapsedTime(&mut ms, start.0.raw, *raw)) }?;
        Ok(ms)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("device", &self.0.context.ordinal).finish_non_exhaustive()
    }
}
