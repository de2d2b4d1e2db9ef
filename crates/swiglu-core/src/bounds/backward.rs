//! Bounds of gradients.
//!
//! Gate and up are off by what their sums and their rounding to T make (a backward pass takes them from memory, or
//! computes them again), ∂L/∂h by its own sum. ∂L/∂gate = dh · up · f′(gate) passes these three on as a product of
//! factors that are each off does, f′ by sup |f″| times the error of its argument; where a clamp or a step lies within
//! that error, either side of it is right. What reaches a product over tokens or features is then summed, with the error
//! of a sum in `f32` in any order, and rounded as it is stored.

use half::{bf16, f16};

use super::{
    Reference, U32, activation_bound, eager_gated_linear, eager_linear, eager_sums, exp_error,
    exponent, frobenius_limit_behind, linear_error, narrowed, relative_frobenius, rounding, scaled,
    singles, sum_error,
};
use crate::activation::{Activation, GateFn};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::layout::{GateUpRef, Half};
use crate::matrix::{Matrix, MatrixRef};
use crate::numerics::{Numerics, Rounding};
use crate::oracle::{self, Chain, Product, across_tokens, dot, to_f64, transposed};
use crate::problem::{GatedLinearParams, MlpParams};
use crate::rows::RowParams;
use crate::scale::RowScale;

mod block;

use block::Block;

/// References of the gradients of gate and up, `[M, H]` each, from ∂L/∂h.
///
/// # Errors
/// As [`oracle::activation_backward`].
pub fn activation_backward<T: Element>(
    act: &Activation,
    numerics: Numerics,
    inputs: &GateUpRef<'_, T>,
    dh: MatrixRef<'_, T>,
) -> Result<[Reference; 2]> {
    let (m, h) = (inputs.rows(), inputs.intermediate());
    let exact = to_f64(dh)?;
    let (dgate, dup) = oracle::activation_backward(act, inputs, exact.view())?;
    let (mut gate_bound, mut up_bound) = (Matrix::zeros(m, h)?, Matrix::zeros(m, h)?);
    for at in (0..m).flat_map(|i| (0..h).map(move |j| (i, j))) {
        let given = |half| (inputs.at(half, at.0, at.1).to_f64(), 0.0);
        let given = [given(Half::Gate), given(Half::Up), (exact[at], 0.0)];
        (gate_bound[at], up_bound[at]) = backward_bound(act, numerics, T::DTYPE, given);
    }
    let reference = |value: Matrix<f64>, bound: Matrix<f64>| {
        let norm = |m: &Matrix<f64>| m.as_slice().iter().map(|v| v * v).sum::<f64>().sqrt();
        // Errors as large as their bounds everywhere, of which a correct kernel stays far below.
        let frobenius_limit = match norm(&value) {
            0.0 => f64::INFINITY,
            n => norm(&bound) / n,
        };
        Reference { value, bound, frobenius_limit, intermediates: Vec::new() }
    };
    Ok([reference(dgate, gate_bound), reference(dup, up_bound)])
}

