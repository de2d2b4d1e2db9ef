//! The float64 oracle over chosen rows of a case, from inputs derived as every peer derives them.

use rayon::prelude::*;
use swiglu_core::bounds::{self, Reference};
use swiglu_core::random::{normal, quantized_matrix};
use swiglu_core::{
    DType, Element, GateUpRef, GateUpWeights, GatedLinearParams, Matrix, MlpParams, Orientation,
    QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedType, bf16, f16,
};

use super::{Oracle, Promise, tokens_and_features};
use crate::case::{Case, CaseOp};
use crate::error::Result;
use crate::peer::protocol::{
    ACTIVATION_SCALE, STREAM_DOWN, STREAM_GATE, STREAM_OUT_GRAD, STREAM_UP, STREAM_X, biases,
    normal_rows, scale,
};

impl Oracle {
    /// The reference by which a promise is judged.
    pub(super) fn reference(&self, promise: &Promise) -> Result<Vec<Reference>> {
        match self.case.dtype {
            DType::F32 => self.of_type::<f32>(promise),
            DType::F16 => self.of_type::<f16>(promise),
            _ => self.of_type::<bf16>(promise),
        }
    }

    fn of_type<T: Element>(&self, promise: &Promise) -> Result<Vec<Reference>> {
        let (activation, h) = (&self.case.activation, self.case.intermediate);
        let reference = match self.case.op {
            CaseOp::MlpTrain => return self.step::<T>(promise),
            CaseOp::Copy => {
                let x = self.inputs::<T>(STREAM_X, h, 1.0)?;
                let value = x.as_slice().iter().map(|v| v.to_f64()).collect();
                let value = Matrix::from_vec(value, self.rows.len(), h)?;
                let bound = Matrix::zeros(self.rows.len(), h)?;
                of(value, bound, 0.0)
            }
            CaseOp::Activation | CaseOp::ActivationBackward => {
                let gate = self.inputs::<T>(STREAM_GATE, h, ACTIVATION_SCALE)?;
                let up = self.inputs::<T>(STREAM_UP, h, ACTIVATION_SCALE)?;
                let both = GateUpRef::separate(gate.view(), up.view())?;
                let numerics = promise.numerics;
                if self.case.op == CaseOp::Activation {
                    bounds::activation(activation, numerics, &both)?
                } else {
                    let dh = self.inputs::<T>(STREAM_OUT_GRAD, h, 1.0)?;
                    beside(&bounds::activation_backward(activation, numerics, &both, dh.view())?)?
                }
            }
            CaseOp::GatedLinear | CaseOp::Mlp => {
                let x = self.inputs::<T>(STREAM_X, self.case.hidden, 1.0)?;
                match self.case.weights {
                    Some(kind) => self.quantized(&x, kind, promise)?,
                    None => self.dense(&x, promise)?,
                }
            }
        };
        Ok(vec![reference])
    }

    fn dense<T: Element>(&self, x: &Matrix<T>, promise: &Promise) -> Result<Reference> {
        let all: Vec<usize> = (0..self.case.intermediate).collect();
        let layer = Weights::<T>::of(&self.case, self.seed, &all)?;
        match self.case.op {
            CaseOp::GatedLinear => {
                Ok(bounds::gated_linear_with(x.view(), &layer.gated(promise)?, promise.roundoff)?)
            }
            _ => Ok(bounds::mlp_with(x.view(), &layer.mlp(promise)?, promise.roundoff)?),
        }
    }

    /// Of a training step: y and ∂L/∂x of some tokens through all of the layer, the gradients of weights of some features over
    /// all tokens.
    fn step<T: Element>(&self, promise: &Promise) -> Result<Vec<Reference>> {
        let (case, seed, roundoff) = (&self.case, self.seed, promise.roundoff);
        let [tokens, features] = tokens_and_features(case, seed);
        let every = |n: usize| (0..n).collect::<Vec<usize>>();
        let of_tokens = |stream, rows: &[usize]| {
            normal_rows::<T>(seed ^ stream, rows.par_iter().copied(), case.hidden, 1.0)
        };
        let given = |rows: &[usize]| -> Result<_> {
            Ok((of_tokens(STREAM_X, rows)?, of_tokens(STREAM_OUT_GRAD, rows)?))
        };
        // For large layers seconds each.
        let through_all = || -> Result<_> {
            let ((x, dy), all) = (given(&tokens)?, every(case.intermediate));
            let layer = Weights::of(case, seed, &all)?;
            let params = layer.mlp(promise)?;
            let (y, dx) = rayon::join(
                || bounds::mlp_with(x.view(), &params, roundoff),
                || bounds::mlp_input_gradient(x.view(), &params, dy.view(), roundoff),
            );
            Ok([y?, dx?.reference])
        };
        let over_all = || -> Result<_> {
            let (x, dy) = given(&every(case.m))?;
            let layer = Weights::of(case, seed, &features)?;
            let (params, dtype) = (layer.mlp(promise)?, T::DTYPE);
            let [gate, up, down] =
                bounds::mlp_weight_gradients(x.view(), &params, dy.view(), dtype, roundoff)?;
            Ok([gate.reference, up.reference, turned(&down.reference)?])
        };
        let (through_all, over_all) = rayon::join(through_all, over_all);
        Ok(through_all?.into_iter().chain(over_all?).collect())
    }

