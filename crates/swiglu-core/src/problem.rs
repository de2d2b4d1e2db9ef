//! What is to be computed: parameters of a layer, and the problem a plan is made for.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::activation::Activation;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::{GateUpWeights, Orientation, WeightLayout};
use crate::matrix::MatrixRef;
use crate::numerics::Numerics;
use crate::quant::{QuantizedType, QuantizedTypes};
use crate::rows::{RowParams, RowSteps};

/// The three operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// gate, up → h = act(gate, up).
    Activation,
    /// x → h = act(x·Wg + bg, x·Wu + bu).
    GatedLinear,
    /// x → y = h·Wd + bd.
    Mlp,
}

impl Op {
    /// `activation`, `gated-linear` or `mlp`.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Activation => "activation",
            Op::GatedLinear => "gated-linear",
            Op::Mlp => "mlp",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Weights, biases, activation and numerics of a gated linear layer, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct GatedLinearParams<'a, T> {
    /// Gate and up weights.
    pub weights: GateUpWeights<'a, T>,
    /// bg, H values.
    pub gate_bias: Option<&'a [f32]>,
    /// bu, H values.
    pub up_bias: Option<&'a [f32]>,
    /// The activation.
    pub activation: Activation,
    /// Where values are rounded.
    pub numerics: Numerics,
}

pub(crate) fn expect_len(what: &str, bias: Option<&[f32]>, expected: usize) -> Result<()> {
    match bias {
        Some(b) if b.len() != expected => Err(Error::Shape {
            what: what.to_owned(),
            expected: format!("[{expected}]"),
            given: format!("[{}]", b.len()),
        }),
        _ => Ok(()),
    }
}

impl<'a, T: Element> GatedLinearParams<'a, T> {
    /// Parameters without biases and with the default numerics of T.
    pub fn new(weights: GateUpWeights<'a, T>, activation: Activation) -> Self {
        let numerics = Numerics::default_for(T::DTYPE);
        Self { weights, gate_bias: None, up_bias: None, activation, numerics }
    }

    /// Checks the biases against the weights.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn validate(&self) -> Result<()> {
        expect_len("gate bias", self.gate_bias, self.weights.intermediate())?;
        expect_len("up bias", self.up_bias, self.weights.intermediate())
    }

    /// The problem of `m` tokens.
    pub fn problem(&self, m: usize) -> Problem {
        Problem {
            op: Op::GatedLinear,
            m,
            hidden: self.weights.hidden(),
            intermediate: self.weights.intermediate(),
            dtype: T::DTYPE,
            activation: self.activation,
            numerics: self.numerics,
            layout: self.weights.layout(),
            bias: self.gate_bias.is_some() || self.up_bias.is_some(),
            quantized: None,
            rows: RowSteps::NONE,
        }
    }
}

/// A gated linear layer and the down projection behind it, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct MlpParams<'a, T> {
    /// The gated linear layer.
    pub gated: GatedLinearParams<'a, T>,
    /// Wd, from H to K features.
    pub down: MatrixRef<'a, T>,
    /// Which dimension of Wd is the row.
    pub down_orientation: Orientation,
    /// bd, K values.
    pub down_bias: Option<&'a [f32]>,
    /// What is computed from whole rows between the products.
    pub rows: RowParams<'a>,
}

impl<'a, T: Element> MlpParams<'a, T> {
    /// A block without a down bias and steps of whole rows.
    pub fn new(
        gated: GatedLinearParams<'a, T>,
        down: MatrixRef<'a, T>,
        down_orientation: Orientation,
    ) -> Self {
        Self { gated, down, down_orientation, down_bias: None, rows: RowParams::NONE }
    }

    /// Output features of the down projection.
    pub fn out_features(&self) -> usize {
        self.down_orientation.shape(self.down.rows(), self.down.cols())[0]
    }

