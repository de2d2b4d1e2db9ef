//! The conformance suite on every way this device computes: as planned, unfused, each fused kernel.
//! On a GPU all of it; on the simulator every so many cases, so that it stays a matter of seconds.
//! One file, because its tests share cases, and each program compiles all of the backend.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::judge;
use swiglu_core::conformance::{Backend, Case, Parameters, quantized_suite, suite};
use swiglu_core::{
    Activation, Arrangement, DType, Element, GateUpRef, GateUpWeights, GatedLinearParams, Matrix,
    MatrixRef, Numerics, Op, Orientation, Path, Rounding, WeightLayout, bf16, bounds, f16, random,
};
use swiglu_cuda::tuning::TuningOptions;
use swiglu_cuda::{
    Cuda, CudaBackend, DeviceGateUp, DeviceGateUpMut, DeviceMatrix, DeviceMatrixMut,
    DeviceMatrixRef, GatedLinear, quantized_types,
};

/// Of many cases every n-th on the simulator, six times as many on a GPU, and all of them where
/// SWIGLU_TEST_ALL is set: minutes, since thousands of kernels are compiled.
fn some<T>(cases: Vec<T>, n: usize) -> impl Iterator<Item = T> {
    let n = match (common::every_case(), common::has_gpu()) {
        (true, _) => 1,
        (false, true) => n.div_ceil(6),
        (false, false) => n,
    };
    cases.into_iter().step_by(n)
}

#[test]
fn what_users_get() {
    let Some(cuda) = common::device() else { return };
    assert!(judge(&CudaBackend::planned(&cuda), some(suite(&DType::ALL), 47)) > 0);
}

/// As on a device that has no kernels of its own, also where one was the fastest when it was measured.
#[test]
fn kernels_of_every_architecture() {
    let Some(options) = common::options() else { return };
    let tuning = TuningOptions::default();
    let options = options.with_portable_kernels(true).with_tuning(tuning);
    let cuda = Cuda::with_options(&options).unwrap();
    for (op, path) in
        [(Op::GatedLinear, Some(Path::Fused)), (Op::GatedLinear, None), (Op::Mlp, None)]
    {
        for m in [1, 8, 16, 64, 512, 4096] {
            let small =
                Case { hidden: 8, intermediate: 8, ..Case::new(op, [m, 8, 8], DType::Bf16) };
            let parameters = Parameters::<bf16>::new(&small).unwrap();
            let problem = match op {
                Op::Mlp => parameters.mlp().problem(m),
                _ => parameters.gated().problem(m),
            };
            let problem = problem.with_hidden(896).with_intermediate(4864);
            let plan = cuda.plan(problem, path).unwrap();
            assert!(!plan.kernel.contains("sm90"), "{op} of {m} tokens: {}", plan.kernel);
            assert!(path.is_none() || plan.kernel.contains("mma_gated_gemm"), "{}", plan.kernel);
        }
    }
    let left_out: Vec<_> = CudaBackend::all(&cuda).iter().map(|backend| backend.name()).collect();
    assert!(left_out.iter().any(|name| name.contains("mma_gated_gemm 256x64")), "{left_out:?}");
    assert!(judge(&CudaBackend::planned(&cuda), some(suite(&[DType::F16, DType::Bf16]), 47)) > 0);
}

#[test]
fn every_way() {
    let Some(cuda) = common::device() else { return };
    for (i, backend) in CudaBackend::all(&cuda).iter().enumerate().skip(1) {
        let mut cases = suite(&DType::ALL);
        // Some compute with quantised weights alone.
        cases.extend(quantized_suite(quantized_types(), &[DType::F16, DType::Bf16]));
        cases.retain(|case| backend.computes(case));
        // Another part of the suite for each.
        let part = cases.into_iter().skip(i).collect();
        assert!(judge(backend, some(part, 293)) > 0, "{} computes nothing", backend.name());
    }
}

