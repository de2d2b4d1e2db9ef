//! One conformance suite for every backend: the cases, their seeded inputs and the judgement.
//!
//! A backend implements [`Backend`]; [`suite`] lists the cases; [`run`] computes one and compares
//! it with the float64 reference. Outputs are poisoned before the call and the gaps between output
//! rows are checked after it.

use std::fmt;

use half::{bf16, f16};
use serde::Serialize;

use crate::activation::Activation;
use crate::bounds::{self, Judgement, Reference};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::gradients::{GradientsMut, SavePolicy};
use crate::layout::{
    Arrangement, GateUpRef, GateUpWeights, Orientation, OwnedGateUp, WeightLayout,
};
use crate::matrix::{Matrix, MatrixMut, MatrixRef};
use crate::numerics::Numerics;
use crate::problem::{GatedLinearParams, MlpParams, Op};
use crate::quant::{QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedType, QuantizedTypes};
use crate::random;
use crate::rows::{Norm, NormKind, OwnedRowParams, RowParams, RowSteps, Sparsity};
use crate::strided::StridedRef;

mod gradients;
mod quantized;

pub use gradients::{GradientCase, Lie, Scaled, gradient_suite, run_gradients};
pub use quantized::{QuantizedParameters, quantized_suite};

/// What a backend must compute to be judged.
pub trait Backend {
    /// How the backend names itself in a table.
    fn name(&self) -> String;
    /// What a factor of a product may be rounded by before it is multiplied, relative to it: 0,
    /// except where tensor cores multiply `f32` as tf32 because that was asked for.
    fn factor_roundoff(&self, _dtype: DType) -> f64 {
        0.0
    }
    /// h = act(gate, up).
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()>;
    /// h = act(x·Wg + bg, x·Wu + bu).
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn gated_linear<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()>;
    /// y = h·Wd + bd.
    ///
    /// # Errors
    /// Whatever the backend reports.
    fn mlp<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()>;
    /// Whether the backend computes backward passes.
    fn trains(&self) -> bool {
        false
    }
    /// The gradients of h that have a place, from `dh`, by a layer that keeps what `policy` says.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless overridden; whatever the backend reports.
    fn gated_linear_backward<T: Element>(
        &self,
        _params: &GatedLinearParams<'_, T>,
        _policy: SavePolicy,
        _x: MatrixRef<'_, T>,
        _dh: StridedRef<'_, T>,
        _into: GradientsMut<'_, T>,
    ) -> Result<()> {
        Err(gradients::refused(&self.name(), Op::GatedLinear))
    }
    /// The gradients of y, as [`Self::gated_linear_backward`].
    ///
    /// # Errors
    /// As [`Self::gated_linear_backward`].
    fn mlp_backward<T: Element>(
        &self,
        _params: &MlpParams<'_, T>,
        _policy: SavePolicy,
        _x: MatrixRef<'_, T>,
        _dy: StridedRef<'_, T>,
        _into: GradientsMut<'_, T>,
    ) -> Result<()> {
        Err(gradients::refused(&self.name(), Op::Mlp))
    }
    /// The types of quantised weights that the backend computes with.
    fn quantized_types(&self) -> &[QuantizedType] {
        &[]
    }
    /// [`Self::gated_linear`] with quantised weights.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless overridden; whatever the backend reports.
    fn quantized_gated_linear<T: Element>(
        &self,
        params: &QuantizedGatedLinearParams<'_>,
        _x: MatrixRef<'_, T>,
        _out: MatrixMut<'_, T>,
    ) -> Result<()> {
        Err(without_quantized(self.name(), params.gate.kind()))
    }
    /// [`Self::mlp`] with quantised weights.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless overridden; whatever the backend reports.
    fn quantized_mlp<T: Element>(
        &self,
        params: &QuantizedMlpParams<'_>,
        _x: MatrixRef<'_, T>,
        _out: MatrixMut<'_, T>,
    ) -> Result<()> {
        Err(without_quantized(self.name(), params.gated.gate.kind()))
    }
}

fn without_quantized(backend: String, block: QuantizedType) -> Error {
    Error::Unsupported {
        what: format!("{block} weights on {backend}"),
        why: "it computes with decoded weights only".into(),
    }
}

