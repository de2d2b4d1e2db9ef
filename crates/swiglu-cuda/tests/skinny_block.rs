//! The feed-forward block of few tokens by two kernels of ours, the second of which has the down projection.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use crate::common;

use swiglu_core::conformance::{Backend, Case, Parameters};
use swiglu_core::{
    Activation, Arrangement, DType, Matrix, MatrixRef, Numerics, Op, Orientation, WeightLayout,
    bf16, bounds, random,
};
use swiglu_cuda::{Cuda, CudaBackend, DecodeDesign, DeviceMatrix, Mlp, Stream};

/// The ways of up to 16 tokens, as records name them: each kernel alone on an SM, or beside the other.
const WAYS: [&str; 2] = [
    "sm90_skinny_gated_gemm 16xfitted + sm90_skinny_gemm",
    "sm90_skinny_gated_gemm 16xfitted beside sm90_skinny_gemm",
];
/// That of up to 8 tokens whose down weights fit into registers.
const REGISTERS: &str = "sm90_skinny_gated_gemm 16xfitted beside sm90_register_gemm";
/// As plans name the first two, and the third.
const KERNEL: &str = "sm90_skinny_gated_gemm + sm90_skinny_gemm";
const REGISTERS_KERNEL: &str = "sm90_skinny_gated_gemm + sm90_register_gemm";

/// The device, if it is of sm_90a, or nothing after saying why.
fn hopper() -> Option<Cuda> {
    let cuda = common::device()?;
    if cuda.facts().compute_capability == (9, 0) {
        return Some(cuda);
    }
    swiglu_testing::not_run(format_args!("{} is not of sm_90", cuda.facts().name));
    None
}

/// Every class of tokens and both of its ends; extents with fewer features than a tile has rows, which end within
/// a panel or a stage, or let the ring go round, with fewer stages than warpgroups that multiply them.
fn cases(dtype: DType) -> Vec<Case> {
    let shapes = [
        [64, 64],
        [1, 1],
        [5, 3],
        [33, 31],
        [136, 130],
        [257, 65],
        [72, 520],
        [40, 5000],
        [600, 40],
        [200, 1700],
        [96, 2050],
    ];
    let tokens = (1..=20).chain([25, 31, 32]);
    let (family, numerics) = (Activation::family(), Numerics::all().collect::<Vec<_>>());
    let case = |(turn, m): (usize, usize)| {
        let [k, h]: [usize; 2] = shapes[turn % shapes.len()];
        let arrangement = match turn % 3 {
            0 => Arrangement::Separate,
            1 => Arrangement::PackedUpFirst,
            _ => Arrangement::Interleaved { group: 1 },
        };
        Case {
            activation: family[turn % 3 * 4],
            numerics: numerics[turn % 2 * 2],
            layout: WeightLayout { orientation: Orientation::ALL[turn / 3 % 2], arrangement },
            bias: turn % 2 == 0,
            // Rows that TMA addresses: with others another kernel would be tested.
            padding: k.next_multiple_of(8) - k + [0, 8, 16][turn / 2 % 3],
            seed: turn as u64,
            ..Case::new(Op::Mlp, [m, k, h], dtype)
        }
    };
    // Every shape with two numbers of tokens and more.
    tokens.enumerate().map(case).collect()
}

#[test]
fn one_to_thirty_two_tokens() {
    let Some(cuda) = hopper() else { return };
    let backends = CudaBackend::all(&cuda);
    let by_name = |way: &str| backends.iter().find(|b| b.name().ends_with(way)).unwrap();
    let two = WAYS.map(by_name);
    for (dtype, way) in [DType::Bf16, DType::F16].into_iter().flat_map(|d| [(d, 0), (d, 1)]) {
        // On the simulator each case once: a way and a type have every fourth.
        let first = 2 * way + usize::from(dtype == DType::F16);
        let (first, every) = if common::partly() { (first, 4) } else { (0, 1) };
        let cases: Vec<_> = cases(dtype).into_iter().skip(first).step_by(every).collect();
        let count = cases.len();
        assert_eq!(common::judge(two[way], cases.into_iter()), count);
    }
    // So wide a tile that few stages fit, and a ring that goes round: stages are given back at once.
    let sms = cuda.facts().sm_count as usize;
    let wide = 112 * sms;
    let round = |m| Case { bias: true, ..Case::new(Op::Mlp, [m, 1000, wide], DType::Bf16) };
    for backend in two {
        assert_eq!(common::judge(backend, [3, 16].into_iter().map(round)), 2);
    }
    // Several stages of weights under way, and more steps than that and than the ring has.
    let paced = |m| Case { bias: true, ..Case::new(Op::Mlp, [m, 1000, 40 * sms], DType::Bf16) };
    assert_eq!(common::judge(two[1], [1, 12].into_iter().map(paced)), 2);
    // The same of the down weights.
    let long = |m| Case { bias: true, ..Case::new(Op::Mlp, [m, 600, 3000], DType::Bf16) };
    assert_eq!(common::judge(two[0], [2, 16].into_iter().map(long)), 2);
    let more = Case::new(Op::Mlp, [33, 64, 64], DType::Bf16);
    let layer = Case { m: 4, op: Op::GatedLinear, ..more };
    let single = Case { m: 4, dtype: DType::F32, ..more };
    assert!(
        [more, layer, single].iter().all(|case| !two[0].computes(case) && !two[1].computes(case))
    );
}

