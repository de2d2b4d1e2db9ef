//! Gradients of every layer, by the kernel that differentiates in a product's epilogue and by steps.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use crate::common::{self, judge_gradients};
use swiglu_core::conformance::{Case, GradientCase, Lie, Scaled, gradient_suite};
use swiglu_core::{
    Accumulate, Activation, Arrangement, DType, Element, GateUpRef, GateUpWeights,
    GatedLinearParams, Matrix, MlpParams, Numerics, Op, Orientation, Path, Rounding, SavePolicy,
    WeightLayout, bf16, bounds, f16, random,
};
use swiglu_cuda::{
    Cuda, CudaBackend, CudaError, DeviceBuffer, DeviceGatedLinearParams, DeviceGradientsMut,
    DeviceKept, DeviceKeptMut, DeviceMatrix, DeviceMatrixRef, DeviceMlpParams, DeviceScratch,
    GatedLinear, Layer, Mlp, Stream,
};

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
        assert!(judge_gradients(backend, some(cases, 139)) > 0);
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
                let policy = SavePolicy::ALL[n / 2 % 3];
                cases.push(GradientCase {
                    layer,
                    policy,
                    dy,
                    in_f32: n.is_multiple_of(2),
                    accumulate,
                    row_scale: [Scaled::No, Scaled::ByAndGradient, Scaled::No, Scaled::By][n % 4],
                });
            }
        }
    }
    for (i, backend) in backends(&cuda).iter().enumerate() {
        assert!(judge_gradients(backend, some(cases.clone().split_off(i), 13)) > 0);
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
        let kept = [gate.view_mut(), up.view_mut()];
        layer.forward_saving(&stream, x.view(), y.view_mut(), kept).unwrap();
        let mut to = [zeros(m, k), zeros(h, k), zeros(h, k), zeros(k, h)];
        to.iter_mut().for_each(|m| m.buffer_mut().poison(0xFF).unwrap());
        let [dx, gate_w, up_w, down_w] = &mut to;
        let into = DeviceGradientsMut::default()
            .with_dx(dx.view_mut())
            .with_gate(gate_w.view_mut())
            .with_up(up_w.view_mut())
            .with_down(down_w.view_mut());
        let kept = [gate.view_mut(), up.view_mut()];
        layer.backward(&stream, x.view(), dy.view(), kept, into, None).unwrap();
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
        let kept = [gate.view_mut(), up.view_mut()];
        let outcome = layer.backward(&stream, x.view(), dh.view(), kept, into, None);
        outcome.unwrap_err().to_string()
    };
    let error = refusal(DeviceGradientsMut::default().with_gate(wrong.view_mut()));
    assert!(error.contains("dw_gate") && error.contains("[16, 8]"), "{error}");
    let error = refusal(DeviceGradientsMut::default().with_down(wrong.view_mut()));
    assert!(error.contains("no down projection"), "{error}");
    let (kept, none) = ([gate.view_mut(), up.view_mut()], DeviceGradientsMut::default());
    let outcome = layer.backward(&stream, x.view(), x.view(), kept, none, None);
    assert!(matches!(outcome, Err(CudaError::Core(_))), "{outcome:?}");
    // Without the up that x gives again, rows of x may overlap.
    let buffer = DeviceMatrix::<f32>::zeros(&stream, 1, 10).unwrap();
    let rows = DeviceMatrixRef::with_stride(buffer.buffer(), 3, 8, 1).unwrap();
    fn dx(to: &mut DeviceMatrix<f32>) -> DeviceGradientsMut<'_, f32> {
        DeviceGradientsMut::default().with_dx(to.view_mut())
    }
    let mut to = zeros(3, 8);
    let both = [gate.view_mut(), up.view_mut()];
    layer.backward(&stream, rows, dh.view(), both, dx(&mut to), None).unwrap();
    let outcome = layer.backward(&stream, rows, dh.view(), gate.view_mut(), dx(&mut to), None);
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("x whose 3 rows overlap"), "{error}");
}

