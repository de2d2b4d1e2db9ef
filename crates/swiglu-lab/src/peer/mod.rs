//! Peers: programs that compute cases, each in a process of its own.

pub mod protocol;
