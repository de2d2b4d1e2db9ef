//! The matrix kernel over AMX tiles: many rows of bfloat16.
//!
//! A panel of weights is read as it was packed for vectors: 16 steps of it are two tiles, one of gate
//! and one of up features (or two of a plain panel), 16 pairs of inputs by 16 features each. Rows are
//! packed into tiles of 16 rows by 32 inputs. Two tiles of rows times two of weights make four of sums,
//! over a chunk of inputs; between chunks the sums rest in memory. The order of additions depends on the
//! number of inputs alone, so among tiles a row has the same bits whatever the other rows and the threads.
//!
//! Floors, what was measured and what was tried: docs/kernels/cpu.md.

use std::ops::Range;

use swiglu_core::{DType, Element, MatrixRef};

use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::order::Order;
use crate::panels::{Panels, SendPtr};
use crate::rows::Source;
use crate::simd::amx::{self, Product, Tiles};

/// Rows of a block: two tiles.
pub(crate) const BLOCK_ROWS: usize = 2 * amx::ROWS;
/// From this many rows on tiles are faster than vectors, see above.
const ROWS_MIN: usize = 5;
/// Most rows of a pass over the weights. Passes are cut into whole blocks: of 272 and 300 rows, cut in the
/// middle, the gated layer 896 → 4864 took 6 to 8 % longer.
pub(crate) const PASS_ROWS: usize = 256;
/// Steps of a chunk: as many as keep its 32 KiB of weights in the first-level cache, beside the rows
/// that stream through it.
const CHUNK_STEPS: usize = 16;
/// Rows that are packed to fewer bytes than these stay in the second-level cache over all panels.
const ROWS_BYTES: usize = 1 << 20;
/// Panels that share each chunk of rows where those do not stay.
const GROUP_PANELS: usize = 8;
/// Output features of a panel, and sums of a row.
const COLUMNS: usize = 32;

/// Whether `m` rows of `dtype` go through tiles: with a common order all do, since the instruction adds up its
/// products otherwise than vectors do, and many rows take a multiple of the time without it.
pub(crate) fn take(isa: Isa, dtype: DType, m: usize, order: Order) -> bool {
    let least = match order {
        Order::OfRows => ROWS_MIN,
        Order::Common => 1,
    };
    isa == Isa::AmxBf16 && dtype == DType::Bf16 && m >= least
}

/// Steps that a panel is padded to with zeros, so that no tile reads past it.
pub(crate) fn padded_steps(isa: Isa, dtype: DType, steps: usize) -> usize {
    match (isa, dtype) {
        (Isa::AmxBf16, DType::Bf16) => steps.next_multiple_of(amx::FEATURES / 2),
        _ => steps,
    }
}

/// How rows are packed and passed over: chunk after chunk of inputs, in each all blocks of two tiles of
/// rows, in each step after step. Missing rows and inputs are zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) m: usize,
    pub(crate) inputs: usize,
}

impl Layout {
    fn tiles(self) -> usize {
        self.m.div_ceil(amx::ROWS)
    }
    fn steps(self) -> usize {
        self.inputs.div_ceil(amx::FEATURES)
    }
    /// Blocks of rows: of two tiles, but for the last.
    pub(crate) fn blocks(self) -> usize {
        self.tiles().div_ceil(2)
    }
    /// Rows of the first block, with the zeros that fill its last tile.
    pub(crate) fn block_rows(self) -> usize {
        self.tiles_of(0) * amx::ROWS
    }
    /// Tiles of a block.
    fn tiles_of(self, block: usize) -> usize {
        (self.tiles() - 2 * block).min(2)
    }
    /// A sum is zero without inputs too, so that there is always a chunk.
    fn chunks(self) -> usize {
        self.steps().div_ceil(CHUNK_STEPS).max(1)
    }
    fn steps_of(self, chunk: usize) -> usize {
        (self.steps() - chunk * CHUNK_STEPS).min(CHUNK_STEPS)
    }
    /// Where a block of a chunk begins.
    fn offset(self, chunk: usize, block: usize) -> usize {
        let tiles = chunk * CHUNK_STEPS * self.tiles() + 2 * block * self.steps_of(chunk);
        tiles * amx::BYTES
    }
    /// Bytes of the packed rows.
    pub(crate) fn bytes(self) -> usize {
        self.tiles() * self.steps() * amx::BYTES
    }
    /// Panels that are passed over together.
    fn group(self) -> usize {
        if self.bytes() <= ROWS_BYTES { 1 } else { GROUP_PANELS }
    }
    /// Sums of a panel.
    fn panel_sums(self) -> usize {
        self.tiles() * amx::ROWS * COLUMNS
    }
    /// Sums of one worker: of the panels at hand and of those that are being finished.
    pub(crate) fn sums(self) -> usize {
        2 * self.group() * self.panel_sums()
    }
}

