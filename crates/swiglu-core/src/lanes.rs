//! The operations the gate mathematics is written in: one `f32` or a vector of them.

/// One or more `f32` lanes with IEEE operations. The gate mathematics ([`crate::gate`]) is written
/// once over this trait; a scalar `f32` defines the bits, and every vector type must agree lane by
/// lane. No operation may be contracted, reassociated or flushed to zero.
pub trait F32Lanes: Copy {
    /// Every lane set to `x`.
    fn splat(x: f32) -> Self;
    /// `self + b`.
    fn add(self, b: Self) -> Self;
    /// `self − b`.
    fn sub(self, b: Self) -> Self;
    /// `self · b`.
    fn mul(self, b: Self) -> Self;
    /// `self / b`, correctly rounded.
    fn div(self, b: Self) -> Self;
    /// `self · b + c` with one rounding.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `c − self · b` with one rounding.
    fn neg_mul_add(self, b: Self, c: Self) -> Self;
    /// The larger; `b` where either is NaN or both are zero.
    fn max(self, b: Self) -> Self;
    /// The smaller; `b` where either is NaN or both are zero.
    fn min(self, b: Self) -> Self;
    /// Sign bit cleared.
    fn abs(self) -> Self;
    /// Sign bit flipped.
    fn neg(self) -> Self;
    /// `yes` where the sign bit of `self` is clear, else `no`.
    fn select_positive(self, yes: Self, no: Self) -> Self;
    /// `self · 2ⁿ` with one rounding, for |self| in [0.5, 2) or NaN and integral `n` in
    /// [−160, 160]; overflows to infinity, underflows through subnormals to zero.
    fn scale_by_power_of_two(self, n: Self) -> Self;
    /// `self · 2ⁿ` for integral `n`, where self is in [0.5, 2) and the result is normal or an infinity
    /// with `self` a power of two: one addition to the exponent field. NaN for NaN with a NaN `n`.
    fn add_exponent(self, n: Self) -> Self;
    /// The nearest integer, ties to even, for |self| < 2²²; NaN stays NaN; the sign
    /// of a zero is not specified.
    #[inline(always)]
    fn round_even(self) -> Self {
        // The sum's last mantissa bit is worth one.
        let shift = Self::splat(12_582_912.0);
        self.add(shift).sub(shift)
    }
    /// Rounds to bfloat16 and back: nearest even, NaN stays NaN.
    fn round_to_bf16(self) -> Self;
    /// Rounds to IEEE binary16 and back: nearest even, overflow to infinity, NaN stays NaN.
    fn round_to_f16(self) -> Self;
}

impl F32Lanes for f32 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self + b
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self - b
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self * b
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self / b
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        f32::mul_add(self, b, c)
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        f32::mul_add(-self, b, c)
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        if self > b { self } else { b }
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        if self < b { self } else { b }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        f32::abs(self)
    }
    #[inline(always)]
    fn neg(self) -> Self {
        -self
    }
    #[inline(always)]
    fn select_positive(self, yes: Self, no: Self) -> Self {
        if self.is_sign_positive() { yes } else { no }
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, n: Self) -> Self {
        // Two factors, because 2ⁿ itself may not be a normal number; the first product is exact.
        let n = n as i32;
        let half = n >> 1;
        let power = |e: i32| f32::from_bits((e + 127).cast_unsigned() << 23);
        self * power(half) * power(n - half)
    }
    #[inline(always)]
    fn add_exponent(self, n: Self) -> Self {
        f32::from_bits(self.to_bits().wrapping_add((n as i32).cast_unsigned() << 23))
    }
    #[inline(always)]
    fn round_to_bf16(self) -> Self {
        half::bf16::from_f32(self).to_f32()
    }
    #[inline(always)]
    fn round_to_f16(self) -> Self {
        half::f16::from_f32(self).to_f32()
    }
}
