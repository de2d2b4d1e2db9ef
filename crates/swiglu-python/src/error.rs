//! Errors of the library as Python's exceptions.

use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use swiglu::{CoreError, Error, ErrorKind, cuda::CudaError};

create_exception!(swiglu, SwigluError, PyRuntimeError, "A call was refused or failed: see `kind`.");
create_exception!(swiglu, ShapeError, PyValueError, "Shapes that do not agree; both are named.");

/// Why a function of this module failed.
pub(crate) enum Failure {
    /// An argument of another type than Python's caller should give.
    Python(PyErr),
    /// What the library refused.
    Library(Error),
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl From<CoreError> for Failure {
    fn from(error: CoreError) -> Self {
        Self::Library(error.into())
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self::Library(error.into())
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) => error,
            Failure::Library(error) => Python::attach(|py| exception(py, &error)),
        }
    }
}

/// Functions that set the library's options, and the arguments of Python's `swiglu.load` that do. One that begins like another
/// comes behind it.
const ARGUMENTS: [(&str, &str); 23] = [
    ("LoadOptions::with_beside_experts", "beside_experts=True"),
    ("LoadOptions::with_expert", "expert"),
    ("LoadOptions::with_orientation", "orientation"),
    ("LoadOptions::with_arrangement", "arrangement"),
    ("LoadOptions::with_prefix", "prefix"),
    ("LoadOptions::with_ignored", "ignore"),
    ("LoadOptions::without_config", "config=False"),
    ("LoadOptions::with_rescale", "rescale"),
    ("LoadOptions::with_plain_fp8", "plain_fp8=True"),
    ("TensorNames::with_gate_up_bias", "names[\"gate_up_bias\"]"),
    ("TensorNames::with_gate_up", "names[\"gate_up\"]"),
    ("TensorNames::with_gate_bias", "names[\"gate_bias\"]"),
    ("TensorNames::with_gate", "names[\"gate\"]"),
    ("TensorNames::with_up_bias", "names[\"up_bias\"]"),
    ("TensorNames::with_up", "names[\"up\"]"),
    ("TensorNames::with_down_bias", "names[\"down_bias\"]"),
    ("TensorNames::with_down", "names[\"down\"]"),
    ("Weights::activation", "activation"),
    ("Weights::decoded", "decoded=True"),
    ("Device::cpu", "device=\"cpu\""),
    ("CpuOptions::with_threads", "os.sched_setaffinity"),
    ("Mlp::load", "kind=\"mlp\""),
    ("GatedLinear::load", "kind=\"gated_linear\""),
];

/// A message of the library in Python's words: `LoadOptions::with_ignored(KEY)` is `ignore=["KEY"]`, in backticks.
fn in_python(message: &str) -> String {
    swiglu::in_words_of(message, &ARGUMENTS, |argument, value| match value {
        Some(value) => format!("`{argument}=[{value:?}]`"),
        None => format!("`{argument}`"),
    })
}

/// The exception, with the error's kind and values as attributes.
fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let text = in_python(&error.to_string());
    let exception = match error.kind() {
        ErrorKind::Shape => ShapeError::new_err(text),
        ErrorKind::Capture => SwigluError::new_err(format!(
            "{text}; for the calls of a module swiglu.torch.warmup(module, tokens=[...]) does that"
        )),
        ErrorKind::NotFinite => {
            SwigluError::new_err(format!("{text}; allow_non_finite=True computes with others"))
        }
        _ => SwigluError::new_err(text),
    };
    let value = exception.value(py);
    let values = [
        ("kind", Some(name(error.kind()).to_owned())),
        ("what", error.what().map(str::to_owned)),
        ("given", error.given()),
        ("expected", error.expected()),
    ];
    for (attribute, text) in values {
        if let Err(failed) = value.setattr(attribute, text.as_deref().map(in_python)) {
            return failed;
        }
    }
    exception
}

fn name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Shape => "shape",
        ErrorKind::DType => "dtype",
        ErrorKind::Layout => "layout",
        ErrorKind::Argument => "argument",
        ErrorKind::Undecided => "undecided",
        ErrorKind::NotFinite => "not_finite",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Io => "io",
        ErrorKind::Format => "format",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::OutOfMemory => "out_of_memory",
        ErrorKind::Capture => "capture",
        ErrorKind::Driver => "driver",
        // Internal, and what is newer than this list.
        _ => "internal",
    }
}
