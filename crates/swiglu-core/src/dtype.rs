//! Element types.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::lanes::F32Lanes;

/// The element type of inputs, weights and outputs. Accumulation is always at least `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of an `f32`.
    Bf16,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// Unit roundoff u: the largest relative error of rounding to nearest, half the distance from
    /// 1 to the next value.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F32 => 1.0 / (1u64 << 24) as f64,
            DType::F16 => 1.0 / (1u64 << 11) as f64,
            DType::Bf16 => 1.0 / (1u64 << 8) as f64,
        }
    }

    /// Half the distance between two subnormal values: the largest absolute error of rounding
    /// near zero.
    pub const fn underflow_unit(self) -> f64 {
        match self {
            // 2⁻¹⁵⁰, 2⁻²⁵, 2⁻¹³⁴ as products of exactly representable powers.
            DType::F32 => 1.0 / ((1u128 << 100) as f64 * (1u64 << 50) as f64),
            DType::F16 => 1.0 / (1u64 << 25) as f64,
            DType::Bf16 => 1.0 / ((1u128 << 100) as f64 * (1u64 << 34) as f64),
        }
    }

    /// The largest finite value.
    pub const fn max_finite(self) -> f64 {
        match self {
            DType::F32 => f32::MAX as f64,
            DType::F16 => 65504.0,
            DType::Bf16 => 3.389_531_389_251_535_5e38,
        }
    }

    /// The least magnitude that rounds to infinity: half a unit above the largest finite value, whose
    /// last bit is set, so that the tie between them goes to even.
    pub const fn least_infinite(self) -> f64 {
        let above_all = match self {
            DType::F32 | DType::Bf16 => (1u128 << 100) as f64 * (1u64 << 28) as f64,
            DType::F16 => 65536.0,
        };
        above_all * (1.0 - self.unit_roundoff() / 2.0)
    }

    /// The short name: `f32`, `f16`, `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    /// Accepts the short names and those of PyTorch (`float32`, `half`, `bfloat16`).
    fn from_str(s: &str) -> Result<Self> {
        match s.to_ascii_lowercase().as_str() {
            "f32" | "float32" | "float" => Ok(DType::F32),
            "f16" | "float16" | "half" | "fp16" => Ok(DType::F16),
            "bf16" | "bfloat16" => Ok(DType::Bf16),
            _ => Err(Error::UnknownName {
                what: "dtype",
                given: s.to_owned(),
                choices: "f32, f16, bf16".to_owned(),
            }),
        }
    }
}

/// `x` in `f32`, rounded towards zero and with its last bit set where anything was lost: rounding
/// that to a narrower type rounds `x` once (24 bits are two more than twice 11).
fn round_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || !nearest.is_finite() {
        // Exact, NaN, or beyond every narrower type as well.
        return nearest;
    }
    let toward_zero = if f64::from(nearest).abs() > x.abs() {
        f32::from_bits(nearest.to_bits() - 1)
    } else {
        nearest
    };
    f32::from_bits(toward_zero.to_bits() | 1)
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element type as a Rust type. Sealed: the kernels exist for exactly these.
pub trait Element:
    sealed::Sealed
    + zerocopy::FromBytes
    + zerocopy::Immutable
    + Copy
    + Default
    + PartialEq
    + PartialOrd
    + fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// The type as a value.
    const DTYPE: DType;
    /// Exact conversion.
    fn to_f32(self) -> f32;
    /// Round to nearest, ties to even; NaN stays NaN, overflow becomes infinity.
    fn from_f32(x: f32) -> Self;
    /// Rounds once from float64 (not through `f32`).
    fn from_f64(x: f64) -> Self;
    /// Exact conversion.
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }
    /// Rounds every lane to this type and back: the rounding steps of [`crate::Rounding`].
    fn round_lanes<V: F32Lanes>(v: V) -> V;
    /// Exact conversion of every `step`-th value from the first on, as many as `to` has. Like [`Self::narrow`] it is compiled
    /// with this crate, not with the program that names the type, which may be one that is not optimised.
    fn widen(from: &[Self], step: usize, to: &mut [f64]);
    /// Rounds each value as [`Self::from_f32`] does.
    fn narrow(from: &[f32], to: &mut [Self]);
}

