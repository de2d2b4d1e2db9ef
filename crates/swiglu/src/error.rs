//! One error type over the crates below.

use std::error::Error as StdError;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use swiglu_core::Error as CoreError;
#[cfg(feature = "cuda")]
use swiglu_cuda::CudaError;
use swiglu_formats::FormatError;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a program can decide by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Extents that do not agree, or are beyond the address space.
    Shape,
    /// Elements of another type than the layer has.
    DType,
    /// Memory that the matrix said to be in it does not fit: its stride, its end, its alignment, its device.
    Layout,
    /// A value outside its domain, or a name that is not known.
    Argument,
    /// Something that can be read in more than one way, or is not understood: an option decides.
    Undecided,
    /// A value that is no finite number.
    NotFinite,
    /// A file, tensor, layer or expert that is not there.
    NotFound,
    /// The operating system refused to read or write a file.
    Io,
    /// A file that breaks the rules of its format, or is none of a known one.
    Format,
    /// Valid, and computed nowhere or not by this device.
    Unsupported,
    /// Valid, and this machine or build lacks what it takes: a device, a library, an instruction set, threads.
    Unavailable,
    /// Too little memory of the host or of a device: less at a time may go.
    OutOfMemory,
    /// Not possible while a stream is captured into a graph.
    Capture,
    /// The driver refused a call. What ran on the device before may be what failed: results since the last wait are in doubt.
    Driver,
    /// A fault of this library: a kernel that does not compile or is launched wrongly.
    Internal,
}

/// Why a call was refused or failed: a [kind](Self::kind) to decide by, the values, and a text with all of them that says what
/// was given, what was expected and, where it is not obvious, what to do.
///
/// A clone is as cheap as a pointer, so that one failure can be told to every request of a batch.
///
/// ```
/// use swiglu::{Device, ErrorKind, Matrix, Mlp};
///
/// let mlp = Mlp::load(swiglu_fixtures::STORIES15M_FILE, 0)?.to(&Device::cpu()?)?;
/// let error = mlp.forward(&Matrix::<f32>::zeros(3, 287)?).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Shape);
/// assert_eq!((error.what(), error.given()), (Some("x"), Some("[3, 287]".into())));
/// assert_eq!(error.to_string(), "x: expected [3, 288], given [3, 287]");
/// # Ok::<(), swiglu::Error>(())
/// ```
#[derive(Clone)]
pub struct Error(Arc<Cause>);

/// The crate that it came from. What each reports in the same way is always [`Cause::Core`].
enum Cause {
    Core(CoreError),
    Format(FormatError),
    #[cfg(feature = "cuda")]
    Cuda(CudaError),
}

impl Error {
    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        match &*self.0 {
            Cause::Core(error) => kind_of_core(error),
            Cause::Format(error) => kind_of_format(error),
            #[cfg(feature = "cuda")]
            Cause::Cuda(error) => kind_of_cuda(error),
        }
    }

    /// The argument, tensor, option or device in question, where there is one.
    pub fn what(&self) -> Option<&str> {
        match &*self.0 {
            Cause::Core(error) => error.what(),
            Cause::Format(error) => error.what(),
            #[cfg(feature = "cuda")]
            Cause::Cuda(error) => error.what(),
        }
    }

    /// What was given, where it was refused for another thing that was expected.
    pub fn given(&self) -> Option<String> {
        self.values().map(|[given, _]| given)
    }

    /// What was expected instead of [`Self::given`].
    pub fn expected(&self) -> Option<String> {
        self.values().map(|[_, expected]| expected)
    }

    fn values(&self) -> Option<[String; 2]> {
        match &*self.0 {
            Cause::Core(error) => error.given_and_expected(),
            Cause::Format(error) => error.given_and_expected(),
            #[cfg(feature = "cuda")]
            Cause::Cuda(error) => error.given_and_expected(),
        }
    }

    /// The file in question, where there is one; `<memory>` for data that came as bytes.
    pub fn path(&self) -> Option<&Path> {
        self.format().and_then(FormatError::path)
    }

    /// All values, where it is one that every backend has.
    pub fn core(&self) -> Option<&CoreError> {
        match &*self.0 {
            Cause::Core(error) => Some(error),
            _ => None,
        }
    }

    /// All values, where it is a file's.
    pub fn format(&self) -> Option<&FormatError> {
        match &*self.0 {
            Cause::Format(error) => Some(error),
            _ => None,
        }
    }

    /// All values, where it is CUDA's.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Option<&CudaError> {
        match &*self.0 {
            Cause::Cuda(error) => Some(error),
            _ => None,
        }
    }
}

/// A message of these crates in the words of a program: each function of `names` that it mentions becomes what `said` makes of
/// the name beside it and of the value that the function is called with, where there is one. A function that begins like
/// another comes behind it.
#[doc(hidden)]
pub fn in_words_of(
    message: &str,
    names: &[(&str, &str)],
    said: impl Fn(&str, Option<&str>) -> String,
) -> String {
    names.iter().fold(message.to_owned(), |text, (function, name)| {
        let mut parts = text.split(function);
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            match part.strip_prefix('(').and_then(|call| call.split_once(')')) {
                Some((value, rest)) => out.extend([said(name, Some(value)).as_str(), rest]),
                None => out.extend([said(name, None).as_str(), part]),
            }
        }
        out
    })
}

