//! Bounds of layers with quantised weights.
//!
//! A weight is d·q + m with d·q and m exact in `f32`, or s·q with an `f32` scale s beside the weights,
//! and a kernel may multiply them out or sum
//! products and minima apart, block by block: d·Σq·x + m·Σx. So the magnitude of a sum is
//! Σ(|d·q| + |m|)·|x|, which is Σ|w||x| for types without a minimum. A term then passes the roundings
//! of its product, of at most one addition per other term, of one more per block whose minimum is
//! joined, and of its scalings: by a sub-block's scale, by the block's, and the weight's own where it
//! is decoded first. Inputs may be integers of 23 bits and a sign with a common power of two for the
//! 32 of a run, so that products with integer weights are exact: each is then off by up to [`FIXED_POINT`]
//! of the largest. Integer weights may also be multiplied as bfloat16 by dot
//! products of pairs, with one scaling per scale of a block, which rounds no more often: products are
//! exact, and a term passes the additions of its run and one for each run. Those instructions flush
//! subnormals of inputs and sums to zero, see [`FLUSHED`].

use crate::bounds::{
    Between, Reference, Rows, U32, behind_norm, down_bound, eager_activation, frobenius_limit,
    gamma, gated_bound, narrowed, singles,
};
use half::f16;

use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::layout::Half;
use crate::matrix::{Matrix, MatrixRef};
use crate::oracle::{self, Product, to_f64};
use crate::quant::{QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedRef, QuantizedType};
use crate::rows::{RowParams, RowSteps};

/// How a kernel takes x and h, the inputs of products with quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockInputs {
    /// As they are, or in runs of 32 as fixed-point numbers of at least 23 bits and a sign; bfloat16 also with
    /// subnormals flushed, of sums too.
    Exact,
    /// Rounded to q·d in blocks as long as those of the weights, with q an integer of 8 bits and
    /// d = max|x| / 127 in f16, and where weights have minima also the sum of a block in f16: what
    /// programs do that multiply integers, ggml among them.
    EightBits,
}

/// Features that share a scale as fixed-point numbers; every block is whole runs of them.
const RUN: usize = 32;
/// Half a unit of a fixed-point number of 23 bits and a sign, relative to the largest of its run. In three
/// signed bytes the largest number is 0x7F7F7F; of a run whose largest input would be above that, numbers have a unit
/// twice as large, and the largest may be as little as half of it.
const FIXED_POINT: f64 = 1.0 / 0x7F_7F7F as f64;
/// What flushing subnormals costs an input of bfloat16. Where integers q are multiplied as q·2⁻¹³, so
/// that the products of a run cannot overflow before the result does, a sum that is flushed is below
/// 2⁻¹²⁶·2¹³ in units of q. An addition of a term with q = 0 changes nothing, so each flushed one has
/// |d| ≤ |d·q| and counts as an error of 2⁻¹¹³ of its input; that of the input itself is below 2⁻¹²⁶.
const FLUSHED: f64 = 2.0 * 8192.0 * f32::MIN_POSITIVE as f64;
const U16: f64 = DType::F16.unit_roundoff();

/// The error of a sum in `f32`, relative to its magnitude.
fn sum_error(weights: &QuantizedRef<'_>) -> f64 {
    let minima = weights.kind().minimum_span().map_or(0, |span| weights.cols().div_ceil(span));
    // Three scalings, the bias, and joining partial sums.
    gamma(weights.cols() + minima + 5)
}

