//! A few rows in the order of many: weights decoded in registers, and multiplied there.
//!
//! A weight becomes the `f32` that [`super::decoded`] stores, by the same multiply-add, and joins the one accumulator of
//! its output in the order of the inputs, so that a row has the bits it has among many. With one row two panels side by
//! side hide the latency of the multiply-adds, as in [`crate::gemm::SideBySide`]. Taken where one order of sums is asked
//! for and the way is that of decoded weights; for any order [`super::dots`] is faster.
//!
//! Floors, what was measured and what was tried: docs/kernels/cpu.md.
//!
//! Bytes stay where they are in their words: `u·2⁸ⁱ` is exact in `f32`, and so is the scale divided by 2⁸ⁱ, so the product
//! is that of `u` and the scale. A shift for each weight is saved.

#![expect(
    clippy::needless_range_loop,
    reason = "iterators over two arrays leave the sums in memory, see `dots`"
)]

use std::marker::PhantomData;
use std::ops::Range;

use swiglu_core::{BlockType, F32Lanes};

use super::blocks::{Blocks, WithBlocks, runs, with_blocks};
use super::{QuantizedPanels, RUN, Weights};
use crate::isa::Isa;
use crate::simd::{Fetch, Kernel, Simd, dispatch};

/// How far ahead of use weights are asked for, of all panels together.
const AHEAD: usize = 16 << 10;

/// Panels whose sums over so many rows are taken together; none from where on decoded weights are stored.
pub(crate) const fn panels_fused(rows: usize) -> Option<usize> {
    match rows {
        1 => Some(2),
        2 | 3 => Some(1),
        _ => None,
    }
}

/// The sums of neighbouring panels over a few rows.
pub(crate) struct FusedSums {
    /// Of the first panel; the others lie behind it.
    weights: Weights,
    panels: usize,
    panel_bytes: usize,
    /// `[step][row]`, every step a `f32`.
    x: *const u32,
    rows: usize,
    /// Of each panel, those of a row behind those of the one before.
    sums: *mut f32,
}

impl FusedSums {
    /// The panels of `range`, which are some of `panels` and at most [`panels_fused`]; `sums` has room for those of each.
    pub(crate) fn new(
        panels: &QuantizedPanels,
        range: Range<usize>,
        (x, rows): (*const u32, usize),
        sums: *mut f32,
    ) -> Self {
        let (weights, panel_bytes) = (panels.panel(range.start), panels.panel_bytes());
        Self { weights, panels: range.len(), panel_bytes, x, rows, sums }
    }

    /// Runs the kernel of the weights' type, each a function of its own, as in [`super::Dots`].
    ///
    /// # Safety
    /// As [`dispatch`]; `x` has the rows, `sums` room for those of each panel.
    pub(crate) unsafe fn run(self, isa: Isa) {
        with_blocks(self.weights.block, Dispatch(isa, self));
    }
}

struct Dispatch(Isa, FusedSums);

impl WithBlocks for Dispatch {
    type Output = ();

    fn run<B: Blocks>(self) {
        let Self(isa, sums) = self;
        // SAFETY: `FusedSums::run`'s caller vouches for the instruction set and the pointers.
        unsafe {
            match (sums.rows, sums.panels) {
                (1, 2) => dispatch(isa, Tile::<B, 1, 2>(sums, PhantomData)),
                (1, 1) => dispatch(isa, Tile::<B, 1, 1>(sums, PhantomData)),
                (2, 1) => dispatch(isa, Tile::<B, 2, 1>(sums, PhantomData)),
                (3, 1) => dispatch(isa, Tile::<B, 3, 1>(sums, PhantomData)),
                (rows, panels) => unreachable!("{panels} panels of {rows} rows"),
            }
        }
    }
}

/// A function for each number of rows and panels, as in [`super::dots`].
struct Tile<B, const ROWS: usize, const PANELS: usize>(FusedSums, PhantomData<B>);

impl<B: Blocks, const ROWS: usize, const PANELS: usize> Kernel for Tile<B, ROWS, PANELS> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if !S::SHORT_SUMS {
            unreachable!("planned where byte dot products are several instructions");
        }
        // SAFETY: the caller's.
        unsafe { self.0.tile::<S, B, ROWS, PANELS>() }
    }
}

impl FusedSums {
    #[inline(always)]
    unsafe fn tile<S: Simd, B: Blocks, const ROWS: usize, const PANELS: usize>(self) {
        let group_bytes = 2 * S::LANES * B::BYTES;
        let run_bytes = group_bytes / runs(B::TYPE);
        let groups = self.weights.groups;
        // Where a panel ends, that which takes its place in the next group is asked for.
        let ahead = AHEAD / PANELS;
        let last = groups.min(ahead / group_bytes);
        let parts = [(groups - last, ahead), (last, ahead + (PANELS - 1) * self.panel_bytes)];
        // SAFETY: `x` holds the inputs of ROWS rows, each panel its groups, `sums` ROWS rows of two vectors for each panel.
        unsafe {
            let mut acc = [[[S::V::splat(0.0); 2]; ROWS]; PANELS];
            let (mut x, mut w) = (self.x, self.weights.start);
            for (count, ahead) in parts {
                for _ in 0..count {
                    let mut heads = [[B::head::<S>(w, 0), B::head::<S>(w, 1)]; PANELS];
                    for p in 1..PANELS {
                        let w = w.add(p * self.panel_bytes);
                        heads[p] = [B::head::<S>(w, 0), B::head::<S>(w, 1)];
                    }
                    let panels = (w, self.panel_bytes);
                    for i in 0..runs(B::TYPE) / B::UNROLL {
                        let run = i * B::UNROLL;
                        for p in 0..PANELS {
                            let next =
                                w.wrapping_add(p * self.panel_bytes + run * run_bytes + ahead);
                            for line in (0..B::UNROLL * run_bytes).step_by(64) {
                                S::prefetch(next.wrapping_add(line), Fetch::Second);
                            }
                        }
                        add_run::<S, B, ROWS, PANELS>(&mut acc, x, panels, &heads, run);
                        x = x.add(RUN * ROWS);
                        if B::UNROLL == 2 {
                            add_run::<S, B, ROWS, PANELS>(&mut acc, x, panels, &heads, run + 1);
                            x = x.add(RUN * ROWS);
                        }
                    }
                    w = w.add(group_bytes);
                }
            }
            // As nested loops: with one over all of them the accumulators would lie in memory.
            for p in 0..PANELS {
                for r in 0..ROWS {
                    for v in 0..2 {
                        let at = self.sums.add(((p * ROWS + r) * 2 + v) * S::LANES);
                        S::store_f32(at, acc[p][r][v]);
                    }
                }
            }
        }
    }
}