/// Extents around the edges of every kernel's tile and ring, in every layout, with and without
/// biases: the suite's shapes are smaller than most tiles.
fn large_cases(dtype: DType) -> Vec<Case> {
    let shapes = [
        [129, 128, 128],
        [128, 64, 64],
        [257, 320, 200],
        [64, 200, 129],
        [300, 72, 72],
        [1, 512, 136],
        [17, 260, 96],
        [130, 1030, 65],
    ];
    let family = Activation::family();
    let numerics: Vec<Numerics> = Numerics::all().collect();
    let mut cases = Vec::new();
    for (i, shape) in shapes.into_iter().enumerate() {
        for (j, orientation) in Orientation::ALL.into_iter().enumerate() {
            for (k, padding) in [0, 8, 5].into_iter().enumerate() {
                let turn = i * 5 + j * 3 + k;
                let arrangement = match turn % 3 {
                    0 => Arrangement::Separate,
                    1 => Arrangement::PackedUpFirst,
                    _ => Arrangement::Interleaved { group: 1 },
                };
                cases.push(Case {
                    activation: family[turn % family.len()],
                    numerics: numerics[turn % numerics.len()],
                    layout: WeightLayout { orientation, arrangement },
                    bias: turn % 2 == 0,
                    padding,
                    seed: turn as u64,
                    ..Case::new(Op::GatedLinear, shape, dtype)
                });
            }
        }
    }
    cases
}

#[test]
fn edges_of_tiles() {
    let Some(cuda) = common::device() else { return };
    for (i, backend) in CudaBackend::all(&cuda).iter().enumerate() {
        let mut cases = DType::ALL.into_iter().flat_map(large_cases).collect::<Vec<_>>();
        cases.retain(|case| backend.computes(case));
        // Some ways compute whole blocks alone.
        let of_layers = !cases.is_empty();
        assert_eq!(of_layers, !is_of_blocks(&backend.name()), "{}", backend.name());
        // Another part of them for each.
        let first = if of_layers { i % cases.len().min(97) } else { 0 };
        let count = judge(backend, some(cases.split_off(first), 97));
        assert_eq!(count > 0, of_layers, "{}", backend.name());
    }
}

/// Cases of a way that fill every stage of its rings again, and more than two tiles each way: of one element type and
/// mode, or of all.
fn going_round(backend: &CudaBackend, all: bool) -> Vec<Case> {
    let quantized = quantized_types().iter().map(|&kind| Some(kind));
    let of = |dtype| {
        let weights = std::iter::once(None).chain(quantized.clone());
        weights.filter_map(move |kind| backend.going_round(dtype, kind))
    };
    let cases = DType::ALL.into_iter().rev().flat_map(of);
    if !all {
        return cases.take(1).collect();
    }
    let modes = |case: Case| {
        Numerics::all().enumerate().map(move |(i, numerics)| Case {
            numerics,
            bias: i % 2 == 0,
            layout: WeightLayout {
                orientation: Orientation::ALL[i / 2 % 2],
                arrangement: Arrangement::PackedUpFirst,
            },
            // Every second an odd number of features, whose rows TMA does not store.
            intermediate: case.intermediate - if case.quantized.is_none() { i % 2 * 7 } else { 0 },
            ..case
        })
    };
    cases.flat_map(modes).filter(|case| backend.computes(case)).collect()
}

/// Shapes that follow from a kernel's own tile and stages. A kernel that is added has them by itself.
#[test]
fn rings_go_round() {
    let Some(cuda) = common::device() else { return };
    let all = common::every_case();
    let sms = cuda.facts().sm_count;
    for backend in CudaBackend::all(&cuda) {
        let (name, cases) = (backend.name(), going_round(&backend, all));
        let of_cublas = ["planned", "unfused", "cublaslt f32 + elementwise"];
        if of_cublas.iter().any(|way| name.ends_with(way)) {
            assert!(cases.is_empty(), "{name}");
        } else if name.ends_with("sm90_register_gemm") && sms < 72 {
            // Registers of so few SMs hold the down rows of one step of k.
            swiglu_testing::not_run(format_args!("{name} on {sms} SMs"));
        } else if cuda.facts().compute_capability == (9, 0) || !name.contains("sm90") {
            assert!(judge(&backend, cases.into_iter()) > 0, "{name} computes nothing");
        }
    }
}

