//! The feed-forward block for a few tokens: all designs of the decode kernels.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;
#[path = "decode/quantized.rs"]
mod quantized;

use swiglu_core::conformance::{Backend, Case, Parameters, QuantizedParameters, quantized_suite};
use swiglu_core::quant::{
    BlockType, QuantizedMatrix, QuantizedMlpParams, QuantizedType, QuantizedTypes, e4m3_to_f32,
};
use swiglu_core::{
    Activation, Arrangement, DType, Element, Matrix, MatrixRef, Numerics, Op, Orientation,
    QuantizedGatedLinearParams, WeightLayout, bf16, bounds, f16, random,
};
use swiglu_cuda::{Cuda, CudaBackend, DecodeDesign, DeviceMatrix, Mlp, Stream, quantized_types};

fn designs(cuda: &Cuda) -> Vec<CudaBackend> {
    let all = CudaBackend::all(cuda).into_iter();
    let mut designs: Vec<_> = all.filter(|b| b.name().contains("decode_mlp")).collect();
    assert_eq!(designs.len(), 4);
    designs.retain(|b| b.computes(&Case::new(Op::Mlp, [1, 64, 64], DType::F32)));
    assert_eq!(designs.len(), if has_tma(cuda) { 4 } else { 2 });
    designs
}

/// Of sm_90a, the kind that `sm90_decode_mlp.cu` is for.
fn has_tma(cuda: &Cuda) -> bool {
    cuda.facts().compute_capability == (9, 0)
}

/// A layer that goes each way the device has.
fn layers<T: Element>(cuda: &Cuda, parameters: &Parameters<T>) -> Vec<Mlp<T>> {
    let mut designs = vec![DecodeDesign::OneLaunch, DecodeDesign::TwoLaunches];
    if has_tma(cuda) {
        designs.extend([DecodeDesign::BulkOneLaunch, DecodeDesign::BulkOneLaunchWide]);
    }
    let by_design = |design| {
        let layer = Mlp::with_design(cuda, &parameters.mlp(), Some(design)).unwrap();
        assert_eq!(layer.design(1), Some(design));
        layer
    };
    designs.into_iter().map(by_design).collect()
}

/// Every M that the kernel has a class for, over extents around the edges of units, tiles, warps and
/// grids: with fewer features than blocks, with rows that end inside a copy.
fn cases(dtype: DType) -> Vec<Case> {
    let shapes = [
        [64, 64],
        [1, 1],
        [5, 3],
        [32, 200],
        [33, 31],
        [136, 130],
        [257, 65],
        [72, 520],
        [600, 40],
    ];
    let family = Activation::family();
    let numerics: Vec<Numerics> = Numerics::all().collect();
    let mut cases = Vec::new();
    for m in 1..=16 {
        for (i, [k, h]) in shapes.into_iter().enumerate() {
            let turn = m * 5 + i * 3;
            let orientation = Orientation::ALL[turn / 3 % 2];
            let arrangement = match turn % 3 {
                0 => Arrangement::Separate,
                1 => Arrangement::PackedUpFirst,
                _ => Arrangement::Interleaved { group: 1 },
            };
            cases.push(Case {
                // The suite has the others; each is a kernel of its own.
                activation: family[i % 3 * 4],
                numerics: numerics[i % 3 * 2],
                layout: WeightLayout { orientation, arrangement },
                bias: turn % 2 == 0,
                padding: [0, 8, 5][(m + i / 2) % 3],
                seed: turn as u64,
                ..Case::new(Op::Mlp, [m, k, h], dtype)
            });
        }
    }
    cases
}

fn judge(backend: &CudaBackend, cases: &[Case]) {
    assert!(common::judge(backend, cases.iter().copied()) > 0, "{}", backend.name());
}

