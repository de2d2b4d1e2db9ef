//! The float64 oracle over chosen rows of a case, from inputs derived as every peer derives them.

use rayon::prelude::*;
use swiglu_core::bounds::{self, Reference};
use swiglu_core::random::{normal, quantized_matrix};
use swiglu_core::{
    DType, Element, GateUpRef, GateUpWeights, GatedLinearParams, Matrix, MlpParams, Orientation,
    QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedType, bf16, f16,
};

use super::Promise;
use crate::case::{Case, CaseOp};
use crate::error::Result;
use crate::peer::protocol::{
    ACTIVATION_SCALE, STREAM_BIAS, STREAM_DOWN, STREAM_GATE, STREAM_OUT_GRAD, STREAM_UP, STREAM_X,
};

/// What truncation to TF32 may change a factor by.
const TF32_ROUNDOFF: f64 = 1.0 / 1024.0;

/// Rows of a case whose inputs follow from a seed.
pub(super) struct Derived<'a> {
    pub(super) case: &'a Case,
    pub(super) seed: u64,
    pub(super) rows: &'a [usize],
}

impl Derived<'_> {
    /// The reference by which a promise is judged.
    pub(super) fn of(&self, promise: &Promise) -> Result<Reference> {
        match self.case.dtype {
            DType::F32 => self.of_type::<f32>(promise),
            DType::F16 => self.of_type::<f16>(promise),
            _ => self.of_type::<bf16>(promise),
        }
    }

    fn of_type<T: Element>(&self, promise: &Promise) -> Result<Reference> {
        let (activation, h) = (&self.case.activation, self.case.intermediate);
        match self.case.op {
            CaseOp::Copy => {
                let x = self.inputs::<T>(STREAM_X, h, 1.0)?;
                let value = x.as_slice().iter().map(|v| v.to_f64()).collect();
                let value = Matrix::from_vec(value, self.rows.len(), h)?;
                let bound = Matrix::zeros(self.rows.len(), h)?;
                Ok(Reference { bound, value, frobenius_limit: 0.0, intermediates: Vec::new() })
            }
            CaseOp::Activation | CaseOp::ActivationBackward => {
                let gate = self.inputs::<T>(STREAM_GATE, h, ACTIVATION_SCALE)?;
                let up = self.inputs::<T>(STREAM_UP, h, ACTIVATION_SCALE)?;
                let both = GateUpRef::separate(gate.view(), up.view())?;
                let numerics = promise.numerics;
                if self.case.op == CaseOp::Activation {
                    return Ok(bounds::activation(activation, numerics, &both)?);
                }
                let dh = self.inputs::<T>(STREAM_OUT_GRAD, h, 1.0)?;
                beside(&bounds::activation_backward(activation, numerics, &both, dh.view())?)
            }
            CaseOp::GatedLinear | CaseOp::Mlp => {
                let x = self.inputs::<T>(STREAM_X, self.case.hidden, 1.0)?;
                match self.case.weights {
                    Some(kind) => self.quantized(&x, kind, promise),
                    None => self.dense(&x, promise),
                }
            }
        }
    }

    fn dense<T: Element>(&self, x: &Matrix<T>, promise: &Promise) -> Result<Reference> {
        let (k, h) = (self.case.hidden, self.case.intermediate);
        let weight = |stream, rows, cols| weight::<T>(self.seed ^ stream, rows, cols);
        let (gate, up) = (weight(STREAM_GATE, h, k)?, weight(STREAM_UP, h, k)?);
        let [gate_bias, up_bias, down_bias] = biases(self.case, self.seed);
        let gated = GatedLinearParams::new(
            GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?,
            self.case.activation,
        )
        .with_gate_bias(gate_bias.as_deref())
        .with_up_bias(up_bias.as_deref())
        .with_numerics(promise.numerics);
        let roundoff = if promise.tf32 { TF32_ROUNDOFF } else { 0.0 };
        if self.case.op == CaseOp::GatedLinear {
            return Ok(bounds::gated_linear_with(x.view(), &gated, roundoff)?);
        }
        let down = weight(STREAM_DOWN, k, h)?;
        let mlp = MlpParams::new(gated, down.view(), Orientation::OutIn)
            .with_down_bias(down_bias.as_deref());
        Ok(bounds::mlp_with(x.view(), &mlp, roundoff)?)
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
        let [gate_bias, up_bias, down_bias] = biases(self.case, self.seed);
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
        Ok(inputs(self.seed ^ stream, self.rows, cols, scale)?)
    }
}

/// Chosen rows of a stream's matrix.
pub(super) fn inputs<T: Element>(
    stream: u64,
    rows: &[usize],
    cols: usize,
    scale: f32,
) -> swiglu_core::Result<Matrix<T>> {
    let element = |r: usize, c: usize| T::from_f32(normal(stream, (r * cols + c) as u64) * scale);
    let data = rows.iter().flat_map(|&r| (0..cols).map(move |c| element(r, c))).collect();
    Matrix::from_vec(data, rows.len(), cols)
}

/// A `[rows, cols]` matrix of a stream, made by all processors.
fn weight<T: Element>(stream: u64, rows: usize, cols: usize) -> swiglu_core::Result<Matrix<T>> {
    let (scale, mut m) = (scale(cols), Matrix::zeros(rows, cols)?);
    m.as_mut_slice().par_chunks_mut(cols.max(1)).enumerate().for_each(|(r, row)| {
        for (c, v) in row.iter_mut().enumerate() {
            *v = T::from_f32(normal(stream, (r * cols + c) as u64) * scale);
        }
    });
    Ok(m)
}

/// Of weights with so many inputs.
fn scale(inputs: usize) -> f32 {
    1.0 / (inputs.max(1) as f32).sqrt()
}

/// bg, bu and bd of a case that has them.
pub(super) fn biases(case: &Case, seed: u64) -> [Option<Vec<f32>>; 3] {
    let lengths = [case.intermediate, case.intermediate, case.hidden];
    std::array::from_fn(|which| {
        let stream = seed ^ STREAM_BIAS[which];
        case.bias.then(|| (0..lengths[which] as u64).map(|i| normal(stream, i)).collect())
    })
}

/// The references of two gradients as that of one result, the columns of the first before those of the
/// second. Where each is within its own limit, both together are within the larger.
fn beside([gate, up]: &[Reference; 2]) -> Result<Reference> {
    let [rows, cols] = gate.value.shape();
    let joined = |a: &Matrix<f64>, b: &Matrix<f64>| {
        let data = (0..rows).flat_map(|r| [a.view().row(r), b.view().row(r)].concat()).collect();
        Matrix::from_vec(data, rows, 2 * cols)
    };
    Ok(Reference {
        value: joined(&gate.value, &up.value)?,
        bound: joined(&gate.bound, &up.bound)?,
        frobenius_limit: gate.frobenius_limit.max(up.frobenius_limit),
        intermediates: Vec::new(),
    })
}
