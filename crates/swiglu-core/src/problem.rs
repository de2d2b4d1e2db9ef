//! What is to be computed: parameters of a layer, and the problem a plan is made for.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::activation::Activation;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result, expect_len};
use crate::layout::{GateUpWeights, Orientation, WeightLayout};
use crate::matrix::MatrixRef;
use crate::numerics::Numerics;
use crate::quant::{QuantizedType, QuantizedTypes};
use crate::rows::{RowParams, RowSteps};
use crate::setters;

/// The three operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
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

/// Which pass over a layer a problem is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pass {
    /// The result alone.
    #[default]
    Forward,
    /// The result, and what a backward pass needs.
    Saving,
    /// The gradients.
    Backward,
}

impl Pass {
    /// `forward`, `saving` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Saving => "saving",
            Pass::Backward => "backward",
        }
    }

    pub(crate) fn is_forward(&self) -> bool {
        *self == Pass::Forward
    }
}

/// Whether gradients replace what lies where they go, or are added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Accumulate {
    /// They replace it, whatever it was: without tokens by zeros.
    #[default]
    Overwrite,
    /// They are added to it, with one rounding: without tokens it stays.
    Add,
}

impl Accumulate {
    pub(crate) fn is_overwrite(&self) -> bool {
        *self == Accumulate::Overwrite
    }
}

/// Weights, biases, activation and numerics of a gated linear layer, borrowed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
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

impl<'a, T: Element> GatedLinearParams<'a, T> {
    /// Parameters without biases and with the default numerics of T.
    pub fn new(weights: GateUpWeights<'a, T>, activation: Activation) -> Self {
        let numerics = Numerics::default_for(T::DTYPE);
        Self { weights, gate_bias: None, up_bias: None, activation, numerics }
    }

