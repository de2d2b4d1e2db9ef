//! A device, its streams, memory and compiled kernels. Nothing here knows what a gated linear unit is.

pub(crate) mod arch;
pub(crate) mod context;
pub(crate) mod driver;
pub(crate) mod error;
pub(crate) mod files;
pub(crate) mod idle;
pub mod jit;
pub(crate) mod launch;
pub mod library;
pub(crate) mod lt;
pub(crate) mod memory;
pub(crate) mod remembered;
pub(crate) mod stream;
pub(crate) mod workspace;
