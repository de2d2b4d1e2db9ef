//! The feed-forward block.

use std::ops::Range;

use swiglu_core::{DType, Element, MatrixMut, MatrixRef, MlpParams, Path, Plan, Problem, Result};

use super::gated::{GatedKernel, GatedLinear, buffer_matrix};
use super::linear::Linear;
use super::pass::{Call, Shared, out_rows, pack_rows, passes, rows_bytes, sums_bytes};
use super::plan;
use crate::cpu::Cpu;
use crate::epilogue::Rows;
use crate::gemm::Blocks;
use crate::panels::{Panels, SendPtr};
use crate::rows::PackRows;
use crate::simd;
use crate::team::Step;

/// A feed-forward block whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct Mlp<T> {
    gated: GatedLinear<T>,
    down: Linear<T>,
    problem: Problem,
}

impl<T: Element> Mlp<T> {
    /// Packs the weights for the fused kernels.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree;
    /// [`swiglu_core::Error::Unavailable`] if there is no memory for the weights.
    pub fn new(cpu: &Cpu, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::with_path(cpu, params, Path::Fused)
    }

    /// Packs the weights for the given path.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cpu: &Cpu, params: &MlpParams<'_, T>, path: Path) -> Result<Self> {
        params.validate()?;
        let w = &params.gated.weights;
        let down = Linear::new(
            cpu,
            w.hidden(),
            w.intermediate(),
            params.down_orientation,
            params.down_bias,
            &|k| (params.down, k),
        )?;
        let gated = GatedLinear::with_path(cpu, &params.gated, path)?;
        let problem = Problem { numerics: gated.numerics(), ..params.problem(0) };
        Ok(Self { gated, down, problem })
    }

    /// The gated linear layer.
    pub fn gated(&self) -> &GatedLinear<T> {
        &self.gated
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        self.gated.cpu.plan(Problem { m, ..self.problem }, self.gated.path())
    }

    /// Writes y `[M, K]` for x `[M, K]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if x or out has another shape.
    pub fn forward(&self, x: MatrixRef<'_, T>, mut out: MatrixMut<'_, T>) -> Result<()> {
        x.expect_shape("x", [x.rows(), self.problem.hidden])?;
        out.expect_shape("output", [x.rows(), self.problem.hidden])?;
        match &self.gated.kernel {
            GatedKernel::Unfused(_) => self.gated.workspaces.with(|ws| {
                let (m, h) = (x.rows(), self.problem.intermediate);
                self.gated.forward(x, buffer_matrix(&mut ws.h, m, h)?)?;
                let hidden = buffer_matrix::<T>(&mut ws.h, m, h)?;
                self.down.forward(hidden.as_ref(), out)
            }),
            GatedKernel::Fused(panels) => {
                let problem = Problem { m: x.rows(), ..self.problem };
                let rows = plan::rows(&self.gated.cpu, &problem, Path::Fused);
                for pass in passes(x.rows(), rows) {
                    // h is kept as the down projection reads it: values of T in f32, or bfloat16.
                    match T::DTYPE {
                        DType::Bf16 => self.pass::<T>(panels, x, pass, &mut out)?,
                        _ => self.pass::<f32>(panels, x, pass, &mut out)?,
                    }
                }
                Ok(())
            }
        }
    }

    /// Gate, up, activation and down for some rows, in one go: threads move from step to step
    /// without returning. With one row h already lies as the down projection reads it.
    fn pass<O: Element>(
        &self,
        panels: &Panels<T>,
        x: MatrixRef<'_, T>,
        pass: Range<usize>,
        out: &mut MatrixMut<'_, T>,
    ) -> Result<()> {
        let cpu = &self.gated.cpu;
        let (m, h_steps) = (pass.len(), self.down.panels().steps());
        self.gated.workspaces.with(|ws| {
            ws.x.reserve(rows_bytes(panels, m))?;
            ws.h.reserve(rows_bytes(self.down.panels(), m))?;
            ws.packed_h.reserve(if m > 1 { rows_bytes(self.down.panels(), m) } else { 0 })?;
            ws.sums.reserve(sums_bytes(cpu, m))?;
            let blocks = Blocks::new(m, simd::tile_rows(cpu.isa()));
            let sums = SendPtr(ws.sums.as_mut_ptr().cast());
            let h = ws.h.as_mut_ptr();
            let gated = Call { cpu, panels, blocks, x: SendPtr(ws.x.as_mut_ptr().cast()), sums };
            let down_x = if m > 1 { ws.packed_h.as_mut_ptr() } else { h };
            let down =
                Call { cpu, panels: self.down.panels(), blocks, x: SendPtr(down_x.cast()), sums };
            // Rows of h are whole steps long; the half of a last pair beyond H stays zero.
            let per_step = size_of::<u32>() / size_of::<O>();
            let h_rows = Rows {
                first: h.cast::<O>(),
                stride: h_steps * per_step,
                cols: self.problem.intermediate,
            };
            // SAFETY: the buffer holds m rows of `h_steps` zeroed 32-bit values; it is written in
            // step 2 and read in step 3, which begins when step 2 is done.
            let h_steps_view = unsafe { std::slice::from_raw_parts(h.cast::<f32>(), m * h_steps) };
            let h_steps_view = MatrixRef::new(h_steps_view, m, h_steps)?;
            let (h_rows, y_rows) = (Shared(h_rows), out_rows(out, pass.start));

            let x_task = PackRows { x, first: pass.start, blocks, out: gated.x };
            let h_task = PackRows { x: h_steps_view, first: 0, blocks, out: down.x };
            let pack_x = |range: Range<usize>, _: usize| pack_rows(cpu, x_task, range);
            let gate_up = |range: Range<usize>, worker: usize| {
                gated.panels(range, worker, self.gated.epilogue::<O>(panels, h_rows.get()));
            };
            let pack_h = |range: Range<usize>, _: usize| pack_rows(cpu, h_task, range);
            let project = |range: Range<usize>, worker: usize| {
                down.panels(range, worker, self.down.epilogue(y_rows.get()));
            };
            let work = Problem { m, ..self.problem };
            let bytes = panels.bytes() + self.down.panels().bytes();
            cpu.run(
                cpu.workers(work.flops(), bytes as f64),
                &[
                    Step { units: blocks.count(), run: &pack_x },
                    Step { units: panels.panels(), run: &gate_up },
                    Step { units: if m > 1 { blocks.count() } else { 0 }, run: &pack_h },
                    Step { units: self.down.panels().panels(), run: &project },
                ],
            );
            Ok(())
        })
    }
}
