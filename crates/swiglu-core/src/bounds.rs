//! Error bounds derived from the oracle: how far a correct kernel may be from float64, element by
//! element, and how far its whole result may be compared with PyTorch's order of roundings.
//!
//! Worst element: running error analysis. With u₃₂ and u_T the unit roundoffs of `f32` and T, a sum
//! of n products in any order is within n·u₃₂/(1 − n·u₃₂) · Σ|x||w| (Higham, *Accuracy and
//! Stability of Numerical Algorithms*, §3.1); each rounding the mode names adds u_T·|value| plus
//! half a subnormal; the gate passes an error on scaled by the largest slope within it
//! ([`GateFn::deviation`]); the product rule does the rest.
//!
//! Whole result: the relative Frobenius error may be at most twice that of the baseline, a plain
//! loop with PyTorch eager's roundings over the same inputs, plus a few u₃₂.

use half::{bf16, f16};

use crate::activation::{Activation, GateFn};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::layout::{GateUpRef, Half};
use crate::matrix::{Matrix, MatrixRef};
use crate::numerics::{ExpMode, Numerics, Rounding};
use crate::oracle::{self, Product, rows_mut, scaled};
use crate::problem::{GatedLinearParams, MlpParams};
use crate::rows::{RowParams, RowSteps, Sparsity};
use crate::scale::RowScale;

mod backward;
mod judgement;
mod quantized;
mod rows;

pub use backward::{
    GradientReference, Gradients, activation_backward, gated_linear_backward, mlp_backward,
    mlp_input_gradient, mlp_weight_gradients, scaled_mlp_backward,
};
pub use judgement::{Judgement, Lost, Overflow, relative_frobenius};
pub use quantized::{
    BlockInputs, quantized_gated_linear, quantized_gated_linear_with, quantized_mlp,
    quantized_mlp_with,
};

const U32: f64 = DType::F32.unit_roundoff();

fn gamma(n: usize) -> f64 {
    let nu = n as f64 * U32;
    nu / (1.0 - nu)
}

/// The error of rounding a value of at most `magnitude` to `dtype`.
fn rounding(dtype: DType, magnitude: f64) -> f64 {
    if magnitude * (1.0 + dtype.unit_roundoff()) > dtype.max_finite() {
        return f64::INFINITY;
    }
    magnitude * dtype.unit_roundoff() + dtype.underflow_unit()
}

/// |exponent| inside the gate: rounding it by u₃₂ moves the exponential by |exponent|·u₃₂.
pub(crate) fn exponent(gate: GateFn, x: f64) -> f64 {
    match gate {
        GateFn::Silu { beta } => (f64::from(beta) * x).abs(),
        GateFn::Sigmoid => x.abs(),
        GateFn::GeluErf => 0.5 * x * x,
        GateFn::GeluTanh => (1.6 * x * (1.0 + 0.045 * x * x)).abs(),
        GateFn::Relu | GateFn::Relu2 | GateFn::Identity => 0.0,
    }
}

/// Bound on the error of h = act(gate, up) rounded to `dtype`, given bounds on gate and up.
fn activation_bound(
    act: &Activation,
    numerics: Numerics,
    dtype: DType,
    (gate, gate_error): (f64, f64),
    (up, up_error): (f64, f64),
) -> f64 {
    // f before its own limit: a clamp makes no error larger.
    let [g, _, moved] = act.factors(gate, up);
    let offset = f64::from(act.up_offset());
    let (f, u) = (act.gate().value(g), moved - offset);
    let eager = numerics.rounding == Rounding::Eager && dtype != DType::F32;

    let mut up_error = up_error;
    let mut gate_error = gate_error;
    if offset != 0.0 {
        up_error += U32 * (u + offset).abs();
    }
    if eager && (act.limit().is_some() || offset != 0.0) {
        gate_error += rounding(dtype, g.abs());
        up_error += rounding(dtype, u.abs()) + rounding(dtype, (u + offset).abs());
    }

    // Past |exponent| ≈ 88 the logistic is flushed to 0: at most x·2⁻¹²⁵.
    let relative = (8.0 + 4.0 * exponent(act.gate(), g).min(90.0)) * U32 + exp_error(numerics);
    let mut f_error =
        act.gate().deviation(g, gate_error) + relative * f.abs() + 1e-37 * (1.0 + g.abs());
    if numerics.rounding == Rounding::Eager
        && matches!(act.gate(), GateFn::GeluErf | GateFn::GeluTanh)
    {
        // PyTorch's ½x(1 + erf) and ½x(1 + tanh) cancel in the negative tail: the sum's rounding and
        // the error of the function, within 2 ulp of one, stay while the value vanishes.
        f_error += 3.0 * U32 * g.abs();
    }
    if eager {
        if let GateFn::Silu { beta } = act.gate()
            && beta != 1.0
        {
            // z = βx and σ(z) are rounded too; |σ′| ≤ ¼.
            let z = (f64::from(beta) * g).abs();
            f_error += g.abs() * (0.25 * rounding(dtype, z) + rounding(dtype, 1.0));
        }
        f_error += rounding(dtype, f.abs() + f_error);
    }
    // What it may be is at most the limit, and that is rounded as a tensor of T would hold it.
    let f = f.min(f64::from(act.value_limit()));
    if eager && act.value_limit().is_finite() {
        f_error += rounding(dtype, f.abs());
    }
    // f is an `f32` before it is a factor.
    if f.abs() + f_error > DType::F32.max_finite() {
        f_error = f64::INFINITY;
    }
    let u = u + offset;
    let product = scaled(up_error, f.abs() + f_error) + scaled(f_error, u.abs());
    let h = (f * u).abs();
    product + U32 * h + rounding(dtype, h + product)
}

