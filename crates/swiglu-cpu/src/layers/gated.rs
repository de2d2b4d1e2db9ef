//! The gated linear layer.

use swiglu_core::{
    Activation, Element, Error, GateUpRef, GatedLinearParams, Half, MatrixMut, MatrixRef, Numerics,
    Path, Plan, Problem, QuantizedGatedLinearParams, Result, RowSteps,
};

use super::linear::Linear;
use super::pass::{each_row, linear_map, linear_map_bytes, out_rows};
use super::plan;
use super::training::Training;
use crate::buffer::Buffer;
use crate::cpu::{CallOptions, Cpu};
use crate::epilogue::{Gated, Kept, Rows};
use crate::panels::{Panels, Part};
use crate::quant::QuantizedPanels;
use crate::weights::Weights;
use crate::workspace::{Tokens, cut, total};

/// The fused layer: gate and up in one set of panels, or the three separate operations.
#[derive(Debug)]
pub(super) enum GatedKernel<T> {
    Fused(Weights<T>),
    Unfused(Box<Halves<T>>),
}

/// Gate and up as layers of their own.
#[derive(Debug)]
pub(super) struct Halves<T> {
    pub(super) gate: Linear<T>,
    pub(super) up: Linear<T>,
}

/// A gated linear layer whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct GatedLinear<T> {
    pub(super) cpu: Cpu,
    pub(super) problem: Problem,
    pub(super) kernel: GatedKernel<T>,
    pub(super) training: Option<Training<T>>,
    /// Whether an update has failed, and weights are missing.
    pub(super) lost: bool,
}

impl<T: Element> GatedLinear<T> {
    /// Packs the weights for the fused kernel.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a bias does not fit the weights;
    /// [`swiglu_core::Error::OutOfMemory`] if there is no memory for them.
    pub fn new(cpu: &Cpu, params: &GatedLinearParams<'_, T>) -> Result<Self> {
        Self::with_path(cpu, params, Path::Fused)
    }

