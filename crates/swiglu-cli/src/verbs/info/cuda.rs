//! CUDA devices, libraries and the cache of kernels: what is here, or why not.

use std::path::Path;

use serde::Serialize;
use swiglu_cuda::jit::{self, cache::CacheOptions, cache::KernelCache};
use swiglu_cuda::library::{self, Found, Library};
use swiglu_cuda::{Arch, Cuda, CudaError, DeviceFacts, cublaslt_version};

use crate::terminal::Shown;

#[derive(Debug, Serialize)]
pub(super) struct CudaInfo {
    devices: Vec<Device>,
    /// Why there is no device.
    none: Option<String>,
    libraries: Vec<LibraryInfo>,
    /// Where compiled kernels are read only.
    read_only_cache: Option<Shown>,
    /// Where compiled kernels are kept.
    cache: Option<Shown>,
}

/// A device, or why it cannot be used.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Device {
    Usable {
        #[serde(flatten)]
        facts: DeviceFacts,
        arch: Arch,
    },
    Unusable {
        ordinal: usize,
        why: String,
    },
}

#[derive(Debug, Serialize)]
struct LibraryInfo {
    library: Library,
    path: Option<Shown>,
    found: Option<Found>,
    version: Option<String>,
    /// Why it cannot be used.
    missing: Option<String>,
}

pub(super) fn gather() -> CudaInfo {
    let (devices, none) = match Cuda::device_count() {
        Ok(0) => (Vec::new(), Some(CudaError::NoDevice.to_string())),
        Ok(count) => ((0..count).map(device).collect(), None),
        Err(error) => (Vec::new(), Some(brief(&error))),
    };
    let cache = KernelCache::new(&CacheOptions::default());
    let [read_only_cache, cache] =
        cache.directories().map(|dir| dir.map(|dir| dir.to_owned().into()));
    let libraries = vec![
        // The driver's version is that of a device.
        library_info(Library::Driver, || Ok(None)),
        library_info(Library::Nvrtc, || jit::version().map(|(a, b)| Some(format!("{a}.{b}")))),
        library_info(Library::CublasLt, || {
            cublaslt_version().map(|(a, b, c)| Some(format!("{a}.{b}.{c}")))
        }),
    ];
    CudaInfo { devices, none, libraries, read_only_cache, cache }
}

fn device(ordinal: usize) -> Device {
    match Cuda::new(ordinal) {
        Ok(cuda) => Device::Usable { facts: cuda.facts().clone(), arch: cuda.arch() },
        Err(error) => Device::Unusable { ordinal, why: error.to_string() },
    }
}

fn library_info(
    library: Library,
    version: impl FnOnce() -> Result<Option<String>, CudaError>,
) -> LibraryInfo {
    let (mut path, mut found) = (None, None);
    let version = library::load(library).and_then(|loaded| {
        (path, found) = (Some(loaded.path.clone().into()), Some(loaded.how));
        version()
    });
    let (version, missing) = match version {
        Ok(version) => (version, None),
        Err(error) => (None, Some(brief(&error))),
    };
    LibraryInfo { library, path, found, version, missing }
}

/// One plain line: where a library was looked for is told by whoever needs it.
fn brief(error: &CudaError) -> String {
    match error {
        CudaError::LibraryMissing { library, .. } => format!("{library} was not found"),
        other => other.to_string(),
    }
}

impl CudaInfo {
    pub(super) fn text(&self) -> String {
        let mut lines: Vec<String> = self.devices.iter().map(Device::line).collect();
        lines.extend(self.none.iter().map(|why| format!("no device: {why}")));
        lines
            .extend(self.libraries.iter().filter(|l| l.is_news(&self.none)).map(LibraryInfo::line));
        let dir = |dir: &Path| dir.display().to_string();
        lines.extend(self.read_only_cache.iter().map(|d| format!("kernels read from {}", dir(d))));
        lines.extend(self.cache.iter().map(|d| format!("kernels kept in {}", dir(d))));
        let heads = std::iter::once("CUDA").chain(std::iter::repeat(""));
        heads.zip(&lines).map(|(head, line)| format!("{head:<10} {line}\n")).collect()
    }
}

impl Device {
    fn line(&self) -> String {
        match self {
            Device::Usable { facts: f, arch } => {
                let (major, minor) = f.driver_version;
                let (l2, memory) = (f.l2_bytes >> 20, f.memory_bytes as f64 / f64::from(1 << 30));
                format!(
                    "cuda:{} {}, {arch}, {} SMs, L2 {l2} MiB, {memory:.1} GiB, driver for CUDA \
                     {major}.{minor}",
                    f.ordinal, f.name, f.sm_count
                )
            }
            Device::Unusable { ordinal, why } => format!("cuda:{ordinal} cannot be used: {why}"),
        }
    }
}

impl LibraryInfo {
    /// Whether the line about devices has not said it already.
    fn is_news(&self, none: &Option<String>) -> bool {
        self.missing.is_none() || self.missing != *none
    }

    fn line(&self) -> String {
        let version = self.version.as_ref().map(|v| format!(" {v}")).unwrap_or_default();
        match (&self.missing, &self.path) {
            (Some(why), _) => why.clone(),
            (None, Some(path)) => format!("{}{version}: {}", self.library, path.display()),
            (None, None) => format!("{}{version}", self.library),
        }
    }
}
