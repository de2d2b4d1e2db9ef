//! The float64 oracle, forward and backward: plain loops, no tricks, the definition that
//! everything else is judged by.

use crate::activation::Activation;
use crate::dtype::Element;
use crate::error::Result;
use crate::layout::{GateUpRef, Half};
use crate::matrix::{Matrix, MatrixRef};
use crate::problem::{GatedLinearParams, MlpParams};
use crate::quant::{QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedRef};
use crate::rows::{RowParams, RowSteps};

/// h[m, j] = act(gate[m, j], up[m, j]).
///
/// # Errors
/// [`crate::Error::TooLarge`] if the result does not fit the address space.
pub fn activation<T: Element>(act: &Activation, inputs: &GateUpRef<'_, T>) -> Result<Matrix<f64>> {
    let (m, h) = (inputs.rows(), inputs.intermediate());
    let mut out = Matrix::zeros(m, h)?;
    for i in 0..m {
        for j in 0..h {
            let gate = inputs.at(Half::Gate, i, j).to_f64();
            let up = inputs.at(Half::Up, i, j).to_f64();
            out.as_mut_slice()[i * h + j] = act.forward(gate, up);
        }
    }
    Ok(out)
}

/// (∂L/∂gate, ∂L/∂up) from ∂L/∂h.
///
/// # Errors
/// [`crate::Error::Shape`] if `dh` is not `[M, H]`.
pub fn activation_backward<T: Element>(
    act: &Activation,
    inputs: &GateUpRef<'_, T>,
    dh: MatrixRef<'_, f64>,
) -> Result<(Matrix<f64>, Matrix<f64>)> {
    let (m, h) = (inputs.rows(), inputs.intermediate());
    dh.expect_shape("dh", [m, h])?;
    let (mut dgate, mut dup) = (Matrix::zeros(m, h)?, Matrix::zeros(m, h)?);
    for i in 0..m {
        for j in 0..h {
            let gate = inputs.at(Half::Gate, i, j).to_f64();
            let up = inputs.at(Half::Up, i, j).to_f64();
            let (dg, du) = act.derivative(gate, up);
            dgate.as_mut_slice()[i * h + j] = dg * dh.row(i)[j];
            dup.as_mut_slice()[i * h + j] = du * dh.row(i)[j];
        }
    }
    Ok((dgate, dup))
}

mod backward;
mod features;

pub(crate) use features::by_feature;

pub(crate) use backward::{
    Chain, across_tokens, backward_chain, down_transposed, stacked_weights, transposed,
};
pub use backward::{GatedLinearGrad, MlpGrad, gated_linear_backward, mlp_backward};

/// A linear map's result with Σ|x||w| + |b| beside each element: the scale of its rounding errors.
#[derive(Debug, Clone)]
pub struct Linear {
    /// x·W + b, `[M, out]`.
    pub value: Matrix<f64>,
    /// |x|·|W| + |b|, `[M, out]`; where a weight is a sum of two terms, with the terms' absolute values.
    pub magnitude: Matrix<f64>,
}

/// Weights of one output feature, and their absolute values.
struct Column {
    value: Vec<f64>,
    size: Vec<f64>,
}

/// Fills in the weights of an output feature.
type Weights<'a> = dyn Fn(usize, &mut Column) + Sync + 'a;

/// x·W + b.
fn linear(
    x: &Matrix<f64>,
    out_features: usize,
    bias: Option<&[f32]>,
    weight: &Weights<'_>,
) -> Result<Linear> {
    let (m, k) = (x.rows(), x.cols());
    let (mut value, mut magnitude) =
        (Matrix::zeros(m, out_features)?, Matrix::zeros(m, out_features)?);
    by_feature(
        [m, k, out_features],
        || Column { value: vec![0.0; k], size: vec![0.0; k] },
        |column, o, out| {
            weight(o, column);
            let b = bias.map_or(0.0, |b| f64::from(b[o]));
            for (i, out) in out.iter_mut().enumerate() {
                let row = x.view().row(i);
                let sizes = dot(row, &column.size, Product::Size) + b.abs();
                *out = (dot(row, &column.value, Product::Value) + b, sizes);
            }
        },
        |i, o, (v, size)| {
            value.as_mut_slice()[i * out_features + o] = v;
            magnitude.as_mut_slice()[i * out_features + o] = size;
        },
    );
    Ok(Linear { value, magnitude })
}

