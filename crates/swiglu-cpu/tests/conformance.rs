//! The shared conformance suite on every façade this machine can run, with one and two threads.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

use swiglu_core::conformance::{Backend, Case, quantized_suite, run, suite};
use swiglu_core::{DType, Path, Rounding};
use swiglu_cpu::{Cpu, CpuBackend, CpuOptions, Isa};
use swiglu_testing::not_run;

/// With products summed in one order for every number of rows, every fifth case.
fn conforms_invariant(isa: Isa) {
    conforms_as(isa, 2, Path::Fused, |cases| {
        let one_order =
            |case: Case| Case { numerics: case.numerics.with_batch_invariance(), ..case };
        cases.into_iter().step_by(5).map(one_order).collect()
    });
}

fn conforms(isa: Isa, threads: usize, path: Path) {
    conforms_as(isa, threads, path, |cases| cases);
}

fn conforms_as(isa: Isa, threads: usize, path: Path, of: impl Fn(Vec<Case>) -> Vec<Case>) {
    if !isa.is_available() {
        not_run(format_args!("this machine lacks {isa}"));
        return;
    }
    let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(threads)).unwrap();
    let backend = CpuBackend { cpu, path };
    let quantized = match path {
        Path::Fused => quantized_suite(backend.quantized_types(), &DType::ALL),
        Path::Unfused => Vec::new(),
    };
    let failed: Vec<String> = [suite(&DType::ALL), quantized]
        .into_iter()
        .flat_map(of)
        // The unfused path has no `fused` rounding of the 16-bit types; it follows `pre_round`.
        .filter(|case| {
            path == Path::Fused
                || case.dtype == DType::F32
                || case.numerics.rounding != Rounding::Fused
        })
        .filter_map(|case| match run(&backend, &case) {
            Ok(outcome) if outcome.passed() => None,
            other => Some(format!("{case}: {other:?}")),
        })
        .collect();
    assert!(
        failed.is_empty(),
        "{}: {} failed\n{}",
        backend.name(),
        failed.len(),
        failed.join("\n")
    );
}

macro_rules! facades {
    ($($name:ident: $isa:expr),*) => {
        $(mod $name {
            use super::*;
            #[test]
            fn fused_on_one_thread() {
                conforms($isa, 1, Path::Fused);
            }
            #[test]
            fn fused_on_two_threads() {
                conforms($isa, 2, Path::Fused);
            }
            #[test]
            fn unfused() {
                conforms($isa, 2, Path::Unfused);
            }
            #[test]
            fn batch_invariant() {
                conforms_invariant($isa);
            }
        })*
    };
}

facades!(portable: Isa::Portable, avx2: Isa::Avx2, avx512: Isa::Avx512, avx512_bf16: Isa::Avx512Bf16, amx_bf16: Isa::AmxBf16);
