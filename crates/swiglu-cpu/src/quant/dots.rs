//! Few rows: sums over panels of small integers.
//!
//! For each run of 32 inputs the weights' integers (bytes, nibbles) are multiplied with the digits of
//! the inputs by byte dot products, a sum for each digit. These sums are exact. They are joined to two
//! `f32`, each rounded once, and scaled: about five roundings a run where a loop over products has 32.
//!
//! Where a byte dot product is several instructions, products with weights of 4 to 6 bits are summed in 16 bits over
//! 8, 4 or 2 quads before they are widened, one widening for each digit and sum in place of one for each quad. Weights
//! of 8 bits, whose products do not fit 16 bits, are multiplied in pairs with two digits of 16 bits.
//!
//! Loops over quads are written out, over rows and digits they go by index, and no instruction stands in a closure: what the
//! compiler makes of other forms, floors and what was measured: docs/kernels/cpu.md.

#![expect(
    clippy::needless_range_loop,
    reason = "iterators over two arrays leave the sums in memory, see above"
)]

use std::marker::PhantomData;

use swiglu_core::{BlockType, F32Lanes};

use super::blocks::{Blocks, WithBlocks, runs, with_blocks};
use super::digits::{Digits, Run};
use super::{QuantizedPanels, Weights};
use crate::gemm::{Ahead, Blocks as RowBlocks, CHUNK_BYTES};
use crate::isa::Isa;
use crate::simd::{self, Fetch, Kernel, Simd, dispatch, streams_wait_in_second};

/// How far ahead of use streamed weights are asked for, to the second-level cache or else to the first-level one.
const fn stream_ahead(to_second: bool) -> usize {
    if to_second { 16 << 10 } else { 12 << 10 }
}

/// Bytes of a chunk of a panel that several passes find in the first-level cache, where byte products take so long
/// that the first pass may ask for all of it.
const NEAR_CHUNK_BYTES: usize = 8 << 10;

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
    /// Runs the kernels of the weights' type.
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
        unsafe { self.1.sums::<B>(self.0) }
    }
}

