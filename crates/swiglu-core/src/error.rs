//! Errors that carry what was given and what was expected.

use crate::dtype::DType;

/// Why a request was refused. Every variant carries the values a caller needs to correct it; the
/// text says what was given, what was expected and, where it is not obvious, what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two shapes that must agree do not.
    #[error("{what}: expected {expected}, given {given}")]
    Shape {
        /// The argument or tensor in question.
        what: String,
        /// The shape that would have been right, for example `[73, 576]`.
        expected: String,
        /// The shape that was given.
        given: String,
    },
    /// A buffer is too short for its extent and stride.
    #[error(
        "{what}: {rows}×{cols} with row stride {row_stride} needs {needed} elements, the buffer has {given}"
    )]
    BufferTooShort {
        /// The argument in question.
        what: String,
        /// Rows of the view.
        rows: usize,
        /// Columns of the view.
        cols: usize,
        /// Elements between the starts of two rows.
        row_stride: usize,
        /// Elements the view spans.
        needed: usize,
        /// Elements the buffer has.
        given: usize,
    },
    /// Rows of an output overlap, so writes would race.
    #[error(
        "{what}: row stride {row_stride} is smaller than the {cols} columns written; outputs must not overlap"
    )]
    OverlappingRows {
        /// The argument in question.
        what: String,
        /// Columns of the view.
        cols: usize,
        /// Elements between the starts of two rows.
        row_stride: usize,
    },
    /// Bytes that do not begin where elements may.
    #[error(
        "{what}: the bytes begin at no multiple of {required}, as its elements must; copy them to where they do"
    )]
    Misaligned {
        /// The argument in question.
        what: String,
        /// The alignment of the elements.
        required: usize,
    },
    /// A product of extents does not fit the address space.
    #[error("{what}: {rows}×{cols} elements (row stride {row_stride}) exceed the address space")]
    TooLarge {
        /// The argument in question.
        what: String,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Row stride asked for.
        row_stride: usize,
    },
    /// A tensor has another element type than the layer computes in.
    #[error(
        "{what}: expected {expected} elements, given {given}; convert it or build the layer as {given}"
    )]
    DType {
        /// The argument in question.
        what: String,
        /// The element type the layer was built for.
        expected: DType,
        /// The element type that was given.
        given: DType,
    },
    /// A name that is not one of the known ones.
    #[error("unknown {what} `{given}`; choose one of: {choices}")]
    UnknownName {
        /// What was being named, for example `activation`.
        what: &'static str,
        /// The name given.
        given: String,
        /// The names that are known.
        choices: String,
    },
    /// A parameter is outside its domain.
    #[error("{what} = {given} is out of range: expected {expected}")]
    OutOfRange {
        /// The parameter in question.
        what: &'static str,
        /// Its value.
        given: String,
        /// The domain.
        expected: String,
    },
    /// Input that can be read in more than one way.
    #[error("{what} is ambiguous: {why}; say which: {choices}")]
    Ambiguous {
        /// What cannot be decided, for example `orientation of layers.0.w1`.
        what: String,
        /// Why it cannot be decided.
        why: String,
        /// The choices, as they can be given.
        choices: String,
    },
    /// A value that is not a finite number where one is required.
    #[error("{what}[{row}, {col}] is {value}: expected finite numbers")]
    NonFinite {
        /// The tensor in question.
        what: String,
        /// Row of the first such value.
        row: usize,
        /// Column of the first such value.
        col: usize,
        /// The value.
        value: f64,
    },
    /// The hardware or this build lacks something; the request itself was valid.
    #[error("{what} is not available here: {why}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// What is missing.
        why: String,
    },
    /// The system has no memory for something.
    #[error("no memory for {what}: {why}; make it smaller, or free what is not used")]
    OutOfMemory {
        /// What it was for, with its size.
        what: String,
        /// What the system says.
        why: String,
    },
    /// A combination that is valid nowhere or not supported by this backend.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// The combination.
        what: String,
        /// The reason.
        why: String,
    },
}

impl Error {
    /// A shape error from two `[rows, cols]` pairs.
    pub fn shape(what: impl Into<String>, expected: [usize; 2], given: [usize; 2]) -> Self {
        Error::Shape {
            what: what.into(),
            expected: format!("[{}, {}]", expected[0], expected[1]),
            given: format!("[{}, {}]", given[0], given[1]),
        }
    }

    /// The argument, tensor, parameter or combination in question.
    pub fn what(&self) -> Option<&str> {
        match self {
            Error::Shape { what, .. }
            | Error::BufferTooShort { what, .. }
            | Error::OverlappingRows { what, .. }
            | Error::Misaligned { what, .. }
            | Error::TooLarge { what, .. }
            | Error::DType { what, .. }
            | Error::Ambiguous { what, .. }
            | Error::NonFinite { what, .. }
            | Error::Unavailable { what, .. }
            | Error::OutOfMemory { what, .. }
            | Error::Unsupported { what, .. } => Some(what),
            Error::UnknownName { what, .. } | Error::OutOfRange { what, .. } => Some(what),
        }
    }

    /// What was given and what was expected, where there are both.
    pub fn given_and_expected(&self) -> Option<[String; 2]> {
        match self {
            Error::Shape { given, expected, .. }
            | Error::OutOfRange { given, expected, .. }
            | Error::UnknownName { given, choices: expected, .. } => {
                Some([given.clone(), expected.clone()])
            }
            Error::BufferTooShort { given, needed, .. } => {
                Some([format!("{given} elements"), format!("{needed} elements")])
            }
            Error::OverlappingRows { cols, row_stride, .. } => {
                Some([format!("row stride {row_stride}"), format!("row stride of at least {cols}")])
            }
            Error::DType { given, expected, .. } => Some([given.to_string(), expected.to_string()]),
            Error::NonFinite { value, .. } => {
                Some([value.to_string(), "a finite number".to_owned()])
            }
            Error::Misaligned { .. }
            | Error::TooLarge { .. }
            | Error::Ambiguous { .. }
            | Error::Unavailable { .. }
            | Error::OutOfMemory { .. }
            | Error::Unsupported { .. } => None,
        }
    }
}

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Refuses a vector of another length.
pub(crate) fn expect_len(what: &str, vector: Option<&[f32]>, expected: usize) -> Result<()> {
    match vector {
        Some(v) if v.len() != expected => Err(Error::Shape {
            what: what.to_owned(),
            expected: format!("[{expected}]"),
            given: format!("[{}]", v.len()),
        }),
        _ => Ok(()),
    }
}
