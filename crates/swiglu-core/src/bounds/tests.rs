use half::{bf16, f16};

use super::*;
use crate::conformance::{Case, Parameters};
use crate::layout::{GateUpWeights, Orientation};
use crate::problem::Op;

fn judged(dtype: DType, value: f64) -> Judgement {
    fn judge<T: Element>(reference: &Reference) -> Judgement {
        let out = [T::from_f64(reference.value.as_slice()[0]), T::from_f64(1.0)];
        reference.judge(MatrixRef::new(&out, 1, 2).unwrap()).unwrap()
    }
    let value = Matrix::from_vec(vec![value, 1.0], 1, 2).unwrap();
    let bound = Matrix::from_vec(vec![f64::INFINITY; 2], 1, 2).unwrap();
    let reference =
        Reference { value, bound, frobenius_limit: f64::INFINITY, intermediates: Vec::new() };
    match dtype {
        DType::F32 => judge::<f32>(&reference),
        DType::F16 => judge::<f16>(&reference),
        DType::Bf16 => judge::<bf16>(&reference),
    }
}

/// What rounds to the largest number is no overflow.
#[test]
fn only_what_rounds_to_infinity_overflows() {
    for dtype in DType::ALL {
        let least = dtype.least_infinite();
        let below = f64::from_bits(least.to_bits() - 1);
        assert!(below > dtype.max_finite());
        assert_eq!(judged(dtype, below).overflow, None, "{dtype}");
        assert_eq!(judged(dtype, -below).overflow, None, "{dtype}");
        let overflow = judged(dtype, -least).overflow.unwrap();
        assert_eq!((overflow.at, overflow.value), ((0, 0), -least), "{dtype}");
    }
    let message = judged(DType::F16, 65520.0).overflow.unwrap().to_string();
    assert!(message.contains("6.552e4, beyond the 6.550e4 of f16"), "{message}");
}

/// A result that is lost on the way is told with what exceeded its type, whatever the bound admits.
#[test]
fn a_lost_result_names_the_intermediate_that_exceeds_the_type() {
    let value = Matrix::from_vec(vec![2.0, 1.0], 1, 2).unwrap();
    let bound = Matrix::from_vec(vec![f64::INFINITY; 2], 1, 2).unwrap();
    let intermediates = vec![("gate", 3e3), ("h", 1e5)];
    let reference = Reference { value, bound, frobenius_limit: f64::INFINITY, intermediates };
    let judge = |out: [f16; 2]| reference.judge(MatrixRef::new(&out, 1, 2).unwrap()).unwrap();
    let [one, two] = [1.0, 2.0].map(f16::from_f32);
    assert_eq!(judge([two, one]).lost, None);
    let lost = judge([two, f16::INFINITY]);
    assert!(lost.passed());
    let message = lost.lost.unwrap().to_string();
    assert!(message.contains("(0, 1) is inf, exactly 1.000e0: h reaches 1.000e5"), "{message}");
    assert!(message.contains("beyond the 6.550e4 of f16"), "{message}");
}

/// What is no number has no distance; whether it is right is a matter of its element.
#[test]
fn elements_that_are_no_numbers_leave_the_others_their_limit() {
    let mut x = crate::random::normal_matrix::<f32>(1, 3, 16, 1.0).unwrap();
    x.as_mut_slice()[17] = f32::NAN;
    let weights = |seed| crate::random::normal_matrix::<f32>(seed, 8, 16, 0.25).unwrap();
    let (gate, up) = (weights(2), weights(3));
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let params = GatedLinearParams::new(weights, Activation::SWIGLU);
    let reference = gated_linear(x.view(), &params).unwrap();
    assert!(reference.frobenius_limit < 1e-5, "{}", reference.frobenius_limit);
    let judge = |out: &Matrix<f32>| reference.judge(out.view()).unwrap();
    let mut out = reference.value.as_slice().iter().map(|&v| v as f32).collect::<Vec<_>>();
    let right = Matrix::from_vec(out.clone(), 3, 8).unwrap();
    assert!(judge(&right).passed() && judge(&right).relative_frobenius < 1e-6);
    out.iter_mut().for_each(|v| *v *= 1.0 + 2e-5);
    let drifted = judge(&Matrix::from_vec(out.clone(), 3, 8).unwrap());
    assert!(drifted.relative_frobenius > drifted.frobenius_limit && !drifted.passed());
    let mut wrong = right.clone();
    wrong.as_mut_slice()[8] = 1.0;
    assert!(!judge(&wrong).passed());
}