/// Where a policy keeps what it keeps.
fn keeps<'a, T: Element>(
    policy: SavePolicy,
    gate: &'a mut DeviceMatrix<T>,
    up: &'a mut DeviceMatrix<T>,
) -> DeviceKeptMut<'a, T> {
    match policy {
        SavePolicy::SaveGate => gate.view_mut().into(),
        _ => [gate.view_mut(), up.view_mut()].into(),
    }
}

/// What both passes leave: the gate that was kept, y, ∂L/∂x, ∂L/∂Wg, ∂L/∂Wu, ∂L/∂Wd and the gradients of biases.
#[derive(Debug, PartialEq)]
struct Left<T> {
    matrices: Vec<Matrix<T>>,
    biases: Vec<Matrix<f32>>,
}

/// Which gradients are asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Asked {
    All,
    /// But for ∂L/∂x.
    Weights,
}

/// What a training step of a layer has on the device.
struct Step<'a, K, T> {
    layer: &'a Layer<K, T>,
    is_block: bool,
    orientation: Orientation,
    x: DeviceMatrix<T>,
    dy: DeviceMatrix<T>,
    asked: Asked,
    accumulate: Accumulate,
}

impl<K, T: Element> Step<'_, K, T> {
    /// Both passes, which leave poison where they write nothing; by way of a graph if one is asked for.
    fn run(&self, stream: &Stream, policy: SavePolicy, captured: bool) -> Left<T> {
        let (m, k, h) = (self.x.rows(), self.layer.hidden(), self.layer.intermediate());
        let new = |[rows, cols]: [usize; 2]| {
            let mut matrix = DeviceMatrix::<T>::new(stream, rows, cols).unwrap();
            matrix.buffer_mut().poison(0xFF).unwrap();
            matrix
        };
        let weight = |out, inn| {
            let [rows, cols] = self.orientation.shape(out, inn);
            let before = random::normal_matrix::<T>(9, rows, cols, 1.0).unwrap();
            DeviceMatrix::from_host(stream, before.view()).unwrap()
        };
        let bias = |n: usize| DeviceMatrix::<f32>::zeros(stream, 1, n).unwrap();
        let (mut gate, mut up) = (new([m, h]), new([m, h]));
        let mut y = new([m, self.layer.out_features()]);
        let (mut dx, mut d_gate, mut d_up) = (new([m, k]), weight(h, k), weight(h, k));
        let (mut d_down, mut biases) = (weight(k, h), [bias(h), bias(h), bias(k)]);
        let mut kept_gate = None;
        let mut call = |host: bool| {
            let kept = keeps(policy, &mut gate, &mut up);
            self.layer.forward_saving(stream, self.x.view(), y.view_mut(), kept)?;
            if host {
                kept_gate = Some(gate.view().to_host(stream)?);
            }
            let [b_gate, b_up, b_down] = biases.each_mut().map(DeviceMatrix::view_mut);
            let mut into = DeviceGradientsMut::default()
                .with_gate(d_gate.view_mut())
                .with_up(d_up.view_mut())
                .with_gate_bias(b_gate)
                .with_up_bias(b_up)
                .with_accumulate(self.accumulate);
            if self.asked == Asked::All {
                into = into.with_dx(dx.view_mut());
            }
            if self.is_block {
                into = into.with_down(d_down.view_mut()).with_down_bias(b_down);
            }
            let kept = keeps(policy, &mut gate, &mut up);
            self.layer.backward(stream, self.x.view(), self.dy.view(), kept, into, None)
        };
        call(true).unwrap();
        if captured {
            assert_eq!(self.accumulate, Accumulate::Overwrite);
            let graph = stream.capture(|| call(false)).unwrap();
            for of in [&mut d_gate, &mut d_up, &mut dx, &mut gate, &mut y] {
                of.buffer_mut().poison(0xFF).unwrap();
            }
            // SAFETY: the matrices live on, and nothing else uses them meanwhile.
            unsafe { graph.launch(stream) }.unwrap();
        }
        let mut matrices = vec![kept_gate.unwrap()];
        matrices
            .extend([&y, &dx, &d_gate, &d_up, &d_down].map(|m| m.view().to_host(stream).unwrap()));
        if self.asked != Asked::All {
            matrices.remove(2);
        }
        Left {
            matrices,
            biases: biases.iter().map(|b| b.view().to_host(stream).unwrap()).collect(),
        }
    }
}

