//! Codes of 4 and 8 bits with scales in groups: what no kernel computes with, and is decoded.

use std::fmt;

use half::f16;
use swiglu_core::quant::e4m3_to_f32;

/// How a weight is coded before it is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codes {
    /// Signed bytes.
    I8,
    /// A sign, 4 bits of an exponent, 3 of a significand.
    F8E4m3,
    /// A sign, 5 bits of an exponent, 2 of a significand: the upper half of a binary16.
    F8E5m2,
    /// A sign, 2 bits of an exponent, 1 of a significand; two in a byte, the lower half first.
    F4E2m1,
}

/// Codes with a scale for each group of them: `scale · code`, or `scale · (code − offset)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Coded {
    /// The codes.
    pub codes: Codes,
    /// Rows and columns that share a scale; [`usize::MAX`] for all of them.
    pub group: [usize; 2],
    /// Whether each group has an offset beside its scale.
    pub offsets: bool,
}

impl Codes {
    /// Elements of the least whole number of bytes, and that number.
    pub(crate) fn size(self) -> (usize, usize) {
        match self {
            Codes::F4E2m1 => (2, 1),
            _ => (1, 1),
        }
    }

    /// Appends the values of codes, exactly.
    fn decode(self, bytes: &[u8], out: &mut Vec<f64>) {
        match self {
            Codes::I8 => out.extend(bytes.iter().map(|b| f64::from(b.cast_signed()))),
            Codes::F8E4m3 => out.extend(bytes.iter().map(|&b| f64::from(e4m3_to_f32(b)))),
            Codes::F8E5m2 => out.extend(bytes.iter().map(|&b| f64::from(e5m2_to_f32(b)))),
            Codes::F4E2m1 => {
                let both = |&b: &u8| [b & 15, b >> 4].map(|code| f64::from(e2m1_to_f32(code)));
                out.extend(bytes.iter().flat_map(both));
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Codes::I8 => "I8",
            Codes::F8E4m3 => "F8_E4M3",
            Codes::F8E5m2 => "F8_E5M2",
            Codes::F4E2m1 => "F4_E2M1",
        }
    }
}

impl Coded {
    /// Scales of a matrix: `[rows, columns]` of them.
    pub(crate) fn scales(self, rows: usize, cols: usize) -> [usize; 2] {
        [rows.div_ceil(self.group[0]), cols.div_ceil(self.group[1])]
    }

    /// Appends the values of row `r` of `cols` columns, exactly: `bytes` are its codes. Where scales or
    /// offsets are fewer than [`Self::scales`], which loading excludes, the values are NaN.
    pub(crate) fn row(
        self,
        r: usize,
        bytes: &[u8],
        cols: usize,
        [scales, offsets]: [&[f32]; 2],
        out: &mut Vec<f64>,
    ) {
        let start = out.len();
        self.codes.decode(bytes, out);
        let first = r / self.group[0] * cols.div_ceil(self.group[1]);
        let of =
            |all: &[f32], group| f64::from(all.get(first + group).copied().unwrap_or(f32::NAN));
        for (group, values) in out[start..].chunks_mut(self.group[1]).enumerate() {
            let scale = of(scales, group);
            let offset = if self.offsets { of(offsets, group) } else { 0.0 };
            values.iter_mut().for_each(|v| *v = (*v - offset) * scale);
        }
    }
}

impl fmt::Display for Coded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match (self.codes, self.group) {
            (Codes::F4E2m1, [1, 32]) => "MXFP4".into(),
            (Codes::F8E4m3, [1, 32]) => "MXFP8".into(),
            (codes, [_, usize::MAX]) => codes.name().to_owned(),
            (codes, [rows, cols]) => format!("{}_{rows}x{cols}", codes.name()),
        };
        f.pad(&if self.offsets { format!("{name} with offsets") } else { name })
    }
}

/// The value of an e5m2 code.
pub(crate) fn e5m2_to_f32(code: u8) -> f32 {
    f16::from_bits(u16::from(code) << 8).to_f32()
}

/// The value of the lower four bits as e2m1.
pub(crate) fn e2m1_to_f32(code: u8) -> f32 {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = VALUES[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The value of an E8M0 code: a power of two, 2^(code − 127), and NaN for 255. The least is a subnormal
/// `f32`.
pub(crate) fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the tables of the formats: sign, exponent, significand.
    #[test]
    fn every_code_has_its_value() {
        for code in 0..=255u8 {
            let (sign, exponent, significand) = (
                if code < 128 { 1.0 } else { -1.0 },
                i32::from(code >> 2 & 31),
                f64::from(code & 3),
            );
            let value = f64::from(e5m2_to_f32(code));
            match (exponent, code & 3) {
                (31, 0) => assert_eq!(value, sign * f64::INFINITY),
                (31, _) => assert!(value.is_nan()),
                (0, _) => assert_eq!(value, sign * significand / 65536.0),
                _ => {
                    let power = 2f64.powi(exponent - 15);
                    assert_eq!(value, sign * (1.0 + significand / 4.0) * power, "{code:#04x}");
                }
            }
            let scale = f64::from(e8m0_to_f32(code));
            match code {
                255 => assert!(scale.is_nan()),
                _ => assert_eq!(scale, 2f64.powi(i32::from(code) - 127), "{code}"),
            }
            let four = f64::from(e2m1_to_f32(code));
            let (exponent, significand) = (i32::from(code >> 1 & 3), f64::from(code & 1));
            let magnitude = match exponent {
                0 => significand / 2.0,
                _ => (1.0 + significand / 2.0) * 2f64.powi(exponent - 1),
            };
            assert_eq!(four, if code & 8 == 0 { magnitude } else { -magnitude }, "{code:#04x}");
            assert_eq!(four.is_sign_negative(), code & 8 != 0);
        }
    }

    #[test]
    fn names_say_what_shares_a_scale() {
        let name = |codes, group, offsets| Coded { codes, group, offsets }.to_string();
        assert_eq!(name(Codes::F4E2m1, [1, 32], false), "MXFP4");
        assert_eq!(name(Codes::F8E4m3, [1, 32], false), "MXFP8");
        assert_eq!(name(Codes::F8E5m2, [1, usize::MAX], false), "F8_E5M2");
        assert_eq!(name(Codes::F8E5m2, [64, 128], false), "F8_E5M2_64x128");
        assert_eq!(name(Codes::I8, [1, usize::MAX], true), "I8 with offsets");
    }
}
