//! Device code to CUBIN: variants, the compiler, and the cache that keeps its results.

pub mod cache;
mod log;
mod nvrtc;
mod source;
pub mod variant;

pub use log::{CompileLog, EntryLog};
pub use nvrtc::{Compiled, Report, Version, compile, version};
pub(crate) use source::sources_of;
pub(crate) use variant::kernel_file;
pub use variant::{Define, KernelFile, Value, Variant, define};
