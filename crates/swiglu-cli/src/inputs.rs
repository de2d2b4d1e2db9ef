//! Inputs that are made up: matrices, filled by all processors, and all that a case of the lab has,
//! derived from its seed as every peer derives it.

use rayon::prelude::*;
use swiglu::{
    Arrangement, Element, GatedLinearParams, Matrix, MlpParams, Orientation,
    QuantizedGatedLinearParams, QuantizedMatrix, QuantizedMlpParams, StridedRef, WeightLayout,
};
use swiglu_core::random::quantized_matrix;
use swiglu_core::{OwnedGateUp, Result};
use swiglu_lab::peer::protocol::{
    ACTIVATION_SCALE, STREAM_DOWN, STREAM_GATE, STREAM_OUT_GRAD, STREAM_UP, STREAM_X, biases,
    normal_rows, scale,
};
use swiglu_lab::{Case, CaseOp};

use crate::layer::Params;

/// The matrix of [`swiglu_core::random::normal_matrix`], filled in parallel.
pub(crate) fn normal<T: Element>(
    seed: u64,
    rows: usize,
    cols: usize,
    scale: f32,
) -> Result<Matrix<T>> {
    normal_rows(seed, (0..rows).into_par_iter(), cols, scale)
}

pub(crate) fn x<T: Element>(case: &Case, seed: u64) -> Result<Matrix<T>> {
    normal(seed ^ STREAM_X, case.m, case.hidden, 1.0)
}

/// What a call reads beside weights: x, or gate and up; then, of a backward pass, the gradient of the result.
pub(crate) fn read<T: Element>(case: &Case, seed: u64) -> Result<Vec<Matrix<T>>> {
    let weights = case.op.has_weights();
    let mut all = if weights { vec![x(case, seed)?] } else { activation(case, seed)? };
    if matches!(case.op, CaseOp::ActivationBackward | CaseOp::MlpTrain) {
        let cols = if case.op.is_block() { case.hidden } else { case.intermediate };
        all.push(normal(seed ^ STREAM_OUT_GRAD, case.m, cols, 1.0)?);
    }
    Ok(all)
}

/// The layer of a case, of elements in its layout or quantised, with its biases.
pub(crate) struct Derived<T> {
    case: Case,
    weights: Weights<T>,
    biases: [Option<Vec<f32>>; 3],
}

enum Weights<T> {
    Elements(OwnedGateUp<T>, Option<Matrix<T>>),
    Quantized([QuantizedMatrix; 2], Option<QuantizedMatrix>),
}

impl<T: Element> Derived<T> {
    /// Quantised weights as they are, or the values of these.
    pub(crate) fn derive(case: &Case, seed: u64, decode: bool) -> Result<Self> {
        let (k, h, block) = (case.hidden, case.intermediate, case.op.is_block());
        let quantized = |kind, stream, rows, cols| {
            quantized_matrix(seed ^ stream, kind, rows, cols, scale(cols))
        };
        let weight = |stream, rows, cols| match case.weights {
            None => normal(seed ^ stream, rows, cols, scale(cols)),
            Some(kind) => quantized(kind, stream, rows, cols)?.view().to_matrix(),
        };
        let weights = if let Some(kind) = case.weights.filter(|_| !decode) {
            let down = block.then(|| quantized(kind, STREAM_DOWN, k, h)).transpose()?;
            let gate = quantized(kind, STREAM_GATE, h, k)?;
            Weights::Quantized([gate, quantized(kind, STREAM_UP, h, k)?], down)
        } else {
            let tensors = vec![weight(STREAM_GATE, h, k)?, weight(STREAM_UP, h, k)?];
            let Case { orientation, arrangement, .. } = *case;
            let layout = WeightLayout { orientation, arrangement };
            let mut gate_up = OwnedGateUp::new(tensors, WeightLayout::HF)?;
            if layout != WeightLayout::HF {
                gate_up = gate_up.view().convert(layout)?;
            }
            let mut down = block.then(|| weight(STREAM_DOWN, k, h)).transpose()?;
            if let (Some(down), Orientation::InOut) = (&mut down, orientation) {
                *down = StridedRef::from(&*down).transposed().to_rows()?.view()?.to_dtype()?;
            }
            Weights::Elements(gate_up, down)
        };
        Ok(Self { case: case.clone(), weights, biases: biases(case, seed) })
    }

    pub(crate) fn params(&self) -> Params<'_, T> {
        let Case { activation, numerics, orientation, .. } = self.case;
        let [gate_bias, up_bias, down_bias] = self.biases.each_ref().map(Option::as_deref);
        match &self.weights {
            Weights::Elements(gate_up, down) => {
                let gated = GatedLinearParams::new(gate_up.view(), activation)
                    .with_gate_bias(gate_bias)
                    .with_up_bias(up_bias)
                    .with_numerics(numerics);
                let Some(down) = down else { return Params::GatedLinear(gated) };
                let params = MlpParams::new(gated, down.view(), orientation);
                Params::Mlp(params.with_down_bias(down_bias))
            }
            Weights::Quantized([gate, up], down) => {
                let (gate, up) = (gate.view(), up.view());
                let gated = QuantizedGatedLinearParams::new(gate, up, activation, T::DTYPE)
                    .with_gate_bias(gate_bias)
                    .with_up_bias(up_bias)
                    .with_numerics(numerics);
                let Some(down) = down else { return Params::QuantizedGatedLinear(gated) };
                let params = QuantizedMlpParams::new(gated, down.view());
                Params::QuantizedMlp(params.with_down_bias(down_bias))
            }
        }
    }
}

/// Gate and up of an activation, in the arrangement of the case: one tensor where they share it, else two. They lie as
/// weights whose rows are inputs.
fn activation<T: Element>(case: &Case, seed: u64) -> Result<Vec<Matrix<T>>> {
    let half = |stream| normal(seed ^ stream, case.m, case.intermediate, ACTIVATION_SCALE);
    let apart = vec![half(STREAM_GATE)?, half(STREAM_UP)?];
    if !case.arrangement.is_packed() {
        return Ok(apart);
    }
    let lie = |arrangement| WeightLayout { orientation: Orientation::InOut, arrangement };
    let apart = OwnedGateUp::new(apart, lie(Arrangement::Separate))?;
    apart.view().convert(lie(case.arrangement))?.tensors().iter().map(Matrix::try_clone).collect()
}