/// The conversions of many values.
macro_rules! conversions {
    () => {
        fn widen(from: &[Self], step: usize, to: &mut [f64]) {
            to.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, v)| *to = v.to_f64());
        }
        fn narrow(from: &[f32], to: &mut [Self]) {
            to.iter_mut().zip(from).for_each(|(to, v)| *to = Self::from_f32(*v));
        }
    };
}

impl Element for f32 {
    conversions!();
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    fn from_f64(x: f64) -> Self {
        x as f32
    }
    #[inline(always)]
    fn round_lanes<V: F32Lanes>(v: V) -> V {
        v
    }
}

impl Element for f16 {
    conversions!();
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn from_f64(x: f64) -> Self {
        f16::from_f32(round_to_odd(x))
    }
    #[inline(always)]
    fn round_lanes<V: F32Lanes>(v: V) -> V {
        v.round_to_f16()
    }
}

impl Element for bf16 {
    conversions!();
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn from_f64(x: f64) -> Self {
        bf16::from_f32(round_to_odd(x))
    }
    #[inline(always)]
    fn round_lanes<V: F32Lanes>(v: V) -> V {
        v.round_to_bf16()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_names_list_the_choices() {
        for d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
        }
        let e = "int8".parse::<DType>().unwrap_err().to_string();
        assert!(e.contains("int8") && e.contains("bf16"), "{e}");
    }

    #[test]
    fn float64_is_rounded_once() {
        let tie = |bits: i32| 1.0 + 2f64.powi(-bits);
        let above = 2f64.powi(-40);
        assert_eq!(<bf16 as Element>::from_f64(tie(8)).to_f64(), 1.0);
        assert_eq!(<bf16 as Element>::from_f64(tie(8) + above).to_f64(), tie(7));
        assert_eq!(<f16 as Element>::from_f64(tie(11)).to_f64(), 1.0);
        assert_eq!(<f16 as Element>::from_f64(tie(11) + above).to_f64(), tie(10));
        assert_eq!(<f16 as Element>::from_f64(-tie(11) - above).to_f64(), -tie(10));
        assert!(<f16 as Element>::from_f64(f64::NAN).is_nan());
        assert_eq!(<bf16 as Element>::from_f64(1e300), bf16::INFINITY);
        assert_eq!(<f16 as Element>::from_f64(2f64.powi(-25) + above).to_f64(), 2f64.powi(-24));
        assert_eq!(<f16 as Element>::from_f64(1e-300), f16::ZERO);
    }

    #[test]
    fn what_rounds_to_infinity() {
        fn check<T: Element>() {
            let (largest, least) = (T::DTYPE.max_finite(), T::DTYPE.least_infinite());
            let below = f64::from_bits(least.to_bits() - 1);
            assert_eq!(T::from_f64(below).to_f64(), largest, "{}", T::DTYPE);
            assert_eq!(T::from_f64(least).to_f64(), f64::INFINITY, "{}", T::DTYPE);
            assert_eq!(T::from_f64(-least).to_f64(), f64::NEG_INFINITY, "{}", T::DTYPE);
        }
        check::<f32>();
        check::<f16>();
        check::<bf16>();
        assert_eq!(DType::F16.least_infinite(), 65520.0);
    }

    #[test]
    fn limits_match_the_types() {
        assert_eq!(DType::F16.max_finite(), f16::MAX.to_f64());
        assert_eq!(DType::Bf16.max_finite(), bf16::MAX.to_f64());
        assert_eq!(DType::F16.underflow_unit() * 2.0, f16::from_bits(1).to_f64());
        assert_eq!(DType::Bf16.underflow_unit() * 2.0, bf16::from_bits(1).to_f64());
        assert_eq!(DType::F32.underflow_unit() * 2.0, f64::from(f32::from_bits(1)));
    }
}
