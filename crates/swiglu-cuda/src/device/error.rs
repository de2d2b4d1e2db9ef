//! What can go wrong between the host and a device.

use crate::device::library::Library;

/// Why a CUDA operation was refused or failed. Every variant carries the values a caller needs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library that is loaded at run time is not on this machine.
    #[error("{library} was not found; {hint}. Looked in: {}", looked_in.join(", "))]
    LibraryMissing {
        /// The library.
        library: Library,
        /// Every place it was looked for, in order, with the loader's reason where it gave one.
        looked_in: Vec<String>,
        /// What to install or set.
        hint: &'static str,
    },
    /// A library was found but is too old: it lacks a function that is called.
    #[error("{library} at {path} has no `{symbol}`: it is too old; {hint}")]
    SymbolMissing {
        /// The library.
        library: Library,
        /// Where it was loaded from.
        path: String,
        /// The function it lacks.
        symbol: &'static str,
        /// What to install.
        hint: &'static str,
    },
    /// The driver is there but drives no device that this process may see.
    #[error("the NVIDIA driver reports no CUDA device (is CUDA_VISIBLE_DEVICES empty?)")]
    NoDevice,
    /// A device index outside the devices that are there.
    #[error("CUDA device {given} does not exist: this process sees {count}, counted from 0")]
    DeviceIndex {
        /// The index asked for.
        given: usize,
        /// How many devices there are.
        count: usize,
    },
    /// The driver refused a call.
    #[error("{call} failed with {name} ({code}): {description}")]
    Driver {
        /// The function called.
        call: &'static str,
        /// The driver's number for it.
        code: i32,
        /// The driver's name for it, for example `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
        /// The driver's sentence for it.
        description: String,
    },
    /// The device has too little free memory.
    #[error("no device memory for {bytes} bytes: {free} of {total} bytes are free")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes free when it failed.
        free: usize,
        /// Bytes the device has.
        total: usize,
    },
    /// NVRTC refused a kernel.
    #[error("{file} does not compile for {arch}: {log}")]
    Compile {
        /// The device file, with its defines.
        file: String,
        /// The architecture, for example `sm_90a`.
        arch: String,
        /// NVRTC's log.
        log: String,
    },
    /// The driver refuses code that the compiler made.
    #[error(
        "{file} for {arch}: the driver (CUDA {}.{}) does not load what compiler {}.{} made: {why}; \
         update the driver, or put an older libnvrtc first with SWIGLU_CUDA_LIBRARY_PATH",
        driver.0, driver.1, compiler.0, compiler.1
    )]
    Load {
        /// The device file, with its defines.
        file: String,
        /// The architecture.
        arch: String,
        /// The compiler's version.
        compiler: (u32, u32),
        /// The CUDA version of the driver.
        driver: (u32, u32),
        /// The driver's reason.
        why: String,
    },
    /// An argument lives on another device than the one that computes, or on none.
    #[error("{what}: expected memory of {expected}, given {given}")]
    WrongDevice {
        /// The argument.
        what: String,
        /// Where it should be, for example `device 0`.
        expected: String,
        /// Where it is, for example `device 1` or `host memory`.
        given: String,
    },
    /// Foreign memory ends before the matrix that was said to lie in it.
    #[error(
        "{what}: {needed} bytes from {ptr:#x} do not fit: the allocation has {available} bytes from there"
    )]
    OutsideAllocation {
        /// The argument.
        what: String,
        /// The first address.
        ptr: u64,
        /// Bytes the matrix spans.
        needed: u64,
        /// Bytes the allocation has from that address on.
        available: u64,
    },
    /// An address that is not a multiple of what its elements need.
    #[error("{what}: address {ptr:#x} is not a multiple of {required} bytes")]
    Misaligned {
        /// The argument.
        what: String,
        /// The address.
        ptr: u64,
        /// The alignment that is needed.
        required: usize,
    },
    /// Something that a stream in capture cannot record.
    #[error("{what} is not possible while the stream is captured into a graph: {hint}")]
    Capture {
        /// What was attempted.
        what: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// The process was forked off one that had used CUDA.
    #[error(
        "CUDA cannot be used in a process forked off one that has used it; start workers with \
         `spawn` or `forkserver`, or open the device after the fork"
    )]
    Forked,
    /// A launch that does not match its kernel.
    #[error("kernel `{kernel}`: {what}: expected {expected}, given {given}")]
    Launch {
        /// The entry point.
        kernel: &'static str,
        /// What does not match.
        what: &'static str,
        /// What would.
        expected: String,
        /// What was given.
        given: String,
    },
    /// A device or a combination that this backend has no kernels for.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// The reason.
        why: String,
    },
    /// Shapes, strides and names, as on every backend.
    #[error(transparent)]
    Core(#[from] swiglu_core::Error),
}