#[test]
fn one_to_sixteen_tokens() {
    let Some(cuda) = common::device() else { return };
    let every = if common::partly() { 107 } else { 1 };
    for (i, backend) in designs(&cuda).iter().enumerate() {
        for (j, dtype) in DType::ALL.into_iter().enumerate() {
            let part: Vec<_> =
                cases(dtype).into_iter().skip((3 * i + j) % every).step_by(every).collect();
            judge(backend, &part);
        }
    }
}

/// Rings that go round many times, warps whose ranges cross tiles, a share of more than one tile of
/// down rows for each block.
#[test]
fn long_rings() {
    let Some(cuda) = common::device() else { return };
    let cases = [(1, DType::Bf16), (7, DType::Bf16), (16, DType::F16), (3, DType::F32)];
    for (i, backend) in designs(&cuda).into_iter().enumerate() {
        for (j, (m, dtype)) in cases.into_iter().enumerate() {
            if !common::partly() || i == j {
                let case = Case { bias: true, ..Case::new(Op::Mlp, [m, 520, 1042], dtype) };
                judge(&backend, &[case]);
            }
        }
    }
}

/// Rows of several pieces, the last of them short and no multiple of 64 bytes; fewer rows than a tile has.
#[test]
fn pieces_of_rows() {
    let Some(cuda) = common::device() else { return };
    let cases = [
        (1, 1100, 330, DType::Bf16),
        (2, 1305, 1401, DType::F16),
        (6, 2056, 12, DType::Bf16),
        (13, 1100, 330, DType::F16),
        (8, 1030, 41, DType::F32),
    ];
    for (i, backend) in designs(&cuda).iter().enumerate() {
        for (j, (m, k, h, dtype)) in cases.into_iter().enumerate() {
            // Every second has a turn, of each kernel's two designs the one or the other.
            if !common::partly() || (i + j) % 2 == 0 {
                let bias = i % 2 == 0;
                judge(backend, &[Case { bias, ..Case::new(Op::Mlp, [m, k, h], dtype) }]);
            }
        }
    }
}

/// Tokens that are read through the cache, since x or h has no room in shared memory.
#[test]
fn tokens_that_do_not_fit_in_shared_memory() {
    let Some(cuda) = common::device() else { return };
    // More tokens take as much room with fewer features, and the simulator works through these.
    let [m, h] = if common::partly() { [4, 30_001] } else { [1, 110_001] };
    for (i, backend) in designs(&cuda).into_iter().enumerate() {
        for (j, (m, k, h, dtype)) in [
            (16, 72, 4100, DType::Bf16),
            (16, 6504, 40, DType::F16),
            (2, 40_960, 8, DType::Bf16),
            (m, 8, h, DType::F16),
            (8, 16, 6002, DType::F32),
            (4, 20_000, 6, DType::F32),
        ]
        .into_iter()
        .enumerate()
        {
            // On the simulator the two designs of each kernel take turns.
            if common::partly() && (i + j) % 2 == 1 {
                continue;
            }
            let case = Case::new(Op::Mlp, [m, k, h], dtype);
            // On a device of few SMs decode_mlp.cu has no room for its partial sums of most.
            if backend.computes(&case) || backend.name().contains("sm90") {
                judge(&backend, &[case]);
            }
        }
    }
}

/// The bits of y for `x` of `layer`, computed on `stream` over memory that held NaNs.
fn forward<T: Element>(layer: &Mlp<T>, stream: &Stream, x: &DeviceMatrix<T>) -> Matrix<T> {
    let mut y = DeviceMatrix::<T>::new(stream, x.rows(), layer.hidden()).unwrap();
    y.buffer_mut().poison(0xFF).unwrap();
    layer.forward(stream, x.view(), y.view_mut()).unwrap();
    y.to_host().unwrap()
}

