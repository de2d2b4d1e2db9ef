//! Input rows for quantised weights: fixed-point numbers in digits.
//!
//! Each run of 32 inputs has a common scale, a power of two chosen by the largest of them. An input is
//! `scale` times an integer in signed digits, see [`Digits`], and sums over a run are exact. Integers have
//! 23 bits and a sign, in three bytes: inputs are then off by at most 1.004 · 2⁻²³ of the run's largest, about
//! what `f32` itself is off by for the largest. In two digits of 16 bits, which weights of 8 bits take where byte
//! products are not one instruction, integers have 30 bits and a sign. The
//! digits of four inputs in one word are what byte products take. (This is not the quantisation of activations
//! to 8 bits that kernels for such weights usually start with: that is off by 2⁻⁸ of the largest.)
//!
//! Refuted: four bytes, 30 bits, where byte products are one instruction. What is gained is far below the rounding of
//! results; on a Zen 4, where arithmetic binds, 1.25 times as long (Q4_0, one row and four).

use std::ops::Range;

use swiglu_core::{Element, F32Lanes, MatrixRef};

use super::RUN;
use crate::panels::SendPtr;
use crate::simd::{Kernel, Simd};

/// Words of the digits of four inputs.
pub(super) const WORDS: usize = 4;

/// The digits of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    /// Of 8 bits, word p of a quad holds digit p of its inputs, the last word is unused.
    ThreeBytes,
    /// Of 16 bits: lower digits of inputs 0 and 2, of 1 and 3, then the upper ones. For weights of 8 bits, whose
    /// products with bytes do not fit 16 bits.
    TwoHalves,
}

impl Digits {
    /// For weights from which `offset` is subtracted: 128 says that they have 8 bits.
    pub(super) const fn of<S: Simd>(offset: u32) -> Self {
        if S::SHORT_SUMS && offset == 128 { Digits::TwoHalves } else { Digits::ThreeBytes }
    }

    /// Bits of the largest number of a run.
    pub(super) const fn bits(self) -> i32 {
        if matches!(self, Digits::ThreeBytes) { 23 } else { 30 }
    }

    /// What is added to the bits of the largest input before its exponent is taken: from 0xFEFEFF · 2ⁿ on, half of
    /// which is above 0x7F7F7F, the largest number of three signed bytes, it is the next one.
    const fn margin(self) -> u32 {
        if matches!(self, Digits::ThreeBytes) { 0x01_0101 } else { 0 }
    }

    /// Half of the range of each digit but the last: adding it makes them unsigned.
    const fn half_ranges(self) -> u32 {
        match self {
            Digits::ThreeBytes => 0x8080,
            Digits::TwoHalves => 0x8000,
        }
    }
}

/// 32 inputs of one row.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Run {
    /// The digits of the four inputs of quad q.
    pub(super) digits: [[u32; WORDS]; 8],
    /// What sums over the two halves of the run begin with, −offset · Σ x: of the lower 16 bits of the numbers, then
    /// of the upper ones. Where the run is one span, that of both halves is in each.
    pub(super) start: [[u32; 2]; 2],
    /// The common scale; NaN where an input is infinite or NaN.
    pub(super) scale: f32,
    /// The sums of the inputs of the two halves; where the run is one span, that of both is in each.
    pub(super) sums: [f32; 2],
}

/// Rows to be packed for weights of one type.
#[derive(Clone, Copy)]
pub(crate) struct PackDigits<'a, T> {
    pub(crate) x: MatrixRef<'a, T>,
    pub(crate) first: usize,
    /// What is subtracted from the unsigned weights.
    pub(crate) offset: u32,
    /// Whether the halves of a run have scales (and minima) of their own.
    pub(crate) halves: bool,
    pub(crate) out: SendPtr<u8>,
}

/// Units of work in which rows are packed: parts of rows.
pub(crate) struct PackUnits<'a, T>(pub(crate) PackDigits<'a, T>, pub(crate) Range<usize>);

/// Runs of a unit.
const UNIT_RUNS: usize = 32;

/// Bytes of `m` packed rows.
pub(crate) fn row_bytes(m: usize, inputs: usize) -> usize {
    m * (inputs / RUN) * size_of::<Run>()
}

/// Units of `m` rows.
pub(crate) fn units(m: usize, inputs: usize) -> usize {
    m * (inputs / RUN).div_ceil(UNIT_RUNS)
}

