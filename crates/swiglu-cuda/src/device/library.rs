//! Finding and loading the libraries of CUDA, none of which is linked.
//!
//! Each library is looked for once per process, in the order of [`Found`], and stays loaded. The
//! functions that are called are taken from exactly the library found here: two versions on one
//! machine (a toolkit's and a Python wheel's) are common, and must not mix.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, RwLock};

use serde::Serialize;

use crate::device::error::{CudaError, Result};

/// A library that is loaded at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Library {
    /// The driver, `libcuda`. Comes with the kernel module; never part of a toolkit or wheel.
    Driver,
    /// The run-time compiler, `libnvrtc`. Needs no GPU.
    Nvrtc,
    /// The matrix products of `libcublasLt`.
    CublasLt,
}

impl Library {
    /// File names, the newest first. Only versions whose functions are known to fit.
    pub fn sonames(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1"],
            Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
        }
    }

    /// What a user does to get it, or a newer one.
    pub fn hint(self) -> &'static str {
        match self {
            Library::Driver => {
                "install the NVIDIA driver (525 or newer), or start the container with the GPU"
            }
            Library::Nvrtc => {
                "install it with `pip install nvidia-cuda-nvrtc` or a CUDA toolkit (12 or 13), or \
                 name its directory in SWIGLU_CUDA_LIBRARY_PATH"
            }
            Library::CublasLt => {
                "install it with `pip install nvidia-cublas` or a CUDA toolkit (12 or 13), or name \
                 its directory in SWIGLU_CUDA_LIBRARY_PATH"
            }
        }
    }

    /// Directories below a Python's `site-packages` in which wheels put it.
    fn wheel_dirs(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &[],
            Library::Nvrtc => &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
            Library::CublasLt => &["nvidia/cu13/lib", "nvidia/cublas/lib"],
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Library::Driver => "the NVIDIA driver (libcuda)",
            Library::Nvrtc => "the run-time compiler (libnvrtc)",
            Library::CublasLt => "cuBLASLt (libcublasLt)",
        })
    }
}

/// How a library was found. The variants are in the order in which places are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// In the directory given to [`prefer`].
    Preferred,
    /// In a directory of `SWIGLU_CUDA_LIBRARY_PATH`.
    Environment,
    /// By the dynamic loader: already loaded, `LD_LIBRARY_PATH` or the system's directories.
    Loader,
    /// In the toolkit of `CUDA_HOME` or `CUDA_PATH`.
    Toolkit,
    /// In `/usr/local/cuda`.
    DefaultToolkit,
    /// In a wheel of the active Python.
    PythonWheel,
}

/// A library that was found and stays loaded until the process ends.
#[derive(Debug)]
pub struct Loaded {
    /// Which one.
    pub library: Library,
    /// The file, or the bare name if the dynamic loader found it.
    pub path: PathBuf,
    /// How it was found.
    pub how: Found,
    handle: libloading::Library,
}

impl Loaded {
    /// A function of this library.
    ///
    /// # Errors
    /// [`CudaError::SymbolMissing`].
    ///
    /// # Safety
    /// `F` is the type of a function pointer that fits the symbol's C declaration.
    pub unsafe fn symbol<F: Copy>(&self, symbol: &'static str) -> Result<F> {
        // SAFETY: the caller vouches for `F`. The handle lives in a static, so the copy that
        // leaves the borrow never outlives the library.
        match unsafe { self.handle.get::<F>(symbol) } {
            Ok(function) => Ok(*function),
            Err(_) => Err(CudaError::SymbolMissing {
                library: self.library,
                path: self.path.display().to_string(),
                symbol,
                hint: self.library.hint(),
            }),
        }
    }
}

