//! What the layers share: rows cut into passes over the weights, and the two steps of a pass.

use std::ops::Range;

use swiglu_core::{DType, Element, MatrixMut};

use crate::compiled;
use crate::cpu::Cpu;
use crate::epilogue::{Epilogue, Rows};
use crate::gemm::{PackedRows, SideBySide, Sums};
use crate::order::Order;
use crate::panels::SendPtr;
use crate::quant::{self, DecodedSums, Dots, FusedSums, PairSums, takes_pairs};
use crate::rows::{Source, Steps};
use crate::simd;
use crate::team::Step;
use crate::tiles::{self, TilePanels};
use crate::weights::{Packing, Weights};
use crate::workspace::{Tokens, cut, total};

/// Packed rows of one pass over the weights stay below this, to be found in the last-level cache.
const ROWS_BYTES: usize = 4 << 20;
/// Packed columns stay below this, to be found in the second-level cache: the result, a gradient of weights, is as long as
/// there are columns, and each panel touches all pages of a pass's part of it.
const COLUMNS_BYTES: usize = 256 << 10;

impl<T: Copy> Source<'_, T> {
    /// What the packed rows of a pass stay below.
    const fn rows_bytes(self) -> usize {
        match self {
            Source::Rows(_) => ROWS_BYTES,
            Source::Columns(_) => COLUMNS_BYTES,
        }
    }
}

/// Weights over the rows of a pass.
pub(crate) struct Call<'a, T> {
    pub(crate) cpu: &'a Cpu,
    pub(crate) weights: &'a Weights<T>,
    pub(crate) m: usize,
    pub(crate) packing: Packing,
    /// Packed rows.
    pub(crate) x: SendPtr<u8>,
    /// Accumulators, a part for each worker.
    pub(crate) sums: SendPtr<f32>,
    /// Decoded weights, a part for each worker.
    pub(crate) scratch: SendPtr<u8>,
}

impl<T: Element> Call<'_, T> {
    /// Packs rows `first ..` of x, the units of `range`.
    pub(crate) fn pack<X: Element>(&self, x: Source<'_, X>, first: usize, range: Range<usize>) {
        // SAFETY: the instruction set was checked when the device was made; the buffer was sized for
        // this packing, and units are disjoint.
        unsafe { self.packing.pack(self.cpu.isa(), (x, first), self.x, range) }
    }

    /// Computes a range of panels.
    pub(crate) fn panels(&self, range: Range<usize>, worker: usize, epilogue: impl Epilogue) {
        let (isa, m) = (self.cpu.isa(), self.m);
        let x = self.x.get();
        // SAFETY: the instruction set was checked when the device was made; the buffers were sized
        // for these rows, and each worker has its own part of `sums` and `scratch`.
        unsafe {
            let sums = self.sums.get().add(worker * self.packing.sums(self.cpu));
            if let (Weights::Dense(panels), Packing::Tiles(layout)) = (self.weights, self.packing) {
                return TilePanels::new(isa, panels, (x, layout), sums).run(range, epilogue);
            }
            if let Packing::Steps { blocks, together: Some(together), .. } = self.packing {
                let rows = PackedRows { x: x.cast(), blocks, sums };
                return self.side_by_side(rows, (range, together), epilogue);
            }
            for panel in range {
                match (self.weights, self.packing) {
                    (Weights::Dense(panels), Packing::Steps { blocks, .. }) => {
                        let rows = PackedRows { x: x.cast(), blocks, sums };
                        compiled::sums(isa, Sums::new(panels, panel, rows));
                    }
                    (Weights::Quantized(panels), Packing::Steps { blocks, steps, .. }) => {
                        let rows = PackedRows { x: x.cast(), blocks, sums };
                        let scratch = (self.scratch.get(), worker);
                        if let Steps::Runs { .. } = steps {
                            let kernel = PairSums::new(panels, panel, rows, scratch);
                            compiled::pair_sums(isa, kernel);
                        } else {
                            let kernel = DecodedSums::new(panels, panel, rows, scratch);
                            compiled::decoded_sums(isa, kernel);
                        }
                    }
                    (Weights::Quantized(panels), Packing::Digits { .. }) => {
                        compiled::dots(isa, Dots::new(panels, panel, x, m, sums));
                    }
                    (Weights::Dense(_), Packing::Digits { .. }) | (_, Packing::Tiles(_)) => {
                        unreachable!("no such rows for such weights, see Weights::packing")
                    }
                }
                epilogue.finish(isa, panel, 0, sums, m);
            }
        }
    }

    /// Computes a range of panels, so many at a time.
    ///
    /// # Safety
    /// As of the kernel and the epilogue; there is room for the sums of so many panels.
    unsafe fn side_by_side(
        &self,
        rows: PackedRows,
        (mut range, together): (Range<usize>, usize),
        epilogue: impl Epilogue,
    ) {
        let (isa, m) = (self.cpu.isa(), self.m);
        while !range.is_empty() {
            let count = 1 << range.len().min(together).ilog2();
            let group = range.start..range.start + count;
            range.start = group.end;
            // SAFETY: the caller's.
            unsafe {
                match self.weights {
                    Weights::Dense(panels) => {
                        compiled::side_by_side(isa, SideBySide::new(panels, group.clone(), rows));
                    }
                    Weights::Quantized(panels) => {
                        let x = (rows.x, m);
                        let kernel = FusedSums::new(panels, group.clone(), x, rows.sums);
                        compiled::fused_sums(isa, kernel);
                    }
                }
                for (i, panel) in group.enumerate() {
                    let sums = rows.sums.add(i * m * 2 * simd::lanes(isa));
                    epilogue.finish(isa, panel, 0, sums, m);
                }
            }
        }
    }
}