/// The kernel of every architecture alone, in every tile: few enough cases for compute-sanitizer. Rows that end within a
/// copy end where their memory does.
#[test]
fn edges_of_portable_tiles() {
    let Some(cuda) = common::device() else { return };
    let mut count = 0;
    for backend in CudaBackend::all(&cuda).iter().filter(|b| b.name().contains("mma_gated_gemm")) {
        for orientation in Orientation::ALL {
            let layout = WeightLayout { orientation, arrangement: Arrangement::Separate };
            let shapes = [[1, 7, 72], [65, 90, 40], [300, 200, 136], [1, 72, 24]];
            let cases = shapes.into_iter().enumerate();
            let cases = cases.map(|(i, shape)| Case {
                layout,
                bias: true,
                // The stride of a single row must not matter.
                padding: [0, 8, 3, 3][i],
                ..Case::new(Op::GatedLinear, shape, [DType::Bf16, DType::F16][i % 2])
            });
            count += judge(backend, cases);
        }
    }
    assert_eq!(count, 5 * 8);
}

/// f32 sums between two steps: H and K that leave no row aligned, and outputs at every alignment, which the
/// stride and the suite's own offsets decide.
#[test]
fn sums_between_two_steps() {
    let Some(cuda) = common::device() else { return };
    let sums = CudaBackend::all(&cuda).into_iter().find(|b| b.name().contains("cublaslt f32"));
    let family = Activation::family();
    let shapes = [[1, 33, 45], [5, 7, 1], [33, 64, 72], [17, 101, 130], [64, 40, 255], [3, 1, 6]];
    let mut cases = Vec::new();
    for (i, shape) in shapes.into_iter().enumerate() {
        for (j, padding) in [0, 1, 2, 4, 8].into_iter().enumerate() {
            let turn = i * 5 + j;
            let layout = WeightLayout {
                orientation: Orientation::ALL[turn % 2],
                arrangement: Arrangement::PackedGateFirst,
            };
            let op = if turn % 4 == 3 { Op::Mlp } else { Op::GatedLinear };
            let activation = family[turn % family.len()];
            let dtype = [DType::Bf16, DType::F16][i % 2];
            let (bias, seed) = (turn % 3 > 0, turn as u64);
            cases.push(Case {
                activation,
                layout,
                bias,
                padding,
                seed,
                ..Case::new(op, shape, dtype)
            });
        }
    }
    let count = cases.len();
    assert_eq!(judge(&sums.unwrap(), cases.into_iter()), count);
}

/// Beside sums, biases are not rounded: where x is 0 they alone decide h, to the bit as in a fused kernel.
#[test]
fn biases_beside_sums_are_exact() {
    let Some(cuda) = common::device() else { return };
    let (m, k, h) = (3, 24, 75);
    let parameters =
        Parameters::<bf16>::new(&Case::new(Op::GatedLinear, [m, k, h], DType::Bf16)).unwrap();
    let bias = |seed| (0..h).map(|i| random::normal(seed, i as u64)).collect::<Vec<f32>>();
    let (gate, up) = (bias(1), bias(2));
    let of = |gate_bias, up_bias| {
        let mut params = parameters.gated();
        (params.gate_bias, params.up_bias) = (gate_bias, up_bias);
        params
    };
    let path = |path| move |cuda: &Cuda, p: &_| GatedLinear::with_path(cuda, p, path).unwrap();
    let sums = |cuda: &Cuda, params: &GatedLinearParams<'_, bf16>| {
        let candidates = cuda.candidates(&params.problem(m), None);
        let way = candidates.iter().find(|way| way.name == "cublaslt f32 + elementwise");
        GatedLinear::with_candidate(cuda, params, way.unwrap()).unwrap()
    };
    let forward = |layer: GatedLinear<bf16>| {
        let x = Matrix::<bf16>::zeros(m, k).unwrap();
        let mut h = Matrix::<bf16>::zeros(m, h).unwrap();
        layer.forward_host(x.view(), h.view_mut()).unwrap();
        h
    };
    for params in [of(Some(&gate), Some(&up)), of(None, Some(&up)), of(Some(&gate), None)] {
        let fused = forward(path(swiglu_core::Path::Fused)(&cuda, &params));
        assert_eq!(forward(sums(&cuda, &params)), fused);
        let both = params.gate_bias.is_some() && params.up_bias.is_some();
        let rounded = forward(path(swiglu_core::Path::Unfused)(&cuda, &params));
        assert_eq!(rounded != fused, both);
    }
}

