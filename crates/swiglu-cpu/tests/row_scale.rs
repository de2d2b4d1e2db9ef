//! Gradients through factors of a block's rows, and those of the factors, to the bit; their bounds are the conformance suite's.

use crate::training::{SHAPES, case, cpu, inputs};
use swiglu_core::conformance::Parameters;
use swiglu_core::{
    Activation, Element, GateUpWeights, GatedLinearParams, Gradients, Matrix, MlpParams,
    Orientation, Path, Rounding, RowScale, SavePolicy, Wanted, bf16,
};
use swiglu_cpu::{CallOptions, Mlp};

/// Gradients through factors of rows, and those of the factors.
pub(crate) fn train_scaled<T: Element>(
    layer: &Mlp<T>,
    [x, dy]: [&Matrix<T>; 2],
    scale: RowScale<'_>,
    wanted: Wanted,
) -> (Gradients<T>, Vec<f32>) {
    let m = x.rows();
    let mut y = Matrix::zeros(m, x.cols()).unwrap();
    let saved = layer.forward_train(x.view(), y.view_mut(), &CallOptions::default()).unwrap();
    let shapes = layer.gradient_shapes().unwrap();
    let mut gradients = Gradients::zeros(m, &shapes, wanted, true).unwrap();
    let mut of_factors = vec![f32::NAN; m];
    let into = gradients.as_mut().with_row_scale(scale).with_row_scale_grad(&mut of_factors);
    layer.backward_into(saved, dy, into, &CallOptions::default()).unwrap();
    (gradients, of_factors)
}

/// Factors that round nothing are as good before the down projection as behind it, and the gradient of a factor does not
/// depend on it; of any of them, on no other row and on nothing else that is wanted.
#[test]
fn factors_of_rows_are_those_of_dy() {
    fn check<T: Element>() {
        for (i, (shape, rounding)) in SHAPES.into_iter().zip(Rounding::ALL).enumerate() {
            let [m, k, _] = shape;
            let parameters = Parameters::<T>::new(&case::<T>(shape, rounding)).unwrap();
            let (params, [x, dy]) = (parameters.mlp(), inputs::<T>(shape, 0));
            let factors: Vec<f32> = (0..m).map(|row| [1.0, 0.0, -2.0, 0.25][row % 4]).collect();
            let by_factor = |(at, v): (usize, &T)| T::from_f32(v.to_f32() * factors[at / k]);
            let scaled_dy = dy.as_slice().iter().enumerate().map(by_factor);
            let scaled_dy = Matrix::from_values(scaled_dy, m, k).unwrap();
            for path in [Path::Fused, Path::Unfused] {
                let policy = SavePolicy::ALL[i];
                let of = |threads, scale, wanted| {
                    let layer =
                        Mlp::for_training_with_path(&cpu(threads), &params, policy, path).unwrap();
                    train_scaled(&layer, [&x, &dy], scale, wanted)
                };
                let what = format!("{shape:?} {rounding} {path}");
                let layer = Mlp::for_training_with_path(&cpu(2), &params, policy, path).unwrap();
                let (as_if, _) =
                    train_scaled(&layer, [&x, &scaled_dy], RowScale::None, Wanted::ALL);
                let (found, of_factors) = of(2, RowScale::Rows(&factors), Wanted::ALL);
                assert!(found == as_if, "{what}");
                assert!(of_factors.iter().all(|v| v.is_finite() && *v != 0.0), "{what}");
                for (threads, scale, wanted) in [
                    (1, RowScale::None, Wanted::ALL),
                    (3, RowScale::Factor(-7.5), Wanted::INPUT),
                    (2, RowScale::Rows(&factors), Wanted::NONE),
                    (2, RowScale::Factor(0.3), Wanted::NONE.with_down(true)),
                ] {
                    assert_eq!(of(threads, scale, wanted).1, of_factors, "{what} {scale:?}");
                }
                let one = of(2, RowScale::Factor(-0.5), Wanted::ALL).0;
                let rows = of(1, RowScale::Rows(&vec![-0.5; m]), Wanted::ALL).0;
                assert!(one == rows, "{what}");
            }
        }
    }
    check::<f32>();
    check::<bf16>();
}

/// What is behind the last feature counts for nothing, also where a product with zero is none.
#[test]
fn an_infinite_gradient_of_a_factor_is_infinite() {
    let [m, k, h] = [3, 33, 31];
    let ones = |rows, cols| Matrix::from_vec(vec![1.0f32; rows * cols], rows, cols).unwrap();
    let (gate, up, down) = (ones(h, k), ones(h, k), ones(k, h));
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
    let params = MlpParams::new(gated, down.view(), Orientation::OutIn);
    let (x, mut dy) = (ones(m, k), ones(m, k));
    dy[(1, 7)] = f32::INFINITY;
    for path in [Path::Fused, Path::Unfused] {
        let layer = Mlp::for_training_with_path(&cpu(1), &params, SavePolicy::Save, path).unwrap();
        let found = train_scaled(&layer, [&x, &dy], RowScale::None, Wanted::NONE).1;
        assert!(found[1] == f32::INFINITY && found[0].is_finite(), "{path}: {found:?}");
        assert_eq!(found[0], found[2], "{path}");
    }
}
