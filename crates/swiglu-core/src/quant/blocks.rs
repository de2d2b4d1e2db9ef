//! Block-quantised types of GGUF and their decoding to `f32`.
//!
//! Each value is `scale · q` or `scale · q + minimum` with a scale and minimum of 17 bits at most
//! and a q of 8: the product is exact in `f32`, so the sum rounds once and the result does not
//! depend on whether it is fused.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use half::f16;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A block-quantised GGUF type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(non_camel_case_types, reason = "the names of the format")]
#[non_exhaustive]
pub enum BlockType {
    /// 32 × 4 bits with a scale.
    Q4_0,
    /// 32 × 4 bits with a scale and a minimum.
    Q4_1,
    /// 32 × 5 bits with a scale.
    Q5_0,
    /// 32 × 5 bits with a scale and a minimum.
    Q5_1,
    /// 32 × 8 bits with a scale.
    Q8_0,
    /// 256 × 4 bits, eight sub-blocks with 6-bit scales and minima.
    Q4_K,
    /// 256 × 5 bits, eight sub-blocks with 6-bit scales and minima.
    Q5_K,
    /// 256 × 6 bits, sixteen sub-blocks with 8-bit scales.
    Q6_K,
}

impl BlockType {
    /// Every type.
    pub const ALL: [BlockType; 8] = [
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q8_0,
        BlockType::Q4_K,
        BlockType::Q5_K,
        BlockType::Q6_K,
    ];

    /// Elements of one block.
    pub const fn elements(self) -> usize {
        match self {
            BlockType::Q4_K | BlockType::Q5_K | BlockType::Q6_K => 256,
            _ => 32,
        }
    }

    /// Bytes of one block.
    pub const fn bytes(self) -> usize {
        match self {
            BlockType::Q4_0 => 18,
            BlockType::Q4_1 => 20,
            BlockType::Q5_0 => 22,
            BlockType::Q5_1 => 24,
            BlockType::Q8_0 => 34,
            BlockType::Q4_K => 144,
            BlockType::Q5_K => 176,
            BlockType::Q6_K => 210,
        }
    }

    /// The name, as tools print it.
    pub const fn name(self) -> &'static str {
        match self {
            BlockType::Q4_0 => "Q4_0",
            BlockType::Q4_1 => "Q4_1",
            BlockType::Q5_0 => "Q5_0",
            BlockType::Q5_1 => "Q5_1",
            BlockType::Q8_0 => "Q8_0",
            BlockType::Q4_K => "Q4_K",
            BlockType::Q5_K => "Q5_K",
            BlockType::Q6_K => "Q6_K",
        }
    }

    /// The number in a tensor's header.
    pub const fn id(self) -> u32 {
        match self {
            BlockType::Q4_0 => 2,
            BlockType::Q4_1 => 3,
            BlockType::Q5_0 => 6,
            BlockType::Q5_1 => 7,
            BlockType::Q8_0 => 8,
            BlockType::Q4_K => 12,
            BlockType::Q5_K => 13,
            BlockType::Q6_K => 14,
        }
    }

    /// Decodes whole blocks in order; bytes past the last whole block are left out.
    pub fn decode(self, bytes: &[u8], mut emit: impl FnMut(f32)) {
        match self {
            BlockType::Q4_0 => each(bytes, emit, decode_q4_0),
            BlockType::Q4_1 => each(bytes, emit, decode_q4_1),
            BlockType::Q5_0 => each(bytes, emit, decode_q5_0),
            BlockType::Q5_1 => each(bytes, emit, decode_q5_1),
            BlockType::Q8_0 => each(bytes, emit, decode_q8_0),
            BlockType::Q4_K => each(bytes, emit, decode_q4_k),
            BlockType::Q5_K => each(bytes, emit, decode_q5_k),
            BlockType::Q6_K => each(bytes, &mut emit, decode_q6_k),
        }
    }

    /// Where a block's f16 scale begins; the f16 minimum, where there is one, is behind it.
    pub(crate) const fn scale_at(self) -> usize {
        if matches!(self, BlockType::Q6_K) { 208 } else { 0 }
    }

    /// Where a block's scales of sub-blocks lie; empty for types without.
    pub(crate) const fn sub_scales(self) -> Range<usize> {
        match self {
            BlockType::Q4_K | BlockType::Q5_K => 4..16,
            BlockType::Q6_K => 192..208,
            _ => 0..0,
        }
    }

    /// Whether a value has a minimum beside `scale · q`.
    pub const fn has_minimum(self) -> bool {
        matches!(self, BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K)
    }

    /// As [`Self::decode`], with each value as the two terms that are exact in `f32` and whose sum it
    /// is: `scale · q` and the minimum, 0 for types without one.
    pub fn terms(self, bytes: &[u8], mut emit: impl FnMut(f32, f32)) {
        let pair = |(product, minimum): (f32, f32)| emit(product, minimum);
        match self {
            BlockType::Q4_1 => each(bytes, pair, |b| q4_1(b, both)),
            BlockType::Q5_1 => each(bytes, pair, |b| q5_1(b, both)),
            BlockType::Q4_K => each(bytes, pair, |b| q4_k(b, both)),
            BlockType::Q5_K => each(bytes, pair, |b| q5_k(b, both)),
            _ => self.decode(bytes, |product| emit(product, 0.0)),
        }
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BlockType {
    type Err = Error;

    /// Accepts the names in either case.
    fn from_str(s: &str) -> Result<Self> {
        BlockType::ALL.into_iter().find(|b| b.name().eq_ignore_ascii_case(s)).ok_or_else(|| {
            Error::UnknownName {
                what: "type of quantised weights",
                given: s.to_owned(),
                choices: BlockType::ALL.map(BlockType::name).join(", "),
            }
        })
    }
}

fn both(product: f32, minimum: f32) -> (f32, f32) {
    (product, minimum)
}

fn sum(product: f32, minimum: f32) -> f32 {
    product + minimum
}

fn each<const BYTES: usize, const N: usize, V>(
    bytes: &[u8],
    mut emit: impl FnMut(V),
    block: fn(&[u8; BYTES]) -> [V; N],
) {
    for b in bytes.as_chunks::<BYTES>().0 {
        block(b).into_iter().for_each(&mut emit);
    }
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Q4_0: f16 scale; byte j holds elements j (low) and j + 16 (high), biased by 8.
pub fn decode_q4_0(b: &[u8; 18]) -> [f32; 32] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| d * (nibble(&b[2..], i) - 8.0))
}