/// The most bytes that one of many packed rows of `n` inputs has, but for tiles.
fn packed_row_bytes(cpu: &Cpu, n: usize, dtype: DType, quantized: bool, order: Order) -> usize {
    let steps = match quantized {
        false => Steps::Dense,
        true if order == Order::Common && !simd::short_sums(cpu.isa()) => {
            return quant::row_bytes(1, n);
        }
        true if takes_pairs(cpu.isa(), dtype) => Steps::Runs { sums: 2 },
        true => Steps::Wide,
    };
    steps.count(dtype, n) * size_of::<u32>()
}

/// Passes of `m` rows over weights of these numbers of inputs, one after the other.
pub(crate) fn passes(
    cpu: &Cpu,
    m: usize,
    dtype: DType,
    quantized: bool,
    order: Order,
    inputs: &[usize],
) -> Passes {
    passes_below(ROWS_BYTES, cpu, m, dtype, quantized, order, inputs)
}

/// As [`passes`], with packed rows of so many bytes at most.
fn passes_below(
    rows_bytes: usize,
    cpu: &Cpu,
    m: usize,
    dtype: DType,
    quantized: bool,
    order: Order,
    inputs: &[usize],
) -> Passes {
    if !quantized && tiles::take(cpu.isa(), dtype, m, order) {
        return Passes::new(m, tiles::PASS_ROWS, tiles::BLOCK_ROWS);
    }
    // The packed rows of a pass share the cache.
    let bytes: usize =
        inputs.iter().map(|&n| packed_row_bytes(cpu, n, dtype, quantized, order)).sum();
    let bytes_per_row = bytes / inputs.len();
    let steps = if quantized { Steps::Wide } else { Steps::Dense };
    let tile = steps.tile_rows(cpu.isa(), dtype);
    let most = (rows_bytes / bytes_per_row.max(1) / tile).max(4) * tile;
    Passes::new(m, most, 1)
}

/// M cut into as few passes as there can be, of nearly the same size: a last pass of a few rows would be
/// computed another way, in another order of summation.
#[derive(Clone, Copy)]
pub(crate) struct Passes {
    m: usize,
    most: usize,
    /// Rows that stay together.
    unit: usize,
    pub(crate) count: usize,
}

