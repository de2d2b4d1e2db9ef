//! Few rows: sums over panels of small integers.
//!
//! For each run of 32 inputs the weights' integers (bytes, nibbles) are multiplied with the digits of
//! the inputs by byte dot products, a sum for each digit. These sums are exact. They are joined to two
//! `f32`, each rounded once, and scaled: about five roundings a run where a loop over products has 32.
//!
//! Floors (Zen 5, one core: 10.7 bytes of memory a cycle): Q4_0 has 0.5625 bytes a weight, so 19
//! weights a cycle. Sixteen weights cost a byte dot product (four digits, 64 weights each), 0.4
//! operations of decoding and 0.35 of joining and scaling: 1.75 vector operations, of which the two
//! dot-product units take one; at 1.2 × 16 weights a cycle that is 2.1 of 4 operations, 1.2 of 2.
//! Q8_0 1.35 operations at 0.63 × 16; Q4_K 1.95 at 1.2 × 16; Q6_K 2.6 at 0.8 × 16. So memory should
//! bind in every type. Measured at 4096 × 14336, one thread, fraction of the bandwidth of reading in
//! that run: Q8_0 0.95, Q4_0 1.01, Q4_K 1.00, Q5_K 1.02, Q6_K 1.03.
//!
//! With two threads, 896 × 4864 in Q4_0, of 158 μs: waking 0.3, packing x 0.4, packing h 1.2, waiting
//! for the last panels 0.4 and 2; gate and up stream at 0.98 of the bandwidth, down at 0.92. What is
//! asked for beyond the end of a claimed range is another thread's: 12 KiB for each of some 28 ranges.
//!
//! - Refuted on paper before any was written: `f32` from a table (a shift, a permutation and a
//!   multiply-add for 16 weights; 3.6 operations a cycle, more than the three units that have them),
//!   and inputs as three bfloat16 with pair dot products (2.5 operations for 16 weights, and no use
//!   for 8-bit weights).
//! - Words in the order of the file for Q5_K and Q6_K, whose upper bits then serve four or eight
//!   runs: 0.36 and 0.34. Lines fetched past the second-level cache were gone when they were needed
//!   again. Now a word is used up at once, or within a pair of runs.
//! - Quads in a loop that the compiler may leave rolled: Q6_K 0.60. They are written out.
//! - Loops over rows and digits as iterators over two arrays: kept in registers by incremental builds alone,
//!   which do not inline before code generation. Otherwise the sums lay in memory: Q4_1, 576 × 1536, 2, 4
//!   and 9 rows, 190, 369, 733 μs where indices take 54, 105, 235.
//! - Prefetch 4, 8, 12, 16 KiB ahead: Q4_0 0.75, 0.96, 1.01, 1.01; Q8_0 0.84, 0.97, 0.95, 0.90. A
//!   line at a time or those of a run at once, to the first-level cache with or without the second:
//!   within 3 %.

#![expect(
    clippy::needless_range_loop,
    reason = "iterators over two arrays leave the sums in memory, see above"
)]

use std::marker::PhantomData;

use swiglu_core::F32Lanes;

use super::blocks::{Blocks, WithBlocks, runs, with_blocks};
use super::digits::{DIGITS, Run};
use super::{QuantizedPanels, Weights};
use crate::gemm::{Ahead, Blocks as RowBlocks, CHUNK_BYTES};
use crate::isa::Isa;
use crate::simd::{Fetch, Kernel, Simd, dispatch};

/// How far ahead of use streamed weights are asked for.
const STREAM_AHEAD: usize = 12 << 10;

/// The sums of one panel over a few rows.
pub(crate) struct Dots {
    weights: Weights,
    x: *const Run,
    m: usize,
    sums: *mut f32,
}

impl Dots {
    /// Panel `panel` over `m` rows of digits; `sums` has room for `m · 2 · LANES` values.
    pub(crate) fn new(
        panels: &QuantizedPanels,
        panel: usize,
        x: *const u8,
        m: usize,
        sums: *mut f32,
    ) -> Self {
        Self { weights: panels.panel(panel), x: x.cast(), m, sums }
    }
}

impl Dots {
    /// Runs the kernel of the weights' type. Each is a function of its own: all in one take the
    /// compiler minutes.
    ///
    /// # Safety
    /// As [`dispatch`].
    pub(crate) unsafe fn run(self, isa: Isa) {
        with_blocks(self.weights.block, Dispatch(isa, self));
    }
}

struct Dispatch(Isa, Dots);

impl WithBlocks for Dispatch {
    type Output = ();

