//! The gated linear layer.

use std::marker::PhantomData;

use swiglu_core::{
    Activation, Element, GateUpRef, GatedLinearParams, Half, MatrixMut, MatrixRef, Numerics, Path,
    Plan, Problem, QuantizedGatedLinearParams, Result, Rounding, RowSteps,
};

use super::linear::Linear;
use super::pass::{each_row, linear_map};
use super::plan;
use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::epilogue::{Gated, Rows};
use crate::panels::Panels;
use crate::quant::QuantizedPanels;
use crate::weights::Weights;
use crate::workspace::Workspaces;

/// The fused layer: gate and up in one set of panels, or the three separate operations.
#[derive(Debug)]
pub(super) enum GatedKernel<T> {
    Fused(Weights<T>),
    Unfused(Box<Halves<T>>),
}

/// Gate and up as layers of their own.
#[derive(Debug)]
pub(super) struct Halves<T> {
    gate: Linear<T>,
    up: Linear<T>,
}

/// A gated linear layer whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct GatedLinear<T> {
    pub(super) cpu: Cpu,
    problem: Problem,
    pub(super) kernel: GatedKernel<T>,
    pub(super) workspaces: Workspaces,
}

impl<T: Element> GatedLinear<T> {
    /// Packs the weights for the fused kernel.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a bias does not fit the weights;
    /// [`swiglu_core::Error::Unavailable`] if there is no memory for them.
    pub fn new(cpu: &Cpu, params: &GatedLinearParams<'_, T>) -> Result<Self> {
        Self::with_path(cpu, params, Path::Fused)
    }

