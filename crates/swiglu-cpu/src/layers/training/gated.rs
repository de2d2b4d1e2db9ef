//! Training of a gated linear layer, which is the inner part of a block's.

use swiglu_core::{
    Element, GatedLinearParams, GradientShapes, Gradients, GradientsMut, MatrixMut, MatrixRef,
    Orientation, Path, Problem, Result, RowSteps, SavePolicy, StridedRef, Wanted,
};

use super::super::gated::{GatedKernel, GatedLinear, matrix_bytes, matrix_in};
use super::super::pass::{linear_map, linear_map_bytes};
use super::backward::Backward;
use super::saved::{Saved, halves};
use super::{Training, clear, expect_shape, trained, wants_inner};
use crate::buffer::Buffer;
use crate::cpu::{CallOptions, Cpu};
use crate::epilogue::{Kept, Rows};
use crate::order::Order;
use crate::workspace::Tokens;

impl<T: Element> GatedLinear<T> {
    /// Packs the weights for forward and backward passes. The layer has copies of its own, one for each direction: after a
    /// step of an optimiser [`Self::update`] packs the changed ones, which copies 4·K·H values (5·K·H with
    /// [`SavePolicy::SaveGate`]) where a step with M tokens multiplies 6·M·K·H times.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn for_training(
        cpu: &Cpu,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
    ) -> Result<Self> {
        Self::for_training_with_path(cpu, params, policy, Path::Fused)
    }

    /// As [`Self::for_training`], on the given path: the unfused one has gate, up and dh in memory as T between operations.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn for_training_with_path(
        cpu: &Cpu,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
        path: Path,
    ) -> Result<Self> {
        let training = Training::new(cpu, [(); 2].map(|()| Buffer::empty()), params, policy)?;
        Ok(Self { training: Some(training), ..Self::with_path(cpu, params, path)? })
    }

    /// Packs other values of the weights and biases, of the same shapes and layout, in the memory of those before.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Unsupported`] for a layer of another problem, or one that was not made by [`Self::for_training`];
    /// [`swiglu_core::Error::OutOfMemory`], after which the layer has no weights any more: calls are refused.
    pub fn update(&mut self, params: &GatedLinearParams<'_, T>) -> Result<()> {
        self.expect_update(params)?;
        self.update_values(params)
    }

    /// Refuses parameters of which more than the values differ from the layer's.
    ///
    /// # Errors
    /// As [`Self::update`].
    pub fn expect_update(&self, params: &GatedLinearParams<'_, T>) -> Result<()> {
        params.validate()?;
        self.trained()?;
        self.problem.expect_update(&self.as_rounded(params.problem(0)))
    }

    /// A problem with the numerics that this layer would have made of it.
    pub(super) fn as_rounded(&self, problem: Problem) -> Problem {
        match self.path() {
            Path::Unfused => problem.with_numerics(problem.numerics.unfused()),
            _ => problem,
        }
    }

    pub(super) fn update_values(&mut self, params: &GatedLinearParams<'_, T>) -> Result<()> {
        let mut training = trained(self.training.take())?;
        self.lost = true;
        let (policy, memory) = (training.policy, training.take_memory());
        let training = Training::new(&self.cpu, memory, params, policy)?;
        let forward = self.take_memory();
        let (cpu, path) = (self.cpu.clone(), self.path());
        let layer = Self::packed_in(&cpu, forward, params, path, RowSteps::NONE)?;
        *self = Self { training: Some(training), ..layer };
        Ok(())
    }

    pub(super) fn trained(&self) -> Result<&Training<T>> {
        self.expect_weights()?;
        trained(self.training.as_ref())
    }

    /// Bytes of the weights that only backward passes read.
    pub fn training_bytes(&self) -> usize {
        self.training.as_ref().map_or(0, Training::bytes)
    }

    /// The shapes of the gradients of weights.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn gradient_shapes(&self) -> Result<GradientShapes> {
        self.trained()?;
        Ok(GradientShapes::new(&self.problem, Orientation::OutIn))
    }

    /// What the layer keeps between the passes.
    ///
    /// # Errors
    /// As [`Self::gradient_shapes`].
    pub fn policy(&self) -> Result<SavePolicy> {
        Ok(self.trained()?.policy)
    }

    /// Writes h `[M, H]` for x `[M, K]`, with the bits of [`Self::forward`], and keeps what [`Self::backward`] needs.
    ///
    /// # Errors
    /// As [`Self::forward_opts`]; [`swiglu_core::Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn forward_train<'x>(
        &self,
        x: MatrixRef<'x, T>,
        out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<Saved<'x, T>> {
        self.check(x, &out)?;
        let training = self.trained()?;
        let cpu = self.cpu.for_call(options)?;
        let mut saved = Saved::new(&self.cpu, self.problem, training.kept_by(), x)?;
        let kept = saved.rows();
        let bytes = self.takes_bytes(&cpu, Tokens::Exactly(x.rows()));
        cpu.workspaces().with(bytes, |work| self.forward_in(&cpu, work, x, out, kept))?;
        Ok(saved)
    }

    /// The gradients that are wanted, in matrices of their own, from dh `[M, H]`.
    ///
    /// # Errors
    /// As [`Self::backward_into`].
    pub fn backward<'d>(
        &self,
        saved: Saved<'_, T>,
        dh: impl Into<StridedRef<'d, T>>,
        wanted: Wanted,
    ) -> Result<Gradients<T>> {
        let (m, bias) = (saved.tokens(), self.problem.bias);
        let mut gradients = Gradients::zeros(m, &self.gradient_shapes()?, wanted, bias)?;
        self.backward_into(saved, dh, gradients.as_mut(), &CallOptions::default())?;
        Ok(gradients)
    }

    /// Writes the gradients that have a place, or adds them to what is there, from dh `[M, H]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a shape disagrees; [`swiglu_core::Error::Unsupported`] for a layer that was not made by
    /// [`Self::for_training`], what another one kept, or a row scale; [`swiglu_core::Error::OutOfMemory`].
    pub fn backward_into<'d>(
        &self,
        saved: Saved<'_, T>,
        dh: impl Into<StridedRef<'d, T>>,
        mut into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        let (dh, shapes) = (dh.into(), self.gradient_shapes()?);
        saved.expect_of(self.trained()?.of)?;
        let m = saved.tokens();
        expect_shape("dh", dh, [m, self.intermediate()])?;
        into.validate(m, &shapes)?;
        if m == 0 {
            clear(&mut into);
            return Ok(());
        }
        let cpu = &*self.cpu.for_call(options)?;
        let dh = dh.to_rows()?;
        let dh = dh.view()?;
        if !wants_inner(&into) {
            return Ok(());
        }
        self.with_gate_up(cpu, saved, |x, mut gate_up| {
            let rows = halves(gate_up.as_mut_slice().as_mut_ptr(), self.intermediate());
            let pass = self.pass(cpu)?;
            pass.differentiate(pass.differentiated(rows, rows), m, Some(dh));
            pass.inner(x, gate_up.as_ref(), &mut into)
        })
    }

    /// A backward pass by this layer's weights.
    pub(super) fn pass<'a>(&'a self, cpu: &'a Cpu) -> Result<Backward<'a, T>> {
        let dx = Some(&self.trained()?.dx);
        Ok(Backward { cpu, problem: self.problem, path: self.path(), dx, down: None })
    }

    /// Calls `f` with x and gate and up as values of T in rows of 2H, which it may overwrite.
    pub(super) fn with_gate_up<R>(
        &self,
        cpu: &Cpu,
        mut saved: Saved<'_, T>,
        f: impl FnOnce(MatrixRef<'_, T>, MatrixMut<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let (m, h) = (saved.tokens(), self.intermediate());
        if saved.policy == SavePolicy::Save {
            let (x, memory) = saved.parts();
            return f(x, matrix_in(memory, m, 2 * h)?);
        }
        cpu.workspaces().with(matrix_bytes::<T>(m, 2 * h), |memory| {
            let mut gate_up = matrix_in::<T>(memory, m, 2 * h)?;
            let [gate, up] = halves(gate_up.as_mut_slice().as_mut_ptr(), h);
            let kept = saved.rows();
            let x = saved.x();
            match (kept.gate, self.trained()?.up.as_ref()) {
                (Some(kept), Some(linear)) => {
                    // SAFETY: the layer kept m rows, and nothing else uses either of these here.
                    let (kept, mut gate, up) =
                        unsafe { (kept.matrix(m)?, gate.matrix(m)?, up.matrix(m)?) };
                    (0..m).for_each(|i| gate.row_mut(i).copy_from_slice(kept.as_ref().row(i)));
                    let bytes = linear.workspace_bytes(cpu, Tokens::Exactly(m));
                    cpu.workspaces().with(bytes, |work| {
                        linear.forward(cpu, work, x, up);
                        Ok(())
                    })?;
                }
                _ => self.recompute(cpu, x, [gate, up])?,
            }
            f(x, gate_up)
        })
    }

    /// Computes gate and up again.
    pub(super) fn recompute(
        &self,
        cpu: &Cpu,
        x: MatrixRef<'_, T>,
        [gate, up]: [Rows<T>; 2],
    ) -> Result<()> {
        let tokens = Tokens::Exactly(x.rows());
        let order: Order = self.problem.numerics.into();
        match &self.kernel {
            GatedKernel::Fused(weights) => {
                let kept = Kept { gate: Some(gate), up: Some(up) };
                let ordered = (weights, order);
                let bytes = linear_map_bytes(cpu, ordered, tokens);
                cpu.workspaces().with(bytes, |work| {
                    linear_map(cpu, ordered, work, x.into(), |row| {
                        self.epilogue::<T>(weights, None, kept.from(row))
                    });
                    Ok(())
                })
            }
            GatedKernel::Unfused(both) => {
                for (half, rows) in [(&both.gate, gate), (&both.up, up)] {
                    // SAFETY: there are m rows, which nothing else uses here.
                    let out = unsafe { rows.matrix(x.rows())? };
                    let bytes = half.workspace_bytes(cpu, tokens);
                    cpu.workspaces().with(bytes, |work| {
                        half.forward(cpu, work, x, out);
                        Ok(())
                    })?;
                }
                Ok(())
            }
        }
    }
}