#[test]
fn down_weights_in_registers() {
    let Some(cuda) = hopper() else { return };
    let backends = CudaBackend::all(&cuda);
    let backend = backends.iter().find(|b| b.name().ends_with(REGISTERS)).unwrap();
    let sms = cuda.facts().sm_count as usize;
    for dtype in [DType::Bf16, DType::F16] {
        // One slice of k or part of one, the first warps or all, all that registers hold; features that end within a
        // tile or a cluster, with tiles of both widths, by clusters of four blocks and of two.
        let fours = [[64, 64], [1, 8], [5, 24], [7, 3000], [9, 5120], [32, 6144], [33, 520]];
        let pairs = [[8 * sms, 32], [8 * sms, 4000], [16 * sms, 3072], [9 * sms, 40]];
        let shapes = fours.into_iter().chain(pairs);
        let case = |(turn, [k, h]): (usize, [usize; 2])| Case {
            activation: Activation::family()[turn % 5],
            numerics: Numerics::all().nth(turn % 3).unwrap(),
            layout: WeightLayout { orientation: Orientation::ALL[turn % 2], ..WeightLayout::HF },
            bias: turn % 3 != 0,
            padding: k.next_multiple_of(8) - k + [0, 8, 16][turn % 3],
            seed: turn as u64,
            ..Case::new(Op::Mlp, [turn % 8 + 1, k, h], dtype)
        };
        // On the simulator the two types take turns.
        let first = usize::from(dtype == DType::F16);
        let (first, every) = if common::partly() { (first, 2) } else { (0, 1) };
        let tokens =
            (1..=8).map(|m| Case { bias: true, ..Case::new(Op::Mlp, [m, 40, 1304], dtype) });
        for cases in [shapes.enumerate().map(case).collect::<Vec<_>>(), tokens.collect()] {
            let part: Vec<_> = cases.into_iter().skip(first).step_by(every).collect();
            let count = part.len();
            assert_eq!(common::judge(backend, part.into_iter()), count);
        }
    }
    // Too many tokens; rows that end within an access; more weights than registers, or more tiles than
    // SMs.
    let refused =
        [[9, 64, 64], [4, 64, 60], [4, 64, 6152], [4, 16 * sms, 3080], [4, 16 * sms + 1, 8]];
    for extents in refused {
        assert!(!backend.computes(&Case::new(Op::Mlp, extents, DType::Bf16)), "{extents:?}");
    }
}

/// Calls behind each other share the workspace, and kernels of two calls run at the same time: the last of one beside the
/// first of the next, of the same layer, of another, or of one that the decode kernel computes.
#[test]
fn calls_follow_each_other_closely() {
    let Some(cuda) = hopper() else { return };
    WAYS.into_iter().chain([REGISTERS]).for_each(|way| follow_each_other(&cuda, way));
}

