//! The tests that go through files, as one program: each by itself would compile and link all of this again.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod agree;
mod coded;
mod factor;
mod families;
mod fixtures;
mod foreign;
mod hostile;
mod inspect;
mod layers;
mod mxfp4;
mod npy;
mod odd;
mod packed;
mod parts;
mod quant;
mod scaled;
mod support;
mod ungated;