/// The oracle's result and how far each element of a correct result may be from it.
#[derive(Debug, Clone)]
pub struct Reference {
    /// The float64 result.
    pub value: Matrix<f64>,
    /// The largest admissible |error| of each element; infinite where T may overflow.
    pub bound: Matrix<f64>,
    /// What the relative Frobenius error may be.
    pub frobenius_limit: f64,
    /// The largest finite |value| of each intermediate that is rounded to T on the way.
    pub intermediates: Vec<(&'static str, f64)>,
}

/// The intermediates of a gated linear layer that its numerics round to T; and h, in a block with these row
/// steps.
fn intermediates(
    forward: &oracle::GatedLinear,
    numerics: Numerics,
    block: Option<RowSteps>,
) -> Vec<(&'static str, f64)> {
    let largest = |m: &Matrix<f64>| {
        let finite = m.as_slice().iter().map(|v| v.abs()).filter(|v| v.is_finite());
        finite.fold(0.0, f64::max)
    };
    let halves = [("gate", &forward.gate.value), ("up", &forward.up.value)];
    let is_stored =
        numerics.rounding != Rounding::Fused || block.is_some_and(|steps| steps.sparsity.is_some());
    // Its own name says that no smaller h helps: the norm would make it the same again.
    let h = block.map(|steps| if steps.norm.is_some() { "h before its norm" } else { "h" });
    let rounded = halves.into_iter().filter(|_| is_stored);
    rounded.chain(h.map(|name| (name, &forward.h))).map(|(n, m)| (n, largest(m))).collect()
}

/// Twice the baseline's error (PyTorch's order of roundings on the same inputs) plus a few u₃₂, the
/// stated error of the exponential, and 4·u/√n for the luck of n roundings by `unit`: over a few
/// elements the baseline may by chance be nearly exact. Where it overflows only the elements decide.
/// Those without a finite reference count for nothing, as in [`relative_frobenius`].
fn frobenius_limit<T: Element>(
    eager: &Matrix<T>,
    value: &Matrix<f64>,
    numerics: Numerics,
    unit: f64,
) -> f64 {
    let baseline = relative_frobenius(eager.view(), value.view());
    frobenius_limit_behind(baseline, value, numerics, unit, usize::MAX)
}

/// The same of elements behind which there are so many `roundings`, where these are fewer; of both as many count as if
/// all were equally large, (Σv²)²/Σv⁴ of them.
fn frobenius_limit_behind(
    baseline: f64,
    value: &Matrix<f64>,
    numerics: Numerics,
    unit: f64,
    roundings: usize,
) -> f64 {
    if !baseline.is_finite() {
        return f64::INFINITY;
    }
    let finite = || value.as_slice().iter().filter(|v| v.is_finite());
    let count = finite().count() as f64;
    let n = match roundings {
        usize::MAX => count,
        fewer => {
            let sum = |power| finite().map(|v| v.abs().powi(power)).sum::<f64>();
            let alike = (sum(2) / sum(4) * sum(2)).clamp(1.0, count.max(1.0));
            alike * (fewer as f64 / count.max(1.0)).min(1.0)
        }
    };
    let luck = 4.0 * unit / n.max(1.0).sqrt();
    2.0 * baseline + luck + 16.0 * U32 + exp_error(numerics)
}

fn exp_error(numerics: Numerics) -> f64 {
    match numerics.exp {
        ExpMode::Precise => 0.0,
        ExpMode::Fast => 1.0 / f64::from(1 << 17),
    }
}

/// Reference of the activation operation.
///
/// # Errors
/// As [`oracle::activation`].
pub fn activation<T: Element>(
    act: &Activation,
    numerics: Numerics,
    inputs: &GateUpRef<'_, T>,
) -> Result<Reference> {
    let value = oracle::activation(act, inputs)?;
    let (m, h) = (inputs.rows(), inputs.intermediate());
    let (mut bound, mut eager) = (Matrix::zeros(m, h)?, Matrix::<T>::zeros(m, h)?);
    for i in 0..m {
        for j in 0..h {
            let (g, u) = (inputs.at(Half::Gate, i, j), inputs.at(Half::Up, i, j));
            bound.as_mut_slice()[i * h + j] =
                activation_bound(act, numerics, T::DTYPE, (g.to_f64(), 0.0), (u.to_f64(), 0.0));
            eager.as_mut_slice()[i * h + j] =
                act.apply::<T>(Numerics::precise(Rounding::Eager), g.to_f32(), u.to_f32());
        }
    }
    let frobenius_limit = frobenius_limit(&eager, &value, numerics, T::DTYPE.unit_roundoff());
    Ok(Reference { value, bound, frobenius_limit, intermediates: Vec::new() })
}

/// The error of a sum of products in `f32`, relative to its magnitude. `roundoff`: what each factor
/// of a product may be rounded by, relative to it.
fn sum_error(terms: usize, roundoff: f64) -> f64 {
    // Two more terms for the bias and for joining partial sums.
    gamma(terms + 2) + factors_error(roundoff)
}

/// `relative`: as [`sum_error`] says.
fn linear_error(magnitude: f64, relative: f64, rounds_to: Option<DType>) -> f64 {
    let error = relative * magnitude;
    error + rounds_to.map_or(0.0, |t| rounding(t, magnitude + error))
}

/// A product of two factors that are each off by `roundoff`.
fn factors_error(roundoff: f64) -> f64 {
    roundoff * (2.0 + roundoff)
}

/// Cuts a factor off after the bits that `roundoff` leaves: 2⁻¹⁰ keeps the ten of tf32.
fn cut(factor: f32, roundoff: f64) -> f32 {
    if roundoff <= 0.0 {
        return factor;
    }
    let kept = (-roundoff.log2()).clamp(0.0, 23.0) as u32;
    f32::from_bits(factor.to_bits() & (u32::MAX << (23 - kept)))
}

/// Rows of the left factor in `f32`, eight side by side: the sums of eight rows are made at once, each in
/// the order of its terms.
struct Rows {
    eights: Vec<Vec<[f32; 8]>>,
    count: usize,
}

impl Rows {
    fn new(x: &Matrix<f32>) -> Self {
        let [count, columns] = x.shape();
        let lanes = |first: usize, k| {
            std::array::from_fn(|l| if first + l < count { x[(first + l, k)] } else { 0.0 })
        };
        let eight = |first| (0..columns).map(|k| lanes(first, k)).collect();
        Self { eights: (0..count).step_by(8).map(eight).collect(), count }
    }

