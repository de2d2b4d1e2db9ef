//! Seeded random inputs that any language can derive: counter-based, integer arithmetic only.

use crate::dtype::Element;
use crate::matrix::Matrix;

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
    for (i, v) in m.as_mut_slice().iter_mut().enumerate() {
        *v = T::from_f32(normal(seed, i as u64) * scale);
    }
    Ok(m)
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
}
