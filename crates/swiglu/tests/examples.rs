//! The examples that take little time and no GPU run, and check their own results. That of a graph is among the tests on a
//! CUDA device.
// A helper of a test is a test: it ends by panicking.
#![allow(clippy::unwrap_used)]

#[path = "../examples/from_memory.rs"]
mod from_memory;
#[path = "../examples/load.rs"]
mod load;
#[path = "../examples/server.rs"]
mod server;
#[path = "../examples/train.rs"]
mod train;

#[test]
fn a_layer_is_loaded() {
    load::main().unwrap();
}

#[test]
fn a_layer_is_made_of_memory() {
    from_memory::main().unwrap();
}

#[test]
fn a_block_learns_another() {
    train::main().unwrap();
}

#[test]
fn requests_are_answered() {
    server::main().unwrap();
}
