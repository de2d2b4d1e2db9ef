//! Bounds of row steps.
//!
//! A mean, and a root of a mean of squares, are as far off as the row's values in the mean: the root is a
//! norm of the row, divided by √n, and taking the mean off is a projection, so neither makes an error of
//! the row larger. To that comes the error of their sums in `f32`, at most [`gamma`] of n and a few terms.
//! A quotient h/r with errors e and δ is off by at most (e + |h|δ/r)/(r − δ), and r ≥ √ε.

use super::{U32, gamma, rounding, scaled};
use crate::dtype::DType;
use crate::error::Result;
use crate::matrix::Matrix;
use crate::numerics::{Numerics, Rounding};
use crate::oracle::rows_mut;
use crate::rows::{Norm, NormKind, RowParams, Sparsity, moments};

/// Roundings of a sum's result: the division by n, the root, and what is joined.
const MORE_TERMS: usize = 8;

/// What an operation of PyTorch's order of roundings adds to the error of its result.
fn stepped(eager: bool, dtype: DType, value: f64, error: f64) -> f64 {
    if eager { error + rounding(dtype, value.abs() + error) } else { error }
}

fn is_eager(numerics: Numerics, dtype: DType) -> bool {
    numerics.rounding == Rounding::Eager && dtype != DType::F32
}

/// The mean of a row and the root of the mean of its squares.
fn mean_and_root(row: &[f64]) -> (f64, f64) {
    let n = row.len() as f64;
    let squares = row.iter().map(|v| v * v).sum::<f64>();
    (row.iter().map(|v| v.abs()).sum::<f64>() / n, (squares / n).sqrt())
}

/// A row of the gate and the bounds of its errors, as they are behind the sparsity.
pub(super) fn sparsify(
    sparsity: Sparsity,
    (numerics, dtype): (Numerics, DType),
    gate: &mut [f64],
    errors: &mut [f64],
) {
    let eager = is_eager(numerics, dtype);
    let rounded = |value, error| stepped(eager, dtype, value, error);
    let sums = gamma(gate.len() + MORE_TERMS);
    let (mean, deviation) = moments(gate, |v| v);
    let (size, _) = mean_and_root(gate);
    let (mean_error, root_error) = mean_and_root(errors);
    let of_mean = mean_error + scaled(mean_error, sums) + sums * size;
    // The mean that is taken off before squaring is off by the second term too.
    let of_deviation = root_error + scaled(root_error, sums) + sums * (size + deviation);
    let z = f64::from(sparsity.deviations()).abs();
    let of_z = rounded(z, 0.0);
    let of_deviation = rounded(deviation, of_deviation);
    let product = z * deviation;
    let of_product = scaled(of_deviation, z + of_z) + of_z * deviation;
    let of_product = rounded(product, of_product + U32 * product);
    let cutoff = mean.abs() + product;
    let of_cutoff = rounded(cutoff, rounded(mean, of_mean) + of_product + U32 * cutoff);
    let before: Vec<f64> = gate.to_vec();
    sparsity.apply_f64(gate);
    for ((error, &kept), before) in errors.iter_mut().zip(&*gate).zip(before) {
        let sum = *error + of_cutoff;
        // A cutoff above the value leaves 0 without an error, unless both may be off by what lies between.
        let sum = (sum - (before_zero(before, mean, product, kept))).max(0.0);
        let sum = if sum == 0.0 { 0.0 } else { sum + U32 * (kept + sum) };
        *error = sum + rounding(dtype, kept + sum);
    }
}

/// How far below the cutoff a value is that became 0.
fn before_zero(value: f64, mean: f64, above: f64, kept: f64) -> f64 {
    if kept > 0.0 { 0.0 } else { (mean + above - value).max(0.0) }
}

/// The bounds of h behind its norm, given those before it.
pub(super) fn normalise(
    norm: Norm,
    rows: &RowParams<'_>,
    (numerics, dtype): (Numerics, DType),
    h: &Matrix<f64>,
    mut bound: Matrix<f64>,
) -> Result<Matrix<f64>> {
    for (i, errors) in rows_mut(&mut bound).enumerate() {
        of_row(norm, rows, (numerics, dtype), h.view().row(i), errors);
    }
    Ok(bound)
}

fn of_row(
    norm: Norm,
    rows: &RowParams<'_>,
    (numerics, dtype): (Numerics, DType),
    h: &[f64],
    errors: &mut [f64],
) {
    // A layer norm is one operation of PyTorch.
    let eager = is_eager(numerics, dtype) && norm.kind() == NormKind::Rms;
    let sums = gamma(h.len() + MORE_TERMS);
    let (mean, root) = norm.statistics(h, |v| v);
    let (size, _) = mean_and_root(h);
    let (mean_error, root_error) = mean_and_root(errors);
    let (taken_off, of_mean) = match norm.kind() {
        NormKind::Rms => (0.0, 0.0),
        _ => (mean_error, scaled(mean_error, sums) + sums * size),
    };
    let of_root = root_error + of_mean;
    let of_root = of_root + scaled(of_root, sums) + sums * root;
    // ε is as exact as a few roundings leave it.
    let floor = f64::from(norm.epsilon()).sqrt() * (1.0 - 8.0 * U32);
    let least = (root - of_root).max(floor);
    for (j, (error, &h)) in errors.iter_mut().zip(h).enumerate() {
        let centred = (h - mean).abs();
        let of_centred = *error + taken_off + of_mean;
        let of_centred = of_centred + scaled(of_centred, U32) + U32 * centred;
        let quotient = centred / root;
        let off = scaled(of_centred, 1.0 / least) + scaled(of_root, quotient / least);
        let off = stepped(eager, dtype, quotient, off + 4.0 * U32 * (quotient + off));
        let (weight, bias) = rows.norm_values(j);
        let (weight, bias) = (f64::from(weight).abs(), f64::from(bias).abs());
        let largest = quotient * weight + bias;
        let off = scaled(off, weight) + 2.0 * U32 * largest;
        *error = off + rounding(dtype, largest + off);
    }
}
