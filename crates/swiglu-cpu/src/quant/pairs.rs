//! Many rows of bfloat16: parts of a panel as bfloat16 integers, summed apart for each scale.
//!
//! The integers of a block have at most 8 bits, so that bfloat16 holds each exactly and nothing of a
//! weight is rounded. A chunk of a panel is decoded to pairs of them, in the order of the dense kernel,
//! with the scales (and minima) of each span behind its steps. A tile sums the pairs of a span from
//! zero; then one multiply-add with the scale joins each accumulator to the sums of the panel, which
//! lie in the first-level cache, and one with the minimum and the sum of the row's inputs, which was
//! taken when rows were packed. Scales and minima are exact in `f32`.
//!
//! Integers are divided by 2¹³, scales and minima multiplied by it: the products of a span, 32 of at
//! most 2⁷, then never overflow before the result does. Pair dot products flush subnormals, so that
//! inputs below 2⁻¹¹³ may be lost; `swiglu_core::bounds` counts that.
//!
//! Floors, what was measured and what was tried: docs/kernels/cpu.md.

use std::hint::black_box;
use std::marker::PhantomData;

use swiglu_core::{F32Lanes, bf16};

use super::blocks::{Blocks, Unsigned, WithBlocks, group_block_bytes, runs, with_blocks};
use super::{QuantizedPanels, RUN, Weights};
use crate::gemm::{Ahead, PackedRows, step};
use crate::isa::Isa;
use crate::simd::{INTEGER_UNIT, Kernel, Simd, dispatch, lanes};

/// Bytes of a decoded chunk, or at least a group: it stays in the first-level cache.
const CHUNK_BYTES: usize = 24 << 10;
/// Steps between two branches.
const UNROLL: usize = 8;
/// Pairs of a run.
pub(crate) const PAIRS: usize = RUN / 2;

/// The sums of one panel over many rows.
pub(crate) struct PairSums {
    weights: Weights,
    rows: PackedRows,
    scratch: *mut u8,
}

/// How the decoded steps of a type are grouped.
#[derive(Clone, Copy)]
struct Spans {
    /// Runs of a group.
    runs: usize,
    /// Spans of a run: each has its steps, then two vectors of scales.
    spans: usize,
    /// Whether two vectors of minima follow those of scales.
    minima: bool,
}

impl Spans {
    const fn of<B: Blocks>() -> Self {
        Self { runs: runs(B::TYPE), spans: B::SPANS, minima: B::TYPE.has_minimum() }
    }
    /// Pairs of vectors of a run.
    const fn run_vectors(self) -> usize {
        PAIRS + self.spans * (1 + self.minima as usize)
    }
}

impl PairSums {
    /// Panel `panel` over rows packed as runs.
    ///
    /// # Safety
    /// `scratch` has [`super::scratch_bytes`] for more workers than `worker`.
    pub(crate) unsafe fn new(
        panels: &QuantizedPanels,
        panel: usize,
        rows: PackedRows,
        (scratch, worker): (*mut u8, usize),
    ) -> Self {
        // SAFETY: the caller's.
        let scratch = unsafe { scratch.add(super::scratch_bytes(worker)) };
        Self { weights: panels.panel(panel), rows, scratch }
    }