/// A few quarters: sums of their products are exact in f32 in any order.
fn quarters<T: Element>(seed: u64, rows: usize, cols: usize) -> Matrix<T> {
    let value = |at| T::from_f32((random::normal(seed, at) * 1.2).round().clamp(-3.0, 3.0) / 4.0);
    Matrix::from_values((0..(rows * cols) as u64).map(value), rows, cols).unwrap()
}

/// Where the sums of up are exact, the backward pass that computes it again gives the bits of the one that kept it,
/// whatever product does: of biases too that T does not hold, which would round otherwise if T's were added.
fn same_bits<T: Element>(cuda: &Cuda, turn: usize) {
    let stream = cuda.new_stream().unwrap();
    let [m, k, h] = [[70, 72, 136], [1, 40, 64], [130, 64, 200]][turn % 3];
    let orientation = Orientation::ALL[turn / 2 % 2];
    let path = [None, Some(Path::Unfused)][turn / 3 % 2];
    let has_biases = turn % 5 != 3;
    let rounding = [Rounding::Fused, Rounding::PreRound, Rounding::Eager][turn % 3];
    let numerics = Numerics::default_for(T::DTYPE).with_rounding(rounding);
    let weight = |seed, out, inn| {
        let [rows, cols] = orientation.shape(out, inn);
        quarters::<T>(seed + turn as u64, rows, cols)
    };
    let (gate, up, down) = (weight(1, h, k), weight(2, h, k), weight(3, k, h));
    let weights = GateUpWeights::separate(gate.view(), up.view(), orientation).unwrap();
    // Sixteenths and a little: a sum half-way between two values of T is no longer so.
    let bias: Vec<f32> = (0..h).map(|i| (i % 5) as f32 / 16.0 + 1.0 / 65536.0).collect();
    let mut gated =
        GatedLinearParams::new(weights, Activation::family()[turn % 7]).with_numerics(numerics);
    if has_biases {
        gated = gated.with_gate_bias(&bias[..]).with_up_bias(&bias[..]);
    }
    let block = MlpParams::new(gated, down.view(), orientation);
    let there = |host: &Matrix<T>| DeviceMatrix::from_host(&stream, host.view()).unwrap();
    // Lent weights, gate and up apart or in one matrix.
    let lent_gate_up = [there(&gate), there(&up), there(&together(&gate, &up, orientation))];
    let (lent_down, lent_bias) = (there(&down), there(&quarters(4, 1, h)));
    let lent_block = |together: bool| {
        let ([gate, up, both], act) =
            (lent_gate_up.each_ref().map(DeviceMatrix::view), gated.activation);
        let mut lent = match together {
            true => DeviceGatedLinearParams::packed(both, orientation, act),
            false => DeviceGatedLinearParams::separate(gate, up, orientation, act),
        }
        .unwrap();
        lent = lent.numerics(numerics);
        if has_biases && !together {
            lent = lent.biases(None, Some(lent_bias.view())).unwrap();
        }
        let lent = DeviceMlpParams::new(lent, lent_down.view(), orientation).unwrap();
        // SAFETY: the weights outlive the layer, and nothing writes them.
        unsafe { Mlp::from_device(cuda, &lent) }
    };
    for asked in [Asked::All, Asked::Weights] {
        for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
            let dy = |cols| there(&random::normal_matrix::<T>(6, m, cols, 1.0).unwrap());
            let what = format!("{} turn {turn} {path:?} {asked:?} {accumulate:?}", T::DTYPE);
            let x = || there(&quarters(5, m, k));
            let captured = accumulate == Accumulate::Overwrite;
            macro_rules! compare {
                ($layer:expr, $is_block:expr) => {{
                    let (layer, is_block) = ($layer.unwrap(), $is_block);
                    let (x, dy) = (x(), dy(if is_block { k } else { h }));
                    let layer = &layer;
                    let step = Step { layer, is_block, orientation, x, dy, asked, accumulate };
                    let both = step.run(&stream, SavePolicy::Save, false);
                    let gate = step.run(&stream, SavePolicy::SaveGate, captured);
                    assert!(both == gate, "{what}, {}", stringify!($layer));
                }};
            }
            match (turn % 4, path) {
                (0, _) => compare!(lent_block(turn.is_multiple_of(3)), true),
                (1, None) => compare!(GatedLinear::new(cuda, &gated), false),
                (1, Some(path)) => compare!(GatedLinear::with_path(cuda, &gated, path), false),
                (_, None) => compare!(Mlp::new(cuda, &block), true),
                (_, Some(path)) => compare!(Mlp::with_path(cuda, &block, path), true),
            }
        }
    }
}

