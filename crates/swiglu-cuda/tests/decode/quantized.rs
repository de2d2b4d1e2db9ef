//! Blocks with quantised weights, by every design that unpacks them.

use super::*;

/// That which has all of them in shared memory, on sm_90a.
fn held(cuda: &Cuda) -> Option<CudaBackend> {
    let found = CudaBackend::all(cuda).into_iter().find(|b| b.name().contains("held_mlp"))?;
    let computed = found.computes(&Case {
        quantized: Some(QuantizedTypes::of(Op::Mlp, QuantizedType::I8)),
        ..Case::new(Op::Mlp, [1, 64, 64], DType::Bf16)
    });
    assert_eq!(computed, has_tma(cuda));
    computed.then_some(found)
}

/// Quantised weights, also mixed, for every class of tokens and in passes of 16.
#[test]
fn quantised_weights() {
    let Some(cuda) = common::device() else { return };
    let types = quantized_types();
    let dtypes = [DType::F16, DType::Bf16];
    let mut cases = quantized_suite(types, &dtypes);
    let backends: Vec<_> = std::iter::once(CudaBackend::planned(&cuda))
        .chain(designs(&cuda))
        .chain(held(&cuda))
        .collect();
    // Several units along both reductions, several tiles of rows.
    for (i, m) in [1, 4, 8, 9, 16, 20].into_iter().enumerate() {
        for (t, &gate_up) in types.iter().enumerate() {
            let down = types[(t + i) % types.len()];
            cases.push(Case {
                bias: i % 2 == 0,
                padding: [0, 8, 5][(i + t) % 3],
                quantized: Some(QuantizedTypes::new(gate_up, Some(down))),
                ..Case::new(Op::Mlp, [m, 480, 672], dtypes[(i / 2 + t) % 2])
            });
        }
    }
    // Every design has every case on a GPU, a part of them on the simulator.
    let every = if common::partly() { 3 * backends.len() + 1 } else { 1 };
    for (b, backend) in backends.iter().enumerate() {
        let part: Vec<_> = cases.iter().copied().skip(b % every).step_by(every).collect();
        judge(backend, &part);
    }
}

/// Weights of 8 bits with scales beside them: every M, extents around the edges of units, lanes and
/// scales, that are no multiples of anything.
#[test]
fn codes_with_scales_of_every_size() {
    let Some(cuda) = common::device() else { return };
    let shapes =
        [[1, 1], [7, 9], [64, 128], [65, 127], [129, 64], [200, 130], [31, 300], [258, 129]];
    let (family, numerics) = (Activation::family(), Numerics::all().collect::<Vec<_>>());
    let mut cases = Vec::new();
    for m in 1..=17 {
        for (t, kind) in QuantizedType::SCALED.into_iter().enumerate() {
            let i = 3 * m + t;
            let [k, h] = shapes[(m + 2 * t) % shapes.len()];
            cases.push(Case {
                // The suite has the others; each is a kernel of its own.
                activation: family[t * 4],
                numerics: numerics[t * 2],
                bias: i % 2 == 0,
                padding: [0, 8, 5][m % 3],
                seed: i as u64,
                quantized: Some(QuantizedTypes::of(Op::Mlp, kind)),
                ..Case::new(Op::Mlp, [m, k, h], [DType::Bf16, DType::F16][(m + t) % 2])
            });
        }
    }
    let designs: Vec<_> = designs(&cuda).into_iter().chain(held(&cuda)).collect();
    // One after the other has a turn; on the simulator it has every third.
    let every = designs.len() * if common::partly() { 3 } else { 1 };
    for (d, design) in designs.iter().enumerate() {
        let part = cases.iter().copied().skip(d).step_by(every);
        judge(design, &part.collect::<Vec<_>>());
    }
}

/// Quantised rows of several pieces, whose last group lacks units; x that comes in pieces, too.
#[test]
fn pieces_of_quantised_rows() {
    let Some(cuda) = common::device() else { return };
    let designs = designs(&cuda);
    for (t, &kind) in quantized_types().iter().enumerate() {
        let shapes = [(3, 2080, 96), (2, 96, 4384), (16, 2080, 96), (12, 96, 2208), (16, 7680, 32)];
        for (i, (m, k, h)) in shapes.into_iter().enumerate() {
            let case = Case {
                bias: i % 2 == 0,
                padding: [0, 8, 5][(i + t) % 3],
                quantized: Some(QuantizedTypes::of(Op::Mlp, kind)),
                ..Case::new(Op::Mlp, [m, k, h], DType::Bf16)
            };
            // Of a part two of five for each type: every shape has two types.
            if common::partly() && (t + i) % 5 > 1 {
                continue;
            }
            // TMA's two forms take turns, where the device has one and they compute the case.
            let turn = &designs[designs.len() - 1 - (t + i) % 2];
            let last_but_one = &designs[designs.len() - 2];
            judge(if turn.computes(&case) { turn } else { last_but_one }, &[case]);
        }
    }
}