/// Declares a table of C functions, taken from one library and checked to be there when it is
/// loaded. Results stay plain integers: a newer library may return a number that an enumeration
/// of today does not have.
macro_rules! functions {
    (
        $(#[$meta:meta])* $vis:vis struct $Table:ident from $library:expr;
        required { $(fn $name:ident = $symbol:literal ($($arg:ty),* $(,)?) -> $ret:ty;)* }
        optional { $(fn $oname:ident = $osymbol:literal ($($oarg:ty),* $(,)?) -> $oret:ty;)* }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case, reason = "the names of the C declarations")]
        $vis struct $Table {
            $($vis $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $($vis $oname: Option<unsafe extern "C" fn($($oarg),*) -> $oret>,)*
        }

        impl $Table {
            /// Loads the library, once per process, and takes its functions.
            fn load() -> $crate::device::error::Result<Self> {
                let library = $crate::device::library::load($library)?;
                // SAFETY: each type restates the C declaration of the symbol beside it.
                unsafe {
                    Ok(Self {
                        $($name: library.symbol($symbol)?,)*
                        $($oname: library.symbol($osymbol).ok(),)*
                    })
                }
            }
        }
    };
}
pub(crate) use functions;

/// Directories that come before all others. Written by [`prefer`].
static PREFERRED: RwLock<Option<PathBuf>> = RwLock::new(None);
static LOADED: [OnceLock<Result<Loaded>>; 3] = [const { OnceLock::new() }; 3];

/// Looks in `dir` before anywhere else; for tests with a simulated device. Returns whether that
/// still has an effect on every library: one that was already looked for stays as it is.
#[doc(hidden)]
pub fn prefer(dir: impl Into<PathBuf>) -> bool {
    let mut preferred = PREFERRED.write().unwrap_or_else(|e| e.into_inner());
    *preferred = Some(dir.into());
    LOADED.iter().all(|slot| slot.get().is_none())
}

/// The library, looked for on the first call.
///
/// # Errors
/// [`CudaError::LibraryMissing`] with every place that was looked in.
pub fn load(library: Library) -> Result<&'static Loaded> {
    let slot = LOADED[library as usize].get_or_init(|| {
        let preferred = PREFERRED.read().unwrap_or_else(|e| e.into_inner()).clone();
        find(library, &search_order(library, preferred, &|name| std::env::var_os(name)))
    });
    slot.as_ref().map_err(Clone::clone)
}

/// A place to look in.
#[derive(Debug, Clone, PartialEq)]
enum Place {
    Dir(PathBuf, Found),
    /// The dynamic loader's own search.
    Loader,
}

fn find(library: Library, places: &[Place]) -> Result<Loaded> {
    let mut looked_in = Vec::new();
    for place in places {
        for soname in library.sonames() {
            let (path, how) = match place {
                Place::Loader => (PathBuf::from(soname), Found::Loader),
                Place::Dir(dir, how) => (dir.join(soname), *how),
            };
            if *place != Place::Loader && !path.is_file() {
                continue;
            }
            if library == Library::Nvrtc
                && let Place::Dir(dir, _) = place
            {
                load_builtins(dir);
            }
            match open(&path) {
                Ok(handle) => return Ok(Loaded { library, path, how, handle }),
                Err(e) if *place == Place::Loader && is_absent(&e) => {}
                Err(e) => looked_in.push(format!("{}: {}", path.display(), words(&e))),
            }
        }
        looked_in.push(match place {
            Place::Loader => "the loader's path".into(),
            Place::Dir(dir, _) => dir.display().to_string(),
        });
    }
    Err(CudaError::LibraryMissing { library, looked_in, hint: library.hint() })
}

fn open(path: &Path) -> std::result::Result<libloading::Library, libloading::Error> {
    // SAFETY: opening runs the library's initialisers. These are NVIDIA's libraries by name, from
    // places that the user, the system or the user's Python put them.
    unsafe { libloading::Library::new(path) }
}

/// Whether the loader did not find the name, as opposed to finding something it cannot load.
fn is_absent(error: &libloading::Error) -> bool {
    words(error).contains("No such file")
}

