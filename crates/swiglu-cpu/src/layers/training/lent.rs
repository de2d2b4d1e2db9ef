//! A block over weights that stay where they are.

use swiglu_core::{
    Element, GradientShapes, GradientsMut, MatrixMut, MatrixRef, MlpParams, Path, Result, RowSteps,
    StridedRef,
};

use super::super::gated::{GatedLinear, matrix_bytes, matrix_in};
use super::super::linear::Stored;
use super::super::mlp::Mlp;
use super::super::pass::out_rows;
use super::backward::{Backward, Down};
use super::{MlpTraining, begin, clear, dx_of, expect_shape, wants_dh};
use crate::buffer::Buffer;
use crate::cpu::{CallOptions, Cpu};
use crate::epilogue::{Kept, Rows};
use crate::panels::Panels;

/// A feed-forward block over weights that may change from call to call: each call packs those that it multiplies with, into
/// memory that the calls of the device share. A pass copies 3·K·H values where it multiplies 3·M·K·H times, or 6·M·K·H
/// backwards. Its results have the bits of an [`Mlp`] with the same weights, which keeps packed copies.
#[derive(Debug)]
pub struct LentMlp<'a, T> {
    cpu: &'a Cpu,
    params: MlpParams<'a, T>,
}

impl<'a, T: Element> LentMlp<'a, T> {
    /// Takes the weights as they are.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree; [`swiglu_core::Error::Unsupported`] for a block with row steps.
    pub fn new(cpu: &'a Cpu, params: MlpParams<'a, T>) -> Result<Self> {
        params.validate()?;
        let instead = "make an Mlp, which keeps it packed";
        params.rows.steps.expect_none("over weights that stay where they are", instead)?;
        Ok(Self { cpu, params })
    }

    fn features(&self) -> [usize; 2] {
        let w = &self.params.gated.weights;
        [w.hidden(), w.intermediate()]
    }

    /// Memory for packed weights of so many features and inputs.
    fn room(&self, outputs: usize, inputs: usize) -> Result<Buffer> {
        self.cpu.workspaces().take(Panels::<T>::linear_bytes(self.cpu, outputs, inputs))
    }

    /// Writes y `[M, K]` for x `[M, K]`, and gate and up, `[M, 2H]`, where they have a place.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`swiglu_core::Error::OutOfMemory`]; [`swiglu_core::Error::OutOfRange`] for no threads.
    pub fn forward(
        &self,
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
        kept: Option<MatrixMut<'_, T>>,
        options: &CallOptions,
    ) -> Result<()> {
        let ([k, h], m) = (self.features(), x.rows());
        x.expect_shape("x", [m, k])?;
        out.expect_shape("output", [m, k])?;
        let kept = match kept {
            Some(mut kept) => {
                kept.expect_shape("gate and up", [m, 2 * h])?;
                let [gate, up] = halves_of(&mut kept);
                Kept { gate: Some(gate), up: Some(up) }
            }
            None => Kept::NOTHING,
        };
        if m == 0 {
            return Ok(());
        }
        let cpu = self.cpu.for_call(options)?;
        let memory = [self.room(2 * h, k)?, self.room(k, h)?];
        let mut block = Mlp::packed_in(&cpu, memory, &self.params, Path::Fused)?;
        let result = block.forward_to(x, &Stored(out_rows(&mut out)), options, kept);
        self.give_back(block.take_memory());
        result
    }

    /// Writes gate and up alone, with the bits that they have in [`Self::forward`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn pre_activations(
        &self,
        x: MatrixRef<'_, T>,
        mut kept: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        let ([k, h], m) = (self.features(), x.rows());
        x.expect_shape("x", [m, k])?;
        kept.expect_shape("gate and up", [m, 2 * h])?;
        if m == 0 {
            return Ok(());
        }
        let cpu = self.cpu.for_call(options)?;
        let (memory, gated) = (self.room(2 * h, k)?, &self.params.gated);
        let mut layer = GatedLinear::packed_in(&cpu, memory, gated, Path::Fused, RowSteps::NONE)?;
        let result = layer.recompute(&cpu, x, halves_of(&mut kept));
        self.give_back([layer.take_memory()]);
        result
    }

    /// Writes the gradients that have a place, or adds them to what is there, from dy `[M, K]` and from gate and up,
    /// `[M, 2H]`, as [`Self::forward`] left them. Those of gate's and up's weights have two places however they are arranged.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn backward<'d>(
        &self,
        x: MatrixRef<'_, T>,
        dy: impl Into<StridedRef<'d, T>>,
        kept: MatrixRef<'_, T>,
        mut into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()>
    where
        T: 'd,
    {
        let (dy, [k, h], m) = (dy.into(), self.features(), x.rows());
        x.expect_shape("x", [m, k])?;
        expect_shape("dy", dy, [m, k])?;
        kept.expect_shape("gate and up", [m, 2 * h])?;
        let (problem, orientation) = (self.params.problem(m), self.params.down_orientation);
        into.validate(m, &GradientShapes::new(&problem, orientation))?;
        if m == 0 {
            clear(&mut into);
            return Ok(());
        }
        let cpu = &*self.cpu.for_call(options)?;
        let dy = dy.to_rows()?;
        let dy = dy.view()?;
        if !begin(cpu, dy, &mut into) {
            return Ok(());
        }
        let wants_dh = wants_dh(&into);
        let mut dh = match wants_dh {
            true => Some(MlpTraining::new(cpu, self.room(h, k)?, &self.params)?.dh),
            false => None,
        };
        let mut dx = match into.dx {
            Some(_) => Some(dx_of(cpu, self.room(k, 2 * h)?, &self.params.gated)?),
            None => None,
        };
        let down = Some(Down { dh: dh.as_ref(), bias: self.params.down_bias, orientation });
        let pass = Backward { cpu, problem, path: Path::Fused, dx: dx.as_ref(), down };
        let (first, stride) = (kept.as_slice().as_ptr().cast_mut(), kept.row_stride());
        let gate_up = [0, h].map(|at| Rows { first: first.wrapping_add(at), stride, cols: h });
        let cols = if wants_dh { 2 * h } else { 0 };
        let result = cpu.workspaces().with(matrix_bytes::<T>(m, cols), |memory| {
            pass.block((x, dy), gate_up, matrix_in(memory, m, cols)?, &mut into)
        });
        self.give_back(
            [&mut dh, &mut dx].into_iter().flatten().map(|weights| weights.take_memory()),
        );
        result
    }

    fn give_back(&self, memory: impl IntoIterator<Item = Buffer>) {
        memory.into_iter().for_each(|block| self.cpu.workspaces().give_back(block));
    }
}

/// Both halves of a matrix's columns.
fn halves_of<T: Element>(both: &mut MatrixMut<'_, T>) -> [Rows<T>; 2] {
    let (cols, stride) = (both.cols() / 2, both.row_stride());
    let first = both.as_mut_slice().as_mut_ptr();
    [0, cols].map(|at| Rows { first: first.wrapping_add(at), stride, cols })
}