impl<T: Element> Kernel for PackUnits<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PackUnits(task, range) = self;
        let digits = Digits::of::<S>(task.offset);
        let runs = task.x.cols() / RUN;
        let per_row = runs.div_ceil(UNIT_RUNS);
        for unit in range {
            let (row, first) = (unit / per_row, unit % per_row * UNIT_RUNS);
            let x = task.x.row(task.first + row);
            for run in first..(first + UNIT_RUNS).min(runs) {
                // SAFETY: the run is inside the row, and its record is this unit's.
                unsafe {
                    let out = task.out.get().cast::<Run>().add(row * runs + run);
                    let x = x.as_ptr().add(run * RUN);
                    pack_run::<S, T>(x, digits, (task.offset, task.halves), &mut *out);
                }
            }
        }
    }
}

/// Fills `out` with the 32 inputs at `x`.
#[inline(always)]
unsafe fn pack_run<S: Simd, T: Element>(
    x: *const T,
    digits: Digits,
    (offset, halves): (u32, bool),
    out: &mut Run,
) {
    let mut values = [0.0f32; RUN];
    // SAFETY: `x` and `values` hold 32 values, a multiple of every vector.
    unsafe {
        for i in (0..RUN).step_by(S::LANES) {
            S::store_f32(values.as_mut_ptr().add(i), S::load::<T>(x.add(i)));
        }
    }
    let largest = values.iter().fold(0, |max, v| (v.to_bits() & 0x7FFF_FFFF).max(max));
    let finite = largest < f32::INFINITY.to_bits();
    // largest < 2^exponent; the shift is limited to where every subnormal is a whole number.
    let exponent = ((largest + digits.margin()) >> 23).cast_signed() - 126;
    let shift = if finite { (digits.bits() - exponent).min(149) } else { 0 };
    // 2^shift and 2^−shift may lie outside the exponents of f32; their halves do not.
    let [a, b] = [shift / 2, shift - shift / 2];
    let (up_a, up_b) = (S::V::splat(power(a)), S::V::splat(power(b)));
    let mut sums = [[0u32; 32]; 2];
    // SAFETY: vectors end inside the 32 values and words.
    unsafe {
        for (half, sums) in sums.iter_mut().enumerate() {
            let mut total = S::words(0);
            for i in (0..RUN / 2).step_by(S::LANES) {
                let at = half * RUN / 2 + i;
                let v = S::load_f32(values.as_ptr().add(at)).mul(up_a).mul(up_b);
                let v = if finite { v } else { S::V::splat(0.0) };
                let half_ranges = S::words(digits.half_ranges());
                let words = S::xor(S::add_words(S::f32_to_words(v), half_ranges), half_ranges);
                let words = if digits == Digits::TwoHalves {
                    let words = S::transpose_halves(words);
                    total = S::add_halves(total, words, S::words(0x0001_0001));
                    words
                } else {
                    let words = S::transpose_bytes(words);
                    total = S::dot::<true>(total, S::words(0x0101_0101), words);
                    words
                };
                S::store_words(out.digits.as_mut_ptr().cast::<u32>().add(at).cast(), words);
            }
            S::store_words(sums.as_mut_ptr().cast(), total);
        }
    }
    let mut totals = [[0u32; WORDS]; 2];
    for (total, sums) in totals.iter_mut().zip(&sums) {
        for (i, s) in sums[..S::LANES].iter().enumerate() {
            total[i % WORDS] = total[i % WORDS].wrapping_add(u32::from_le(*s));
        }
    }
    let totals = totals.map(|t| match digits {
        Digits::ThreeBytes => [t[0].wrapping_add(t[1] << 8), t[2]],
        Digits::TwoHalves => [t[0].wrapping_add(t[1]), t[2].wrapping_add(t[3])],
    });
    let [low, high] = [0, 1].map(|p| totals[0][p].wrapping_add(totals[1][p]));
    let totals = if halves { totals } else { [[low, high]; 2] };
    out.start = totals.map(|half| half.map(|s| s.wrapping_mul(offset).wrapping_neg()));
    out.scale = if finite { power(-a) * power(-b) } else { f32::NAN };
    out.sums = totals.map(|[low, high]| {
        let number = i64::from(low.cast_signed()) + (i64::from(high.cast_signed()) << 16);
        if finite { number as f32 * power(-a) * power(-b) } else { f32::NAN }
    });
}

/// 2ⁿ for n in [−126, 127].
fn power(n: i32) -> f32 {
    f32::from_bits((n + 127).cast_unsigned() << 23)
}
