//! Gradients of every layer, by the kernel that differentiates in a product's epilogue and by steps.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::judge_gradients;
use swiglu_core::conformance::{Case, GradientCase, Lie, gradient_suite};
use swiglu_core::{
    Accumulate, Activation, DType, Matrix, Numerics, Op, Orientation, SavePolicy, WeightLayout,
};
use swiglu_cuda::{CudaBackend, CudaError, DeviceGradientsMut, DeviceMatrix, GatedLinear};

/// Every n-th of the suite on the simulator.
fn some(cases: Vec<GradientCase>, n: usize) -> impl Iterator<Item = GradientCase> {
    cases.into_iter().step_by(if common::partly() { n } else { 1 })
}

fn backends(cuda: &swiglu_cuda::Cuda) -> Vec<CudaBackend> {
    // Planned, and unfused with elements between.
    CudaBackend::all(cuda).into_iter().take(2).collect()
}

#[test]
fn gradients_are_within_their_bounds() {
    let Some(cuda) = common::device() else { return };
    for (i, backend) in backends(&cuda).iter().enumerate() {
        let cases = gradient_suite(&DType::ALL).split_off(i);
        assert!(judge_gradients(backend, some(cases, 23)) > 0);
    }
}

/// Extents around the edges of the kernel's tiles and slabs, in every layout, activation and mode.
#[test]
fn edges_of_tiles_and_slabs() {
    let Some(cuda) = common::device() else { return };
    let shapes = [
        [129, 72, 200],
        [1, 64, 8],
        [64, 200, 192],
        [65, 64, 192],
        [130, 130, 264],
        [257, 64, 456],
        [20, 320, 129],
        [300, 40, 72],
    ];
    let family = Activation::family();
    let numerics: Vec<Numerics> = Numerics::all().filter(|n| !n.batch_invariant).collect();
    let mut cases = Vec::new();
    for (i, shape) in shapes.into_iter().enumerate() {
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            for turn in 0..3 {
                let n = i * 7 + turn * 3 + dtype as usize;
                let orientation = Orientation::ALL[n % 2];
                let layer = Case {
                    activation: family[n % family.len()],
                    numerics: numerics[n / 2 % numerics.len()],
                    layout: WeightLayout { orientation, ..WeightLayout::HF },
                    bias: n.is_multiple_of(3),
                    padding: [0, 8, 5][n % 3],
                    seed: n as u64,
                    ..Case::new(Op::Mlp, shape, dtype)
                };
                let accumulate =
                    if n.is_multiple_of(4) { Accumulate::Add } else { Accumulate::Overwrite };
                let dy = if n.is_multiple_of(5) { Lie::OneValue } else { Lie::Rows };
                let policy = SavePolicy::Save;
                cases.push(GradientCase {
                    layer,
                    policy,
                    dy,
                    in_f32: n.is_multiple_of(2),
                    accumulate,
                });
            }
        }
    }
    for (i, backend) in backends(&cuda).iter().enumerate() {
        assert!(judge_gradients(backend, some(cases.clone().split_off(i), 5)) > 0);
    }
}

#[test]
fn gradients_are_the_same_bits_on_every_launch() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.stream();
    let [m, k, h] = [130, 64, 200];
    let case = Case::new(Op::Mlp, [m, k, h], DType::Bf16);
    let parameters = swiglu_core::conformance::Parameters::<swiglu_core::bf16>::new(&case).unwrap();
    let layer = swiglu_cuda::Mlp::new(&cuda, &parameters.mlp()).unwrap();
    let random = |seed, rows, cols| {
        let host = swiglu_core::random::normal_matrix(seed, rows, cols, 1.0).unwrap();
        DeviceMatrix::from_host(&stream, host.view()).unwrap()
    };
    let (x, dy) = (random(1, m, k), random(2, m, k));
    let zeros = |rows, cols| DeviceMatrix::<swiglu_core::bf16>::new(&stream, rows, cols).unwrap();
    let mut first: Option<[Matrix<swiglu_core::bf16>; 4]> = None;
    for launch in 0..if common::has_gpu() { 1000 } else { 3 } {
        let (mut y, mut gate, mut up) = (zeros(m, k), zeros(m, h), zeros(m, h));
        layer
            .forward_saving(&stream, x.view(), y.view_mut(), gate.view_mut(), up.view_mut())
            .unwrap();
        let mut to = [zeros(m, k), zeros(h, k), zeros(h, k), zeros(k, h)];
        to.iter_mut().for_each(|m| m.buffer_mut().poison(0xFF).unwrap());
        let [dx, gate_w, up_w, down_w] = &mut to;
        let into = DeviceGradientsMut::default()
            .with_dx(dx.view_mut())
            .with_gate(gate_w.view_mut())
            .with_up(up_w.view_mut())
            .with_down(down_w.view_mut());
        layer.backward(&stream, x.view(), dy.view(), gate.view_mut(), up.view_mut(), into).unwrap();
        let now = to.map(|m| m.to_host().unwrap());
        let first = first.get_or_insert_with(|| now.clone());
        assert!(now == *first, "launch {launch} differs");
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.stream();
    let case = Case::new(Op::GatedLinear, [3, 8, 16], DType::F32);
    let parameters = swiglu_core::conformance::Parameters::<f32>::new(&case).unwrap();
    let layer = GatedLinear::new(&cuda, &parameters.gated()).unwrap();
    let zeros = |rows, cols| DeviceMatrix::<f32>::new(&stream, rows, cols).unwrap();
    let (x, dh) = (zeros(3, 8), zeros(3, 16));
    let (mut gate, mut up) = (zeros(3, 16), zeros(3, 16));
    let mut wrong = zeros(8, 16);
    let mut refusal = |into: DeviceGradientsMut<'_, f32>| {
        let (gate, up) = (gate.view_mut(), up.view_mut());
        let outcome = layer.backward(&stream, x.view(), dh.view(), gate, up, into);
        outcome.unwrap_err().to_string()
    };
    let error = refusal(DeviceGradientsMut::default().with_gate(wrong.view_mut()));
    assert!(error.contains("dw_gate") && error.contains("[16, 8]"), "{error}");
    let error = refusal(DeviceGradientsMut::default().with_down(wrong.view_mut()));
    assert!(error.contains("no down projection"), "{error}");
    let outcome = layer.backward(
        &stream,
        x.view(),
        x.view(),
        gate.view_mut(),
        up.view_mut(),
        DeviceGradientsMut::default(),
    );
    assert!(matches!(outcome, Err(CudaError::Core(_))), "{outcome:?}");
}