/// All weights in shared memory: every M, each type with others for the down rows, several tiles of a warp, several pieces, fewer
/// pieces than blocks of a cluster and than warps, rows that are not whole 16 bytes.
#[test]
fn weights_held() {
    let Some(cuda) = common::device() else { return };
    let Some(design) = held(&cuda) else {
        swiglu_testing::not_run("the device is not of sm_90a");
        return;
    };
    // The first are of a whole GPU.
    let shapes: [[usize; 2]; 7] =
        [[896, 4864], [640, 1000], [1, 1], [2080, 9], [7, 9], [16, 1200], [130, 64]];
    let types = quantized_types();
    let mut cases = Vec::new();
    for m in 1..=17 {
        for (t, &gate_up) in types.iter().enumerate() {
            // On the simulator every third type with each M, so that each meets every third M.
            if common::partly() && (m + t) % 3 > 0 {
                continue;
            }
            let i = 3 * m + t;
            let down = types[i % types.len()];
            let [k, h] = shapes[(m + 2 * t) % shapes.len()];
            let [k, h] = [(k, gate_up), (h, down)]
                .map(|(n, kind)| kind.block().map_or(n, |_| n.next_multiple_of(32)));
            cases.push(Case {
                bias: i % 2 == 0,
                padding: [0, 8, 5][i % 3],
                seed: i as u64,
                quantized: Some(QuantizedTypes::new(gate_up, Some(down))),
                ..Case::new(Op::Mlp, [m, k, h], [DType::Bf16, DType::F16][i % 2])
            });
        }
    }
    let all = cases.len();
    cases.retain(|case| design.computes(case));
    assert!(2 * cases.len() > all, "{} of {all}", cases.len());
    judge(&design, &cases);
}

/// Calls behind each other share h, and the kernels of two of them run at the same time: the same bits as one at a time, plain
/// and from a graph, on two streams at once.
#[test]
fn held_weights_behind_each_other() {
    let Some(cuda) = common::device() else { return };
    if held(&cuda).is_none() {
        swiglu_testing::not_run("the device is not of sm_90a");
        return;
    }
    let ([k, h], replays) = if common::has_gpu() { ([896, 4864], 1000) } else { ([64, 96], 3) };
    for (m, kind) in [(1, BlockType::Q4_0), (7, BlockType::Q8_0), (16, BlockType::Q4_0)] {
        let types = QuantizedTypes::of(Op::Mlp, kind);
        let case = Case {
            bias: true,
            quantized: Some(types),
            ..Case::new(Op::Mlp, [m, k, h], DType::Bf16)
        };
        let parameters = QuantizedParameters::new::<bf16>(&case, types).unwrap();
        let params = parameters.mlp().unwrap();
        let design = DecodeDesign::HeldLaunches;
        let layer = Mlp::<bf16>::from_quantized_by(&cuda, &params, design).unwrap();
        std::thread::scope(|scope| {
            for seed in [1, 2] {
                let (layer, stream) = (&layer, cuda.new_stream().unwrap());
                scope.spawn(move || follow_each_other(layer, &stream, [m, k], seed, replays));
            }
        });
    }
}

