//! Seeded random inputs that any language can derive: counter-based, integer arithmetic only.

use std::collections::BTreeSet;

use half::f16;

use crate::dtype::Element;
use crate::matrix::Matrix;
use crate::quant::{BlockType, QuantizedMatrix, QuantizedType, Scale, e4m3_from_f32};

/// SplitMix64's finaliser over `seed + (index + 1) · φ`: the `index`-th value of stream `seed`.
#[inline]
pub fn bits(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Approximately standard normal: the sum of the four 16-bit quarters of [`bits`], centred and
/// scaled to variance 1 (Irwin–Hall, support ±3.46). Exact in `f32` up to the final product, so it
/// is the same in every language.
#[inline]
pub fn normal(seed: u64, index: u64) -> f32 {
    let b = bits(seed, index);
    let sum = (b & 0xFFFF) + ((b >> 16) & 0xFFFF) + ((b >> 32) & 0xFFFF) + (b >> 48);
    // Variance of one quarter: (2³² − 1) / 12; of four: (2³² − 1) / 3.
    (sum as f32 - 131_070.0) * (1.0 / 37_837.227)
}

/// A `[rows, cols]` matrix of `scale · normal`, rounded to T.
///
/// # Errors
/// [`crate::Error::TooLarge`] if the extents do not fit the address space.
pub fn normal_matrix<T: Element>(
    seed: u64,
    rows: usize,
    cols: usize,
    scale: f32,
) -> crate::Result<Matrix<T>> {
    let mut m = Matrix::zeros(rows, cols)?;
    let mut some = [0.0; 256];
    for (first, values) in (0..).step_by(some.len()).zip(m.as_mut_slice().chunks_mut(some.len())) {
        normals(seed, first, scale, &mut some);
        T::narrow(&some, values);
    }
    Ok(m)
}

fn normals(seed: u64, first: u64, scale: f32, to: &mut [f32]) {
    for (i, v) in (first..).zip(to) {
        *v = normal(seed, i) * scale;
    }
}

/// Up to `count` distinct indices below `n`, ascending: the last and the first among them, the others random.
pub fn sample(seed: u64, n: usize, count: usize) -> Vec<usize> {
    if count >= n {
        return (0..n).collect();
    }
    let others = (0..).map(|i| (bits(seed, i) % n as u64) as usize);
    let mut chosen = BTreeSet::new();
    for i in [n - 1, 0].into_iter().chain(others) {
        if chosen.len() == count {
            break;
        }
        chosen.insert(i);
    }
    chosen.into_iter().collect()
}

/// What the stream of block scales is apart from that of the bytes.
const SCALES: u64 = 0x73;

/// A `[rows, cols]` matrix of quantised weights of mean about 0 and standard deviation about `deviation`,
/// without values to quantise. Its bytes are the words of [`bits`] in order, little endian, the last
/// one cut. Then block b, or what shares scale b beside the weights, gets its scale d (in blocks an f16, or
/// the nearest that the type has), 0.75 to 1.25 of what gives the deviation, and the f16 minimum that centres
/// its values, where the type has one. e4m3 has 448 where the bytes are NaN, TQ2_0 the pair 1 instead of 3.
///
/// # Errors
/// As [`QuantizedMatrix::scaled`]: rows of blocks must be whole ones.
pub fn quantized_matrix(
    seed: u64,
    kind: impl Into<QuantizedType>,
    rows: usize,
    cols: usize,
    deviation: f32,
) -> crate::Result<QuantizedMatrix> {
    let kind = kind.into();
    let too_large = || crate::Error::TooLarge {
        what: "quantised weights".into(),
        rows,
        cols,
        row_stride: cols,
    };
    let len = kind.data_bytes(rows, cols).ok_or_else(too_large)?;
    let mut data = Matrix::<u8>::zeros(1, len)?.into_vec();
    for (i, word) in data.chunks_mut(8).enumerate() {
        word.copy_from_slice(&bits(seed, i as u64).to_le_bytes()[..word.len()]);
    }
    let (unit, minimum) = unit_scale(kind);
    let scale = |b: usize| {
        let part = (bits(seed ^ SCALES, b as u64) & 0xFFFF) as f32 * (0.5 / 65536.0);
        deviation * unit * (0.75 + part)
    };
    let QuantizedType::Block(block) = kind else {
        if kind != QuantizedType::I8 {
            // 448 instead of NaN.
            data.iter_mut().filter(|code| **code & 0x7F == 0x7F).for_each(|code| *code -= 1);
        }
        let [down, across] = kind.scales(rows, cols);
        return QuantizedMatrix::scaled(
            kind,
            data,
            (0..down * across).map(scale).collect(),
            rows,
            cols,
        );
    };
    for (b, bytes) in data.chunks_exact_mut(block.bytes()).enumerate() {
        let d = scale(b);
        if block == BlockType::TQ2_0 {
            bytes.iter_mut().for_each(|pairs| *pairs &= !((*pairs & *pairs << 1) & 0xAA));
        }
        set_scale(block, bytes, d);
        if let (Scale::Half(at), true) = (block.scale(), block.has_minimum()) {
            bytes[at + 2..at + 4].copy_from_slice(&f16::from_f32(d * minimum).to_le_bytes());
        }
    }
    QuantizedMatrix::from_vec(block, data, rows, cols)
}

/// Gives a block the scale nearest to `d`, a positive number.
fn set_scale(block: BlockType, bytes: &mut [u8], d: f32) {
    let half = f16::from_f32(d).to_bits();
    match block.scale() {
        Scale::Half(at) => bytes[at..at + 2].copy_from_slice(&half.to_le_bytes()),
        // A significand from 1.5 on carries into the exponent.
        Scale::Exponent => bytes[0] = (((d.to_bits() + 0x40_0000) >> 23) + 1).min(254) as u8,
        Scale::FourE4m3 => bytes[..4].fill(e4m3_from_f32(2.0 * d)),
        Scale::Nibbles(at) => {
            for (w, word) in bytes[at..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                word[1] = word[1] & 15 | ((half >> (4 * w) & 15) as u8) << 4;
            }
        }
    }
}

/// The scale at which random bytes have values of standard deviation about 1, and the minimum, relative
/// to the scale, at which their mean is 0. Of uniform integers of b bits the deviation is 2ᵇ/√12 and
/// the mean (2ᵇ − 1)/2; scales of sub-blocks multiply them.
fn unit_scale(kind: QuantizedType) -> (f32, f32) {
    let block = match kind {
        QuantizedType::I8 => return (1.0 / 74.0, 0.0),
        // The root mean square of all codes.
        QuantizedType::F8E4m3 | QuantizedType::F8E4m3Blocks => return (1.0 / 106.0, 0.0),
        QuantizedType::Block(block) => block,
    };
    match block {
        BlockType::Q4_0 => (1.0 / 4.6, 0.0),
        BlockType::Q4_1 => (1.0 / 4.6, -7.5),
        BlockType::Q5_0 => (1.0 / 9.2, 0.0),
        BlockType::Q5_1 => (1.0 / 9.2, -15.5),
        BlockType::Q8_0 => (1.0 / 74.0, 0.0),
        // Scales and minima of sub-blocks are uniform in 0..16 or 0..64, with a root mean square of 8.8 or 36.6.
        BlockType::Q2_K => (1.0 / 13.9, 1.5),
        BlockType::Q3_K => (1.0 / 43.5, 0.0),
        BlockType::Q4_K => (1.0 / 256.0, 7.5),
        BlockType::Q5_K => (1.0 / 512.0, 15.5),
        BlockType::Q6_K => (1.0 / 1368.0, 0.0),
        // Root mean squares of the values that there are, with those of the scales.
        BlockType::IQ4_NL => (1.0 / 67.2, 0.0),
        BlockType::IQ4_XS => (1.0 / 1247.0, 0.0),
        BlockType::MXFP4 | BlockType::NVFP4 => (1.0 / 5.85, 0.0),
        BlockType::TQ1_0 => (1.0 / 0.82, 0.0),
        BlockType::TQ2_0 => (1.0 / 0.71, 0.0),
        BlockType::IQ1_S | BlockType::IQ1_M => (1.0 / 7.2, 0.0),
        BlockType::IQ2_XXS => (1.0 / 53.7, 0.0),
        BlockType::IQ2_XS => (1.0 / 55.8, 0.0),
        BlockType::IQ2_S => (1.0 / 56.4, 0.0),
        BlockType::IQ3_XXS => (1.0 / 142.0, 0.0),
        BlockType::IQ3_S => (1.0 / 140.0, 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_fixed_and_standard() {
        // SplitMix64 with state 0: the published first output.
        assert_eq!(bits(0, 0), 0xE220_A839_7B1D_CDAF);
        let n = 100_000u64;
        let (mut mean, mut var) = (0.0f64, 0.0f64);
        for i in 0..n {
            let x = f64::from(normal(7, i));
            mean += x;
            var += x * x;
        }
        mean /= n as f64;
        var = var / n as f64 - mean * mean;
        assert!(mean.abs() < 0.02 && (var - 1.0).abs() < 0.02, "{mean} {var}");
    }

    #[test]
    fn random_blocks_have_the_deviation_asked_for() {
        for block in QuantizedType::all() {
            let m = quantized_matrix(3, block, 5, 512 * 8, 0.25).unwrap();
            m.view().expect_finite("w").unwrap();
            let w = m.view().to_matrix::<f32>().unwrap();
            let n = w.as_slice().len() as f64;
            let mean = w.as_slice().iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let square = w.as_slice().iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
            let deviation = (square - mean * mean).sqrt();
            // Powers of two are up to 1/3 off.
            let off = if block == BlockType::MXFP4.into() { 0.16..0.38 } else { 0.2..0.32 };
            assert!(off.contains(&deviation), "{block}: {deviation}");
            assert!(mean.abs() < 0.06, "{block}: {mean}");
            assert_eq!(m, quantized_matrix(3, block, 5, 512 * 8, 0.25).unwrap());
        }
        assert!(quantized_matrix(3, BlockType::Q4_K, 1, 32, 1.0).is_err());
    }

    #[test]
    fn samples_are_distinct_and_hold_both_ends() {
        let s = sample(1, 1000, 8);
        assert_eq!((s.len(), s[0], s[7]), (8, 0, 999));
        assert!(s.is_sorted_by(|a, b| a < b));
        assert_eq!(sample(1, 3, 8), [0, 1, 2]);
        assert_eq!(sample(1, 5, 1), [4]);
        assert!(sample(1, 0, 8).is_empty());
    }
}
