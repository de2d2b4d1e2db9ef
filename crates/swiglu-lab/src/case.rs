//! A case: one problem to be computed, with everything that decides what it costs.

use std::fmt;

use serde::{Deserialize, Serialize};
use swiglu_core::{
    Activation, Arrangement, DType, Numerics, Op, Orientation, Pass, Problem, QuantizedType,
    QuantizedTypes, WeightLayout,
};

use crate::text::{self, named};

/// The most rows or columns that a case has: far more than any layer, and few enough that products
/// of two of them are exact.
pub const MAX_EXTENT: usize = 1 << 30;

named! {
    /// What is computed.
    pub enum CaseOp {
        /// gate, up `[M, H]` → h = act(gate, up).
        Activation = "activation",
        /// ∂L/∂h, gate, up `[M, H]` → ∂L/∂gate, ∂L/∂up, arranged as gate and up are.
        ActivationBackward = "activation-backward",
        /// x `[M, K]` → h = act(x·Wg + bg, x·Wu + bu), `[M, H]`.
        GatedLinear = "gated-linear",
        /// x `[M, K]` → y = h·Wd + bd, `[M, K]`.
        Mlp = "mlp",
        /// x, ∂L/∂y `[M, K]` → y, and the gradients of x and of the three weights: a forward and a backward pass.
        MlpTrain = "mlp-train",
        /// x `[M, H]` → x: the cost of moving bytes.
        Copy = "copy",
    }
}

impl CaseOp {
    /// Whether there are weights, and so a hidden size.
    pub const fn has_weights(self) -> bool {
        self.is_block() || matches!(self, CaseOp::GatedLinear)
    }

    /// What a plan calls it, of a training step its forward pass; none of a copy and of gradients by themselves.
    pub const fn op(self) -> Option<Op> {
        match self {
            CaseOp::Activation => Some(Op::Activation),
            CaseOp::GatedLinear => Some(Op::GatedLinear),
            CaseOp::Mlp | CaseOp::MlpTrain => Some(Op::Mlp),
            CaseOp::ActivationBackward | CaseOp::Copy => None,
        }
    }

    /// Whether there is a down projection.
    pub const fn is_block(self) -> bool {
        matches!(self, CaseOp::Mlp | CaseOp::MlpTrain)
    }
}

named! {
    /// Where an experiment runs.
    #[derive(Default)]
    pub enum DeviceKind {
        /// The processor.
        #[default]
        Cpu = "cpu",
        /// The first CUDA device.
        Cuda = "cuda",
    }
}

named! {
    /// Whether a call finds its data in the caches.
    pub enum Heat {
        /// One set of data, used over and over.
        Hot = "hot",
        /// Copies of the data that together exceed the caches take turns.
        Cold = "cold",
    }
}

/// One problem, resolved: nothing is left to defaults. This is what a peer is given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Where it runs.
    pub device: DeviceKind,
    /// What is computed.
    pub op: CaseOp,
    /// M, rows.
    pub m: usize,
    /// K, input features; 0 where there are no weights.
    pub hidden: usize,
    /// H, intermediate features; the columns of an activation or a copy.
    pub intermediate: usize,
    /// A model that has this shape, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Element type of inputs and output, and of weights that are not quantised.
    pub dtype: DType,
    /// The type of the weights, of all matrices alike, where they are quantised; `Q4_0` in JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<QuantizedType>,
    /// The activation.
    pub activation: Activation,
    /// Where values are rounded; `fused+fast` in JSON.
    #[serde(with = "text")]
    pub numerics: Numerics,
    /// How gate and up share tensors; `separate`, `gate-first`, `up-first`, `interleaved-G`.
    #[serde(with = "text")]
    pub arrangement: Arrangement,
    /// Which dimension of the weights is the row; `out-in` or `in-out`.
    #[serde(with = "text")]
    pub orientation: Orientation,
    /// Whether every linear map adds a bias.
    #[serde(default)]
    pub bias: bool,
    /// Whether the data is found in the caches.
    pub heat: Heat,
}

