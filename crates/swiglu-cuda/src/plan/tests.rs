//! Plans: what is chosen, and what is said of what is not.

use super::*;
use crate::Mlp;
use crate::common;
use crate::kernels::down::Down;
use swiglu_core::conformance::{Case, QuantizedParameters};
use swiglu_core::{Activation, BlockType, DType, Numerics, QuantizedTypes, Rounding, bf16};

fn problem(dtype: DType, rounding: Rounding, bias: bool) -> Problem {
    Problem::new(Op::GatedLinear, 40, 72, 88, dtype, Activation::SWIGLU)
        .with_numerics(Numerics::default_for(dtype).with_rounding(rounding))
        .with_bias(bias)
}

const ELEMENTS: Algorithm = Algorithm::unfused(Stored::Elements);
const SUMS: Algorithm = Algorithm::unfused(Stored::Sums);

/// Every number of tokens is computed by kernels of one instruction whose sums are in one sequence.
#[test]
fn batch_invariant_layers_have_one_order_of_sums() {
    let Some(cuda) = common::device() else { return };
    let planner = Planner::of(&cuda);
    for (dtype, hidden) in [(DType::Bf16, 896), (DType::Bf16, 77), (DType::F32, 896)] {
        let tma = |m| {
            let numerics = Numerics::default_for(dtype).with_batch_invariance();
            let layer = Problem::new(Op::Mlp, m, hidden, 4864, dtype, Activation::SWIGLU);
            let (algorithm, why) = choose(planner, &layer.with_numerics(numerics), None, None);
            assert_ne!(why, Why::NoFusedKernel, "{layer}");
            assert_eq!(
                (algorithm.design(), algorithm.down()),
                (None, Some(Down::CublasLt)),
                "{layer}: {algorithm}"
            );
            let kernel = algorithm.kernel_of_h().unwrap();
            assert!(kernel.sums_in_order_of_k(layer.bias), "{layer}: {algorithm}");
            kernel.needs_tma()
        };
        let first = tma(1);
        assert!((1..300).chain([1000, 5000]).all(|m| tma(m) == first), "{dtype} {hidden}");
    }
}

/// Weights that TMA cannot address have kernels of another instruction than x asks for, and quantised ones are decoded.
#[test]
fn what_cannot_be_batch_invariant_is_refused() {
    let Some(cuda) = common::device() else { return };
    let numerics = Numerics::default_for(DType::Bf16).with_batch_invariance();
    let case = Case { numerics, ..Case::new(Op::Mlp, [1, 32, 32], DType::Bf16) };
    let types = QuantizedTypes::of(Op::Mlp, BlockType::Q8_0);
    let quantized = QuantizedParameters::new::<bf16>(&case, types).unwrap();
    let refused = Mlp::<bf16>::from_quantized(&cuda, &quantized.mlp().unwrap()).err();
    let why = refused.unwrap().to_string();
    assert!(why.contains("batch-invariant"), "{why}");
    let asked = Problem::new(Op::Mlp, 1, 32, 32, DType::Bf16, Activation::SWIGLU);
    let plan = cuda.plan(asked.with_numerics(numerics).with_quantized(Some(types)), None).unwrap();
    assert!(plan.reason.contains("weights decoded to bf16"), "{}", plan.reason);
}

#[test]
fn what_is_kept_between_decides_what_an_unfused_way_computes() {
    let Some(cuda) = common::device() else { return };
    let planner = Planner::of(&cuda);
    for dtype in [DType::F16, DType::Bf16] {
        for bias in [false, true] {
            let fused = problem(dtype, Rounding::Fused, bias);
            assert_eq!(ELEMENTS.check(planner, &fused), Err(Obstacle::RoundsBetween(dtype)));
            assert_eq!(SUMS.check(planner, &fused), Ok(()));
            for rounding in [Rounding::PreRound, Rounding::Eager] {
                let rounded = problem(dtype, rounding, bias);
                let elements = if bias { Err(Obstacle::RoundsBias(dtype)) } else { Ok(()) };
                assert_eq!(ELEMENTS.check(planner, &rounded), elements);
                assert_eq!(SUMS.check(planner, &rounded), Err(Obstacle::KeepsBetween(dtype)));
            }
            let nothing = fused.with_hidden(0);
            assert_eq!(SUMS.check(planner, &nothing), Err(Obstacle::NothingToMultiply));
        }
    }
    let single = problem(DType::F32, Rounding::Fused, true);
    assert_eq!(ELEMENTS.check(planner, &single), Ok(()));
    assert_eq!(SUMS.check(planner, &single), Err(Obstacle::SumsAreElements));
}

#[test]
fn the_unfused_path_that_is_asked_for_keeps_elements() {
    let Some(cuda) = common::device() else { return };
    let fused = problem(DType::Bf16, Rounding::Fused, true);
    assert_eq!(
        choose(Planner::of(&cuda), &fused, Some(Path::Unfused), None),
        (ELEMENTS, Why::AskedFor)
    );
    let plan = cuda.plan(fused, Some(Path::Unfused)).unwrap();
    assert_eq!(plan.kernel, "cublaslt + elementwise");
    assert_eq!(plan.problem.numerics.rounding, Rounding::PreRound);
    // And the fused one has neither.
    assert_eq!(choose(Planner::of(&cuda), &fused, Some(Path::Fused), None).0.path(), Path::Fused);
}

#[test]
fn a_plan_with_sums_rounds_as_asked() {
    let Some(cuda) = common::device() else { return };
    let fused = problem(DType::F16, Rounding::Fused, true);
    let plan = cuda.plan_of(fused, SUMS, String::new());
    assert_eq!((plan.path, plan.problem), (Path::Unfused, fused));
    assert_eq!(plan.kernel, "cublaslt f32 + elementwise");
    let named = |problem: &Problem| {
        let all = cuda.candidates(problem, None);
        all.into_iter().find(|candidate| candidate.name == plan.kernel).unwrap()
    };
    let candidate = named(&fused);
    assert_eq!((candidate.numerics, &candidate.refusal), (Some(fused.numerics), &None));
    assert!(candidate.predicted_us.unwrap() > 0.0);
    let rounded = problem(DType::F16, Rounding::PreRound, true);
    let candidate = named(&rounded);
    assert_eq!((candidate.predicted_us, candidate.numerics), (None, None));
    assert!(candidate.reason.contains("would not be rounded to f16"), "{}", candidate.reason);
}

#[test]
fn groups_are_refused_by_every_algorithm_and_by_name() {
    let Some(cuda) = common::device() else { return };
    for op in [Op::GatedLinear, Op::Mlp] {
        let experts = problem(DType::Bf16, Rounding::Fused, false).with_op(op).with_groups(8);
        let candidates = cuda.candidates(&experts, None);
        let refused =
            |c: &Candidate| c.refusal.as_ref().is_some_and(|why| why.contains("8 groups"));
        assert!(!candidates.is_empty() && candidates.iter().all(refused), "{candidates:?}");
        let error = cuda.plan(experts, None).unwrap_err().to_string();
        assert!(error.contains("8 groups of tokens"), "{error}");
    }
}