/// Q4_1: f16 scale, f16 minimum; nibbles as in Q4_0, without bias.
pub fn decode_q4_1(b: &[u8; 20]) -> [f32; 32] {
    q4_1(b, sum)
}

#[inline]
fn q4_1<V>(b: &[u8; 20], join: impl Fn(f32, f32) -> V) -> [V; 32] {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    std::array::from_fn(|i| join(d * nibble(&b[4..], i), m))
}

/// Q5_0: f16 scale, 32 fifth bits (bit i of element i), nibbles as in Q4_0; biased by 16.
pub fn decode_q5_0(b: &[u8; 22]) -> [f32; 32] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| d * (nibble(&b[6..], i) + fifth_bit(&b[2..], i) - 16.0))
}

/// Q5_1: f16 scale, f16 minimum, fifth bits, nibbles; without bias.
pub fn decode_q5_1(b: &[u8; 24]) -> [f32; 32] {
    q5_1(b, sum)
}

#[inline]
fn q5_1<V>(b: &[u8; 24], join: impl Fn(f32, f32) -> V) -> [V; 32] {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    std::array::from_fn(|i| join(d * (nibble(&b[8..], i) + fifth_bit(&b[4..], i)), m))
}

/// Q8_0: f16 scale, 32 signed bytes.
pub fn decode_q8_0(b: &[u8; 34]) -> [f32; 32] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| d * f32::from(b[2 + i].cast_signed()))
}

fn nibble(q: &[u8], i: usize) -> f32 {
    f32::from(if i < 16 { q[i] & 15 } else { q[i - 16] >> 4 })
}

fn fifth_bit(bits: &[u8], i: usize) -> f32 {
    f32::from((bits[i / 8] >> (i % 8) & 1) << 4)
}

/// Scale and minimum of sub-block `j` out of the 12 bytes that pack eight pairs of 6 bits: the
/// first four pairs lie whole in bytes 0..4 and 4..8, whose upper two bits complete the nibbles
/// of the last four in bytes 8..12.
fn scale_and_minimum(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        (s[j + 4] & 15 | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4)
    }
}

/// Elements of the 256 in order, from `q(i)` of each: shared by Q4_K and Q5_K.
fn k_blocks<V: Copy + Default>(
    d: f32,
    dmin: f32,
    scales: &[u8],
    q: impl Fn(usize) -> u8,
    join: impl Fn(f32, f32) -> V,
) -> [V; 256] {
    let mut out = [V::default(); 256];
    for (j, part) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(scales, j);
        let (scale, minimum) = (d * f32::from(scale), dmin * f32::from(minimum));
        for (l, v) in part.iter_mut().enumerate() {
            *v = join(scale * f32::from(q(32 * j + l)), -minimum);
        }
    }
    out
}

/// Byte l of each 32 holds elements l (low) and l + 32 (high) of a run of 64.
fn k_nibble(q: &[u8], i: usize) -> u8 {
    let byte = q[i / 64 * 32 + i % 32];
    if i % 64 < 32 { byte & 15 } else { byte >> 4 }
}

/// Q4_K: f16 scale of scales, f16 scale of minima, 12 bytes of both, 128 bytes of nibbles.
pub fn decode_q4_k(b: &[u8; 144]) -> [f32; 256] {
    q4_k(b, sum)
}

fn q4_k<V: Copy + Default>(b: &[u8; 144], join: impl Fn(f32, f32) -> V) -> [V; 256] {
    k_blocks(half_at(b, 0), half_at(b, 2), &b[4..16], |i| k_nibble(&b[16..], i), join)
}

/// Q5_K: as Q4_K with 32 bytes of fifth bits before the nibbles: bit j of byte l is that of
/// element l of sub-block j.
pub fn decode_q5_k(b: &[u8; 176]) -> [f32; 256] {
    q5_k(b, sum)
}

fn q5_k<V: Copy + Default>(b: &[u8; 176], join: impl Fn(f32, f32) -> V) -> [V; 256] {
    let q = |i| k_nibble(&b[48..], i) | (b[16 + i % 32] >> (i / 32) & 1) << 4;
    k_blocks(half_at(b, 0), half_at(b, 2), &b[4..16], q, join)
}

/// Q6_K: 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales, f16 scale; biased by
/// 32. Each half of 128 elements is four runs of 32: run r takes the low (r < 2) or high nibble
/// of bytes 32·(r mod 2).., and bit pair r of the 32 upper bytes.
pub fn decode_q6_k(b: &[u8; 210]) -> [f32; 256] {
    let d = half_at(b, 208);
    std::array::from_fn(|i| {
        let (half, run, l) = (i / 128, i % 128 / 32, i % 32);
        let low = b[half * 64 + run % 2 * 32 + l];
        let low = if run < 2 { low & 15 } else { low >> 4 };
        let high = b[128 + half * 32 + l] >> (2 * run) & 3;
        let q = f32::from(low | high << 4) - 32.0;
        let scale = f32::from(b[192 + i / 16].cast_signed());
        d * scale * q
    })
}