fn follow_each_other(cuda: &Cuda, way: &str) {
    let m = 5;
    let (k, widths, replays) = match common::has_gpu() {
        true => (896, [4864, 1304], 200),
        false => (64, [328, 96], 2),
    };
    let case = |h| Case { bias: true, ..Case::new(Op::Mlp, [m, k, h], DType::Bf16) };
    let parameters = widths.map(|h| Parameters::<bf16>::new(&case(h)).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let problems = parameters.each_ref().map(|p| p.mlp().problem(m));
    let tuned = common::preferring(cuda, dir.path(), way, &problems);
    let [first, second] = parameters.each_ref().map(|p| Mlp::new(&tuned, &p.mlp()).unwrap());
    let design = Some(DecodeDesign::BulkOneLaunch);
    let decoded = Mlp::with_design(&tuned, &parameters[1].mlp(), design).unwrap();
    assert!([&first, &second].iter().all(|l| l.plan(m).kernel.contains("skinny")), "{way}");
    let layers: [&Mlp<bf16>; 8] =
        [&first, &first, &second, &first, &decoded, &first, &second, &second];

    let stream = tuned.new_stream().unwrap();
    let inputs = [0, 1, 2, 3, 4, 5, 6, 7].map(|seed| {
        let x = random::normal_matrix::<bf16>(seed, m, k, 1.0).unwrap();
        DeviceMatrix::from_host(&stream, x.view()).unwrap()
    });
    // One call at a time.
    let calls = layers.iter().zip(&inputs);
    let expected: Vec<_> = calls.map(|(layer, x)| forward(layer, &stream, x)).collect();
    layers.iter().for_each(|layer| layer.reserve(&stream, m).unwrap());
    let mut outputs = [(); 8].map(|()| DeviceMatrix::<bf16>::new(&stream, m, k).unwrap());
    let graph = stream
        .capture(|| {
            let mut calls = layers.iter().zip(&inputs).zip(&mut outputs);
            calls.try_for_each(|((layer, x), y)| layer.forward(&stream, x.view(), y.view_mut()))
        })
        .unwrap();
    for replay in 0..replays {
        outputs.iter_mut().for_each(|y| y.buffer_mut().poison(0xFF).unwrap());
        stream.synchronize().unwrap();
        // SAFETY: the matrices and the layers live on, and nothing else runs on the stream.
        unsafe { graph.launch(&stream) }.unwrap();
        for (i, (y, expected)) in outputs.iter().zip(&expected).enumerate() {
            assert!(y.to_host().unwrap() == *expected, "{way}: call {i} of replay {replay}");
        }
    }
}

fn forward(layer: &Mlp<bf16>, stream: &Stream, x: &DeviceMatrix<bf16>) -> Matrix<bf16> {
    let mut y = DeviceMatrix::<bf16>::new(stream, x.rows(), layer.hidden()).unwrap();
    y.buffer_mut().poison(0xFF).unwrap();
    layer.forward(stream, x.view(), y.view_mut()).unwrap();
    y.to_host().unwrap()
}

/// It waits for a measurement, and then goes through plans, graphs and repetition as every other way: the same bits
/// on every launch, over what another input left in the workspace.
#[test]
fn a_record_makes_it_the_plan() {
    let Some(cuda) = hopper() else { return };
    WAYS.iter().for_each(|way| record_makes_plan(&cuda, way, KERNEL, [5, 30], 32));
    record_makes_plan(&cuda, REGISTERS, REGISTERS_KERNEL, [5, 8], 8);
}

/// `most`: tokens, of which a record says that this way is the fastest, as of 8.
fn record_makes_plan(cuda: &Cuda, way: &str, kernel: &str, tokens: [usize; 2], most: usize) {
    // A simulated device has few SMs, whose registers hold less of more features.
    let (k, h) = (if way == REGISTERS { 40 } else { 72 }, 1304);
    let case = |m| Case { bias: true, ..Case::new(Op::Mlp, [m, k, h], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case(8)).unwrap();
    let problem = |m| parameters.mlp().problem(m);
    let offered = cuda.candidates(&problem(8), None).into_iter().find(|c| c.name == way).unwrap();
    assert!(!offered.chosen && offered.predicted_us.unwrap() > 0.0, "{offered:?}");
    assert!(offered.reason.contains("once `swiglu tune` has measured it"), "{offered:?}");
    let more = cuda.candidates(&problem(most + 1), None);
    let more = more.into_iter().find(|c| c.name == way).unwrap();
    let why = format!("{} tokens; expected at most {most}", most + 1);
    assert!(more.reason.contains(&why), "{more:?}");

    let dir = tempfile::tempdir().unwrap();
    let tuned = common::preferring(cuda, dir.path(), way, &[8, most].map(problem));
    let layer = Mlp::new(&tuned, &parameters.mlp()).unwrap();
    assert!([5, 8, tokens[1]].iter().all(|&m| layer.plan(m).kernel == kernel));
    assert!([1, most + 1, 300].iter().all(|&m| layer.plan(m).kernel != kernel));
    let plan = layer.plan(8);
    assert!(plan.parameters.contains_key("down_tile_h"), "{plan:?}");

    let stream = tuned.new_stream().unwrap();
    for m in tokens {
        let inputs = [1, 2].map(|seed| random::normal_matrix::<bf16>(seed, m, k, 1.0).unwrap());
        let on_device =
            inputs.each_ref().map(|x| DeviceMatrix::from_host(&stream, x.view()).unwrap());
        let first = on_device.each_ref().map(|x| forward(&layer, &stream, x));
        for (x, y) in inputs.iter().zip(&first) {
            let reference = bounds::mlp(x.view(), &parameters.mlp()).unwrap();
            let judgement = reference.judge(MatrixRef::from(y)).unwrap();
            assert!(judgement.passed(), "{judgement:?}");
        }
        for i in 0..if common::has_gpu() { 1000 } else { 8 } {
            let y = forward(&layer, &stream, &on_device[i % 2]);
            assert!(y == first[i % 2], "m = {m}: launch {i} differs");
        }
        replay(&layer, m, &inputs, &first);
    }
}

/// Reserving is enough to capture, and calls behind each other wait for each other: each but the first reads what the
/// one before it wrote.
fn replay(layer: &Mlp<bf16>, m: usize, inputs: &[Matrix<bf16>; 2], expected: &[Matrix<bf16>; 2]) {
    let k = layer.hidden();
    let stream = layer.cuda().new_stream().unwrap();
    let mut x = DeviceMatrix::<bf16>::zeros(&stream, m, k).unwrap();
    let mut between = DeviceMatrix::<bf16>::zeros(&stream, m, k).unwrap();
    let mut y = DeviceMatrix::<bf16>::zeros(&stream, m, k).unwrap();
    layer.reserve(&stream, m).unwrap();
    let graph = stream
        .capture(|| {
            layer.forward(&stream, x.view(), between.view_mut())?;
            layer.forward(&stream, between.view(), y.view_mut())
        })
        .unwrap();
    for (input, expected) in inputs.iter().zip(expected) {
        x.view_mut().upload(&stream, input.view()).unwrap();
        between.buffer_mut().poison(0xFF).unwrap();
        y.buffer_mut().poison(0xFF).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: the matrices and the layer live on, and nothing else runs on the stream.
        unsafe { graph.launch(&stream) }.unwrap();
        let replayed = y.to_host().unwrap();
        assert!(between.to_host().unwrap() == *expected);
        let twice =
            forward(layer, &stream, &DeviceMatrix::from_host(&stream, expected.view()).unwrap());
        assert!(replayed == twice);
    }
}

/// x that TMA cannot read goes another way to h; what follows is the same.
#[test]
fn x_in_the_middle_of_a_row() {
    let Some(cuda) = hopper() else { return };
    x_anywhere(&cuda, WAYS[1], KERNEL, [12, 104]);
    x_anywhere(&cuda, REGISTERS, REGISTERS_KERNEL, [7, 40]);
}

fn x_anywhere(cuda: &Cuda, way: &str, kernel: &str, [m, k]: [usize; 2]) {
    let case = Case { bias: true, ..Case::new(Op::Mlp, [m, k, 72], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let tuned = common::preferring(cuda, dir.path(), way, &[parameters.mlp().problem(m)]);
    let (stream, layer) = (tuned.stream(), Mlp::new(&tuned, &parameters.mlp()).unwrap());
    assert_eq!(layer.plan(m).kernel, kernel);
    let x = random::normal_matrix::<bf16>(9, m, k, 1.0).unwrap();
    let reference = bounds::mlp(x.view(), &parameters.mlp()).unwrap();
    for (wider, at) in [(0, 0), (16, 8), (16, 3), (5, 5)] {
        let width = k + wider;
        let mut all = vec![bf16::from_f32(f32::NAN); m * width];
        for (row, x) in all.chunks_mut(width).zip(x.as_slice().chunks(k)) {
            row[at..at + k].copy_from_slice(x);
        }
        let all = Matrix::from_vec(all, m, width).unwrap();
        let around = DeviceMatrix::from_host(&stream, all.view()).unwrap();
        let mut y = DeviceMatrix::<bf16>::new(&stream, m, k).unwrap();
        y.buffer_mut().poison(0xFF).unwrap();
        layer
            .forward(&stream, around.view().cols_range(at..at + k).unwrap(), y.view_mut())
            .unwrap();
        let judgement = reference.judge(MatrixRef::from(&y.to_host().unwrap())).unwrap();
        assert!(judgement.passed(), "{way}, {width} {at}: {judgement:?}");
    }
}