/// Every number of rows around the tiles for few rows, with K that leaves the blocks of a cluster
/// unequal parts and ends within a step, and H that ends within a tile.
fn few_rows(dtype: DType) -> Vec<Case> {
    let rows = (1..=17).chain([33, 64, 65, 100, 128, 129, 512]);
    let sizes: [[usize; 2]; 5] = [[257, 65], [200, 129], [513, 64], [321, 201], [256, 8]];
    let case = |(i, m): (usize, usize)| {
        let [hidden, intermediate] = sizes[i % sizes.len()];
        let orientation = Orientation::ALL[i / 2 % 2];
        Case {
            bias: i % 3 == 0,
            layout: WeightLayout { orientation, arrangement: Arrangement::PackedUpFirst },
            // Rows of x that TMA can address.
            padding: hidden.next_multiple_of(8) - hidden,
            seed: i as u64,
            ..Case::new(Op::GatedLinear, [m, hidden, intermediate], dtype)
        }
    };
    rows.enumerate().map(case).collect()
}

/// Those whose names contain a word, and that compute layers, not only blocks.
fn of_layers<'a>(
    backends: &'a [CudaBackend],
    word: &'a str,
) -> impl Iterator<Item = &'a CudaBackend> {
    backends.iter().filter(move |b| b.name().contains(word) && !is_of_blocks(&b.name()))
}

/// Whether a way computes feed-forward blocks alone.
fn is_of_blocks(name: &str) -> bool {
    ["_mlp", "fitted beside", " + sm90"].iter().any(|word| name.contains(word))
}

#[test]
fn few_rows_in_every_split() {
    let Some(cuda) = common::device() else { return };
    let backends = CudaBackend::all(&cuda);
    // What goes before another kernel computes blocks alone.
    let skinny = of_layers(&backends, "skinny");
    for (i, backend) in skinny.enumerate() {
        let dtype = [DType::Bf16, DType::F16][i % 2];
        let mut cases = few_rows(dtype);
        cases.retain(|case| backend.computes(case));
        assert!(judge(backend, some(cases.split_off(i % 11), 11)) > 0, "{}", backend.name());
    }
}

/// Tiles that are fitted to the device, of one warpgroup to three: as many features as make them so wide,
/// and rows around the tiles.
#[test]
fn few_rows_in_wide_tiles() {
    let Some(cuda) = common::device() else { return };
    let widths = [40, 72, 112, 144, 192, 200];
    let backends = CudaBackend::all(&cuda);
    let fitted = of_layers(&backends, "fitted");
    for (i, backend) in fitted.enumerate() {
        let dtype = [DType::Bf16, DType::F16][i % 2];
        let case = |(j, m): (usize, usize)| {
            let features = widths[(i + j) % widths.len()] * cuda.facts().sm_count as usize;
            Case {
                bias: j % 2 == 0,
                layout: WeightLayout {
                    orientation: Orientation::ALL[j / 2 % 2],
                    arrangement: Arrangement::PackedGateFirst,
                },
                seed: j as u64,
                ..Case::new(Op::GatedLinear, [m, 136 + 64 * (j % 3), features - 3], dtype)
            }
        };
        let more: &[usize] =
            if backend.name().contains("fittedxfitted") { &[150, 300] } else { &[] };
        let rows = [1, 17, 64, 100, 200].into_iter().chain(more.iter().copied());
        // On the simulator every second, of two ways that follow each other the one or the other.
        let (first, every) = if common::partly() { (i % 2, 2) } else { (0, 1) };
        let cases = rows.enumerate().skip(first).step_by(every).map(case);
        assert!(judge(backend, cases) > 0, "{}", backend.name());
    }
}

/// Full tiles, then narrow ones of 64 columns and of 32, and the latter alone; results through TMA and,
/// where the number of features is odd, from registers. That these sizes are cut so, on 4 SMs and
/// on 132, is a test of `Cut`.
#[test]
fn tiles_that_become_narrow() {
    let Some(cuda) = common::device() else { return };
    let sms = cuda.facts().sm_count as usize;
    let backends = CudaBackend::all(&cuda);
    let backend = backends.iter().find(|backend| backend.name().contains("128x96 ping-pong"));
    let Some(backend) = backend else { return };
    let then_64 = 96 * (sms / 2) + 64 * (sms / 2);
    let then_32 = 96 * (sms / 4) + 32 * (sms / 8).max(1);
    let mut cases = Vec::new();
    for turn in 0..8 {
        let [odd, orientation, bias] = [turn % 2, turn / 2 % 2, turn / 4];
        let features = [(200, then_64 - 8), (1000, then_32), (100, 60)];
        for (i, (m, features)) in features.into_iter().enumerate() {
            cases.push(Case {
                bias: bias == 1,
                layout: WeightLayout {
                    orientation: Orientation::ALL[orientation],
                    arrangement: Arrangement::PackedGateFirst,
                },
                seed: (3 * turn + i) as u64,
                ..Case::new(
                    Op::GatedLinear,
                    [m, 72 + 64 * ((turn + i) % 3), features - odd],
                    [DType::Bf16, DType::F16][(turn + turn / 2 + i) % 2],
                )
            });
        }
    }
    cases.retain(|case| backend.computes(case));
    assert_eq!(judge(backend, cases.into_iter()), 24);
}