/// One case.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Case {
    /// The operation.
    pub op: Op,
    /// M.
    pub m: usize,
    /// K; ignored by the activation operation.
    pub hidden: usize,
    /// H.
    pub intermediate: usize,
    /// Element type.
    pub dtype: DType,
    /// The activation.
    pub activation: Activation,
    /// Numerics mode.
    pub numerics: Numerics,
    /// Layout of weights, or arrangement of the activation's inputs.
    pub layout: WeightLayout,
    /// Whether biases are added.
    pub bias: bool,
    /// Elements added to every row stride.
    pub padding: usize,
    /// Scale of the inputs: 1 is ordinary, larger ones reach the tails and overflow.
    pub scale: f32,
    /// Seed of the inputs.
    pub seed: u64,
    /// The types of the weights, where they are quantised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantized: Option<QuantizedTypes>,
}

impl Case {
    /// A plain case `[M, K, H]`: SwiGLU in the default numerics, dense, no biases, seed 0.
    pub fn new(op: Op, [m, hidden, intermediate]: [usize; 3], dtype: DType) -> Self {
        Self {
            op,
            m,
            hidden,
            intermediate,
            dtype,
            activation: Activation::SWIGLU,
            numerics: Numerics::default_for(dtype),
            layout: WeightLayout::HF,
            bias: false,
            padding: 0,
            scale: 1.0,
            seed: 0,
            quantized: None,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}{} {}x{}x{} {} {} [{}]{} pad={} scale={} seed={}",
            self.op,
            self.dtype,
            self.quantized.map_or(String::new(), |types| format!(" {types}")),
            self.m,
            self.hidden,
            self.intermediate,
            self.activation,
            self.numerics,
            self.layout,
            if self.bias { " bias" } else { "" },
            self.padding,
            self.scale,
            self.seed,
        )
    }
}

/// Sizes that break others: one row, odd and prime extents, below and above every tile and vector
/// width, empty dimensions.
const SHAPES: [[usize; 3]; 15] = [
    [1, 64, 64],
    [1, 7, 172],
    [2, 33, 31],
    [3, 172, 40],
    [5, 1, 16],
    [8, 100, 96],
    [12, 65, 33],
    [13, 48, 17],
    [16, 90, 172],
    [25, 31, 65],
    [73, 57, 34],
    [0, 24, 32],
    [3, 0, 20],
    [2, 24, 0],
    [4, 9, 1],
];

const ARRANGEMENTS: [Arrangement; 5] = [
    Arrangement::Separate,
    Arrangement::PackedGateFirst,
    Arrangement::PackedUpFirst,
    Arrangement::Interleaved { group: 1 },
    Arrangement::Interleaved { group: 4 },
];

/// The cases for the given element types: every shape, activation, numerics mode, layout and
/// stride meets every other kind at least once, without the full product.
pub fn suite(dtypes: &[DType]) -> Vec<Case> {
    let family = Activation::family();
    let numerics: Vec<Numerics> = Numerics::all().collect();
    let mut cases = Vec::new();
    for (d, &dtype) in dtypes.iter().enumerate() {
        for op in [Op::Activation, Op::GatedLinear, Op::Mlp] {
            for (s, &[m, hidden, intermediate]) in SHAPES.iter().enumerate() {
                // Co-prime strides through the lists pair all kinds across the shapes.
                for turn in 0..6 {
                    let i = s * 7 + turn * 5 + d * 3 + op as usize;
                    let arrangement = ARRANGEMENTS[(s + turn * 2) % ARRANGEMENTS.len()];
                    let arrangement = match arrangement.validate(intermediate) {
                        Ok(()) => arrangement,
                        Err(_) => Arrangement::Interleaved { group: 1 },
                    };
                    cases.push(Case {
                        op,
                        m,
                        hidden,
                        intermediate,
                        dtype,
                        activation: family[i % family.len()],
                        numerics: numerics[turn],
                        layout: WeightLayout {
                            orientation: Orientation::ALL[(s + turn) % 2],
                            arrangement,
                        },
                        bias: (s + turn).is_multiple_of(3),
                        padding: [0, 3, 16][(s + turn) % 3],
                        scale: if turn == 5 { 6.0 } else { 1.0 },
                        seed: i as u64,
                        quantized: None,
                    });
                }
            }
            cases.extend(cross_of_modes(op, dtype));
        }
    }
    cases
}

/// Every activation in every mode at one shape.
fn cross_of_modes(op: Op, dtype: DType) -> impl Iterator<Item = Case> {
    Activation::family().into_iter().enumerate().flat_map(move |(a, activation)| {
        Numerics::all().enumerate().map(move |(n, numerics)| Case {
            op,
            m: 3,
            hidden: 40,
            intermediate: 37,
            dtype,
            activation,
            numerics,
            layout: WeightLayout::HF,
            bias: false,
            padding: 0,
            scale: 3.0,
            seed: 1000 + (a * 6 + n) as u64,
            quantized: None,
        })
    })
}

