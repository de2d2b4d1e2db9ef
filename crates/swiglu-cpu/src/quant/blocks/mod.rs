//! How the kernels read the blocks of a panel.
//!
//! A *group* is one block of each of the panel's `2 · LANES` output features, transposed: first the
//! block's binary16 values, each for all lanes, then its words of 32 bits, each for all lanes. So a
//! group has the bytes of its blocks, a vector load gives one word of `LANES` features, and each
//! byte (or half of one) of that word is the weight of one input feature. Features are taken in
//! *runs* of 32, a run in eight quads, and a run may have two *spans* with scales of their own.

#![expect(non_camel_case_types, reason = "the names of the format")]

use std::marker::PhantomData;

use swiglu_core::{BlockType, F32Lanes};

use crate::simd::{Bytes, Simd};

/// A block type, as vectors.
pub(super) trait Blocks {
    /// The type.
    const TYPE: BlockType;
    /// Binary16 values of a block.
    const HALVES: usize;
    /// Runs that are written out, 1 or 2: their shifts are then constants.
    const UNROLL: usize = 1;
    /// Spans of a run.
    const SPANS: usize = 1;
    /// What is subtracted from the unsigned bytes of [`Self::quad`].
    const OFFSET: u32 = 0;
    /// What a block's scales and minima are read from.
    type Head<S: Simd>: Copy;

    /// Reads the scales of vector `v`.
    ///
    /// # Safety
    /// `group` is valid; inside `dispatch`.
    unsafe fn head<S: Simd>(group: *const u8, v: usize) -> Self::Head<S>;
    /// Four unsigned weights of each lane, a byte each: quad `q` of run `run`.
    ///
    /// # Safety
    /// As [`Self::head`].
    unsafe fn quad<S: Simd>(group: *const u8, v: usize, run: usize, q: usize) -> S::I;
    /// What the weights of a span are multiplied by; exact.
    fn scale<S: Simd>(head: &Self::Head<S>, run: usize, span: usize) -> S::V;
    /// What is added to each weight of a run, where the type has minima; exact.
    #[inline(always)]
    fn minimum<S: Simd>(_: &Self::Head<S>, _: usize) -> S::V {
        S::V::splat(0.0)
    }
}

/// The integers of [`Blocks::quad`].
pub(super) struct Unsigned<B>(PhantomData<B>);

impl<B: Blocks> Bytes for Unsigned<B> {
    const BITS: u32 = match B::TYPE {
        BlockType::Q4_0 | BlockType::Q4_1 | BlockType::Q4_K => 4,
        BlockType::Q5_0 | BlockType::Q5_1 | BlockType::Q5_K => 5,
        BlockType::Q6_K => 6,
        _ => 8,
    };
    const OFFSET: u32 = B::OFFSET;
}

/// Code written over [`Blocks`].
pub(super) trait WithBlocks {
    /// What it returns.
    type Output;
    /// Runs. Implementations with vectors are `#[inline(always)]`.
    fn run<B: Blocks>(self) -> Self::Output;
}

/// Runs `f` with the blocks of the type.
#[inline(always)]
pub(super) fn with_blocks<F: WithBlocks>(block: BlockType, f: F) -> F::Output {
    match block {
        BlockType::Q4_0 => f.run::<Q4_0>(),
        BlockType::Q4_1 => f.run::<Q4_1>(),
        BlockType::Q5_0 => f.run::<Q5_0>(),
        BlockType::Q5_1 => f.run::<Q5_1>(),
        BlockType::Q8_0 => f.run::<Q8_0>(),
        BlockType::Q4_K => f.run::<Q4_K>(),
        BlockType::Q5_K => f.run::<Q5_K>(),
        BlockType::Q6_K => f.run::<Q6_K>(),
        other => unreachable!("{other} is not one of `quantized_types`"),
    }
}

/// Runs of a block.
pub(super) const fn runs(block: BlockType) -> usize {
    block.elements() / super::RUN
}

/// Binary16 value `i` of vector `v`.
#[inline(always)]
unsafe fn half<S: Simd>(group: *const u8, i: usize, v: usize) -> S::V {
    // SAFETY: the caller's group begins with these values.
    unsafe { S::load_f16(group.cast::<u16>().wrapping_add((2 * i + v) * S::LANES)) }
}

/// Word `i` of vector `v`.
#[inline(always)]
unsafe fn word<S: Simd, B: Blocks>(group: *const u8, i: usize, v: usize) -> S::I {
    // SAFETY: the caller's group has these words behind its binary16 values.
    unsafe { S::load_words(group.wrapping_add((B::HALVES + 2 * i + v) * 4 * S::LANES)) }
}

