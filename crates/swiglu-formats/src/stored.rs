//! Element types as files store them, and their decoding.

use std::fmt;

use half::{bf16, f16};
use swiglu_core::{DType, Element, QuantizedType};

use crate::bytes::as_elements;
use crate::coded::Coded;
use crate::gguf::quant::BlockType;

/// How a file stores the elements of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoredType {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// A block-quantised GGUF type.
    Block(BlockType),
    /// Signed bytes: codes, which mean nothing without their scales.
    I8,
    /// e4m3, the variant without infinities: codes, as [`StoredType::I8`].
    F8E4m3,
    /// e5m2: codes, as [`StoredType::I8`].
    F8E5m2,
    /// Powers of two: scales of codes.
    F8E8m0,
    /// Unsigned bytes: packed codes, or scales as [`StoredType::F8E8m0`].
    U8,
    /// Codes together with the scales that the file has beside them.
    Scaled(QuantizedType),
    /// As [`StoredType::Scaled`], in a form that is always decoded.
    Coded(Coded),
    /// A type that is known to exist and cannot be read here, as the file names it.
    Other(String),
}

/// What can be read, for errors.
pub(crate) const READABLE: &str = "F64, F32, F16, BF16, in GGUF Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, \
     Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, \
     TQ1_0, TQ2_0, MXFP4 and NVFP4, and in safetensors, as weights of a layer with their scales, I8, \
     F8_E4M3, F8_E5M2 and MXFP4";

impl StoredType {
    /// Elements of one block (1 unless quantised) and its bytes; `None` for types that cannot be read by
    /// themselves.
    pub fn block(&self) -> Option<(usize, usize)> {
        match self {
            StoredType::I8
            | StoredType::F8E4m3
            | StoredType::F8E5m2
            | StoredType::F8E8m0
            | StoredType::U8 => None,
            _ => self.size(),
        }
    }

    /// Whether these are codes with their scales, in blocks or beside them.
    pub fn is_quantized(&self) -> bool {
        matches!(self, StoredType::Block(_) | StoredType::Scaled(_) | StoredType::Coded(_))
    }

    /// As [`Self::block`], also of codes whose scales are elsewhere.
    pub(crate) fn size(&self) -> Option<(usize, usize)> {
        match self {
            StoredType::I8
            | StoredType::F8E4m3
            | StoredType::F8E5m2
            | StoredType::F8E8m0
            | StoredType::U8
            | StoredType::Scaled(_) => Some((1, 1)),
            StoredType::Coded(coded) => Some(coded.codes.size()),
            StoredType::F64 => Some((1, 8)),
            StoredType::F32 => Some((1, 4)),
            StoredType::F16 | StoredType::Bf16 => Some((1, 2)),
            StoredType::Block(b) => Some((b.elements(), b.bytes())),
            StoredType::Other(_) => None,
        }
    }

