//! Blocks of 4-bit codes of values that are not evenly spaced.

use super::{half_at, nibble_of_pairs, u16_at};

/// The values of IQ4_NL and IQ4_XS (`kvalues_iq4nl` of ggml).
const NON_LINEAR: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of e2m1, a sign, two bits of exponent and one of significand, doubled. Minus zero is 0, as
/// ggml has it.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The value of element `i` of `n`: byte j holds elements j (low) and j + n/2 (high).
fn value(values: &[i8; 16], q: &[u8], i: usize, n: usize) -> f32 {
    let half = n / 2;
    let code = if i < half { q[i] & 15 } else { q[i - half] >> 4 };
    f32::from(values[usize::from(code)])
}

/// IQ4_NL: f16 scale, 16 bytes of codes.
pub(super) fn iq4_nl(b: &[u8; 18]) -> [f32; 32] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| d * value(&NON_LINEAR, &b[2..], i, 32))
}

/// IQ4_XS: f16 scale, upper bit pairs of the runs' scales, their lower nibbles, 16 bytes of codes for each
/// run of 32; scales are biased by 32.
pub(super) fn iq4_xs(b: &[u8; 136]) -> [f32; 256] {
    let (d, high) = (half_at(b, 0), u16_at(b, 2));
    std::array::from_fn(|i| {
        let run = i / 32;
        let top = (high >> (2 * run) & 3) << 4;
        let scale = f32::from(u16::from(nibble_of_pairs(&b[4..8], run)) | top) - 32.0;
        d * scale * value(&NON_LINEAR, &b[8 + 16 * run..], i % 32, 32)
    })
}

/// MXFP4: an exponent, 16 bytes of e2m1 (OCP Microscaling Formats 1.0).
pub(super) fn mxfp4(b: &[u8; 17]) -> [f32; 32] {
    let d = half_e8m0(b[0]);
    std::array::from_fn(|i| d * value(&E2M1_DOUBLED, &b[1..], i, 32))
}

/// Half of 2^(e − 127), because values are doubled; subnormal for 0 and 1. The NaN of the specification,
/// 255, is a power of two here too, as in ggml.
fn half_e8m0(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// NVFP4: four scales as unsigned e4m3, 8 bytes of e2m1 for each run of 16.
pub(super) fn nvfp4(b: &[u8; 36]) -> [f32; 64] {
    let scales: [f32; 4] = std::array::from_fn(|run| half_ue4m3(b[run]));
    std::array::from_fn(|i| scales[i / 16] * value(&E2M1_DOUBLED, &b[4 + i / 16 * 8..], i % 16, 16))
}

/// Half of an e4m3 number, because values are doubled. As ggml has it: the sign is left out, all bits but
/// the sign set is 0, and with the sign too it is a number.
fn half_ue4m3(code: u8) -> f32 {
    let (exponent, significand) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    match (code, exponent) {
        (0x7F, _) => 0.0,
        (_, 0) => significand * 2f32.powi(-10),
        _ => (8.0 + significand) * 2f32.powi(exponent - 11),
    }
}