impl CudaError {
    /// The argument, library, kernel or call in question.
    pub fn what(&self) -> Option<&str> {
        match self {
            CudaError::WrongDevice { what, .. }
            | CudaError::OutsideAllocation { what, .. }
            | CudaError::Misaligned { what, .. }
            | CudaError::Capture { what, .. }
            | CudaError::Unsupported { what, .. } => Some(what),
            CudaError::Compile { file, .. } | CudaError::Load { file, .. } => Some(file),
            CudaError::Launch { kernel: what, .. } | CudaError::Driver { call: what, .. } => {
                Some(what)
            }
            CudaError::SymbolMissing { symbol, .. } => Some(symbol),
            CudaError::Core(error) => error.what(),
            CudaError::LibraryMissing { .. }
            | CudaError::NoDevice
            | CudaError::DeviceIndex { .. }
            | CudaError::OutOfMemory { .. }
            | CudaError::Forked => None,
        }
    }

    /// What was given and what was expected, where there are both.
    pub fn given_and_expected(&self) -> Option<[String; 2]> {
        match self {
            CudaError::DeviceIndex { given, count } => {
                Some([given.to_string(), format!("below {count}")])
            }
            CudaError::OutOfMemory { bytes, free, .. } => {
                Some([format!("{bytes} bytes"), format!("at most {free} bytes")])
            }
            CudaError::WrongDevice { given, expected, .. }
            | CudaError::Launch { given, expected, .. } => Some([given.clone(), expected.clone()]),
            CudaError::OutsideAllocation { needed, available, .. } => {
                Some([format!("{needed} bytes"), format!("at most {available} bytes")])
            }
            CudaError::Misaligned { ptr, required, .. } => {
                Some([format!("{ptr:#x}"), format!("a multiple of {required} bytes")])
            }
            CudaError::Core(error) => error.given_and_expected(),
            _ => None,
        }
    }
}

/// Result with [`CudaError`].
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

impl From<CudaError> for swiglu_core::Error {
    /// What this machine lacks is `Unavailable`, what nothing supports is `Unsupported`.
    fn from(error: CudaError) -> Self {
        let why = error.to_string();
        match error {
            CudaError::Core(inner) => inner,
            CudaError::Unsupported { what, why } => swiglu_core::Error::Unsupported { what, why },
            CudaError::WrongDevice { what, .. }
            | CudaError::OutsideAllocation { what, .. }
            | CudaError::Misaligned { what, .. }
            | CudaError::Capture { what, .. } => swiglu_core::Error::Unsupported { what, why },
            CudaError::Launch { kernel, .. } => {
                swiglu_core::Error::Unsupported { what: format!("kernel `{kernel}`"), why }
            }
            CudaError::OutOfMemory { bytes, .. } => swiglu_core::Error::OutOfMemory {
                what: format!("{bytes} bytes on the device"),
                why,
            },
            CudaError::Compile { file, .. } | CudaError::Load { file, .. } => {
                swiglu_core::Error::Unavailable { what: format!("kernel {file}"), why }
            }
            CudaError::LibraryMissing { .. }
            | CudaError::SymbolMissing { .. }
            | CudaError::NoDevice
            | CudaError::Forked
            | CudaError::DeviceIndex { .. }
            | CudaError::Driver { .. } => {
                swiglu_core::Error::Unavailable { what: "CUDA".into(), why }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_and_request_stay_apart() {
        let missing: swiglu_core::Error = CudaError::NoDevice.into();
        assert!(matches!(missing, swiglu_core::Error::Unavailable { .. }), "{missing}");
        let refused: swiglu_core::Error =
            CudaError::Unsupported { what: "sm_75".into(), why: "no bf16".into() }.into();
        assert!(matches!(refused, swiglu_core::Error::Unsupported { .. }), "{refused}");
        let shape = swiglu_core::Error::shape("x", [1, 2], [2, 1]);
        assert_eq!(swiglu_core::Error::from(CudaError::Core(shape.clone())), shape);
    }
}
