//! Blocks of 4-bit codes whose values are not evenly spaced: a table has these as unsigned bytes.

use swiglu_core::{BlockType, F32Lanes};

use super::{Blocks, byte, half, nibbles, word, words};
use crate::simd::Simd;

/// The values of IQ4_NL and IQ4_XS, 128 added.
const NON_LINEAR: [u8; 16] =
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// The values of e2m1, doubled, 12 added.
const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Words `first` to `first + 3` hold quads 0 to 3 in their lower nibbles and 4 to 7 in the upper.
///
/// # Safety
/// As [`Blocks::quad`].
#[inline(always)]
unsafe fn looked_up<S: Simd, B: Blocks>(
    table: &[u8; 16],
    (group, v): (*const u8, usize),
    first: usize,
    q: usize,
) -> S::I {
    // SAFETY: the caller's.
    unsafe { S::look_up(table, nibbles::<S>(word::<S, B>(group, first + q % 4, v), q / 4)) }
}

/// 32 values with a scale.
pub(in crate::quant) struct IQ4_NL;

impl Blocks for IQ4_NL {
    const TYPE: BlockType = BlockType::IQ4_NL;
    const BITS: u32 = 8;
    const FILE_HALVES: &'static [usize] = &[0];
    const OFFSET: u32 = 128;
    type Head<S: Simd> = S::V;

    #[inline(always)]
    unsafe fn head<S: Simd>(group: *const u8, v: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { half::<S>(group, 0, v) }
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(group: *const u8, v: usize, _: usize, q: usize) -> S::I {
        // SAFETY: the caller's.
        unsafe { looked_up::<S, Self>(&NON_LINEAR, (group, v), 0, q) }
    }
    #[inline(always)]
    fn scale<S: Simd>(head: &S::V, _: usize, _: usize) -> S::V {
        *head
    }
}

/// 256 values with a scale for each run. Words 0 and 1 are the scales, a byte each (of 6 bits: two bytes a block
/// more than in the file), four for each run follow.
pub(in crate::quant) struct IQ4_XS;

impl Blocks for IQ4_XS {
    const TYPE: BlockType = BlockType::IQ4_XS;
    const BITS: u32 = 8;
    const FILE_HALVES: &'static [usize] = &[0];
    const BYTES: usize = 2 + 4 * (2 + 32);
    const OFFSET: u32 = 128;
    type Head<S: Simd> = (S::V, [S::I; 2]);

    #[inline(always)]
    unsafe fn head<S: Simd>(group: *const u8, v: usize) -> Self::Head<S> {
        // SAFETY: the caller's.
        unsafe {
            let scales = [word::<S, Self>(group, 0, v), word::<S, Self>(group, 1, v)];
            (half::<S>(group, 0, v), scales)
        }
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(group: *const u8, v: usize, run: usize, q: usize) -> S::I {
        // SAFETY: the caller's.
        unsafe { looked_up::<S, Self>(&NON_LINEAR, (group, v), 2 + 4 * run, q) }
    }
    #[inline(always)]
    fn scale<S: Simd>(&(d, scales): &Self::Head<S>, run: usize, _: usize) -> S::V {
        let scale = S::words_to_f32(byte::<S>(scales[run / 4], run % 4));
        d.mul(scale.sub(S::V::splat(32.0)))
    }
    /// In the file scales are a nibble each behind 16 bits with two more of each.
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        let high = u16::from_le_bytes([b[2], b[3]]);
        let scale = |run: usize| {
            let low = b[4 + run / 2] >> (4 * (run % 2)) & 15;
            u32::from(low) | u32::from(high >> (2 * run) & 3) << 4
        };
        for first in [0, 4] {
            emit((0..4).fold(0, |w, i| w | scale(first + i) << (8 * i)));
        }
        words(&b[8..]).for_each(emit);
    }
}

/// 32 values with a power of two, which a group has as the upper half of its `f32`: one byte a block more than in
/// the file. Before the inputs' scale sums are 2³² times it at most: from 2⁹⁵ on they overflow where the result
/// might not.
pub(in crate::quant) struct MXFP4;

impl Blocks for MXFP4 {
    const TYPE: BlockType = BlockType::MXFP4;
    const BITS: u32 = 5;
    const FILE_HALVES: &'static [usize] = &[];
    const HALVES: usize = 1;
    const BYTES: usize = 2 + 16;
    const OFFSET: u32 = 12;
    type Head<S: Simd> = S::V;

    #[inline(always)]
    unsafe fn head<S: Simd>(group: *const u8, v: usize) -> S::V {
        // SAFETY: the caller's group begins with these values.
        unsafe { S::load_bf16(group.cast::<u16>().wrapping_add(v * S::LANES)) }
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(group: *const u8, v: usize, _: usize, q: usize) -> S::I {
        // SAFETY: the caller's.
        unsafe { looked_up::<S, Self>(&E2M1, (group, v), 0, q) }
    }
    #[inline(always)]
    fn scale<S: Simd>(head: &S::V, _: usize, _: usize) -> S::V {
        *head
    }
    /// Half of 2^(e − 127), subnormal for 0 and 1.
    fn file_half(b: &[u8], _: usize) -> u16 {
        match b[0] {
            e @ (0 | 1) => 0x20 << e,
            e => u16::from(e - 1) << 7,
        }
    }
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        words(&b[1..]).for_each(emit);
    }
}