    fn run<B: Blocks>(self) {
        // SAFETY: `Dots::run`'s caller vouches for the instruction set and the pointers.
        unsafe { dispatch(self.0, DotsOf::<B>(self.1, PhantomData)) }
    }
}

struct DotsOf<B>(Dots, PhantomData<B>);

impl<B: Blocks> Kernel for DotsOf<B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller's.
        unsafe { self.0.sums::<S, B>() }
    }
}

impl Dots {
    #[inline(always)]
    unsafe fn sums<S: Simd, B: Blocks>(self) {
        let Weights { start, end, groups, block } = self.weights;
        let group_bytes = 2 * S::LANES * block.bytes();
        let blocks = RowBlocks::new(self.m, S::DOT_ROWS);
        let passes = blocks.count();
        let chunk = if passes == 1 { groups.max(1) } else { (CHUNK_BYTES / group_bytes).max(1) };
        let row_runs = groups * runs(block);
        let mut first = 0;
        loop {
            let count = chunk.min(groups - first);
            // SAFETY: chunk and block offsets stay inside the buffers.
            unsafe {
                let w = start.add(first * group_bytes);
                let times = passes * count * runs(block) / B::UNROLL;
                let mut ahead = Ahead::chunk_after(w, count * group_bytes, end, times);
                for rows in (0..passes).map(|i| blocks.range(i)) {
                    let pass = Pass {
                        x: self.x.add(rows.start * row_runs + first * runs(block)),
                        row_runs,
                        w,
                        groups: count,
                        sums: self.sums.add(rows.start * 2 * S::LANES),
                        resume: first > 0,
                        stream: passes == 1,
                    };
                    match rows.len() {
                        1 => pass.tile::<S, B, 1>(&mut ahead),
                        2 if S::DOT_ROWS >= 2 => pass.tile::<S, B, 2>(&mut ahead),
                        3 if S::DOT_ROWS >= 3 => pass.tile::<S, B, 3>(&mut ahead),
                        rows => unreachable!("a block has 1 to {} rows, not {rows}", S::DOT_ROWS),
                    }
                }
            }
            first += count;
            if first >= groups {
                return;
            }
        }
    }
}

/// One block of rows over some groups of a panel.
struct Pass {
    x: *const Run,
    /// Runs from one row to the next.
    row_runs: usize,
    w: *const u8,
    groups: usize,
    sums: *mut f32,
    /// Whether `sums` holds the accumulators of the groups before.
    resume: bool,
    /// Whether the weights are used once, straight from memory.
    stream: bool,
}

impl Pass {
    /// A run of every row, from that of the first.
    #[inline(always)]
    unsafe fn rows<const ROWS: usize>(&self, x: *const Run) -> [&Run; ROWS] {
        // SAFETY: the caller's run is one of the first row.
        let mut rows = [unsafe { &*x }; ROWS];
        for (r, row) in rows.iter_mut().enumerate() {
            // SAFETY: the other rows follow at this distance.
            *row = unsafe { &*x.add(r * self.row_runs) };
        }
        rows
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, B: Blocks, const ROWS: usize>(&self, ahead: &mut Ahead) {
        let runs = const { runs(B::TYPE) };
        let group_bytes = 2 * S::LANES * B::TYPE.bytes();
        // SAFETY: `w` holds the groups, `x` their runs for ROWS rows, `sums` ROWS rows.
        unsafe {
            let mut acc = [[S::V::splat(0.0); 2]; ROWS];
            if self.resume {
                for (r, sums) in acc.iter_mut().enumerate() {
                    let p = self.sums.add(2 * r * S::LANES);
                    *sums = [S::load_f32(p), S::load_f32(p.add(S::LANES))];
                }
            }
            let (mut x, mut w) = (self.x, self.w);
            for _ in 0..self.groups {
                let heads = [B::head::<S>(w, 0), B::head::<S>(w, 1)];
                for i in 0..runs / B::UNROLL {
                    if !self.stream {
                        ahead.fetch::<S>();
                    }
                    let run = i * B::UNROLL;
                    let rows = self.rows::<ROWS>(x);
                    add_run::<S, B, ROWS>(&mut acc, rows, w, &heads, run, self.stream);
                    if B::UNROLL == 2 {
                        let rows = self.rows::<ROWS>(x.add(1));
                        add_run::<S, B, ROWS>(&mut acc, rows, w, &heads, run + 1, self.stream);
                    }
                    x = x.add(B::UNROLL);
                }
                w = w.add(group_bytes);
            }
            for (r, sums) in acc.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    S::store_f32(self.sums.add((2 * r + v) * S::LANES), *sum);
                }
            }
        }
    }
}

