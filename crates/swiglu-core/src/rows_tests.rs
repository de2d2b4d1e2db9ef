use super::*;
use crate::problem::Problem;
use crate::{DType, Matrix, bf16, oracle, random};

fn sparse(z: f32, row: &[f64]) -> Vec<f64> {
    let mut row = row.to_vec();
    Sparsity::above(z).unwrap().apply_f64(&mut row);
    row
}

/// Values of scipy.stats.norm.ppf.
#[test]
fn a_fraction_is_a_quantile_of_the_normal_distribution() {
    for (fraction, z) in [(0.95, 1.644_853_6), (0.5, 0.0), (0.9, 1.281_551_6), (0.01, -2.326_348)] {
        let given = Sparsity::of(fraction).unwrap().deviations();
        // The fraction is an f32: 2⁻²⁵ of it are 37 times as much of z at 0.01.
        assert!((given - z).abs() < 1e-6, "{fraction}: {given}");
    }
    assert_eq!(quantile(f64::from(0.95f32)) as f32, 1.644_853_5);
    for fraction in [0.0, 1.0, -0.5, f32::NAN] {
        assert!(matches!(Sparsity::of(fraction), Err(Error::OutOfRange { .. })), "{fraction}");
    }
    assert!(Sparsity::above(f32::INFINITY).is_err());
}

#[test]
fn a_sparse_gate_keeps_what_is_above_the_cutoff_less_it() {
    assert_eq!(sparse(0.0, &[1.0, 2.0, 3.0, 4.0]), [0.0, 0.0, 0.5, 1.5]);
    // Of the population: √1.25, not √(5/3).
    let kept = sparse(1.0, &[1.0, 2.0, 3.0, 4.0]);
    assert_eq!(kept, [0.0, 0.0, 0.0, 1.5 - 1.25f64.sqrt()]);
    assert!(sparse(1.0, &[1.0, f64::NAN, 3.0]).iter().all(|v| v.is_nan()));
    assert_eq!(sparse(1.0, &[]), [0.0; 0]);
}

#[test]
fn norms_divide_by_their_root_and_multiply_by_their_weight() {
    let normed = |kind, epsilon, weight: &[f32], bias: Option<&[f32]>, row: &[f64]| {
        let steps = RowSteps::NONE.with_norm(Norm::new(kind, epsilon).unwrap());
        let params = RowParams::new(steps).with_norm_values(Some(weight), bias);
        let mut row = row.to_vec();
        params.normalise_f64(&mut row);
        row
    };
    let root = 13.0f64.sqrt();
    let rms = normed(NormKind::Rms, 0.5, &[2.0, 1.0], None, &[3.0, 4.0]);
    assert_eq!(rms, [3.0 / root * 2.0, 4.0 / root]);
    let layer = normed(NormKind::Layer, 3.0, &[2.0, 1.0], Some(&[0.5, -1.0]), &[1.0, 3.0]);
    assert_eq!(layer, [-0.5, -0.5]);
    for epsilon in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(Norm::new(NormKind::Rms, epsilon).is_err(), "{epsilon}");
    }
}

/// The order of `inputs_mean + inputs_std * std_multiplier`, `relu(inputs - cutoff_x)` and
/// `weight * (h * rsqrt(…)).to(dtype)`, by hand.
#[test]
fn eager_steps_round_where_pytorch_does() {
    let values = [1.0f32, 2.0, 3.0, 4.0, 7.5, -3.25, 0.375, 11.0];
    let round = |v: f32| bf16::from_f32(v).to_f32();
    let row: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
    let (mean, deviation) = moments(&row, |v| f64::from(v.to_f32()));
    let cutoff = round(round(mean as f32) + round(round(deviation as f32) * round(1.6448536)));
    let mut gate = row.clone();
    Sparsity::above(1.6448536).unwrap().apply(Rounding::Eager, &mut gate);
    assert_eq!(gate[7].to_f32(), round(11.0 - cutoff));
    let mut fused = row.clone();
    Sparsity::above(1.6448536).unwrap().apply(Rounding::Fused, &mut fused);
    assert_ne!(fused[7], gate[7]);

    let weight = [1.17f32; 8];
    let steps = RowSteps::NONE.with_norm(Norm::new(NormKind::Rms, 1e-5).unwrap());
    let params = RowParams::new(steps).with_norm_values(Some(&weight), None);
    let (_, root) = steps.norm.unwrap().statistics(&row, |v| v.to_f64());
    let mut h = row.clone();
    params.normalise(Rounding::Eager, &mut h);
    let expected: Vec<f32> =
        values.iter().map(|v| round(round(v * (1.0 / root) as f32) * 1.17)).collect();
    assert_eq!(h.iter().map(|v| v.to_f32()).collect::<Vec<_>>(), expected);
}

