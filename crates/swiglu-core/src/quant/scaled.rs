//! Weights of 8 bits with `f32` scales beside them, as safetensors files hold them: signed integers
//! and e4m3, each `scale · code`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::quant::BlockType;

/// Rows and columns of a block of weights with one scale.
pub const SCALE_BLOCK: usize = 128;

/// How quantised weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[non_exhaustive]
pub enum QuantizedType {
    /// Blocks along a row that hold their scales, as in GGUF files.
    Block(BlockType),
    /// Signed bytes, one `f32` scale for each row: an output feature.
    I8,
    /// e4m3 (`F8_E4M3`, the variant without infinities), one `f32` scale for each row.
    F8E4m3,
    /// e4m3, one `f32` scale for each 128 × 128 weights: `weight_scale_inv` of DeepSeek.
    F8E4m3Blocks,
}

impl QuantizedType {
    /// The types with scales beside the weights.
    pub const SCALED: [QuantizedType; 3] =
        [QuantizedType::I8, QuantizedType::F8E4m3, QuantizedType::F8E4m3Blocks];

    /// Every type.
    pub fn all() -> impl Iterator<Item = QuantizedType> {
        BlockType::ALL.into_iter().map(QuantizedType::Block).chain(Self::SCALED)
    }

    /// The name, as tools print it.
    pub const fn name(self) -> &'static str {
        match self {
            QuantizedType::Block(block) => block.name(),
            QuantizedType::I8 => "I8",
            QuantizedType::F8E4m3 => "F8_E4M3",
            QuantizedType::F8E4m3Blocks => "F8_E4M3_128x128",
        }
    }

    /// The block type, where weights are blocks that hold their scales.
    pub const fn block(self) -> Option<BlockType> {
        match self {
            QuantizedType::Block(block) => Some(block),
            _ => None,
        }
    }

    /// Refuses rows that are not whole blocks.
    pub(crate) fn expect_columns(self, cols: usize) -> Result<()> {
        if cols.is_multiple_of(self.elements()) {
            return Ok(());
        }
        Err(Error::OutOfRange {
            what: "columns of quantised weights",
            given: cols.to_string(),
            expected: format!("whole {self} blocks of {}", self.elements()),
        })
    }

    /// Columns of a row are whole multiples of this.
    pub const fn elements(self) -> usize {
        match self {
            QuantizedType::Block(block) => block.elements(),
            _ => 1,
        }
    }

    /// Bytes of the weights of a matrix, without scales that lie beside them.
    pub const fn data_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        match self {
            QuantizedType::Block(block) => match rows.checked_mul(cols / block.elements()) {
                Some(blocks) => blocks.checked_mul(block.bytes()),
                None => None,
            },
            _ => rows.checked_mul(cols),
        }
    }

    /// Scales beside the weights of a matrix: `[rows, columns]` of them.
    pub const fn scales(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            QuantizedType::Block(_) => [0, 0],
            QuantizedType::I8 | QuantizedType::F8E4m3 => [rows, 1],
            QuantizedType::F8E4m3Blocks => [rows.div_ceil(SCALE_BLOCK), cols.div_ceil(SCALE_BLOCK)],
        }
    }

    /// Bytes of a matrix, with all its scales.
    pub fn bytes(self, rows: usize, cols: usize) -> f64 {
        let elements = rows as f64 * cols as f64;
        let [down, across] = self.scales(rows, cols);
        let data = match self {
            QuantizedType::Block(b) => elements * b.bytes() as f64 / b.elements() as f64,
            _ => elements,
        };
        data + 4.0 * down as f64 * across as f64
    }

    /// Elements that share a minimum beside `scale · q`; none where values have none.
    pub const fn minimum_span(self) -> Option<usize> {
        match self {
            QuantizedType::Block(block) => block.minimum_span(),
            _ => None,
        }
    }

    /// Whether a value has a minimum beside `scale · q`.
    pub const fn has_minimum(self) -> bool {
        self.minimum_span().is_some()
    }

    /// The value of a code, without its scale: exact.
    pub(crate) fn code(self, byte: u8) -> f32 {
        match self {
            QuantizedType::I8 => f32::from(byte.cast_signed()),
            _ => e4m3_to_f32(byte),
        }
    }
}

impl From<BlockType> for QuantizedType {
    fn from(block: BlockType) -> Self {
        QuantizedType::Block(block)
    }
}

