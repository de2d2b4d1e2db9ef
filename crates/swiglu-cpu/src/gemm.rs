//! The matrix kernel: packed rows times packed panels, one register tile at a time, with the
//! epilogue on the accumulators.
//!
//! For each panel, rows are taken in blocks of up to [`Simd::ROWS`] ([`Simd::PAIR_ROWS`] of pairs of bfloat16); a tile of
//! `rows × 2` vectors accumulates over the steps of the panel. With one block the weights are used once and streamed
//! (prefetched 8 KiB ahead, past the caches, through the second-level one, or not at all, whichever is the
//! fastest, see `simd::learn`). With several, the panel is cut into chunks that stay in the second-level cache while
//! every block passes over them, and the passes together prefetch the next chunk, so that memory
//! streams while the blocks compute: at M = 16 neither waits for the other. Between chunks the
//! accumulators rest in a scratch buffer of `rows × 2` vectors.
//!
//! Floors, what was measured and what was tried: docs/kernels/cpu.md.

use std::marker::PhantomData;
use std::ops::Range;

use swiglu_core::{DType, Element, F32Lanes};

use crate::panels::Panels;
use crate::simd::{Fetch, Kernel, Simd};

/// Bytes of a chunk of a panel that several row blocks pass over. Two chunks, this one and the next,
/// fit the second-level cache beside the packed rows that pass through it.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;
/// How far ahead of use streamed weights are asked for.
pub(crate) const STREAM_AHEAD: usize = 8 << 10;
/// Steps between two looks at the prefetch budget.
const GROUP: usize = 16;

/// How M rows are cut into blocks: all of `rows` but the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) m: usize,
    pub(crate) rows: usize,
}

impl Blocks {
    /// As few blocks as tiles of `tile_rows` allow, of nearly the same height.
    pub(crate) fn new(m: usize, tile_rows: usize) -> Self {
        let count = m.div_ceil(tile_rows).max(1);
        Self { m, rows: m.div_ceil(count).max(1) }
    }
    pub(crate) fn count(self) -> usize {
        self.m.div_ceil(self.rows)
    }
    pub(crate) fn range(self, block: usize) -> Range<usize> {
        block * self.rows..((block + 1) * self.rows).min(self.m)
    }
}

/// Rows, packed.
#[derive(Clone, Copy)]
pub(crate) struct PackedRows {
    /// Block after block, each `[step][row]`.
    pub(crate) x: *const u32,
    pub(crate) blocks: Blocks,
    /// Room for `m · 2 · LANES` sums.
    pub(crate) sums: *mut f32,
}

/// The sums of one panel over all row blocks.
pub(crate) struct Sums<T> {
    weights: *const u8,
    /// The end of all weights, where prefetching stops.
    end: *const u8,
    steps: usize,
    step_bytes: usize,
    rows: PackedRows,
    element: PhantomData<T>,
}

impl<T: Element> Sums<T> {
    /// Panel `panel`, which is one of `panels`.
    pub(crate) fn new(panels: &Panels<T>, panel: usize, rows: PackedRows) -> Self {
        debug_assert!(panel < panels.panels(), "panel {panel} of {}", panels.panels());
        // SAFETY: the panel lies inside the weights.
        let (weights, end) = unsafe {
            let data = panels.data();
            (data.add(panel * panels.panel_bytes()), data.add(panels.bytes()))
        };
        let (steps, step_bytes) = (panels.steps(), panels.step_bytes());
        Self { weights, end, steps, step_bytes, rows, element: PhantomData }
    }
}