    fn quantized<T: Element>(
        &self,
        x: &Matrix<T>,
        kind: QuantizedType,
        promise: &Promise,
    ) -> Result<Reference> {
        let (k, h) = (self.case.hidden, self.case.intermediate);
        let weight = |stream, rows, cols| {
            quantized_matrix(self.seed ^ stream, kind, rows, cols, scale(cols))
        };
        let (gate, up) = (weight(STREAM_GATE, h, k)?, weight(STREAM_UP, h, k)?);
        let [gate_bias, up_bias, down_bias] = biases(&self.case, self.seed);
        let (gate, up) = (gate.view(), up.view());
        let gated = QuantizedGatedLinearParams::new(gate, up, self.case.activation, T::DTYPE)
            .with_gate_bias(gate_bias.as_deref())
            .with_up_bias(up_bias.as_deref())
            .with_numerics(promise.numerics);
        if self.case.op == CaseOp::GatedLinear {
            return Ok(bounds::quantized_gated_linear_with(x.view(), &gated, promise.inputs)?);
        }
        let down = weight(STREAM_DOWN, k, h)?;
        let (down, down_bias) = (down.view(), down_bias.as_deref());
        let mlp = QuantizedMlpParams::new(gated, down).with_down_bias(down_bias);
        Ok(bounds::quantized_mlp_with(x.view(), &mlp, promise.inputs)?)
    }

    fn inputs<T: Element>(&self, stream: u64, cols: usize, scale: f32) -> Result<Matrix<T>> {
        Ok(normal_rows(self.seed ^ stream, self.rows.par_iter().copied(), cols, scale)?)
    }
}

/// Of a case's layer some intermediate features, as a layer that has no others.
struct Weights<'a, T> {
    case: &'a Case,
    gate: Matrix<T>,
    up: Matrix<T>,
    down: Matrix<T>,
    biases: [Option<Vec<f32>>; 3],
}

impl<'a, T: Element> Weights<'a, T> {
    fn of(case: &'a Case, seed: u64, features: &[usize]) -> Result<Self> {
        let (k, h) = (case.hidden, case.intermediate);
        let half =
            |stream: u64| normal_rows(seed ^ stream, features.par_iter().copied(), k, scale(k));
        let mut down = Matrix::zeros(if case.op.is_block() { k } else { 0 }, features.len())?;
        let rows = down.as_mut_slice().par_chunks_mut(features.len().max(1)).enumerate();
        rows.for_each(|(r, row)| {
            for (v, &j) in row.iter_mut().zip(features) {
                let value = normal(seed ^ STREAM_DOWN, (r * h + j) as u64);
                *v = T::from_f32(value * scale(h));
            }
        });
        let mut biases = biases(case, seed);
        for bias in biases[..2].iter_mut().flatten() {
            *bias = features.iter().map(|&j| bias[j]).collect();
        }
        Ok(Self { case, gate: half(STREAM_GATE)?, up: half(STREAM_UP)?, down, biases })
    }

    fn gated(&self, promise: &Promise) -> Result<GatedLinearParams<'_, T>> {
        let [gate_bias, up_bias, _] = &self.biases;
        let weights =
            GateUpWeights::separate(self.gate.view(), self.up.view(), Orientation::OutIn)?;
        Ok(GatedLinearParams::new(weights, self.case.activation)
            .with_gate_bias(gate_bias.as_deref())
            .with_up_bias(up_bias.as_deref())
            .with_numerics(promise.numerics))
    }

    fn mlp(&self, promise: &Promise) -> Result<MlpParams<'_, T>> {
        Ok(MlpParams::new(self.gated(promise)?, self.down.view(), Orientation::OutIn)
            .with_down_bias(self.biases[2].as_deref()))
    }
}

/// The reference of the transpose.
fn turned(reference: &Reference) -> Result<Reference> {
    let turned = |m: &Matrix<f64>| {
        let values = (0..m.cols()).flat_map(|c| (0..m.rows()).map(move |r| m[(r, c)]));
        Matrix::from_values(values, m.cols(), m.rows())
    };
    let Reference { value, bound, frobenius_limit, .. } = reference;
    Ok(of(turned(value)?, turned(bound)?, *frobenius_limit))
}

fn of(value: Matrix<f64>, bound: Matrix<f64>, frobenius_limit: f64) -> Reference {
    Reference { value, bound, frobenius_limit, intermediates: Vec::new() }
}

/// The references of two gradients as that of one result, the columns of the first before those of the
/// second. Where each is within its own limit, both together are within the larger.
fn beside([gate, up]: &[Reference; 2]) -> Result<Reference> {
    let [rows, cols] = gate.value.shape();
    let joined = |a: &Matrix<f64>, b: &Matrix<f64>| {
        let data = (0..rows).flat_map(|r| [a.view().row(r), b.view().row(r)].concat()).collect();
        Matrix::from_vec(data, rows, 2 * cols)
    };
    let (value, bound) = (joined(&gate.value, &up.value)?, joined(&gate.bound, &up.bound)?);
    Ok(of(value, bound, gate.frobenius_limit.max(up.frobenius_limit)))
}
