//! Blocks of 32 evenly spaced values.

use swiglu_core::BlockType;

use super::{Blocks, bytes, fifth_bits, half, nibbles, word, words};
use crate::simd::Simd;

/// 32 values with a scale.
macro_rules! scaled {
    ($type:ident, bits $bits:literal, offset $offset:literal, |$group:ident, $v:ident, $q:ident| $quad:expr
        $(, $file_words:item)?) => {
        pub(in crate::quant) struct $type;
        impl Blocks for $type {
            const TYPE: BlockType = BlockType::$type;
            const BITS: u32 = $bits;
            const FILE_HALVES: &'static [usize] = &[0];
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
            $($file_words)?
        }
    };
}

/// 32 values with a scale and a minimum.
macro_rules! with_minimum {
    ($type:ident, bits $bits:literal, |$group:ident, $v:ident, $q:ident| $quad:expr
        $(, $file_words:item)?) => {
        pub(in crate::quant) struct $type;
        impl Blocks for $type {
            const TYPE: BlockType = BlockType::$type;
            const BITS: u32 = $bits;
            const FILE_HALVES: &'static [usize] = &[0, 2];
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
            fn minimum<S: Simd>(head: &[S::V; 2], _: usize, _: usize) -> S::V {
                head[1]
            }
            $($file_words)?
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

scaled!(Q4_0, bits 4, offset 8, |group, v, q| plain_nibbles!(group, v, q, from 0));
scaled!(
    Q5_0, bits 5, offset 16, |group, v, q| five_bits!(group, v, q),
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        five_bit_words(&b[2..], emit);
    }
);
// Packed with 128 added, so that the bytes are unsigned.
scaled!(
    Q8_0, bits 8, offset 128, |group, v, q| word::<S, Self>(group, q, v),
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        words(&b[2..]).for_each(|w| emit(w ^ bytes(0x80)));
    }
);
with_minimum!(Q4_1, bits 4, |group, v, q| plain_nibbles!(group, v, q, from 0));
with_minimum!(
    Q5_1, bits 5, |group, v, q| five_bits!(group, v, q),
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        five_bit_words(&b[4..], emit);
    }
);

/// From the word of fifth bits on.
fn five_bit_words(b: &[u8], emit: &mut impl FnMut(u32)) {
    words(&b[..4]).for_each(|w| emit(spread_bits(w)));
    words(&b[4..]).for_each(emit);
}

/// Bit 4q + b moved to bit q of byte b.
fn spread_bits(w: u32) -> u32 {
    (0..32).fold(0, |spread, i| spread | (w >> i & 1) << (i / 4 + i % 4 * 8))
}