    /// Decodes chunk by chunk and passes over each. The decoding of every type and the tiles of every
    /// kind of spans are functions of their own, as in [`super::Dots`].
    ///
    /// # Safety
    /// As [`dispatch`]; the rows are those of [`Self::new`].
    pub(crate) unsafe fn run(self, isa: Isa) {
        struct SpansOf;
        impl WithBlocks for SpansOf {
            type Output = Spans;
            fn run<B: Blocks>(self) -> Spans {
                Spans::of::<B>()
            }
        }
        let Weights { block, start, end, groups } = self.weights;
        let spans = with_blocks(block, SpansOf);
        let vectors = 2 * lanes(isa) * size_of::<f32>();
        let decoded_bytes = spans.runs * spans.run_vectors() * vectors;
        let group_bytes = vectors / size_of::<f32>() * group_block_bytes(block);
        let blocks = self.rows.blocks;
        let chunk = (CHUNK_BYTES / decoded_bytes).max(1);
        // SAFETY: there is room for this many sums.
        unsafe { self.rows.sums.write_bytes(0, blocks.m * 2 * lanes(isa)) };
        for first in (0..groups).step_by(chunk) {
            let count = chunk.min(groups - first);
            // SAFETY: groups stay inside the panel; a chunk fits the scratch.
            unsafe {
                let w = start.add(first * group_bytes);
                with_blocks(block, Decode { isa, w, groups: count, out: self.scratch.cast() });
                let times = count * spans.runs * spans.spans * blocks.count();
                let over = Over {
                    w: self.scratch,
                    first: first * spans.runs,
                    runs: count * spans.runs,
                    of: groups * spans.runs,
                    rows: self.rows,
                    ahead: Ahead::chunk_after(w, count * group_bytes, end, times),
                };
                match (spans.spans, spans.minima) {
                    (1, false) => dispatch(isa, OverSpans::<1, false>(over)),
                    (1, true) => dispatch(isa, OverSpans::<1, true>(over)),
                    (2, false) => dispatch(isa, OverSpans::<2, false>(over)),
                    (2, true) => dispatch(isa, OverSpans::<2, true>(over)),
                    (n, _) => unreachable!("no type has {n} spans a run"),
                }
            }
        }
    }
}

/// Groups, and where they are decoded to.
struct Decode {
    isa: Isa,
    w: *const u8,
    groups: usize,
    out: *mut f32,
}

impl WithBlocks for Decode {
    type Output = ();

    fn run<B: Blocks>(self) {
        // SAFETY: `PairSums::run`'s caller vouches for the instruction set and the pointers.
        unsafe { dispatch(self.isa, DecodeOf::<B>(self, PhantomData)) }
    }
}

struct DecodeOf<B>(Decode, PhantomData<B>);

impl<B: Blocks> Kernel for DecodeOf<B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Decode { mut w, groups, mut out, .. } = self.0;
        if !S::PAIR_DOTS {
            unreachable!("planned where pair dot products are");
        }
        let run_values = const { Spans::of::<B>().run_vectors() } * 2 * S::LANES;
        for _ in 0..groups {
            // SAFETY: `w` holds the groups, `out` room for them.
            unsafe {
                let heads = [B::head::<S>(w, 0), B::head::<S>(w, 1)];
                for i in 0..runs(B::TYPE) / B::UNROLL {
                    decode_run::<S, B>(w, &heads, i * B::UNROLL, out);
                    out = out.add(run_values);
                    if B::UNROLL == 2 {
                        decode_run::<S, B>(w, &heads, i * 2 + 1, out);
                        out = out.add(run_values);
                    }
                }
                w = w.add(2 * S::LANES * B::BYTES);
            }
        }
    }
}

#[inline(always)]
unsafe fn decode_run<S: Simd, B: Blocks>(
    w: *const u8,
    heads: &[B::Head<S>; 2],
    run: usize,
    mut out: *mut f32,
) {
    let unit = S::V::splat(1.0 / INTEGER_UNIT);
    // Written out, because shifts and words of a quad depend on its number.
    macro_rules! span {
        ($span:literal: $($q:literal)*) => {
            // SAFETY: the caller's.
            unsafe {
                $(for v in 0..2 {
                    let quad = B::quad::<S>(w, v, run, $q);
                    let [even, odd] = S::bytes_to_bf16::<Unsigned<B>>(quad);
                    S::store_words(out.add(v * S::LANES).cast(), even);
                    S::store_words(out.add((2 + v) * S::LANES).cast(), odd);
                }
                out = out.add(4 * S::LANES);)*
                for (v, head) in heads.iter().enumerate() {
                    let out = out.add(v * S::LANES);
                    S::store_f32(out, B::scale::<S>(head, run, $span).mul(unit));
                    if B::TYPE.has_minimum() {
                        S::store_f32(out.add(2 * S::LANES), B::minimum::<S>(head, run, $span).mul(unit));
                    }
                }
            }
        };
    }
    if B::SPANS == 1 {
        span!(0: 0 1 2 3 4 5 6 7);
    } else {
        span!(0: 0 1 2 3);
        // SAFETY: the scales of the first span are two vectors, and so are its minima.
        out = unsafe { out.add(2 * S::LANES * (1 + usize::from(B::TYPE.has_minimum()))) };
        span!(1: 4 5 6 7);
    }
    let _ = out;
}

