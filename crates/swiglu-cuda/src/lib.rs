//! CUDA backend: kernels in CUDA C++ that are part of this crate, compiled by NVRTC for the device
//! that is there, kept in a disk cache, and launched through the driver.
//!
//! Building needs no CUDA. Libraries are looked for when a [`Cuda`] is made or a kernel compiled;
//! what is missing is a typed error ([`CudaError`]) that lists where it was looked for.

mod calibrate;
pub mod ceilings;
mod conformance;
mod device;
pub mod kernels;
mod layers;
mod plan;

pub use conformance::CudaBackend;
pub use device::arch::Arch;
pub use device::cuda::Cuda;
pub use device::error::{CudaError, Result};
pub use device::facts::DeviceFacts;
pub use device::graph::{CapturedCall, Graph};
pub use device::leftovers::release_unused;
pub use device::loading::WithoutLoading;
pub use device::lt::cublaslt_version;
pub use device::memory::{
    DeviceBuffer, DeviceData, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef, PinnedMatrix,
};
pub use device::stream::{BorrowedStream, Event, Stream};
pub use device::workspace::DeviceScratch;
pub use device::{jit, library};
pub use kernels::decode_mlp::Design as DecodeDesign;
pub use layers::{
    DeviceGateUp, DeviceGateUpMut, DeviceGatedLinearParams, DeviceGradientMut, DeviceGradientsMut,
    DeviceKept, DeviceKeptMut, DeviceMlpParams, GatedLinear, GatedLinearKind, HostSaved, Layer,
    Mlp, MlpKind, expect_quantized, quantized_tokens, quantized_types,
};
pub use plan::calibration::{Calibrated, Calibration, Rate};
pub use plan::{Candidate, CudaOptions, Target, Ways, tuning};

// Tests inside and outside of this crate open their device in the same way.
#[cfg(test)]
extern crate self as swiglu_cuda;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