/// What inputs of `dtype` and at most these magnitudes may be off by once they are taken as `inputs`
/// says, which `None` says is not at all. With 8
/// bits: half a step d, d's own rounding and that of a sum to f16, and the arithmetic of q.
fn input_errors(
    magnitudes: &[f64],
    dtype: DType,
    kind: QuantizedType,
    inputs: Option<BlockInputs>,
) -> Vec<f64> {
    let largest = |part: &[f64]| part.iter().copied().fold(0.0, f64::max);
    match inputs {
        None => return vec![0.0; magnitudes.len()],
        Some(BlockInputs::Exact) => {
            let flushed = if dtype == DType::Bf16 { FLUSHED } else { 0.0 };
            let error = |part: &[f64]| vec![largest(part) * FIXED_POINT + flushed; part.len()];
            return magnitudes.chunks(RUN).flat_map(error).collect();
        }
        Some(BlockInputs::EightBits) => {}
    }
    let error = |part: &[f64]| {
        let step = largest(part) * (0.5 / 127.0 + U16 + 4.0 * U32);
        let least = 128.0 * DType::F16.underflow_unit();
        part.iter().map(|v| step + v * U16 + least).collect::<Vec<f64>>()
    };
    magnitudes.chunks(kind.elements()).flat_map(error).collect()
}

/// Σ e·(|d·q| + |m|) of each row of input errors and each output.
fn passed_on(errors: &Matrix<f64>, weights: &QuantizedRef<'_>) -> Result<Matrix<f64>> {
    let [m, out] = [errors.rows(), weights.rows()];
    let mut passed = Matrix::zeros(m, out)?;
    oracle::by_feature(
        [m, weights.cols(), out],
        || Vec::with_capacity(weights.cols()),
        |sizes, o, passed| {
            sizes.clear();
            weights.terms(o, |product, minimum| sizes.push(product.abs() + minimum.abs()));
            for (i, passed) in passed.iter_mut().enumerate() {
                *passed = oracle::dot(errors.view().row(i), sizes, Product::Value);
            }
        },
        |i, o, value| passed.as_mut_slice()[i * out + o] = value,
    );
    Ok(passed)
}

/// The inputs as a kernel multiplies them.
fn taken<T: Element>(
    x: MatrixRef<'_, T>,
    kind: QuantizedType,
    inputs: BlockInputs,
) -> Result<Matrix<f32>> {
    taken_singles(singles(&to_f64(x)?)?, kind, inputs)
}

fn taken_singles(
    mut x: Matrix<f32>,
    kind: QuantizedType,
    inputs: BlockInputs,
) -> Result<Matrix<f32>> {
    let cols = x.cols();
    if inputs == BlockInputs::EightBits && cols > 0 {
        for row in x.as_mut_slice().chunks_mut(cols) {
            row.chunks_mut(kind.elements()).for_each(round_to_eight_bits);
        }
    }
    Ok(x)
}

fn round_to_eight_bits(values: &mut [f32]) {
    let d = values.iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let d = f16::from_f32(d).to_f32();
    values.iter_mut().for_each(|v| *v = (*v * inverse).round() * d);
}

/// The baseline: plain loops over products and minima apart, in `f32` and in order, rounded to T.
fn eager_linear<T: Element>(
    x: &Matrix<f32>,
    weights: &QuantizedRef<'_>,
    bias: Option<&[f32]>,
) -> Result<Matrix<T>> {
    narrowed(&eager_sums(x, weights, bias)?)
}

fn eager_sums(
    x: &Matrix<f32>,
    weights: &QuantizedRef<'_>,
    bias: Option<&[f32]>,
) -> Result<Matrix<f32>> {
    let mut out = Matrix::zeros(x.rows(), weights.rows())?;
    let rows = Rows::new(x);
    oracle::by_feature(
        [x.rows(), x.cols(), weights.rows()],
        <(Vec<f32>, Vec<f32>)>::default,
        |(products, minima), o, out| {
            products.clear();
            minima.clear();
            weights.terms(o, |product, minimum| {
                products.push(product as f32);
                minima.push(minimum as f32);
            });
            let dots = rows.dots(products).zip(rows.dots(minima));
            for (out, (products, minima)) in out.iter_mut().zip(dots) {
                *out = products + minima + bias.map_or(0.0, |b| b[o]);
            }
        },
        |i, o, value| out.as_mut_slice()[i * weights.rows() + o] = value,
    );
    Ok(out)
}

