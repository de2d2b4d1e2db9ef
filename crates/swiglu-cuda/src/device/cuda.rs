//! One device: its default stream, its kernels, its libraries.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};

use crate::device::arch::Arch;
use crate::device::context::Context;
use crate::device::driver::{Driver, cu, driver};
use crate::device::error::{CudaError, Result};
use crate::device::facts::{DeviceFacts, expect_device, facts};
use crate::device::jit;
use crate::device::jit::cache::{CacheOptions, CacheWarning, KernelCache};
use crate::device::jit::variant::Variant;
use crate::device::launch::{Function, Functions};
use crate::device::leftovers::release_unused;
use crate::device::lt::{Lt, Measured, cublaslt_version};
use crate::device::memory::Memory;
use crate::device::stream::{Borrowed, BorrowedStream, Stream, StreamInner};
use crate::device::workspace::ScratchPool;

/// What a device is opened with.
pub(crate) struct Opening {
    pub(crate) device: usize,
    pub(crate) tf32: bool,
    pub(crate) plain_allocations: bool,
    pub(crate) cache: CacheOptions,
    /// What a floor above knows of cuBLASLt's algorithms, asked when the first layer needs them.
    pub(crate) gemms: fn(&Cuda) -> Vec<Arc<Measured>>,
}

/// A CUDA device with its compiled kernels. Clones share everything.
///
/// It uses the device's primary context, as the CUDA runtime and PyTorch do, so their memory and
/// streams can be used here. Calls make that context current on the calling thread and leave it so.
#[derive(Clone)]
pub struct Cuda(Arc<Inner>);

/// Whether they are the same: clones, not two that were opened on one device.
impl PartialEq for Cuda {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cuda {}

struct Inner {
    facts: DeviceFacts,
    arch: Arch,
    tf32: bool,
    /// Of a floor above, which made it and knows its type.
    attached: AssertUnwindSafe<Box<dyn Any + Send + Sync>>,
    default_stream: Arc<StreamInner>,
    borrowed: Borrowed,
    scratch: Arc<ScratchPool>,
    functions: Functions,
    gemms: fn(&Cuda) -> Vec<Arc<Measured>>,
    /// Made by the first layer that needs it.
    lt: Mutex<Option<Arc<Lt>>>,
    memory: Arc<Memory>,
}

impl Cuda {
    /// Opens a device, with what `attach` makes for it: [`Self::attached`].
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`], [`CudaError::SymbolMissing`], [`CudaError::NoDevice`],
    /// [`CudaError::DeviceIndex`], [`CudaError::Unsupported`], and whatever the driver reports.
    pub(crate) fn open<A: Any + Send + Sync>(
        opening: &Opening,
        attach: impl FnOnce(&Context, &DeviceFacts, Arch) -> A,
    ) -> Result<Self> {
        let driver = expect_device(opening.device)?;
        release_unused();
        let (device, facts) = facts(driver, opening.device)?;
        let (major, minor) = facts.compute_capability;
        let arch = Arch::from_capability(major, minor)?;
        let context = Arc::new(Context::retain(driver, device, opening.device)?);
        // It is read only.
        let attached: Box<dyn Any + Send + Sync> = Box::new(attach(&context, &facts, arch));
        let attached = AssertUnwindSafe(attached);
        let memory = Arc::new(Memory::new(context, opening.plain_allocations)?);
        let scratch = Arc::new(ScratchPool::default());
        let cache = KernelCache::new(&opening.cache);
        Ok(Self(Arc::new(Inner {
            facts,
            arch,
            tf32: opening.tf32,
            attached,
            default_stream: Arc::new(StreamInner::create(&memory, &scratch)?),
            borrowed: Borrowed::default(),
            scratch,
            functions: Functions::new(arch, cache),
            gemms: opening.gemms,
            lt: Mutex::default(),
            memory,
        })))
    }

    /// What was attached to the device when it was opened.
    #[allow(clippy::expect_used, reason = "one type is attached, by the one caller of `open`")]
    pub(crate) fn attached<A: Any>(&self) -> &A {
        self.0.attached.0.downcast_ref().expect("what was attached is of this type")
    }

    /// How many devices this process sees; 0 where the driver drives none.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] and [`CudaError::SymbolMissing`] without a usable driver.
    pub fn device_count() -> Result<usize> {
        let driver = match driver() {
            Ok(driver) => driver,
            Err(CudaError::NoDevice) => return Ok(0),
            Err(e) => return Err(e),
        };
        let mut count: c_int = 0;
        // SAFETY: `count` is a valid place for the result.
        match unsafe { cu!(driver, cuDeviceGetCount(&mut count)) } {
            Ok(()) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(CudaError::NoDevice) => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// What the device says about itself.
    pub fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    /// The architecture that kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.0.arch
    }

    /// Number of the device.
    pub fn ordinal(&self) -> usize {
        self.0.facts.ordinal
    }

    /// Whether f32 matrix products may round their inputs to TF32.
    pub fn tf32(&self) -> bool {
        self.0.tf32
    }

    /// This device's default stream, one per [`Cuda`]. It does not wait for the legacy default
    /// stream, nor the other way round.
    pub fn stream(&self) -> Stream {
        Stream::new(self.clone(), self.0.default_stream.clone())
    }

    /// A new stream that waits for no other.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn new_stream(&self) -> Result<Stream> {
        let inner = Arc::new(StreamInner::create(&self.0.memory, &self.0.scratch)?);
        Ok(Stream::new(self.clone(), inner))
    }

    /// Borrows a stream that belongs to someone else, for example the integer
    /// `torch.cuda.current_stream().cuda_stream`. 0 and 1 are the legacy default stream, 2 is the default stream of the
    /// calling thread. The handle can be borrowed for each call or kept: borrowing again finds the stream's workspace, outside of
    /// captures.
    ///
    /// # Errors
    /// What the driver reports.
    ///
    /// # Safety
    /// `raw` is one of these numbers or a stream of this device's primary context, and stays valid until the guard is
    /// dropped, during which no other thread calls anything with a clone of the stream; the guard of 2 is dropped on its
    /// thread. While other code begins a capture on the stream, no other thread drops memory that calls on it used. A guard that was made before other code begins a capture on the stream is not dropped inside it, and what
    /// captured calls use lives as long as the graph. Graphs that other code captures on one stream share its workspace, and
    /// so are not launched at the same time, unless their calls are lent scratch memory.
    pub unsafe fn borrow_stream(&self, raw: u64) -> Result<BorrowedStream> {
        self.0.borrowed.borrow(self, raw, self.memory(), &self.0.scratch)
    }

    pub(crate) fn borrowed(&self) -> &Borrowed {
        &self.0.borrowed
    }

    pub(crate) fn scratch_pool(&self) -> &ScratchPool {
        &self.0.scratch
    }

    /// Gives back device memory that no work needs: scratch memory that no stream has, and what waited for a capture to
    /// end. [`release_unused`](crate::release_unused) does the same for devices that are dropped. Page-locked memory of the
    /// host that no [`PinnedMatrix`](crate::PinnedMatrix) has is freed too, and its bytes are returned; for that the driver may
    /// wait for the device.
    pub fn trim(&self) -> usize {
        self.0.scratch.clear();
        self.memory().drain();
        self.memory().free_pinned()
    }

    /// What went wrong with the kernel cache so far. None of it is an error: a kernel that cannot
    /// be kept is compiled again by the next process.
    pub fn cache_warnings(&self) -> Vec<CacheWarning> {
        self.0.functions.cache().warnings()
    }

    /// The kernels that were launched since this was last called, by file and defines, each with the first 16
    /// hexadecimal digits of the SHA-256 of all that it was compiled from, but for the compiler.
    pub fn take_used_kernels(&self) -> BTreeMap<String, String> {
        self.0.functions.take_used()
    }

    /// Refuses a device on which layers cannot be computed for lack of a library: they need cuBLASLt, and NVRTC or
    /// kernels that were compiled before.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`], [`CudaError::SymbolMissing`].
    pub fn expect_libraries(&self) -> Result<()> {
        cublaslt_version()?;
        match jit::version() {
            Err(why) if !self.0.functions.cache().has_kernels() => Err(why),
            _ => Ok(()),
        }
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.0.memory.info()
    }