/// Squares of large values do not overflow.
#[test]
fn a_norm_of_large_values_is_one() {
    let params = RowParams::new(RowSteps::NONE.with_norm(Norm::new(NormKind::Rms, 1e-5).unwrap()));
    let mut h = [1e30f32, -1e30];
    params.normalise(Rounding::Fused, &mut h);
    assert_eq!(h, [1.0, -1.0]);
}

#[test]
fn values_of_a_norm_fit_it() {
    let norm = RowSteps::NONE.with_norm(Norm::new(NormKind::Rms, 1e-5).unwrap());
    let weight = [1.0f32; 3];
    let with = |steps| RowParams::new(steps).with_norm_values(Some(&weight), None);
    assert!(with(norm).validate(3).is_ok());
    let error = with(norm).validate(4).unwrap_err().to_string();
    assert!(error.contains("norm weight") && error.contains("[4]"), "{error}");
    assert!(matches!(with(RowSteps::NONE).validate(3), Err(Error::Unsupported { .. })));
    let owned = OwnedRowParams::from(with(norm));
    assert_eq!(owned.view(), with(norm));
}

#[test]
fn problems_name_their_steps_and_survive_json() {
    let case = crate::conformance::Case::new(crate::Op::Mlp, [1, 4, 4], DType::F32);
    let parameters = crate::conformance::Parameters::<f32>::new(&case).unwrap();
    let plain = parameters.mlp().problem(1);
    assert!(!serde_json::to_string(&plain).unwrap().contains("rows"));
    let rows = RowSteps::NONE
        .with_sparsity(Sparsity::of(0.95).unwrap())
        .with_norm(Norm::new(NormKind::Layer, 1e-6).unwrap());
    let problem = Problem { rows, ..plain };
    let json = serde_json::to_string(&problem).unwrap();
    assert_eq!(serde_json::from_str::<Problem>(&json).unwrap(), problem, "{json}");
    assert!(problem.to_string().ends_with(" sparse-gate(z=1.6448535)+layer-norm(eps=0.000001)"));
    let error = rows.expect_none("on a device", "compute on the CPU").unwrap_err().to_string();
    assert!(error.contains("layer-norm") && error.contains("CPU"), "{error}");
}

/// The oracle's block with steps is that of its parts, and gradients are refused.
#[test]
fn a_block_goes_through_its_steps_in_order() {
    let case = crate::conformance::Case::new(crate::Op::Mlp, [2, 5, 6], DType::F32);
    let parameters = crate::conformance::Parameters::<f32>::new(&case).unwrap();
    let steps = RowSteps::NONE
        .with_sparsity(Sparsity::above(0.25).unwrap())
        .with_norm(Norm::new(NormKind::Rms, 1e-5).unwrap());
    let mut params = parameters.mlp();
    let x = random::normal_matrix::<f32>(1, 2, 5, 1.0).unwrap();
    let plain = oracle::mlp(x.view(), &params).unwrap();
    assert!(plain.normed.is_none());
    params.rows = RowParams::new(steps);
    let out = oracle::mlp(x.view(), &params).unwrap();
    for i in 0..2 {
        let mut gate = plain.gated.gate.value.view().row(i).to_vec();
        steps.sparsity.unwrap().apply_f64(&mut gate);
        let up = plain.gated.up.value.view().row(i);
        let pairs = gate.iter().zip(up);
        let mut h: Vec<f64> = pairs.map(|(&g, &u)| params.gated.activation.forward(g, u)).collect();
        assert_eq!(out.gated.h.view().row(i), h);
        params.rows.normalise_f64(&mut h);
        assert_eq!(out.hidden().view().row(i), h);
        let y = |k| -> f64 { (0..6).map(|j| h[j] * f64::from(params.down_at(k, j))).sum() };
        for k in 0..5 {
            assert!((out.y.value.view().row(i)[k] - y(k)).abs() < 1e-12);
        }
    }
    let dy = Matrix::<f64>::zeros(2, 5).unwrap();
    let refused = oracle::mlp_backward(x.view(), &params, dy.view());
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}