/// Bounds on the errors of (∂/∂gate, ∂/∂up)·dh for gate, up and dh that are each off by the error beside them. f′ is
/// evaluated with the same few roundings as f, of terms that are at most 1 + |exponent| large, or 2x where that is all of
/// f′; in `eager` PyTorch's autograd rounds what it stores between its operations, at most six values that are each below
/// that size times |dh·up|.
pub(super) fn backward_bound(
    act: &Activation,
    numerics: Numerics,
    dtype: DType,
    [(gate, gate_off), (up, mut up_off), (dh, dh_off)]: [(f64, f64); 3],
) -> (f64, f64) {
    if [gate_off, up_off, dh_off].contains(&f64::INFINITY) {
        return (f64::INFINITY, f64::INFINITY);
    }
    let [g, value, u] = act.factors(gate, up);
    let (dg, du) = act.derivative(gate, up);
    let eager = numerics.rounding == Rounding::Eager && dtype != DType::F32;
    if act.up_offset() != 0.0 {
        up_off += U32 * u.abs();
    }
    // The largest that the factors may be.
    let (u_most, dh_most) = (u.abs() + up_off, dh.abs() + dh_off);
    let g_most = g.abs() + gate_off;
    let transcendental = 1.0 + exponent(act.gate(), g_most).min(90.0);
    let is_square = act.gate() == GateFn::Relu2;
    let size = if is_square { 2.0 * (g.max(0.0) + gate_off) } else { transcendental };
    let relative = (16.0 + 8.0 * transcendental) * U32 + 2.0 * exp_error(numerics);
    let terms = u_most * dh_most * size;
    let mut gate_error = relative * terms;
    // What h itself may be off by is what ∂h/∂up may be, times dh.
    let one = (1.0 - f64::from(act.up_offset()), 0.0);
    let f = activation_bound(act, numerics, dtype, (gate, gate_off), one);
    let mut up_error =
        scaled(f + relative * (1.0 + g_most) * U32, dh_most) + scaled(dh_off, du.abs());
    if eager {
        gate_error +=
            6.0 * rounding(dtype, terms) + scaled(rounding(dtype, u_most), dh_most * size);
        up_error += scaled(rounding(dtype, act.gate().value(g).abs()), dh_most);
    }
    if is_square {
        // dh·up is rounded, and then as much larger as f′ is; so is 2x, which may overflow alone.
        let stored = if eager { dtype } else { DType::F32 };
        let outer = rounding(stored, u_most * dh_most);
        gate_error +=
            scaled(outer, size) + scaled(rounding(stored, size), u_most * dh_most + outer);
    }
    // The product of the three factors where each is off.
    let slope = act.gate().derivative(g).abs();
    let slope_most = slope + act.gate().derivative_deviation(g, gate_off);
    let largest = u_most * dh_most * slope_most;
    gate_error += largest - u.abs() * dh.abs() * slope;
    // So near a limit either side of it is right.
    let beyond = (act.gate().value(g) - f64::from(act.value_limit())).abs();
    let near_value =
        act.value_limit().is_finite() && beyond <= f + rounding(dtype, act.gate().value(g).abs());
    let near = |v: f64, limit: f32, off: f64| off > 0.0 && (v - f64::from(limit)).abs() <= off;
    if near_value || near(gate, act.gate_limit(), gate_off) {
        gate_error += largest;
    }
    let up_limit = act.limit().unwrap_or(f32::INFINITY);
    if near(up.abs(), up_limit, up_off) {
        up_error += scaled(value.abs() + f, dh_most);
    }
    (
        gate_error + rounding(dtype, (dg * dh).abs() + gate_error),
        up_error + rounding(dtype, (du * dh).abs() + up_error),
    )
}

/// The reference of a gradient, and what the baseline that its limit follows from is off by.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GradientReference {
    /// The reference.
    pub reference: Reference,
    /// The relative Frobenius error of plain loops in PyTorch eager's order of roundings.
    pub eager_error: f64,
}

impl std::ops::Deref for GradientReference {
    type Target = Reference;

    fn deref(&self) -> &Reference {
        &self.reference
    }
}

/// References of all gradients of a layer. Those of weights are of one row for each output feature.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Gradients {
    /// ∂L/∂x, `[M, K]`, stored as T.
    pub dx: GradientReference,
    /// ∂L/∂Wg, `[H, K]`.
    pub gate: GradientReference,
    /// ∂L/∂Wu, `[H, K]`.
    pub up: GradientReference,
    /// ∂L/∂Wd, `[K, H]`, of a block.
    pub down: Option<GradientReference>,
    /// ∂L/∂bg, `[1, H]`, stored as `f32`.
    pub gate_bias: GradientReference,
    /// ∂L/∂bu, `[1, H]`, stored as `f32`.
    pub up_bias: GradientReference,
    /// ∂L/∂bd, `[1, K]`, of a block, stored as `f32`.
    pub down_bias: Option<GradientReference>,
    /// ∂L/∂s of the rows' factors, `[1, M]`, of a block, stored as `f32`.
    pub row_scale: Option<GradientReference>,
}

impl Reference {
    /// The reference of a result, given before it is rounded, that is added to what a place holds and rounded to its type.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the shapes disagree.
    pub fn accumulated_on(&self, before: &Matrix<f64>, dtype: DType) -> Result<Reference> {
        let [rows, cols] = self.value.shape();
        before.view().expect_shape("matrix to add to", [rows, cols])?;
        let sums = self.value.as_slice().iter().zip(before.as_slice()).map(|(v, b)| v + b);
        let value = Matrix::from_values(sums, rows, cols)?;
        let bounds = self.bound.as_slice().iter().zip(value.as_slice());
        let bounds = bounds.map(|(error, v)| error + rounding(dtype, v.abs() + error));
        let bound = Matrix::from_values(bounds, rows, cols)?;
        let norm = |m: &Matrix<f64>| m.as_slice().iter().map(|v| v * v).sum::<f64>().sqrt();
        // Errors as large as their bounds everywhere, of which a correct kernel stays far below.
        let frobenius_limit = match norm(&value) {
            0.0 => f64::INFINITY,
            n => norm(&bound) / n,
        };
        Ok(Reference { value, bound, frobenius_limit, intermediates: Vec::new() })
    }
}

