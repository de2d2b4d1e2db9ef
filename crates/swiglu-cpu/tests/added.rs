//! Results that are added to another matrix, against the float64 oracle, on every façade this machine can run.

use swiglu_core::conformance::{Case, Parameters, QuantizedParameters};
use swiglu_core::{
    BlockType, DType, Element, Error, Matrix, MatrixMut, Norm, NormKind, Numerics, Op, Path,
    QuantizedTypes, Rounding, RowParams, RowScale, RowSteps, bf16, bounds, f16, random,
};
use swiglu_cpu::{CallOptions, Cpu, CpuOptions, Isa, Mlp};

/// Rows of a tile, beyond one, and of several passes over few inputs.
const ROWS: [usize; 6] = [0, 1, 3, 13, 33, 300];

fn cpu(isa: Isa, threads: usize) -> Cpu {
    Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(threads)).unwrap()
}

/// Adds to the middle columns of a wider matrix, whose others stay as they are.
fn added<T: Element>(
    mlp: &Mlp<T>,
    x: &Matrix<T>,
    scale: RowScale<'_>,
    before: &Matrix<f32>,
) -> Matrix<f32> {
    let [m, k] = before.shape();
    let stride = k + 5;
    let mut wide = vec![f32::NAN; (m * stride).max(2)];
    for (i, row) in wide.chunks_mut(stride).take(m).enumerate() {
        row[2..2 + k].copy_from_slice(before.view().row(i));
    }
    let len = if m == 0 { 0 } else { (m - 1) * stride + k };
    let out = MatrixMut::with_stride(&mut wide[2..2 + len], m, k, stride).unwrap();
    mlp.forward_add(x.view(), scale, out, &CallOptions::default()).unwrap();
    let gap = |at: usize| at % stride < 2 || at % stride >= 2 + k;
    assert!(wide.iter().enumerate().all(|(at, v)| v.is_nan() == gap(at) || m == 0));
    let rows = wide.chunks(stride).take(m).flat_map(|row| row[2..2 + k].to_vec());
    Matrix::from_vec(rows.collect(), m, k).unwrap()
}

fn bits(m: &Matrix<f32>) -> Vec<u32> {
    m.as_slice().iter().map(|v| v.to_bits()).collect()
}

fn case(dtype: DType) -> Case {
    Case { bias: true, ..Case::new(Op::Mlp, [0, 151, 157], dtype) }
}

/// Judges every kind of factors, and demands the same bits of two threads as of one.
fn within_bounds<T: Element>(isa: Isa, path: Path, steps: RowSteps, numerics: Numerics) {
    let parameters = Parameters::<T>::new(&Case { numerics, ..case(T::DTYPE) }).unwrap();
    let params = parameters.mlp().with_rows(RowParams::new(steps));
    let [one, two] = [1, 2].map(|n| Mlp::with_path(&cpu(isa, n), &params, path).unwrap());
    for m in ROWS {
        let x = random::normal_matrix::<T>(5, m, 151, 1.0).unwrap();
        let before = random::normal_matrix::<f32>(6, m, 151, 1.0).unwrap();
        let factors: Vec<f32> = (0..m).map(|i| random::normal(8, i as u64)).collect();
        let exact = bounds::mlp_sums(x.view(), &params).unwrap();
        for scale in [RowScale::None, RowScale::Factor(-0.75), RowScale::Rows(&factors)] {
            let sum = added(&one, &x, scale, &before);
            let judgement = exact.added_to(before.view(), scale).unwrap().judge(sum.view());
            let judgement = judgement.unwrap();
            assert!(judgement.passed(), "{isa} {path} {} m={m} {scale:?}: {judgement:?}", T::DTYPE);
            assert_eq!(bits(&sum), bits(&added(&two, &x, scale, &before)), "{isa} m={m}");
        }
    }
}

#[test]
fn results_are_added_within_the_oracles_bounds() {
    for isa in Isa::available() {
        for (path, rounding) in
            [(Path::Fused, Rounding::Fused), (Path::Unfused, Rounding::PreRound)]
        {
            let numerics = Numerics::precise(rounding);
            within_bounds::<f32>(isa, path, RowSteps::NONE, numerics);
            within_bounds::<f16>(isa, path, RowSteps::NONE, numerics);
            within_bounds::<bf16>(isa, path, RowSteps::NONE, numerics);
        }
        // h as a whole before the down projection, and one order of sums.
        let norm = RowSteps::NONE.with_norm(Norm::new(NormKind::Rms, 1e-5).unwrap());
        let numerics = Numerics::default_for(DType::Bf16).with_batch_invariance();
        within_bounds::<bf16>(isa, Path::Fused, norm, numerics);
        within_bounds::<f32>(isa, Path::Fused, RowSteps::NONE, numerics);
    }
}

/// In f32 nothing is rounded between, so that a sum is that of the result's own bits; also of quantised weights.
#[test]
fn sums_of_f32_are_those_of_the_result() {
    for isa in Isa::available() {
        let types = QuantizedTypes::of(Op::Mlp, BlockType::Q8_0);
        let quantized =
            Case { quantized: Some(types), ..Case::new(Op::Mlp, [0, 64, 96], DType::F32) };
        let quantized = QuantizedParameters::new::<f32>(&quantized, types).unwrap();
        let dense = Parameters::<f32>::new(&case(DType::F32)).unwrap();
        let device = cpu(isa, 2);
        let layers = [
            (Mlp::new(&device, &dense.mlp()).unwrap(), 151),
            (Mlp::<f32>::quantized(&device, &quantized.mlp().unwrap()).unwrap(), 64),
        ];
        for (mlp, k) in layers {
            for m in ROWS {
                let x = random::normal_matrix::<f32>(5, m, k, 1.0).unwrap();
                let before = random::normal_matrix::<f32>(6, m, k, 1.0).unwrap();
                let mut y = Matrix::<f32>::zeros(m, k).unwrap();
                mlp.forward(x.view(), y.view_mut()).unwrap();
                for (y, before) in y.as_mut_slice().iter_mut().zip(before.as_slice()) {
                    *y = y.mul_add(0.3, *before);
                }
                let sum = added(&mlp, &x, RowScale::Factor(0.3), &before);
                assert_eq!(bits(&sum), bits(&y), "{isa} m={m} k={k}");
            }
        }
    }
}

#[test]
fn other_shapes_are_refused_with_values() {
    let parameters = Parameters::<f32>::new(&case(DType::F32)).unwrap();
    let mlp = Mlp::new(&cpu(Isa::Portable, 1), &parameters.mlp()).unwrap();
    let x = Matrix::<f32>::zeros(3, 151).unwrap();
    let refused = |x: &Matrix<f32>, scale, m| {
        let mut out = Matrix::<f32>::zeros(m, 151).unwrap();
        let options = CallOptions::default();
        mlp.forward_add(x.view(), scale, out.view_mut(), &options).unwrap_err().to_string()
    };
    let error = refused(&x, RowScale::Rows(&[1.0; 2]), 3);
    assert_eq!(error, "row scale: expected [3], given [2]");
    assert!(refused(&x, RowScale::None, 2).starts_with("output: expected [3, 151]"));
    let short = Matrix::<f32>::zeros(3, 150).unwrap();
    assert!(refused(&short, RowScale::None, 3).starts_with("x: expected [3, 151]"));
    let mut out = Matrix::<f32>::zeros(3, 151).unwrap();
    let options = CallOptions::default().with_max_threads(0);
    let error = mlp.forward_add(x.view(), RowScale::None, out.view_mut(), &options).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
}