/// What the bytes of a span's words are multiplied by, the first three where they are, and what is added.
#[derive(Clone, Copy)]
struct Terms<S: Simd> {
    scales: [S::V; 3],
    term: S::V,
}

impl<S: Simd> Terms<S> {
    #[inline(always)]
    fn of<B: Blocks>(head: &B::Head<S>, run: usize, span: usize) -> Self {
        let scale = B::scale::<S>(head, run, span);
        let term = if B::TYPE.has_minimum() {
            B::minimum::<S>(head, run, span)
        } else {
            scale.mul(S::V::splat(-(B::OFFSET as f32)))
        };
        let lower = |bits: i32| {
            scale.mul(S::V::splat(f32::from_bits(((127 - bits) << 23).cast_unsigned())))
        };
        let scales = if in_place::<B>() { [scale, lower(8), lower(16)] } else { [scale; 3] };
        Self { scales, term }
    }
}

/// Whether scales can be divided by 2¹⁶ and stay exact: those of MXFP4 are powers of two down to 2⁻¹²⁸.
const fn in_place<B: Blocks>() -> bool {
    !matches!(B::TYPE, BlockType::MXFP4)
}

/// Byte `i` of every word, times 2⁸ⁱ where it stays in its place. The last one never does: it would be a sign.
#[inline(always)]
fn byte_of<S: Simd, B: Blocks>(u: S::I, i: usize) -> S::I {
    match i {
        0 => S::and(u, S::words(0xFF)),
        3 => S::shr(u, 24),
        i if in_place::<B>() => S::and(u, S::words(0xFF << (8 * i))),
        i => super::blocks::byte::<S>(u, i),
    }
}

/// A run of all panels.
#[inline(always)]
unsafe fn add_run<S: Simd, B: Blocks, const ROWS: usize, const PANELS: usize>(
    acc: &mut [[[S::V; 2]; ROWS]; PANELS],
    x: *const u32,
    w: (*const u8, usize),
    heads: &[[B::Head<S>; 2]; PANELS],
    run: usize,
) {
    const { assert!(B::SPANS == 1 || B::SPANS == 2) };
    // Written out, because shifts and words of a quad depend on its number.
    macro_rules! span {
        ($span:literal: $($q:literal)*) => {{
            // Not of zeros: with Q6_K that takes a sixth longer.
            let mut terms = [[Terms::<S>::of::<B>(&heads[0][0], run, $span); 2]; PANELS];
            for p in 0..PANELS {
                for v in 0..2 {
                    terms[p][v] = Terms::<S>::of::<B>(&heads[p][v], run, $span);
                }
            }
            if S::WRITTEN_OUT {
                // SAFETY: the caller's.
                $(unsafe { add_quad::<S, B, ROWS, PANELS>(acc, x, w, &terms, run, $q) };)*
            } else {
                for q in [$($q),*] {
                    // SAFETY: the caller's.
                    unsafe { add_quad::<S, B, ROWS, PANELS>(acc, x, w, &terms, run, q) };
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

/// Four inputs of a run whose rows begin at `x`.
#[inline(always)]
unsafe fn add_quad<S: Simd, B: Blocks, const ROWS: usize, const PANELS: usize>(
    acc: &mut [[[S::V; 2]; ROWS]; PANELS],
    x: *const u32,
    (w, panel_bytes): (*const u8, usize),
    terms: &[[Terms<S>; 2]; PANELS],
    run: usize,
    q: usize,
) {
    // SAFETY: the caller's group of each panel, and its inputs.
    unsafe {
        let mut u = [[S::words(0); 2]; PANELS];
        for p in 0..PANELS {
            for v in 0..2 {
                u[p][v] = B::quad::<S>(w.add(p * panel_bytes), v, run, q);
            }
        }
        // Four times, not as a loop: masks and shifts of a byte depend on its number.
        macro_rules! byte {
            ($i:literal) => {
                for p in 0..PANELS {
                    for v in 0..2 {
                        let Terms { scales, term } = &terms[p][v];
                        let value = S::words_to_f32(byte_of::<S, B>(u[p][v], $i));
                        let weight = S::accumulate(*term, scales[$i % 3], value);
                        for r in 0..ROWS {
                            let x = S::splat_bits(x.add((4 * q + $i) * ROWS + r));
                            acc[p][r][v] = S::accumulate(acc[p][r][v], x, weight);
                        }
                    }
                }
            };
        }
        byte!(0);
        byte!(1);
        byte!(2);
        byte!(3);
    }
}