    setters! {
        /// bg, H values, or none.
        with_gate_bias(gate_bias: impl Into<Option<&'a [f32]>>, gate_bias.into());
        /// bu, H values, or none.
        with_up_bias(up_bias: impl Into<Option<&'a [f32]>>, up_bias.into());
        /// Other weights.
        with_weights(weights: GateUpWeights<'a, T>);
        /// Another activation.
        with_activation(activation: Activation);
        /// Rounds otherwise than [`Numerics::default_for`] T.
        with_numerics(numerics: Numerics);
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
        let (hidden, intermediate) = (self.weights.hidden(), self.weights.intermediate());
        Problem::new(Op::GatedLinear, m, hidden, intermediate, T::DTYPE, self.activation)
            .with_numerics(self.numerics)
            .with_layout(self.weights.layout())
            .with_bias(self.gate_bias.is_some() || self.up_bias.is_some())
    }
}

/// A gated linear layer and the down projection behind it, borrowed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
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

    setters! {
        /// bd, K values, or none.
        with_down_bias(down_bias: impl Into<Option<&'a [f32]>>, down_bias.into());
        /// What is computed from whole rows between the products.
        with_rows(rows: RowParams<'a>);
        /// Another gated linear layer.
        with_gated(gated: GatedLinearParams<'a, T>);
        /// Another Wd.
        with_down(down: MatrixRef<'a, T>);
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
        let what = format!("down weight ({})", self.down_orientation);
        self.down.expect_shape(&what, expected).map_err(|error| {
            // Which of the weights lies otherwise than it was said to, shapes do not tell.
            let [rows, cols] = expected;
            match error {
                Error::Shape { what, expected, given } if self.down.shape() == [cols, rows] => {
                    let gate_up = w.layout().orientation;
                    let or =
                        format!("{expected} (or gate and up ({gate_up}) are the other way round)");
                    Error::Shape { what, expected: or, given }
                }
                error => error,
            }
        })?;
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

    /// The weights to output feature `k` from each intermediate one, exactly.
    pub(crate) fn widen_down(&self, k: usize, to: &mut [f64]) {
        match self.down_orientation {
            Orientation::OutIn => self.down.widen_row(k, to),
            Orientation::InOut => self.down.widen_column(k, to),
        }
    }

    /// The weights from intermediate feature `h` to each output feature, exactly.
    pub(crate) fn widen_down_from(&self, h: usize, to: &mut [f64]) {
        match self.down_orientation {
            Orientation::OutIn => self.down.widen_column(h, to),
            Orientation::InOut => self.down.widen_row(h, to),
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
#[non_exhaustive]
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
    /// Whether the result, or the gradients are computed.
    #[serde(default, skip_serializing_if = "Pass::is_forward")]
    pub pass: Pass,
    /// Whether gradients of weights are added to what is there.
    #[serde(default, skip_serializing_if = "Accumulate::is_overwrite")]
    pub accumulate: Accumulate,
    /// Groups of tokens, one behind the other, each with weights of its own, as of experts; 1 where all have the same.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub groups: usize,
}

fn one() -> usize {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(groups: &usize) -> bool {
    *groups == 1
}

impl Problem {
    /// A problem with the layout of Hugging Face and the default numerics of `dtype`, without biases, quantised weights and
    /// steps of whole rows.
    pub fn new(
        op: Op,
        m: usize,
        hidden: usize,
        intermediate: usize,
        dtype: DType,
        activation: Activation,
    ) -> Self {
        let (numerics, layout) = (Numerics::default_for(dtype), WeightLayout::HF);
        let (bias, quantized, rows) = (false, None, RowSteps::NONE);
        Self {
            op,
            m,
            hidden,
            intermediate,
            dtype,
            activation,
            numerics,
            layout,
            bias,
            quantized,
            rows,
            pass: Pass::Forward,
            accumulate: Accumulate::Overwrite,
            groups: 1,
        }
    }

    setters! {
        /// Another operation.
        with_op(op: Op);
        /// Another number of tokens.
        with_m(m: usize);
        /// Another K.
        with_hidden(hidden: usize);
        /// Another H.
        with_intermediate(intermediate: usize);
        /// Another element type; numerics stay as they are.
        with_dtype(dtype: DType);
        /// Another activation.
        with_activation(activation: Activation);
        /// Where values are rounded.
        with_numerics(numerics: Numerics);
        /// How weights, or the inputs of an activation, lie.
        with_layout(layout: WeightLayout);
        /// Whether any bias is added.
        with_bias(bias: bool);
        /// The types of quantised weights, or none.
        with_quantized(quantized: impl Into<Option<QuantizedTypes>>, quantized.into());
        /// What is computed from whole rows between the products.
        with_rows(rows: RowSteps);
        /// Another pass.
        with_pass(pass: Pass);
        /// Whether gradients of weights are added to what is there.
        with_accumulate(accumulate: Accumulate);
        /// Groups of tokens with weights of their own.
        with_groups(groups: usize);
    }

    /// Refuses to update a layer of this problem to weights of another one, whose numerics are as the layer's path rounds:
    /// values may differ, and nothing else.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which names what differs.
    pub fn expect_update(&self, given: &Problem) -> Result<()> {
        let said = |p: &Problem| {
            [
                p.op.to_string(),
                format!("hidden={}", p.hidden),
                format!("intermediate={}", p.intermediate),
                p.dtype.to_string(),
                p.activation.to_string(),
                p.numerics.to_string(),
                format!("weights [{}]", p.layout),
                if p.bias { "biases".into() } else { "no biases".into() },
                format!("row steps {}", p.rows),
            ]
        };
        let differs: Vec<_> =
            said(given).into_iter().zip(said(self)).filter(|(a, b)| a != b).collect();
        if differs.is_empty() {
            return Ok(());
        }
        let (given, own): (Vec<_>, Vec<_>) = differs.into_iter().unzip();
        Err(Error::Unsupported {
            what: format!("an update by {} of a layer of {}", given.join(", "), own.join(", ")),
            why: "only the values of weights and biases may change; make another layer".into(),
        })
    }

    /// Refuses by name what no backend computes yet: groups of tokens, quantised weights or norms where there are none, rows that
    /// are not whole blocks, and training of quantised weights, of row steps and of the activation alone.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::OutOfRange`] for extents that a layout or a type does not have.
    pub fn expect_computed(&self) -> Result<()> {
        let unsupported =
            |what: String, why: &str| Err(Error::Unsupported { what, why: why.into() });
        if self.groups != 1 {
            return unsupported(
                format!("a problem of {} groups of tokens", self.groups),
                "a layer has the weights of one group, as of one expert; make one for each, and give it its tokens",
            );
        }
        self.layout.arrangement.validate(self.intermediate)?;
        if let Some(QuantizedTypes { gate_up, down }) = self.quantized {
            if self.op == Op::Activation {
                return unsupported(format!("an {} of {gate_up} weights", self.op), "it has none");
            }
            gate_up.expect_columns(self.hidden)?;
            down.map_or(Ok(()), |down| down.expect_columns(self.intermediate))?;
        }
        if self.op != Op::Mlp {
            let instead = "load the block (Mlp::load)";
            let rows = if self.op == Op::Activation { self.rows } else { self.rows.after_h() };
            rows.expect_none(&format!("in the {}", self.op), instead)?;
        }
        if self.pass == Pass::Forward {
            return Ok(());
        }
        if self.op == Op::Activation {
            return unsupported(
                format!("training of the {}", self.op),
                "it has no weights to train; its gradient is part of that of a layer",
            );
        }
        if let Some(types) = self.quantized {
            return unsupported(
                format!("training of {types} weights"),
                "quantised weights have no gradients; decode them (Weights::decoded)",
            );
        }
        self.rows
            .expect_none("in backward passes", "train the gated linear layer (GatedLinear::load)")
    }

    /// Floating-point operations of the linear maps, a multiply-add counted as two; for the
    /// activation operation, one product per element. A backward pass has twice as many: each map has a gradient of its
    /// input and one of its weights.
    pub fn flops(&self) -> f64 {
        let (m, k, h) = (self.m as f64, self.hidden as f64, self.intermediate as f64);
        let forward = match self.op {
            Op::Activation => m * h,
            Op::GatedLinear => 4.0 * m * k * h,
            Op::Mlp => 6.0 * m * k * h,
        };
        if self.pass == Pass::Backward { 2.0 * forward } else { forward }
    }

    /// Bytes of weights, each read at least once where each group has tokens.
    pub fn weight_bytes(&self) -> f64 {
        let (k, h) = (self.hidden, self.intermediate);
        let of = |kind: Option<QuantizedType>, rows, cols| match kind {
            Some(kind) => kind.bytes(rows, cols),
            None => k as f64 * h as f64 * self.dtype.size() as f64,
        };
        let gate_up = 2.0 * of(self.quantized.map(|q| q.gate_up), h, k);
        let of_group = match self.op {
            Op::Activation => 0.0,
            Op::GatedLinear => gate_up,
            Op::Mlp => gate_up + of(self.quantized.and_then(|q| q.down), k, h),
        };
        self.groups as f64 * of_group
    }

    /// Bytes that must move at least: weights and inputs read once, the output written once; none
    /// where there are no tokens. Of a backward pass also gate and up, and the gradients.
    pub fn compulsory_bytes(&self) -> f64 {
        if self.m == 0 {
            return 0.0;
        }
        let (m, size) = (self.m as f64, self.dtype.size() as f64);
        let (k, h) = (self.hidden as f64, self.intermediate as f64);
        let forward = match self.op {
            Op::Activation => 3.0 * h,
            Op::GatedLinear => k + h,
            Op::Mlp => 2.0 * k,
        };
        match self.pass {
            Pass::Forward => self.weight_bytes() + m * size * forward,
            Pass::Saving => self.weight_bytes() + m * size * (forward + 2.0 * h),
            Pass::Backward => 2.0 * self.weight_bytes() + m * size * (forward + k + 2.0 * h),
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
        if self.pass != Pass::Forward {
            write!(f, " {}", self.pass.name())?;
        }
        if self.accumulate == Accumulate::Add {
            f.write_str(" add")?;
        }
        if self.groups != 1 {
            write!(f, " groups={}", self.groups)?;
        }
        if self.rows.is_none() { Ok(()) } else { write!(f, " {}", self.rows) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Arrangement;

    #[test]
    fn what_nothing_computes_is_refused_by_name() {
        use crate::quant::BlockType;
        use crate::rows::{Norm, NormKind};

        let problem = |op| Problem::new(op, 5, 8, 16, DType::F32, Activation::SWIGLU);
        let refused = |problem: Problem| problem.expect_computed().unwrap_err().to_string();
        assert_eq!(problem(Op::Mlp).expect_computed(), Ok(()));
        assert_eq!(problem(Op::Mlp).with_pass(Pass::Backward).expect_computed(), Ok(()));
        let experts = problem(Op::Mlp).with_groups(8);
        assert_eq!(experts.weight_bytes(), 8.0 * problem(Op::Mlp).weight_bytes());
        assert!(experts.to_string().ends_with("groups=8"), "{experts}");
        assert!(refused(experts).contains("8 groups of tokens"), "{}", refused(experts));
        let activation = problem(Op::Activation).with_pass(Pass::Backward);
        assert!(refused(activation).contains("no weights to train"));
        let norm = RowSteps::NONE.with_norm(Norm::new(NormKind::Rms, 1e-5).unwrap());
        assert!(
            refused(problem(Op::Mlp).with_rows(norm).with_pass(Pass::Saving)).contains("rms-norm")
        );
        let types = QuantizedTypes { gate_up: QuantizedType::I8, down: None };
        let quantized = problem(Op::GatedLinear).with_quantized(types).with_pass(Pass::Backward);
        assert!(refused(quantized).contains("no gradients"));
        let blocks = QuantizedTypes { gate_up: QuantizedType::Block(BlockType::Q8_0), down: None };
        let parts = problem(Op::GatedLinear).with_quantized(blocks);
        assert!(refused(parts).contains("whole Q8_0 blocks of 32"), "{}", refused(parts));
        assert!(refused(problem(Op::Activation).with_quantized(types)).contains("it has none"));
        assert!(refused(problem(Op::GatedLinear).with_rows(norm)).contains("in the gated-linear"));
        let mut interleaved = problem(Op::Mlp);
        interleaved.layout.arrangement = Arrangement::Interleaved { group: 7 };
        assert!(refused(interleaved).contains('7'), "{}", refused(interleaved));
    }

    #[test]
    fn what_a_constructor_refuses_no_file_brings() {
        let norm = |epsilon: &str| format!(r#"{{"kind":"rms","epsilon":{epsilon}}}"#);
        assert!(serde_json::from_str::<crate::rows::Norm>(&norm("1e-5")).is_ok());
        for epsilon in ["0.0", "-1.0"] {
            let error = serde_json::from_str::<crate::rows::Norm>(&norm(epsilon)).unwrap_err();
            assert!(error.to_string().contains("epsilon"), "{error}");
        }
        let interleaved = |group| format!(r#"{{"interleaved":{{"group":{group}}}}}"#);
        assert!(serde_json::from_str::<Arrangement>(&interleaved(1)).is_ok());
        assert!(serde_json::from_str::<Arrangement>(&interleaved(0)).is_err());
    }

    /// Of weights that contradict each other either may be the one that lies otherwise than was said.
    #[test]
    fn shapes_the_other_way_round_are_recognised() {
        let values = [0.0f32; 48];
        let of = |rows, cols| MatrixRef::new(&values, rows, cols).unwrap();
        let refused = |orientation, down: MatrixRef<'_, f32>| {
            let weights = GateUpWeights::separate(of(8, 6), of(8, 6), orientation).unwrap();
            let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
            let params = MlpParams::new(gated, down, Orientation::OutIn);
            params.validate().unwrap_err().to_string()
        };
        assert_eq!(
            refused(Orientation::InOut, of(6, 8)),
            "down weight (out-in): expected [8, 6] (or gate and up (in-out) are the other way \
             round), given [6, 8]"
        );
        assert_eq!(
            refused(Orientation::OutIn, MatrixRef::new(&values[..30], 5, 6).unwrap()),
            "down weight (out-in): expected [6, 8], given [5, 6]"
        );
    }
}
