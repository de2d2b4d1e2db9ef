//! Parameters of layers with quantised weights.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::activation::Activation;
use crate::dtype::DType;
use crate::error::{Error, Result, expect_len};
use crate::numerics::Numerics;
use crate::problem::{Op, Problem};
use crate::quant::{QuantizedRef, QuantizedType};
use crate::rows::RowParams;
use crate::setters;

/// The types of a layer's quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct QuantizedTypes {
    /// Of gate and up.
    pub gate_up: QuantizedType,
    /// Of the down weight; none for a gated linear layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down: Option<QuantizedType>,
}

impl QuantizedTypes {
    /// Types of gate and up, and of the down weight.
    pub fn new(gate_up: impl Into<QuantizedType>, down: Option<impl Into<QuantizedType>>) -> Self {
        Self { gate_up: gate_up.into(), down: down.map(Into::into) }
    }

    /// All weights of one type, those of a whole block or of a gated linear layer.
    pub fn of(op: Op, kind: impl Into<QuantizedType>) -> Self {
        let kind = kind.into();
        Self { gate_up: kind, down: (op == Op::Mlp).then_some(kind) }
    }
}

impl fmt::Display for QuantizedTypes {
    /// `Q4_0`, or `Q4_K+Q6_K` where the down weight is of another type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.down {
            Some(down) if down != self.gate_up => write!(f, "{}+{down}", self.gate_up),
            _ => self.gate_up.fmt(f),
        }
    }
}

/// Quantised weights, biases, activation and numerics of a gated linear layer, borrowed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct QuantizedGatedLinearParams<'a> {
    /// Wg, `[H, K]`.
    pub gate: QuantizedRef<'a>,
    /// Wu, `[H, K]`, of the same type.
    pub up: QuantizedRef<'a>,
    /// bg, H values.
    pub gate_bias: Option<&'a [f32]>,
    /// bu, H values.
    pub up_bias: Option<&'a [f32]>,
    /// The activation.
    pub activation: Activation,
    /// Where values are rounded.
    pub numerics: Numerics,
}

impl<'a> QuantizedGatedLinearParams<'a> {
    /// Parameters without biases and with the default numerics of inputs and outputs of `dtype`.
    pub fn new(
        gate: QuantizedRef<'a>,
        up: QuantizedRef<'a>,
        activation: Activation,
        dtype: DType,
    ) -> Self {
        let numerics = Numerics::default_for(dtype);
        Self { gate, up, gate_bias: None, up_bias: None, activation, numerics }
    }

