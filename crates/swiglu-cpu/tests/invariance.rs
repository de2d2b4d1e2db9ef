//! Rows of batches against the same rows alone, bit for bit, with one order of sums for every number of rows; on every
//! façade this machine can run, with one and two threads.

use std::collections::BTreeSet;

use swiglu_core::conformance::{Case, Parameters, QuantizedParameters};
use swiglu_core::{
    BlockType, DType, Element, Matrix, MatrixMut, MatrixRef, Numerics, Op, Path, QuantizedType,
    QuantizedTypes, bf16, f16, random,
};
use swiglu_cpu::{Cpu, CpuOptions, GatedLinear, Isa, Mlp, quantized_types};
use swiglu_testing::not_run;

/// Up to beyond the edges of every tile: of vectors, of digits and of AMX, and of blocks of two of those.
const MOST: usize = 139;
/// Where kernels change, and some more, for what there are many kinds of.
const SOME: [usize; 21] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 24, 31, 32, 33, 64, 65, MOST];

/// A layer of a case, packed for a façade and a number of threads.
type Forward<T> = Box<dyn Fn(MatrixRef<'_, T>, MatrixMut<'_, T>)>;

fn cpu(isa: Isa, threads: usize) -> Cpu {
    Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(threads)).unwrap()
}

fn case(op: Op, [hidden, intermediate]: [usize; 2], dtype: DType, invariant: bool) -> Case {
    let case = Case { bias: true, ..Case::new(op, [0, hidden, intermediate], dtype) };
    let mut numerics = Numerics::default_for(dtype);
    numerics.batch_invariant = invariant;
    Case { numerics, ..case }
}

fn layer<T: Element>(cpu: &Cpu, case: &Case, path: Path) -> Forward<T> {
    if let Some(types) = case.quantized {
        let parameters = QuantizedParameters::new::<T>(case, types).unwrap();
        if case.op == Op::Mlp {
            let mlp = Mlp::quantized(cpu, &parameters.mlp().unwrap()).unwrap();
            return Box::new(move |x, y| mlp.forward(x, y).unwrap());
        }
        let gated = GatedLinear::quantized(cpu, &parameters.gated()).unwrap();
        return Box::new(move |x, y| gated.forward(x, y).unwrap());
    }
    let parameters = Parameters::<T>::new(case).unwrap();
    if case.op == Op::Mlp {
        let mlp = Mlp::with_path(cpu, &parameters.mlp(), path).unwrap();
        return Box::new(move |x, y| mlp.forward(x, y).unwrap());
    }
    let gated = GatedLinear::with_path(cpu, &parameters.gated(), path).unwrap();
    Box::new(move |x, y| gated.forward(x, y).unwrap())
}

/// The numbers of rows, of `ms`, with which a row's bits are not those that it has alone. Rows stand elsewhere in each
/// batch.
fn differing<T: Element>(isa: Isa, case: &Case, path: Path, ms: &[usize]) -> Vec<usize> {
    let (k, n) = match case.op {
        Op::Mlp => (case.hidden, case.hidden),
        _ => (case.hidden, case.intermediate),
    };
    let most = ms.iter().copied().max().unwrap();
    let rows: Matrix<T> = random::normal_matrix(7, most, k, 1.0).unwrap();
    let forward = |layer: &Forward<T>, x: &Matrix<T>| {
        let mut y = Matrix::<T>::zeros(x.rows(), n).unwrap();
        layer(x.view(), y.view_mut());
        y.as_slice().iter().map(|v| v.to_f32().to_bits()).collect::<Vec<u32>>()
    };
    let batch = |first: usize, m: usize| {
        let values = (0..m).flat_map(|i| rows.view().row((first + i) % most).to_vec()).collect();
        Matrix::from_vec(values, m, k).unwrap()
    };
    let layers = [1, 2].map(|threads| layer::<T>(&cpu(isa, threads), case, path));
    let alone: Vec<Vec<u32>> = (0..most).map(|i| forward(&layers[0], &batch(i, 1))).collect();
    let differs = |m: usize| {
        let first = m * 5 % most;
        let x = batch(first, m);
        layers.iter().any(|layer| {
            let y = forward(layer, &x);
            (0..m).any(|i| y[i * n..(i + 1) * n] != alone[(first + i) % most])
        })
    };
    ms.iter().copied().filter(|&m| differs(m)).collect()
}

fn differing_as(isa: Isa, case: &Case, path: Path, ms: &[usize]) -> Vec<usize> {
    match case.dtype {
        DType::F32 => differing::<f32>(isa, case, path, ms),
        DType::F16 => differing::<f16>(isa, case, path, ms),
        DType::Bf16 => differing::<bf16>(isa, case, path, ms),
        other => unreachable!("no test for {other}"),
    }
}

fn expect_none(isa: Isa, case: &Case, path: Path, ms: &[usize]) {
    let differ = differing_as(isa, case, path, ms);
    assert!(differ.is_empty(), "{isa} {path} {case}: rows differ from alone with M of {differ:?}");
}

fn available(isa: Isa) -> bool {
    if !isa.is_available() {
        not_run(format_args!("this machine lacks {isa}"));
    }
    isa.is_available()
}