fn eager_gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedGatedLinearParams<'_>,
    rows: &RowParams<'_>,
    inputs: BlockInputs,
) -> Result<Matrix<T>> {
    let x = taken(x, params.gate.kind(), inputs)?;
    let gate = eager_linear::<T>(&x, &params.gate, params.gate_bias)?;
    let up = eager_linear::<T>(&x, &params.up, params.up_bias)?;
    eager_activation(&params.activation, gate, &up, rows)
}

/// `x` has values of `dtype`.
fn h_bound(
    (x, dtype): (&Matrix<f64>, DType),
    (params, steps): (&QuantizedGatedLinearParams<'_>, RowSteps),
    forward: &oracle::GatedLinear,
    inputs: Option<BlockInputs>,
) -> Result<Matrix<f64>> {
    let (between, relative) = (between(params, steps, dtype), sum_error(&params.gate));
    if inputs.is_none() {
        return gated_bound(between, forward, relative, |_, _| 0.0);
    }
    let mut errors = Matrix::room(x.rows(), x.cols())?;
    for i in 0..x.rows() {
        let magnitudes: Vec<f64> = x.view().row(i).iter().map(|v| v.abs()).collect();
        errors.extend(input_errors(&magnitudes, dtype, params.gate.kind(), inputs));
    }
    let errors = Matrix::from_vec(errors, x.rows(), x.cols())?;
    let (gate, up) = (passed_on(&errors, &params.gate)?, passed_on(&errors, &params.up)?);
    gated_bound(between, forward, relative, |half, i| match half {
        Half::Gate => gate.as_slice()[i],
        Half::Up => up.as_slice()[i],
    })
}

fn between<'a>(
    params: &'a QuantizedGatedLinearParams<'_>,
    RowSteps { sparsity, .. }: RowSteps,
    dtype: DType,
) -> Between<'a> {
    let (act, numerics) = (&params.activation, params.numerics);
    Between { act, numerics, dtype, sparsity }
}

/// Reference of the gated linear layer with quantised weights, inputs and output of T.
///
/// # Errors
/// As [`oracle::quantized_gated_linear`].
pub fn quantized_gated_linear<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedGatedLinearParams<'_>,
) -> Result<Reference> {
    quantized_gated_linear_with(x, params, BlockInputs::Exact)
}

/// As [`quantized_gated_linear`], where x may first be rounded as `inputs` says; the baseline then
/// rounds it in the same way.
///
/// # Errors
/// As [`oracle::quantized_gated_linear`].
pub fn quantized_gated_linear_with<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedGatedLinearParams<'_>,
    inputs: BlockInputs,
) -> Result<Reference> {
    let forward = oracle::quantized_gated_linear(x, params)?;
    let (wide, within) = (to_f64(x)?, (params, RowSteps::NONE));
    let bound = h_bound((&wide, T::DTYPE), within, &forward, Some(inputs))?;
    let beside = h_bound((&wide, T::DTYPE), within, &forward, None)?;
    let eager = eager_gated_linear(x, params, &RowParams::NONE, inputs)?;
    let frobenius_limit = frobenius_limit(&eager, &forward.h, params.numerics, unit::<T>(inputs))
        + of_inputs(&bound, &beside, &forward.h, inputs);
    let intermediates = super::intermediates(&forward, params.numerics, None);
    Ok(Reference { value: forward.h, bound, frobenius_limit, intermediates })
}