#[test]
fn tf32_on_request() {
    let Some(cuda) = common::device() else { return };
    let options = common::options().unwrap().with_device(cuda.ordinal()).with_tf32(true);
    let cuda = Cuda::with_options(&options).unwrap();
    let mut by_tensor_cores = 0;
    for backend in CudaBackend::all(&cuda) {
        let mut cases = large_cases(DType::F32);
        cases.extend(suite(&[DType::F32]).into_iter().filter(|c| c.op != Op::Activation));
        let count = judge(&backend, some(cases, 199));
        by_tensor_cores += if backend.name().contains("mma_gated_gemm") { count } else { 0 };
    }
    assert!(by_tensor_cores > 0);
}

/// Gradients of every activation, mode and arrangement against the oracle.
fn backward<T: Element>(cuda: &Cuda, turn: usize) {
    let family = Activation::family();
    let act = family[turn % family.len()];
    // Another mode when the family begins again.
    let numerics = Numerics::all().nth((turn + turn / family.len()) % 6).unwrap();
    let arrangement = [
        Arrangement::Separate,
        Arrangement::PackedGateFirst,
        Arrangement::PackedUpFirst,
        Arrangement::Interleaved { group: 1 },
        Arrangement::Interleaved { group: 5 },
        Arrangement::Interleaved { group: 8 },
    ][turn / 2 % 6];
    let (m, h) = [(3, 40), (1, 4000), (70, 120), (5, 1000)][turn % 4];
    let stream = cuda.stream();
    let cols = if arrangement.is_packed() { 2 * h } else { h };
    let seed = turn as u64 * 8;
    let first = random::normal_matrix::<T>(seed, m, cols, 3.0).unwrap();
    let second = random::normal_matrix::<T>(seed + 1, m, h, 3.0).unwrap();
    let dh = random::normal_matrix::<T>(seed + 2, m, h, 1.0).unwrap();
    let upload = |host: &Matrix<T>| DeviceMatrix::from_host(&stream, host.view()).unwrap();
    let nan = |rows, cols| {
        Matrix::from_vec(vec![T::from_f32(f32::NAN); rows * cols], rows, cols).unwrap()
    };
    let (d_first, d_second, d_dh) = (upload(&first), upload(&second), upload(&dh));
    let (mut g_first, mut g_second) = (upload(&nan(m, cols)), upload(&nan(m, h)));
    let (inputs, on_device, grads) = if arrangement.is_packed() {
        (
            GateUpRef::packed(first.view(), arrangement).unwrap(),
            DeviceGateUp::packed(d_first.view(), arrangement).unwrap(),
            DeviceGateUpMut::packed(g_first.view_mut(), arrangement).unwrap(),
        )
    } else {
        (
            GateUpRef::separate(first.view(), second.view()).unwrap(),
            DeviceGateUp::separate(d_first.view(), d_second.view()).unwrap(),
            DeviceGateUpMut::separate(g_first.view_mut(), g_second.view_mut()).unwrap(),
        )
    };
    cuda.activation_backward(&stream, &act, numerics, d_dh.view(), on_device, grads).unwrap();
    let (g_first, g_second) = (g_first.to_host().unwrap(), g_second.to_host().unwrap());
    let out = if arrangement.is_packed() {
        GateUpRef::packed(g_first.view(), arrangement).unwrap()
    } else {
        GateUpRef::separate(g_first.view(), g_second.view()).unwrap()
    };
    let references = bounds::activation_backward(&act, numerics, &inputs, dh.view()).unwrap();
    for (half, reference) in
        [swiglu_core::Half::Gate, swiglu_core::Half::Up].into_iter().zip(references)
    {
        let values = (0..m).flat_map(|i| (0..h).map(move |j| out.at(half, i, j))).collect();
        let values = Matrix::<T>::from_vec(values, m, h).unwrap();
        let judgement = reference.judge(values.view()).unwrap();
        let what = format!("{half:?} of {act} {numerics} {arrangement} {m}x{h} {}", T::DTYPE);
        assert!(judgement.passed(), "{what}: {judgement:?}");
    }
}

