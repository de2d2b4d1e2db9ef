//! The lab: experiments as data, peers as processes, records as evidence, verdicts worked out from
//! them.
//!
//! An [`Experiment`] is a TOML file: a question, cases, profiles that compete, and a claim. Peers
//! are separate programs that speak JSON lines ([`peer::protocol`]). A run gives a [`Record`], one
//! JSON file that is only ever added to; a [`Verdict`] follows from records and the claim, and a
//! [`Decision`] cites experiments.

// One exception: what a child does between fork and exec (peer/process.rs).
#![deny(unsafe_code)]

mod case;
mod code;
mod decision;
mod definition;
mod error;
pub mod executor;
mod files;
pub mod format;
pub mod gate;
mod machine;
pub mod peer;
mod place;
pub mod profile;
mod ready;
pub mod record;
pub mod report;
mod runner;
mod stats;
mod text;
mod verdict;
mod verify;

pub use case::{Case, CaseOp, DeviceKind, Heat, MAX_EXTENT};
pub use code::{COMMIT_FILE, Code, History};
pub use decision::{Decision, DecisionStatus};
pub use definition::{
    Against, Claim, ClaimKind, DEFINITION_SCHEMA, Experiment, Pace, ProfileDef, Role,
};
pub use error::{LabError, Result};
pub use files::sha256_of;
pub use ready::{Check, Readiness, quiet};
pub use record::{Record, ResultEntry, Status};
pub use runner::{Event, Finished, Laboratory, RunOptions, SEED};
pub use text::Named;
pub use verdict::{CaseRatio, RecordVerdict, Undecided, Verdict, VerdictState};
pub use verify::complaint;