/// What the inputs' own errors may add to the relative Frobenius error: the baseline has those of 8
/// bits, but multiplies exact ones as they are. Next to nothing, unless one input of a run is far above
/// the others and its weight is 0.
fn of_inputs(
    bound: &Matrix<f64>,
    beside: &Matrix<f64>,
    value: &Matrix<f64>,
    inputs: BlockInputs,
) -> f64 {
    if inputs == BlockInputs::EightBits {
        return 0.0;
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let added =
        bound.as_slice().iter().zip(beside.as_slice()).map(|(with, without)| with - without);
    // Where a result may overflow both are infinite: its elements decide.
    match norm(&mut added.filter(|v| v.is_finite())) {
        0.0 => 0.0,
        added => added / norm(&mut value.as_slice().iter().copied().filter(|v| v.is_finite())),
    }
}

/// The coarsest rounding that a result goes through.
fn unit<T: Element>(inputs: BlockInputs) -> f64 {
    match inputs {
        BlockInputs::Exact => T::DTYPE.unit_roundoff(),
        BlockInputs::EightBits => T::DTYPE.unit_roundoff().max(0.5 / 127.0),
    }
}

/// `x` has values of `dtype`.
fn y_bound(
    (x, dtype): (&Matrix<f64>, DType),
    params: &QuantizedMlpParams<'_>,
    forward: &oracle::Mlp,
    inputs: Option<BlockInputs>,
) -> Result<Matrix<f64>> {
    let (gated, steps) = (&params.gated, params.rows.steps);
    let h_error = h_bound((x, dtype), (gated, steps), &forward.gated, inputs)?;
    let between = between(gated, steps, dtype);
    let mut h_error = behind_norm(&params.rows, between, &forward.gated.h, h_error)?;
    let (h, cols) = (forward.hidden(), h_error.cols().max(1));
    let rows = h_error.as_mut_slice().chunks_mut(cols).zip(h.as_slice().chunks(cols));
    for (errors, h) in rows {
        let magnitudes: Vec<f64> = h.iter().zip(&*errors).map(|(h, e)| h.abs() + e).collect();
        let taken = input_errors(&magnitudes, dtype, params.down.kind(), inputs);
        errors.iter_mut().zip(taken).for_each(|(e, t)| *e += t);
    }
    let relative = sum_error(&params.down);
    down_bound(dtype, &forward.y, &h_error, relative, &|k, column| {
        let mut places = column.iter_mut();
        params.down.terms(k, |product, minimum| {
            if let Some(place) = places.next() {
                *place = product.abs() + minimum.abs();
            }
        });
    })
}

/// Reference of the feed-forward block with quantised weights: inputs, output and h of T.
///
/// # Errors
/// As [`oracle::quantized_mlp`].
pub fn quantized_mlp<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedMlpParams<'_>,
) -> Result<Reference> {
    quantized_mlp_with(x, params, BlockInputs::Exact)
}