const fn bytes(b: u8) -> u32 {
    u32::from_ne_bytes([b; 4])
}

/// The lower (0) or upper (1) nibble of every byte.
#[inline(always)]
fn nibbles<S: Simd>(w: S::I, which: usize) -> S::I {
    let w = if which == 0 { w } else { S::shr(w, 4) };
    S::and(w, S::words(bytes(15)))
}

/// Bit `bit` of every byte as bit 4.
#[inline(always)]
fn fifth_bits<S: Simd>(w: S::I, bit: usize) -> S::I {
    let w = if bit <= 4 { S::shl(w, 4 - bit as u32) } else { S::shr(w, bit as u32 - 4) };
    S::and(w, S::words(bytes(16)))
}

/// Byte `i` of every word, zeros above.
#[inline(always)]
pub(super) fn byte<S: Simd>(w: S::I, i: usize) -> S::I {
    S::and(S::shr(w, 8 * i as u32), S::words(0xFF))
}

/// 32 values with a scale.
macro_rules! scaled {
    ($type:ident, offset $offset:literal, |$group:ident, $v:ident, $q:ident| $quad:expr) => {
        pub(super) struct $type;
        impl Blocks for $type {
            const TYPE: BlockType = BlockType::$type;
            const HALVES: usize = 1;
            const OFFSET: u32 = $offset;
            type Head<S: Simd> = S::V;

            #[inline(always)]
            unsafe fn head<S: Simd>(group: *const u8, v: usize) -> S::V {
                // SAFETY: the caller's.
                unsafe { half::<S>(group, 0, v) }
            }
            #[inline(always)]
            unsafe fn quad<S: Simd>($group: *const u8, $v: usize, _: usize, $q: usize) -> S::I {
                // SAFETY: the caller's.
                unsafe { $quad }
            }
            #[inline(always)]
            fn scale<S: Simd>(head: &S::V, _: usize, _: usize) -> S::V {
                *head
            }
        }
    };
}

/// 32 values with a scale and a minimum.
macro_rules! with_minimum {
    ($type:ident, |$group:ident, $v:ident, $q:ident| $quad:expr) => {
        pub(super) struct $type;
        impl Blocks for $type {
            const TYPE: BlockType = BlockType::$type;
            const HALVES: usize = 2;
            type Head<S: Simd> = [S::V; 2];

            #[inline(always)]
            unsafe fn head<S: Simd>(group: *const u8, v: usize) -> [S::V; 2] {
                // SAFETY: the caller's.
                unsafe { [half::<S>(group, 0, v), half::<S>(group, 1, v)] }
            }
            #[inline(always)]
            unsafe fn quad<S: Simd>($group: *const u8, $v: usize, _: usize, $q: usize) -> S::I {
                // SAFETY: the caller's.
                unsafe { $quad }
            }
            #[inline(always)]
            fn scale<S: Simd>(head: &[S::V; 2], _: usize, _: usize) -> S::V {
                head[0]
            }
            #[inline(always)]
            fn minimum<S: Simd>(head: &[S::V; 2], _: usize) -> S::V {
                head[1]
            }
        }
    };
}

/// Words 0 to 3 hold quads 0 to 3 in their lower nibbles and 4 to 7 in the upper.
macro_rules! plain_nibbles {
    ($group:ident, $v:ident, $q:ident, from $first:literal) => {
        nibbles::<S>(word::<S, Self>($group, $first + $q % 4, $v), $q / 4)
    };
}

/// As [`plain_nibbles`], behind a word with fifth bits: bit q of byte b belongs to feature b of
/// quad q (see [`spread_bits`]).
macro_rules! five_bits {
    ($group:ident, $v:ident, $q:ident) => {
        S::or(
            plain_nibbles!($group, $v, $q, from 1),
            fifth_bits::<S>(word::<S, Self>($group, 0, $v), $q),
        )
    };
}

scaled!(Q4_0, offset 8, |group, v, q| plain_nibbles!(group, v, q, from 0));
scaled!(Q5_0, offset 16, |group, v, q| five_bits!(group, v, q));
// Packed with 128 added, so that the bytes are unsigned.
scaled!(Q8_0, offset 128, |group, v, q| word::<S, Self>(group, q, v));
with_minimum!(Q4_1, |group, v, q| plain_nibbles!(group, v, q, from 0));
with_minimum!(Q5_1, |group, v, q| five_bits!(group, v, q));