/// What a factor makes of an error. An error without bound stays one, as what overflowed times 0 is no 0;
/// none stays none, also where the factor is infinite.
pub(crate) fn scaled(error: f64, by: f64) -> f64 {
    if error == 0.0 || error == f64::INFINITY { error } else { error * by }
}

/// What is added up of two numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Product {
    /// a·b.
    Value,
    /// |a·b|.
    Size,
    /// What b makes of an error a ([`scaled`]).
    Error,
    /// |a|·|b| of largest magnitudes, of which one without bound stays one.
    Bound,
}

/// The sum of products over pairs.
pub(crate) fn dot(a: &[f64], b: &[f64], product: Product) -> f64 {
    match product {
        Product::Value => sum(a, b, |a, b| a * b),
        Product::Size => sum(a, b, |a, b| (a * b).abs()),
        Product::Error => sum(a, b, scaled),
        Product::Bound => sum(a, b, |a, b| {
            let b = b.abs();
            if a == f64::INFINITY || b == f64::INFINITY { f64::INFINITY } else { a * b }
        }),
    }
}

/// As eight partial sums: the compiler makes vectors of them, and the float64 error is immaterial.
fn sum(a: &[f64], b: &[f64], product: impl Fn(f64, f64) -> f64) -> f64 {
    let mut sums = [0.0f64; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for (sum, (&a, &b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += product(a, b);
        }
    }
    for (sum, (&a, &b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += product(a, b);
    }
    sums.iter().sum()
}

impl Column {
    /// Of weights that are single values.
    fn fill(&mut self, weights: impl FnOnce(&mut [f64])) {
        weights(&mut self.value);
        self.set_sizes();
    }

    fn set_sizes(&mut self) {
        self.size.iter_mut().zip(&self.value).for_each(|(s, v)| *s = v.abs());
    }
}

/// Fills a column with a row of quantised weights, exactly.
fn fill_quantized(column: &mut Column, weights: &QuantizedRef<'_>, row: usize) {
    let mut places = column.value.iter_mut().zip(&mut column.size);
    weights.terms(row, |product, minimum| {
        if let Some((v, s)) = places.next() {
            (*v, *s) = (product + minimum, product.abs() + minimum.abs());
        }
    });
}

/// What is generic is compiled with the program that names an element type, and most programs of tests are not optimised. So
/// inputs and weights are read as float64, and all that takes time is compiled once, with this crate.
pub(crate) fn to_f64<T: Element>(x: MatrixRef<'_, T>) -> Result<Matrix<f64>> {
    let mut wide = Matrix::zeros(x.rows(), x.cols())?;
    rows_mut(&mut wide).enumerate().for_each(|(i, row)| x.widen_row(i, row));
    Ok(wide)
}

/// The gated linear layer with its intermediates.
#[derive(Debug, Clone)]
pub struct GatedLinear {
    /// x·Wg + bg.
    pub gate: Linear,
    /// x·Wu + bu.
    pub up: Linear,
    /// act(gate, up), `[M, H]`.
    pub h: Matrix<f64>,
}

/// h = act(x·Wg + bg, x·Wu + bu).
///
/// # Errors
/// [`crate::Error::Shape`] if x is not `[M, K]` or a bias is not `[H]`.
pub fn gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
) -> Result<GatedLinear> {
    gated_linear_within(x, params, RowSteps::NONE)
}

/// The gated linear layer of a block with these row steps.
fn gated_linear_within<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
    steps: RowSteps,
) -> Result<GatedLinear> {
    params.validate()?;
    let w = &params.weights;
    x.expect_shape("x", [x.rows(), w.hidden()])?;
    let x = to_f64(x)?;
    let half = |half, bias| {
        linear(&x, w.intermediate(), bias, &|o, column| {
            column.fill(|values| w.widen(half, o, values));
        })
    };
    let (gate, up) = (half(Half::Gate, params.gate_bias)?, half(Half::Up, params.up_bias)?);
    join(gate, up, &params.activation, steps)
}