/// Values and how far each may be off.
struct Off {
    value: Matrix<f64>,
    bound: Matrix<f64>,
}

impl Off {
    fn exact(value: Matrix<f64>) -> Result<Self> {
        let bound = Matrix::zeros(value.rows(), value.cols())?;
        Ok(Self { value, bound })
    }

    /// Each row times its factor, in `f32`, and rounded to a type where it is stored as that.
    fn by_rows(&self, scale: RowScale<'_>, stored: Option<DType>) -> Result<Self> {
        let cols = self.value.cols();
        let at = |i: usize| (f64::from(scale.of_row(i / cols)), self.value.as_slice()[i]);
        let value = (0..self.value.as_slice().len()).map(|i| at(i).0 * at(i).1);
        let bound = self.bound.as_slice().iter().enumerate().map(|(i, off)| {
            let ((factor, value), off) = (at(i), *off);
            if scale == RowScale::None {
                return off;
            }
            let size = (factor * value).abs();
            let off = scaled(off, factor.abs());
            let off = off + rounding(DType::F32, size + off);
            off + stored.map_or(0.0, |dtype| rounding(dtype, size + off))
        });
        let rows = self.value.rows();
        let value = Matrix::from_values(value, rows, cols)?;
        Ok(Self { value, bound: Matrix::from_values(bound, rows, cols)? })
    }

    /// The largest magnitudes.
    fn most(&self) -> Result<Matrix<f64>> {
        let pairs = self.value.as_slice().iter().zip(self.bound.as_slice());
        Matrix::from_values(pairs.map(|(v, b)| v.abs() + b), self.value.rows(), self.value.cols())
    }
}

/// How products are computed, and gradients of weights stored.
#[derive(Clone, Copy)]
struct As {
    numerics: Numerics,
    /// What a factor of a product may be rounded by, relative to it.
    roundoff: f64,
    stored: DType,
    unit: f64,
}

impl As {
    /// The reference of sums of `terms` products: their exact values, the sum of the magnitudes of their terms, and that
    /// of the largest magnitudes the terms may have.
    fn sums(
        self,
        terms: usize,
        (value, exact, most): (Matrix<f64>, Matrix<f64>, Matrix<f64>),
        eager_error: f64,
        roundings: usize,
    ) -> Result<GradientReference> {
        let relative = sum_error(terms, self.roundoff);
        let sums = value.as_slice().iter().zip(exact.as_slice().iter().zip(most.as_slice()));
        let bound = sums.map(|(value, (exact, most))| {
            // In float64 the difference of two long sums is no exact 0.
            let error = (most - exact).max(0.0) + relative * most;
            error + rounding(self.stored, value.abs() + error)
        });
        let bound = Matrix::from_values(bound, value.rows(), value.cols())?;
        let frobenius_limit =
            frobenius_limit_behind(eager_error, &value, self.numerics, self.unit, roundings);
        let reference = Reference { value, bound, frobenius_limit, intermediates: Vec::new() };
        Ok(GradientReference { reference, eager_error })
    }

    /// The reference of `[P, Q]`, the products of columns of a and b over tokens.
    fn over_tokens<T: Element>(
        self,
        [a, b]: [&Off; 2],
        eager: [&Matrix<T>; 2],
    ) -> Result<GradientReference> {
        let value = across_tokens(&a.value, &b.value, Product::Value)?;
        let exact = across_tokens(&a.value, &b.value, Product::Size)?;
        let most = across_tokens(&a.most()?, &b.most()?, Product::Bound)?;
        let columns = |m: &Matrix<T>| transposed(&to_f64(m.view())?);
        let (left, right) = (columns(eager[0])?, columns(eager[1])?);
        let weights = |o, to: &mut [f64]| to.copy_from_slice(right.view().row(o));
        let eager = eager_sums(&left, right.rows(), None, self.roundoff, &weights)?;
        let eager_error = relative_frobenius(narrowed::<T>(&eager)?.view(), value.view());
        // A rounded factor is in a whole row or column of sums: no more are independent than it has elements.
        let roundings = a.value.as_slice().len().min(b.value.as_slice().len());
        self.sums(a.value.rows(), (value, exact, most), eager_error, roundings)
    }

