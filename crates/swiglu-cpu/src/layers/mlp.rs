//! The feed-forward block.

use std::ops::Range;

use swiglu_core::{
    DType, Element, MatrixMut, MatrixRef, MlpParams, OwnedRowParams, Path, Plan, Problem,
    QuantizedMlpParams, Result,
};

use super::gated::{GatedKernel, GatedLinear, buffer_matrix};
use super::linear::Linear;
use super::pass::{Call, Shared, each_row, out_rows};
use super::plan;
use crate::cpu::Cpu;
use crate::epilogue::Rows;
use crate::panels::SendPtr;
use crate::team::Step;
use crate::weights::Weights;

/// A feed-forward block whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct Mlp<T> {
    gated: GatedLinear<T>,
    down: Linear<T>,
    problem: Problem,
    rows: OwnedRowParams,
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
            params.gated.numerics.into(),
            params.down_orientation,
            params.down_bias,
            &|k| (params.down, k),
        )?;
        let gated = GatedLinear::within(cpu, &params.gated, path, params.rows.steps)?;
        let problem = Problem { numerics: gated.numerics(), ..params.problem(0) };
        Ok(Self { gated, down, problem, rows: params.rows.into() })
    }

    /// Packs quantised weights as they are, as [`GatedLinear::quantized`]; h is rounded to T between
    /// the two projections.
    ///
    /// # Errors
    /// As [`QuantizedMlpParams::validate`];
    /// [`swiglu_core::Error::Unavailable`] if there is no memory for the weights.
    pub fn quantized(cpu: &Cpu, params: &QuantizedMlpParams<'_>) -> Result<Self> {
        params.validate()?;
        let gated = GatedLinear::quantized_within(cpu, &params.gated, params.rows.steps)?;
        let down =
            Linear::quantized(cpu, params.down, params.gated.numerics.into(), params.down_bias)?;
        let problem = Problem { numerics: gated.numerics(), ..params.problem(0, T::DTYPE) };
        Ok(Self { gated, down, problem, rows: params.rows.into() })
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
            GatedKernel::Fused(weights) if self.problem.rows.norm.is_none() => {
                let problem = Problem { m: x.rows(), ..self.problem };
                for pass in plan::passes(&self.gated.cpu, &problem, Path::Fused).ranges() {
                    // h is kept as the down projection packs it: values of T, for dense weights in
                    // f32 or bfloat16.
                    match (weights, T::DTYPE) {
                        (Weights::Dense(_), DType::F16) => {
                            self.pass::<f32>(weights, x, pass, &mut out)?;
                        }
                        _ => self.pass::<T>(weights, x, pass, &mut out)?,
                    }
                }
                Ok(())
            }
            // A norm takes all of a row of h before any of it goes on.
            _ => self.gated.workspaces.with(|ws| {
                let (m, h) = (x.rows(), self.problem.intermediate);
                self.gated.forward(x, buffer_matrix(&mut ws.h, m, h)?)?;
                if self.problem.rows.norm.is_some() {
                    let (rows, rounding) = (self.rows.view(), self.problem.numerics.rounding);
                    let hidden = buffer_matrix::<T>(&mut ws.h, m, h)?;
                    each_row(&self.gated.cpu, hidden, |row| rows.normalise(rounding, row));
                }
                let hidden = buffer_matrix::<T>(&mut ws.h, m, h)?;
                self.down.forward(hidden.as_ref(), out)
            }),
        }
    }

    /// Gate, up, activation and down for some rows, in one go: threads move from step to step
    /// without returning. With one row h may already lie as the down projection reads it.
    fn pass<O: Element>(
        &self,
        weights: &Weights<T>,
        x: MatrixRef<'_, T>,
        pass: Range<usize>,
        out: &mut MatrixMut<'_, T>,
    ) -> Result<()> {
        let cpu = &self.gated.cpu;
        let (m, down_weights) = (pass.len(), self.down.weights());
        let order = self.problem.numerics.into();
        let packing = weights.packing(cpu, m, order);
        let h_packing = down_weights.packing(cpu, m, order);
        let features = self.problem.intermediate;
        let h_len = h_row_len::<O>(features);
        let packs_h = h_packing.changes_rows();
        let scratch_bytes =
            weights.scratch_bytes(cpu, packing).max(down_weights.scratch_bytes(cpu, h_packing));
        self.gated.workspaces.with(|ws| {
            ws.x.reserve(packing.bytes())?;
            ws.h.reserve(m * h_len * size_of::<O>())?;
            ws.packed_h.reserve(if packs_h { h_packing.bytes() } else { 0 })?;
            ws.sums.reserve(packing.sums_bytes(cpu).max(h_packing.sums_bytes(cpu)))?;
            ws.scratch.reserve(scratch_bytes)?;
            let sums = SendPtr(ws.sums.as_mut_ptr().cast());
            let scratch = SendPtr(ws.scratch.as_mut_ptr());
            let h = ws.h.as_mut_ptr();
            let x_rows = SendPtr(ws.x.as_mut_ptr());
            let gated = Call { cpu, weights, m, packing, x: x_rows, sums, scratch };
            let down = Call {
                weights: down_weights,
                packing: h_packing,
                x: SendPtr(if packs_h { ws.packed_h.as_mut_ptr() } else { h }),
                ..gated
            };
            // Nothing writes past H, and all calls have the same stride: the half of a last pair stays the
            // zero that the buffer was made with. One row is read with it.
            let h_rows = Rows { first: h.cast::<O>(), stride: h_len, cols: features };
            let h_values = SendPtr(h.cast::<O>());
            let (h_rows, y_rows) = (Shared(h_rows), out_rows(out, pass.start));

            let pack_x = |range: Range<usize>, _: usize| gated.pack(x, pass.start, range);
            let gate_up = |range: Range<usize>, worker: usize| {
                gated.panels(range, worker, self.gated.epilogue::<O>(weights, h_rows.get()));
            };
            let pack_h = |range: Range<usize>, _: usize| {
                // SAFETY: the buffer holds m rows of `h_len` zeroed values of O, which step 2 has written;
                // until the pass ends they are only read.
                let h = unsafe { std::slice::from_raw_parts(h_values.get(), m * h_len) };
                match MatrixRef::with_stride(h, m, features, h_len) {
                    Ok(h) => down.pack(h, 0, range),
                    Err(error) => unreachable!("m rows of h are a matrix: {error}"),
                }
            };
            let project = |range: Range<usize>, worker: usize| {
                down.panels(range, worker, self.down.epilogue(y_rows.get()));
            };
            let work = Problem { m, ..self.problem };
            let bytes = weights.bytes() + down_weights.bytes();
            cpu.run(
                cpu.workers(work.flops(), bytes as f64),
                &[
                    Step { units: packing.units(), run: &pack_x },
                    Step { units: weights.panels(), run: &gate_up },
                    Step { units: if packs_h { h_packing.units() } else { 0 }, run: &pack_h },
                    Step { units: down_weights.panels(), run: &project },
                ],
            );
            Ok(())
        })
    }
}

/// Values from one row of h to the next: those of whole steps, however many rows there are and however
/// they are packed.
fn h_row_len<O: Element>(features: usize) -> usize {
    features.next_multiple_of(size_of::<u32>() / size_of::<O>())
}
