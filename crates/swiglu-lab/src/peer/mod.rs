//! Peers: programs that compute cases, each in a process of its own.

mod process;
pub mod protocol;
mod serve;

pub use process::{Limits, PeerCommands};
pub(crate) use process::{PeerProcess, wait};
pub use serve::serve;
