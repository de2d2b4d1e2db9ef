//! Many rows: parts of a panel decoded to `f32`, then the tiles of the dense kernel.
//!
//! A chunk is decoded into a buffer that stays in the second-level cache while all blocks of rows
//! pass over it and prefetch the next chunk's quantised bytes. Decoding costs about 5.5 vector
//! operations for 16 weights, a row half a cycle: from some ten rows on the tiles bind.
//!
//! Floors, what was measured and what was tried: docs/kernels/cpu.md.

use std::marker::PhantomData;

use swiglu_core::F32Lanes;

use super::blocks::{Blocks, WithBlocks, byte, group_block_bytes, runs, with_blocks};
use super::{QuantizedPanels, RUN, Weights};
use crate::gemm::{Ahead, CHUNK_BYTES, Chunk, PackedRows, fetches};
use crate::simd::{Kernel, Simd};

/// Bytes of a decoded chunk, or at least a group, where rows are few because products of bytes take long.
const NEAR_CHUNK_BYTES: usize = 16 << 10;

/// The sums of one panel over many rows.
pub(crate) struct DecodedSums {
    weights: Weights,
    rows: PackedRows,
    scratch: *mut u8,
}

/// Bytes of the decoded chunks of all workers.
pub(crate) fn scratch_bytes(workers: usize) -> usize {
    workers * CHUNK_BYTES
}

impl DecodedSums {
    /// Panel `panel` over packed rows of `f32`.
    ///
    /// # Safety
    /// `scratch` has [`scratch_bytes`] for more workers than `worker`.
    pub(crate) unsafe fn new(
        panels: &QuantizedPanels,
        panel: usize,
        rows: PackedRows,
        (scratch, worker): (*mut u8, usize),
    ) -> Self {
        // SAFETY: the caller's.
        let scratch = unsafe { scratch.add(worker * CHUNK_BYTES) };
        Self { weights: panels.panel(panel), rows, scratch }
    }
}

impl Kernel for DecodedSums {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Weights { block, start, end, groups } = self.weights;
        let group_bytes = 2 * S::LANES * group_block_bytes(block);
        let step_bytes = 2 * S::LANES * size_of::<f32>();
        let chunk_bytes = if S::SHORT_SUMS { NEAR_CHUNK_BYTES } else { CHUNK_BYTES };
        let decoded_bytes = step_bytes * block.elements();
        let chunk = (chunk_bytes / decoded_bytes).max(1);
        let steps = groups * block.elements();
        let mut first = 0;
        loop {
            let count = chunk.min(groups - first);
            // SAFETY: chunk and block offsets stay inside the buffers; a chunk fits the scratch.
            unsafe {
                let w = start.add(first * group_bytes);
                with_blocks(block, Decode(w, count, self.scratch.cast(), PhantomData::<S>));
                let times = fetches(count * block.elements(), self.rows.blocks);
                let ahead = Ahead::chunk_after(w, count * group_bytes, end, times);
                let chunk = Chunk {
                    w: self.scratch,
                    first: first * block.elements(),
                    steps: count * block.elements(),
                    of: steps,
                    stream: false,
                };
                chunk.pass_over::<S, f32>(self.rows, ahead);
            }
            first += count;
            if first >= groups {
                return;
            }
        }
    }
}

/// Groups, their number, and where they are decoded to.
struct Decode<S>(*const u8, usize, *mut f32, PhantomData<S>);

impl<S: Simd> WithBlocks for Decode<S> {
    type Output = ();

    #[inline(always)]
    fn run<B: Blocks>(self) {
        // SAFETY: `Kernel::run`'s caller vouches for the pointers.
        unsafe { decode::<S, B>(self.0, self.1, self.2) }
    }
}

/// Writes `groups` groups as steps of a dense panel.
#[inline(always)]
unsafe fn decode<S: Simd, B: Blocks>(mut w: *const u8, groups: usize, mut out: *mut f32) {
    let step = 2 * S::LANES;
    for _ in 0..groups {
        // SAFETY: `w` holds the groups, `out` their weights.
        unsafe {
            for v in 0..2 {
                let head = B::head::<S>(w, v);
                for i in 0..runs(B::TYPE) / B::UNROLL {
                    let run = i * B::UNROLL;
                    let out = out.add(run * RUN * step + v * S::LANES);
                    decode_run::<S, B>(w, v, &head, run, out);
                    if B::UNROLL == 2 {
                        decode_run::<S, B>(w, v, &head, run + 1, out.add(RUN * step));
                    }
                }
            }
            w = w.add(step * B::BYTES);
            out = out.add(step * B::TYPE.elements());
        }
    }
}

/// Each value is scale · q plus a term that is −offset · scale or the minimum: the product is exact,
/// the sum rounds once and not at all without minima, as where the formats are defined.
#[inline(always)]
unsafe fn decode_run<S: Simd, B: Blocks>(
    w: *const u8,
    v: usize,
    head: &B::Head<S>,
    run: usize,
    out: *mut f32,
) {
    // Written out, because shifts and words of a quad depend on its number.
    macro_rules! span {
        ($span:literal: $($q:literal)*) => {{
            let scale = B::scale::<S>(head, run, $span);
            let term = if B::TYPE.has_minimum() {
                B::minimum::<S>(head, run, $span)
            } else {
                scale.mul(S::V::splat(-(B::OFFSET as f32)))
            };
            if S::WRITTEN_OUT {
                // SAFETY: the caller's.
                $(unsafe { decode_quad::<S, B>(w, v, run, $q, scale, term, out) };)*
            } else {
                for q in [$($q),*] {
                    // SAFETY: the caller's.
                    unsafe { decode_quad::<S, B>(w, v, run, q, scale, term, out) };
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

/// Four inputs of a run.
#[inline(always)]
unsafe fn decode_quad<S: Simd, B: Blocks>(
    w: *const u8,
    v: usize,
    run: usize,
    q: usize,
    scale: S::V,
    term: S::V,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let u = B::quad::<S>(w, v, run, q);
        for i in 0..4 {
            let value = S::words_to_f32(byte::<S>(u, i));
            S::store_f32(out.add((4 * q + i) * 2 * S::LANES), S::accumulate(term, scale, value));
        }
    }
}