fn kind_of_core(error: &CoreError) -> ErrorKind {
    match error {
        CoreError::Shape { .. } | CoreError::TooLarge { .. } => ErrorKind::Shape,
        CoreError::BufferTooShort { .. }
        | CoreError::OverlappingRows { .. }
        | CoreError::Misaligned { .. } => ErrorKind::Layout,
        CoreError::DType { .. } => ErrorKind::DType,
        CoreError::UnknownName { .. } | CoreError::OutOfRange { .. } => ErrorKind::Argument,
        CoreError::Ambiguous { .. } => ErrorKind::Undecided,
        CoreError::NonFinite { .. } => ErrorKind::NotFinite,
        CoreError::Unavailable { .. } => ErrorKind::Unavailable,
        CoreError::OutOfMemory { .. } => ErrorKind::OutOfMemory,
        CoreError::Unsupported { .. } => ErrorKind::Unsupported,
        // One that is newer than this list.
        _ => ErrorKind::Internal,
    }
}

fn kind_of_format(error: &FormatError) -> ErrorKind {
    use FormatError as E;
    match error {
        E::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            ErrorKind::NotFound
        }
        E::Io { .. } | E::AlreadyExists { .. } | E::NotAFile { .. } => ErrorKind::Io,
        E::UnknownFormat { .. }
        | E::Truncated { .. }
        | E::Malformed { .. }
        | E::Configuration { .. }
        | E::Contradicted { .. } => ErrorKind::Format,
        E::Recognised { .. }
        | E::UnsupportedDtype { .. }
        | E::Quantization { .. }
        | E::Ungated { .. }
        | E::NotComputed { .. } => ErrorKind::Unsupported,
        E::NoModel { .. }
        | E::MissingPart { .. }
        | E::TensorNotFound { .. }
        | E::LayerOutOfRange { .. }
        | E::NoLayer { .. }
        | E::IncompleteLayer { .. }
        | E::ExpertOutOfRange { .. } => ErrorKind::NotFound,
        E::TensorNotNamed { .. }
        | E::Ambiguous { .. }
        | E::NotUnderstood { .. }
        | E::Unused { .. }
        | E::UnknownActivation { .. } => ErrorKind::Undecided,
        E::Contradiction { .. } => ErrorKind::Argument,
        E::Shape { .. } => ErrorKind::Shape,
        E::Core(error) => kind_of_core(error),
        // One that is newer than this list.
        _ => ErrorKind::Internal,
    }
}

#[cfg(feature = "cuda")]
fn kind_of_cuda(error: &CudaError) -> ErrorKind {
    use CudaError as E;
    match error {
        E::LibraryMissing { .. }
        | E::SymbolMissing { .. }
        | E::NoDevice
        | E::DeviceIndex { .. }
        | E::Load { .. }
        | E::Forked => ErrorKind::Unavailable,
        E::Driver { .. } => ErrorKind::Driver,
        E::OutOfMemory { .. } => ErrorKind::OutOfMemory,
        E::WrongDevice { .. } | E::OutsideAllocation { .. } | E::Misaligned { .. } => {
            ErrorKind::Layout
        }
        E::Capture { .. } => ErrorKind::Capture,
        E::Unsupported { .. } => ErrorKind::Unsupported,
        E::Core(error) => kind_of_core(error),
        // Compilers and launches, and what is newer than this list.
        _ => ErrorKind::Internal,
    }
}

impl From<CoreError> for Error {
    fn from(error: CoreError) -> Self {
        Self(Arc::new(Cause::Core(error)))
    }
}

impl From<FormatError> for Error {
    /// What every crate reports in the same way is found by [`Error::core`].
    fn from(error: FormatError) -> Self {
        match error {
            FormatError::Core(error) => error.into(),
            error => Self(Arc::new(Cause::Format(error))),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<CudaError> for Error {
    /// What every crate reports in the same way is found by [`Error::core`].
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Core(error) => error.into(),
            error => Self(Arc::new(Cause::Cuda(error))),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Cause::Core(error) => error.fmt(f),
            Cause::Format(error) => error.fmt(f),
            #[cfg(feature = "cuda")]
            Cause::Cuda(error) => error.fmt(f),
        }
    }
}

impl fmt::Debug for Error {
    /// The kind and the text: what a program that ends with the error shows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.kind())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &*self.0 {
            Cause::Core(error) => error.source(),
            // The system's own, not what shares it.
            Cause::Format(FormatError::Io { source, .. }) => Some(&**source),
            Cause::Format(error) => error.source(),
            #[cfg(feature = "cuda")]
            Cause::Cuda(error) => error.source(),
        }
    }
}