impl Passes {
    /// Passes of at most `most` rows, a multiple of `unit`. Their sizes differ by one unit at most, but for
    /// the rows that the last unit of all lacks.
    fn new(m: usize, most: usize, unit: usize) -> Self {
        Self { m, most, unit, count: m.div_ceil(most) }
    }

    /// The passes in turn.
    pub(crate) fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count).map(move |pass| self.start(pass)..self.start(pass + 1))
    }

    /// The first row of a pass.
    fn start(self, pass: usize) -> usize {
        let units = self.m.div_ceil(self.unit) as u128;
        // At most all units: it fits.
        let first = (pass as u128 * units / self.count.max(1) as u128) as usize;
        first.saturating_mul(self.unit).min(self.m)
    }

    /// The numbers of rows that passes have, whatever there are of them: those of whole units differ by one unit.
    fn sizes(self) -> [usize; 3] {
        let units = self.m.div_ceil(self.unit);
        let last = self.m - self.start(self.count.saturating_sub(1));
        match self.count {
            0 | 1 => [last; 3],
            // All but the last, whose units may be the only ones that are one more.
            count => {
                let more = if units % count > 1 { units.div_ceil(count) } else { units / count };
                [last, units / count * self.unit, more * self.unit]
            }
        }
    }

    /// Rows of the largest pass.
    pub(crate) fn most_rows(self) -> usize {
        self.sizes().into_iter().max().unwrap_or(0)
    }

    /// The most bytes that a pass takes, of those for `tokens`: these are the passes for the most of them.
    pub(crate) fn most_bytes(self, tokens: Tokens, bytes: impl Fn(usize) -> usize) -> usize {
        let most = match tokens {
            Tokens::Exactly(_) => self.sizes().into_iter().map(bytes).max(),
            // Numbers of rows are packed in ways of their own, and more of them can take less.
            Tokens::UpTo(_) => (1..=self.m.min(self.most)).map(bytes).max(),
        };
        most.unwrap_or(0)
    }
}

/// Rows of an output.
pub(crate) fn out_rows<T: Element>(out: &mut MatrixMut<'_, T>) -> Shared<T> {
    let (stride, cols) = (out.row_stride(), out.cols());
    Shared(Rows { first: out.as_mut_slice().as_mut_ptr(), stride, cols })
}

/// Changes each row of a matrix, a row by one thread.
pub(crate) fn each_row<T: Element>(
    cpu: &Cpu,
    mut m: MatrixMut<'_, T>,
    step: impl Fn(&mut [T]) + Sync,
) {
    /// Operations for an element, about: it is read twice or three times and converted each time.
    const WORK: f64 = 40.0;
    let (rows, cols) = (m.rows(), m.cols());
    let first = out_rows(&mut m);
    let run = |range: Range<usize>, _: usize| {
        for row in range {
            let Rows { first, stride, cols } = first.get();
            // SAFETY: the row lies in the matrix, and no other unit is of it.
            step(unsafe { std::slice::from_raw_parts_mut(first.add(row * stride), cols) });
        }
    };
    let work = WORK * rows as f64 * cols as f64;
    cpu.run(cpu.workers(work, 0.0), &[Step { units: rows, run: &run }]);
}

/// Rows of an output, handed to workers that write disjoint columns of it.
#[derive(Clone, Copy)]
pub(crate) struct Shared<O>(pub(crate) Rows<O>);
// SAFETY: workers write disjoint columns.
unsafe impl<O> Send for Shared<O> {}
// SAFETY: as above.
unsafe impl<O> Sync for Shared<O> {}
impl<O: Element> Shared<O> {
    pub(crate) fn get(self) -> Rows<O> {
        self.0
    }

    /// Rows from row `r` on.
    pub(crate) fn from(self, r: usize) -> Rows<O> {
        self.0.from(r)
    }
}