/// Every row step alone and both, for [`run_within`] with cases of whole blocks.
///
/// # Errors
/// None that these values have.
pub fn row_steps() -> Result<[RowSteps; 4]> {
    let sparse = RowSteps::NONE.with_sparsity(Sparsity::of(0.8)?);
    let rms = Norm::new(NormKind::Rms, 1e-5)?;
    let layer = Norm::new(NormKind::Layer, 1e-6)?;
    let none = RowSteps::NONE;
    Ok([sparse, none.with_norm(rms), none.with_norm(layer), sparse.with_norm(rms)])
}

/// A judged case.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// What the comparison found.
    pub judgement: Judgement,
    /// An error outside the compared elements, for example a write between two rows.
    pub fault: Option<String>,
}

impl Outcome {
    /// Whether the case passed.
    pub fn passed(&self) -> bool {
        self.fault.is_none() && self.judgement.passed()
    }
}

/// Computes and judges one case.
///
/// # Errors
/// Whatever the backend reports.
pub fn run<B: Backend>(backend: &B, case: &Case) -> Result<Outcome> {
    run_within(backend, case, RowSteps::NONE)
}

/// Computes and judges one case of a block with row steps.
///
/// # Errors
/// As [`run`]; [`Error::Unsupported`] for steps of a case that is no block.
pub fn run_within<B: Backend>(backend: &B, case: &Case, steps: RowSteps) -> Result<Outcome> {
    if case.op != Op::Mlp {
        steps.expect_none(&format!("in {}", case.op), "take a case of a block")?;
    }
    match case.dtype {
        DType::F32 => run_as::<f32, B>(backend, case, steps),
        DType::F16 => run_as::<f16, B>(backend, case, steps),
        DType::Bf16 => run_as::<bf16, B>(backend, case, steps),
    }
}

/// A matrix with padded rows.
struct Padded<T> {
    data: Vec<T>,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<T: Element> Padded<T> {
    fn random(seed: u64, rows: usize, cols: usize, padding: usize, scale: f32) -> Self {
        let stride = cols + padding;
        let data = (0..rows * stride)
            .map(|i| T::from_f32(random::normal(seed, i as u64) * scale))
            .collect();
        Self { data, rows, cols, stride }
    }

    /// Filled with NaN, which no result may keep and no gap may lose.
    fn poisoned(rows: usize, cols: usize, padding: usize) -> Self {
        let stride = cols + padding;
        Self { data: vec![T::from_f32(f32::NAN); rows * stride], rows, cols, stride }
    }

    fn view(&self) -> Result<MatrixRef<'_, T>> {
        MatrixRef::with_stride(&self.data, self.rows, self.cols, self.stride)
    }

    fn view_mut(&mut self) -> Result<MatrixMut<'_, T>> {
        MatrixMut::with_stride(&mut self.data, self.rows, self.cols, self.stride)
    }

    fn gap_written(&self) -> Option<String> {
        (0..self.rows)
            .flat_map(|r| (self.cols..self.stride).map(move |c| (r, c)))
            .find(|&(r, c)| self.data[r * self.stride + c].to_f32().is_finite())
            .map(|(r, c)| format!("wrote between rows, at row {r} column {c}"))
    }
}

/// Seeded parameters of a case: weights of variance 1/K, so pre-activations have variance scale².
pub struct Parameters<T> {
    weights: OwnedGateUp<T>,
    down: Matrix<T>,
    down_orientation: Orientation,
    biases: Option<[Vec<f32>; 3]>,
    activation: Activation,
    numerics: Numerics,
}

impl<T: Element> Parameters<T> {
    /// The parameters of `case`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the layout does not fit the shape.
    pub fn new(case: &Case) -> Result<Self> {
        let (k, h) = (case.hidden, case.intermediate);
        let scale = 1.0 / (k.max(1) as f32).sqrt();
        let gate = random::normal_matrix::<T>(case.seed ^ 0x67, h, k, scale)?;
        let up = random::normal_matrix::<T>(case.seed ^ 0x75, h, k, scale)?;
        let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?
            .convert(case.layout)?;
        let down_orientation = case.layout.orientation;
        let [rows, cols] = down_orientation.shape(k, h);
        let down_scale = 1.0 / (h.max(1) as f32).sqrt();
        let down = random::normal_matrix::<T>(case.seed ^ 0x64, rows, cols, down_scale)?;
        let biases = biases::<T>(case);
        let (activation, numerics) = (case.activation, case.numerics);
        Ok(Self { weights, down, down_orientation, biases, activation, numerics })
    }