#[test]
fn gradients_of_the_activation() {
    let Some(cuda) = common::device() else { return };
    let types = [backward::<f32>, backward::<f16>, backward::<bf16>];
    let family = Activation::family().len();
    assert!(family >= 12, "each type has as many turns, and needs them for every arrangement");
    if !common::partly() {
        for turn in some((0..12 * family).collect(), 17) {
            types.iter().for_each(|backward| backward(&cuda, turn));
        }
    } else {
        // The least turns of one type each in which every type meets every activation, every mode of rounding
        // and every arrangement.
        (0..3 * family).for_each(|turn| types[turn / family](&cuda, turn));
    }
}

/// The same bits on every launch: sums are in an order that no scheduling changes.
#[test]
fn repeated_launches_are_bitwise_equal() {
    let Some(cuda) = common::device() else { return };
    let launches = if common::has_gpu() { 1000 } else { 3 };
    let case = Case { bias: true, ..Case::new(Op::GatedLinear, [200, 264, 200], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let x = random::normal_matrix::<bf16>(5, 200, 264, 1.0).unwrap();
    let stream = cuda.stream();
    let layer = GatedLinear::new(&cuda, &parameters.gated()).unwrap();
    let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let mut h = DeviceMatrix::<bf16>::new(&stream, 200, 200).unwrap();
    let mut first: Option<Vec<u16>> = None;
    for i in 0..launches {
        h.buffer_mut().poison(0xFF).unwrap();
        layer.forward(&stream, x.view(), h.view_mut()).unwrap();
        let bits: Vec<u16> = h.to_host().unwrap().as_slice().iter().map(|v| v.to_bits()).collect();
        match &first {
            None => first = Some(bits),
            Some(first) => assert!(*first == bits, "launch {i} differs"),
        }
    }
}

/// A captured forward pass computes what a plain one does, also on new values in the same memory.
#[test]
fn graphs_replay_layers() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.new_stream().unwrap();
    let case = Case { bias: true, ..Case::new(Op::Mlp, [33, 72, 80], DType::F16) };
    let parameters = Parameters::<f16>::new(&case).unwrap();
    let candidates = cuda.candidates(&parameters.mlp().problem(33), None);
    let sums = candidates.iter().find(|way| way.name == "cublaslt f32 + elementwise");
    let unfused = Some(swiglu_core::Path::Unfused);
    for (path, way) in [(None, None), (unfused, None), (None, sums)] {
        let mlp = match path {
            None => swiglu_cuda::Mlp::new(&cuda, &parameters.mlp()),
            Some(path) => swiglu_cuda::Mlp::with_path(&cuda, &parameters.mlp(), path),
        }
        .unwrap();
        let forward = |x: DeviceMatrixRef<'_, f16>, y: DeviceMatrixMut<'_, f16>| match way {
            None => mlp.forward(&stream, x, y),
            Some(way) => mlp.forward_by(&stream, way, x, y),
        };
        let mut x = DeviceMatrix::<f16>::zeros(&stream, 33, 72).unwrap();
        let mut y = DeviceMatrix::<f16>::zeros(&stream, 33, 72).unwrap();
        // The first call prepares everything that a capture cannot.
        forward(x.view(), y.view_mut()).unwrap();
        let graph = stream.capture(|| forward(x.view(), y.view_mut())).unwrap();
        for seed in 0..3 {
            let values = random::normal_matrix::<f16>(seed, 33, 72, 1.0).unwrap();
            x.view_mut().upload(&stream, values.view()).unwrap();
            y.buffer_mut().poison(0xFF).unwrap();
            stream.synchronize().unwrap();
            // SAFETY: x, y and the layer live on, and nothing else runs on the stream.
            unsafe { graph.launch(&stream) }.unwrap();
            let replayed = y.to_host().unwrap();
            forward(x.view(), y.view_mut()).unwrap();
            assert_eq!(replayed, y.to_host().unwrap());
            let reference = bounds::mlp(values.view(), &parameters.mlp()).unwrap();
            let judgement = reference.judge(MatrixRef::from(&replayed)).unwrap();
            assert!(judgement.passed() || path.is_some(), "{judgement:?}");
        }
    }
}

/// The pre-activations that a forward pass saves, which are the same by themselves, and h, which is the same as without saving. The
/// gate's pre-activation is what the bilinear activation of a layer without rounding would give with
/// an up of ones; it is judged as h of that layer.
fn saved<T: Element>(cuda: &Cuda, layer: &GatedLinear<T>, case: &Case) {
    let parameters = Parameters::<T>::new(case).unwrap();
    let stream = cuda.stream();
    let [m, k, h] = [case.m, case.hidden, case.intermediate];
    let x = random::normal_matrix::<T>(5, m, k, 1.0).unwrap();
    let on_device = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let poisoned = || {
        let mut matrix = DeviceMatrix::<T>::new(&stream, m, h).unwrap();
        matrix.buffer_mut().poison(0xFF).unwrap();
        matrix
    };
    let (mut out, mut plain, mut gate, mut up) = (poisoned(), poisoned(), poisoned(), poisoned());
    let kept = [gate.view_mut(), up.view_mut()];
    layer.forward_saving(&stream, on_device.view(), out.view_mut(), kept).unwrap();
    let (mut gate_again, mut up_again) = (poisoned(), poisoned());
    let kept = [gate_again.view_mut(), up_again.view_mut()];
    layer.pre_activations(&stream, on_device.view(), kept, None).unwrap();
    for (again, saved) in [(gate_again, &gate), (up_again, &up)] {
        assert_eq!(again.to_host().unwrap(), saved.to_host().unwrap(), "{case} computed again");
    }
    layer.forward(&stream, on_device.view(), plain.view_mut()).unwrap();
    let (out, plain) = (out.to_host().unwrap(), plain.to_host().unwrap());
    let params = parameters.gated();
    if layer.plan(m).path == swiglu_core::Path::Fused {
        assert_eq!(out.as_slice(), plain.as_slice(), "{case}");
    } else {
        // Two products instead of one on packed weights: the library may add up in another order.
        let reference = bounds::gated_linear(x.view(), &params).unwrap();
        for h in [&out, &plain] {
            let judgement = reference.judge(h.view()).unwrap();
            assert!(judgement.passed(), "h of {case}: {judgement:?}");
        }
    }
    for (half, saved) in [(swiglu_core::Half::Gate, gate), (swiglu_core::Half::Up, up)] {
        let weights = &params.weights;
        let values = (0..h).flat_map(|f| (0..k).map(move |i| weights.at(half, f, i))).collect();
        let own = Matrix::<T>::from_vec(values, h, k).unwrap();
        let zeros = Matrix::<T>::zeros(h, k).unwrap();
        let weights =
            GateUpWeights::separate(own.view(), zeros.view(), Orientation::OutIn).unwrap();
        let ones = vec![1.0; h];
        let one = GatedLinearParams::new(weights, Activation::BILINEAR)
            .with_gate_bias(if half == swiglu_core::Half::Gate {
                params.gate_bias
            } else {
                params.up_bias
            })
            .with_up_bias(&ones[..])
            .with_numerics(Numerics::default().with_rounding(Rounding::PreRound));
        let reference = bounds::gated_linear(x.view(), &one).unwrap();
        let judgement = reference.judge(saved.to_host().unwrap().view()).unwrap();
        assert!(judgement.passed(), "{half:?} of {case}: {judgement:?}");
    }
}

#[test]
fn pre_activations_are_saved() {
    let Some(cuda) = common::device() else { return };
    let shapes = [[5, 72, 40], [130, 200, 129], [40, 64, 71]];
    for (i, shape) in shapes.into_iter().enumerate() {
        let orientation = Orientation::ALL[i % 2];
        let layout = WeightLayout { orientation, arrangement: Arrangement::Separate };
        let case = |dtype| Case { bias: true, layout, ..Case::new(Op::GatedLinear, shape, dtype) };
        let (half, single) = (case(DType::Bf16), case(DType::F32));
        let parameters = Parameters::<bf16>::new(&half).unwrap();
        let planned = GatedLinear::new(&cuda, &parameters.gated()).unwrap();
        saved(&cuda, &planned, &half);
        let candidates = cuda.candidates(&parameters.gated().problem(shape[0]), None);
        for (w, way) in candidates.iter().enumerate() {
            // On the simulator every second way has one of the shapes.
            let has_turn = !common::partly() || w % (2 * shapes.len()) == 2 * i;
            if has_turn && way.numerics.is_some() && way.refusal.is_none() {
                let layer = GatedLinear::with_candidate(&cuda, &parameters.gated(), way).unwrap();
                saved(&cuda, &layer, &half);
            }
        }
        let parameters = Parameters::<f32>::new(&single).unwrap();
        let path = swiglu_core::Path::Unfused;
        let unfused = GatedLinear::with_path(&cuda, &parameters.gated(), path).unwrap();
        saved(&cuda, &unfused, &single);
        let path = swiglu_core::Path::Fused;
        let fused = GatedLinear::with_path(&cuda, &parameters.gated(), path).unwrap();
        saved(&cuda, &fused, &single);
    }
}

/// Row `row` of a dense device matrix, as a matrix of its own.
fn row_of(matrix: &mut DeviceMatrix<bf16>, row: usize) -> DeviceMatrixMut<'_, bf16> {
    let (cuda, cols) = (matrix.buffer().stream().cuda().clone(), matrix.cols());
    let at = matrix.buffer().device_ptr() + (row * cols * size_of::<bf16>()) as u64;
    // SAFETY: the row lies in the matrix, which is borrowed mutably for as long.
    unsafe { DeviceMatrixMut::from_raw(&cuda, at, 1, cols, cols) }.unwrap()
}

