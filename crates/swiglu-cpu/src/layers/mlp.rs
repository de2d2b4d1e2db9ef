//! The feed-forward block.

use std::ops::Range;

use swiglu_core::{
    DType, Element, Error, MatrixMut, MatrixRef, MlpParams, OwnedRowParams, Path, Plan, Problem,
    QuantizedMlpParams, Result, RowScale,
};

use super::gated::{GatedKernel, GatedLinear, matrix_bytes, matrix_in};
use super::linear::{AddedTo, Linear, Stored, Target};
use super::pass::{Call, Shared, each_row, out_rows};
use super::plan;
use super::training::MlpTraining;
use crate::buffer::Buffer;
use crate::cpu::{CallOptions, Cpu};
use crate::epilogue::{Kept, Rows};
use crate::panels::{Part, SendPtr};
use crate::rows::Source;
use crate::team::Step;
use crate::weights::Weights;
use crate::workspace::{Tokens, cut, total};

/// A feed-forward block whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct Mlp<T> {
    pub(super) gated: GatedLinear<T>,
    pub(super) down: Linear<T>,
    pub(super) problem: Problem,
    rows: OwnedRowParams,
    pub(super) training: Option<MlpTraining<T>>,
}

impl<T: Element> Mlp<T> {
    /// Packs the weights for the fused kernels.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree;
    /// [`swiglu_core::Error::OutOfMemory`] if there is no memory for the weights.
    pub fn new(cpu: &Cpu, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::with_path(cpu, params, Path::Fused)
    }