fn follow_each_other(
    layer: &Mlp<bf16>,
    stream: &Stream,
    [m, k]: [usize; 2],
    seed: u64,
    replays: usize,
) {
    const CALLS: usize = 6;
    let inputs: Vec<_> = (0..CALLS as u64)
        .map(|i| {
            let x = random::normal_matrix::<bf16>(seed * 100 + i, m, k, 1.0).unwrap();
            DeviceMatrix::from_host(stream, x.view()).unwrap()
        })
        .collect();
    let poisoned = || {
        let mut y = DeviceMatrix::<bf16>::new(stream, m, k).unwrap();
        y.buffer_mut().poison(0xFF).unwrap();
        y
    };
    let mut outputs: Vec<_> = (0..CALLS).map(|_| poisoned()).collect();
    // One call at a time.
    let expected: Vec<_> = inputs
        .iter()
        .map(|x| {
            let mut y = poisoned();
            layer.forward(stream, x.view(), y.view_mut()).unwrap();
            y.to_host().unwrap()
        })
        .collect();
    let calls = |outputs: &mut [DeviceMatrix<bf16>]| {
        let mut calls = inputs.iter().zip(outputs);
        calls.try_for_each(|(x, y)| layer.forward(stream, x.view(), y.view_mut()))
    };
    let graph = stream.capture(|| calls(&mut outputs)).unwrap();
    for replay in 0..replays {
        for graphed in [false, true] {
            outputs.iter_mut().for_each(|y| y.buffer_mut().poison(0xFF).unwrap());
            stream.synchronize().unwrap();
            if graphed {
                // SAFETY: the matrices and the layer live on, and nothing else runs on the stream.
                unsafe { graph.launch(stream) }.unwrap();
            } else {
                calls(&mut outputs).unwrap();
            }
            for (i, (y, expected)) in outputs.iter().zip(&expected).enumerate() {
                let same = y.to_host().unwrap() == *expected;
                assert!(same, "m = {m}: call {i} of replay {replay}, graph {graphed}");
            }
        }
    }
}

/// Rows that are not whole 16 bytes, too long for 16 of them to fit into shared memory.
#[test]
fn rows_that_cannot_be_read_in_place() {
    let Some(cuda) = common::device() else { return };
    let case = Case {
        quantized: Some(QuantizedTypes::of(Op::Mlp, QuantizedType::I8)),
        ..Case::new(Op::Mlp, [17, 9001, 24], DType::Bf16)
    };
    judge(&CudaBackend::planned(&cuda), &[case]);
}

/// A block whose gate is 1 and whose up and down weights are `codes` on the diagonal: y of a token is
/// made of the products of codes, scales and x alone.
fn diagonal(kind: QuantizedType, codes: &[u8], scale: f32, one: u8) -> [QuantizedMatrix; 3] {
    let n = codes.len();
    let matrix = |value: &dyn Fn(usize) -> u8, scale: f32| {
        let mut data = vec![0u8; n * n];
        (0..n).for_each(|i| data[i * n + i] = value(i));
        let [down, across] = kind.scales(n, n);
        QuantizedMatrix::scaled(kind, data, vec![scale; down * across], n, n).unwrap()
    };
    [matrix(&|_| one, 1.0), matrix(&|i| codes[i], scale), matrix(&|_| one, 1.0)]
}

/// What a layer of such a block makes of x = 1: the same by each kernel.
fn of_ones<T: Element>(cuda: &Cuda, weights: &[QuantizedMatrix; 3], m: usize) -> Matrix<T> {
    let mut designs = vec![DecodeDesign::OneLaunch];
    if has_tma(cuda) {
        designs.extend([DecodeDesign::BulkOneLaunch, DecodeDesign::HeldLaunches]);
    }
    let ys = designs.into_iter().map(|design| of_ones_by(cuda, weights, m, design));
    let bits =
        |y: &Matrix<T>| y.as_slice().iter().map(|y| y.to_f32().to_bits()).collect::<Vec<_>>();
    ys.reduce(|a, b| {
        assert_eq!(bits(&a), bits(&b));
        b
    })
    .unwrap()
}

fn of_ones_by<T: Element>(
    cuda: &Cuda,
    weights: &[QuantizedMatrix; 3],
    m: usize,
    design: DecodeDesign,
) -> Matrix<T> {
    let [gate, up, down] = weights.each_ref().map(QuantizedMatrix::view);
    let gated = QuantizedGatedLinearParams::new(gate, up, Activation::BILINEAR, T::DTYPE);
    let params = QuantizedMlpParams::new(gated, down);
    let layer = Mlp::<T>::from_quantized_by(cuda, &params, design).unwrap();
    let ones = Matrix::from_vec(vec![T::from_f32(1.0); m * gate.cols()], m, gate.cols()).unwrap();
    let mut y = Matrix::zeros(m, gate.cols()).unwrap();
    layer.forward_host(ones.view(), y.view_mut()).unwrap();
    y
}

