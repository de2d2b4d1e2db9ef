//! The disk cache of compiled kernels.
//!
//! A file's name is the identity of what is in it: every source that reaches the compiler, every
//! option, the architecture and the compiler's version. So an entry is never stale; one that does
//! not verify is ignored, removed and made again. Files appear whole, by rename, and one process
//! compiles while others that want the same module wait for it. Nothing about the cache is ever an
//! error: what cannot be kept is compiled again, and [`KernelCache::warnings`] says why.
//!
//! The directory is not bounded. A module has about 50 kB, and a program leaves one for each kind of
//! layer it runs; all variants of an architecture, as `swiglu kernels build` makes them, are about
//! 45 MB. Another version of this program leaves other entries. It may be deleted at any time.
//! Whoever may write to it decides what runs on the device: it belongs to the user, and a shared one
//! is best read-only.

mod entry;
mod identity;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use serde::Serialize;

use super::nvrtc::{self, Compiled, Report, Version};
use super::variant::Variant;
use crate::device::arch::Arch;
use crate::device::error::Result;
use crate::device::files::{self, Environment, named_by, users_directory};
use identity::Identity;

/// Where compiled kernels are kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CacheOptions {
    /// The directory; by default `SWIGLU_CACHE_DIR`, else `swiglu` in `XDG_CACHE_HOME`, else
    /// `~/.cache/swiglu`.
    pub dir: Option<PathBuf>,
    /// A directory that is looked in first and never written, as `swiglu kernels build` makes it;
    /// by default `SWIGLU_CACHE_READ_ONLY_DIR`. With it a machine needs no compiler, and one that
    /// it has need not be of the same version.
    pub read_only_dir: Option<PathBuf>,
    /// Look nowhere and keep nothing: every process compiles.
    pub disabled: bool,
}

/// Something that kept a compiled kernel from being read or kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CacheWarning {
    /// The file or directory.
    pub path: PathBuf,
    /// What happened.
    pub what: String,
}

/// Where a module came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// It was compiled now.
    Compiled,
    /// It was read from the cache.
    Cache,
    /// It was read from the read-only directory.
    ReadOnly,
}

/// A module and where it came from.
#[derive(Debug, Clone)]
pub struct Module {
    /// The code for one architecture, as the driver loads it.
    pub cubin: Vec<u8>,
    /// What the compiler said when it was made.
    pub report: Report,
    /// Where it came from.
    pub origin: Origin,
}

impl Module {
    fn compiled(compiled: Compiled) -> Self {
        Self { cubin: compiled.cubin, report: compiled.report, origin: Origin::Compiled }
    }
}

/// More warnings than this say nothing new.
const MAX_WARNINGS: usize = 32;
/// How long to wait for another process that compiles the same module. Compiling takes a second or
/// so; whoever takes longer is stopped or stuck.
const PATIENCE: Duration = Duration::from_secs(30);
/// Larger files are none of ours.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Of all that a module is compiled from but the compiler: 16 hexadecimal digits of the digest that entries
/// are named by.
pub(crate) fn digest(variant: &Variant, arch: Arch) -> String {
    Identity::of(variant, arch).short()
}

/// Keeps compiled kernels on disk.
#[derive(Debug)]
pub struct KernelCache {
    read_only: Option<PathBuf>,
    dir: Option<PathBuf>,
    warnings: Mutex<Vec<CacheWarning>>,
    patience: Duration,
}

impl KernelCache {
    /// A cache in the directories of `options`, with those of the environment where they are not
    /// given. Nothing is read or written yet.
    pub fn new(options: &CacheOptions) -> Self {
        Self::resolve(options, &|name| std::env::var_os(name))
    }