/// A decoded chunk, and all blocks of rows.
struct Over {
    w: *const u8,
    /// The first run's place in the panel.
    first: usize,
    runs: usize,
    /// Runs of the panel.
    of: usize,
    rows: PackedRows,
    ahead: Ahead,
}

struct OverSpans<const SPANS: usize, const MINIMA: bool>(Over);

impl<const SPANS: usize, const MINIMA: bool> Kernel for OverSpans<SPANS, MINIMA> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Over { w, first, runs, of, rows: PackedRows { x, blocks, sums }, mut ahead } = self.0;
        if !S::PAIR_DOTS {
            unreachable!("planned where pair dot products are");
        }
        let run_values = PAIRS + if MINIMA { SPANS } else { 0 };
        for block in 0..blocks.count() {
            let rows = blocks.range(block);
            macro_rules! choose {
                ($($rows:literal)*) => {
                    match rows.len() {
                        $($rows if $rows <= S::ROWS => {
                            // SAFETY: block offsets stay inside the buffers.
                            unsafe {
                                let x = x.add((rows.start * of + first * $rows) * run_values);
                                let sums = sums.add(rows.start * 2 * S::LANES);
                                tile::<S, $rows, SPANS, MINIMA>((x, w), runs, sums, &mut ahead);
                            }
                        })*
                        n => unreachable!("a block has 1 to {} rows, not {n}", S::ROWS),
                    }
                };
            }
            choose!(1 2 3 4 5 6 7 8 9 10 11 12);
        }
    }
}

/// Adds `runs` runs to the sums of ROWS rows.
#[inline(always)]
unsafe fn tile<S: Simd, const ROWS: usize, const SPANS: usize, const MINIMA: bool>(
    (mut x, mut w): (*const u32, *const u8),
    runs: usize,
    sums: *mut f32,
    ahead: &mut Ahead,
) {
    let vectors = 2 * S::LANES * size_of::<f32>();
    for _ in 0..runs * SPANS {
        ahead.fetch::<S>();
        // SAFETY: `x` and `w` hold the runs, `sums` ROWS rows of two vectors.
        unsafe {
            let mut parts = [[S::V::splat(0.0); 2]; ROWS];
            for _ in 0..PAIRS / SPANS / UNROLL {
                for _ in 0..UNROLL {
                    step::<S, bf16, ROWS>(&mut parts, x, w);
                    (x, w) = (x.add(ROWS), w.add(vectors));
                }
            }
            // A pointer that the compiler does not know, or it keeps the sums on the stack as well.
            let sums = black_box(sums);
            let scales = two_vectors::<S>(w);
            w = w.add(vectors);
            let minima = if MINIMA { two_vectors::<S>(w) } else { scales };
            for (r, parts) in parts.iter().enumerate() {
                for (v, part) in parts.iter().enumerate() {
                    let at = sums.add((2 * r + v) * S::LANES);
                    let mut sum = S::accumulate(S::load_f32(at), *part, scales[v]);
                    if MINIMA {
                        sum = S::accumulate(sum, S::splat_bits(x.add(r)), minima[v]);
                    }
                    S::store_f32(at, sum);
                }
            }
            if MINIMA {
                (x, w) = (x.add(ROWS), w.add(vectors));
            }
        }
    }
}

#[inline(always)]
unsafe fn two_vectors<S: Simd>(w: *const u8) -> [S::V; 2] {
    // SAFETY: the caller's.
    unsafe { [S::load_f32(w.cast()), S::load_f32(w.cast::<f32>().add(S::LANES))] }
}