    /// Packs the weights for the given path. The unfused one runs two linear maps, each with the
    /// same matrix kernel, and the activation over their results, which lie in memory as T between
    /// them: it cannot keep accumulators, so [`Rounding::Fused`](swiglu_core::Rounding::Fused) becomes [`Rounding::PreRound`](swiglu_core::Rounding::PreRound), as
    /// [`Self::numerics`] then says.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cpu: &Cpu, params: &GatedLinearParams<'_, T>, path: Path) -> Result<Self> {
        Self::packed_in(cpu, Buffer::empty(), params, path, RowSteps::NONE)
    }

    /// The layer of a block with these row steps, with the fused weights in this memory if it has the size. With a sparse gate
    /// all of a row is known before any of it is a factor, so it takes the unfused path.
    pub(super) fn packed_in(
        cpu: &Cpu,
        memory: Buffer,
        params: &GatedLinearParams<'_, T>,
        path: Path,
        steps: RowSteps,
    ) -> Result<Self> {
        params.validate()?;
        let path = plan::path(path, steps);
        let w = &params.weights;
        let (order, orientation) = (params.numerics.into(), w.layout().orientation);
        let half = |half, bias| {
            let part = Part { inputs: w.hidden(), orientation, locate: &|h| w.locate(half, h) };
            Linear::of_parts(cpu, Buffer::empty(), (w.intermediate(), order), &[part], bias)
        };
        let kernel = match path {
            Path::Fused => {
                let panels = Panels::gated(cpu, memory, w, [params.gate_bias, params.up_bias])?;
                GatedKernel::Fused(Weights::Dense(panels))
            }
            Path::Unfused => GatedKernel::Unfused(Box::new(Halves {
                gate: half(Half::Gate, params.gate_bias)?,
                up: half(Half::Up, params.up_bias)?,
            })),
        };
        Ok(Self::with(cpu, params.problem(0), kernel, steps))
    }

    /// The memory of the fused weights, which are gone then.
    pub(super) fn take_memory(&mut self) -> Buffer {
        match &mut self.kernel {
            GatedKernel::Fused(weights) => weights.take_memory(),
            GatedKernel::Unfused(_) => Buffer::empty(),
        }
    }

    fn with(cpu: &Cpu, problem: Problem, kernel: GatedKernel<T>, steps: RowSteps) -> Self {
        let mut problem = problem.with_rows(steps.before_h());
        if matches!(kernel, GatedKernel::Unfused(_)) {
            problem.numerics = problem.numerics.unfused();
        }
        Self { cpu: cpu.clone(), problem, kernel, training: None, lost: false }
    }

    /// Packs quantised weights as they are: their bits stay, in the order of the fused kernel. x and
    /// h are of T, and products are summed with the accuracy of `f32`.
    ///
    /// # Errors
    /// As [`QuantizedGatedLinearParams::validate`];
    /// [`swiglu_core::Error::OutOfMemory`] if there is no memory for the weights.
    pub fn quantized(cpu: &Cpu, params: &QuantizedGatedLinearParams<'_>) -> Result<Self> {
        Self::quantized_within(cpu, params, RowSteps::NONE)
    }

    /// As [`Self::packed_in`].
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
        super::plan(&self.cpu, self.problem.with_m(m), self.path())
    }

    pub(super) fn expect_weights(&self) -> Result<()> {
        match self.lost {
            false => Ok(()),
            true => Err(Error::Unsupported {
                what: "a call of a layer whose update has failed".into(),
                why: "there was no memory for its weights; make another layer".into(),
            }),
        }
    }

    pub(super) fn check(&self, x: MatrixRef<'_, T>, out: &MatrixMut<'_, T>) -> Result<()> {
        self.expect_weights()?;
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        out.expect_shape("output", [x.rows(), self.intermediate()])
    }

    /// Bytes of the packed weights and biases.
    pub fn weight_bytes(&self) -> usize {
        match &self.kernel {
            GatedKernel::Fused(weights) => weights.bytes_with_biases(),
            GatedKernel::Unfused(halves) => {
                let half = |half: &Linear<T>| half.weights().bytes_with_biases();
                half(&halves.gate) + half(&halves.up)
            }
        }
    }

    /// Bytes of working memory that a call of up to `m` tokens takes from the device, which its layers share.
    pub fn workspace_bytes(&self, m: usize) -> usize {
        self.takes_bytes(&self.cpu, Tokens::UpTo(m))
    }

    /// Makes ready what so many calls of up to `m` tokens at the same time take: none of them then allocates memory to
    /// work in. Without it, calls make what they lack and leave it to later ones.
    ///
    /// # Errors
    /// [`swiglu_core::Error::OutOfMemory`] if the system refuses the memory.
    pub fn reserve(&self, m: usize, callers: usize) -> Result<()> {
        self.cpu.reserve(self.workspace_bytes(m), callers)
    }

    pub(super) fn takes_bytes(&self, cpu: &Cpu, tokens: Tokens) -> usize {
        match &self.kernel {
            GatedKernel::Fused(weights) => {
                linear_map_bytes(cpu, (weights, self.problem.numerics.into()), tokens)
            }
            GatedKernel::Unfused(halves) => {
                let half = |half: &Linear<T>| half.workspace_bytes(cpu, tokens);
                let h = matrix_bytes::<T>(tokens.most(), self.intermediate());
                total([h, h, half(&halves.gate).max(half(&halves.up))])
            }
        }
    }

    /// Writes h `[M, H]` for x `[M, K]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if x or out has another shape; [`swiglu_core::Error::OutOfMemory`] if there is no
    /// memory to work in.
    pub fn forward(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        self.forward_opts(x, out, &CallOptions::default())
    }

    /// Computes as [`Self::forward`], within the limits of one call.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`swiglu_core::Error::OutOfRange`] for no threads.
    pub fn forward_opts(
        &self,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        self.check(x, &out)?;
        let cpu = self.cpu.for_call(options)?;
        let bytes = self.takes_bytes(&cpu, Tokens::Exactly(x.rows()));
        cpu.workspaces()
            .with(bytes, |workspace| self.forward_in(&cpu, workspace, x, out, Kept::NOTHING))
    }

    /// Computes in a workspace of at least [`Self::takes_bytes`], and keeps gate and up.
    pub(super) fn forward_in(
        &self,
        cpu: &Cpu,
        workspace: &mut [u8],
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
        kept: Kept<T>,
    ) -> Result<()> {
        match &self.kernel {
            GatedKernel::Fused(weights) => {
                let ordered = (weights, self.problem.numerics.into());
                let out = out_rows(&mut out);
                linear_map(cpu, ordered, workspace, x.into(), |row| {
                    self.epilogue::<T>(weights, Some(out.from(row)), kept.from(row))
                });
                Ok(())
            }
            GatedKernel::Unfused(halves) => self.unfused(cpu, halves, workspace, x, out, kept),
        }
    }

    /// What happens to the sums: h as values of T, stored as O, and what is kept of gate and up.
    pub(super) fn epilogue<O: Element>(
        &self,
        weights: &Weights<T>,
        out: Option<Rows<O>>,
        kept: Kept<T>,
    ) -> Gated<T, O> {
        Gated {
            activation: self.problem.activation,
            numerics: self.problem.numerics,
            bias: weights.bias(),
            out,
            kept,
        }
    }

    /// Three operations, gate and up in memory between them, and the gate's row step.
    fn unfused(
        &self,
        cpu: &Cpu,
        halves: &Halves<T>,
        workspace: &mut [u8],
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
        kept: Kept<T>,
    ) -> Result<()> {
        let (m, h) = (x.rows(), self.intermediate());
        let bytes = matrix_bytes::<T>(m, h);
        let linear = self.takes_bytes(cpu, Tokens::Exactly(m)) - total([bytes, bytes]);
        let [gate, up, linear] = cut(workspace, [bytes, bytes, linear]);
        let place = |kept: Option<Rows<T>>, part| match kept {
            // SAFETY: what is kept has m rows, which nothing else uses until the call is over.
            Some(rows) => unsafe { rows.matrix(m) },
            None => matrix_in(part, m, h),
        };
        let (mut gate, mut up) = (place(kept.gate, gate)?, place(kept.up, up)?);
        halves.gate.forward(cpu, linear, x, gate.reborrow());
        if let Some(sparsity) = self.problem.rows.sparsity {
            let rounding = self.problem.numerics.rounding;
            each_row(cpu, gate.reborrow(), |row| sparsity.apply(rounding, row));
        }
        halves.up.forward(cpu, linear, x, up.reborrow());
        let inputs = GateUpRef::separate(gate.as_ref(), up.as_ref())?;
        cpu.activation(&self.problem.activation, self.problem.numerics, inputs, out)
    }
}

/// Bytes of a matrix in a workspace.
pub(super) fn matrix_bytes<T>(m: usize, n: usize) -> usize {
    m.saturating_mul(n).saturating_mul(size_of::<T>())
}

/// A matrix in a part of a workspace with [`matrix_bytes`]; its values are what an earlier call left.
pub(super) fn matrix_in<T: Element>(
    part: &mut [u8],
    m: usize,
    n: usize,
) -> Result<MatrixMut<'_, T>> {
    // SAFETY: every pattern of bits is a value of an element type.
    let (before, values, _) = unsafe { part.align_to_mut::<T>() };
    debug_assert!(before.is_empty(), "parts begin at lines");
    MatrixMut::new(&mut values[..m * n], m, n)
}