    /// The reference of the sums of columns.
    fn column_sums<T: Element>(self, a: &Off, eager: &Matrix<T>) -> Result<GradientReference> {
        let ones = Matrix::from_vec(vec![1.0; a.value.rows()], a.value.rows(), 1)?;
        let one = T::from_f32(1.0);
        let eager_ones = Matrix::from_vec(vec![one; eager.rows()], eager.rows(), 1)?;
        let exactly = As { roundoff: 0.0, stored: DType::F32, ..self };
        exactly.over_tokens([&Off::exact(ones)?, a], [&eager_ones, eager])
    }
}

/// References of the gradients of a gated linear layer from ∂L/∂h; those of weights are stored as `stored`. Where products
/// round their factors, by `roundoff` relative to them.
///
/// # Errors
/// As [`oracle::gated_linear_backward`].
pub fn gated_linear_backward<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
    dh: MatrixRef<'_, T>,
    stored: DType,
    roundoff: f64,
) -> Result<Gradients> {
    let (eager_dh, dh) = (copied(dh)?, Off::exact(to_f64(dh)?)?);
    Inner::of(x, params, &dh, &eager_dh, how::<T>(params, stored, roundoff))?.gradients()
}

/// References of the gradients of a block from ∂L/∂y, as [`gated_linear_backward`].
///
/// # Errors
/// As [`oracle::mlp_backward`].
pub fn mlp_backward<T: Element>(
    x: MatrixRef<'_, T>,
    params: &MlpParams<'_, T>,
    dy: MatrixRef<'_, T>,
    stored: DType,
    roundoff: f64,
) -> Result<Gradients> {
    scaled_mlp_backward(x, params, (dy, RowScale::None), stored, roundoff)
}

/// References of the gradients of scale ⊙ y, from the gradient of that: each row of a block's result times its factor.
///
/// # Errors
/// As [`oracle::mlp_backward`]; [`crate::Error::Shape`] for another number of factors than there are rows.
pub fn scaled_mlp_backward<T: Element>(
    x: MatrixRef<'_, T>,
    params: &MlpParams<'_, T>,
    dy: (MatrixRef<'_, T>, RowScale<'_>),
    stored: DType,
    roundoff: f64,
) -> Result<Gradients> {
    let block = Block::of(x, params, dy, stored, roundoff)?;
    let how = block.inner.how;
    Ok(Gradients {
        down: Some(block.down()?),
        down_bias: Some(how.column_sums(&block.dy.by_rows(dy.1, None)?, &block.eager_dy)?),
        row_scale: Some(block.row_scale(params, dy.0)?),
        ..block.inner.gradients()?
    })
}

/// The reference of ∂L/∂x of a block by itself: that of a token depends on no other.
///
/// # Errors
/// As [`oracle::mlp_backward`].
pub fn mlp_input_gradient<T: Element>(
    x: MatrixRef<'_, T>,
    params: &MlpParams<'_, T>,
    dy: MatrixRef<'_, T>,
    roundoff: f64,
) -> Result<GradientReference> {
    Block::of(x, params, (dy, RowScale::None), T::DTYPE, roundoff)?.inner.dx()
}

/// References of ∂L/∂Wg, ∂L/∂Wu and ∂L/∂Wd of a block by themselves: those of an intermediate feature depend on no other, so
/// that a block of some features has theirs.
///
/// # Errors
/// As [`oracle::mlp_backward`].
pub fn mlp_weight_gradients<T: Element>(
    x: MatrixRef<'_, T>,
    params: &MlpParams<'_, T>,
    dy: MatrixRef<'_, T>,
    stored: DType,
    roundoff: f64,
) -> Result<[GradientReference; 3]> {
    let block = Block::of(x, params, (dy, RowScale::None), stored, roundoff)?;
    Ok([block.inner.gate()?, block.inner.up()?, block.down()?])
}