    /// Checks all shapes against each other.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn validate(&self) -> Result<()> {
        self.gated.validate()?;
        let w = &self.gated.weights;
        let expected = self.down_orientation.shape(w.hidden(), w.intermediate());
        self.down.expect_shape(&format!("down weight ({})", self.down_orientation), expected)?;
        expect_len("down bias", self.down_bias, w.hidden())?;
        self.rows.validate(w.intermediate())
    }

    /// The weight from intermediate feature `h` to output feature `k`.
    pub fn down_at(&self, k: usize, h: usize) -> T {
        match self.down_orientation {
            Orientation::OutIn => self.down.row(k)[h],
            Orientation::InOut => self.down.row(h)[k],
        }
    }

    /// The problem of `m` tokens.
    pub fn problem(&self, m: usize) -> Problem {
        let gated = self.gated.problem(m);
        let (bias, rows) = (gated.bias || self.down_bias.is_some(), self.rows.steps);
        Problem { op: Op::Mlp, bias, rows, ..gated }
    }
}

/// What is computed, as data: the key a plan is chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// The operation.
    pub op: Op,
    /// M, tokens.
    pub m: usize,
    /// K, input features; 0 for the activation operation.
    pub hidden: usize,
    /// H, intermediate features.
    pub intermediate: usize,
    /// Element type of inputs and output, and of weights that are not quantised.
    pub dtype: DType,
    /// The activation.
    pub activation: Activation,
    /// Where values are rounded.
    pub numerics: Numerics,
    /// How weights (or, for the activation operation, its inputs) lie.
    pub layout: WeightLayout,
    /// Whether any bias is added.
    pub bias: bool,
    /// The types of the weights where they are quantised: inputs and output are still of `dtype`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantized: Option<QuantizedTypes>,
    /// What is computed from whole rows between the products.
    #[serde(default, skip_serializing_if = "RowSteps::is_none")]
    pub rows: RowSteps,
}

impl Problem {
    /// Floating-point operations of the linear maps, a multiply-add counted as two; for the
    /// activation operation, one product per element.
    pub fn flops(&self) -> f64 {
        let (m, k, h) = (self.m as f64, self.hidden as f64, self.intermediate as f64);
        match self.op {
            Op::Activation => m * h,
            Op::GatedLinear => 4.0 * m * k * h,
            Op::Mlp => 6.0 * m * k * h,
        }
    }

    /// Bytes of weights, each read at least once.
    pub fn weight_bytes(&self) -> f64 {
        let (k, h) = (self.hidden, self.intermediate);
        let of = |kind: Option<QuantizedType>, rows, cols| match kind {
            Some(kind) => kind.bytes(rows, cols),
            None => k as f64 * h as f64 * self.dtype.size() as f64,
        };
        let gate_up = 2.0 * of(self.quantized.map(|q| q.gate_up), h, k);
        match self.op {
            Op::Activation => 0.0,
            Op::GatedLinear => gate_up,
            Op::Mlp => gate_up + of(self.quantized.and_then(|q| q.down), k, h),
        }
    }

    /// Bytes that must move at least: weights and inputs read once, the output written once; none
    /// where there are no tokens.
    pub fn compulsory_bytes(&self) -> f64 {
        if self.m == 0 {
            return 0.0;
        }
        let (m, size) = (self.m as f64, self.dtype.size() as f64);
        let (k, h) = (self.hidden as f64, self.intermediate as f64);
        self.weight_bytes()
            + m * size
                * match self.op {
                    Op::Activation => 3.0 * h,
                    Op::GatedLinear => k + h,
                    Op::Mlp => 2.0 * k,
                }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} m={}", self.op, self.dtype, self.m)?;
        if self.op != Op::Activation {
            write!(f, " hidden={}", self.hidden)?;
        }
        write!(f, " intermediate={} {}", self.intermediate, self.activation)?;
        write!(f, " {} [{}]", self.numerics, self.layout)?;
        if let Some(types) = self.quantized {
            write!(f, " {types}")?;
        }
        if self.bias {
            f.write_str(" bias")?;
        }
        if self.rows.is_none() { Ok(()) } else { write!(f, " {}", self.rows) }
    }
}
