//! CUDA backend: kernels in CUDA C++ that are part of this crate, compiled by NVRTC for the device
//! that is there, kept in a disk cache, and launched through the driver.
//!
//! Building needs no CUDA. Libraries are looked for when a [`Cuda`] is made or a kernel compiled;
//! what is missing is a typed error ([`CudaError`]) that lists where it was looked for.

pub mod ceilings;
mod context;
mod driver;
mod error;
pub mod jit;
pub mod kernels;
mod launch;
pub mod library;
mod lt;
mod memory;
mod stream;
mod workspace;

pub use context::{Arch, Cuda, CudaOptions, DeviceFacts};
pub use error::{CudaError, Result};
pub use lt::cublaslt_version;
pub use memory::{DeviceBuffer, DeviceData, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
pub use stream::{Event, Graph, Stream};
