//! What the layers share: rows cut into passes over the weights, and the two steps of a pass.

use std::ops::Range;

use swiglu_core::{Element, MatrixMut, MatrixRef, Result};

use crate::compiled;
use crate::cpu::Cpu;
use crate::epilogue::{Epilogue, Rows};
use crate::gemm::{Blocks, PanelRange};
use crate::panels::{Panels, SendPtr};
use crate::rows::{PackBlocks, PackRows};
use crate::simd;
use crate::team::Step;
use crate::workspace::Workspaces;

/// Packed rows of one pass over the weights stay below this, to be found in the last-level cache.
const ROWS_BYTES: usize = 4 << 20;

/// Panels over the rows of a pass.
pub(crate) struct Call<'a, T> {
    pub(crate) cpu: &'a Cpu,
    pub(crate) panels: &'a Panels<T>,
    pub(crate) blocks: Blocks,
    /// Packed rows.
    pub(crate) x: SendPtr<u32>,
    /// Accumulators, a part for each worker.
    pub(crate) sums: SendPtr<f32>,
}

impl<T: Element> Call<'_, T> {
    /// Computes a range of panels.
    pub(crate) fn panels(&self, range: Range<usize>, worker: usize, epilogue: impl Epilogue) {
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

/// Packs a range of row blocks.
pub(crate) fn pack_rows<T: Element>(cpu: &Cpu, task: PackRows<'_, T>, range: Range<usize>) {
    // SAFETY: the instruction set was checked when the device was made; `out` was sized for the
    // blocks, which are disjoint.
    unsafe { compiled::pack_rows(cpu.isa(), PackBlocks(task, range)) }
}

/// Bytes of `m` packed rows.
pub(crate) fn rows_bytes<T: Element>(panels: &Panels<T>, m: usize) -> usize {
    m * panels.steps() * size_of::<u32>()
}

/// Bytes of the accumulators of all workers.
pub(crate) fn sums_bytes(cpu: &Cpu, m: usize) -> usize {
    cpu.threads() * m * 2 * simd::lanes(cpu.isa()) * size_of::<f32>()
}

/// Rows of one pass over weights whose packed rows take `bytes_per_row`.
pub(crate) fn pass_rows(cpu: &Cpu, m: usize, bytes_per_row: usize) -> usize {
    let tile = simd::tile_rows(cpu.isa());
    let most = (ROWS_BYTES / bytes_per_row.max(1) / tile).max(4) * tile;
    m.div_ceil(m.div_ceil(most).max(1)).max(1)
}

/// M cut into passes of at most `rows` rows.
pub(crate) fn passes(m: usize, rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..m).step_by(rows).map(move |start| start..(start + rows).min(m))
}

/// Rows of an output from row `first` on.
pub(crate) fn out_rows<T: Element>(out: &mut MatrixMut<'_, T>, first: usize) -> Shared<T> {
    let (stride, cols) = (out.row_stride(), out.cols());
    // A wrapping offset: an output without columns has no buffer to point into.
    let first = out.as_mut_slice().as_mut_ptr().wrapping_add(first * stride);
    Shared(Rows { first, stride, cols })
}

/// Rows of an output, handed to workers that write disjoint columns of it.
#[derive(Clone, Copy)]
pub(crate) struct Shared<O>(pub(crate) Rows<O>);
// SAFETY: workers write disjoint columns.
unsafe impl<O> Send for Shared<O> {}
// SAFETY: as above.
unsafe impl<O> Sync for Shared<O> {}
impl<O: Copy> Shared<O> {
    pub(crate) fn get(self) -> Rows<O> {
        self.0
    }
}

/// One linear map over all rows of x: pack the rows of a pass, run the panels over them, and so on.
pub(crate) fn linear_map<T: Element, E: Epilogue>(
    cpu: &Cpu,
    panels: &Panels<T>,
    workspaces: &Workspaces,
    x: MatrixRef<'_, T>,
    mut out: MatrixMut<'_, T>,
    epilogue: impl Fn(Rows<T>) -> E + Sync,
) -> Result<()> {
    let rows = pass_rows(cpu, x.rows(), rows_bytes(panels, 1));
    workspaces.with(|ws| {
        for pass in passes(x.rows(), rows) {
            ws.x.reserve(rows_bytes(panels, pass.len()))?;
            ws.sums.reserve(sums_bytes(cpu, pass.len()))?;
            let call = Call {
                cpu,
                panels,
                blocks: Blocks::new(pass.len(), simd::tile_rows(cpu.isa())),
                x: SendPtr(ws.x.as_mut_ptr().cast()),
                sums: SendPtr(ws.sums.as_mut_ptr().cast()),
            };
            let out = out_rows(&mut out, pass.start);
            let task = PackRows { x, first: pass.start, blocks: call.blocks, out: call.x };
            let pack = |range: Range<usize>, _: usize| pack_rows(cpu, task, range);
            let run = |range: Range<usize>, worker: usize| {
                call.panels(range, worker, epilogue(out.get()));
            };
            cpu.run(
                cpu.workers(panels.flops(pass.len()), panels.bytes() as f64),
                &[
                    Step { units: call.blocks.count(), run: &pack },
                    Step { units: panels.panels(), run: &run },
                ],
            );
        }
        Ok(())
    })
}