/// What the loader said; the error itself says only that it failed.
fn words(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// A wheel's `libnvrtc` opens its builtins by bare name but has no RUNPATH to its own directory:
/// loading them first, by path, makes that name known.
fn load_builtins(dir: &Path) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for path in entries.map(|e| e.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("libnvrtc-builtins.so")
            && let Ok(handle) = open(&path)
        {
            // Stays loaded, as libnvrtc does. One that does not load is missed by the compiler,
            // whose log says so.
            std::mem::forget(handle);
        }
    }
}

type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Every place to look for `library`, in order, without duplicates.
fn search_order(library: Library, preferred: Option<PathBuf>, env: Env<'_>) -> Vec<Place> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    let mut places: Vec<Place> =
        preferred.into_iter().map(|dir| Place::Dir(dir, Found::Preferred)).collect();
    if let Some(list) = set("SWIGLU_CUDA_LIBRARY_PATH") {
        let dirs = std::env::split_paths(&list).filter(|dir| !dir.as_os_str().is_empty());
        places.extend(dirs.map(|dir| Place::Dir(dir, Found::Environment)));
    }
    places.push(Place::Loader);
    if library == Library::Driver {
        // A toolkit has only a stub of the driver, which loads and then fails every call.
        return places;
    }
    let mut push = |dir: PathBuf, how| {
        let known = places.iter().any(|p| matches!(p, Place::Dir(d, _) if *d == dir));
        if !known {
            places.push(Place::Dir(dir, how));
        }
    };
    for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set).map(PathBuf::from) {
        toolkit_dirs(&home).for_each(|dir| push(dir, Found::Toolkit));
    }
    toolkit_dirs(Path::new("/usr/local/cuda")).for_each(|dir| push(dir, Found::DefaultToolkit));
    for site in python_sites(env) {
        library.wheel_dirs().iter().for_each(|d| push(site.join(d), Found::PythonWheel));
    }
    places
}

fn toolkit_dirs(home: &Path) -> impl Iterator<Item = PathBuf> {
    let targets = format!("targets/{}-linux/lib", std::env::consts::ARCH);
    ["lib64".to_owned(), targets].into_iter().map(|dir| home.join(dir))
}

/// The package directories of the Python that a user means: an activated environment, then the
/// `python3` on PATH. It is found, not run: a library must not start processes.
fn python_sites(env: Env<'_>) -> Vec<PathBuf> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(set).collect();
    let path = env("PATH").unwrap_or_default();
    // A library is not loaded from wherever the program was started.
    let mut dirs = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
    let python = dirs.find_map(|dir| Some(dir.join("python3")).filter(|file| file.is_file()));
    if let Some(python) = python {
        // As found: an environment that is on PATH. Resolved: the installation behind a link.
        let resolved = python.canonicalize().ok();
        for file in [Some(python), resolved].into_iter().flatten() {
            prefixes.extend(file.parent().and_then(Path::parent).map(Path::to_owned));
        }
    }
    prefixes.extend(set("HOME").map(|home| home.join(".local")));
    prefixes.retain(|prefix| prefix.is_absolute());
    let mut sites = Vec::new();
    for prefix in prefixes {
        for lib in ["lib", "lib64", "local/lib"] {
            for python in pythons(&prefix.join(lib)) {
                for packages in ["site-packages", "dist-packages"] {
                    let site = python.join(packages);
                    if site.is_dir() && !sites.contains(&site) {
                        sites.push(site);
                    }
                }
            }
        }
    }
    sites
}

/// `python3*` below a library directory, the newest first.
fn pythons(lib: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(lib).into_iter().flatten().flatten().map(|e| e.path());
    let minor = |path: &PathBuf| {
        let name = path.file_name()?.to_str()?.strip_prefix("python3")?.to_owned();
        match name.strip_prefix('.') {
            Some(minor) => minor.trim_end_matches('t').parse::<u32>().ok(),
            None => name.is_empty().then_some(0),
        }
    };
    let mut found: Vec<(u32, PathBuf)> =
        entries.filter_map(|path| Some((minor(&path)?, path))).collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests;
