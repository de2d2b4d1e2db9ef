//! Layers with packed weights.

use std::marker::PhantomData;
use std::ops::Range;

use swiglu_core::{
    Activation, DType, Element, GateUpRef, GatedLinearParams, Half, MatrixMut, MatrixRef,
    MlpParams, Numerics, Orientation, Path, Plan, Problem, Result, Rounding,
};

use crate::buffer::Buffer;
use crate::compiled;
use crate::cpu::Cpu;
use crate::gemm::{Blocks, Epilogue, Gated, PanelRange, Plain, Rows};
use crate::panels::{Panels, SendPtr};
use crate::rows::{PackBlocks, PackRows};
use crate::simd;
use crate::team::Step;
use crate::workspace::Workspaces;

/// Packed rows of one pass over the weights stay below this, to be found in the last-level cache.
const ROWS_BYTES: usize = 4 << 20;

/// The fused layer: one set of panels, or the three separate operations.
#[derive(Debug)]
enum GatedKernel<T> {
    Fused(Panels<T>),
    Unfused(Box<Halves<T>>),
}

/// Gate and up as layers of their own.
#[derive(Debug)]
struct Halves<T> {
    gate: Linear<T>,
    up: Linear<T>,
}

/// A gated linear layer whose weights are packed for one [`Cpu`].
#[derive(Debug)]
pub struct GatedLinear<T> {
    cpu: Cpu,
    problem: Problem,
    kernel: GatedKernel<T>,
    workspaces: Workspaces,
}

/// A task that packs rows, and one that runs panels over them.
struct Call<'a, T> {
    cpu: &'a Cpu,
    panels: &'a Panels<T>,
    blocks: Blocks,
    x: SendPtr<u32>,
    sums: SendPtr<f32>,
}

impl<T: Element> Call<'_, T> {
    fn panels(&self, range: Range<usize>, worker: usize, epilogue: impl Epilogue) {
        let sums_per_worker = self.blocks.m * 2 * simd::lanes(self.cpu.isa());
        // SAFETY: the instruction set was checked when the device was made; the buffers were sized
        // for these blocks, and each worker has its own part of `sums`.
        unsafe {
            let kernel = PanelRange {
                panels: self.panels,
                range,
                x: self.x.get(),
                blocks: self.blocks,
                sums: self.sums.get().add(worker * sums_per_worker),
            };
            kernel.run(self.cpu.isa(), epilogue);
        }
    }
}

fn pack_rows<T: Element>(cpu: &Cpu, task: PackRows<'_, T>, range: Range<usize>) {
    // SAFETY: the instruction set was checked when the device was made; `out` was sized for the
    // blocks, which are disjoint.
    unsafe { compiled::pack_rows(cpu.isa(), PackBlocks(task, range)) }
}

/// Bytes of `m` packed rows.
fn rows_bytes<T: Element>(panels: &Panels<T>, m: usize) -> usize {
    m * panels.steps() * size_of::<u32>()
}

fn sums_bytes(cpu: &Cpu, m: usize) -> usize {
    cpu.threads() * m * 2 * simd::lanes(cpu.isa()) * size_of::<f32>()
}

/// Rows of one pass over weights whose packed rows take `bytes_per_row`.
fn pass_rows(cpu: &Cpu, m: usize, bytes_per_row: usize) -> usize {
    let tile = simd::tile_rows(cpu.isa());
    let most = (ROWS_BYTES / bytes_per_row.max(1) / tile).max(4) * tile;
    m.div_ceil(m.div_ceil(most).max(1)).max(1)
}

/// M cut into passes of at most `rows` rows.
fn passes(m: usize, rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..m).step_by(rows).map(move |start| start..(start + rows).min(m))
}

