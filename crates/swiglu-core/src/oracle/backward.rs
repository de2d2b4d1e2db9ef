//! Gradients in float64: the chain rule in plain loops.

use super::{GatedLinear, Linear, Product, dot, gated_linear, linear, rows_mut, to_f64};
use crate::activation::Activation;
use crate::dtype::Element;
use crate::error::Result;
use crate::layout::Half;
use crate::matrix::{Matrix, MatrixRef};
use crate::problem::{GatedLinearParams, MlpParams};

/// Gradients of a gated linear layer.
#[derive(Debug, Clone)]
pub struct GatedLinearGrad {
    /// ∂L/∂x, `[M, K]`.
    pub dx: Matrix<f64>,
    /// ∂L/∂Wg as `[H, K]`.
    pub dgate_weight: Matrix<f64>,
    /// ∂L/∂Wu as `[H, K]`.
    pub dup_weight: Matrix<f64>,
    /// ∂L/∂bg, H values.
    pub dgate_bias: Vec<f64>,
    /// ∂L/∂bu, H values.
    pub dup_bias: Vec<f64>,
}

/// A forward pass, and the chain rule down to gate and up.
pub(crate) struct Chain {
    pub(crate) x: Matrix<f64>,
    pub(crate) forward: GatedLinear,
    /// ∂L/∂gate, `[M, H]`.
    pub(crate) dgate: Matrix<f64>,
    /// ∂L/∂up, `[M, H]`.
    pub(crate) dup: Matrix<f64>,
}

/// The chain of a gated linear layer from ∂L/∂h.
pub(crate) fn backward_chain<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
    dh: MatrixRef<'_, f64>,
) -> Result<Chain> {
    Chain::of(to_f64(x)?, gated_linear(x, params)?, &params.activation, dh)
}

impl Chain {
    fn of(
        x: Matrix<f64>,
        forward: GatedLinear,
        act: &Activation,
        dh: MatrixRef<'_, f64>,
    ) -> Result<Self> {
        let [m, h] = forward.h.shape();
        dh.expect_shape("dh", [m, h])?;
        let (mut dgate, mut dup) = (Matrix::zeros(m, h)?, Matrix::zeros(m, h)?);
        for at in (0..m).flat_map(|i| (0..h).map(move |j| (i, j))) {
            let (dg, du) = act.derivative(forward.gate.value[at], forward.up.value[at]);
            let dh = dh.row(at.0)[at.1];
            (dgate[at], dup[at]) = (dg * dh, du * dh);
        }
        Ok(Self { x, forward, dgate, dup })
    }

    /// Gradients of the layer whose weights, stacked, are `weights`.
    fn gradients(&self, weights: &Matrix<f64>) -> Result<GatedLinearGrad> {
        let Self { x, dgate, dup, .. } = self;
        let (m, k_len) = (x.rows(), x.cols());
        let mut dx = Matrix::zeros(m, k_len)?;
        for i in 0..m {
            let both = [dgate.view().row(i), dup.view().row(i)].concat();
            for k in 0..k_len {
                dx[(i, k)] = dot(&both, weights.view().row(k), Product::Value);
            }
        }
        Ok(GatedLinearGrad {
            dx,
            dgate_weight: across_tokens(dgate, x, Product::Value)?,
            dup_weight: across_tokens(dup, x, Product::Value)?,
            dgate_bias: column_sums(dgate),
            dup_bias: column_sums(dup),
        })
    }
}

/// ∂L/∂h = dy·Wdᵀ with its magnitudes.
pub(crate) fn down_transposed<T: Element>(
    params: &MlpParams<'_, T>,
    dy: &Matrix<f64>,
) -> Result<Linear> {
    linear(dy, params.gated.weights.intermediate(), None, &|h, column| {
        column.fill(|values| params.widen_down_from(h, values));
    })
}

/// Wg and Wu one behind the other as `[K, 2H]`: a row has what one input feature is multiplied by.
pub(crate) fn stacked_weights<T: Element>(
    params: &GatedLinearParams<'_, T>,
) -> Result<Matrix<f64>> {
    let w = &params.weights;
    let features = w.intermediate();
    let mut rows = Matrix::zeros(2 * features, w.hidden())?;
    rows_mut(&mut rows).enumerate().for_each(|(j, row)| match j.checked_sub(features) {
        None => w.widen(Half::Gate, j, row),
        Some(j) => w.widen(Half::Up, j, row),
    });
    transposed(&rows)
}

/// The transpose.
pub(crate) fn transposed(m: &Matrix<f64>) -> Result<Matrix<f64>> {
    let values = (0..m.cols()).flat_map(|c| (0..m.rows()).map(move |r| m[(r, c)]));
    Matrix::from_values(values, m.cols(), m.rows())
}

/// `[P, Q]` of the sums over tokens of the products of a[m, p] and b[m, q].
pub(crate) fn across_tokens(
    a: &Matrix<f64>,
    b: &Matrix<f64>,
    product: Product,
) -> Result<Matrix<f64>> {
    let (at, bt) = (transposed(a)?, transposed(b)?);
    let row = |p| (0..bt.rows()).map(move |q| (p, q));
    let sums = (0..at.rows()).flat_map(row);
    let sums = sums.map(|(p, q)| dot(at.view().row(p), bt.view().row(q), product));
    Matrix::from_values(sums, a.cols(), b.cols())
}

/// The sums of the columns.
fn column_sums(m: &Matrix<f64>) -> Vec<f64> {
    (0..m.cols()).map(|c| (0..m.rows()).map(|r| m[(r, c)]).sum()).collect()
}

/// Gradients of [`gated_linear`] from ∂L/∂h.
///
/// # Errors
/// [`crate::Error::Shape`] if any shape disagrees.
pub fn gated_linear_backward<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
    dh: MatrixRef<'_, f64>,
) -> Result<GatedLinearGrad> {
    backward_chain(x, params, dh)?.gradients(&stacked_weights(params)?)
}

/// Gradients of a feed-forward block.
#[derive(Debug, Clone)]
pub struct MlpGrad {
    /// Gradients of the gated linear layer.
    pub gated: GatedLinearGrad,
    /// ∂L/∂Wd as `[K, H]`.
    pub ddown: Matrix<f64>,
    /// ∂L/∂bd, K values.
    pub ddown_bias: Vec<f64>,
}

/// Gradients of [`super::mlp`] from ∂L/∂y.
///
/// # Errors
/// [`crate::Error::Shape`] if any shape disagrees; [`crate::Error::Unsupported`] for a block with row steps.
pub fn mlp_backward<T: Element>(
    x: MatrixRef<'_, T>,
    params: &MlpParams<'_, T>,
    dy: MatrixRef<'_, f64>,
) -> Result<MlpGrad> {
    params.validate()?;
    let instead = "take the gradients of its parts";
    params.rows.steps.expect_none("in the oracle of gradients", instead)?;
    dy.expect_shape("dy", [x.rows(), params.gated.weights.hidden()])?;
    let dy =
        Matrix::from_values((0..dy.rows()).flat_map(|i| dy.row(i)).copied(), dy.rows(), dy.cols())?;
    let dh = down_transposed(params, &dy)?.value;
    let gated = gated_linear_backward(x, &params.gated, dh.view())?;
    let h = gated_linear(x, &params.gated)?.h;
    let ddown = across_tokens(&dy, &h, Product::Value)?;
    Ok(MlpGrad { gated, ddown, ddown_bias: column_sums(&dy) })
}