    /// Packs the weights for the given path. The unfused one runs two linear maps, each with the
    /// same matrix kernel, and the activation over their results, which lie in memory as T between
    /// them: it cannot keep accumulators, so [`Rounding::Fused`] becomes [`Rounding::PreRound`], as
    /// [`Self::numerics`] then says.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cpu: &Cpu, params: &GatedLinearParams<'_, T>, path: Path) -> Result<Self> {
        Self::within(cpu, params, path, RowSteps::NONE)
    }

    /// The layer of a block with these row steps: with a sparse gate all of a row is known before any of it
    /// is a factor, so it takes the unfused path.
    pub(super) fn within(
        cpu: &Cpu,
        params: &GatedLinearParams<'_, T>,
        path: Path,
        steps: RowSteps,
    ) -> Result<Self> {
        params.validate()?;
        let path = plan::path(path, steps);
        let w = &params.weights;
        let (order, orientation) = (params.numerics.into(), w.layout().orientation);
        let half = |half, bias| {
            Linear::new(cpu, w.intermediate(), w.hidden(), order, orientation, bias, &|h| {
                w.locate(half, h)
            })
        };
        let kernel = match path {
            Path::Fused => {
                let panels = Panels::gated(cpu, w, [params.gate_bias, params.up_bias])?;
                GatedKernel::Fused(Weights::Dense(panels))
            }
            Path::Unfused => GatedKernel::Unfused(Box::new(Halves {
                gate: half(Half::Gate, params.gate_bias)?,
                up: half(Half::Up, params.up_bias)?,
            })),
        };
        Ok(Self::with(cpu, params.problem(0), kernel, steps))
    }

    fn with(cpu: &Cpu, problem: Problem, kernel: GatedKernel<T>, steps: RowSteps) -> Self {
        let mut problem = Problem { rows: steps.before_h(), ..problem };
        let is_unfused = matches!(kernel, GatedKernel::Unfused(_));
        if is_unfused && problem.numerics.rounding == Rounding::Fused {
            problem.numerics.rounding = Rounding::PreRound;
        }
        Self { cpu: cpu.clone(), problem, kernel, workspaces: Workspaces::default() }
    }

    /// Packs quantised weights as they are: their bits stay, in the order of the fused kernel. x and
    /// h are of T, and products are summed with the accuracy of `f32`.
    ///
    /// # Errors
    /// As [`QuantizedGatedLinearParams::validate`];
    /// [`swiglu_core::Error::Unavailable`] if there is no memory for the weights.
    pub fn quantized(cpu: &Cpu, params: &QuantizedGatedLinearParams<'_>) -> Result<Self> {
        Self::quantized_within(cpu, params, RowSteps::NONE)
    }

    /// As [`Self::within`].
    pub(super) fn quantized_within(
        cpu: &Cpu,
        params: &QuantizedGatedLinearParams<'_>,
        steps: RowSteps,
    ) -> Result<Self> {
        params.validate()?;
        let half = |w, bias| Linear::quantized(cpu, w, params.numerics.into(), bias);
        let kernel = match plan::path(Path::Fused, steps) {
            Path::Fused => {
                GatedKernel::Fused(Weights::Quantized(QuantizedPanels::gated(cpu, params)?))
            }
            Path::Unfused => GatedKernel::Unfused(Box::new(Halves {
                gate: half(params.gate, params.gate_bias)?,
                up: half(params.up, params.up_bias)?,
            })),
        };
        Ok(Self::with(cpu, params.problem(0, T::DTYPE), kernel, steps))
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
    /// Fused or not.
    pub fn path(&self) -> Path {
        match self.kernel {
            GatedKernel::Fused(_) => Path::Fused,
            GatedKernel::Unfused(_) => Path::Unfused,
        }
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        self.cpu.plan(Problem { m, ..self.problem }, self.path())
    }

    fn check(&self, x: MatrixRef<'_, T>, out: &MatrixMut<'_, T>) -> Result<()> {
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        out.expect_shape("output", [x.rows(), self.intermediate()])
    }

    /// Writes h `[M, H]` for x `[M, K]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if x or out has another shape.
    pub fn forward(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        self.check(x, &out)?;
        match &self.kernel {
            GatedKernel::Fused(weights) => {
                let ordered = (weights, self.problem.numerics.into());
                linear_map(&self.cpu, ordered, &self.workspaces, x, out, |out| {
                    self.epilogue::<T>(weights, out)
                })
            }
            GatedKernel::Unfused(halves) => self.unfused(halves, x, out),
        }
    }

    /// What happens to the sums: h as values of T, stored as O.
    pub(super) fn epilogue<O: Element>(&self, weights: &Weights<T>, out: Rows<O>) -> Gated<T, O> {
        Gated {
            activation: self.problem.activation,
            numerics: self.problem.numerics,
            bias: weights.bias(),
            out,
            element: PhantomData,
        }
    }

    /// Three operations, gate and up in memory between them, and the gate's row step.
    fn unfused(
        &self,
        halves: &Halves<T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        let (m, h) = (x.rows(), self.intermediate());
        self.workspaces.with(|ws| {
            halves.gate.forward(x, buffer_matrix(&mut ws.x, m, h)?)?;
            if let Some(sparsity) = self.problem.rows.sparsity {
                let gate = buffer_matrix::<T>(&mut ws.x, m, h)?;
                let rounding = self.problem.numerics.rounding;
                each_row(&self.cpu, gate, |row| sparsity.apply(rounding, row));
            }
            halves.up.forward(x, buffer_matrix(&mut ws.h, m, h)?)?;
            let inputs = unfused_arrangement(&ws.x, &ws.h, m, h)?;
            self.cpu.activation(&self.problem.activation, self.problem.numerics, inputs, out)
        })
    }
}

fn unfused_arrangement<'a, T: Element>(
    gate: &'a Buffer,
    up: &'a Buffer,
    m: usize,
    h: usize,
) -> Result<GateUpRef<'a, T>> {
    // SAFETY: both buffers hold at least m·h initialised values of T.
    let view = |b: &'a Buffer| unsafe { std::slice::from_raw_parts(b.as_ptr().cast::<T>(), m * h) };
    GateUpRef::separate(MatrixRef::new(view(gate), m, h)?, MatrixRef::new(view(up), m, h)?)
}

/// A matrix in a buffer, which grows to hold it.
pub(super) fn buffer_matrix<T: Element>(
    buffer: &mut Buffer,
    m: usize,
    n: usize,
) -> Result<MatrixMut<'_, T>> {
    buffer.reserve(m * n * size_of::<T>())?;
    // SAFETY: the buffer holds at least m·n zeroed values of T.
    let data = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), m * n) };
    MatrixMut::new(data, m, n)
}
