//! CPU backend: kernels written once over a vector trait, with façades for AVX-512 (and its
//! bfloat16 dot products), AVX2 and portable code.

mod buffer;
pub mod ceilings;
mod compiled;
mod conformance;
mod cpu;
mod elementwise;
mod epilogue;
mod gemm;
mod isa;
mod layers;
pub mod naive;
mod order;
mod panels;
mod placement;
mod quant;
mod rows;
mod simd;
mod team;
mod tiles;
mod weights;
mod workspace;

pub use conformance::CpuBackend;
pub use cpu::{CallOptions, Cpu, CpuOptions};
pub use isa::Isa;
pub use layers::{GatedLinear, Mlp};
pub use quant::{expect_quantized, quantized_types};