/// Scales and minima of Q4_K and Q5_K: their factors, and a byte of each run.
#[derive(Clone, Copy)]
pub(super) struct KHead<S: Simd> {
    factors: [S::V; 2],
    scales: [S::I; 2],
    minima: [S::I; 2],
}

impl<S: Simd> KHead<S> {
    /// Sorts the 6-bit values of three words: the first four pairs lie whole in bytes of words 0
    /// and 1, whose upper two bits complete the nibbles of the last four in word 2.
    #[inline(always)]
    unsafe fn read<B: Blocks>(group: *const u8, v: usize) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let (a, b) = (word::<S, B>(group, 0, v), word::<S, B>(group, 1, v));
            let last = word::<S, B>(group, 2, v);
            let (six, top) = (S::words(bytes(63)), S::words(bytes(0x30)));
            let last_scales = S::or(nibbles::<S>(last, 0), S::and(S::shr(a, 2), top));
            let last_minima = S::or(nibbles::<S>(last, 1), S::and(S::shr(b, 2), top));
            Self {
                factors: [half::<S>(group, 0, v), half::<S>(group, 1, v)],
                scales: [S::and(a, six), last_scales],
                minima: [S::and(b, six), last_minima],
            }
        }
    }
}

/// 256 values: nibbles, for Q5_K with fifth bits, six-bit scales and minima of the runs.
macro_rules! k_blocks {
    ($type:ident, |$group:ident, $v:ident, $run:ident, $q:ident| $quad:expr) => {
        pub(super) struct $type;
        impl Blocks for $type {
            const TYPE: BlockType = BlockType::$type;
            const HALVES: usize = 2;
            const UNROLL: usize = 2;
            type Head<S: Simd> = KHead<S>;

            #[inline(always)]
            unsafe fn head<S: Simd>(group: *const u8, v: usize) -> KHead<S> {
                // SAFETY: the caller's.
                unsafe { KHead::read::<Self>(group, v) }
            }
            #[inline(always)]
            unsafe fn quad<S: Simd>($group: *const u8, $v: usize, $run: usize, $q: usize) -> S::I {
                // SAFETY: the caller's.
                unsafe { $quad }
            }
            #[inline(always)]
            fn scale<S: Simd>(head: &KHead<S>, run: usize, _: usize) -> S::V {
                let scale = byte::<S>(head.scales[run / 4], run % 4);
                head.factors[0].mul(S::words_to_f32(scale))
            }
            #[inline(always)]
            fn minimum<S: Simd>(head: &KHead<S>, run: usize) -> S::V {
                let minimum = byte::<S>(head.minima[run / 4], run % 4);
                head.factors[1].neg().mul(S::words_to_f32(minimum))
            }
        }
    };
}

/// Runs 2i and 2i + 1 are the lower and upper nibbles of eight words; pairs of runs are `$words`
/// words apart.
macro_rules! pair_nibbles {
    ($group:ident, $v:ident, $run:ident, $q:ident, from $first:literal by $words:literal) => {
        nibbles::<S>(word::<S, Self>($group, $first + $run / 2 * $words + $q, $v), $run % 2)
    };
}

k_blocks!(Q4_K, |group, v, run, q| pair_nibbles!(group, v, run, q, from 3 by 8));
// A word for each run of a pair follows the nibbles: bit q of byte b completes feature b of quad q.
k_blocks!(Q5_K, |group, v, run, q| S::or(
    pair_nibbles!(group, v, run, q, from 3 by 10),
    fifth_bits::<S>(word::<S, Self>(group, 11 + run / 2 * 10 + run % 2, v), q)
));

/// 256 values of 6 bits, a signed scale for each 16. Words 0 to 3 are the scales; six for each run follow, three for
/// each of its spans: the lower six bits of their bytes are its first three quads, and the upper two, from the first
/// word's on, the bits of the fourth from the lowest on.
pub(super) struct Q6_K;

impl Blocks for Q6_K {
    const TYPE: BlockType = BlockType::Q6_K;
    const HALVES: usize = 1;
    const UNROLL: usize = 2;
    const SPANS: usize = 2;
    const OFFSET: u32 = 32;
    type Head<S: Simd> = (S::V, [S::I; 4]);