    /// The element type that holds the values exactly as stored, if there is one.
    pub fn dtype(&self) -> Option<DType> {
        match self {
            StoredType::F32 => Some(DType::F32),
            StoredType::F16 => Some(DType::F16),
            StoredType::Bf16 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// Appends the elements in `bytes`, each rounded at most once from its stored value.
    ///
    /// Bytes past the last whole block are left out: callers have checked the length.
    pub(crate) fn decode<T: Element>(&self, bytes: &[u8], out: &mut Vec<T>) {
        if self.dtype() == Some(T::DTYPE)
            && let Some(same) = as_elements::<T>(bytes)
        {
            return out.extend_from_slice(same);
        }
        match self {
            StoredType::F64 => out.extend(words(bytes).map(|b| narrow::<T>(f64::from_le_bytes(b)))),
            StoredType::F32 => out.extend(words(bytes).map(|b| T::from_f32(f32::from_le_bytes(b)))),
            StoredType::F16 => {
                out.extend(words(bytes).map(|b| T::from_f32(f16::from_le_bytes(b).to_f32())));
            }
            StoredType::Bf16 => {
                out.extend(words(bytes).map(|b| T::from_f32(bf16::from_le_bytes(b).to_f32())));
            }
            StoredType::Block(b) => b.decode(bytes, |v| out.push(T::from_f32(v))),
            // These are decoded by the matrix that has their scales.
            StoredType::I8
            | StoredType::F8E4m3
            | StoredType::F8E5m2
            | StoredType::F8E8m0
            | StoredType::U8
            | StoredType::Scaled(_)
            | StoredType::Coded(_) => {}
            StoredType::Other(_) => {}
        }
    }

    /// As [`Self::decode`], to float64 and without rounding.
    pub(crate) fn decode_f64(&self, bytes: &[u8], out: &mut Vec<f64>) {
        if *self == StoredType::F64 {
            return out.extend(words(bytes).map(f64::from_le_bytes));
        }
        let mut single: Vec<f32> = Vec::new();
        self.decode(bytes, &mut single);
        out.extend(single.into_iter().map(f64::from));
    }
}

/// Rounds float64 once. Half-precision conversions of float64 in common use go through `f32` or
/// drop low bits first, which rounds twice; rounding to odd on the way keeps what decides.
pub(crate) fn narrow<T: Element>(x: f64) -> T {
    if T::DTYPE == DType::F32 { T::from_f64(x) } else { T::from_f32(to_odd(x)) }
}

/// The `f32` nearest zero between `x` and zero, with the last bit set if bits were lost.
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    if back == x || x.is_nan() {
        return nearest;
    }
    // Bits grow with magnitude whatever the sign, so one less is one step towards zero. It was
    // inexact, so zero is never stepped from: it is only reached from larger magnitudes.
    let toward_zero = nearest.to_bits() - u32::from(back.abs() > x.abs());
    f32::from_bits(toward_zero | 1)
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            StoredType::F64 => "F64",
            StoredType::F32 => "F32",
            StoredType::F16 => "F16",
            StoredType::Bf16 => "BF16",
            StoredType::Block(b) => b.name(),
            StoredType::I8 => "I8",
            StoredType::F8E4m3 => "F8_E4M3",
            StoredType::F8E5m2 => "F8_E5M2",
            StoredType::F8E8m0 => "F8_E8M0",
            StoredType::U8 => "U8",
            StoredType::Coded(coded) => return coded.fmt(f),
            StoredType::Scaled(kind) => kind.name(),
            StoredType::Other(name) => name,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_type_is_said_to_be_readable() {
        for block in BlockType::ALL {
            let named = READABLE.split([' ', ',']).any(|word| word == block.name());
            assert!(named, "{block}");
        }
    }

    #[test]
    fn float64_is_rounded_once() {
        // Just above the middle of two bf16 values; by way of f32 it would become the middle and
        // then round down to even.
        let x = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        let mut out: Vec<bf16> = Vec::new();
        StoredType::F64.decode(&x.to_le_bytes(), &mut out);
        assert_eq!(out, [bf16::from_f32(1.0 + 2f32.powi(-7))]);
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(narrow::<f16>(x), f16::from_f32(1.0 + 2f32.powi(-10)));
        assert_eq!(narrow::<f16>(-x), f16::from_f32(-1.0 - 2f32.powi(-10)));
    }

    #[test]
    fn float64_extremes_narrow() {
        assert_eq!(narrow::<bf16>(1e300), bf16::INFINITY);
        assert_eq!(narrow::<f16>(-1e300), f16::NEG_INFINITY);
        assert_eq!(narrow::<f16>(f64::NEG_INFINITY), f16::NEG_INFINITY);
        assert!(narrow::<f16>(f64::NAN).is_nan());
        assert_eq!(narrow::<bf16>(1e-300).to_bits(), 0);
        assert_eq!(narrow::<bf16>(-1e-300).to_bits(), 0x8000);
        assert_eq!(narrow::<f32>(0.1), 0.1f32);
        // Between the middle and the next subnormal.
        assert_eq!(narrow::<f16>(2f64.powi(-25) * (1.0 + 1e-12)).to_bits(), 1);
        assert_eq!(narrow::<f16>(2f64.powi(-25)).to_bits(), 0);
    }

    #[test]
    fn misaligned_bytes_decode_alike() {
        let values = [1.5f32, -2.25, 1e-40];
        let mut bytes = vec![0u8];
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        let mut out: Vec<f32> = Vec::new();
        StoredType::F32.decode(&bytes[1..], &mut out);
        assert_eq!(out, values);
        let mut wide = Vec::new();
        StoredType::F32.decode_f64(&bytes[1..], &mut wide);
        assert_eq!(wide, values.map(f64::from));
    }
}