    /// Packs the weights for the given path.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cpu: &Cpu, params: &MlpParams<'_, T>, path: Path) -> Result<Self> {
        Self::packed_in(cpu, [(); 2].map(|()| Buffer::empty()), params, path)
    }

    /// As [`Self::with_path`], with the weights of gate and up, where they are fused, and of down in this memory if it has
    /// the size.
    pub(super) fn packed_in(
        cpu: &Cpu,
        [gate_up, down]: [Buffer; 2],
        params: &MlpParams<'_, T>,
        path: Path,
    ) -> Result<Self> {
        params.validate()?;
        let down = down_of(cpu, down, params)?;
        let gated = GatedLinear::packed_in(cpu, gate_up, &params.gated, path, params.rows.steps)?;
        let problem = params.problem(0).with_numerics(gated.numerics());
        Ok(Self { gated, down, problem, rows: params.rows.into(), training: None })
    }

    /// The memory of the fused weights and of down's, which are gone then.
    pub(super) fn take_memory(&mut self) -> [Buffer; 2] {
        [self.gated.take_memory(), self.down.take_memory()]
    }

    /// Packs quantised weights as they are, as [`GatedLinear::quantized`]; h is rounded to T between
    /// the two projections.
    ///
    /// # Errors
    /// As [`QuantizedMlpParams::validate`];
    /// [`swiglu_core::Error::OutOfMemory`] if there is no memory for the weights.
    pub fn quantized(cpu: &Cpu, params: &QuantizedMlpParams<'_>) -> Result<Self> {
        params.validate()?;
        let gated = GatedLinear::quantized_within(cpu, &params.gated, params.rows.steps)?;
        let down =
            Linear::quantized(cpu, params.down, params.gated.numerics.into(), params.down_bias)?;
        let problem = params.problem(0, T::DTYPE).with_numerics(gated.numerics());
        Ok(Self { gated, down, problem, rows: params.rows.into(), training: None })
    }

    /// The gated linear layer.
    pub fn gated(&self) -> &GatedLinear<T> {
        &self.gated
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        super::plan(&self.gated.cpu, self.problem.with_m(m), self.gated.path())
    }

    /// Bytes of the packed weights and biases.
    pub fn weight_bytes(&self) -> usize {
        self.gated.weight_bytes() + self.down.weights().bytes_with_biases()
    }

    /// Bytes of working memory that a call of up to `m` tokens takes from the device, which its layers share.
    pub fn workspace_bytes(&self, m: usize) -> usize {
        self.takes_bytes(&self.gated.cpu, Tokens::UpTo(m))
    }

    /// Makes ready what so many calls of up to `m` tokens at the same time take, as [`GatedLinear::reserve`].
    ///
    /// # Errors
    /// [`swiglu_core::Error::OutOfMemory`] if the system refuses the memory.
    pub fn reserve(&self, m: usize, callers: usize) -> Result<()> {
        self.gated.cpu.reserve(self.workspace_bytes(m), callers)
    }

    fn takes_bytes(&self, cpu: &Cpu, tokens: Tokens) -> usize {
        match &self.gated.kernel {
            GatedKernel::Fused(weights) if self.problem.rows.norm.is_none() => {
                let problem = self.problem.with_m(tokens.most());
                let passes = plan::passes(cpu, &problem, Path::Fused);
                passes.most_bytes(tokens, |m| total(self.parts(cpu, weights, m)))
            }
            _ => {
                let h = matrix_bytes::<T>(tokens.most(), self.problem.intermediate);
                let down = self.down.workspace_bytes(cpu, tokens);
                total([h, down.max(self.gated.takes_bytes(cpu, tokens))])
            }
        }
    }

    /// Writes y `[M, K]` for x `[M, K]`.
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
        mut out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        self.check(x, out.shape())?;
        self.forward_to(x, &Stored(out_rows(&mut out)), options, Kept::NOTHING)
    }

    /// Adds y, each row with its factor, to what `out` `[M, K]` holds, in `f32`: y is not rounded to T, and a factor costs
    /// no rounding of its own.
    ///
    /// # Errors
    /// As [`Self::forward_opts`]; [`swiglu_core::Error::Shape`] for another number of factors than rows.
    pub fn forward_add(
        &self,
        x: MatrixRef<'_, T>,
        scale: RowScale<'_>,
        mut out: MatrixMut<'_, f32>,
        options: &CallOptions,
    ) -> Result<()> {
        self.check(x, out.shape())?;
        scale.validate(x.rows())?;
        let target = AddedTo { out: out_rows(&mut out), scale };
        self.forward_to(x, &target, options, Kept::NOTHING)
    }

    pub(super) fn check(&self, x: MatrixRef<'_, T>, out: [usize; 2]) -> Result<()> {
        self.gated.expect_weights()?;
        let expected = [x.rows(), self.problem.hidden];
        x.expect_shape("x", expected)?;
        match out == expected {
            true => Ok(()),
            false => Err(Error::shape("output", expected, out)),
        }
    }

    /// Computes y for `target`, which has the rows of x, and keeps gate and up.
    pub(super) fn forward_to(
        &self,
        x: MatrixRef<'_, T>,
        target: &impl Target,
        options: &CallOptions,
        kept: Kept<T>,
    ) -> Result<()> {
        let cpu = &*self.gated.cpu.for_call(options)?;
        // Without features any number of rows is nothing, but for gate and up that are kept.
        if self.problem.hidden == 0 && (self.problem.intermediate == 0 || kept.is_nothing()) {
            return Ok(());
        }
        let bytes = self.takes_bytes(cpu, Tokens::Exactly(x.rows()));
        match &self.gated.kernel {
            GatedKernel::Fused(weights) if self.problem.rows.norm.is_none() => {
                let problem = self.problem.with_m(x.rows());
                for pass in plan::passes(cpu, &problem, Path::Fused).ranges() {
                    let on = (cpu, bytes);
                    match h_dtype(weights) {
                        DType::F32 => self.pass::<f32>(on, weights, (x, pass), target, kept)?,
                        _ => self.pass::<T>(on, weights, (x, pass), target, kept)?,
                    }
                }
                Ok(())
            }
            // A norm takes all of a row of h before any of it goes on.
            _ => cpu.workspaces().with(bytes, |workspace| {
                let (m, h) = (x.rows(), self.problem.intermediate);
                let h_bytes = matrix_bytes::<T>(m, h);
                let [hidden, rest] = cut(workspace, [h_bytes, bytes - total([h_bytes])]);
                let mut hidden = matrix_in(hidden, m, h)?;
                self.gated.forward_in(cpu, rest, x, hidden.reborrow(), kept)?;
                if self.problem.rows.norm.is_some() {
                    let (rows, rounding) = (self.rows.view(), self.problem.numerics.rounding);
                    each_row(cpu, hidden.reborrow(), |row| rows.normalise(rounding, row));
                }
                self.down.forward_to(cpu, rest, hidden.as_ref(), target);
                Ok(())
            }),
        }
    }

    /// Bytes of what a pass keeps in a workspace: packed rows, h, packed rows of h, accumulators, decoded weights.
    fn parts(&self, cpu: &Cpu, weights: &Weights<T>, m: usize) -> [usize; 5] {
        let (down, order) = (self.down.weights(), self.problem.numerics.into());
        let packing = [weights.packing(cpu, m, order), down.packing(cpu, m, order)];
        let h_size = h_dtype(weights).size();
        [
            packing[0].bytes(),
            m * h_row_len(h_size, self.problem.intermediate) * h_size,
            if packing[1].changes_rows() { packing[1].bytes() } else { 0 },
            packing[0].sums_bytes(cpu).max(packing[1].sums_bytes(cpu)),
            weights.scratch_bytes(cpu, packing[0]).max(down.scratch_bytes(cpu, packing[1])),
        ]
    }

    /// Gate, up, activation and down for some rows, in one go: threads move from step to step
    /// without returning. With one row h may already lie as the down projection reads it.
    fn pass<O: Element>(
        &self,
        (cpu, workspace_bytes): (&Cpu, usize),
        weights: &Weights<T>,
        (x, pass): (MatrixRef<'_, T>, Range<usize>),
        target: &impl Target,
        kept: Kept<T>,
    ) -> Result<()> {
        let (m, down_weights) = (pass.len(), self.down.weights());
        let order = self.problem.numerics.into();
        let packing = weights.packing(cpu, m, order);
        let h_packing = down_weights.packing(cpu, m, order);
        let features = self.problem.intermediate;
        let h_len = h_row_len(size_of::<O>(), features);
        let packs_h = h_packing.changes_rows();
        cpu.workspaces().with(workspace_bytes, |workspace| {
            let parts = cut(workspace, self.parts(cpu, weights, m)).map(<[u8]>::as_mut_ptr);
            let [x_rows, h, packed_h, sums, scratch] = parts;
            let (sums, scratch) = (SendPtr(sums.cast()), SendPtr(scratch));
            let x_rows = SendPtr(x_rows);
            let gated = Call { cpu, weights, m, packing, x: x_rows, sums, scratch };
            let down = Call {
                weights: down_weights,
                packing: h_packing,
                x: SendPtr(if packs_h { packed_h } else { h }),
                ..gated
            };
            let h = h.cast::<O>();
            if !packs_h {
                // One row is read in whole pairs, and nothing writes past H: another layer may have left no number there.
                // SAFETY: the part holds m rows of `h_len` values, and there is one row at most.
                unsafe { h.wrapping_add(features).write_bytes(0, m * (h_len - features)) };
            }
            let h_rows = Rows { first: h, stride: h_len, cols: features };
            let h_values = SendPtr(h);
            let h_rows = Shared(h_rows);

            let pack_x =
                |range: Range<usize>, _: usize| gated.pack(Source::Rows(x), pass.start, range);
            let gate_up = |range: Range<usize>, worker: usize| {
                let (h, kept) = (Some(h_rows.get()), kept.from(pass.start));
                gated.panels(range, worker, self.gated.epilogue::<O>(weights, h, kept));
            };
            let pack_h = |range: Range<usize>, _: usize| {
                // SAFETY: the part holds m rows of `h_len` values of O, every pattern of bits being one, which step 2 has
                // written; until the pass ends they are only read.
                let h = unsafe { std::slice::from_raw_parts(h_values.get(), m * h_len) };
                match MatrixRef::with_stride(h, m, features, h_len) {
                    Ok(h) => down.pack(Source::Rows(h), 0, range),
                    Err(error) => unreachable!("m rows of h are a matrix: {error}"),
                }
            };
            let project = |range: Range<usize>, worker: usize| {
                down.panels(range, worker, target.epilogue(down_weights.bias(), pass.start));
            };
            let work = self.problem.with_m(m);
            let bytes = weights.bytes() + down_weights.bytes();
            cpu.run_work(
                (work.flops(), bytes as f64),
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

/// The down projection, in this memory if it has the size.
pub(super) fn down_of<T: Element>(
    cpu: &Cpu,
    memory: Buffer,
    params: &MlpParams<'_, T>,
) -> Result<Linear<T>> {
    let w = &params.gated.weights;
    let (inputs, orientation) = (w.intermediate(), params.down_orientation);
    let part = Part { inputs, orientation, locate: &|k| (params.down, k) };
    let outputs = (w.hidden(), params.gated.numerics.into());
    Linear::of_parts(cpu, memory, outputs, &[part], params.down_bias)
}

/// The type in which h is kept, as the down projection packs it: values of T, for dense weights in f32 or bfloat16.
fn h_dtype<T: Element>(gate_up: &Weights<T>) -> DType {
    match (gate_up, T::DTYPE) {
        (Weights::Dense(_), DType::F16) => DType::F32,
        (_, dtype) => dtype,
    }
}

/// Values of `size` bytes from one row of h to the next: those of whole steps, however many rows there are and
/// however they are packed.
fn h_row_len(size: usize, features: usize) -> usize {
    features.next_multiple_of(size_of::<u32>() / size)
}