fn how<T: Element>(params: &GatedLinearParams<'_, T>, stored: DType, roundoff: f64) -> As {
    let unit = T::DTYPE.unit_roundoff().max(roundoff);
    As { numerics: params.numerics, roundoff, stored, unit }
}

fn copied<T: Element>(m: MatrixRef<'_, T>) -> Result<Matrix<T>> {
    Matrix::from_values((0..m.rows()).flat_map(|i| m.row(i)).copied(), m.rows(), m.cols())
}

/// What all gradients follow from: x, h as it is computed again, and the gradients of gate and up, exact with how far they may
/// be off, and the baseline's.
struct Inner<'a, T> {
    params: GatedLinearParams<'a, T>,
    how: As,
    x: Off,
    h: Off,
    dgate: Off,
    dup: Off,
    eager_x: Matrix<T>,
    eager: Eager<T>,
}

impl<'a, T: Element> Inner<'a, T> {
    fn of(
        x: MatrixRef<'_, T>,
        params: &GatedLinearParams<'a, T>,
        dh: &Off,
        eager_dh: &Matrix<T>,
        how: As,
    ) -> Result<Self> {
        let chain = oracle::backward_chain(x, params, dh.value.view())?;
        let eager = Eager::of(x, params, eager_dh, how.roundoff)?;
        let numerics = (&params.activation, params.numerics, T::DTYPE);
        let (h, [dgate, dup]) = element_wise(numerics, &chain, dh, how.roundoff)?;
        let x_exact = Off::exact(chain.x)?;
        Ok(Self { params: *params, how, x: x_exact, h, dgate, dup, eager_x: copied(x)?, eager })
    }

    fn dx(&self) -> Result<GradientReference> {
        let weights = oracle::stacked_weights(&self.params)?;
        let eager = self.eager.dx(&weights, self.how.roundoff)?;
        let sums = input_gradient(&weights, [&self.dgate, &self.dup])?;
        let eager_error = relative_frobenius(eager.view(), sums.0.view());
        let how = As { stored: T::DTYPE, ..self.how };
        let roundings = sums.0.rows() * weights.cols();
        how.sums(weights.cols(), sums, eager_error, roundings)
    }

    fn gate(&self) -> Result<GradientReference> {
        self.how.over_tokens([&self.dgate, &self.x], [&self.eager.dgate, &self.eager_x])
    }

    fn up(&self) -> Result<GradientReference> {
        self.how.over_tokens([&self.dup, &self.x], [&self.eager.dup, &self.eager_x])
    }

    /// All but those of a down projection.
    fn gradients(&self) -> Result<Gradients> {
        Ok(Gradients {
            dx: self.dx()?,
            gate: self.gate()?,
            up: self.up()?,
            down: None,
            row_scale: None,
            gate_bias: self.how.column_sums(&self.dgate, &self.eager.dgate)?,
            up_bias: self.how.column_sums(&self.dup, &self.eager.dup)?,
            down_bias: None,
        })
    }
}

/// h, ∂L/∂gate and ∂L/∂up from gate and up as a backward pass has them: rounded to T.
fn element_wise(
    (act, numerics, dtype): (&Activation, Numerics, DType),
    chain: &Chain,
    dh: &Off,
    roundoff: f64,
) -> Result<(Off, [Off; 2])> {
    let [m, h_len] = chain.dgate.shape();
    let relative = sum_error(chain.x.cols(), roundoff);
    let off = |l: &oracle::Linear, at| {
        (l.value[at], linear_error(l.magnitude[at], relative, Some(dtype)))
    };
    let zeros = || Matrix::<f64>::zeros(m, h_len);
    let (mut h, mut dgate, mut dup) = (zeros()?, zeros()?, zeros()?);
    for at in (0..m).flat_map(|i| (0..h_len).map(move |j| (i, j))) {
        let (gate, up) = (off(&chain.forward.gate, at), off(&chain.forward.up, at));
        h[at] = activation_bound(act, numerics, dtype, gate, up);
        let given = [gate, up, (dh.value[at], dh.bound[at])];
        (dgate[at], dup[at]) = backward_bound(act, numerics, dtype, given);
    }
    let off = |value: &Matrix<f64>, bound| -> Result<Off> {
        Ok(Off { value: value.try_clone()?, bound })
    };
    Ok((off(&chain.forward.h, h)?, [off(&chain.dgate, dgate)?, off(&chain.dup, dup)?]))
}