fn out_rows<T: Element>(out: &mut MatrixMut<'_, T>, first: usize) -> Rows<T> {
    let (stride, cols) = (out.row_stride(), out.cols());
    // A wrapping offset: an output without columns has no buffer to point into.
    let first = out.as_mut_slice().as_mut_ptr().wrapping_add(first * stride);
    Rows { first, stride, cols }
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

fn buffer_matrix<T: Element>(buffer: &mut Buffer, m: usize, n: usize) -> Result<MatrixMut<'_, T>> {
    buffer.reserve(m * n * size_of::<T>())?;
    // SAFETY: the buffer holds at least m·n zeroed values of T.
    let data = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), m * n) };
    MatrixMut::new(data, m, n)
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
        params.validate()?;
        let w = &params.weights;
        let half = |half, bias| {
            Linear::new(cpu, w.intermediate(), w.hidden(), w.layout().orientation, bias, &|h| {
                w.locate(half, h)
            })
        };
        let kernel = match path {
            Path::Fused => {
                GatedKernel::Fused(Panels::gated(cpu, w, [params.gate_bias, params.up_bias])?)
            }
            Path::Unfused => GatedKernel::Unfused(Box::new(Halves {
                gate: half(Half::Gate, params.gate_bias)?,
                up: half(Half::Up, params.up_bias)?,
            })),
        };
        let mut problem = params.problem(0);
        if path == Path::Unfused && problem.numerics.rounding == Rounding::Fused {
            problem.numerics.rounding = Rounding::PreRound;
        }
        Ok(Self { cpu: cpu.clone(), problem, kernel, workspaces: Workspaces::default() })
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
        let problem = Problem { m, ..self.problem };
        let rows = match &self.kernel {
            GatedKernel::Fused(panels) => pass_rows(&self.cpu, m, rows_bytes(panels, 1)),
            GatedKernel::Unfused(halves) => halves.gate.pass_rows(m),
        };
        self.cpu.plan_linear(problem, self.path(), rows)
    }

    fn check(&self, x: MatrixRef<'_, T>, out: &MatrixMut<'_, T>) -> Result<()> {
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        out.expect_shape("output", [x.rows(), self.intermediate()])
    }

    /// Writes h `[M, H]` for x `[M, K]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if x or out has another shape.
    pub fn forward(&self, x: MatrixRef<'_, T>, mut out: MatrixMut<'_, T>) -> Result<()> {
        self.check(x, &out)?;
        let panels = match &self.kernel {
            GatedKernel::Fused(panels) => panels,
            GatedKernel::Unfused(halves) => return self.unfused(halves, x, out),
        };
        let rows = pass_rows(&self.cpu, x.rows(), rows_bytes(panels, 1));
        self.workspaces.with(|ws| {
            for pass in passes(x.rows(), rows) {
                ws.x.reserve(rows_bytes(panels, pass.len()))?;
                ws.sums.reserve(sums_bytes(&self.cpu, pass.len()))?;
                let call = Call {
                    cpu: &self.cpu,
                    panels,
                    blocks: Blocks::new(pass.len(), simd::tile_rows(self.cpu.isa())),
                    x: SendPtr(ws.x.as_mut_ptr().cast()),
                    sums: SendPtr(ws.sums.as_mut_ptr().cast()),
                };
                let out = Shared(out_rows(&mut out, pass.start));
                let task = PackRows { x, first: pass.start, blocks: call.blocks, out: call.x };
                let pack = |range: Range<usize>, _: usize| pack_rows(&self.cpu, task, range);
                let gated = |range: Range<usize>, worker: usize| {
                    call.panels(range, worker, self.epilogue::<T>(panels, out.get()));
                };
                let work = Problem { m: pass.len(), ..self.problem };
                self.cpu.run(
                    self.cpu.workers(work.flops(), panels.bytes() as f64),
                    &[
                        Step { units: call.blocks.count(), run: &pack },
                        Step { units: panels.panels(), run: &gated },
                    ],
                );
            }
            Ok(())
        })
    }

    fn epilogue<O: Element>(&self, panels: &Panels<T>, out: Rows<O>) -> Gated<T, O> {
        Gated {
            activation: self.problem.activation,
            numerics: self.problem.numerics,
            bias: panels.bias(),
            out,
            element: PhantomData,
        }
    }

    /// Three operations, gate and up in memory between them.
    fn unfused(
        &self,
        halves: &Halves<T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        let (m, h) = (x.rows(), self.intermediate());
        self.workspaces.with(|ws| {
            halves.gate.forward(x, buffer_matrix(&mut ws.x, m, h)?)?;
            halves.up.forward(x, buffer_matrix(&mut ws.h, m, h)?)?;
            let inputs = unfused_arrangement(&ws.x, &ws.h, m, h)?;
            self.cpu.activation(&self.problem.activation, self.problem.numerics, inputs, out)
        })
    }
}

/// Rows of an output, handed to workers that write disjoint columns of it.
#[derive(Clone, Copy)]
struct Shared<O>(Rows<O>);
// SAFETY: workers write disjoint columns.
unsafe impl<O> Send for Shared<O> {}
// SAFETY: as above.
unsafe impl<O> Sync for Shared<O> {}
impl<O: Copy> Shared<O> {
    fn get(self) -> Rows<O> {
        self.0
    }
}

/// A linear map with packed weights: the down projection, and a half of the unfused layer.
#[derive(Debug)]
struct Linear<T> {
    cpu: Cpu,
    panels: Panels<T>,
    outputs: usize,
    workspaces: Workspaces,
}