impl From<QuantizedType> for String {
    fn from(kind: QuantizedType) -> Self {
        kind.name().to_owned()
    }
}

impl TryFrom<String> for QuantizedType {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl fmt::Display for QuantizedType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for QuantizedType {
    type Err = Error;

    /// Accepts the names in either case.
    fn from_str(s: &str) -> Result<Self> {
        QuantizedType::all().find(|t| t.name().eq_ignore_ascii_case(s)).ok_or_else(|| {
            let names: Vec<&str> = QuantizedType::all().map(QuantizedType::name).collect();
            Error::UnknownName {
                what: "type of quantised weights",
                given: s.to_owned(),
                choices: names.join(", "),
            }
        })
    }
}

/// The value of an e4m3 code: a sign, 4 bits of an exponent biased by 7, 3 of a significand. There are
/// no infinities: with all bits set but the sign it is NaN, and 448 is the largest. (Micikevicius et
/// al., FP8 formats for deep learning, arXiv 2209.05433, table 1.)
pub fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, significand) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => significand * 2f32.powi(-9),
        _ => (8.0 + significand) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The e4m3 code nearest to a value, of two the even one; beyond 448 the largest, as trainers saturate.
pub fn e4m3_from_f32(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7F;
    }
    // Codes of one sign are in the order of their values, so that neighbours can be searched.
    let magnitude = value.abs();
    let above = (0..0x7F).find(|&code| e4m3_to_f32(code) >= magnitude).unwrap_or(0x7E);
    let below = above.saturating_sub(1);
    let distance = |code| f64::from((e4m3_to_f32(code) - magnitude).abs());
    let (up, down) = (distance(above), distance(below));
    let nearest = if down < up || (down == up && below % 2 == 0) { below } else { above };
    sign | nearest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written out from the table of the format: the values of exponent 0 and 1, then powers of two.
    #[test]
    fn every_code_has_its_value() {
        for code in 0..=255u8 {
            let value = e4m3_to_f32(code);
            assert_eq!(value.is_sign_negative(), code >= 0x80, "{code:#04x}");
            let (sign, rest) = (if code < 0x80 { 1.0 } else { -1.0 }, code & 0x7F);
            if rest == 0x7F {
                assert!(value.is_nan(), "{code:#04x}");
                continue;
            }
            // Eight steps of 2^-9 to the least normal number, then eight to each power of two.
            let expected = match rest {
                0..8 => f64::from(rest) / 512.0,
                _ => {
                    let power = [
                        0.015625, 0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0,
                        32.0, 64.0, 128.0, 256.0,
                    ][usize::from(rest / 8) - 1];
                    power * (1.0 + f64::from(rest % 8) / 8.0)
                }
            };
            assert_eq!(f64::from(value), sign * expected, "{code:#04x}");
            assert_eq!(e4m3_from_f32(value), code, "{code:#04x}");
        }
        assert_eq!((e4m3_to_f32(0x7E), e4m3_to_f32(0x01)), (448.0, 1.0 / 512.0));
    }

    #[test]
    fn values_between_codes_round_to_even_and_saturate() {
        for (value, code) in [
            (1.0625, 0x38),
            (1.1875, 0x3A),
            (-1.0626, 0xB9),
            (1e-4, 0x00),
            (1.0 / 1024.0, 0x00),
            (1.01 / 1024.0, 0x01),
            (3.0 / 1024.0, 0x02),
            (500.0, 0x7E),
            (f32::INFINITY, 0x7E),
            (f32::NEG_INFINITY, 0xFE),
        ] {
            assert_eq!(e4m3_from_f32(value), code, "{value}");
        }
        assert_eq!(e4m3_from_f32(f32::NAN) & 0x7F, 0x7F);
    }

    #[test]
    fn names_are_read_back_also_by_serde() {
        for kind in QuantizedType::all() {
            assert_eq!(kind.name().to_lowercase().parse::<QuantizedType>().unwrap(), kind);
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("\"{kind}\""));
            assert_eq!(serde_json::from_str::<QuantizedType>(&json).unwrap(), kind);
        }
        let e = "I4".parse::<QuantizedType>().unwrap_err().to_string();
        assert!(e.contains("Q4_0") && e.contains("F8_E4M3_128x128"), "{e}");
    }
}
