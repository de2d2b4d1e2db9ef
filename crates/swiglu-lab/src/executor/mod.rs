//! Where a run happens: here, on a host by ssh, as a job of Slurm, or by a command that takes a script.
//!
//! All of it is two questions. How a shell script runs somewhere, and bytes get there: `transport`.
//! How a script becomes a job that goes on alone: `scheduler`. A [`Job`] is the same in every place:
//! a bundle is staged, a script submitted, polled until it has ended, and its records are merged if
//! they are of that bundle. What must survive this program is in a file of the lab.

mod bundle;
mod flow;
mod inside;
mod job;
mod ready;
mod scheduler;
mod script;
mod spec;
mod transport;

pub use flow::{JobEvent, Merged};
pub use job::{Job, Jobs, Request};
pub use ready::readiness;
pub use scheduler::{JobState, Polled, STOPPED};
pub use script::ENVIRONMENT;
pub use spec::{ExecutorKind, ExecutorSpec};