/// Packs blocks of rows, `first ..` of x.
///
/// # Safety
/// `out` has [`Layout::bytes`]; each block is packed by one worker.
pub(crate) unsafe fn pack<T: Element>(
    layout: Layout,
    (x, first): (Source<'_, T>, usize),
    out: SendPtr<u8>,
    range: Range<usize>,
) {
    debug_assert_eq!((x.inputs(), T::DTYPE), (layout.inputs, DType::Bf16), "rows of the layout");
    const ROW_BYTES: usize = 64;
    for block in range {
        let tiles = layout.tiles_of(block);
        for lane in 0..tiles * amx::ROWS {
            let row = block * BLOCK_ROWS + lane;
            let bytes: &[u8] = match x {
                Source::Rows(x) if row < layout.m => {
                    let row = x.row(first + row);
                    // SAFETY: values of bfloat16 are bytes.
                    unsafe { std::slice::from_raw_parts(row.as_ptr().cast(), size_of_val(row)) }
                }
                _ => &[],
            };
            let (tile, lane) = (lane / amx::ROWS, lane % amx::ROWS);
            for step in 0..layout.steps() {
                let (chunk, in_chunk) = (step / CHUNK_STEPS, step % CHUNK_STEPS);
                let at = layout.offset(chunk, block)
                    + (in_chunk * tiles + tile) * amx::BYTES
                    + lane * ROW_BYTES;
                if let Source::Columns(x) = x {
                    let column = (row < layout.m).then_some(first + row);
                    // SAFETY: rows of tiles lie inside the buffer, and in this block.
                    unsafe { pack_column(x, column, step, out.get().add(at).cast()) };
                    continue;
                }
                let from = bytes.len().min(step * ROW_BYTES);
                let given = (bytes.len() - from).min(ROW_BYTES);
                // SAFETY: rows of tiles lie inside the buffer, and in this block.
                unsafe {
                    let out = out.get().add(at);
                    out.copy_from_nonoverlapping(bytes.as_ptr().add(from), given);
                    out.add(given).write_bytes(0, ROW_BYTES - given);
                }
            }
        }
    }
}

/// Writes the values that a step has of a column, and zeros where there are none.
///
/// # Safety
/// `out` has room for [`amx::FEATURES`] values.
unsafe fn pack_column<T: Element>(
    x: MatrixRef<'_, T>,
    column: Option<usize>,
    step: usize,
    out: *mut T,
) {
    for i in 0..amx::FEATURES {
        let row = step * amx::FEATURES + i;
        let value = column.filter(|_| row < x.rows()).map_or(T::default(), |c| x.row(row)[c]);
        // SAFETY: the caller's.
        unsafe { *out.add(i) = value };
    }
}

/// Packed rows over panels of dense weights.
pub(crate) struct TilePanels {
    isa: Isa,
    /// The first panel.
    weights: *const u8,
    panel_bytes: usize,
    x: *const u8,
    layout: Layout,
    /// Room for [`Layout::sums`].
    sums: *mut f32,
}

impl TilePanels {
    pub(crate) fn new<T: Element>(
        isa: Isa,
        panels: &Panels<T>,
        (x, layout): (*const u8, Layout),
        sums: *mut f32,
    ) -> Self {
        Self { isa, weights: panels.data(), panel_bytes: panels.panel_bytes(), x, layout, sums }
    }

    /// Computes and finishes the panels of `range`.
    ///
    /// # Safety
    /// `isa` is available and the panels were packed for it; the rows were packed as `layout` says; the
    /// epilogue is valid for them.
    pub(crate) unsafe fn run(&self, range: Range<usize>, epilogue: impl Epilogue) {
        // SAFETY: the instruction set has tiles; kernels do not nest.
        let tiles = unsafe { Tiles::configure() };
        let layout = self.layout;
        let set = layout.group() * layout.panel_sums();
        // SAFETY: there is room for two sets.
        let mut sets = [self.sums, unsafe { self.sums.add(set) }];
        let mut before = Unfinished { panels: 0..0, row: 0, sums: sets[1] };
        for first in range.clone().step_by(layout.group()) {
            let panels = first..(first + layout.group()).min(range.end);
            let calls = panels.len() * layout.chunks() * layout.blocks();
            let rows = (before.panels.len() * layout.m).div_ceil(calls.max(1));
            for chunk in 0..layout.chunks() {
                for panel in panels.clone() {
                    let next = if panel + 1 < panels.end {
                        self.chunk(panel + 1, chunk)
                    } else if chunk + 1 < layout.chunks() {
                        self.chunk(first, chunk + 1)
                    } else {
                        self.chunk(panels.end, 0)
                    };
                    for block in 0..layout.blocks() {
                        // SAFETY: offsets are those of the layout; the caller vouches for the rest.
                        unsafe {
                            let sums = sets[0].add((panel - first) * layout.panel_sums());
                            self.block(&tiles, (panel, chunk, block), sums, next);
                            before.finish(self.isa, layout, &epilogue, rows);
                        }
                    }
                }
            }
            // SAFETY: as above.
            unsafe { before.finish(self.isa, layout, &epilogue, usize::MAX) };
            before = Unfinished { panels, row: 0, sums: sets[0] };
            sets.swap(0, 1);
        }
        // SAFETY: as above.
        unsafe { before.finish(self.isa, layout, &epilogue, usize::MAX) };
    }

    /// Where a chunk of a panel begins, also one past the last.
    fn chunk(&self, panel: usize, chunk: usize) -> *const u8 {
        let offset = panel * self.panel_bytes + chunk * CHUNK_STEPS * amx::STEP_BYTES;
        self.weights.wrapping_add(offset)
    }

    /// A block of rows over a chunk of a panel, whose sums are at `sums`; a part of the chunk at `next`
    /// is prefetched.
    unsafe fn block(
        &self,
        tiles: &Tiles,
        (panel, chunk, block): (usize, usize, usize),
        sums: *mut f32,
        next: *const u8,
    ) {
        let layout = self.layout;
        let steps = layout.steps_of(chunk);
        let (earlier, lines) = lines_ahead(layout.blocks(), block);
        // SAFETY: the caller's.
        unsafe {
            let product = Product {
                x: self.x.add(layout.offset(chunk, block)),
                w: self.chunk(panel, chunk),
                steps,
                sums: sums.add(block * BLOCK_ROWS * COLUMNS),
                resume: chunk > 0,
                ahead: next.wrapping_add(earlier * steps * 64),
            };
            match (layout.tiles_of(block), lines) {
                (1, 32) => tiles.multiply::<false, 32>(product),
                (1, 16) => tiles.multiply::<false, 16>(product),
                (1, 8) => tiles.multiply::<false, 8>(product),
                (1, 4) => tiles.multiply::<false, 4>(product),
                (1, _) => tiles.multiply::<false, 0>(product),
                (_, 32) => tiles.multiply::<true, 32>(product),
                (_, 16) => tiles.multiply::<true, 16>(product),
                (_, 8) => tiles.multiply::<true, 8>(product),
                (_, 4) => tiles.multiply::<true, 4>(product),
                (_, _) => tiles.multiply::<true, 0>(product),
            }
        }
    }
}

/// Lines of the next chunk that a block asks for in each of its steps, with the sum of those of the blocks
/// before it. The blocks together ask once for as many lines as their own chunk has.
fn lines_ahead(blocks: usize, block: usize) -> (usize, usize) {
    const STEP_LINES: usize = amx::STEP_BYTES / 64;
    let asking = match blocks {
        1 => 1,
        2 | 3 => 2,
        4..8 => 4,
        _ => 8,
    };
    let lines = STEP_LINES / asking;
    (block.min(asking) * lines, if block < asking { lines } else { 0 })
}

/// Panels whose sums wait for the epilogue. It runs a few rows at a time between the products of the
/// next panels, and so beside them.
struct Unfinished {
    panels: Range<usize>,
    /// Rows of the first panel that are done.
    row: usize,
    sums: *mut f32,
}

impl Unfinished {
    /// Finishes up to `rows` rows.
    unsafe fn finish(
        &mut self,
        isa: Isa,
        layout: Layout,
        epilogue: &impl Epilogue,
        mut rows: usize,
    ) {
        while rows > 0 && !self.panels.is_empty() {
            let count = rows.min(layout.m - self.row);
            // SAFETY: the caller's.
            unsafe {
                let sums = self.sums.add(self.row * COLUMNS);
                epilogue.finish(isa, self.panels.start, self.row, sums, count);
            }
            rows -= count;
            self.row += count;
            if self.row == layout.m {
                self.row = 0;
                self.panels.start += 1;
                // SAFETY: the sums of the next panel follow, or the end of the set.
                self.sums = unsafe { self.sums.add(layout.panel_sums()) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every line of a step is asked for once, by blocks that the kernel has a loop for.
    #[test]
    fn blocks_ask_for_the_next_chunk_once() {
        for blocks in 1..40 {
            let mut asked = 0;
            for block in 0..blocks {
                let (earlier, lines) = lines_ahead(blocks, block);
                assert!([0, 4, 8, 16, 32].contains(&lines), "{blocks} blocks: {lines} lines");
                assert_eq!(earlier, asked, "{blocks} blocks: where block {block} begins");
                asked += lines;
            }
            assert_eq!(asked * 64, amx::STEP_BYTES, "{blocks} blocks");
        }
    }
}