    /// The sum of the products of each row with a column.
    fn dots(&self, column: &[f32]) -> impl Iterator<Item = f32> {
        self.eights.iter().flat_map(|eight| Self::sums(eight, column)).take(self.count)
    }

    fn sums(eight: &[[f32; 8]], column: &[f32]) -> [f32; 8] {
        let mut sums = [0.0f32; 8];
        for (x, w) in eight.iter().zip(column) {
            sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x * w);
        }
        sums
    }
}

/// Values of T, in `f32`.
fn singles(wide: &Matrix<f64>) -> Result<Matrix<f32>> {
    Matrix::from_values(wide.as_slice().iter().map(|v| *v as f32), wide.rows(), wide.cols())
}

/// Values rounded to T.
fn narrowed<T: Element>(values: &Matrix<f32>) -> Result<Matrix<T>> {
    let mut narrow = Matrix::zeros(values.rows(), values.cols())?;
    T::narrow(values.as_slice(), narrow.as_mut_slice());
    Ok(narrow)
}

/// Fills in what an output feature's inputs are multiplied by.
type Weights<'a> = dyn Fn(usize, &mut [f64]) + Sync + 'a;

/// A linear map in plain loops: factors as `roundoff` leaves them, `f32` accumulation in order,
/// rounded to T.
fn eager_linear<T: Element>(
    x: MatrixRef<'_, T>,
    out_features: usize,
    bias: Option<&[f32]>,
    roundoff: f64,
    weights: &Weights<'_>,
) -> Result<Matrix<T>> {
    narrowed(&eager_sums(&oracle::to_f64(x)?, out_features, bias, roundoff, weights)?)
}

