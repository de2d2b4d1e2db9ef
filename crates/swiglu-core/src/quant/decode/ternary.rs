//! Blocks of 256 values −1, 0 and 1 with an f16 scale.

use super::{half_at, two_bits};

/// TQ1_0: 52 bytes of five base-3 digits (the last four: of four), f16 scale. Digits of a byte are 32
/// elements apart in the first 32 bytes, 16 in the next 16, 4 in the last 4.
pub(super) fn tq1_0(b: &[u8; 54]) -> [f32; 256] {
    let d = half_at(b, 52);
    std::array::from_fn(|i| {
        let (byte, digit) = match i {
            0..160 => (i % 32, i / 32),
            160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
            _ => (48 + (i - 240) % 4, (i - 240) / 4),
        };
        d * (f32::from(base_three(b[byte], digit)) - 1.0)
    })
}

/// Digit `digit` after the point of byte / 256, to base 3: what is above the point of three times the
/// fraction that is left.
fn base_three(byte: u8, digit: usize) -> u8 {
    let fraction = byte.wrapping_mul([1, 3, 9, 27, 81][digit]);
    ((u16::from(fraction) * 3) >> 8) as u8
}

/// TQ2_0: 64 bytes of bit pairs, f16 scale; biased by 1. The pair 3, which no quantiser writes, is 2.
pub(super) fn tq2_0(b: &[u8; 66]) -> [f32; 256] {
    let d = half_at(b, 64);
    std::array::from_fn(|i| d * (f32::from(two_bits(&b[..64], i)) - 1.0))
}