    #[inline(always)]
    unsafe fn head<S: Simd>(group: *const u8, v: usize) -> Self::Head<S> {
        // SAFETY: the caller's.
        unsafe {
            let mut scales = [S::words(0); 4];
            for (i, scale) in scales.iter_mut().enumerate() {
                *scale = word::<S, Self>(group, i, v);
            }
            (half::<S>(group, 0, v), scales)
        }
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(group: *const u8, v: usize, run: usize, q: usize) -> S::I {
        // SAFETY: the caller's.
        unsafe {
            let at = |t: usize| word::<S, Self>(group, 4 + 6 * run + q / 4 * 3 + t, v);
            let top = |t: usize| S::shr(S::and(at(t), S::words(bytes(0xC0))), 6 - 2 * t as u32);
            match q % 4 {
                3 => S::or(S::or(top(0), top(1)), top(2)),
                t => S::and(at(t), S::words(bytes(63))),
            }
        }
    }
    #[inline(always)]
    fn scale<S: Simd>(&(d, scales): &Self::Head<S>, run: usize, span: usize) -> S::V {
        let i = 2 * run + span;
        let scale = S::sar(S::shl(scales[i / 4], 24 - 8 * (i as u32 % 4)), 24);
        d.mul(S::words_to_f32(scale))
    }
}

/// The binary16 values of a block as it lies in a file.
pub(super) fn file_halves(block: BlockType) -> &'static [usize] {
    match block {
        BlockType::Q6_K => &[208],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        _ => &[0],
    }
}

/// The words of a block as kernels read them, from its bytes in a file.
pub(super) fn file_words(block: BlockType, b: &[u8], emit: &mut impl FnMut(u32)) {
    match block {
        BlockType::Q8_0 => words(&b[2..]).for_each(|w| emit(w ^ bytes(0x80))),
        BlockType::Q5_0 | BlockType::Q5_1 => {
            let bits = 2 * file_halves(block).len();
            words(&b[bits..bits + 4]).for_each(|w| emit(spread_bits(w)));
            words(&b[bits + 4..]).for_each(emit);
        }
        BlockType::Q5_K => b.as_chunks().0.iter().for_each(|b| q5_k_words(b, emit)),
        BlockType::Q6_K => b.as_chunks().0.iter().for_each(|b| q6_k_words(b, emit)),
        _ => words(&b[2 * file_halves(block).len()..]).for_each(emit),
    }
}

fn words(b: &[u8]) -> impl Iterator<Item = u32> {
    b.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w))
}

fn word_array<const N: usize>(b: &[u8]) -> [u32; N] {
    let mut all = words(b);
    std::array::from_fn(|_| all.next().unwrap_or(0))
}

/// Bit 4q + b moved to bit q of byte b.
fn spread_bits(w: u32) -> u32 {
    (0..32).fold(0, |spread, i| spread | (w >> i & 1) << (i / 4 + i % 4 * 8))
}

/// In the file bit r of byte l belongs to element l of run r.
fn q5_k_words(b: &[u8; 176], emit: &mut impl FnMut(u32)) {
    words(&b[4..16]).for_each(&mut *emit);
    let (bits, nibbles) = (word_array::<8>(&b[16..48]), word_array::<32>(&b[48..]));
    for pair in 0..4 {
        nibbles[8 * pair..][..8].iter().for_each(|&w| emit(w));
        for run in [2 * pair, 2 * pair + 1] {
            let quad = |(q, w): (usize, &u32)| (w >> run & bytes(1)) << q;
            emit(bits.iter().enumerate().map(quad).fold(0, |a, w| a | w));
        }
    }
}

/// In the file each half of 128 elements is four runs: run r takes the low (r < 2) or high nibbles of
/// words 8·(r mod 2).., and bit pair r of eight words.
fn q6_k_words(b: &[u8; 210], emit: &mut impl FnMut(u32)) {
    words(&b[192..208]).for_each(&mut *emit);
    let (low, high) = (word_array::<32>(&b[..128]), word_array::<16>(&b[128..192]));
    let nibble = |run: usize, q: usize| {
        let (half, r) = (run / 4, run % 4);
        low[half * 16 + r % 2 * 8 + q] >> (4 * (r / 2)) & bytes(15)
    };
    let quad = |run: usize, q: usize| {
        nibble(run, q) | (high[run / 4 * 8 + q] >> (2 * (run % 4)) & bytes(3)) << 4
    };
    for (run, span) in (0..16).map(|i| (i / 2, i % 2)) {
        let fourth = quad(run, 4 * span + 3);
        (0..3).for_each(|t| emit(quad(run, 4 * span + t) | (fourth >> (2 * t) & bytes(3)) << 6));
    }
}