/// Gate and up in one matrix.
fn together<T: Element>(gate: &Matrix<T>, up: &Matrix<T>, orientation: Orientation) -> Matrix<T> {
    let weights = GateUpWeights::separate(gate.view(), up.view(), orientation).unwrap();
    let layout = WeightLayout { orientation, arrangement: Arrangement::PackedGateFirst };
    weights.convert(layout).unwrap().tensors()[0].clone()
}

#[test]
fn an_up_that_is_computed_again_gives_the_same_gradients() {
    let Some(cuda) = common::device() else { return };
    for turn in 0..if common::partly() { 7 } else { 24 } {
        same_bits::<bf16>(&cuda, turn);
        if turn.is_multiple_of(3) || !common::partly() {
            same_bits::<f16>(&cuda, turn + 1);
            same_bits::<f32>(&cuda, turn + 2);
        }
    }
}

/// Gradients in f32 that micro-batches are added to are those of all their tokens at once, whatever is kept of each: a sum in
/// f32 in another order.
#[test]
fn micro_batches_add_up() {
    const BATCHES: usize = 8;
    let Some(cuda) = common::device() else { return };
    let stream = cuda.stream();
    let [m, k, h] = [9, 64, 96];
    let case = Case { bias: true, ..Case::new(Op::Mlp, [BATCHES * m, k, h], DType::Bf16) };
    let parameters = swiglu_core::conformance::Parameters::<bf16>::new(&case).unwrap();
    let params = parameters.mlp();
    let layer = Mlp::new(&cuda, &params).unwrap();
    let all = |seed| random::normal_matrix::<bf16>(seed, BATCHES * m, k, 1.0).unwrap();
    let (x, dy) = (all(1), all(2));
    let expected = bounds::mlp_backward(x.view(), &params, dy.view(), DType::F32, 0.0).unwrap();
    let zeros = |[rows, cols]: [usize; 2]| DeviceMatrix::<f32>::zeros(&stream, rows, cols).unwrap();
    for policy in [SavePolicy::Save, SavePolicy::SaveGate] {
        let mut sums = [[h, k], [h, k], [k, h], [1, h], [1, h], [1, k]].map(zeros);
        let new = |cols| DeviceMatrix::<bf16>::zeros(&stream, m, cols).unwrap();
        let (mut gate, mut up, mut y) = (new(h), new(h), new(k));
        for batch in 0..BATCHES {
            let rows = batch * m..(batch + 1) * m;
            let there = |of: &Matrix<bf16>| {
                let rows = of.view().rows_range(rows.clone()).unwrap();
                DeviceMatrix::from_host(&stream, rows).unwrap()
            };
            let (x, dy) = (there(&x), there(&dy));
            let kept = keeps(policy, &mut gate, &mut up);
            layer.forward_saving(&stream, x.view(), y.view_mut(), kept).unwrap();
            let [d_gate, d_up, d_down, b_gate, b_up, b_down] =
                sums.each_mut().map(DeviceMatrix::view_mut);
            let into = DeviceGradientsMut::default()
                .with_gate_f32(d_gate)
                .with_up_f32(d_up)
                .with_down_f32(d_down)
                .with_gate_bias(b_gate)
                .with_up_bias(b_up)
                .with_down_bias(b_down)
                .with_accumulate(Accumulate::Add);
            let kept = keeps(policy, &mut gate, &mut up);
            layer.backward(&stream, x.view(), dy.view(), kept, into, None).unwrap();
        }
        let references = [
            &expected.gate,
            &expected.up,
            expected.down.as_ref().unwrap(),
            &expected.gate_bias,
            &expected.up_bias,
            expected.down_bias.as_ref().unwrap(),
        ];
        for (i, (sum, reference)) in sums.iter().zip(references).enumerate() {
            let judgement = reference.judge(sum.to_host().unwrap().view()).unwrap();
            assert!(judgement.passed(), "{policy}, gradient {i}: {judgement:?}");
        }
    }
}