    /// As gated linear parameters.
    pub fn gated(&self) -> GatedLinearParams<'_, T> {
        GatedLinearParams {
            weights: self.weights.view(),
            gate_bias: self.biases.as_ref().map(|b| b[0].as_slice()),
            up_bias: self.biases.as_ref().map(|b| b[1].as_slice()),
            activation: self.activation,
            numerics: self.numerics,
        }
    }

    /// As feed-forward parameters.
    pub fn mlp(&self) -> MlpParams<'_, T> {
        MlpParams {
            gated: self.gated(),
            down: self.down.view(),
            down_orientation: self.down_orientation,
            down_bias: self.biases.as_ref().map(|b| b[2].as_slice()),
            rows: RowParams::NONE,
        }
    }
}

/// bg, bu and bd of a case that has them: values of T, as a model of T stores them.
fn biases<T: Element>(case: &Case) -> Option<[Vec<f32>; 3]> {
    let bias = |tag: u64, n: usize| {
        let b = |i| T::from_f32(random::normal(case.seed ^ tag, i as u64) * 0.5).to_f32();
        (0..n).map(b).collect::<Vec<f32>>()
    };
    let (k, h) = (case.hidden, case.intermediate);
    case.bias.then(|| [bias(0x1, h), bias(0x2, h), bias(0x3, k)])
}

/// The row steps of a case with seeded values of its norm around 1 and 0.
fn rows(case: &Case, steps: RowSteps) -> OwnedRowParams {
    let values = |tag: u64, mean: f32| -> Vec<f32> {
        let value = |j| mean + 0.2 * random::normal(case.seed ^ tag, j);
        (0..case.intermediate as u64).map(value).collect()
    };
    let weight = steps.norm.map(|_| values(0x4, 1.0));
    let bias = steps.norm.filter(|norm| norm.kind() == NormKind::Layer);
    OwnedRowParams::new(steps, weight, bias.map(|_| values(0x5, 0.0)))
}

fn judge<T: Element>(reference: &Reference, out: &Padded<T>) -> Result<Outcome> {
    Ok(Outcome { judgement: reference.judge(out.view()?)?, fault: out.gap_written() })
}

fn run_as<T: Element, B: Backend>(backend: &B, case: &Case, steps: RowSteps) -> Result<Outcome> {
    let (m, h, pad) = (case.m, case.intermediate, case.padding);
    if case.op == Op::Activation {
        let arrangement = case.layout.arrangement;
        let cols = if arrangement.is_packed() { 2 * h } else { h };
        let scale = 2.0 * case.scale;
        let first = Padded::<T>::random(case.seed, m, cols, pad, scale);
        let second = Padded::<T>::random(case.seed ^ 0x75, m, h, pad + 1, scale);
        let inputs = if arrangement.is_packed() {
            GateUpRef::packed(first.view()?, arrangement)?
        } else {
            GateUpRef::separate(first.view()?, second.view()?)?
        };
        let mut out = Padded::<T>::poisoned(m, h, pad);
        backend.activation(&case.activation, case.numerics, inputs, out.view_mut()?)?;
        return judge(&bounds::activation(&case.activation, case.numerics, &inputs)?, &out);
    }
    if let Some(types) = case.quantized {
        return quantized::run::<T, B>(backend, case, types, rows(case, steps));
    }
    let x = Padded::<T>::random(case.seed, m, case.hidden, pad, case.scale);
    let parameters = Parameters::<T>::new(case)?;
    match case.op {
        Op::GatedLinear => {
            let mut out = Padded::<T>::poisoned(m, h, pad);
            backend.gated_linear(&parameters.gated(), x.view()?, out.view_mut()?)?;
            let roundoff = backend.factor_roundoff(T::DTYPE);
            judge(&bounds::gated_linear_with(x.view()?, &parameters.gated(), roundoff)?, &out)
        }
        Op::Mlp => {
            let mut out = Padded::<T>::poisoned(m, case.hidden, pad);
            let rows = rows(case, steps);
            let params = MlpParams { rows: rows.view(), ..parameters.mlp() };
            backend.mlp(&params, x.view()?, out.view_mut()?)?;
            let roundoff = backend.factor_roundoff(T::DTYPE);
            judge(&bounds::mlp_with(x.view()?, &params, roundoff)?, &out)
        }
        Op::Activation => Err(Error::Unsupported {
            what: case.to_string(),
            why: "the activation operation has no weights".into(),
        }),
    }
}

#[cfg(test)]
#[path = "conformance_tests.rs"]
mod tests;