impl Dots {
    /// Passes over the panel, in chunks where there are several.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn sums<B: Blocks>(self, isa: Isa) {
        let Weights { start, end, groups, block } = self.weights;
        let (lanes, short_sums) = (simd::lanes(isa), simd::short_sums(isa));
        let group_bytes = 2 * lanes * B::BYTES;
        let blocks = RowBlocks::new(self.m, simd::dot_rows(isa));
        let passes = blocks.count();
        let chunk_bytes = if short_sums { NEAR_CHUNK_BYTES } else { CHUNK_BYTES };
        let chunk = if passes == 1 { groups.max(1) } else { (chunk_bytes / group_bytes).max(1) };
        let row_runs = groups * runs(block);
        // One row of whole bytes: there is less to do with a line than its second way would take.
        let light = lanes == 16 && self.m == 1 && matches!(B::TYPE, BlockType::Q8_0);
        let to_second = simd::written_out(isa) && !light && streams_wait_in_second();
        let mut first = 0;
        loop {
            let count = chunk.min(groups - first);
            // SAFETY: chunk and block offsets stay inside the buffers.
            unsafe {
                let w = start.add(first * group_bytes);
                let times = passes * count * runs(block) / B::UNROLL;
                let mut ahead = Ahead::chunk_after(w, count * group_bytes, end, times);
                for (i, rows) in (0..passes).map(|i| blocks.range(i)).enumerate() {
                    let pass = Pass {
                        x: self.x.add(rows.start * row_runs + first * runs(block)),
                        row_runs,
                        w,
                        groups: count,
                        sums: self.sums.add(rows.start * 2 * lanes),
                        resume: first > 0,
                        stream: passes == 1 || short_sums && i == 0,
                    };
                    pass.run::<B>(isa, rows.len(), to_second, &mut ahead);
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

/// A pass of so many rows. Each is a function of its own: the compiler's time grows faster than what it is given, and with
/// all passes of a type in one takes minutes.
struct Tile<'a, B, const ROWS: usize, const SECOND: bool>(&'a Pass, &'a mut Ahead, PhantomData<B>);

impl<B: Blocks, const ROWS: usize, const SECOND: bool> Kernel for Tile<'_, B, ROWS, SECOND> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if const { ROWS > S::DOT_ROWS || SECOND && !S::WRITTEN_OUT } {
            unreachable!("a block has 1 to {} rows, not {ROWS}", S::DOT_ROWS);
        }
        // SAFETY: the caller's.
        unsafe { self.0.tile::<S, B, ROWS, SECOND>(self.1) }
    }
}

impl Pass {
    /// Runs the kernel of `rows` rows; with `to_second` weights are asked for to the second-level cache.
    ///
    /// # Safety
    /// As [`Dots::run`].
    unsafe fn run<B: Blocks>(&self, isa: Isa, rows: usize, to_second: bool, ahead: &mut Ahead) {
        macro_rules! tile {
            ($($rows:literal)*) => {
                match (rows, to_second) {
                    // SAFETY: the caller's.
                    $(($rows, false) => unsafe {
                        dispatch(isa, Tile::<B, $rows, false>(self, ahead, PhantomData))
                    },
                    // SAFETY: the caller's.
                    ($rows, true) => unsafe {
                        dispatch(isa, Tile::<B, $rows, true>(self, ahead, PhantomData))
                    },)*
                    _ => unreachable!("a block has 1 to 4 rows, not {rows}"),
                }
            };
        }
        tile!(1 2 3 4);
    }

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
    unsafe fn tile<S: Simd, B: Blocks, const ROWS: usize, const SECOND: bool>(
        &self,
        ahead: &mut Ahead,
    ) {
        let runs = const { runs(B::TYPE) };
        let group_bytes = 2 * S::LANES * B::BYTES;
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
                    if !self.stream && !S::SHORT_SUMS {
                        ahead.fetch::<S>();
                    }
                    let run = i * B::UNROLL;
                    let rows = self.rows::<ROWS>(x);
                    add_run::<S, B, ROWS, SECOND>(&mut acc, rows, w, &heads, run, self.stream);
                    if B::UNROLL == 2 {
                        let rows = self.rows::<ROWS>(x.add(1));
                        add_run::<S, B, ROWS, SECOND>(
                            &mut acc,
                            rows,
                            w,
                            &heads,
                            run + 1,
                            self.stream,
                        );
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
#[derive(Clone, Copy)]
struct Sums<I, const ROWS: usize> {
    /// The lower 16 bits' and the upper ones'; where byte products are one instruction, the first three bytes'.
    words: [[[I; 3]; 2]; ROWS],
    /// Those of a few quads in 16 bits, of three bytes.
    shorts: [[[I; 3]; 2]; ROWS],
}

/// Quads whose products with digits of 8 bits may be summed in 16, at most those of a span.
const fn short_quads(bits: u32, span: usize) -> usize {
    let largest = 2 * ((1 << bits) - 1) * 128;
    let quads = i16::MAX as usize / largest;
    if quads < span { quads } else { span }
}

/// How x is taken for the weights of B.
const fn digits_of<S: Simd, B: Blocks>() -> Digits {
    Digits::of::<S>(B::OFFSET)
}

/// One run of a group. With `stream` the weights that follow some way behind are asked for: to the second-level cache
/// with SECOND, a few lines at a time, else all at once, because there is a branch in it.
#[inline(always)]
unsafe fn add_run<S: Simd, B: Blocks, const ROWS: usize, const SECOND: bool>(
    acc: &mut [[S::V; 2]; ROWS],
    x: [&Run; ROWS],
    w: *const u8,
    heads: &[B::Head<S>; 2],
    run: usize,
    stream: bool,
) {
    const { assert!(B::SPANS == 1 || B::SPANS == 2) };
    let run_bytes = 2 * S::LANES * B::BYTES / runs(B::TYPE);
    let lines = run_bytes.div_ceil(64);
    let ahead = w.wrapping_add(run * run_bytes + const { stream_ahead(SECOND) });
    if stream && !SECOND && S::WRITTEN_OUT {
        S::prefetch_lines(ahead, lines);
    }
    // SAFETY: the caller's pointers hold the rows and the group.
    unsafe {
        // Written out, because shifts and words of a quad depend on its number.
        macro_rules! span {
            ($span:literal: $($q:literal)*) => {{
                let mut sums = start::<S, B, ROWS>(&x, $span);
                if S::WRITTEN_OUT {
                    $(
                        if stream && SECOND {
                            for line in $q * lines / 8..($q + 1) * lines / 8 {
                                S::prefetch(ahead.wrapping_add(64 * line), Fetch::Second);
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
                        let joined = joined::<S>(sums.words[r][v]);
                        acc[r][v] = S::accumulate(acc[r][v], joined.mul(scale), x_scale);
                    }
                }
                if B::TYPE.has_minimum() {
                    for v in 0..2 {
                        let minimum = B::minimum::<S>(&heads[v], run, $span);
                        for r in 0..ROWS {
                            let x_sum = S::V::splat(x[r].sums[$span]);
                            acc[r][v] = S::accumulate(acc[r][v], minimum, x_sum);
                        }
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
    }
}

/// What the sums of a span begin with.
#[inline(always)]
fn start<S: Simd, B: Blocks, const ROWS: usize>(x: &[&Run; ROWS], span: usize) -> Sums<S::I, ROWS> {
    let zero = S::words(0);
    let mut sums = Sums { words: [[[zero; 3]; 2]; ROWS], shorts: [[[zero; 3]; 2]; ROWS] };
    if B::OFFSET != 0 {
        for r in 0..ROWS {
            let [low, high] = x[r].start[span];
            for v in 0..2 {
                sums.words[r][v][0] = S::words(low);
                sums.words[r][v][const { upper::<S>() }] = S::words(high);
            }
        }
    }
    sums
}

/// Which of [`Sums::words`] is that of the upper bits.
const fn upper<S: Simd>() -> usize {
    if S::SHORT_SUMS { 1 } else { 2 }
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
    match const { digits_of::<S, B>() } {
        Digits::ThreeBytes if !S::SHORT_SUMS => add_bytes::<S, B, ROWS>(sums, x, u, q),
        Digits::ThreeBytes => {
            let quads = const { short_quads(B::BITS, 8 / B::SPANS) };
            add_shorts::<S, ROWS>(sums, x, u, q, q.is_multiple_of(quads));
            if q % quads == quads - 1 {
                join_shorts::<S, ROWS>(sums);
            }
        }
        Digits::TwoHalves => add_halves::<S, ROWS>(sums, x, u, q),
    }
}

/// Digit `p` of a quad of a row.
#[inline(always)]
fn digit<S: Simd>(x: &Run, q: usize, p: usize) -> S::I {
    // SAFETY: the reference is to a word.
    unsafe { S::splat_word(&x.digits[q][p]) }
}

/// Four inputs as three bytes.
#[inline(always)]
fn add_bytes<S: Simd, B: Blocks, const ROWS: usize>(
    sums: &mut Sums<S::I, ROWS>,
    x: &[&Run; ROWS],
    u: [S::I; 2],
    q: usize,
) {
    for r in 0..ROWS {
        for p in 0..3 {
            let digit = digit::<S>(x[r], q, p);
            for v in 0..2 {
                let sum = &mut sums.words[r][v][p];
                *sum = if B::OFFSET < 128 {
                    S::dot::<true>(*sum, u[v], digit)
                } else {
                    S::dot::<false>(*sum, u[v], digit)
                };
            }
        }
    }
}

/// As [`add_bytes`] in 16 bits, the first ones of a sum or not.
#[inline(always)]
fn add_shorts<S: Simd, const ROWS: usize>(
    sums: &mut Sums<S::I, ROWS>,
    x: &[&Run; ROWS],
    u: [S::I; 2],
    q: usize,
    first: bool,
) {
    for r in 0..ROWS {
        for p in 0..3 {
            let digit = digit::<S>(x[r], q, p);
            for v in 0..2 {
                let sum = &mut sums.shorts[r][v][p];
                *sum = if first {
                    S::products(u[v], digit)
                } else {
                    S::add_products(*sum, u[v], digit)
                };
            }
        }
    }
}

/// Adds the sums in 16 bits to those in words, the second digit's 2⁸-fold. The lower two
/// digits of an input are together at most 0x8080, so that with weights of 6 bits the sums of a run stay below 2²⁷.
#[inline(always)]
fn join_shorts<S: Simd, const ROWS: usize>(sums: &mut Sums<S::I, ROWS>) {
    let (one, second) = (S::words(0x0001_0001), S::words(0x0100_0100));
    for r in 0..ROWS {
        for v in 0..2 {
            let (words, shorts) = (&mut sums.words[r][v], &sums.shorts[r][v]);
            words[0] = S::add_halves(words[0], shorts[0], one);
            words[0] = S::add_halves(words[0], shorts[1], second);
            words[1] = S::add_halves(words[1], shorts[2], one);
        }
    }
}

/// Four inputs as two digits of 16 bits. With weights of 8 bits a sum of a run is at most 32 · 255 · 2¹⁵, below 2²⁸.
#[inline(always)]
fn add_halves<S: Simd, const ROWS: usize>(
    sums: &mut Sums<S::I, ROWS>,
    x: &[&Run; ROWS],
    u: [S::I; 2],
    q: usize,
) {
    // Not by `map`, see above.
    let u = [S::bytes_to_halves(u[0]), S::bytes_to_halves(u[1])];
    for r in 0..ROWS {
        for p in 0..2 {
            for half in 0..2 {
                let digit = digit::<S>(x[r], q, 2 * p + half);
                for v in 0..2 {
                    let sum = &mut sums.words[r][v][p];
                    *sum = S::add_halves(*sum, u[v][half], digit);
                }
            }
        }
    }
}

/// The sum of a run of inputs, in units of x's scale and the weights'. Sums of a byte's products have at most 20 bits,
/// so that two of them joined fit a word.
#[inline(always)]
fn joined<S: Simd>(sums: [S::I; 3]) -> S::V {
    let low = if S::SHORT_SUMS { sums[0] } else { S::add_words(S::shl(sums[1], 8), sums[0]) };
    let high = sums[const { upper::<S>() }];
    S::accumulate(S::words_to_f32(low), S::words_to_f32(high), S::V::splat(65536.0))
}