/// Sums of the digits' products: for each row and each of the two vectors.
type Sums<I, const ROWS: usize> = [[[I; DIGITS]; 2]; ROWS];

/// One run of a group. With `stream` the weights that follow some way behind are asked for, a few
/// lines at a time.
#[inline(always)]
unsafe fn add_run<S: Simd, B: Blocks, const ROWS: usize>(
    acc: &mut [[S::V; 2]; ROWS],
    x: [&Run; ROWS],
    w: *const u8,
    heads: &[B::Head<S>; 2],
    run: usize,
    stream: bool,
) {
    const { assert!(B::SPANS == 1 || B::SPANS == 2) };
    let run_bytes = 2 * S::LANES * B::TYPE.bytes() / runs(B::TYPE);
    let lines = run_bytes.div_ceil(64);
    let ahead = w.wrapping_add(run * run_bytes + STREAM_AHEAD);
    // SAFETY: the caller's pointers hold the rows and the group.
    unsafe {
        // Written out, because shifts and words of a quad depend on its number.
        macro_rules! span {
            ($span:literal: $($q:literal)*) => {{
                let mut sums = start::<S, ROWS>(&x, $span);
                if S::WRITTEN_OUT {
                    $(
                        if stream {
                            for line in $q * lines / 8..($q + 1) * lines / 8 {
                                S::prefetch(ahead.wrapping_add(64 * line), Fetch::Once);
                            }
                        }
                        add_quad::<S, B, ROWS>(&mut sums, &x, w, run, $q);
                    )*
                } else {
                    for q in [$($q),*] {
                        add_quad::<S, B, ROWS>(&mut sums, &x, w, run, q);
                    }
                }
                for v in 0..2 {
                    let scale = B::scale::<S>(&heads[v], run, $span);
                    for r in 0..ROWS {
                        let x_scale = S::V::splat(x[r].scale);
                        acc[r][v] = S::accumulate(acc[r][v], joined::<S>(sums[r][v]).mul(scale), x_scale);
                    }
                }
            }};
        }
        if B::SPANS == 1 {
            span!(0: 0 1 2 3 4 5 6 7);
        } else {
            span!(0: 0 1 2 3);
            span!(1: 4 5 6 7);
        }
        if B::TYPE.has_minimum() {
            for v in 0..2 {
                let minimum = B::minimum::<S>(&heads[v], run);
                for r in 0..ROWS {
                    let x_sum = S::V::splat(x[r].sum);
                    acc[r][v] = S::accumulate(acc[r][v], minimum, x_sum);
                }
            }
        }
    }
}

/// What the sums of a span begin with.
#[inline(always)]
fn start<S: Simd, const ROWS: usize>(x: &[&Run; ROWS], span: usize) -> Sums<S::I, ROWS> {
    let mut sums = [[[S::words(0); DIGITS]; 2]; ROWS];
    for r in 0..ROWS {
        for p in 0..DIGITS {
            let start = S::words(x[r].start[span][p]);
            sums[r][0][p] = start;
            sums[r][1][p] = start;
        }
    }
    sums
}

/// Four inputs of all rows.
#[inline(always)]
unsafe fn add_quad<S: Simd, B: Blocks, const ROWS: usize>(
    sums: &mut Sums<S::I, ROWS>,
    x: &[&Run; ROWS],
    w: *const u8,
    run: usize,
    q: usize,
) {
    // SAFETY: the caller's group.
    let u = unsafe { [B::quad::<S>(w, 0, run, q), B::quad::<S>(w, 1, run, q)] };
    for r in 0..ROWS {
        for p in 0..DIGITS {
            // SAFETY: the reference is to a word.
            let digit = unsafe { S::splat_word(&x[r].digits[q][p]) };
            for v in 0..2 {
                sums[r][v][p] = if B::OFFSET < 128 {
                    S::dot::<true>(sums[r][v][p], u[v], digit)
                } else {
                    S::dot::<false>(sums[r][v][p], u[v], digit)
                };
            }
        }
    }
}

/// Σ sum[p]·2⁸ᵖ. A sum has at most 20 bits, so that two of them joined fit a word.
#[inline(always)]
fn joined<S: Simd>(sums: [S::I; DIGITS]) -> S::V {
    let low = S::words_to_f32(S::add_words(S::shl(sums[1], 8), sums[0]));
    let high = S::words_to_f32(S::add_words(S::shl(sums[3], 8), sums[2]));
    S::accumulate(low, high, S::V::splat(65536.0))
}
