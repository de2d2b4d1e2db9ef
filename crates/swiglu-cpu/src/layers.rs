//! Layers with packed weights.

use swiglu_core::{
    Activation, Element, GatedLinearParams, Matrix, MatrixMut, MatrixRef, MlpParams, Numerics,
    Orientation, OwnedGateUp, Path, Plan, Problem, Result,
};

use crate::cpu::Cpu;

/// A gated linear layer whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct GatedLinear<T> {
    cpu: Cpu,
    path: Path,
    problem: Problem,
    weights: OwnedGateUp<T>,
    gate_bias: Option<Vec<f32>>,
    up_bias: Option<Vec<f32>>,
}

impl<T: Element> GatedLinear<T> {
    /// Packs the weights for the fused kernel.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a bias does not fit the weights.
    pub fn new(cpu: &Cpu, params: &GatedLinearParams<'_, T>) -> Result<Self> {
        Self::with_path(cpu, params, Path::Fused)
    }

    /// Packs the weights for the given path.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cpu: &Cpu, params: &GatedLinearParams<'_, T>, path: Path) -> Result<Self> {
        params.validate()?;
        Ok(Self {
            cpu: cpu.clone(),
            path,
            problem: params.problem(0),
            weights: params.weights.convert(params.weights.layout())?,
            gate_bias: params.gate_bias.map(<[f32]>::to_vec),
            up_bias: params.up_bias.map(<[f32]>::to_vec),
        })
    }

    fn params(&self) -> GatedLinearParams<'_, T> {
        GatedLinearParams {
            weights: self.weights.view(),
            gate_bias: self.gate_bias.as_deref(),
            up_bias: self.up_bias.as_deref(),
            activation: self.problem.activation,
            numerics: self.problem.numerics,
        }
    }

    /// K.
    pub fn hidden(&self) -> usize {
        self.problem.hidden
    }
    /// H.
    pub fn intermediate(&self) -> usize {
        self.problem.intermediate
    }
    /// The activation.
    pub fn activation(&self) -> Activation {
        self.problem.activation
    }
    /// The numerics mode.
    pub fn numerics(&self) -> Numerics {
        self.problem.numerics
    }
    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        self.cpu.plan(Problem { m, ..self.problem }, self.path, &[], "")
    }

    /// Writes h `[M, H]` for x `[M, K]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if x or out has another shape.
    pub fn forward(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        crate::naive::gated_linear(&self.params(), x, out)
    }
}

/// A feed-forward block whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct Mlp<T> {
    gated: GatedLinear<T>,
    down: Matrix<T>,
    down_orientation: Orientation,
    down_bias: Option<Vec<f32>>,
    problem: Problem,
}

impl<T: Element> Mlp<T> {
    /// Packs the weights for the fused kernels.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree.
    pub fn new(cpu: &Cpu, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::with_path(cpu, params, Path::Fused)
    }

    /// Packs the weights for the given path.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cpu: &Cpu, params: &MlpParams<'_, T>, path: Path) -> Result<Self> {
        params.validate()?;
        Ok(Self {
            gated: GatedLinear::with_path(cpu, &params.gated, path)?,
            down: params.down.to_dtype(),
            down_orientation: params.down_orientation,
            down_bias: params.down_bias.map(<[f32]>::to_vec),
            problem: params.problem(0),
        })
    }

    /// The gated linear layer.
    pub fn gated(&self) -> &GatedLinear<T> {
        &self.gated
    }
    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        self.gated.cpu.plan(Problem { m, ..self.problem }, self.gated.path, &[], "")
    }

    /// Writes y `[M, K]` for x `[M, K]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if x or out has another shape.
    pub fn forward(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        let params = MlpParams {
            gated: self.gated.params(),
            down: self.down.view(),
            down_orientation: self.down_orientation,
            down_bias: self.down_bias.as_deref(),
        };
        crate::naive::mlp(&params, x, out)
    }
}
