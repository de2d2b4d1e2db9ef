//! A device, its streams, memory and compiled kernels. Nothing here knows what a gated linear unit is.

pub(crate) mod arch;
pub(crate) mod context;
pub(crate) mod cuda;
pub(crate) mod digest;
pub(crate) mod driver;
pub(crate) mod error;
pub(crate) mod facts;
pub(crate) mod files;
pub(crate) mod fork;
pub(crate) mod graph;
pub mod jit;
pub(crate) mod launch;
pub(crate) mod leftovers;
pub mod library;
pub(crate) mod loading;
pub(crate) mod lt;
pub(crate) mod memory;
pub(crate) mod raw_event;
pub(crate) mod raw_stream;
pub(crate) mod remembered;
pub(crate) mod stream;
pub(crate) mod sys;
pub(crate) mod workspace;
