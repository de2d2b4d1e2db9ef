//! How the kernels read the blocks of a panel.
//!
//! A *group* is one block of each of the panel's `2 · LANES` output features, transposed: first the
//! block's values of 16 bits, each for all lanes, then its words of 32 bits, each for all lanes. So a
//! group has the bytes of its blocks (one or two more where a scale is widened), a vector load gives one
//! word of `LANES` features, and each byte (or a part of one) of that word is the weight of one input
//! feature. Features are taken in *runs* of 32, a run in eight quads, and a run may have two *spans* with
//! scales of their own.
//!
//! A type with kernels is an implementation of [`Blocks`] and its name in the list of `computed!`.

#![expect(non_camel_case_types, reason = "the names of the format")]

mod k;
mod plain;
mod table;

use std::marker::PhantomData;

use swiglu_core::{BlockType, F32Lanes, QuantizedType};

use self::k::{Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
use self::plain::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use self::table::{IQ4_NL, IQ4_XS, MXFP4};
use crate::simd::{Bytes, Simd};

/// A block type, as vectors.
pub(super) trait Blocks {
    /// The type.
    const TYPE: BlockType;
    /// Bits of the largest of the unsigned bytes of [`Self::quad`].
    const BITS: u32;
    /// Where a block in a file has its binary16 values.
    const FILE_HALVES: &'static [usize];
    /// Values of 16 bits of a block.
    const HALVES: usize = Self::FILE_HALVES.len();
    /// Bytes of a block in a group.
    const BYTES: usize = Self::TYPE.bytes();
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
    /// What is added to each weight of a span, where the type has minima; exact.
    #[inline(always)]
    fn minimum<S: Simd>(_: &Self::Head<S>, _run: usize, _span: usize) -> S::V {
        S::V::splat(0.0)
    }
    /// Value `i` of 16 bits, from a block as it lies in a file.
    fn file_half(b: &[u8], i: usize) -> u16 {
        let at = Self::FILE_HALVES[i];
        u16::from_le_bytes([b[at], b[at + 1]])
    }
    /// The words, from a block as it lies in a file: here those behind the binary16 values.
    fn file_words(b: &[u8], emit: &mut impl FnMut(u32)) {
        words(&b[2 * Self::HALVES..]).for_each(emit);
    }
}

/// The integers of [`Blocks::quad`].
pub(super) struct Unsigned<B>(PhantomData<B>);

impl<B: Blocks> Bytes for Unsigned<B> {
    const BITS: u32 = B::BITS;
    const OFFSET: u32 = B::OFFSET;
}

/// Code written over [`Blocks`].
pub(super) trait WithBlocks {
    /// What it returns.
    type Output;
    /// Runs. Implementations with vectors are `#[inline(always)]`.
    fn run<B: Blocks>(self) -> Self::Output;
}

/// The types that there are kernels for.
macro_rules! computed {
    ($($name:ident)*) => {
        /// Types with kernels.
        pub fn quantized_types() -> &'static [QuantizedType] {
            &[$(QuantizedType::Block(BlockType::$name)),*]
        }

        /// Runs `f` with the blocks of the type.
        #[inline(always)]
        pub(super) fn with_blocks<F: WithBlocks>(block: BlockType, f: F) -> F::Output {
            match block {
                $(BlockType::$name => f.run::<$name>(),)*
                other => unreachable!("{other} is not one of `quantized_types`"),
            }
        }
    };
}
computed!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4);

/// Runs of a block.
pub(super) const fn runs(block: BlockType) -> usize {
    block.elements() / super::RUN
}

/// Bytes of a block in a group.
pub(super) fn group_block_bytes(block: BlockType) -> usize {
    struct BytesOf;
    impl WithBlocks for BytesOf {
        type Output = usize;
        fn run<B: Blocks>(self) -> usize {
            B::BYTES
        }
    }
    with_blocks(block, BytesOf)
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

fn words(b: &[u8]) -> impl Iterator<Item = u32> {
    b.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w))
}

fn word_array<const N: usize>(b: &[u8]) -> [u32; N] {
    let mut all = words(b);
    std::array::from_fn(|_| all.next().unwrap_or(0))
}
