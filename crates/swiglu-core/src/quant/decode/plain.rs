//! Blocks of 32 integers with an f16 scale, and an f16 minimum where they have one.

use super::{half_at, sum};

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
pub(super) fn q4_1<V>(b: &[u8; 20], join: impl Fn(f32, f32) -> V) -> [V; 32] {
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
pub(super) fn q5_1<V>(b: &[u8; 24], join: impl Fn(f32, f32) -> V) -> [V; 32] {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    std::array::from_fn(|i| join(d * (nibble(&b[8..], i) + fifth_bit(&b[4..], i)), m))
}

/// Q8_0: f16 scale, 32 signed bytes.
pub fn decode_q8_0(b: &[u8; 34]) -> [f32; 32] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| d * f32::from(b[2 + i].cast_signed()))
}

/// Byte j of 16 holds elements j (low) and j + 16 (high).
fn nibble(q: &[u8], i: usize) -> f32 {
    f32::from(if i < 16 { q[i] & 15 } else { q[i - 16] >> 4 })
}

fn fifth_bit(bits: &[u8], i: usize) -> f32 {
    f32::from((bits[i / 8] >> (i % 8) & 1) << 4)
}
