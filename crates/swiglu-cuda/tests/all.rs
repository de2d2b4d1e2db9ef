//! The shorter tests of this crate that need no process of their own, as one program: each by itself would compile and link
//! the layers of every type again.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod common;

mod device;
mod floors;
mod invariance;
mod lent;
mod row_scale;
mod skinny_block;
mod streams;
mod torch_eager;
mod training;