/// Offsets are 64 bits wide everywhere: rows beyond element 2³¹ are computed like the first.
#[test]
fn more_than_2_to_the_31_elements() {
    if !common::has_gpu() {
        swiglu_testing::not_run("the simulator has no room for 2^31 elements");
        return;
    }
    let cuda = common::device().unwrap();
    let stream = cuda.stream();
    let (m, k, h) = (70_001, 64, 32_768);
    let probes = [0, 65_535, 65_536, m - 1];
    let zeros = |cols| DeviceMatrix::<bf16>::zeros(&stream, m, cols).unwrap();
    let (mut gate, mut up, mut out) = (zeros(h), zeros(h), zeros(h));
    let numerics = Numerics::default_for(DType::Bf16);
    let values = |seed, cols| random::normal_matrix::<bf16>(seed, 1, cols, 1.0).unwrap();
    for (i, &row) in probes.iter().enumerate() {
        row_of(&mut gate, row).upload(&stream, values(i as u64, h).view()).unwrap();
        row_of(&mut up, row).upload(&stream, values(9 + i as u64, h).view()).unwrap();
    }
    out.buffer_mut().poison(0xFF).unwrap();
    let inputs = DeviceGateUp::separate(gate.view(), up.view()).unwrap();
    cuda.activation(&stream, &Activation::SWIGLU, numerics, inputs, out.view_mut()).unwrap();
    for (i, &row) in probes.iter().enumerate() {
        let (g, u) = (values(i as u64, h), values(9 + i as u64, h));
        let inputs = GateUpRef::separate(g.view(), u.view()).unwrap();
        let reference = bounds::activation(&Activation::SWIGLU, numerics, &inputs).unwrap();
        let h = row_of(&mut out, row).as_ref().to_host(&stream).unwrap();
        assert!(reference.judge(h.view()).unwrap().passed(), "activation, row {row}");
    }
    let case = Case { seed: 3, ..Case::new(Op::GatedLinear, [m, k, h], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let layer = GatedLinear::new(&cuda, &parameters.gated()).unwrap();
    let mut x = zeros(k);
    for (i, &row) in probes.iter().enumerate() {
        row_of(&mut x, row).upload(&stream, values(20 + i as u64, k).view()).unwrap();
    }
    out.buffer_mut().poison(0xFF).unwrap();
    layer.forward(&stream, x.view(), out.view_mut()).unwrap();
    for (i, &row) in probes.iter().enumerate() {
        let x = values(20 + i as u64, k);
        let reference = bounds::gated_linear(x.view(), &parameters.gated()).unwrap();
        let h = row_of(&mut out, row).as_ref().to_host(&stream).unwrap();
        assert!(reference.judge(h.view()).unwrap().passed(), "gated linear, row {row}");
    }
}