    setters! {
        /// bg, H values, or none.
        with_gate_bias(gate_bias: impl Into<Option<&'a [f32]>>, gate_bias.into());
        /// bu, H values, or none.
        with_up_bias(up_bias: impl Into<Option<&'a [f32]>>, up_bias.into());
        /// Another Wg.
        with_gate(gate: QuantizedRef<'a>);
        /// Another Wu.
        with_up(up: QuantizedRef<'a>);
        /// Another activation.
        with_activation(activation: Activation);
        /// Rounds otherwise than [`Numerics::default_for`] the inputs' type.
        with_numerics(numerics: Numerics);
    }

    /// K, input features.
    pub fn hidden(&self) -> usize {
        self.gate.cols()
    }

    /// H, intermediate features.
    pub fn intermediate(&self) -> usize {
        self.gate.rows()
    }

    /// Checks weights and biases against each other.
    ///
    /// # Errors
    /// [`Error::Shape`]; [`Error::Unsupported`] if gate and up are of different types.
    pub fn validate(&self) -> Result<()> {
        self.up.expect_shape("up weight", self.gate.shape())?;
        if self.gate.kind() != self.up.kind() {
            return Err(Error::Unsupported {
                what: format!(
                    "gate weight as {}, up weight as {}",
                    self.gate.kind(),
                    self.up.kind()
                ),
                why: "quantised gate and up weights must be of one type; decode them".into(),
            });
        }
        expect_len("gate bias", self.gate_bias, self.intermediate())?;
        expect_len("up bias", self.up_bias, self.intermediate())
    }

    /// The problem of `m` tokens of `dtype`.
    pub fn problem(&self, m: usize, dtype: DType) -> Problem {
        let (hidden, intermediate) = (self.hidden(), self.intermediate());
        Problem::new(Op::GatedLinear, m, hidden, intermediate, dtype, self.activation)
            .with_numerics(self.numerics)
            .with_bias(self.gate_bias.is_some() || self.up_bias.is_some())
            .with_quantized(QuantizedTypes { gate_up: self.gate.kind(), down: None })
    }
}

/// A gated linear layer and the down projection behind it, both quantised, borrowed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct QuantizedMlpParams<'a> {
    /// The gated linear layer.
    pub gated: QuantizedGatedLinearParams<'a>,
    /// Wd, `[K, H]`; its type may be another one.
    pub down: QuantizedRef<'a>,
    /// bd, K values.
    pub down_bias: Option<&'a [f32]>,
    /// What is computed from whole rows between the products.
    pub rows: RowParams<'a>,
}

impl<'a> QuantizedMlpParams<'a> {
    /// A block without a down bias and steps of whole rows.
    pub fn new(gated: QuantizedGatedLinearParams<'a>, down: QuantizedRef<'a>) -> Self {
        Self { gated, down, down_bias: None, rows: RowParams::NONE }
    }

    setters! {
        /// bd, K values, or none.
        with_down_bias(down_bias: impl Into<Option<&'a [f32]>>, down_bias.into());
        /// What is computed from whole rows between the products.
        with_rows(rows: RowParams<'a>);
        /// Another gated linear layer.
        with_gated(gated: QuantizedGatedLinearParams<'a>);
        /// Another Wd.
        with_down(down: QuantizedRef<'a>);
    }

    /// Checks all shapes against each other.
    ///
    /// # Errors
    /// As [`QuantizedGatedLinearParams::validate`].
    pub fn validate(&self) -> Result<()> {
        self.gated.validate()?;
        let expected = [self.gated.hidden(), self.gated.intermediate()];
        self.down.expect_shape("down weight", expected)?;
        expect_len("down bias", self.down_bias, self.gated.hidden())?;
        self.rows.validate(self.gated.intermediate())
    }

    /// The problem of `m` tokens of `dtype`.
    pub fn problem(&self, m: usize, dtype: DType) -> Problem {
        let gated = self.gated.problem(m, dtype);
        let gate_up = self.gated.gate.kind();
        Problem {
            op: Op::Mlp,
            bias: gated.bias || self.down_bias.is_some(),
            quantized: Some(QuantizedTypes { gate_up, down: Some(self.down.kind()) }),
            rows: self.rows.steps,
            ..gated
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::BlockType;

    #[test]
    fn mixed_gate_and_up_are_refused_and_bytes_are_those_of_the_blocks() {
        let (q4, q6) = (vec![0u8; 3 * 144], vec![0u8; 3 * 210]);
        let gate = QuantizedRef::new(BlockType::Q4_K, &q4, 3, 256).unwrap();
        let up = QuantizedRef::new(BlockType::Q6_K, &q6, 3, 256).unwrap();
        let mixed = QuantizedGatedLinearParams::new(gate, up, Activation::SWIGLU, DType::F32);
        let e = mixed.validate().unwrap_err().to_string();
        assert!(e.contains("Q4_K") && e.contains("Q6_K") && e.contains("decode"), "{e}");
        let gated = QuantizedGatedLinearParams { up: gate, ..mixed };
        gated.validate().unwrap();
        let problem = gated.problem(2, DType::F32);
        assert_eq!(problem.weight_bytes(), 2.0 * 3.0 * 144.0);
        assert_eq!(problem.compulsory_bytes(), 2.0 * 3.0 * 144.0 + 2.0 * 4.0 * (256.0 + 3.0));

        let (wide, tall) = (vec![0u8; 32 * 34], vec![0u8; 32 * 18]);
        let gate = QuantizedRef::new(BlockType::Q8_0, &wide, 32, 32).unwrap();
        let down = QuantizedRef::new(BlockType::Q4_0, &tall, 32, 32).unwrap();
        let gated = QuantizedGatedLinearParams::new(gate, gate, Activation::SWIGLU, DType::F32);
        let (down_bias, rows) = (Some(&[0.0; 31][..]), RowParams::NONE);
        let mlp = QuantizedMlpParams { gated, down, down_bias, rows };
        assert!(matches!(mlp.validate(), Err(Error::Shape { .. })));
        let problem = mlp.problem(1, DType::Bf16);
        assert_eq!(problem.weight_bytes(), 32.0 * (2.0 * 34.0 + 18.0));
        assert!(problem.to_string().contains("Q8_0+Q4_0") && problem.bias, "{problem}");
        let json = serde_json::to_string(&problem).unwrap();
        assert!(json.contains(r#""quantized":{"gate_up":"Q8_0","down":"Q4_0"}"#), "{json}");
        assert_eq!(serde_json::from_str::<Problem>(&json).unwrap(), problem);
        let dense = Problem { quantized: None, ..problem };
        assert!(!serde_json::to_string(&dense).unwrap().contains("quantized"));
    }
}