/// dx = dgate·Wgᵀ + dup·Wuᵀ, as one sum: what [`As::sums`] is given.
fn input_gradient(
    weights: &Matrix<f64>,
    [dgate, dup]: [&Off; 2],
) -> Result<(Matrix<f64>, Matrix<f64>, Matrix<f64>)> {
    let (m, k_len) = (dgate.value.rows(), weights.rows());
    let most = [dgate.most()?, dup.most()?];
    let zeros = || Matrix::<f64>::zeros(m, k_len);
    let (mut value, mut exact, mut largest) = (zeros()?, zeros()?, zeros()?);
    for i in 0..m {
        let both = [dgate.value.view().row(i), dup.value.view().row(i)].concat();
        let both_most = [most[0].view().row(i), most[1].view().row(i)].concat();
        for k in 0..k_len {
            let column = weights.view().row(k);
            value[(i, k)] = dot(&both, column, Product::Value);
            exact[(i, k)] = dot(&both, column, Product::Size);
            largest[(i, k)] = dot(&both_most, column, Product::Bound);
        }
    }
    Ok((value, exact, largest))
}

/// The baseline: PyTorch's order of roundings in plain loops.
struct Eager<T> {
    h: Matrix<T>,
    dgate: Matrix<T>,
    dup: Matrix<T>,
}

impl<T: Element> Eager<T> {
    fn of(
        x: MatrixRef<'_, T>,
        params: &GatedLinearParams<'_, T>,
        dh: &Matrix<T>,
        roundoff: f64,
    ) -> Result<Self> {
        let w = &params.weights;
        let half = |half, bias| {
            let sums: Matrix<T> =
                eager_linear(x, w.intermediate(), bias, roundoff, &|o, to| w.widen(half, o, to))?;
            singles(&to_f64(sums.view())?)
        };
        let (gate, up) = (half(Half::Gate, params.gate_bias)?, half(Half::Up, params.up_bias)?);
        let dh = singles(&to_f64(dh.view())?)?;
        let [dgate, dup] = eager_gradients(&params.activation, T::DTYPE, [gate, up], &dh);
        let (dgate, dup) = (narrowed(&dgate)?, narrowed(&dup)?);
        let h = eager_gated_linear(x, params, &RowParams::NONE, roundoff)?;
        Ok(Self { h, dgate, dup })
    }

    /// Two products, each rounded, and their sum.
    fn dx(&self, weights: &Matrix<f64>, roundoff: f64) -> Result<Matrix<T>> {
        let product = |d: &Matrix<T>, from: usize| -> Result<Matrix<f32>> {
            let row = |k, to: &mut [f64]| {
                to.copy_from_slice(&weights.view().row(k)[from..][..to.len()]);
            };
            let product: Matrix<T> = eager_linear(d.view(), weights.rows(), None, roundoff, &row)?;
            singles(&to_f64(product.view())?)
        };
        let (mut sums, up) = (product(&self.dgate, 0)?, product(&self.dup, self.dgate.cols())?);
        add(&mut sums, &up);
        narrowed(&sums)
    }
}

fn add(to: &mut Matrix<f32>, other: &Matrix<f32>) {
    to.as_mut_slice().iter_mut().zip(other.as_slice()).for_each(|(a, b)| *a += b);
}

/// ∂L/∂gate and ∂L/∂up of values of `dtype`.
fn eager_gradients(
    act: &Activation,
    dtype: DType,
    [mut gate, mut up]: [Matrix<f32>; 2],
    dh: &Matrix<f32>,
) -> [Matrix<f32>; 2] {
    let numerics = Numerics::precise(Rounding::Eager);
    let one: fn(&Activation, Numerics, [f32; 3]) -> [f32; 2] = match dtype {
        DType::F32 => |act, numerics, given| act.apply_backward::<f32>(numerics, given),
        DType::F16 => {
            |act, numerics, given| act.apply_backward::<f16>(numerics, given).map(f16::to_f32)
        }
        DType::Bf16 => {
            |act, numerics, given| act.apply_backward::<bf16>(numerics, given).map(bf16::to_f32)
        }
    };
    let pairs = gate.as_mut_slice().iter_mut().zip(up.as_mut_slice());
    for ((gate, up), dh) in pairs.zip(dh.as_slice()) {
        [*gate, *up] = one(act, numerics, [*gate, *up, *dh]);
    }
    [gate, up]
}