fn join(gate: Linear, up: Linear, act: &Activation, steps: RowSteps) -> Result<GatedLinear> {
    let mut h = gate.value.clone();
    if let Some(sparsity) = steps.sparsity {
        rows_mut(&mut h).for_each(|row| sparsity.apply_f64(row));
    }
    let pairs = h.as_mut_slice().iter_mut().zip(up.value.as_slice());
    pairs.for_each(|(h, &u)| *h = act.forward(*h, u));
    Ok(GatedLinear { gate, up, h })
}

/// The rows of a matrix; none without columns.
pub(crate) fn rows_mut<V: Copy + Default>(m: &mut Matrix<V>) -> impl Iterator<Item = &mut [V]> {
    let columns = m.cols().max(1);
    m.as_mut_slice().chunks_mut(columns)
}

/// As [`gated_linear`], with quantised weights: `scale · q + minimum` without any rounding.
///
/// # Errors
/// [`crate::Error::Shape`] if any shape disagrees, [`crate::Error::Unsupported`] if gate and up are
/// of different types.
pub fn quantized_gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedGatedLinearParams<'_>,
) -> Result<GatedLinear> {
    quantized_gated_linear_within(x, params, RowSteps::NONE)
}

fn quantized_gated_linear_within<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedGatedLinearParams<'_>,
    steps: RowSteps,
) -> Result<GatedLinear> {
    params.validate()?;
    x.expect_shape("x", [x.rows(), params.hidden()])?;
    let x = to_f64(x)?;
    let half = |weights: &QuantizedRef<'_>, bias| {
        linear(&x, weights.rows(), bias, &|o, column| fill_quantized(column, weights, o))
    };
    let (gate, up) = (half(&params.gate, params.gate_bias)?, half(&params.up, params.up_bias)?);
    join(gate, up, &params.activation, steps)
}

/// The feed-forward block with its intermediates.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// The gated linear layer; its h with a sparse gate, where the block has one, and without the norm.
    pub gated: GatedLinear,
    /// h behind its norm, where the block has one.
    pub normed: Option<Matrix<f64>>,
    /// h·Wd + bd, `[M, K]`.
    pub y: Linear,
}

impl Mlp {
    /// What the down projection multiplies.
    pub fn hidden(&self) -> &Matrix<f64> {
        self.normed.as_ref().unwrap_or(&self.gated.h)
    }

    fn of(
        gated: GatedLinear,
        rows: &RowParams<'_>,
        down: impl FnOnce(&Matrix<f64>) -> Result<Linear>,
    ) -> Result<Self> {
        let normed = rows.steps.norm.map(|_| {
            let mut h = gated.h.clone();
            rows_mut(&mut h).for_each(|row| rows.normalise_f64(row));
            h
        });
        let y = down(normed.as_ref().unwrap_or(&gated.h))?;
        Ok(Self { gated, normed, y })
    }
}

/// y = act(x·Wg + bg, x·Wu + bu)·Wd + bd, with the row steps of the block.
///
/// # Errors
/// [`crate::Error::Shape`] if any shape disagrees.
pub fn mlp<T: Element>(x: MatrixRef<'_, T>, params: &MlpParams<'_, T>) -> Result<Mlp> {
    params.validate()?;
    let gated = gated_linear_within(x, &params.gated, params.rows.steps)?;
    Mlp::of(gated, &params.rows, |h| {
        linear(h, params.gated.weights.hidden(), params.down_bias, &|o, column| {
            column.fill(|values| params.widen_down(o, values));
        })
    })
}

/// As [`mlp`], with quantised weights.
///
/// # Errors
/// As [`quantized_gated_linear`].
pub fn quantized_mlp<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedMlpParams<'_>,
) -> Result<Mlp> {
    params.validate()?;
    let gated = quantized_gated_linear_within(x, &params.gated, params.rows.steps)?;
    Mlp::of(gated, &params.rows, |h| {
        linear(h, params.down.rows(), params.down_bias, &|o, column| {
            fill_quantized(column, &params.down, o);
        })
    })
}

#[cfg(test)]
#[path = "oracle_tests.rs"]
mod tests;
