//! Rows of batches against the same rows in other batches, bit for bit, where sums are to have one order.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

use crate::common;

use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::{DType, Element, Matrix, Numerics, Op, Path, bf16, f16, random};
use swiglu_cuda::{Cuda, DeviceMatrix, GatedLinear, Mlp};

/// Up to beyond the edges of every tile, and of two and three of those that are fitted to the tokens.
const MOST: usize = 520;

fn counts() -> Vec<usize> {
    match common::partly() {
        true => vec![1, 2, 9, 17, 65, 130, 200],
        false => {
            (1..140).chain([192, 193, 255, 256, 257, 258, 288, 300, 385, 511, 512, MOST]).collect()
        }
    }
}

fn case(op: Op, [hidden, intermediate]: [usize; 2], dtype: DType, invariant: bool) -> Case {
    let mut numerics = Numerics::default_for(dtype);
    numerics.batch_invariant = invariant;
    // Rows of x that TMA can address, where there are such.
    Case { bias: true, numerics, seed: 5, ..Case::new(op, [0, hidden, intermediate], dtype) }
}

/// The bits of a layer's result.
type Call<T> = Box<dyn Fn(&Matrix<T>) -> Vec<u32>>;

fn forward<T: Element>(cuda: &Cuda, case: &Case, path: Option<Path>) -> Call<T> {
    let parameters = Parameters::<T>::new(case).unwrap();
    let stream = cuda.stream();
    let bits = |y: Matrix<T>| y.as_slice().iter().map(|v| v.to_f32().to_bits()).collect();
    macro_rules! calls {
        ($layer:expr) => {{
            let layer = $layer;
            Box::new(move |x: &Matrix<T>| {
                let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
                let mut y = DeviceMatrix::new(&stream, x.rows(), layer.out_features()).unwrap();
                layer.forward(&stream, x.view(), y.view_mut()).unwrap();
                bits(y.to_host().unwrap())
            })
        }};
    }
    match (case.op, path) {
        (Op::Mlp, None) => calls!(Mlp::new(cuda, &parameters.mlp()).unwrap()),
        (Op::Mlp, Some(path)) => calls!(Mlp::with_path(cuda, &parameters.mlp(), path).unwrap()),
        (_, None) => calls!(GatedLinear::new(cuda, &parameters.gated()).unwrap()),
        (_, Some(path)) => {
            calls!(GatedLinear::with_path(cuda, &parameters.gated(), path).unwrap())
        }
    }
}

/// The numbers of rows with which a row's bits are not those that it has among all.
fn differing<T: Element>(cuda: &Cuda, case: &Case, path: Option<Path>) -> Vec<usize> {
    let (counts, k) = (counts(), case.hidden);
    let most = *counts.iter().max().unwrap();
    let rows: Matrix<T> = random::normal_matrix(7, most, k, 1.0).unwrap();
    let call = forward::<T>(cuda, case, path);
    let all = call(&rows);
    let n = all.len() / most;
    let differs = |&m: &usize| {
        // Rows stand elsewhere in each batch.
        let first = m * 5 % most;
        let at = |i: usize| (first + i) % most;
        let values = (0..m).flat_map(|i| rows.view().row(at(i)).to_vec()).collect();
        let y = call(&Matrix::from_vec(values, m, k).unwrap());
        (0..m).any(|i| y[i * n..][..n] != all[at(i) * n..][..n])
    };
    counts.into_iter().filter(differs).collect()
}

#[test]
fn a_rows_bits_do_not_follow_its_batch() {
    let Some(cuda) = common::device() else { return };
    let shapes: &[[usize; 2]] = match common::partly() {
        true => &[[72, 200]],
        false => &[[72, 200], [896, 4864], [2048, 8192]],
    };
    for op in [Op::GatedLinear, Op::Mlp] {
        for &shape in shapes {
            let of = |dtype| case(op, shape, dtype, true);
            assert_eq!(differing::<bf16>(&cuda, &of(DType::Bf16), None), [0; 0], "{op} {shape:?}");
            if shape[0] < 1000 {
                let all = differing::<f16>(&cuda, &of(DType::F16), None);
                assert_eq!(all, [0; 0], "{op} {shape:?} f16");
            }
        }
        // What no tensor core multiplies, and rows that TMA cannot address.
        assert_eq!(differing::<f32>(&cuda, &case(op, [72, 100], DType::F32, true), None), [0; 0]);
        assert_eq!(differing::<bf16>(&cuda, &case(op, [77, 99], DType::Bf16, true), None), [0; 0]);
        let unfused = Some(Path::Unfused);
        let of = case(op, [72, 200], DType::Bf16, true);
        assert_eq!(differing::<bf16>(&cuda, &of, unfused), [0; 0], "{op} unfused");
    }
    // Without it kernels for few rows have another order. The simulator's sums have one.
    if common::has_gpu() {
        let of = case(Op::Mlp, [896, 4864], DType::Bf16, false);
        assert!(!differing::<bf16>(&cuda, &of, None).is_empty());
    }
}

/// What the predicate takes for granted: that all kernels that it lets pass give the same bits.
#[test]
fn kernels_of_one_instruction_give_the_same_bits() {
    let Some(cuda) = common::device() else { return };
    let [m, hidden, intermediate] = if common::partly() { [40, 72, 136] } else { [300, 896, 4864] };
    for (dtype, hidden) in [(DType::Bf16, hidden), (DType::Bf16, hidden + 5)] {
        let case = case(Op::GatedLinear, [hidden, intermediate], dtype, true);
        let parameters = Parameters::<bf16>::new(&case).unwrap();
        let layer = GatedLinear::new(&cuda, &parameters.gated()).unwrap();
        let problem = parameters.gated().problem(m);
        let candidates = cuda.candidates(&problem, None);
        let computes = candidates.iter().filter(|candidate| candidate.refusal.is_none());
        let stream = cuda.stream();
        let x: Matrix<bf16> = random::normal_matrix(3, m, hidden, 1.0).unwrap();
        let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
        let results: Vec<_> = computes
            .enumerate()
            // Compiling takes the simulator's time.
            .filter(|(i, _)| !common::partly() || i % 4 == 0)
            .map(|(_, candidate)| {
                let mut y = DeviceMatrix::new(&stream, m, intermediate).unwrap();
                y.buffer_mut().poison(0xFF).unwrap();
                layer.forward_by(&stream, candidate, x.view(), y.view_mut()).unwrap();
                (candidate.name.clone(), y.to_host().unwrap())
            })
            .collect();
        assert!(results.len() > 1, "{problem}");
        let (first, expected) = &results[0];
        for (name, result) in &results[1..] {
            let same = result.as_slice().iter().zip(expected.as_slice());
            let differ = same.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differ, 0, "{name} beside {first}, {problem}");
        }
    }
}
