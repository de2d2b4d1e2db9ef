//! CPU backend: kernels written once over a vector trait, with façades for AVX-512 (and its
//! bfloat16 dot products), AVX2 and portable code.

mod buffer;
pub mod ceilings;
mod columns;
mod compiled;
mod conformance;
mod cpu;
mod differentiated;
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

/// That the kernels were compiled without optimisation, and what to do, where they were: as in the dev profile of a
/// program that depends on them, which is its workspace's to set.
pub const UNOPTIMISED: Option<&str> = if cfg!(optimised) {
    None
} else {
    Some(
        "the CPU kernels were compiled without optimisation and take a hundred times as long: build in release, or write \
         [profile.dev.package.swiglu-cpu] opt-level = 3 into the Cargo.toml of the workspace, as the documentation of swiglu has it",
    )
};

pub use conformance::CpuBackend;
pub use cpu::{CallOptions, Cpu, CpuOptions};
pub use isa::Isa;
pub use layers::{GatedLinear, LentMlp, Mlp, Saved};
pub use quant::{expect_quantized, quantized_types};
pub use team::ForkJoin;