/// Its sums, of values of T.
fn eager_sums(
    x: &Matrix<f64>,
    out_features: usize,
    bias: Option<&[f32]>,
    roundoff: f64,
    weights: &Weights<'_>,
) -> Result<Matrix<f32>> {
    let [m, k] = x.shape();
    let mut out = Matrix::zeros(m, out_features)?;
    let mut x = singles(x)?;
    x.as_mut_slice().iter_mut().for_each(|v| *v = cut(*v, roundoff));
    let rows = Rows::new(&x);
    oracle::by_feature(
        [m, k, out_features],
        || (vec![0.0f64; k], vec![0.0f32; k]),
        |(wide, column), o, out| {
            weights(o, wide);
            column.iter_mut().zip(&*wide).for_each(|(c, w)| *c = cut(*w as f32, roundoff));
            for (out, dot) in out.iter_mut().zip(rows.dots(column)) {
                *out = dot + bias.map_or(0.0, |b| b[o]);
            }
        },
        |i, o, value| out.as_mut_slice()[i * out_features + o] = value,
    );
    Ok(out)
}

fn eager_gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
    rows: &RowParams<'_>,
    roundoff: f64,
) -> Result<Matrix<T>> {
    let w = &params.weights;
    let half = |half, bias| {
        eager_linear(x, w.intermediate(), bias, roundoff, &|o, to| w.widen(half, o, to))
    };
    let (gate, up) = (half(Half::Gate, params.gate_bias)?, half(Half::Up, params.up_bias)?);
    eager_activation(&params.activation, gate, &up, rows)
}

/// h with the row steps on both sides of the activation.
fn eager_activation<T: Element>(
    act: &Activation,
    mut gate: Matrix<T>,
    up: &Matrix<T>,
    rows: &RowParams<'_>,
) -> Result<Matrix<T>> {
    let numerics = Numerics::precise(Rounding::Eager);
    if let Some(sparsity) = rows.steps.sparsity {
        rows_mut(&mut gate).for_each(|row| sparsity.apply(numerics.rounding, row));
    }
    let single = |m: &Matrix<T>| singles(&oracle::to_f64(m.view())?);
    let mut h = narrowed(&eager_values(act, T::DTYPE, single(&gate)?, &single(up)?))?;
    rows_mut(&mut h).for_each(|row| rows.normalise(numerics.rounding, row));
    Ok(h)
}

/// act(gate, up) of values of `dtype`, as one.
fn eager_values(
    act: &Activation,
    dtype: DType,
    mut gate: Matrix<f32>,
    up: &Matrix<f32>,
) -> Matrix<f32> {
    let numerics = Numerics::precise(Rounding::Eager);
    let one: fn(&Activation, Numerics, f32, f32) -> f32 = match dtype {
        DType::F32 => |act, numerics, g, u| act.apply::<f32>(numerics, g, u),
        DType::F16 => |act, numerics, g, u| act.apply::<f16>(numerics, g, u).to_f32(),
        DType::Bf16 => |act, numerics, g, u| act.apply::<bf16>(numerics, g, u).to_f32(),
    };
    let pairs = gate.as_mut_slice().iter_mut().zip(up.as_slice());
    pairs.for_each(|(g, u)| *g = one(act, numerics, *g, *u));
    gate
}

/// How h is computed from the sums of gate and up.
#[derive(Clone, Copy)]
struct Between<'a> {
    act: &'a Activation,
    numerics: Numerics,
    dtype: DType,
    sparsity: Option<Sparsity>,
}

