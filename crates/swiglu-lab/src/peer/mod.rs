//! Peers: programs that compute cases, each in a process of its own.

mod process;
pub mod protocol;
mod serve;

pub(crate) use process::{Fault, PeerError, PeerProcess, wait};
pub use process::{Limits, PeerCommands};
pub use serve::serve;