/// Scratch memory of as many bytes as are asked for is enough, and of fewer is refused; where the gate alone is kept, it has
/// an up.
#[test]
fn scratch_memory_of_the_caller_is_what_was_said() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.new_stream().unwrap();
    let [k, h] = [64, 136];
    let case = Case::new(Op::Mlp, [0, k, h], DType::Bf16);
    let parameters = swiglu_core::conformance::Parameters::<bf16>::new(&case).unwrap();
    for path in [None, Some(Path::Unfused)] {
        let layer = match path {
            None => Mlp::new(&cuda, &parameters.mlp()),
            Some(path) => Mlp::with_path(&cuda, &parameters.mlp(), path),
        };
        let layer = layer.unwrap();
        for m in [0, 1, 40] {
            let x = random::normal_matrix::<bf16>(1, m, k, 1.0).unwrap();
            let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
            let bytes = SavePolicy::ALL.map(|policy| layer.training_bytes(m, policy));
            assert_eq!(bytes[1] - bytes[0], (m * h * 2).next_multiple_of(256));
            assert!(bytes[2] >= layer.workspace_bytes(m));
            let with = |policy, bytes: Option<usize>| {
                let new = |cols| DeviceMatrix::<bf16>::zeros(&stream, m, cols).unwrap();
                let (mut gate, mut up, mut y) = (new(h), new(h), new(k));
                let kept = keeps(policy, &mut gate, &mut up);
                let to = y.view_mut();
                match bytes {
                    None if policy == SavePolicy::Recompute => {
                        layer.pre_activations(&stream, x.view(), kept, None)
                    }
                    None => layer.forward_saving(&stream, x.view(), to, kept),
                    Some(bytes) => {
                        let mut buffer = DeviceBuffer::<f32>::new(&stream, bytes / 4)?;
                        buffer.poison(0xFF)?;
                        let mut scratch = DeviceScratch::new(&mut buffer);
                        if policy == SavePolicy::Recompute {
                            layer.pre_activations(&stream, x.view(), kept, Some(&mut scratch))
                        } else {
                            layer.forward_saving_with(&stream, x.view(), to, kept, &mut scratch)
                        }
                    }
                }?;
                Ok::<_, CudaError>([y.to_host()?, gate.to_host()?, up.to_host()?])
            };
            let saved = with(SavePolicy::Save, None).unwrap();
            for (policy, bytes) in SavePolicy::ALL.into_iter().zip(bytes) {
                let plain = with(policy, None).unwrap();
                assert_eq!(plain[1], saved[1], "{policy} {path:?} m {m}");
                assert!(policy == SavePolicy::SaveGate || plain[2] == saved[2], "{policy} m {m}");
                assert!(with(policy, Some(bytes)).unwrap() == plain, "{policy} {path:?} m {m}");
                // Forward passes of a layer that keeps nothing may need more than gate and up alone.
                let exact = policy != SavePolicy::Recompute;
                if let Some(fewer) = bytes.checked_sub(4).filter(|_| exact) {
                    let error = with(policy, Some(fewer)).unwrap_err().to_string();
                    assert!(error.contains("training_bytes"), "{policy} m {m}: {error}");
                }
            }
        }
    }
}