impl<T: Element> Kernel for Sums<T> {
    type Output = ();
    const USES_DOTS: bool = matches!(T::DTYPE, DType::Bf16);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let blocks = self.rows.blocks;
        let chunk = match blocks.count() {
            1 => self.steps.max(1),
            _ => (CHUNK_BYTES / self.step_bytes).max(GROUP),
        };
        let mut start = 0;
        loop {
            let steps = chunk.min(self.steps - start);
            // SAFETY: chunk offsets stay inside the buffers.
            unsafe {
                let w = self.weights.add(start * self.step_bytes);
                let ahead = Ahead::chunk_after(
                    w,
                    steps * self.step_bytes,
                    self.end,
                    fetches(steps, blocks),
                );
                let stream = blocks.count() == 1;
                let chunk = Chunk { w, first: start, steps, of: self.steps, stream };
                chunk.pass_over::<S, T>(self.rows, ahead);
            }
            start += steps;
            if start >= self.steps {
                return;
            }
        }
    }
}

/// Panels that [`SideBySide`] sums together for so many rows; none where [`Sums`] has one accumulator by itself.
pub(crate) const fn panels_together(rows: usize) -> Option<usize> {
    match rows {
        1 => Some(4),
        2 => Some(2),
        3 => Some(1),
        _ => None,
    }
}

/// The sums of neighbouring panels over one block of up to three rows, each in the order in which more rows are summed:
/// in one accumulator from the first step to the last. [`Sums`] has several accumulators for so few rows, to hide the
/// latency of a multiply-add; here those of several panels do.
pub(crate) struct SideBySide<T> {
    /// The first panel; the sums of the others lie behind its own.
    first: Sums<T>,
    panel_bytes: usize,
    /// A power of two, at most [`panels_together`].
    panels: usize,
}

impl<T: Element> SideBySide<T> {
    /// The panels of `range`, which are some of `panels`; `rows.sums` has room for the sums of each.
    pub(crate) fn new(panels: &Panels<T>, range: Range<usize>, rows: PackedRows) -> Self {
        debug_assert!(range.end <= panels.panels(), "{range:?} of {}", panels.panels());
        let first = Sums::new(panels, range.start, rows);
        Self { first, panel_bytes: panels.panel_bytes(), panels: range.len() }
    }

    #[expect(clippy::needless_range_loop, reason = "see the comment where sums are stored")]
    #[inline(always)]
    unsafe fn tile<S: Simd, const ROWS: usize, const PANELS: usize>(self) {
        let Sums { weights, steps, step_bytes, rows: PackedRows { x, sums, .. }, .. } = self.first;
        // All panels together are as far ahead as one is by itself. Where a panel ends, that which takes its place in
        // the next group is asked for.
        let ahead = STREAM_AHEAD / PANELS;
        let last = steps.min(ahead / step_bytes);
        let parts = [(steps - last, ahead), (last, ahead + (PANELS - 1) * self.panel_bytes)];
        // SAFETY: `x` holds the steps of ROWS rows, each panel its steps, `sums` ROWS rows of two vectors for each panel.
        unsafe {
            let mut acc = [[[S::V::splat(0.0); 2]; ROWS]; PANELS];
            let (mut x, mut w) = (x, weights);
            for (count, ahead) in parts {
                for _ in 0..count {
                    for (p, acc) in acc.iter_mut().enumerate() {
                        let w = w.add(p * self.panel_bytes);
                        S::prefetch_lines(w.wrapping_add(ahead), step_bytes.div_ceil(64));
                        step::<S, T, ROWS>(acc, x, w);
                    }
                    (x, w) = (x.add(ROWS), w.add(step_bytes));
                }
            }
            // As nested loops: with one over all of them the accumulators would lie in memory.
            for p in 0..PANELS {
                for r in 0..ROWS {
                    for v in 0..2 {
                        S::store_f32(sums.add(((p * ROWS + r) * 2 + v) * S::LANES), acc[p][r][v]);
                    }
                }
            }
        }
    }
}