/// Panels and steps that are no multiple of anything, an odd one of a pair among them.
fn dense_rows_have_their_bits_in_every_batch(isa: Isa) {
    if !available(isa) {
        return;
    }
    let every: Vec<usize> = (1..=MOST).chain([255, 256, 257, 300]).collect();
    let all = std::env::var_os(swiglu_testing::ALL).is_some();
    for dtype in DType::ALL {
        // The portable façade takes the longest: of the other types the numbers where kernels change.
        let one_is_enough = isa == Isa::Portable && dtype != DType::F32 && !all;
        let every = if one_is_enough { &SOME[..] } else { &every };
        for op in [Op::GatedLinear, Op::Mlp] {
            expect_none(isa, &case(op, [151, 157], dtype, true), Path::Fused, every);
            expect_none(isa, &case(op, [151, 157], dtype, true), Path::Unfused, &SOME);
        }
        // No input, fewer panels than are summed side by side.
        expect_none(isa, &case(Op::GatedLinear, [0, 9], dtype, true), Path::Fused, &SOME);
        expect_none(isa, &case(Op::GatedLinear, [3, 9], dtype, true), Path::Fused, &SOME);
        // Several chunks of a panel, several passes, and one row on two threads.
        let large = case(Op::GatedLinear, [8300, 45], dtype, true);
        expect_none(isa, &large, Path::Fused, &[1, 2, 3, 4, 5, 7, 16, 33, 300]);
        let large = case(Op::Mlp, [45, 8300], dtype, true);
        expect_none(isa, &large, Path::Fused, &[1, 2, 3, 4, 5, 7, 16, 33]);
    }
}

fn quantized(op: Op, types: [QuantizedType; 2], dtype: DType, invariant: bool) -> Case {
    let [gate_up, down] = types;
    let (down, intermediate) = match op {
        Op::Mlp => (Some(down), down.elements()),
        // An odd number of panels of eight lanes and of sixteen.
        _ => (None, 35),
    };
    let case = case(op, [gate_up.elements(), intermediate], dtype, invariant);
    // Outputs of the down weight are the inputs of gate and up.
    Case { quantized: Some(QuantizedTypes::new(gate_up, down)), ..case }
}

fn quantized_rows_have_their_bits_in_every_batch(isa: Isa) {
    if !available(isa) {
        return;
    }
    let types = quantized_types();
    for dtype in DType::ALL {
        for (t, &kind) in types.iter().enumerate() {
            let both = [kind, types[(t + 1) % types.len()]];
            expect_none(isa, &quantized(Op::Mlp, both, dtype, true), Path::Fused, &SOME);
            expect_none(isa, &quantized(Op::GatedLinear, both, dtype, true), Path::Fused, &SOME);
        }
        let every: Vec<usize> = (1..=MOST).collect();
        let both = [BlockType::Q4_K.into(), BlockType::Q8_0.into()];
        expect_none(isa, &quantized(Op::Mlp, both, dtype, true), Path::Fused, &every);
        // Several chunks of a panel, and of rows packed as digits.
        let large = quantized(Op::GatedLinear, [BlockType::Q8_0.into(); 2], dtype, true);
        let large = Case { hidden: 16384, ..large };
        expect_none(isa, &large, Path::Fused, &[1, 2, 3, 5, 33, 70]);
    }
}

/// What the tests above would find: without the mode kernels follow the number of rows.
fn bits_follow_the_number_of_rows_without_the_mode(isa: Isa) {
    if !available(isa) {
        return;
    }
    let dense = case(Op::GatedLinear, [151, 157], DType::F32, false);
    let differ = differing_as(isa, &dense, Path::Fused, &SOME);
    // With vectors of 8 lanes the one order is the fastest of few rows too.
    let follow = !matches!(isa, Isa::Portable | Isa::Avx2);
    assert!(differ.contains(&4) == follow && !differ.contains(&1), "{isa}: {differ:?}");
    for &kind in quantized_types() {
        let case = quantized(Op::GatedLinear, [kind; 2], DType::F32, false);
        let few = cpu(isa, 1).quantized_rows(DType::F32, kind.block().unwrap());
        let differ = differing_as(isa, &case, Path::Fused, &[few, few + 1, few + 2]);
        assert_eq!(differ, [few + 1, few + 2], "{isa} {kind}, meant for up to {few}");
    }
}

/// The plan names the mode, and its way does not follow the number of rows.
#[test]
fn plans_say_so() {
    let device = cpu(Isa::detect(), 1);
    let mut reasons = BTreeSet::new();
    for m in [1, 3, 100] {
        let case = Case { m, ..quantized(Op::Mlp, [BlockType::Q4_0.into(); 2], DType::F32, true) };
        let parameters = QuantizedParameters::new::<f32>(&case, case.quantized.unwrap()).unwrap();
        let layer = Mlp::<f32>::quantized(&device, &parameters.mlp().unwrap()).unwrap();
        let plan = layer.plan(m);
        assert_eq!(plan, device.plan(plan.problem, Path::Fused).unwrap());
        assert!(plan.problem.numerics.batch_invariant);
        assert!(plan.reason.contains("one order for every number"), "{}", plan.reason);
        reasons.insert(plan.reason);
    }
    assert_eq!(reasons.len(), 1, "{reasons:?}");
}

macro_rules! facades {
    ($($name:ident: $isa:expr),*) => {
        $(mod $name {
            use super::*;
            #[test]
            fn dense() {
                dense_rows_have_their_bits_in_every_batch($isa);
            }
            #[test]
            fn quantized() {
                quantized_rows_have_their_bits_in_every_batch($isa);
            }
            #[test]
            fn without_the_mode() {
                bits_follow_the_number_of_rows_without_the_mode($isa);
            }
        })*
    };
}

facades!(portable: Isa::Portable, avx2: Isa::Avx2, avx512: Isa::Avx512, avx512_bf16: Isa::Avx512Bf16, amx_bf16: Isa::AmxBf16);
