//! Training of a feed-forward block.

use swiglu_core::{
    Element, Error, GradientShapes, Gradients, GradientsMut, MatrixMut, MatrixRef, MlpParams, Path,
    Result, SavePolicy, StridedRef, Wanted,
};

use super::super::linear::Stored;
use super::super::mlp::{Mlp, down_of};
use super::super::pass::out_rows;
use super::backward::{Backward, Down};
use super::saved::{Saved, halves};
use super::{MlpTraining, Training, begin, clear, expect_shape, trained};
use crate::buffer::Buffer;
use crate::cpu::{CallOptions, Cpu};

impl<T: Element> Mlp<T> {
    /// Packs the weights for forward and backward passes, as [`crate::GatedLinear::for_training`]: 6·K·H values are copied (7·K·H with
    /// [`SavePolicy::SaveGate`]) where a step with M tokens multiplies 9·M·K·H times.
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Unsupported`] for a block with row steps.
    pub fn for_training(cpu: &Cpu, params: &MlpParams<'_, T>, policy: SavePolicy) -> Result<Self> {
        Self::for_training_with_path(cpu, params, policy, Path::Fused)
    }

    /// As [`Self::for_training`], on the given path: the unfused one has gate, up and dh in memory as T between operations.
    ///
    /// # Errors
    /// As [`Self::for_training`].
    pub fn for_training_with_path(
        cpu: &Cpu,
        params: &MlpParams<'_, T>,
        policy: SavePolicy,
        path: Path,
    ) -> Result<Self> {
        params.validate()?;
        let instead = "train the gated linear layer, and what follows it by other means";
        params.rows.steps.expect_none("in backward passes", instead)?;
        let mut layer = Self::with_path(cpu, params, path)?;
        let none = [(); 2].map(|()| Buffer::empty());
        layer.gated.training = Some(Training::new(cpu, none, &params.gated, policy)?);
        layer.training = Some(MlpTraining::new(cpu, Buffer::empty(), params)?);
        Ok(layer)
    }

    /// Packs other values of the weights and biases, of the same shapes and layout, in the memory of those before.
    ///
    /// # Errors
    /// As [`crate::GatedLinear::update`].
    pub fn update(&mut self, params: &MlpParams<'_, T>) -> Result<()> {
        self.expect_update(params)?;
        self.gated.update_values(&params.gated)?;
        let mut training = trained(self.training.take())?;
        self.gated.lost = true;
        let cpu = &self.gated.cpu;
        let training = MlpTraining::new(cpu, training.dh.take_memory(), params)?;
        self.down = down_of(cpu, self.down.take_memory(), params)?;
        self.training = Some(training);
        self.gated.lost = false;
        Ok(())
    }

    /// Refuses parameters of which more than the values differ from the block's.
    ///
    /// # Errors
    /// As [`Self::update`].
    pub fn expect_update(&self, params: &MlpParams<'_, T>) -> Result<()> {
        params.validate()?;
        let lies = self.trained()?.down_orientation;
        if lies != params.down_orientation {
            return Err(Error::Unsupported {
                what: format!("an update by a down weight that lies {}", params.down_orientation),
                why: format!("the layer's lies {lies}; make another layer"),
            });
        }
        self.problem.expect_update(&self.gated.as_rounded(params.problem(0)))
    }

    fn trained(&self) -> Result<&MlpTraining<T>> {
        self.gated.expect_weights()?;
        trained(self.training.as_ref())
    }

    /// Bytes of the weights that only backward passes read.
    pub fn training_bytes(&self) -> usize {
        let dh = self.training.as_ref().map_or(0, |t| t.dh.weights().bytes_with_biases());
        self.gated.training_bytes() + dh
    }

    /// The shapes of the gradients of weights.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn gradient_shapes(&self) -> Result<GradientShapes> {
        let down = self.trained()?.down_orientation;
        Ok(GradientShapes::new(&self.problem, down))
    }

    /// What the layer keeps between the passes.
    ///
    /// # Errors
    /// As [`Self::gradient_shapes`].
    pub fn policy(&self) -> Result<SavePolicy> {
        self.gated.policy()
    }

    /// Writes y `[M, K]` for x `[M, K]`, with the bits of [`Self::forward`], and keeps what [`Self::backward`] needs.
    ///
    /// # Errors
    /// As [`Self::forward_opts`]; [`Error::Unsupported`] for a layer that was not made by [`Self::for_training`].
    pub fn forward_train<'x>(
        &self,
        x: MatrixRef<'x, T>,
        mut out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<Saved<'x, T>> {
        self.check(x, out.shape())?;
        let kept_by = self.gated.trained()?.kept_by();
        let mut saved = Saved::new(&self.gated.cpu, self.problem, kept_by, x)?;
        let kept = saved.rows();
        self.forward_to(x, &Stored(out_rows(&mut out)), options, kept)?;
        Ok(saved)
    }

    /// The gradients that are wanted, in matrices of their own, from dy `[M, K]`.
    ///
    /// # Errors
    /// As [`Self::backward_into`].
    pub fn backward<'d>(
        &self,
        saved: Saved<'_, T>,
        dy: impl Into<StridedRef<'d, T>>,
        wanted: Wanted,
    ) -> Result<Gradients<T>> {
        let (m, bias) = (saved.tokens(), self.problem.bias);
        let mut gradients = Gradients::zeros(m, &self.gradient_shapes()?, wanted, bias)?;
        self.backward_into(saved, dy, gradients.as_mut(), &CallOptions::default())?;
        Ok(gradients)
    }

    /// Writes the gradients that have a place, or adds them to what is there, from dy `[M, K]`.
    ///
    /// # Errors
    /// As [`crate::GatedLinear::backward_into`].
    pub fn backward_into<'d>(
        &self,
        saved: Saved<'_, T>,
        dy: impl Into<StridedRef<'d, T>>,
        mut into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        let (dy, m) = (dy.into(), saved.tokens());
        let shapes = self.gradient_shapes()?;
        saved.expect_of(self.gated.trained()?.of)?;
        expect_shape("dy", dy, [m, self.problem.hidden])?;
        into.validate(m, &shapes)?;
        if m == 0 {
            clear(&mut into);
            return Ok(());
        }
        let cpu = &*self.gated.cpu.for_call(options)?;
        let dy = dy.to_rows()?;
        let dy = dy.view()?;
        if !begin(cpu, dy, &mut into) {
            return Ok(());
        }
        self.gated.with_gate_up(cpu, saved, |x, mut gate_up| {
            let rows = halves(gate_up.as_mut_slice().as_mut_ptr(), self.problem.intermediate);
            let training = self.trained()?;
            let (dh, bias) = (Some(&training.dh), self.down.bias(self.problem.hidden));
            let down = Down { dh, bias, orientation: training.down_orientation };
            let pass = Backward { down: Some(down), ..self.gated.pass(cpu)? };
            pass.block((x, dy), rows, gate_up, &mut into)
        })
    }
}
