//! Blocks of 256 values whose codes are indices of points in a codebook.

use half::f16;

use super::{grids, half_at, nibble_of_pairs, u16_at, u32_at};

/// Coordinate `e` of a point of eight: 8, 25 or 43.
fn of_eight(point: u16, e: usize) -> f32 {
    [8.0, 25.0, 43.0, 0.0][usize::from(point >> (2 * e) & 3)]
}

/// Coordinate `e` of a point of eight: −1, 0 or 1.
fn ternary(point: u16, e: usize) -> f32 {
    f32::from(point >> (2 * e) & 3) - 1.0
}

/// `value`, negated where bit `e` is set.
fn signed(value: f32, signs: u8, e: usize) -> f32 {
    if signs >> e & 1 == 0 { value } else { -value }
}

/// Eight signs from seven: the last makes their number even.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// IQ2_XXS: f16 scale; for each run of 32, four bytes of points, then 32 bits: four times seven signs and
/// a scale of 4 bits.
pub(super) fn iq2_xxs(b: &[u8; 66]) -> [f32; 256] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| {
        let (run, l) = (i / 32, i % 32 / 8);
        let bits = u32_at(b, 2 + 8 * run + 4);
        let scale = d * (0.5 + (bits >> 28) as f32) * 0.25;
        let point = grids::IQ2_XXS[usize::from(b[2 + 8 * run + l])];
        signed(scale * of_eight(point, i % 8), even_signs(bits >> (7 * l)), i % 8)
    })
}

/// IQ2_XS: f16 scale, 16 bits for each eight elements (nine of a point, seven of signs), scales of 4 bits
/// for each 16.
pub(super) fn iq2_xs(b: &[u8; 74]) -> [f32; 256] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| {
        let code = u16_at(b, 2 + i / 8 * 2);
        let scale = d * (0.5 + f32::from(nibble_of_pairs(&b[66..], i / 16))) * 0.25;
        let point = grids::IQ2_XS[usize::from(code & 511)];
        signed(scale * of_eight(point, i % 8), even_signs((code >> 9).into()), i % 8)
    })
}

/// IQ2_S: f16 scale; for each eight elements, a byte of a point and then a byte of signs; upper bit pairs
/// of the points; scales of 4 bits for each 16.
pub(super) fn iq2_s(b: &[u8; 82]) -> [f32; 256] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| {
        let k = i / 8;
        let high = usize::from(b[66 + k / 4] >> (k % 4 * 2) & 3);
        let scale = d * (0.5 + f32::from(nibble_of_pairs(&b[74..], i / 16))) * 0.25;
        let point = grids::IQ2_S[usize::from(b[2 + k]) | high << 8];
        signed(scale * of_eight(point, i % 8), b[34 + k], i % 8)
    })
}

/// IQ3_XXS: f16 scale, a byte of a point for each four elements, then 32 bits for each run of 32 as in
/// IQ2_XXS.
pub(super) fn iq3_xxs(b: &[u8; 98]) -> [f32; 256] {
    /// What coordinates stand for.
    const VALUES: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
    let d = half_at(b, 0);
    std::array::from_fn(|i| {
        let bits = u32_at(b, 66 + i / 32 * 4);
        let scale = d * (0.5 + (bits >> 28) as f32) * 0.5;
        let point = grids::IQ3_XXS[usize::from(b[2 + i / 4])];
        let value = VALUES[usize::from(point >> (i % 4 * 4) & 7)];
        signed(scale * value, even_signs(bits >> (i % 32 / 8 * 7)), i % 8)
    })
}

/// IQ3_S: f16 scale, a byte of a point for each four elements, their ninth bits, signs, scales of 4 bits
/// for each 32. Coordinates are odd numbers.
pub(super) fn iq3_s(b: &[u8; 110]) -> [f32; 256] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| {
        let k = i / 4;
        let ninth = usize::from(b[66 + k / 8] >> (k % 8) & 1);
        let scale = d * f32::from(1 + 2 * nibble_of_pairs(&b[106..], i / 32));
        let point = grids::IQ3_S[usize::from(b[2 + k]) | ninth << 8];
        let value = f32::from(1 + 2 * (point >> (i % 4 * 4) & 7));
        signed(scale * value, b[74 + i / 8], i % 8)
    })
}

/// What is added to ternary coordinates: ⅛, negative where the bit is set.
fn shift(negative: bool) -> f32 {
    if negative { -0.125 } else { 0.125 }
}

/// IQ1_S: f16 scale, a byte of a point for each eight elements, 16 bits for each 32: three upper bits of
/// each of four points, a scale of 3 bits, the sign of the shift.
pub(super) fn iq1_s(b: &[u8; 50]) -> [f32; 256] {
    let d = half_at(b, 0);
    std::array::from_fn(|i| {
        let (k, bits) = (i / 8, u16_at(b, 34 + i / 32 * 2));
        let high = usize::from(bits >> (k % 4 * 3) & 7);
        let scale = d * f32::from(2 * (bits >> 12 & 7) + 1);
        let point = grids::IQ1_S[usize::from(b[2 + k]) | high << 8];
        scale * (ternary(point, i % 8) + shift(bits >> 15 == 1))
    })
}

/// IQ1_M: a byte of a point for each eight elements, a nibble for each (three upper bits of the point, the
/// sign of the shift), four words of 16 bits: four scales of 3 bits, each for 16 elements, and above them a
/// quarter of the f16 scale, the first one lowest.
pub(super) fn iq1_m(b: &[u8; 56]) -> [f32; 256] {
    let words: [u16; 4] = std::array::from_fn(|w| u16_at(b, 48 + 2 * w));
    let quarter = |(w, word): (usize, &u16)| word >> 12 << (4 * w);
    let bits = words.iter().enumerate().map(quarter).fold(0, |all, part| all | part);
    let d = f16::from_bits(bits).to_f32();
    std::array::from_fn(|i| {
        let (k, j) = (i / 8, i / 16);
        let nibble = nibble_of_pairs(&b[32..48], k);
        let scale = d * f32::from(2 * (words[j / 4] >> (j % 4 * 3) & 7) + 1);
        let point = grids::IQ1_S[usize::from(b[k]) | usize::from(nibble & 7) << 8];
        scale * (ternary(point, i % 8) + shift(nibble & 8 != 0))
    })
}
