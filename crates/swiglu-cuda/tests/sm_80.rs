//! Training on a device without wgmma: the simulator as one of sm_80; on a GPU with the kernels of every architecture alone.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Once;

use common::judge_gradients;
use swiglu_core::conformance::{Case, GradientCase, Lie, Scaled, gradient_suite};
use swiglu_core::{
    Accumulate, Activation, DType, Numerics, Op, Orientation, Pass, Path, Problem, SavePolicy,
    WeightLayout,
};
use swiglu_cuda::{Cuda, CudaBackend};

fn device(tf32: bool) -> Option<Cuda> {
    static ARCH: Once = Once::new();
    // SAFETY: before the simulator's library is loaded, whose threads and no others read them.
    ARCH.call_once(|| unsafe {
        std::env::set_var("SWIGLU_SIM_ARCH", "80");
        // With fewer the products are what takes the time; with as many as such a device has, threads are too many.
        std::env::set_var("SWIGLU_SIM_SMS", "12");
    });
    let options = common::options()?.with_portable_kernels(true).with_tf32(tf32);
    Some(Cuda::with_options(&options).unwrap())
}

fn block([m, k, h]: [usize; 3], dtype: DType) -> Problem {
    Problem::new(Op::Mlp, m, k, h, dtype, Activation::SWIGLU)
        .with_numerics(Numerics::default_for(dtype))
        .with_pass(Pass::Backward)
}

/// Gate, up and h of a backward pass, by what they are computed and why.
fn chosen(cuda: &Cuda, problem: &Problem, path: Option<Path>) -> (String, String) {
    let steps = cuda.candidates(problem, path);
    let step = steps.into_iter().find(|step| step.chosen).unwrap();
    (step.name, step.reason)
}

#[test]
fn the_faster_way_is_planned_and_a_fused_one_where_it_is_asked_for() {
    let Some(cuda) = device(false) else { return };
    let (small, unfused) = (block([300, 64, 100], DType::Bf16), "cublaslt + elementwise");
    let (name, why) = chosen(&cuda, &small, None);
    assert!(name.starts_with("mma_dgated_gemm ") && why.contains("epilogue"), "{name}: {why}");
    let plan = cuda.plan(small, None).unwrap();
    assert!(plan.kernel.starts_with(&name) && plan.path == Path::Fused, "{plan}");
    let [tile_m, tile_h] = ["tile_m", "tile_h"].map(|of| plan.parameters[of]);
    assert_eq!(name, format!("mma_dgated_gemm {tile_m}x{tile_h}"));
    assert_eq!(chosen(&cuda, &small, Some(Path::Unfused)).0, unfused);
    // f32 stays exact unless tensor cores may round it.
    let single = block([300, 64, 100], DType::F32);
    assert_eq!(chosen(&cuda, &single, Some(Path::Fused)).0, unfused);
    let rounding = device(true).unwrap();
    assert!(chosen(&rounding, &single, Some(Path::Fused)).0.starts_with("mma_dgated_gemm "));
    // Of some K the model says that the product alone is too slow; asked for, it is taken.
    let slower = (6..15).map(|log| block([4096, 1 << log, 4096], DType::Bf16)).find(|problem| {
        let steps = cuda.candidates(problem, None);
        steps.iter().any(|step| step.reason.contains("times as long expected as with dh in memory"))
    });
    assert!(slower.is_some() || common::has_gpu());
    if let Some(slower) = slower {
        assert_eq!(chosen(&cuda, &slower, None).0, unfused);
        let expected = |name: &str| {
            let steps = cuda.candidates(&slower, None).into_iter();
            steps.filter(|step| step.name.starts_with(name)).find_map(|step| step.predicted_us)
        };
        assert!(expected("mma_dgated_gemm") > expected(unfused), "{slower}");
        assert!(chosen(&cuda, &slower, Some(Path::Fused)).0.starts_with("mma_dgated_gemm "));
    }
}

/// Every step of both kinds of layer says what it is expected to take.
#[test]
fn every_step_has_a_time() {
    let Some(cuda) = device(false) else { return };
    for op in [Op::Mlp, Op::GatedLinear] {
        let problem = block([300, 64, 96], DType::Bf16).with_op(op).with_bias(true);
        let steps = cuda.candidates(&problem, None);
        for step in steps.iter().filter(|step| step.chosen) {
            assert!(step.predicted_us.is_some_and(|us| us > 0.0), "{op}: {step:?}");
        }
        let count = steps.iter().filter(|step| step.chosen).count();
        assert_eq!(count, if op == Op::Mlp { 5 } else { 4 }, "{op}");
    }
}

#[test]
fn gradients_are_within_their_bounds() {
    let Some(cuda) = device(false) else { return };
    let n = if common::partly() { 67 } else { 1 };
    let cases = gradient_suite(&[DType::Bf16, DType::F16]).into_iter().step_by(n);
    assert!(judge_gradients(&CudaBackend::planned(&cuda), cases) > 0);
}

/// What is kept, with rows that begin and end anywhere, in both orientations.
#[test]
fn every_policy_differentiates_in_the_epilogue() {
    let Some(cuda) = device(false) else { return };
    let shapes = [[129, 72, 200], [65, 63, 101], [33, 130, 264], [20, 40, 129]];
    let mut cases = Vec::new();
    for (i, shape) in shapes.into_iter().enumerate() {
        for (j, dtype) in [DType::Bf16, DType::F16].into_iter().enumerate() {
            for (n, policy) in SavePolicy::ALL.into_iter().enumerate() {
                let turn = i + 2 * j + n;
                let (name, why) = chosen(&cuda, &block(shape, dtype), None);
                assert!(name.starts_with("mma_dgated_gemm "), "{shape:?}: {name}: {why}");
                let orientation = Orientation::ALL[(i + n) % 2];
                let layer = Case {
                    activation: Activation::family()[turn % Activation::family().len()],
                    layout: WeightLayout { orientation, ..WeightLayout::HF },
                    bias: turn.is_multiple_of(2),
                    padding: [0, 5, 8][turn % 3],
                    seed: turn as u64,
                    ..Case::new(Op::Mlp, shape, dtype)
                };
                let (dy, accumulate) = (Lie::Rows, Accumulate::Overwrite);
                let in_f32 = j == 1;
                let row_scale = if i % 2 == 0 { Scaled::ByAndGradient } else { Scaled::No };
                cases.push(GradientCase { layer, policy, dy, in_f32, accumulate, row_scale });
            }
        }
    }
    let n = if common::partly() { 3 } else { 1 };
    // Each policy and both types, whatever the part.
    let part = cases.into_iter().enumerate().filter(|(at, _)| (at / 3 + at) % n == 0);
    assert!(judge_gradients(&CudaBackend::planned(&cuda), part.map(|(_, case)| case)) > 0);
}