impl<T: Element> Linear<T> {
    fn new<'a>(
        cpu: &Cpu,
        outputs: usize,
        inputs: usize,
        orientation: Orientation,
        bias: Option<&[f32]>,
        locate: &(dyn Fn(usize) -> (MatrixRef<'a, T>, usize) + Sync),
    ) -> Result<Self> {
        let panels = Panels::linear(cpu, outputs, inputs, orientation, locate, bias)?;
        Ok(Self { cpu: cpu.clone(), panels, outputs, workspaces: Workspaces::default() })
    }

    fn pass_rows(&self, m: usize) -> usize {
        pass_rows(&self.cpu, m, rows_bytes(&self.panels, 1))
    }

    fn flops(&self, m: usize) -> f64 {
        2.0 * m as f64 * self.outputs as f64 * self.panels.inputs() as f64
    }

    fn epilogue(&self, out: Rows<T>) -> Plain<T> {
        Plain { bias: self.panels.bias(), out }
    }

    fn forward(&self, x: MatrixRef<'_, T>, mut out: MatrixMut<'_, T>) -> Result<()> {
        self.workspaces.with(|ws| {
            for pass in passes(x.rows(), self.pass_rows(x.rows())) {
                ws.x.reserve(rows_bytes(&self.panels, pass.len()))?;
                ws.sums.reserve(sums_bytes(&self.cpu, pass.len()))?;
                let call = Call {
                    cpu: &self.cpu,
                    panels: &self.panels,
                    blocks: Blocks::new(pass.len(), simd::tile_rows(self.cpu.isa())),
                    x: SendPtr(ws.x.as_mut_ptr().cast()),
                    sums: SendPtr(ws.sums.as_mut_ptr().cast()),
                };
                let out = Shared(out_rows(&mut out, pass.start));
                let task = PackRows { x, first: pass.start, blocks: call.blocks, out: call.x };
                let pack = |range: Range<usize>, _: usize| pack_rows(&self.cpu, task, range);
                let plain = |range: Range<usize>, worker: usize| {
                    call.panels(range, worker, self.epilogue(out.get()));
                };
                self.cpu.run(
                    self.cpu.workers(self.flops(pass.len()), self.panels.bytes() as f64),
                    &[
                        Step { units: call.blocks.count(), run: &pack },
                        Step { units: self.panels.panels(), run: &plain },
                    ],
                );
            }
            Ok(())
        })
    }
}

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
        let problem = Problem { m, ..self.problem };
        let rows = match &self.gated.kernel {
            GatedKernel::Fused(panels) => self.pass_rows(panels, m),
            GatedKernel::Unfused(halves) => halves.gate.pass_rows(m),
        };
        self.gated.cpu.plan_linear(problem, self.gated.path(), rows)
    }

    /// Packed x and packed h of a pass share the cache.
    fn pass_rows(&self, panels: &Panels<T>, m: usize) -> usize {
        let bytes = rows_bytes(panels, 1) + rows_bytes(&self.down.panels, 1);
        pass_rows(&self.gated.cpu, m, bytes / 2)
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
                for pass in passes(x.rows(), self.pass_rows(panels, x.rows())) {
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
        let (m, h_steps) = (pass.len(), self.down.panels.steps());
        self.gated.workspaces.with(|ws| {
            ws.x.reserve(rows_bytes(panels, m))?;
            ws.h.reserve(rows_bytes(&self.down.panels, m))?;
            ws.packed_h.reserve(if m > 1 { rows_bytes(&self.down.panels, m) } else { 0 })?;
            ws.sums.reserve(sums_bytes(cpu, m))?;
            let blocks = Blocks::new(m, simd::tile_rows(cpu.isa()));
            let sums = SendPtr(ws.sums.as_mut_ptr().cast());
            let h = ws.h.as_mut_ptr();
            let gated = Call { cpu, panels, blocks, x: SendPtr(ws.x.as_mut_ptr().cast()), sums };
            let down_x = if m > 1 { ws.packed_h.as_mut_ptr() } else { h };
            let down =
                Call { cpu, panels: &self.down.panels, blocks, x: SendPtr(down_x.cast()), sums };
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
            let (h_rows, y_rows) = (Shared(h_rows), Shared(out_rows(out, pass.start)));

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
            let bytes = panels.bytes() + self.down.panels.bytes();
            cpu.run(
                cpu.workers(work.flops(), bytes as f64),
                &[
                    Step { units: blocks.count(), run: &pack_x },
                    Step { units: panels.panels(), run: &gate_up },
                    Step { units: if m > 1 { blocks.count() } else { 0 }, run: &pack_h },
                    Step { units: self.down.panels.panels(), run: &project },
                ],
            );
            Ok(())
        })
    }
}
