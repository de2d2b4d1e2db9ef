//! CUDA backend: kernels in CUDA C++ that are part of this crate, compiled by NVRTC for the device
//! that is there, kept in a disk cache, and launched through the driver.
//!
//! Building needs no CUDA. Libraries are looked for when a [`Cuda`] is made or a kernel compiled;
//! what is missing is a typed error ([`CudaError`]) that lists where it was looked for.

mod activation;
mod arch;
pub mod ceilings;
mod conformance;
mod context;
mod driver;
mod error;
mod files;
mod idle;
pub mod jit;
pub mod kernels;
mod launch;
mod layers;
pub mod library;
mod lt;
mod memory;
mod remembered;
mod stream;
pub mod tuning;
mod workspace;

pub use activation::{DeviceGateUp, DeviceGateUpMut};
pub use arch::Arch;
pub use conformance::CudaBackend;
pub use context::{Cuda, CudaOptions, DeviceFacts};
pub use error::{CudaError, Result};
pub use kernels::decode_mlp::Design as DecodeDesign;
pub use layers::{
    Candidate, GatedLinear, Mlp, QuantizedMlp, Way, expect_numerics, expect_quantized,
    expect_row_steps, quantized_tokens, quantized_types,
};
pub use lt::cublaslt_version;
pub use memory::{DeviceBuffer, DeviceData, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
pub use stream::{Event, Graph, Stream};

// Tests inside and outside of this crate open their device in the same way.
#[cfg(test)]
extern crate self as swiglu_cuda;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
