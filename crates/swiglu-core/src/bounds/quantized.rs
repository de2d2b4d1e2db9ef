//! Bounds of layers with quantised weights.
//!
//! A weight is d·q + m with d·q and m exact in `f32`, and a kernel may multiply them out or sum
//! products and minima apart, block by block: d·Σq·x + m·Σx. So the magnitude of a sum is
//! Σ(|d·q| + |m|)·|x|, which is Σ|w||x| for types without a minimum. A term then passes the roundings
//! of its product, of at most one addition per other term, of one more per block whose minimum is
//! joined, and of its scalings: by a sub-block's scale, by the block's, and the weight's own where it
//! is decoded first.

use crate::bounds::{
    Reference, down_bound, eager_activation, frobenius_limit, gamma, gated_bound,
    relative_frobenius,
};
use crate::dtype::Element;
use crate::error::Result;
use crate::matrix::{Matrix, MatrixRef};
use crate::oracle;
use crate::quant::{QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedRef};

/// Features that share a minimum, in every type that has one.
const MINIMUM: usize = 32;

/// The error of a sum in `f32`, relative to its magnitude.
fn sum_error(weights: &QuantizedRef<'_>) -> f64 {
    let minima = if weights.block().has_minimum() { weights.cols().div_ceil(MINIMUM) } else { 0 };
    // Three scalings, the bias, and joining partial sums.
    gamma(weights.cols() + minima + 5)
}

/// The baseline: plain loops over products and minima apart, in `f32` and in order, rounded to T.
fn eager_linear<T: Element>(
    x: MatrixRef<'_, T>,
    weights: &QuantizedRef<'_>,
    bias: Option<&[f32]>,
) -> Result<Matrix<T>> {
    let mut out = Matrix::zeros(x.rows(), weights.rows())?;
    let mut column = Vec::with_capacity(weights.cols());
    for o in 0..weights.rows() {
        column.clear();
        weights.block().terms(weights.row(o), |product, minimum| column.push((product, minimum)));
        for i in 0..x.rows() {
            let (mut products, mut minima) = (0.0f32, 0.0f32);
            for (x, &(product, minimum)) in x.row(i).iter().zip(&column) {
                products += x.to_f32() * product;
                minima += x.to_f32() * minimum;
            }
            let dot = products + minima + bias.map_or(0.0, |b| b[o]);
            out.as_mut_slice()[i * weights.rows() + o] = T::from_f32(dot);
        }
    }
    Ok(out)
}

fn eager_gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedGatedLinearParams<'_>,
) -> Result<Matrix<T>> {
    let gate = eager_linear(x, &params.gate, params.gate_bias)?;
    let up = eager_linear(x, &params.up, params.up_bias)?;
    eager_activation(&params.activation, &gate, &up)
}

fn h_bound<T: Element>(
    params: &QuantizedGatedLinearParams<'_>,
    forward: &oracle::GatedLinear,
) -> Result<Matrix<f64>> {
    let relative = sum_error(&params.gate);
    gated_bound(&params.activation, params.numerics, T::DTYPE, forward, relative)
}

/// Reference of the gated linear layer with quantised weights, inputs and output of T.
///
/// # Errors
/// As [`oracle::quantized_gated_linear`].
pub fn quantized_gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedGatedLinearParams<'_>,
) -> Result<Reference> {
    let forward = oracle::quantized_gated_linear(x, params)?;
    let bound = h_bound::<T>(params, &forward)?;
    let baseline = relative_frobenius(eager_gated_linear(x, params)?.view(), forward.h.view());
    let (unit, n) = (T::DTYPE.unit_roundoff(), bound.as_slice().len());
    let frobenius_limit = frobenius_limit(baseline, params.numerics, unit, n);
    Ok(Reference { value: forward.h, bound, frobenius_limit })
}

/// Reference of the feed-forward block with quantised weights: inputs, output and h of T.
///
/// # Errors
/// As [`oracle::quantized_mlp`].
pub fn quantized_mlp<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedMlpParams<'_>,
) -> Result<Reference> {
    let forward = oracle::quantized_mlp(x, params)?;
    let h_bound = h_bound::<T>(&params.gated, &forward.gated)?;
    let relative = sum_error(&params.down);
    let bound = down_bound(T::DTYPE, &forward.y, &h_bound, relative, |k, column| {
        let mut places = column.iter_mut();
        params.down.block().terms(params.down.row(k), |product, minimum| {
            if let Some(place) = places.next() {
                *place = f64::from(product).abs() + f64::from(minimum).abs();
            }
        });
    })?;
    let h = eager_gated_linear(x, &params.gated)?;
    let eager = eager_linear(h.view(), &params.down, params.down_bias)?;
    let baseline = relative_frobenius(eager.view(), forward.y.value.view());
    let (unit, n) = (T::DTYPE.unit_roundoff(), bound.as_slice().len());
    let frobenius_limit = frobenius_limit(baseline, params.gated.numerics, unit, n);
    Ok(Reference { value: forward.y.value, bound, frobenius_limit })
}
