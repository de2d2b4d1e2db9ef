//! Cases with quantised weights.

use half::f16;

use crate::activation::Activation;
use crate::bounds::{self, Reference};
use crate::conformance::{Backend, Case, Outcome, Padded, biases, judge};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::WeightLayout;
use crate::numerics::Numerics;
use crate::problem::Op;
use crate::quant::{
    QuantizedGatedLinearParams, QuantizedMatrix, QuantizedMlpParams, QuantizedType, QuantizedTypes,
    Scale,
};
use crate::random;
use crate::rows::OwnedRowParams;

/// No row, one, some, odd counts, a block of more than few, more than every tile has, more than one block.
const ROWS: [usize; 8] = [0, 1, 2, 3, 7, 11, 16, 33];
/// Output features below, at and above every vector width; odd, because only inputs come in blocks.
const FEATURES: [usize; 6] = [1, 17, 32, 45, 64, 131];

/// The cases of quantised weights for the given types: every type meets every number of rows, both
/// operations, and every activation, numerics mode and stride, without the full product. The down
/// weight is of the next type in the list in every other case.
pub fn quantized_suite(types: &[QuantizedType], dtypes: &[DType]) -> Vec<Case> {
    let family = Activation::family();
    let numerics: Vec<Numerics> = Numerics::all().collect();
    let mut cases = Vec::new();
    for (t, &gate_up) in types.iter().enumerate() {
        for (d, &dtype) in dtypes.iter().enumerate() {
            for op in [Op::GatedLinear, Op::Mlp] {
                for (r, &m) in ROWS.iter().enumerate() {
                    let i = t * 13 + d * 5 + r * 7 + op as usize;
                    let down = types[(t + i % 2) % types.len()];
                    let blocks = [1, 3, 2, 5][(r + d) % 4];
                    // Rows of the down weight are whole blocks of its own type, and its outputs are
                    // the inputs of gate and up.
                    let (down, intermediate) = match op {
                        Op::Mlp => (Some(down), inputs(down, [1, 3, 2][(r + t) % 3])),
                        _ => (None, FEATURES[(r + t + d) % FEATURES.len()]),
                    };
                    cases.push(Case {
                        op,
                        m,
                        hidden: inputs(gate_up, blocks),
                        intermediate,
                        dtype,
                        activation: family[i % family.len()],
                        numerics: numerics[(i / 2) % numerics.len()],
                        layout: WeightLayout::HF,
                        bias: i.is_multiple_of(3),
                        padding: [0, 3, 16][r % 3],
                        scale: if i % 5 == 4 { 6.0 } else { 1.0 },
                        seed: i as u64,
                        quantized: Some(QuantizedTypes { gate_up, down }),
                    });
                }
            }
        }
    }
    cases
}

/// Seeded quantised parameters of a case.
pub struct QuantizedParameters {
    gate: QuantizedMatrix,
    up: QuantizedMatrix,
    down: Option<QuantizedMatrix>,
    biases: Option<[Vec<f32>; 3]>,
    activation: Activation,
    numerics: Numerics,
    rows: OwnedRowParams,
}

impl QuantizedParameters {
    /// The parameters of `case`, with biases of T.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if inputs are not whole blocks.
    pub fn new<T: Element>(case: &Case, types: QuantizedTypes) -> Result<Self> {
        let (k, h) = (case.hidden, case.intermediate);
        let weights = |tag, block, rows, cols| blocks(case.seed ^ tag, block, rows, cols);
        Ok(Self {
            gate: weights(0x67, types.gate_up, h, k)?,
            up: weights(0x75, types.gate_up, h, k)?,
            down: types.down.map(|block| weights(0x64, block, k, h)).transpose()?,
            biases: biases::<T>(case),
            activation: case.activation,
            numerics: case.numerics,
            rows: OwnedRowParams::default(),
        })
    }

    fn within(self, rows: OwnedRowParams) -> Self {
        Self { rows, ..self }
    }

    /// As gated linear parameters.
    pub fn gated(&self) -> QuantizedGatedLinearParams<'_> {
        QuantizedGatedLinearParams {
            gate: self.gate.view(),
            up: self.up.view(),
            gate_bias: self.biases.as_ref().map(|b| b[0].as_slice()),
            up_bias: self.biases.as_ref().map(|b| b[1].as_slice()),
            activation: self.activation,
            numerics: self.numerics,
        }
    }

    /// As feed-forward parameters, if there is a down weight.
    pub fn mlp(&self) -> Option<QuantizedMlpParams<'_>> {
        let down = self.down.as_ref()?.view();
        let down_bias = self.biases.as_ref().map(|b| b[2].as_slice());
        let rows = self.rows.view();
        Some(QuantizedMlpParams { gated: self.gated(), down, down_bias, rows })
    }
}

/// Inputs that are so many blocks of a type; of types without, around the edges of what kernels take at
/// a time and of what shares a scale.
fn inputs(kind: QuantizedType, blocks: usize) -> usize {
    match kind {
        QuantizedType::Block(block) => block.elements() * blocks,
        _ => [1, 33, 130, 64, 131, 257][blocks],
    }
}

