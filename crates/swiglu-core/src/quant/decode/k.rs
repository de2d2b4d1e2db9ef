//! Blocks of 256 whose runs have scales of their own, as multiples of one of the block.

use super::{half_at, sum, two_bits};

/// Q2_K: 16 bytes with a scale (low) and a minimum (high) of 4 bits for each 16 elements, 64 bytes of
/// bit pairs, f16 scale of scales, f16 scale of minima.
pub(super) fn q2_k<V: Copy + Default>(b: &[u8; 84], join: impl Fn(f32, f32) -> V) -> [V; 256] {
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    std::array::from_fn(|i| {
        let scale = d * f32::from(b[i / 16] & 15);
        let minimum = dmin * f32::from(b[i / 16] >> 4);
        join(scale * f32::from(two_bits(&b[16..80], i)), -minimum)
    })
}

/// Q3_K: 32 bytes of third bits (bit j of byte l is that of element l of run j of 32), 64 bytes of bit
/// pairs, 12 bytes of 6-bit scales for each 16 elements, f16 scale; values are biased by 4, scales by 32.
pub(super) fn q3_k(b: &[u8; 110]) -> [f32; 256] {
    let d = half_at(b, 108);
    std::array::from_fn(|i| {
        let high = (b[i % 32] >> (i / 32) & 1) << 2;
        let q = f32::from(two_bits(&b[32..96], i) | high) - 4.0;
        let scale = f32::from(six_bit_scale(&b[96..108], i / 16)) - 32.0;
        d * scale * q
    })
}

/// Scale `j` of the 16 in 12 bytes: bytes 0..8 hold the lower nibbles of scales 0..8 (low) and 8..16
/// (high), bytes 8..12 the upper bit pairs, each of scales j, j + 4, j + 8 and j + 12.
fn six_bit_scale(s: &[u8], j: usize) -> u8 {
    let low = s[j % 8] >> (j / 8 * 4) & 15;
    low | (s[8 + j % 4] >> (j / 4 * 2) & 3) << 4
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

pub(super) fn q4_k<V: Copy + Default>(b: &[u8; 144], join: impl Fn(f32, f32) -> V) -> [V; 256] {
    k_blocks(half_at(b, 0), half_at(b, 2), &b[4..16], |i| k_nibble(&b[16..], i), join)
}

/// Q5_K: as Q4_K with 32 bytes of fifth bits before the nibbles: bit j of byte l is that of
/// element l of sub-block j.
pub fn decode_q5_k(b: &[u8; 176]) -> [f32; 256] {
    q5_k(b, sum)
}

pub(super) fn q5_k<V: Copy + Default>(b: &[u8; 176], join: impl Fn(f32, f32) -> V) -> [V; 256] {
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