/// f16 holds a square up to 65504. Where results are rounded once a small up may bring a larger one back;
/// where each step is, the square is infinite already, which only that mode admits.
#[test]
fn squares_overflow_where_they_are_stored() {
    let of = |v: f32| Matrix::from_vec(vec![f16::from_f32(v)], 1, 1).unwrap();
    let reference = |rounding, gate: f32, up: f32| {
        let (gate, up) = (of(gate), of(up));
        let inputs = GateUpRef::separate(gate.view(), up.view()).unwrap();
        activation(&Activation::REGLU2, Numerics::precise(rounding), &inputs).unwrap()
    };
    let passed = |r: &Reference, out: f32| r.judge(of(out).view()).unwrap();
    let once = reference(Rounding::Fused, 300.0, 0.0625);
    assert!(passed(&once, 5625.0).passed() && !passed(&once, f32::INFINITY).passed());
    assert_eq!(passed(&once, 5625.0).overflow, None);
    let stepwise = reference(Rounding::Eager, 300.0, 0.0625);
    assert!(passed(&stepwise, f32::INFINITY).passed());
    assert!(passed(&reference(Rounding::Eager, 300.0, 0.0), f32::NAN).passed());
    assert!(!passed(&reference(Rounding::Eager, 200.0, 0.0), f32::NAN).passed());
    let beyond = passed(&reference(Rounding::Fused, 300.0, 1.0), f32::INFINITY);
    assert_eq!((beyond.passed(), beyond.overflow.map(|o| o.value)), (true, Some(90000.0)));
}

/// f′ = 2x is as large as x: an error of a large gate counts for more, and one of the gradient too.
#[test]
fn bounds_of_squares_grow_with_the_gate() {
    let bound = |gate, error| {
        let numerics = Numerics::precise(Rounding::Fused);
        activation_bound(&Activation::REGLU2, numerics, DType::F32, (gate, error), (1.0, 0.0))
    };
    let (few, many) = (bound(1.0, 1e-3), bound(100.0, 1e-3));
    assert!((2e-3..2.1e-3).contains(&few) && (0.2..0.21).contains(&many), "{few} {many}");
    assert!(bound(-1.0, 1e-3) < 2e-6);
    let gradient = |rounding, gate| {
        let numerics = Numerics::precise(rounding);
        let given = [(gate, 0.0), (1.0, 0.0), (1e-3, 0.0)];
        backward::backward_bound(&Activation::REGLU2, numerics, DType::F16, given).0
    };
    let roundoff = DType::F16.unit_roundoff();
    let once = gradient(Rounding::Fused, 1000.0);
    assert!((2.0 * roundoff..2.2 * roundoff).contains(&once), "{once}");
    assert!(gradient(Rounding::Eager, 1000.0).is_finite());
    // 2x is stored.
    assert_eq!(gradient(Rounding::Eager, 40000.0), f64::INFINITY);
}

