//! The shared conformance suite on every façade this machine can run, with one and two threads.

use swiglu_core::conformance::{
    Backend, Case, gradient_suite, quantized_suite, row_steps, run, run_gradients, run_within,
    suite,
};
use swiglu_core::{DType, Op, Path, Rounding};
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

/// The whole suite on two threads of the widest façade; on one thread, and on the others, every fifth case unless all are
/// asked for.
fn conforms(isa: Isa, threads: usize, path: Path) {
    conforms_as(isa, threads, path, |cases| part(cases, isa, threads));
}

fn part<C>(cases: Vec<C>, isa: Isa, threads: usize) -> Vec<C> {
    let all =
        threads > 1 && isa == Isa::detect() || std::env::var_os(swiglu_testing::ALL).is_some();
    cases.into_iter().step_by(if all { 1 } else { 5 }).collect()
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

/// Blocks with each of the row steps, dense and with quantised weights: every thirteenth case of both suites, or all of them.
fn conforms_with_row_steps(isa: Isa) {
    if !isa.is_available() {
        not_run(format_args!("this machine lacks {isa}"));
        return;
    }
    let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(2)).unwrap();
    let backend = CpuBackend { cpu, path: Path::Fused };
    let blocks = suite(&DType::ALL).into_iter();
    let blocks = blocks.chain(quantized_suite(backend.quantized_types(), &DType::ALL));
    let blocks = blocks.filter(|case| case.op == Op::Mlp);
    let every = if std::env::var_os(swiglu_testing::ALL).is_some() { 1 } else { 13 };
    let blocks = blocks.step_by(every);
    let steps = row_steps().unwrap();
    let mut count = 0;
    for (case, steps) in blocks.flat_map(|case| steps.map(|steps| (case, steps))) {
        let outcome = run_within(&backend, &case, steps).unwrap();
        assert!(outcome.passed(), "{}: {case} {steps}: {outcome:?}", backend.name());
        count += 1;
    }
    assert!(count > 180, "{count}");
}

/// Backward passes of gated linear layers and blocks: every gradient against its reference.
fn conforms_backward(isa: Isa, threads: usize, path: Path, invariant: bool) {
    if !isa.is_available() {
        not_run(format_args!("this machine lacks {isa}"));
        return;
    }
    let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(threads)).unwrap();
    let backend = CpuBackend { cpu, path };
    let threads_of_all = if invariant || path == Path::Unfused { 1 } else { threads };
    let mut cases = part(gradient_suite(&DType::ALL), isa, threads_of_all);
    for case in &mut cases {
        case.layer.numerics.batch_invariant = invariant;
        // The unfused path has no `fused` rounding; it follows `pre_round`.
        if path == Path::Unfused && case.layer.numerics.rounding == Rounding::Fused {
            case.layer.numerics.rounding = Rounding::PreRound;
        }
        let outcome = run_gradients(&backend, case).unwrap();
        assert!(outcome.passed(), "{}: {case}: {outcome:?}", backend.name());
    }
    assert!(cases.len() > 180, "{}", cases.len());
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
            #[test]
            fn row_steps_of_a_block() {
                conforms_with_row_steps($isa);
            }
            #[test]
            fn backward_on_one_thread() {
                conforms_backward($isa, 1, Path::Fused, false);
            }
            #[test]
            fn backward_on_two_threads() {
                conforms_backward($isa, 2, Path::Fused, false);
            }
            #[test]
            fn backward_unfused() {
                conforms_backward($isa, 2, Path::Unfused, false);
            }
            #[test]
            fn backward_batch_invariant() {
                conforms_backward($isa, 2, Path::Fused, true);
            }
        })*
    };
}

facades!(portable: Isa::Portable, avx2: Isa::Avx2, avx512: Isa::Avx512, avx512_bf16: Isa::Avx512Bf16, amx_bf16: Isa::AmxBf16);