/// x that begins anywhere in a row of something larger: the same bits, whether its rows are whole 16 bytes
/// or not.
#[test]
fn x_in_the_middle_of_a_row() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.new_stream().unwrap();
    for m in [1, 2, 5, 12] {
        let case = Case { bias: true, ..Case::new(Op::Mlp, [m, 104, 70], DType::Bf16) };
        let parameters = Parameters::<bf16>::new(&case).unwrap();
        let x = random::normal_matrix::<bf16>(m as u64, m, 104, 1.0).unwrap();
        let reference = bounds::mlp(x.view(), &parameters.mlp()).unwrap();
        // (columns around x, where x begins)
        let places = [(0, 0), (16, 8), (16, 3), (5, 0), (5, 5)].map(|(more, at)| {
            let (columns, width) = (at..at + 104, 104 + more);
            let mut all = vec![bf16::from_f32(f32::NAN); m * width];
            for (row, x) in all.chunks_mut(width).zip(x.as_slice().chunks(104)) {
                row[columns.clone()].copy_from_slice(x);
            }
            let all = Matrix::from_vec(all, m, width).unwrap();
            (DeviceMatrix::from_host(&stream, all.view()).unwrap(), columns)
        });
        for layer in layers(&cuda, &parameters) {
            let ys = places.each_ref().map(|(around, columns)| {
                let mut y = DeviceMatrix::<bf16>::new(&stream, m, 104).unwrap();
                y.buffer_mut().poison(0xFF).unwrap();
                let x = around.view().cols_range(columns.clone()).unwrap();
                layer.forward(&stream, x, y.view_mut()).unwrap();
                y.to_host().unwrap()
            });
            assert!(reference.judge(MatrixRef::from(&ys[0])).unwrap().passed());
            assert!(ys.iter().all(|y| *y == ys[0]), "m = {m}: {:?}", layer.design(m));
        }
    }
}

/// Tiles of one row, of which most warps that ask for copies have none.
#[test]
fn fewer_rows_than_warps() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.new_stream().unwrap();
    let parameters = Parameters::<bf16>::new(&Case::new(Op::Mlp, [1, 72, 4], DType::Bf16)).unwrap();
    let values = random::normal_matrix::<bf16>(5, 1, 72, 1.0).unwrap();
    let x = DeviceMatrix::from_host(&stream, values.view()).unwrap();
    let reference = bounds::mlp(values.view(), &parameters.mlp()).unwrap();
    let launches = if common::partly() { 60 } else { 400 };
    for layer in layers(&cuda, &parameters) {
        for _ in 0..launches {
            let y = forward(&layer, &stream, &x);
            assert!(reference.judge(MatrixRef::from(&y)).unwrap().passed());
        }
    }
}

/// The same bits on every launch, whichever order the simulator runs the threads in: each launch has
/// a schedule of its own, and inputs change in between, so that what an earlier launch left in the
/// workspace is wrong.
#[test]
fn repeated_launches_are_bitwise_equal() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.new_stream().unwrap();
    // The simulator has fewer orders to offer than a device.
    let part = match (common::has_gpu(), common::every_case()) {
        (true, _) => 1,
        (false, true) => 5,
        (false, false) => 20,
    };
    for (m, launches) in [(1, 1000 / part), (5, 200 / part), (16, 100 / part)] {
        let case = Case { bias: true, ..Case::new(Op::Mlp, [m, 40, 88], DType::Bf16) };
        let parameters = Parameters::<bf16>::new(&case).unwrap();
        let inputs = [1, 2].map(|seed| {
            let x = random::normal_matrix::<bf16>(seed, m, 40, 1.0).unwrap();
            DeviceMatrix::from_host(&stream, x.view()).unwrap()
        });
        for layer in layers(&cuda, &parameters) {
            assert!(layer.design(m).is_some());
            let first = inputs.each_ref().map(|x| forward(&layer, &stream, x));
            assert_ne!(first[0], first[1]);
            for i in 2..launches {
                let y = forward(&layer, &stream, &inputs[i % 2]);
                assert!(y == first[i % 2], "m = {m}: launch {i} differs");
            }
        }
    }
}