/// As [`quantized_mlp`], where x and h may be rounded as `inputs` says before they are multiplied.
///
/// # Errors
/// As [`oracle::quantized_mlp`].
pub fn quantized_mlp_with<T: Element>(
    x: MatrixRef<'_, T>,
    params: &QuantizedMlpParams<'_>,
    inputs: BlockInputs,
) -> Result<Reference> {
    let forward = oracle::quantized_mlp(x, params)?;
    let wide = to_f64(x)?;
    let bound = y_bound((&wide, T::DTYPE), params, &forward, Some(inputs))?;
    let beside = y_bound((&wide, T::DTYPE), params, &forward, None)?;
    let h = eager_gated_linear(x, &params.gated, &params.rows, inputs)?;
    let h = taken(h.view(), params.down.kind(), inputs)?;
    let eager = eager_linear::<T>(&h, &params.down, params.down_bias)?;
    let (value, numerics) = (&forward.y.value, params.gated.numerics);
    let frobenius_limit = frobenius_limit(&eager, value, numerics, unit::<T>(inputs))
        + of_inputs(&bound, &beside, &forward.y.value, inputs);
    let intermediates = super::intermediates(&forward.gated, numerics, Some(params.rows.steps));
    Ok(Reference { value: forward.y.value, bound, frobenius_limit, intermediates })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::quant::BlockType;
    use crate::{Activation, random};

    /// Inputs of bfloat16 that are flushed where pair dot products may do so are admitted, larger ones
    /// that are lost are not.
    #[test]
    fn flushed_inputs_are_told_from_lost_ones() {
        for block in BlockType::ALL {
            let (k, h, m) = (2 * block.elements(), 48, 5);
            let weights = |seed| random::quantized_matrix(seed, block, h, k, 0.5).unwrap();
            let (gate, up) = (weights(1), weights(2));
            let (gate, up) = (gate.view(), up.view());
            let mut params =
                QuantizedGatedLinearParams::new(gate, up, Activation::BILINEAR, DType::Bf16);
            // h is nearly the gate.
            let ones = vec![1.0; h];
            params.up_bias = Some(&ones);
            let x = random::normal_matrix::<f32>(3, m, k, 2f32.powi(-105)).unwrap();
            let x = x.view().to_dtype::<bf16>().unwrap();
            let reference = quantized_gated_linear(x.view(), &params).unwrap();
            let passes = |below: f64| {
                let mut flushed = x.view().to_dtype::<f32>().unwrap();
                for v in flushed.as_mut_slice() {
                    if f64::from(v.abs()) < below {
                        *v = 0.0;
                    }
                }
                let gate = eager_linear::<f32>(&flushed, &params.gate, None).unwrap();
                let h = gate.view().to_dtype::<bf16>().unwrap();
                reference.judge(h.view()).unwrap().passed()
            };
            assert!(passes(0.0) && passes(2f64.powi(-113)), "{block}");
            assert!(!passes(2f64.powi(-105)), "{block}");
        }
    }

    /// Integers of 8 bits are admitted where they are promised, and nowhere else.
    #[test]
    fn eight_bits_are_told_from_exact_inputs() {
        for block in BlockType::ALL {
            let (k, h) = (512, 256);
            let weights = |seed, rows, cols: usize| {
                let deviation = 1.0 / (cols as f32).sqrt();
                random::quantized_matrix(seed, block, rows, cols, deviation).unwrap()
            };
            let (gate, up, down) = (weights(1, h, k), weights(2, h, k), weights(3, k, h));
            let (gate, up) = (gate.view(), up.view());
            let gated = QuantizedGatedLinearParams::new(gate, up, Activation::SWIGLU, DType::F32);
            let params = QuantizedMlpParams {
                gated,
                down: down.view(),
                down_bias: None,
                rows: RowParams::NONE,
            };
            let x = random::normal_matrix::<f32>(4, 3, k, 1.0).unwrap();
            let y = |inputs| {
                let h =
                    eager_gated_linear(x.view(), &params.gated, &RowParams::NONE, inputs).unwrap();
                let h = taken(h.view(), block.into(), inputs).unwrap();
                eager_linear::<f32>(&h, &params.down, None).unwrap()
            };
            let (exact, rounded) = (y(BlockInputs::Exact), y(BlockInputs::EightBits));
            for inputs in [BlockInputs::Exact, BlockInputs::EightBits] {
                let reference = quantized_mlp_with(x.view(), &params, inputs).unwrap();
                let judge = |out: &Matrix<f32>| reference.judge(out.view()).unwrap();
                assert!(judge(&exact).passed(), "{block} {inputs:?} {:?}", judge(&exact));
                let admitted = inputs == BlockInputs::EightBits;
                assert_eq!(judge(&rounded).passed(), admitted, "{block} {:?}", judge(&rounded));
                // A tenth more is no rounding.
                let mut wrong = rounded.clone();
                wrong.as_mut_slice().iter_mut().for_each(|v| *v *= 1.1);
                assert!(!judge(&wrong).passed(), "{block} {inputs:?}");
            }
            let h = eager_gated_linear(x.view(), &gated, &RowParams::NONE, BlockInputs::EightBits)
                .unwrap();
            for (inputs, passes) in [(BlockInputs::Exact, false), (BlockInputs::EightBits, true)] {
                let reference = quantized_gated_linear_with(x.view(), &gated, inputs).unwrap();
                assert_eq!(reference.judge(h.view()).unwrap().passed(), passes, "{block}");
            }
        }
    }
}