/// Bytes of what a linear map over `m` rows keeps in a workspace: packed rows, accumulators, decoded weights.
fn parts<T: Element>(cpu: &Cpu, weights: &Weights<T>, packing: Packing) -> [usize; 3] {
    [packing.bytes(), packing.sums_bytes(cpu), weights.scratch_bytes(cpu, packing)]
}

/// Bytes of workspace that [`linear_map`] takes of rows.
pub(crate) fn linear_map_bytes<T: Element>(
    cpu: &Cpu,
    ordered: (&Weights<T>, Order),
    tokens: Tokens,
) -> usize {
    bytes_below(ROWS_BYTES, cpu, ordered, tokens)
}

/// Bytes of workspace that [`linear_map`] takes of so many columns.
pub(crate) fn of_columns_bytes<T: Element>(
    cpu: &Cpu,
    ordered: (&Weights<T>, Order),
    columns: usize,
) -> usize {
    bytes_below(COLUMNS_BYTES, cpu, ordered, Tokens::Exactly(columns))
}

fn bytes_below<T: Element>(
    rows_bytes: usize,
    cpu: &Cpu,
    (weights, order): (&Weights<T>, Order),
    tokens: Tokens,
) -> usize {
    let quantized = matches!(weights, Weights::Quantized(_));
    let passes = passes_below(
        rows_bytes,
        cpu,
        tokens.most(),
        T::DTYPE,
        quantized,
        order,
        &[weights.inputs()],
    );
    passes.most_bytes(tokens, |m| total(parts(cpu, weights, weights.packing(cpu, m, order))))
}

/// One linear map over all rows of x: pack the rows of a pass, run the panels over them, and so on. The epilogue is asked
/// for by the first row of a pass.
pub(crate) fn linear_map<T: Element, E: Epilogue>(
    cpu: &Cpu,
    (weights, order): (&Weights<T>, Order),
    workspace: &mut [u8],
    x: Source<'_, T>,
    epilogue: impl Fn(usize) -> E + Sync,
) {
    // Without features any number of rows is nothing.
    if weights.panels() == 0 {
        return;
    }
    let quantized = matches!(weights, Weights::Quantized(_));
    let inputs = [x.inputs()];
    let passes = passes_below(x.rows_bytes(), cpu, x.rows(), T::DTYPE, quantized, order, &inputs);
    for pass in passes.ranges() {
        let m = pass.len();
        let packing = weights.packing(cpu, m, order);
        let [rows, sums, scratch] = cut(workspace, parts(cpu, weights, packing));
        let call = Call {
            cpu,
            weights,
            m,
            packing,
            x: SendPtr(rows.as_mut_ptr()),
            sums: SendPtr(sums.as_mut_ptr().cast()),
            scratch: SendPtr(scratch.as_mut_ptr()),
        };
        let pack = |range: Range<usize>, _: usize| call.pack(x, pass.start, range);
        let run = |range: Range<usize>, worker: usize| {
            call.panels(range, worker, epilogue(pass.start));
        };
        cpu.run_work(
            (weights.flops(m), weights.bytes() as f64),
            &[
                Step { units: packing.units(), run: &pack },
                Step { units: weights.panels(), run: &run },
            ],
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_passes_are_those_of_all() {
        for (most, unit) in [(1, 1), (4, 2), (12, 4), (12, 12), (60, 6)] {
            for m in 0..400 {
                let passes = Passes::new(m, most, unit);
                let all: Vec<usize> = passes.ranges().map(|pass| pass.len()).collect();
                assert_eq!(
                    passes.most_rows(),
                    all.iter().copied().max().unwrap_or(0),
                    "{m} {most} {unit}"
                );
                assert!(
                    all.iter().all(|rows| passes.sizes().contains(rows)),
                    "{m} {most} {unit}: {all:?}"
                );
                assert_eq!(all.iter().sum::<usize>(), m);
            }
            assert!(Passes::new(usize::MAX, most, unit).most_rows() <= most);
        }
    }
}