impl Case {
    /// A case of this shape (M, K, H), with all else as it is where nobody says otherwise.
    pub fn new(device: DeviceKind, op: CaseOp, shape: [usize; 3], dtype: DType) -> Self {
        let [m, hidden, intermediate] = shape;
        Self {
            device,
            op,
            m,
            hidden: if op.has_weights() { hidden } else { 0 },
            intermediate,
            model: None,
            dtype,
            weights: None,
            activation: Activation::SWIGLU,
            numerics: Numerics::default_for(dtype),
            arrangement: Arrangement::Separate,
            orientation: Orientation::OutIn,
            bias: false,
            heat: Heat::Cold,
        }
    }

    /// Why its weights cannot be quantised so; none where they can.
    pub fn refusal_of(&self, kind: QuantizedType) -> Option<String> {
        let inputs = [self.hidden, self.intermediate];
        let inputs = if self.op.is_block() { &inputs[..] } else { &inputs[..1] };
        let broken = inputs.iter().find(|n| !n.is_multiple_of(kind.elements()));
        match self.op {
            CaseOp::MlpTrain => Some("quantised weights have no gradients".into()),
            op if !op.has_weights() => Some(format!("the {op} has no weights")),
            _ => broken
                .map(|n| format!("{n} inputs are not whole {kind} blocks of {}", kind.elements())),
        }
    }

    /// What the case is known by within its experiment. The model's name is not part of it: two
    /// models of one shape are one case.
    pub fn key(&self) -> String {
        let (op, weighs) = (self.op, self.op.has_weights());
        let parts = [
            Some(format!("{op} m={}", self.m)),
            weighs.then(|| format!("hidden={}", self.hidden)),
            Some(format!("intermediate={} {}", self.intermediate, self.dtype)),
            self.weights.map(|block| format!("weights={block}")),
            (op != CaseOp::Copy)
                .then(|| format!("{} {} {}", self.activation, self.numerics, self.arrangement)),
            weighs.then(|| self.orientation.to_string()),
            self.bias.then(|| "bias".to_owned()),
            Some(self.heat.to_string()),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }

    /// `[rows, columns]` of the output; of gradients, that of gate and that of up beside each other. Of a training step the
    /// matrices with K columns lie one behind the other: y, ∂L/∂x, ∂L/∂Wg, ∂L/∂Wu and the transpose of ∂L/∂Wd.
    pub fn output_shape(&self) -> [usize; 2] {
        match self.op {
            CaseOp::Mlp => [self.m, self.hidden],
            CaseOp::MlpTrain => [2 * self.m + 3 * self.intermediate, self.hidden],
            CaseOp::ActivationBackward => [self.m, 2 * self.intermediate],
            CaseOp::Activation | CaseOp::GatedLinear | CaseOp::Copy => [self.m, self.intermediate],
        }
    }

    /// The problem as a plan sees it, of a training step its forward pass; none for a copy and for gradients by
    /// themselves, which are not planned.
    pub fn problem(&self) -> Option<Problem> {
        let op = self.op.op()?;
        Some(
            Problem::new(op, self.m, self.hidden, self.intermediate, self.dtype, self.activation)
                .with_numerics(self.numerics)
                .with_layout(WeightLayout {
                    orientation: self.orientation,
                    arrangement: self.arrangement,
                })
                .with_bias(self.bias)
                .with_quantized(self.weights.map(|block| QuantizedTypes::of(op, block))),
        )
    }

    /// Bytes that must move at least.
    pub fn compulsory_bytes(&self) -> f64 {
        let tensor = (self.m * self.intermediate * self.dtype.size()) as f64;
        match self.problem() {
            Some(problem) if self.op == CaseOp::MlpTrain => {
                let of = |pass| problem.with_pass(pass).compulsory_bytes();
                of(Pass::Saving) + of(Pass::Backward)
            }
            Some(problem) => problem.compulsory_bytes(),
            // Three are read and two are written.
            None if self.op == CaseOp::ActivationBackward => 5.0 * tensor,
            None => 2.0 * tensor,
        }
    }

    /// Floating-point operations of the linear maps; for an activation one per element, for its
    /// gradients one per element of each.
    pub fn flops(&self) -> f64 {
        match self.op {
            CaseOp::ActivationBackward => 2.0 * (self.m * self.intermediate) as f64,
            // A backward pass has twice the products.
            CaseOp::MlpTrain => 3.0 * self.problem().map_or(0.0, |problem| problem.flops()),
            _ => self.problem().map_or(0.0, |problem| problem.flops()),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.key())
    }
}
