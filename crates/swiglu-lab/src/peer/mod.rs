//! Peers: programs that compute cases, each in a process of its own.

mod process;
pub mod protocol;

pub use process::{Limits, PeerCommands};
pub(crate) use process::{PeerProcess, wait};
pub use protocol::serve;
