//! Blocks of 256 evenly spaced values, with scales of runs or of their halves.

use swiglu_core::{BlockType, F32Lanes};

use super::{Blocks, byte, bytes, fifth_bits, half, nibbles, word, word_array, words};
use crate::simd::Simd;

/// Scales and minima of Q4_K and Q5_K: their factors, and a byte of each run.
#[derive(Clone, Copy)]
pub(in crate::quant) struct KHead<S: Simd> {
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
    ($type:ident, bits $bits:literal, |$group:ident, $v:ident, $run:ident, $q:ident| $quad:expr
        $(, $file_words:item)?) => {
        pub(in crate::quant) struct $type;
        impl Blocks for $type {
            const TYPE: BlockType = BlockType::$type;
            const BITS: u32 = $bits;
            const FILE_HALVES: &'static [usize] = &[0, 2];
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
            fn minimum<S: Simd>(head: &KHead<S>, run: usize, _: usize) -> S::V {
                let minimum = byte::<S>(head.minima[run / 4], run % 4);
                head.factors[1].neg().mul(S::words_to_f32(minimum))
            }
            $($file_words)?
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

k_blocks!(Q4_K, bits 4, |group, v, run, q| pair_nibbles!(group, v, run, q, from 3 by 8));
// A word for each run of a pair follows the nibbles: bit q of byte b completes feature b of quad q.
k_blocks!(
    Q5_K, bits 5, |group, v, run, q| S::or(
        pair_nibbles!(group, v, run, q, from 3 by 10),
        fifth_bits::<S>(word::<S, Self>(group, 11 + run / 2 * 10 + run % 2, v), q)
    ),
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        b.as_chunks().0.iter().for_each(|b| q5_k_words(b, emit));
    }
);

/// 256 values of 6 bits, a signed scale for each 16. Words 0 to 3 are the scales; six for each run follow, three for
/// each of its spans: the lower six bits of their bytes are its first three quads, and the upper two, from the first
/// word's on, the bits of the fourth from the lowest on.
pub(in crate::quant) struct Q6_K;

impl Blocks for Q6_K {
    const TYPE: BlockType = BlockType::Q6_K;
    const BITS: u32 = 6;
    const FILE_HALVES: &'static [usize] = &[208];
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
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        b.as_chunks().0.iter().for_each(|b| q6_k_words(b, emit));
    }
}

/// In the file bit r of byte l belongs to element l of run r.
fn q5_k_words(b: &[u8; 176], emit: &mut impl FnMut(u32)) {
    words(&b[4..16]).for_each(&mut *emit);
    let (bits, nibbles) = (word_array::<8>(&b[16..48]), word_array::<32>(&b[48..]));
    for pair in 0..4 {
        nibbles[8 * pair..][..8].iter().for_each(|&w| emit(w));
        for run in [2 * pair, 2 * pair + 1] {
            emit(bits_of_run(&bits, run));
        }
    }
}

/// Bit `run` of every byte of the eight words, that of word q as bit q.
fn bits_of_run(bits: &[u32; 8], run: usize) -> u32 {
    let quad = |(q, w): (usize, &u32)| (w >> run & bytes(1)) << q;
    bits.iter().enumerate().map(quad).fold(0, |a, w| a | w)
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

/// The lower two bits of quad `q` of a run, whose first two words hold four quads each, the first one lowest.
#[inline(always)]
fn two_bits<S: Simd>(w: S::I, q: usize) -> S::I {
    S::and(S::shr(w, 2 * (q as u32 % 4)), S::words(bytes(3)))
}

/// 256 values of 2 bits, a scale and a minimum of 4 bits for each 16. Words 0 to 3 are these, a byte each,
/// the scale in the lower nibble; two for each run follow, one for each of its spans.
pub(in crate::quant) struct Q2_K;

impl Blocks for Q2_K {
    const TYPE: BlockType = BlockType::Q2_K;
    const BITS: u32 = 2;
    const FILE_HALVES: &'static [usize] = &[80, 82];
    const SPANS: usize = 2;
    type Head<S: Simd> = ([S::V; 2], [S::I; 4]);

    #[inline(always)]
    unsafe fn head<S: Simd>(group: *const u8, v: usize) -> Self::Head<S> {
        // SAFETY: the caller's.
        unsafe {
            let mut pairs = [S::words(0); 4];
            for (i, pair) in pairs.iter_mut().enumerate() {
                *pair = word::<S, Self>(group, i, v);
            }
            ([half::<S>(group, 0, v), half::<S>(group, 1, v).neg()], pairs)
        }
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(group: *const u8, v: usize, run: usize, q: usize) -> S::I {
        // SAFETY: the caller's.
        unsafe { two_bits::<S>(word::<S, Self>(group, 4 + 2 * run + q / 4, v), q) }
    }
    #[inline(always)]
    fn scale<S: Simd>(&(factors, pairs): &Self::Head<S>, run: usize, span: usize) -> S::V {
        let i = 2 * run + span;
        let scale = S::and(S::shr(pairs[i / 4], 8 * (i as u32 % 4)), S::words(15));
        factors[0].mul(S::words_to_f32(scale))
    }
    #[inline(always)]
    fn minimum<S: Simd>(&(factors, pairs): &Self::Head<S>, run: usize, span: usize) -> S::V {
        let i = 2 * run + span;
        let minimum = S::and(S::shr(pairs[i / 4], 8 * (i as u32 % 4) + 4), S::words(15));
        factors[1].mul(S::words_to_f32(minimum))
    }
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        words(&b[..16]).for_each(&mut *emit);
        let low = word_array::<16>(&b[16..80]);
        (0..8).for_each(|run| two_bit_words(&low, run, emit));
    }
}

/// The two words of a run, from those of a file: each half of 128 elements is eight words of four runs.
fn two_bit_words(low: &[u32; 16], run: usize, emit: &mut impl FnMut(u32)) {
    let quad = |q: usize| low[run / 4 * 8 + q] >> (2 * (run % 4)) & bytes(3);
    for span in 0..2 {
        emit((0..4).fold(0, |w, t| w | quad(4 * span + t) << (2 * t)));
    }
}

/// 256 values of 3 bits, a scale of 6 bits for each 16. Words 0 to 2 are the scales as in the file; three for
/// each run follow: two as in Q2_K, and one whose bit q of byte b completes feature b of quad q.
pub(in crate::quant) struct Q3_K;

impl Blocks for Q3_K {
    const TYPE: BlockType = BlockType::Q3_K;
    const BITS: u32 = 3;
    const FILE_HALVES: &'static [usize] = &[108];
    const SPANS: usize = 2;
    const OFFSET: u32 = 4;
    type Head<S: Simd> = (S::V, [S::I; 4]);

    /// Scales i, i + 4, i + 8 and i + 12 have their lower nibbles in words 0 and 1 and their upper bit pairs in
    /// byte i of word 2.
    #[inline(always)]
    unsafe fn head<S: Simd>(group: *const u8, v: usize) -> Self::Head<S> {
        // SAFETY: the caller's.
        unsafe {
            let low = [word::<S, Self>(group, 0, v), word::<S, Self>(group, 1, v)];
            let high = word::<S, Self>(group, 2, v);
            let top = S::words(bytes(0x30));
            let scales = [
                S::or(nibbles::<S>(low[0], 0), S::and(S::shl(high, 4), top)),
                S::or(nibbles::<S>(low[1], 0), S::and(S::shl(high, 2), top)),
                S::or(nibbles::<S>(low[0], 1), S::and(high, top)),
                S::or(nibbles::<S>(low[1], 1), S::and(S::shr(high, 2), top)),
            ];
            (half::<S>(group, 0, v), scales)
        }
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(group: *const u8, v: usize, run: usize, q: usize) -> S::I {
        // SAFETY: the caller's.
        unsafe {
            let at = |t: usize| word::<S, Self>(group, 3 + 3 * run + t, v);
            let third = at(2);
            let third =
                if q <= 2 { S::shl(third, 2 - q as u32) } else { S::shr(third, q as u32 - 2) };
            S::or(two_bits::<S>(at(q / 4), q), S::and(third, S::words(bytes(4))))
        }
    }
    #[inline(always)]
    fn scale<S: Simd>(&(d, scales): &Self::Head<S>, run: usize, span: usize) -> S::V {
        let i = 2 * run + span;
        let scale = S::and(S::shr(scales[i / 4], 8 * (i as u32 % 4)), S::words(0xFF));
        d.mul(S::words_to_f32(scale).sub(S::V::splat(32.0)))
    }
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        words(&b[96..108]).for_each(&mut *emit);
        let (third, low) = (word_array::<8>(&b[..32]), word_array::<16>(&b[32..96]));
        for run in 0..8 {
            two_bit_words(&low, run, emit);
            emit(bits_of_run(&third, run));
        }
    }
}