/// Bounds of h; `relative`: as [`sum_error`] says. `before`: what gate and up may already be off by,
/// element by element.
fn gated_bound(
    Between { act, numerics, dtype, sparsity }: Between<'_>,
    forward: &oracle::GatedLinear,
    relative: f64,
    before: impl Fn(Half, usize) -> f64,
) -> Result<Matrix<f64>> {
    let is_stored = numerics.rounding != Rounding::Fused || sparsity.is_some();
    let rounds = is_stored.then_some(dtype);
    let error = |half, l: &oracle::Linear, i: usize| {
        linear_error(l.magnitude.as_slice()[i], relative, rounds) + before(half, i)
    };
    let mut bound = Matrix::zeros(forward.h.rows(), forward.h.cols())?;
    let columns = bound.cols();
    for (row, bounds) in rows_mut(&mut bound).enumerate() {
        let first = row * columns;
        let mut gate = forward.gate.value.view().row(row).to_vec();
        for (j, b) in bounds.iter_mut().enumerate() {
            *b = error(Half::Gate, &forward.gate, first + j);
        }
        if let Some(sparsity) = sparsity {
            rows::sparsify(sparsity, (numerics, dtype), &mut gate, bounds);
        }
        for (j, (b, gate)) in bounds.iter_mut().zip(gate).enumerate() {
            let at = first + j;
            let up = (forward.up.value.as_slice()[at], error(Half::Up, &forward.up, at));
            *b = activation_bound(act, numerics, dtype, (gate, *b), up);
        }
    }
    Ok(bound)
}

/// Bounds of what the down projection multiplies, given those of h.
fn behind_norm(
    params: &RowParams<'_>,
    Between { numerics, dtype, .. }: Between<'_>,
    h: &Matrix<f64>,
    h_bound: Matrix<f64>,
) -> Result<Matrix<f64>> {
    match params.steps.norm {
        Some(norm) => rows::normalise(norm, params, (numerics, dtype), h, h_bound),
        None => Ok(h_bound),
    }
}

/// Bounds of y = h·Wd + bd stored as `dtype`, given those of h.
fn down_bound(
    dtype: DType,
    y: &oracle::Linear,
    h_bound: &Matrix<f64>,
    relative: f64,
    weights: &Weights<'_>,
) -> Result<Matrix<f64>> {
    let [m, k_len] = y.value.shape();
    let h_len = h_bound.cols();
    let mut bound = Matrix::zeros(m, k_len)?;
    oracle::by_feature(
        [m, h_len, k_len],
        || vec![0.0f64; h_len],
        |sizes, k, out| {
            weights(k, sizes);
            sizes.iter_mut().for_each(|v| *v = v.abs());
            for (i, out) in out.iter_mut().enumerate() {
                // An h that may overflow admits anything in y, also where its weight is 0.
                let passed_on = oracle::dot(h_bound.view().row(i), sizes, Product::Error);
                let at = i * k_len + k;
                let magnitude = y.magnitude.as_slice()[at] + passed_on;
                let error = passed_on + relative * magnitude;
                *out = error + rounding(dtype, y.value.as_slice()[at].abs() + error);
            }
        },
        |i, k, error| bound.as_mut_slice()[i * k_len + k] = error,
    );
    Ok(bound)
}

/// Reference of the gated linear layer.
///
/// # Errors
/// As [`oracle::gated_linear`].
pub fn gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
) -> Result<Reference> {
    gated_linear_with(x, params, 0.0)
}

/// As [`gated_linear`], where each factor of a product may first be rounded by `roundoff` relative to
/// it: 2⁻¹⁰ for tf32 by truncation. The baseline then cuts its factors off in the same way, so that
/// the limit grows with what the problem cancels.
///
/// # Errors
/// As [`oracle::gated_linear`].
pub fn gated_linear_with<T: Element>(
    x: MatrixRef<'_, T>,
    params: &GatedLinearParams<'_, T>,
    roundoff: f64,
) -> Result<Reference> {
    let forward = oracle::gated_linear(x, params)?;
    let relative = sum_error(params.weights.hidden(), roundoff);
    let (act, numerics) = (&params.activation, params.numerics);
    let between = Between { act, numerics, dtype: T::DTYPE, sparsity: None };
    let bound = gated_bound(between, &forward, relative, |_, _| 0.0)?;
    let eager = eager_gated_linear(x, params, &RowParams::NONE, roundoff)?;
    let unit = T::DTYPE.unit_roundoff().max(roundoff);
    let frobenius_limit = frobenius_limit(&eager, &forward.h, params.numerics, unit);
    let intermediates = intermediates(&forward, numerics, None);
    Ok(Reference { value: forward.h, bound, frobenius_limit, intermediates })
}

