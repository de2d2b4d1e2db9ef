//! One error type over the crates below.

/// Why a call was refused: by the types and kernels, by a file, or by a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, element type, name, value or device that does not fit.
    #[error(transparent)]
    Core(#[from] swiglu_core::Error),
    /// A file that could not be read as what it was given for, or could not be written.
    #[error(transparent)]
    Format(#[from] swiglu_formats::FormatError),
    /// CUDA: a library, a device or a kernel.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(swiglu_cuda::CudaError),
}

#[cfg(feature = "cuda")]
impl From<swiglu_cuda::CudaError> for Error {
    /// What every backend reports in the same way stays [`Error::Core`].
    fn from(error: swiglu_cuda::CudaError) -> Self {
        match error {
            swiglu_cuda::CudaError::Core(error) => Error::Core(error),
            error => Error::Cuda(error),
        }
    }
}

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
