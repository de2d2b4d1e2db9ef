//! The disk cache of compiled kernels.

use std::path::PathBuf;
use std::sync::Mutex;

use super::nvrtc::{Report, compile};
use super::variant::Variant;
use crate::context::Arch;
use crate::error::Result;

/// Where compiled kernels are kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CacheOptions {
    /// The directory; by default `SWIGLU_CACHE_DIR`, else `swiglu` in the user's cache directory.
    pub dir: Option<PathBuf>,
    /// A directory that is looked in first and never written; by default
    /// `SWIGLU_CACHE_READ_ONLY_DIR`.
    pub read_only_dir: Option<PathBuf>,
    /// Keep nothing and look nowhere.
    pub disabled: bool,
}

/// Something that kept a compiled kernel from being cached.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheWarning {
    /// The file or directory.
    pub path: PathBuf,
    /// What happened.
    pub what: String,
}

/// Where a module came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Compiled now.
    Compiled,
}

/// A module and where it came from.
#[derive(Debug, Clone)]
pub struct Module {
    /// The code.
    pub cubin: Vec<u8>,
    /// What the compiler said.
    pub report: Report,
    /// Where it came from.
    pub origin: Origin,
}

/// Keeps compiled kernels.
#[derive(Debug)]
pub struct KernelCache {
    warnings: Mutex<Vec<CacheWarning>>,
}

impl KernelCache {
    /// A cache.
    pub fn new(_options: &CacheOptions) -> Self {
        Self { warnings: Mutex::default() }
    }

    /// The module of a variant.
    ///
    /// # Errors
    /// As [`compile`].
    pub fn module(&self, variant: &Variant, arch: Arch) -> Result<Module> {
        let compiled = compile(variant, arch)?;
        Ok(Module { cubin: compiled.cubin, report: compiled.report, origin: Origin::Compiled })
    }

    /// What went wrong so far.
    pub fn warnings(&self) -> Vec<CacheWarning> {
        self.warnings.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}