impl<T: Element> Kernel for SideBySide<T> {
    type Output = ();
    const USES_DOTS: bool = Sums::<T>::USES_DOTS;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller's.
        unsafe {
            match (self.first.rows.blocks.m, self.panels) {
                (1, 4) => self.tile::<S, 1, 4>(),
                (1, 2) => self.tile::<S, 1, 2>(),
                (1, 1) => self.tile::<S, 1, 1>(),
                (2, 2) => self.tile::<S, 2, 2>(),
                (2, 1) => self.tile::<S, 2, 1>(),
                (3, 1) => self.tile::<S, 3, 1>(),
                (rows, panels) => unreachable!("{panels} panels of {rows} rows"),
            }
        }
    }
}

/// How often the blocks that pass over a chunk of `steps` look at the prefetch budget.
#[inline(always)]
pub(crate) fn fetches(steps: usize, blocks: Blocks) -> usize {
    steps.div_ceil(GROUP) * blocks.count()
}

/// Some steps of a panel.
pub(crate) struct Chunk {
    pub(crate) w: *const u8,
    /// The first step's place in the panel.
    pub(crate) first: usize,
    pub(crate) steps: usize,
    /// Steps of the panel.
    pub(crate) of: usize,
    /// Whether the weights are used once, straight from memory.
    pub(crate) stream: bool,
}

impl Chunk {
    /// Adds the chunk's products to the sums of all blocks of rows.
    ///
    /// # Safety
    /// Inside `dispatch`; the pointers are valid for the blocks.
    #[inline(always)]
    pub(crate) unsafe fn pass_over<S: Simd, T: Element>(
        self,
        PackedRows { x, blocks, sums }: PackedRows,
        mut ahead: Ahead,
    ) {
        for block in 0..blocks.count() {
            let rows = blocks.range(block);
            // SAFETY: block offsets stay inside the buffers.
            unsafe {
                let pass = Pass {
                    x: x.add(rows.start * self.of + self.first * rows.len()),
                    w: self.w,
                    steps: self.steps,
                    sums: sums.add(rows.start * 2 * S::LANES),
                    resume: self.first > 0,
                    stream: self.stream,
                };
                pass.run::<S, T>(rows.len(), &mut ahead);
            }
        }
    }
}

/// What is still to be prefetched of the chunk after the current one.
pub(crate) struct Ahead {
    next: *const u8,
    end: *const u8,
    /// Lines to ask for at a time.
    lines: usize,
}

impl Ahead {
    /// The `bytes` behind those at `w`, asked for in `times` times.
    #[inline(always)]
    pub(crate) fn chunk_after(w: *const u8, bytes: usize, end: *const u8, times: usize) -> Self {
        let next = w.wrapping_add(bytes);
        let stop = next.wrapping_add(bytes);
        let end = if stop < end { stop } else { end };
        Self { next, end, lines: (bytes / 64 + 1).div_ceil(times.max(1)) }
    }

    /// Asks for the next lines.
    #[inline(always)]
    pub(crate) fn fetch<S: Simd>(&mut self) {
        for _ in 0..self.lines {
            if self.next < self.end {
                S::prefetch(self.next, Fetch::Second);
                self.next = self.next.wrapping_add(64);
            }
        }
    }
}

/// One block of rows over one chunk of a panel.
struct Pass {
    x: *const u32,
    w: *const u8,
    steps: usize,
    sums: *mut f32,
    /// Whether `sums` holds the accumulators of the chunks before.
    resume: bool,
    /// Whether the weights are used once, straight from memory.
    stream: bool,
}