/// ∂L/∂x of a token depends on no other, and gradients of weights of a feature on no other feature.
#[test]
fn gradients_of_some_tokens_and_features_are_those_of_all() {
    let [m, k, h] = [5, 7, 6];
    let matrix =
        |seed, rows, cols| crate::random::normal_matrix::<f32>(seed, rows, cols, 1.0).unwrap();
    let (x, dy) = (matrix(1, m, k), matrix(2, m, k));
    let (gate, up, down) = (matrix(3, h, k), matrix(4, h, k), matrix(5, k, h));
    fn block<'a>([gate, up, down]: [MatrixRef<'a, f32>; 3]) -> MlpParams<'a, f32> {
        let weights = GateUpWeights::separate(gate, up, Orientation::OutIn).unwrap();
        let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
        MlpParams::new(gated, down, Orientation::OutIn)
    }
    let same = |a: &Matrix<f64>, b: MatrixRef<'_, f64>| {
        assert!((0..a.rows()).all(|r| a.view().row(r) == b.row(r)), "{a:?} {b:?}");
    };
    let params = block([gate.view(), up.view(), down.view()]);
    let all = mlp_backward(x.view(), &params, dy.view(), DType::F32, 0.0).unwrap();
    let [x_some, dy_some] = [&x, &dy].map(|m| m.view().rows_range(2..4).unwrap());
    let dx = mlp_input_gradient(x_some, &params, dy_some, 0.0).unwrap();
    same(&dx.value, all.dx.value.view().rows_range(2..4).unwrap());
    same(&dx.bound, all.dx.bound.view().rows_range(2..4).unwrap());
    let [gate, up] = [&gate, &up].map(|m| m.view().rows_range(3..5).unwrap());
    let params = block([gate, up, down.view().cols_range(3..5).unwrap()]);
    let weights = mlp_weight_gradients(x.view(), &params, dy.view(), DType::F32, 0.0);
    let [gate, up, down] = weights.unwrap();
    for (some, all) in [(&gate, &all.gate), (&up, &all.up)] {
        same(&some.value, all.value.view().rows_range(3..5).unwrap());
        same(&some.bound, all.bound.view().rows_range(3..5).unwrap());
    }
    let all = all.down.as_ref().unwrap();
    same(&down.value, all.value.view().cols_range(3..5).unwrap());
    same(&down.bound, all.bound.view().cols_range(3..5).unwrap());
}

/// The gradient of scale ⊙ y is that of y from scale ⊙ dy, and that of a row's factor is dy·y of the row.
#[test]
fn factors_of_rows_are_factors_of_the_gradient() {
    let [m, k, h] = [6, 5, 7];
    let case = Case { bias: true, ..Case::new(Op::Mlp, [m, k, h], DType::F32) };
    let parameters = Parameters::<f32>::new(&case).unwrap();
    let params = parameters.mlp();
    let [x, dy] = [1, 2].map(|seed| crate::random::normal_matrix::<f32>(seed, m, k, 1.0).unwrap());
    let factors = [0.0, 1.0, -2.0, 0.5, 4.0, -0.25];
    let by_factor = dy.as_slice().iter().enumerate().map(|(i, v)| v * factors[i / k]);
    let scaled_dy = Matrix::from_values(by_factor, m, k).unwrap();
    let given = (dy.view(), RowScale::Rows(&factors));
    let of = scaled_mlp_backward(x.view(), &params, given, DType::F32, 0.0).unwrap();
    let as_if = mlp_backward(x.view(), &params, scaled_dy.view(), DType::F32, 0.0).unwrap();
    let pairs = [
        (&of.dx, &as_if.dx),
        (&of.gate, &as_if.gate),
        (&of.up, &as_if.up),
        (of.down.as_ref().unwrap(), as_if.down.as_ref().unwrap()),
        (of.down_bias.as_ref().unwrap(), as_if.down_bias.as_ref().unwrap()),
    ];
    for (of, as_if) in pairs {
        for (a, b) in of.value.as_slice().iter().zip(as_if.value.as_slice()) {
            assert!((a - b).abs() <= 1e-13 * (1.0 + b.abs()), "{a} {b}");
        }
        // A rounding more of each factor of a product.
        let bounds = of.bound.as_slice().iter().zip(as_if.bound.as_slice());
        bounds.for_each(|(a, b)| assert!(*a >= b * 0.999 && *a < b * 1.6 + 1e-30, "{a} {b}"));
    }
    let y = oracle::mlp(x.view(), &params).unwrap().y.value;
    let of_factors = of.row_scale.unwrap();
    for row in 0..m {
        let products = dy.view().row(row).iter().zip(y.view().row(row));
        let exact: f64 = products.map(|(a, b)| f64::from(*a) * b).sum();
        let error = (of_factors.value[(0, row)] - exact).abs();
        assert!(error <= 1e-13 * (1.0 + exact.abs()), "{row}: {error}");
    }
    let short = (dy.view(), RowScale::Rows(&factors[1..]));
    let error = scaled_mlp_backward(x.view(), &params, short, DType::F32, 0.0).unwrap_err();
    assert!(error.to_string().starts_with("row scale: expected [6]"), "{error}");
}