/// Reference of the feed-forward block.
///
/// # Errors
/// As [`oracle::mlp`].
pub fn mlp<T: Element>(x: MatrixRef<'_, T>, params: &MlpParams<'_, T>) -> Result<Reference> {
    mlp_with(x, params, 0.0)
}

/// As [`mlp`], with factors rounded as in [`gated_linear_with`].
///
/// # Errors
/// As [`oracle::mlp`].
pub fn mlp_with<T: Element>(
    x: MatrixRef<'_, T>,
    params: &MlpParams<'_, T>,
    roundoff: f64,
) -> Result<Reference> {
    mlp_stored(x, params, roundoff, T::DTYPE)
}

/// As [`mlp`], of y before it is rounded to T, stored as `f32`: what [`Reference::added_to`] is of.
///
/// # Errors
/// As [`oracle::mlp`].
pub fn mlp_sums<T: Element>(x: MatrixRef<'_, T>, params: &MlpParams<'_, T>) -> Result<Reference> {
    mlp_stored(x, params, 0.0, DType::F32)
}

fn mlp_stored<T: Element>(
    x: MatrixRef<'_, T>,
    params: &MlpParams<'_, T>,
    roundoff: f64,
    stored: DType,
) -> Result<Reference> {
    let forward = oracle::mlp(x, params)?;
    let gated = &params.gated;
    let k_len = forward.y.value.cols();
    let h_len = gated.weights.intermediate();
    let relative = sum_error(gated.weights.hidden(), roundoff);
    let (act, numerics, steps) = (&gated.activation, gated.numerics, params.rows.steps);
    let between = Between { act, numerics, dtype: T::DTYPE, sparsity: steps.sparsity };
    let h_bound = gated_bound(between, &forward.gated, relative, |_, _| 0.0)?;
    let h_bound = behind_norm(&params.rows, between, &forward.gated.h, h_bound)?;
    let relative = sum_error(h_len, roundoff);
    let down = |k, column: &mut [f64]| params.widen_down(k, column);
    let bound = down_bound(stored, &forward.y, &h_bound, relative, &down)?;
    let h = eager_gated_linear(x, &params.gated, &params.rows, roundoff)?;
    let eager = eager_linear(h.view(), k_len, params.down_bias, roundoff, &down)?;
    let unit = T::DTYPE.unit_roundoff().max(roundoff);
    let frobenius_limit = frobenius_limit(&eager, &forward.y.value, gated.numerics, unit);
    let intermediates = intermediates(&forward.gated, numerics, Some(steps));
    Ok(Reference { value: forward.y.value, bound, frobenius_limit, intermediates })
}

impl Reference {
    /// The reference of before + scale ⊙ result, which is added in `f32` with one rounding or with two.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the shapes disagree.
    pub fn added_to(&self, before: MatrixRef<'_, f32>, scale: RowScale<'_>) -> Result<Reference> {
        let [rows, cols] = self.value.shape();
        before.expect_shape("matrix to add to", [rows, cols])?;
        scale.validate(rows)?;
        let (mut value, mut bound) = (Matrix::zeros(rows, cols)?, Matrix::zeros(rows, cols)?);
        for at in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            let (factor, before) =
                (f64::from(scale.of_row(at.0)), f64::from(before.row(at.0)[at.1]));
            let (product, error) = (factor * self.value[at], scaled(self.bound[at], factor.abs()));
            let error = error + rounding(DType::F32, product.abs() + error);
            value[at] = before + product;
            bound[at] = error + rounding(DType::F32, value[at].abs() + error);
        }
        let norm = |m: &Matrix<f64>| m.as_slice().iter().map(|v| v * v).sum::<f64>().sqrt();
        // Errors as large as their bounds everywhere, of which a correct kernel stays far below.
        let frobenius_limit = match norm(&value) {
            0.0 => f64::INFINITY,
            n => norm(&bound) / n,
        };
        Ok(Reference { value, bound, frobenius_limit, intermediates: self.intermediates.clone() })
    }
}

#[cfg(test)]
mod tests;