impl Pass {
    /// Chooses the tile of `rows` rows.
    #[inline(always)]
    unsafe fn run<S: Simd, T: Element>(&self, rows: usize, ahead: &mut Ahead) {
        macro_rules! choose {
            ($($rows:literal by $sets:literal),*) => {
                match rows {
                    // SAFETY: the caller's pointers are valid for this many rows.
                    $($rows if $rows <= S::ROWS => unsafe { self.tile::<S, T, $rows, $sets>(ahead) },)*
                    _ => unreachable!("a block has 1 to {} rows, not {rows}", S::ROWS),
                }
            };
        }
        // Few rows leave registers free: several sets of accumulators hide the latency.
        choose!(
            1 by 4, 2 by 3, 3 by 2, 4 by 1, 5 by 1, 6 by 1, 7 by 1, 8 by 1, 9 by 1, 10 by 1,
            11 by 1, 12 by 1
        )
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, T: Element, const ROWS: usize, const SETS: usize>(
        &self,
        ahead: &mut Ahead,
    ) {
        // SAFETY: `x` and `w` hold `steps` steps, `sums` ROWS rows of two vectors.
        unsafe {
            let zero = S::V::splat(0.0);
            let mut acc = [[[zero; 2]; ROWS]; SETS];
            if self.resume {
                for (r, a) in acc[0].iter_mut().enumerate() {
                    let p = self.sums.add(r * 2 * S::LANES);
                    *a = [S::load_f32(p), S::load_f32(p.add(S::LANES))];
                }
            }
            let (mut x, mut w) = (self.x, self.w);
            let step_bytes = 2 * step_vector_bytes::<S, T>();
            if self.stream {
                let mut left = self.steps;
                while left >= SETS {
                    for set in &mut acc {
                        S::prefetch_lines(w.wrapping_add(STREAM_AHEAD), step_bytes.div_ceil(64));
                        step::<S, T, ROWS>(set, x, w);
                        (x, w) = (x.add(ROWS), w.add(step_bytes));
                    }
                    left -= SETS;
                }
                for _ in 0..left {
                    step::<S, T, ROWS>(&mut acc[0], x, w);
                    (x, w) = (x.add(ROWS), w.add(step_bytes));
                }
            } else {
                let mut left = self.steps;
                while left > 0 {
                    ahead.fetch::<S>();
                    let group = left.min(GROUP);
                    for _ in 0..group {
                        step::<S, T, ROWS>(&mut acc[0], x, w);
                        (x, w) = (x.add(ROWS), w.add(step_bytes));
                    }
                    left -= group;
                }
            }
            for r in 0..ROWS {
                let p = self.sums.add(r * 2 * S::LANES);
                for v in 0..2 {
                    let mut sum = acc[0][r][v];
                    // Elsewhere they are zeros, beside which a sum of −0 would become 0.
                    if self.stream {
                        for set in &acc[1..] {
                            sum = sum.add(set[r][v]);
                        }
                    }
                    S::store_f32(p.add(v * S::LANES), sum);
                }
            }
        }
    }
}

#[inline(always)]
const fn step_vector_bytes<S: Simd, T: Element>() -> usize {
    match T::DTYPE {
        DType::F16 => 2 * S::LANES,
        _ => 4 * S::LANES,
    }
}

/// One step: two vectors of weights against ROWS broadcasts.
#[inline(always)]
pub(crate) unsafe fn step<S: Simd, T: Element, const ROWS: usize>(
    acc: &mut [[S::V; 2]; ROWS],
    x: *const u32,
    w: *const u8,
) {
    // SAFETY: the caller's `w` holds two vectors of weights, `x` ROWS values.
    unsafe {
        let weights = [weights::<S, T>(w), weights::<S, T>(w.add(step_vector_bytes::<S, T>()))];
        for (r, a) in acc.iter_mut().enumerate() {
            let xv = S::splat_bits(x.add(r));
            for v in 0..2 {
                a[v] = match T::DTYPE {
                    DType::Bf16 => S::accumulate_pairs(a[v], xv, weights[v]),
                    _ => S::accumulate(a[v], xv, weights[v]),
                };
            }
        }
    }
}

/// A vector of weights: `f32` lanes, or pairs of bfloat16.
#[inline(always)]
unsafe fn weights<S: Simd, T: Element>(w: *const u8) -> S::V {
    // SAFETY: the caller's.
    unsafe {
        match T::DTYPE {
            DType::F16 => S::load_f16(w.cast()),
            _ => S::load_f32(w.cast()),
        }
    }
}
