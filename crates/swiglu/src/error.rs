//! One error type over the crates below.

/// Why a call was refused: by the types and kernels, or by a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, element type, name, value or device that does not fit.
    #[error(transparent)]
    Core(#[from] swiglu_core::Error),
    /// A file that could not be read as what it was given for, or could not be written.
    #[error(transparent)]
    Format(#[from] swiglu_formats::FormatError),
}

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