    /// Refuses a stream of another device.
    pub(crate) fn expect_stream(&self, stream: &Stream) -> Result<()> {
        if stream.cuda().ordinal() == self.ordinal() {
            return Ok(());
        }
        Err(CudaError::WrongDevice {
            what: "stream".into(),
            expected: format!("device {}", self.ordinal()),
            given: format!("device {}", stream.cuda().ordinal()),
        })
    }

    /// Linear maps on this device.
    pub(crate) fn lt(&self) -> Result<Arc<Lt>> {
        let mut lt = self.0.lt.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(lt) = &*lt {
            return Ok(lt.clone());
        }
        let made = Arc::new(Lt::new(self, &(self.0.gemms)(self))?);
        *lt = Some(made.clone());
        Ok(made)
    }

    /// Makes the device's context current on this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        self.context().bind()
    }

    /// Whether the device's context is current on this thread, which other libraries take for their current device: calls
    /// make it so, and leave it.
    pub fn is_current(&self) -> bool {
        self.context().is_current()
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.context().driver
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        self.0.memory.context()
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.0.memory
    }

    /// A kernel, ready to launch: compiled or read from the cache on first use, then looked up.
    /// `dynamic_shared` is the most bytes that any launch through the result will ask for.
    pub(crate) fn function(
        &self,
        variant: &Variant,
        entry: &'static str,
        dynamic_shared: u32,
    ) -> Result<Function> {
        self.0.functions.get(self, variant, entry, dynamic_shared)
    }
}

// A panic of a caller's leaves a device as it was.
const _: () = {
    const fn survives<T: std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    survives::<Cuda>();
};

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("device", &self.0.facts.ordinal)
            .field("name", &self.0.facts.name)
            .field("arch", &self.0.arch)
            .field("tf32", &self.0.tf32)
            .finish_non_exhaustive()
    }
}