/// Two streams have a workspace and a barrier each.
#[test]
fn two_streams_at_once() {
    let Some(cuda) = common::device() else { return };
    let case = Case::new(Op::Mlp, [4, 72, 96], DType::F16);
    let parameters = Parameters::<f16>::new(&case).unwrap();
    let layers = layers(&cuda, &parameters);
    let work = |seed: u64| {
        let stream = cuda.new_stream().unwrap();
        let values = random::normal_matrix::<f16>(seed, 4, 72, 1.0).unwrap();
        let x = DeviceMatrix::from_host(&stream, values.view()).unwrap();
        let reference = bounds::mlp(values.view(), &parameters.mlp()).unwrap();
        for layer in layers.iter().cycle().take(if common::has_gpu() { 1000 } else { 60 }) {
            let y = forward(layer, &stream, &x);
            let judgement = reference.judge(MatrixRef::from(&y)).unwrap();
            assert!(judgement.passed(), "{judgement:?}");
        }
    };
    std::thread::scope(|scope| {
        for seed in [3, 4] {
            let work = &work;
            scope.spawn(move || work(seed));
        }
    });
}

/// A captured call computes what a plain one does, also after the workspace has grown, also between
/// plain calls on the same stream; and `reserve` alone is enough to capture.
#[test]
fn graphs_replay() {
    let Some(cuda) = common::device() else { return };
    let case = Case { bias: true, ..Case::new(Op::Mlp, [2, 72, 80], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    for layer in layers(&cuda, &parameters) {
        replay(&cuda.new_stream().unwrap(), &layer, &parameters);
    }
}

fn replay(stream: &Stream, layer: &Mlp<bf16>, parameters: &Parameters<bf16>) {
    let mut x = DeviceMatrix::<bf16>::zeros(stream, 2, 72).unwrap();
    let mut y = DeviceMatrix::<bf16>::zeros(stream, 2, 72).unwrap();
    layer.reserve(stream, 2).unwrap();
    let graph = stream.capture(|| layer.forward(stream, x.view(), y.view_mut())).unwrap();
    layer.reserve(stream, 300).unwrap();
    for seed in 0..5 {
        let values = random::normal_matrix::<bf16>(seed, 2, 72, 1.0).unwrap();
        x.view_mut().upload(stream, values.view()).unwrap();
        y.buffer_mut().poison(0xFF).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: x, y and the layer live on, and nothing else runs on the stream.
        unsafe { graph.launch(stream) }.unwrap();
        let replayed = y.to_host().unwrap();
        assert_eq!(replayed, forward(layer, stream, &x));
        let reference = bounds::mlp(values.view(), &parameters.mlp()).unwrap();
        assert!(reference.judge(MatrixRef::from(&replayed)).unwrap().passed());
    }
}

/// What cannot be decoded goes step by step, and `explain` says why.
#[test]
fn plans_name_the_obstacles() {
    let Some(cuda) = common::device() else { return };
    let problem = |m, dtype| {
        let case = Case::new(Op::Mlp, [m, 896, 4864], dtype);
        let parameters = Case { hidden: 8, intermediate: 8, ..case };
        let small = Parameters::<f32>::new(&Case { dtype: DType::F32, ..parameters }).unwrap();
        small
            .mlp()
            .problem(m)
            .with_hidden(896)
            .with_intermediate(4864)
            .with_dtype(dtype)
            .with_numerics(Numerics::default_for(dtype))
    };
    let reasons = |m, dtype| {
        let candidates = cuda.candidates(&problem(m, dtype), None);
        assert_eq!(candidates.iter().filter(|c| c.chosen).count(), 1);
        let of_decode = candidates.into_iter().filter(|c| c.name.starts_with("decode_mlp"));
        of_decode.map(|c| c.reason).collect::<Vec<_>>().join("; ")
    };
    assert!(reasons(1, DType::Bf16).contains("expected"), "{}", reasons(1, DType::Bf16));
    assert!(reasons(17, DType::Bf16).contains("17 tokens; expected at most 16"));
    assert!(reasons(9, DType::F32).contains("9 tokens; expected at most 8"));
    assert_ne!(cuda.plan(problem(17, DType::Bf16), None).unwrap().kernel, "decode_mlp");
    let unfused = cuda.plan(problem(1, DType::Bf16), Some(swiglu_core::Path::Unfused)).unwrap();
    assert_ne!(unfused.kernel, "decode_mlp");
}

/// What TMA feeds was measured with 16-bit values: f32 is offered, and not taken before a record
/// says that it was the fastest.
#[test]
fn the_tma_waits_for_a_measurement_of_f32() {
    let Some(cuda) = common::device() else { return };
    if !has_tma(&cuda) {
        return;
    }
    let case = |dtype| Case::new(Op::Mlp, [2, 72, 96], dtype);
    let parameters = Parameters::<bf16>::new(&case(DType::Bf16)).unwrap();
    let planned = cuda.plan(parameters.mlp().problem(2), None).unwrap();
    assert_eq!(planned.kernel, "sm90_decode_mlp", "{}", planned.reason);
    // Whole blocks.
    let problem = parameters.mlp().problem(2).with_hidden(64);
    for &kind in quantized_types() {
        let quantized = Some(QuantizedTypes::of(Op::Mlp, kind));
        let planned = cuda.plan(problem.with_quantized(quantized), None).unwrap();
        assert_eq!(planned.kernel, "sm90_held_mlp", "{kind}: {}", planned.reason);
    }

    let parameters = Parameters::<f32>::new(&case(DType::F32)).unwrap();
    let problem = parameters.mlp().problem(2);
    let fastest = "sm90_decode_mlp 16 warps";
    let offered = |cuda: &Cuda| {
        let candidates = cuda.candidates(&problem, None);
        candidates.into_iter().find(|c| c.name == fastest).unwrap()
    };
    let before = offered(&cuda);
    assert!(!before.chosen && before.predicted_us.is_some(), "{before:?}");
    assert!(before.reason.contains("once `swiglu tune` has measured it"), "{before:?}");
    assert_ne!(cuda.plan(problem, None).unwrap().kernel, "sm90_decode_mlp");

    let dir = tempfile::tempdir().unwrap();
    let tuned = common::preferring(&cuda, dir.path(), fastest, &[problem]);
    assert!(offered(&tuned).chosen, "{:?} {:?}", offered(&tuned), tuned.tuning_notes());
    assert_eq!(tuned.plan(problem, None).unwrap().kernel, "sm90_decode_mlp");
    let layer = Mlp::new(&tuned, &parameters.mlp()).unwrap();
    let values = random::normal_matrix::<f32>(7, 2, 72, 1.0).unwrap();
    let x = DeviceMatrix::from_host(&tuned.stream(), values.view()).unwrap();
    let y = forward(&layer, &tuned.stream(), &x);
    let reference = bounds::mlp(values.view(), &parameters.mlp()).unwrap();
    assert!(reference.judge(MatrixRef::from(&y)).unwrap().passed());
}

/// The warning computes the same.
#[test]
fn the_sequential_kernel() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.stream();
    for (m, seed) in [(1, 1), (3, 2), (16, 3)] {
        let case = Case { bias: true, ..Case::new(Op::Mlp, [m, 72, 100], DType::Bf16) };
        let parameters = Parameters::<bf16>::new(&case).unwrap();
        let design = Some(DecodeDesign::Sequential);
        let layer = Mlp::with_design(&cuda, &parameters.mlp(), design).unwrap();
        let values = random::normal_matrix::<bf16>(seed, m, 72, 1.0).unwrap();
        let x = DeviceMatrix::from_host(&stream, values.view()).unwrap();
        let y = forward(&layer, &stream, &x);
        let reference = bounds::mlp(values.view(), &parameters.mlp()).unwrap();
        assert!(reference.judge(MatrixRef::from(&y)).unwrap().passed());
    }
}