/// Gradients of gate and up are the same bits where h has no place, fused and step by step; with one it is within its bound.
#[test]
fn h_is_written_where_it_has_a_place() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.new_stream().unwrap();
    let [m, k, h] = [40, 64, 136];
    let case = Case::new(Op::Mlp, [0, k, h], DType::Bf16);
    let parameters = swiglu_core::conformance::Parameters::<bf16>::new(&case).unwrap();
    let host = |seed, cols| random::normal_matrix::<bf16>(seed, m, cols, 1.0).unwrap();
    let there = |host: &Matrix<bf16>| DeviceMatrix::from_host(&stream, host.view()).unwrap();
    let (gate, up) = (host(2, h), host(3, h));
    let [dy, gate_there, up_there] = [&host(1, k), &gate, &up].map(there);
    let inputs = GateUpRef::separate(gate.view(), up.view()).unwrap();
    for path in [None, Some(Path::Unfused)] {
        let layer = match path {
            None => Mlp::new(&cuda, &parameters.mlp()),
            Some(path) => Mlp::with_path(&cuda, &parameters.mlp(), path),
        };
        let layer = layer.unwrap();
        let run = |wants_h: bool| {
            let mut to = [(); 3].map(|()| DeviceMatrix::<bf16>::new(&stream, m, h).unwrap());
            to.iter_mut().for_each(|matrix| matrix.buffer_mut().poison(0xFF).unwrap());
            let [d_gate, d_up, h] = &mut to;
            let kept = [gate_there.view(), up_there.view()];
            let grads = [d_gate.view_mut(), d_up.view_mut()];
            let h = wants_h.then(|| h.view_mut());
            layer.backward_gate_up(&stream, dy.view(), kept, grads, h, None).unwrap();
            to.map(|matrix| matrix.to_host().unwrap())
        };
        let ([d_gate, d_up, made], [alone_gate, alone_up, left]) = (run(true), run(false));
        assert!(d_gate == alone_gate && d_up == alone_up, "{path:?}");
        assert!(d_gate.as_slice().iter().all(|v| v.to_f32().is_finite()), "{path:?}");
        assert!(left.as_slice().iter().all(|v| v.to_f32().is_nan()), "{path:?} wrote h");
        let problem = layer.plan(m).problem;
        let bound = bounds::activation(&problem.activation, problem.numerics, &inputs).unwrap();
        assert!(bound.judge(made.view()).unwrap().passed(), "{path:?}");
    }
}