/// Weights of variance about 1/columns in ordinary blocks, with others among them: scales that are
/// zero, negative or subnormal (in f16, where blocks have them; next to nothing in f32), and scales of
/// sub-blocks at their extremes.
fn blocks(seed: u64, kind: QuantizedType, rows: usize, cols: usize) -> Result<QuantizedMatrix> {
    let deviation = 1.0 / (cols.max(1) as f32).sqrt();
    let (mut data, mut scales) =
        random::quantized_matrix(seed, kind, rows, cols, deviation)?.into_parts();
    for (b, scale) in scales.iter_mut().enumerate() {
        *scale *= match random::bits(seed ^ 0x6B, b as u64) % 6 {
            0 => 0.0,
            1 | 2 => -1.0,
            // Products with codes and outliers stay normal numbers: decoded weights of f32 do.
            3 => 1e-30,
            _ => 1.0,
        };
    }
    let QuantizedType::Block(block) = kind else {
        return QuantizedMatrix::scaled(kind, data, scales, rows, cols);
    };
    for (b, bytes) in data.chunks_exact_mut(block.bytes()).enumerate() {
        let kind = random::bits(seed ^ 0x6B, b as u64);
        match block.scale() {
            Scale::Half(at) => {
                let d = f16::from_le_bytes([bytes[at], bytes[at + 1]]);
                let d = match kind % 6 {
                    0 => f16::ZERO,
                    1 | 2 => -d,
                    3 => f16::from_bits(d.to_bits() & 0x83FF | 1),
                    _ => d,
                };
                bytes[at..at + 2].copy_from_slice(&d.to_le_bytes());
            }
            // There is no zero, and next to nothing is 2^-101.
            Scale::Exponent if kind % 6 == 3 => bytes[0] = 27,
            Scale::Exponent | Scale::FourE4m3 | Scale::Nibbles(_) => {}
        }
        // All bits set is 63 of 6 bits and −1 of 8; the highest alone is −128 of 8.
        let extreme = match kind >> 8 & 7 {
            0 => 0,
            1 => 0xFF,
            2 => 0x80,
            _ => continue,
        };
        bytes[block.sub_scales()].fill(extreme);
    }
    QuantizedMatrix::from_vec(block, data, rows, cols)
}

/// One input of each row far above the others, as activations of models have them: it must not cost the
/// others their low bits where its own weight is 0.
fn add_outliers<T: Element>(x: &mut Padded<T>) {
    let factor = if T::DTYPE == DType::F16 { 1024.0 } else { 65536.0 };
    for (i, row) in x.data.chunks_mut(x.stride.max(1)).enumerate() {
        if let Some(v) = row.get_mut(i * 7 % x.cols.max(1)) {
            *v = T::from_f32(v.to_f32() * factor);
        }
    }
}

/// What is asked of backends in a case, and what is right.
struct Question<T> {
    case: Case,
    x: Padded<T>,
    parameters: QuantizedParameters,
    reference: Reference,
}

impl<T: Element> Question<T> {
    fn new(case: &Case, types: QuantizedTypes, rows: OwnedRowParams) -> Result<Self> {
        let mut x = Padded::<T>::random(case.seed, case.m, case.hidden, case.padding, case.scale);
        if case.seed % 4 == 1 {
            add_outliers(&mut x);
        }
        let parameters = QuantizedParameters::new::<T>(case, types)?.within(rows);
        let reference = match (case.op, parameters.mlp()) {
            (Op::GatedLinear, _) => bounds::quantized_gated_linear(x.view()?, &parameters.gated())?,
            (Op::Mlp, Some(params)) => bounds::quantized_mlp(x.view()?, &params)?,
            _ => return Err(without_weights(case)),
        };
        Ok(Self { case: *case, x, parameters, reference })
    }

    fn ask<B: Backend>(&self, backend: &B) -> Result<Outcome> {
        let Self { case, x, parameters, reference } = self;
        let columns = if case.op == Op::Mlp { case.hidden } else { case.intermediate };
        let mut out = Padded::<T>::poisoned(case.m, columns, case.padding);
        match (case.op, parameters.mlp()) {
            (Op::Mlp, Some(params)) => {
                backend.quantized_mlp(&params, x.view()?, out.view_mut()?)?
            }
            _ => backend.quantized_gated_linear(&parameters.gated(), x.view()?, out.view_mut()?)?,
        }
        judge(reference, &out)
    }
}

fn without_weights(case: &Case) -> Error {
    let why = "it has no quantised weights for the operation".into();
    Error::Unsupported { what: case.to_string(), why }
}

/// Computes and judges one case.
pub(super) fn run<T: Element, B: Backend>(
    backend: &B,
    case: &Case,
    types: QuantizedTypes,
    rows: OwnedRowParams,
) -> Result<Outcome> {
    Question::<T>::new(case, types, rows)?.ask(backend)
}

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod tests;
