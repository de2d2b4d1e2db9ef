//! The kernels of a device, loaded when they are first asked for.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, RwLock};

use super::Function;
use crate::device::arch::Arch;
use crate::device::context::Context;
use crate::device::cuda::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::jit::Variant;
use crate::device::jit::cache::{KernelCache, Origin, digest};
use crate::device::loading;
use crate::device::sys::CUmodule;

/// Code on the device.
pub(super) struct Module {
    pub(super) raw: CUmodule,
    pub(super) context: Arc<Context>,
    /// Held while the shared memory of one of its kernels is changed.
    pub(super) opt_in: Mutex<()>,
}

// SAFETY: a module handle may be used from any thread; the driver synchronises.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Self> {
        context.bind()?;
        let mut raw: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is a CUBIN of the compiler, or of the cache, which has verified it.
        unsafe { cu!(context.driver, cuModuleLoadData(&mut raw, cubin.as_ptr().cast())) }?;
        Ok(Self { raw, context: context.clone(), opt_in: Mutex::default() })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // Kernels may still run; the module is unloaded once, when the device is dropped.
        let (driver, raw) = (self.context.driver, self.raw as usize);
        self.context.leave_work(move || {
            // SAFETY: loaded by `load`, unloaded once, and its context is current.
            let _ = unsafe { cu!(driver, cuModuleUnload(raw as CUmodule)) };
        });
    }
}

/// The hash of a key that is one already.
#[derive(Default)]
struct Prehashed(u64);

impl Hasher for Prehashed {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 << 8) | u64::from(byte);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

type ByHash<V> = HashMap<u64, Vec<V>, BuildHasherDefault<Prehashed>>;

/// A module that is being loaded, or is.
#[derive(Default)]
struct Slot(Mutex<Option<Arc<Module>>>);

/// The kernels of one device that were launched so far.
pub(crate) struct Functions {
    arch: Arch,
    cache: KernelCache,
    ready: RwLock<ByHash<(Variant, Function)>>,
    modules: Mutex<HashMap<Variant, Arc<Slot>>>,
}

impl Functions {
    pub(crate) fn new(arch: Arch, cache: KernelCache) -> Self {
        Self { arch, cache, ready: RwLock::default(), modules: Mutex::default() }
    }

    pub(crate) fn cache(&self) -> &KernelCache {
        &self.cache
    }

    pub(crate) fn get(
        &self,
        cuda: &Cuda,
        variant: &Variant,
        entry: &'static str,
        dynamic_shared: u32,
    ) -> Result<Function> {
        let hash = variant.hash_with(entry);
        let function = match self.find(hash, variant, entry) {
            Some(function) => function,
            None => self.make(cuda, hash, variant, entry)?,
        };
        function.0.used.store(true, Ordering::Relaxed);
        function.allow_shared(dynamic_shared)?;
        Ok(function)
    }

    /// The variants that were asked for since this was last called, each with the digest of all that it was
    /// compiled from.
    pub(crate) fn take_used(&self) -> BTreeMap<String, String> {
        let ready = self.ready.read().unwrap_or_else(|e| e.into_inner());
        let used =
            ready.values().flatten().filter(|(_, f)| f.0.used.swap(false, Ordering::Relaxed));
        used.map(|(variant, _)| (variant.to_string(), digest(variant, self.arch))).collect()
    }

    fn find(&self, hash: u64, variant: &Variant, entry: &str) -> Option<Function> {
        let ready = self.ready.read().unwrap_or_else(|e| e.into_inner());
        let same = |(v, f): &&(Variant, Function)| v == variant && f.0.entry == entry;
        ready.get(&hash)?.iter().find(same).map(|(_, function)| function.clone())
    }

    #[cold]
    fn make(
        &self,
        cuda: &Cuda,
        hash: u64,
        variant: &Variant,
        entry: &'static str,
    ) -> Result<Function> {
        let slot = {
            let mut modules = self.modules.lock().unwrap_or_else(|e| e.into_inner());
            modules.entry(*variant).or_default().clone()
        };
        // Threads that want the same module wait for the one that makes it; others do not.
        let mut module = slot.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(function) = self.find(hash, variant, entry) {
            return Ok(function);
        }
        loading::expect_allowed(|| format!("kernel `{variant}`"))?;
        let module = match &*module {
            Some(module) => module,
            None => module.insert(Arc::new(self.load(cuda, variant)?)),
        };
        let function = Function::load(module, entry)?;
        let mut ready = self.ready.write().unwrap_or_else(|e| e.into_inner());
        ready.entry(hash).or_default().push((*variant, function.clone()));
        Ok(function)
    }
}

/// Whether the driver refuses an image, which another compiler's may be taken in place of: no kernel in it for this device, of a
/// version it does not know, damaged.
fn is_of_image(error: &CudaError) -> bool {
    // CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION and INVALID_SOURCE.
    matches!(error, CudaError::Driver { code: 200 | 209 | 218 | 222 | 300, .. })
}

impl Functions {
    /// A module that the driver accepts: one from disk may come from another compiler, or be made
    /// for another driver. Where it cannot be compiled again, or no other image would help, the driver's first reason counts.
    fn load(&self, cuda: &Cuda, variant: &Variant) -> Result<Module> {
        let mut code = self.cache.module(variant, self.arch)?;
        let mut loaded = Module::load(cuda.context(), &code.cubin);
        let is_refused = loaded.as_ref().is_err_and(is_of_image);
        if is_refused
            && code.origin != Origin::Compiled
            && let Ok(compiled) = self.cache.rebuild(variant, self.arch)
        {
            code = compiled;
            loaded = Module::load(cuda.context(), &code.cubin);
        }
        loaded.map_err(|e| match e {
            CudaError::Driver { .. } => CudaError::Load {
                file: variant.to_string(),
                arch: self.arch.to_string(),
                compiler: code.report.nvrtc,
                driver: cuda.facts().driver_version,
                why: e.to_string(),
            },
            other => other,
        })
    }
}