/// Gate and up that are borrowed stay, and give the gradients that those that may be written give; in scratch memory of as many
/// bytes as are asked for, and not of fewer. Products that stay apart round ∂L/∂x once more.
#[test]
fn borrowed_pre_activations_stay_as_they_are() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.new_stream().unwrap();
    let host = |seed, rows, cols| random::normal_matrix::<bf16>(seed, rows, cols, 0.5).unwrap();
    let there = |host: &Matrix<bf16>| DeviceMatrix::from_host(&stream, host.view()).unwrap();
    let (act, lies) = (Activation::SWIGLU, Orientation::OutIn);
    for [m, k, h] in [[40, 64, 136], [70, 72, 100], [0, 64, 96]] {
        let (x, dy) = (host(1, m, k), host(2, m, k));
        let weights = [host(3, h, k), host(4, h, k), host(5, k, h)];
        let [gate_w, up_w, down_w] = weights.each_ref().map(there);
        let (x_there, dy_there) = (there(&x), there(&dy));
        let gated =
            DeviceGatedLinearParams::separate(gate_w.view(), up_w.view(), lies, act).unwrap();
        let params = DeviceMlpParams::new(gated, down_w.view(), lies).unwrap();
        // SAFETY: the weights outlive the layer, and nothing writes them.
        let layer = unsafe { Mlp::from_device(&cuda, &params) }.unwrap();
        let gated = GateUpWeights::separate(weights[0].view(), weights[1].view(), lies).unwrap();
        let host_params =
            MlpParams::new(GatedLinearParams::new(gated, act), weights[2].view(), lies);
        let dense = |rows, cols| {
            let mut made = DeviceMatrix::<bf16>::new(&stream, rows, cols).unwrap();
            made.buffer_mut().poison(0xFF).unwrap();
            made
        };
        let (mut gate, mut up, mut y) = (dense(m, h), dense(m, h), dense(m, k));
        let kept = [gate.view_mut(), up.view_mut()];
        layer.forward_saving(&stream, x_there.view(), y.view_mut(), kept).unwrap();
        let before = [gate.to_host().unwrap(), up.to_host().unwrap()];
        let run = |kept: DeviceKept<'_, bf16>, apart: bool, fewer: usize| {
            let mut to = [dense(m, k), dense(h, k), dense(h, k), dense(k, h)];
            let [dx, d_gate, d_up, d_down] = to.each_mut().map(DeviceMatrix::view_mut);
            let into = DeviceGradientsMut::default()
                .with_dx(dx)
                .with_gate(d_gate)
                .with_up(d_up)
                .with_down(d_down)
                .with_apart(apart);
            let bytes = layer.backward_bytes(&dy_there.view(), &kept, &into)? - fewer;
            let mut buffer = DeviceBuffer::<f32>::new(&stream, bytes / 4)?;
            buffer.poison(0xFF)?;
            let mut scratch = DeviceScratch::new(&mut buffer);
            let (x, dy) = (x_there.view(), dy_there.view());
            layer.backward(&stream, x, dy, kept, into, Some(&mut scratch))?;
            Ok::<_, CudaError>(to.map(|matrix| matrix.to_host().unwrap()))
        };
        let error = run([gate.view(), up.view()].into(), false, 4).unwrap_err().to_string();
        assert!(error.contains("backward_bytes"), "{error}");
        let borrowed = run([gate.view(), up.view()].into(), false, 0).unwrap();
        let apart = run([gate.view(), up.view()].into(), true, 0).unwrap();
        assert!([gate.to_host().unwrap(), up.to_host().unwrap()] == before, "m {m}");
        let (mut d_gate, mut d_up) = (dense(m, h), dense(m, h));
        let grads = [d_gate.view_mut(), d_up.view_mut()];
        let kept = [gate.view(), up.view()];
        layer.backward_gate_up(&stream, dy_there.view(), kept, grads, None, None).unwrap();
        let d_gate = d_gate.to_host().unwrap();
        let consumed = run([gate.view_mut(), up.view_mut()].into(), false, 0).unwrap();

        let mut expected =
            bounds::mlp_backward(x.view(), &host_params, dy.view(), DType::Bf16, 0.0).unwrap();
        for (grads, apart) in [(&borrowed, false), (&consumed, false), (&apart, true)] {
            if apart {
                // The product with gate's weights is rounded before that with up's is added.
                let bounds = expected.dx.reference.bound.as_mut_slice();
                for (at, bound) in bounds.iter_mut().enumerate() {
                    let row = d_gate.view().row(at / k).iter();
                    let weights = weights[0].as_slice().iter().skip(at % k).step_by(k);
                    let terms = row.zip(weights).map(|(d, w)| d.to_f64() * w.to_f64());
                    *bound += 2f64.powi(-8) * terms.sum::<f64>().abs();
                }
            }
            let references =
                [&expected.dx, &expected.gate, &expected.up, expected.down.as_ref().unwrap()];
            for (i, (found, reference)) in grads.iter().zip(references).enumerate() {
                let judgement = reference.judge(found.view()).unwrap();
                assert!(judgement.passed(), "m {m}, apart {apart}, gradient {i}: {judgement:?}");
            }
        }
    }
}
