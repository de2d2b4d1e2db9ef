//! What can go wrong in the lab, with the values that say where.

use std::io;
use std::path::{Path, PathBuf};

use crate::place::{NAME, is_name};

/// Why a definition, a record or a run was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A definition or a decision says something that it may not.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Definition {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
        /// What was found and what was expected.
        message: String,
    },
    /// A record cannot be believed or understood.
    #[error("{}: {why}; {advice}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// Another run measures what this one needs.
    #[error(
        "another run is measuring here ({holder}): two at once on one processor or one accelerator \
         would disturb each other, and two of one name would write one record; wait for it to end"
    )]
    Busy {
        /// The runs, as they signed.
        holder: String,
    },
    /// A name that becomes part of a file name or a command, or should be of something that is there; or a selection
    /// that leaves nothing.
    #[error("{what} `{given}`: expected {expected}")]
    Name {
        /// What is named.
        what: &'static str,
        /// The name given.
        given: String,
        /// What is accepted.
        expected: String,
    },
    /// A file or directory cannot be read or written.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Something could not be done where a run happens. What was there before is as it was.
    #[error("{place}: {what} failed: {why}; {advice}")]
    Refused {
        /// Where.
        place: String,
        /// What was attempted.
        what: &'static str,
        /// What was said, or found.
        why: String,
        /// What to do.
        advice: &'static str,
    },
    /// What a job is made of, or brought, is not what it should be by its hash or its names, and was not used.
    #[error("{what} is {found}, expected {expected}; {advice}")]
    Foreign {
        /// What, and of what.
        what: String,
        /// As it is.
        found: String,
        /// As it should be.
        expected: String,
        /// What to do.
        advice: &'static str,
    },
    /// A job ended, and its run did not.
    #[error("job {job} {why}; {done} results are here{log}; {advice}")]
    Unfinished {
        /// The job.
        job: String,
        /// What became of it.
        why: String,
        /// Results in the records that came back.
        done: usize,
        /// The end of its log.
        log: String,
        /// What to do.
        advice: String,
    },
    /// A problem that the oracle refuses.
    #[error(transparent)]
    Core(#[from] swiglu_core::Error),
}

/// `Result` has a [`LabError`]: [`LabError::Io`] of whatever reads or writes files, and what else a function says.
pub type Result<T, E = LabError> = std::result::Result<T, E>;

impl LabError {
    /// For `map_err`: an I/O error with what was attempted on what.
    pub(crate) fn io<E: Into<io::Error>>(
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(E) -> LabError {
        let path = path.to_path_buf();
        move |source| LabError::Io { action, path, source: source.into() }
    }

    /// It is about this file, if it is about one.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Definition { path, .. } | Self::Record { path, .. } | Self::Io { path, .. } => {
                Some(path)
            }
            _ => None,
        }
    }

    /// Refuses what cannot be part of a file name and of a command line everywhere.
    pub(crate) fn expect_name(what: &'static str, given: &str) -> Result<()> {
        if is_name(given) { Ok(()) } else { Err(Self::name(what, given, NAME)) }
    }

    pub(crate) fn name(
        what: &'static str,
        given: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Name { what, given: given.into(), expected: expected.into() }
    }
}