    /// A cache in one directory, whatever the environment says.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self::in_dirs(None, Some(dir.into()))
    }

    fn in_dirs(read_only: Option<PathBuf>, dir: Option<PathBuf>) -> Self {
        Self { read_only, dir, warnings: Mutex::default(), patience: PATIENCE }
    }

    fn resolve(options: &CacheOptions, env: Environment<'_>) -> Self {
        if options.disabled {
            return Self::in_dirs(None, None);
        }
        let given = options.dir.clone().or_else(|| named_by(env, "SWIGLU_CACHE_DIR"));
        let dir = given.or_else(|| users_directory(env, "XDG_CACHE_HOME", ".cache", "swiglu"));
        let read_only = options.read_only_dir.clone();
        let read_only = read_only.or_else(|| named_by(env, "SWIGLU_CACHE_READ_ONLY_DIR"));
        let cache = Self::in_dirs(read_only, dir);
        if let Some(missing) = cache.read_only.as_deref().filter(|dir| !dir.is_dir()) {
            cache.warn(missing, "there is no such directory to read kernels from");
        }
        if cache.dir.is_none() {
            cache.warn(Path::new("~"), "there is no home directory to keep kernels in");
        }
        cache
    }

    /// Whether kernels were kept here before, by whatever program.
    pub(crate) fn has_kernels(&self) -> bool {
        let has =
            |dir: &Path| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
        self.directories().into_iter().flatten().any(has)
    }

    /// The directory that is only read and the one that kernels are kept in, where there are such.
    pub fn directories(&self) -> [Option<&Path>; 2] {
        [self.read_only.as_deref(), self.dir.as_deref()]
    }

    /// Whether there is a file that [`Self::module`] would read: of this compiler, or of any where there is none. It is not
    /// verified.
    pub fn has(&self, variant: &Variant, arch: Arch) -> bool {
        let identity = Identity::of(variant, arch);
        let there = |dir: &Path| match nvrtc::version() {
            Ok(version) => dir.join(identity.file_name(version)).is_file(),
            Err(_) => !versions_in(dir, &identity).is_empty(),
        };
        self.directories().into_iter().flatten().any(there)
    }

    /// The module of a variant: from the read-only directory, from the cache, or compiled and kept.
    ///
    /// # Errors
    /// As [`super::compile`], where it must be compiled.
    pub fn module(&self, variant: &Variant, arch: Arch) -> Result<Module> {
        let identity = Identity::of(variant, arch);
        let version = match nvrtc::version() {
            Ok(version) => version,
            Err(missing) => return self.find(&identity, None).ok_or(missing),
        };
        if let Some(module) = self.find(&identity, Some(version)) {
            return Ok(module);
        }
        let Some(dir) = &self.dir else {
            return nvrtc::compile(variant, arch).map(Module::compiled);
        };
        // Whoever waited finds what the other one made.
        let _lock = self.lock(dir, &identity.file_name(version));
        if let Some(module) = self.read(dir, &identity, version, Origin::Cache) {
            return Ok(module);
        }
        self.compile(variant, arch, &identity)
    }

    /// Compiles a variant again and replaces what is kept of it: the driver refused that.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub(crate) fn rebuild(&self, variant: &Variant, arch: Arch) -> Result<Module> {
        self.compile(variant, arch, &Identity::of(variant, arch))
    }

    /// What went wrong so far.
    pub fn warnings(&self) -> Vec<CacheWarning> {
        self.lock_warnings().clone()
    }

    fn compile(&self, variant: &Variant, arch: Arch, identity: &Identity) -> Result<Module> {
        let compiled = nvrtc::compile(variant, arch)?;
        if let Some(dir) = &self.dir {
            self.keep(dir, identity, &compiled);
        }
        Ok(Module::compiled(compiled))
    }

    /// An entry for this compiler, or for none: then any that was made from the same sources will
    /// do. So it is in the read-only directory, whose compiler was chosen by whoever filled it.
    fn find(&self, identity: &Identity, version: Option<Version>) -> Option<Module> {
        let read = |dir: &Option<PathBuf>, version, origin| {
            self.read(dir.as_ref()?, identity, version, origin)
        };
        let any = |dir: &Option<PathBuf>, origin| self.find_any(dir.as_ref()?, identity, origin);
        let exact = version.and_then(|version| read(&self.read_only, version, Origin::ReadOnly));
        exact.or_else(|| any(&self.read_only, Origin::ReadOnly)).or_else(|| match version {
            Some(version) => read(&self.dir, version, Origin::Cache),
            None => any(&self.dir, Origin::Cache),
        })
    }

    /// An entry of any compiler, the newest first.
    fn find_any(&self, dir: &Path, identity: &Identity, origin: Origin) -> Option<Module> {
        versions_in(dir, identity)
            .into_iter()
            .find_map(|version| self.read(dir, identity, version, origin))
    }

    /// A verified entry, or nothing; one that does not verify is removed where it is ours.
    fn read(
        &self,
        dir: &Path,
        identity: &Identity,
        version: Version,
        origin: Origin,
    ) -> Option<Module> {
        let path = dir.join(identity.file_name(version));
        let outcome = files::read(&path, MAX_FILE_BYTES).and_then(|bytes| match bytes {
            Some(bytes) => entry::decode(&bytes, &identity.key(version)).map(Some),
            None => Ok(None),
        });
        match outcome {
            Ok(entry) => entry.map(|(report, cubin)| Module { cubin, report, origin }),
            Err(why) => {
                self.warn(&path, &why);
                if origin == Origin::Cache {
                    // Where this fails the entry is replaced by rename, or is warned about again.
                    let _ = fs::remove_file(&path);
                }
                None
            }
        }
    }

    fn keep(&self, dir: &Path, identity: &Identity, compiled: &Compiled) {
        let version = compiled.report.nvrtc;
        let path = dir.join(identity.file_name(version));
        let bytes = entry::encode(&identity.key(version), &compiled.report, &compiled.cubin);
        let outcome = match bytes {
            Ok(bytes) => files::write_whole(dir, &path, &bytes).map_err(|e| e.to_string()),
            Err(why) => Err(why),
        };
        if let Err(why) = outcome {
            self.warn(&path, &format!("not kept: {why}"));
        }
    }

    /// Takes the lock of an entry. Without one, two processes may compile the same module: that
    /// costs time and nothing else.
    fn lock(&self, dir: &Path, name: &str) -> Option<File> {
        let path = dir.join(format!("{name}.lock"));
        match files::lock(&path, self.patience) {
            Ok(lock) => Some(lock),
            Err(why) => {
                self.warn(&path, &format!("{why}; compiling without the lock"));
                None
            }
        }
    }

    fn warn(&self, path: &Path, what: &str) {
        let mut warnings = self.lock_warnings();
        let known = warnings.iter().any(|w| w.path == path && w.what == what);
        if !known && warnings.len() < MAX_WARNINGS {
            warnings.push(CacheWarning { path: path.to_owned(), what: what.to_owned() });
        }
    }

    fn lock_warnings(&self) -> MutexGuard<'_, Vec<CacheWarning>> {
        self.warnings.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The compilers of a module's entries, the newest first.
fn versions_in(dir: &Path, identity: &Identity) -> Vec<Version> {
    let names = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut versions: Vec<Version> =
        names.filter_map(|name| identity.version_in(name.to_str()?)).collect();
    versions.sort_by(|a, b| b.cmp(a));
    versions
}

#[cfg(test)]
mod tests;
