//! The inputs of a case, derived from its seed as every peer derives them.

use swiglu::{
    Activation, Arrangement, BlockType, Element, GateUpRef, GateUpWeights, GatedLinearParams,
    Matrix, MlpParams, Numerics, Orientation, WeightLayout,
};
use swiglu_core::{OwnedGateUp, Result};
use swiglu_lab::peer::protocol::{
    ACTIVATION_SCALE, STREAM_BIAS, STREAM_DOWN, STREAM_GATE, STREAM_OUT_GRAD, STREAM_UP, STREAM_X,
};
use swiglu_lab::{Case, CaseOp};

use crate::args::LayerOp;
use crate::layer::Params;
use crate::quantized::SyntheticBlocks;
use crate::random;

/// x `[M, K]`.
pub(super) fn x<T: Element>(case: &Case, seed: u64) -> Result<Matrix<T>> {
    random::normal(seed ^ STREAM_X, case.m, case.hidden, 1.0)
}

/// ∂L/∂h `[M, H]`.
pub(super) fn out_grad<T: Element>(case: &Case, seed: u64) -> Result<Matrix<T>> {
    random::normal(seed ^ STREAM_OUT_GRAD, case.m, case.intermediate, 1.0)
}

/// The weights of a layer, in the layout of the case.
pub(super) struct LayerInputs<T> {
    gate_up: OwnedGateUp<T>,
    down: Option<Matrix<T>>,
    orientation: Orientation,
    biases: Option<[Vec<f32>; 3]>,
    activation: Activation,
    numerics: Numerics,
}

impl<T: Element> LayerInputs<T> {
    pub(super) fn derive(case: &Case, seed: u64) -> Result<Self> {
        let (k, h) = (case.hidden, case.intermediate);
        let weight = |stream, rows, cols: usize| -> Result<Matrix<T>> {
            random::normal(seed ^ stream, rows, cols, 1.0 / (cols.max(1) as f32).sqrt())
        };
        let out_in = WeightLayout::HF;
        let layout = WeightLayout { orientation: case.orientation, arrangement: case.arrangement };
        let mut gate_up =
            OwnedGateUp::new(vec![weight(STREAM_GATE, h, k)?, weight(STREAM_UP, h, k)?], out_in)?;
        if layout != out_in {
            gate_up = gate_up.view().convert(layout)?;
        }
        let down = match case.op {
            CaseOp::Mlp => Some(weight(STREAM_DOWN, k, h)?),
            CaseOp::Activation
            | CaseOp::ActivationBackward
            | CaseOp::GatedLinear
            | CaseOp::Copy => None,
        };
        let down = match (down, case.orientation) {
            (Some(down), Orientation::InOut) => Some(transposed(&down)?),
            (down, _) => down,
        };
        let biases = biases(case, seed);
        Ok(Self {
            gate_up,
            down,
            orientation: case.orientation,
            biases,
            activation: case.activation,
            numerics: case.numerics,
        })
    }

    pub(super) fn params(&self) -> Params<'_, T> {
        let [gate_bias, up_bias, down_bias] =
            [0, 1, 2].map(|i| self.biases.as_ref().map(|biases| biases[i].as_slice()));
        let weights: GateUpWeights<'_, T> = self.gate_up.view();
        let (activation, numerics) = (self.activation, self.numerics);
        let gated = GatedLinearParams { weights, gate_bias, up_bias, activation, numerics };
        match &self.down {
            None => Params::GatedLinear(gated),
            Some(down) => Params::Mlp(MlpParams {
                gated,
                down: down.view(),
                down_orientation: self.orientation,
                down_bias,
            }),
        }
    }
}

/// The weights of a layer of quantised blocks.
pub(super) fn blocks(case: &Case, block: BlockType, seed: u64) -> Result<SyntheticBlocks> {
    let op = match case.op {
        CaseOp::Mlp => LayerOp::Mlp,
        CaseOp::Activation | CaseOp::ActivationBackward | CaseOp::GatedLinear | CaseOp::Copy => {
            LayerOp::GatedLinear
        }
    };
    let seeds = [STREAM_GATE, STREAM_UP, STREAM_DOWN].map(|stream| seed ^ stream);
    SyntheticBlocks::random(seeds, op, block.into(), [case.hidden, case.intermediate])
}

/// bg, bu and bd of a case that has them.
pub(super) fn biases(case: &Case, seed: u64) -> Option<[Vec<f32>; 3]> {
    let bias = |stream: u64, n: usize| -> Vec<f32> {
        (0..n as u64).map(|i| swiglu_core::random::normal(seed ^ stream, i)).collect()
    };
    let ([gate, up, down], h) = (STREAM_BIAS, case.intermediate);
    case.bias.then(|| [bias(gate, h), bias(up, h), bias(down, case.hidden)])
}

fn transposed<T: Element>(m: &Matrix<T>) -> Result<Matrix<T>> {
    let [rows, cols] = [m.rows(), m.cols()];
    let from = m.as_slice();
    let values = (0..cols).flat_map(|c| (0..rows).map(move |r| from[r * cols + c]));
    Matrix::from_values(values, cols, rows)
}

/// Gate and up, or their gradients, of the tensors that hold them.
pub(super) fn gate_up<T: Element>(
    tensors: &[Matrix<T>],
    arrangement: Arrangement,
) -> Result<GateUpRef<'_, T>> {
    match tensors {
        [gate, up] => GateUpRef::separate(gate.view(), up.view()),
        tensors => GateUpRef::packed(tensors[0].view(), arrangement),
    }
}

/// Gate and up of the activation, in the arrangement of the case.
pub(super) struct ActivationInputs<T> {
    tensors: Vec<Matrix<T>>,
    arrangement: Arrangement,
}

impl<T: Element> ActivationInputs<T> {
    pub(super) fn derive(case: &Case, seed: u64) -> Result<Self> {
        let (m, h, arrangement) = (case.m, case.intermediate, case.arrangement);
        let half = |stream| random::normal(seed ^ stream, m, h, ACTIVATION_SCALE);
        let (gate, up) = (half(STREAM_GATE)?, half(STREAM_UP)?);
        if !arrangement.is_packed() {
            return Ok(Self { tensors: vec![gate, up], arrangement });
        }
        let mut packed = Matrix::zeros(m, 2 * h)?;
        for (row, out) in packed.as_mut_slice().chunks_exact_mut((2 * h).max(1)).enumerate() {
            for (half, from) in [(swiglu::Half::Gate, &gate), (swiglu::Half::Up, &up)] {
                for (i, &value) in from.view().row(row).iter().enumerate() {
                    out[arrangement.locate(half, i, h).1] = value;
                }
            }
        }
        Ok(Self { tensors: vec![packed], arrangement })
    }

    /// One tensor where gate and up share it, else two.
    pub(super) fn tensors(&self) -> &[Matrix<T>] {
        &self.tensors
    }

    pub(super) fn view(&self) -> Result<GateUpRef<'_, T>> {
        gate_up(&self.tensors, self.arrangement)
    }

    pub(super) fn copy(&self) -> Result<Self> {
        let tensors = self.tensors.iter().map(Matrix::try_clone).collect::<Result<_>>()?;
        Ok(Self { tensors, arrangement: self.arrangement })
    }
}