/// Every code there is, alone in its row and its column, as up weight and as down weight: exact, as all
/// others are 0 and each code has at most 8 bits. NaN is seen by the rows that it is in.
#[test]
fn every_code_is_unpacked_exactly() {
    fn check<T: Element>(cuda: &Cuda) {
        let codes: Vec<u8> = (0..=255).collect();
        for (i, kind) in QuantizedType::SCALED.into_iter().enumerate() {
            // On the simulator kinds have one of the two types in turns.
            if !common::has_gpu() && (i % 2 == 0) != (T::DTYPE == DType::Bf16) {
                continue;
            }
            let value = |code: u8| match kind {
                QuantizedType::I8 => f32::from(code.cast_signed()),
                _ => e4m3_to_f32(code),
            };
            let one = if kind == QuantizedType::I8 { 1 } else { 0x38 };
            // NaN must not be hidden by what shares its scale: first without, then alone.
            let finite: Vec<u8> =
                codes.iter().map(|&c| if value(c).is_nan() { 0 } else { c }).collect();
            let [gate, up, down] = diagonal(kind, &finite, 0.5, one);
            for (weights, m) in
                [([gate.clone(), up.clone(), down.clone()], 3), ([gate, down, up], 9)]
            {
                let y = of_ones::<T>(cuda, &weights, m);
                for (i, y) in y.as_slice().iter().enumerate() {
                    let expected = 0.5 * value(finite[i % 256]);
                    assert_eq!(y.to_f32(), expected, "{kind} {:#04x}", finite[i % 256]);
                }
            }
        }
    }
    let Some(cuda) = common::device() else { return };
    check::<bf16>(&cuda);
    check::<f16>(&cuda);
}

#[test]
fn a_code_that_is_no_number_makes_none_of_its_row_alone() {
    let Some(cuda) = common::device() else { return };
    for kind in [QuantizedType::F8E4m3, QuantizedType::F8E4m3Blocks] {
        for nan in [0x7F, 0xFF] {
            let mut codes = vec![0x40; 200];
            codes[130] = nan;
            let [gate, up, down] = diagonal(kind, &codes, 1.0, 0x38);
            // Of the down weight: one output.
            let y = of_ones::<bf16>(&cuda, &[gate.clone(), down.clone(), up.clone()], 4);
            for (i, y) in y.as_slice().iter().enumerate() {
                assert_eq!(y.is_nan(), i % 200 == 130, "{kind} {i}: {y}");
            }
            // Of the up weight: one feature, which every output has a product with.
            let y = of_ones::<bf16>(&cuda, &[gate, up, down], 4);
            assert!(y.as_slice().iter().all(|y| y.is_nan()), "{kind}");
        }
    }
}

/// Scales far apart, up to what leaves the range of the element type, and scales that are no numbers.
#[test]
fn extreme_scales() {
    let Some(cuda) = common::device() else { return };
    for kind in QuantizedType::SCALED {
        let one = if kind == QuantizedType::I8 { 1 } else { 0x38 };
        let codes = vec![if kind == QuantizedType::I8 { 64 } else { 0x68 }; 130];
        for scale in [1e-30f32, 1e30, -1e-38, 3e38, f32::INFINITY, f32::NAN, 0.0, f32::MIN_POSITIVE]
        {
            let [gate, up, down] = diagonal(kind, &codes, scale, one);
            let y = of_ones::<bf16>(&cuda, &[gate, down, up], 2);
            let expected = bf16::from_f32(64.0 * scale);
            for (i, y) in y.as_slice().iter().enumerate() {
                // A scale that is no number makes none of the zeros of its block either.
                let same = y.to_bits() == expected.to_bits() || y.is_nan() && !scale.is_finite();
                assert!(same, "{kind} {scale} {i}: {y}, expected {expected}");
            }
        }
    }
}

/// What the kernel does not unpack is refused with the reason.
#[test]
fn other_quantised_weights_are_refused() {
    let Some(cuda) = common::device() else { return };
    let refusal = |block: BlockType, dtype: DType| {
        let types = QuantizedTypes::of(Op::Mlp, block);
        let size = block.elements();
        let case = Case { quantized: Some(types), ..Case::new(Op::Mlp, [1, size, size], dtype) };
        let parameters = QuantizedParameters::new::<f32>(&case, types).unwrap();
        let params = parameters.mlp().unwrap();
        match dtype {
            DType::F32 => Mlp::<f32>::from_quantized(&cuda, &params).unwrap_err().to_string(),
            _ => Mlp::<bf16>::from_quantized(&cuda, &params).unwrap_err().to_string(),
        }
    };
    let q6 = refusal(BlockType::Q6_K, DType::Bf16);
    assert!(q6.contains("unpacks Q8_0, Q4_0, I8") && q6.contains("not Q6_K"), "{q6}");
    let f32 = refusal(BlockType::Q8_0, DType::F32);
    assert!(f32.contains("f16 or bf16, not with f32"), "{f32}");
}
