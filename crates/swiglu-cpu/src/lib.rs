//! CPU backend: kernels written once over a vector trait, with façades for AVX-512 (and its
//! bfloat16 dot products), AVX2 and portable code.

mod cpu;
mod isa;
mod layers;
pub mod naive;

pub use cpu::{Cpu, CpuOptions};
pub use isa::Isa;
pub use layers::{GatedLinear, Mlp};
