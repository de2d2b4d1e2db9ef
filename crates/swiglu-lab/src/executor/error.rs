//! What can go wrong where a run happens, with the values that say where.

/// Why a place, a job or what came back from it was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// What should name a place, or describe it, does not.
    #[error("{what} `{given}`: expected {expected}")]
    Place {
        /// What was given.
        what: &'static str,
        /// As it was given.
        given: String,
        /// What is accepted.
        expected: String,
    },
    /// Something could not be done there. What was there before is as it was.
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
    /// Something is not what it should be by its hash or its names, and was not used.
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
}
