//! Block-quantised types of GGUF.
//!
//! Each value is `scale · q` or `scale · q + minimum` with a scale and minimum of 17 bits at most
//! and a q of 8: the product is exact in `f32`, so the sum rounds once and the result does not
//! depend on whether it is fused.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A block-quantised GGUF type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(non_camel_case_types, reason = "the names of the format")]
#[non_exhaustive]
pub enum BlockType {
    /// 32 × 4 bits with a scale.
    Q4_0,
    /// 32 × 4 bits with a scale and a minimum.
    Q4_1,
    /// 32 × 5 bits with a scale.
    Q5_0,
    /// 32 × 5 bits with a scale and a minimum.
    Q5_1,
    /// 32 × 8 bits with a scale.
    Q8_0,
    /// 256 × 2 bits, sixteen sub-blocks with 4-bit scales and minima.
    Q2_K,
    /// 256 × 3 bits, sixteen sub-blocks with 6-bit scales.
    Q3_K,
    /// 256 × 4 bits, eight sub-blocks with 6-bit scales and minima.
    Q4_K,
    /// 256 × 5 bits, eight sub-blocks with 6-bit scales and minima.
    Q5_K,
    /// 256 × 6 bits, sixteen sub-blocks with 8-bit scales.
    Q6_K,
    /// 256 values, eight at a time a point of a codebook of 256, with signs.
    IQ2_XXS,
    /// 256 values, eight at a time a point of a codebook of 512, with signs.
    IQ2_XS,
    /// 256 values, four at a time a point of a codebook of 256, with signs.
    IQ3_XXS,
    /// 256 values, eight at a time a point of a codebook of 2048, shifted.
    IQ1_S,
    /// 32 × 4 bits of unevenly spaced values with a scale.
    IQ4_NL,
    /// 256 values, four at a time a point of a codebook of 512, with signs.
    IQ3_S,
    /// 256 values, eight at a time a point of a codebook of 1024, with signs.
    IQ2_S,
    /// 256 × 4 bits of unevenly spaced values, eight sub-blocks with 6-bit scales.
    IQ4_XS,
    /// 256 values, eight at a time a point of a codebook of 2048, shifted, sixteen sub-blocks.
    IQ1_M,
    /// 256 × −1, 0 or 1, five to a byte, with a scale.
    TQ1_0,
    /// 256 × −1, 0 or 1, four to a byte, with a scale.
    TQ2_0,
    /// 32 × e2m1 with a power of two.
    MXFP4,
    /// 64 × e2m1, four sub-blocks with scales in e4m3.
    NVFP4,
}

/// What the format says of a type.
struct Facts {
    name: &'static str,
    /// The number in a tensor's header.
    id: u32,
    elements: usize,
    bytes: usize,
    scale: Scale,
    /// Where the scales of sub-blocks lie, if they are beside that of the block.
    sub_scales: Range<usize>,
    /// Elements that share a minimum, in types that have them.
    minimum_span: Option<usize>,
}

/// How a block holds its scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// As an f16 from this byte on; the f16 minimum, where there is one, is behind it.
    Half(usize),
    /// As a power of two, 2^(e − 128), in the first byte.
    Exponent,
    /// As four halves of e4m3 numbers in the first bytes.
    FourE4m3,
    /// As an f16 in the upper nibbles of four 16-bit words from this byte on.
    Nibbles(usize),
}

impl Facts {
    const fn new(name: &'static str, id: u32, elements: usize, bytes: usize) -> Self {
        let scale = Scale::Half(0);
        Self { name, id, elements, bytes, scale, sub_scales: 0..0, minimum_span: None }
    }
    const fn scale(self, scale: Scale) -> Self {
        Self { scale, ..self }
    }
    const fn sub_scales(self, sub_scales: Range<usize>) -> Self {
        Self { sub_scales, ..self }
    }
    const fn minimum_of(self, span: usize) -> Self {
        Self { minimum_span: Some(span), ..self }
    }
}

impl BlockType {
    /// Every type, by its number.
    pub const ALL: [BlockType; 23] = [
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q8_0,
        BlockType::Q2_K,
        BlockType::Q3_K,
        BlockType::Q4_K,
        BlockType::Q5_K,
        BlockType::Q6_K,
        BlockType::IQ2_XXS,
        BlockType::IQ2_XS,
        BlockType::IQ3_XXS,
        BlockType::IQ1_S,
        BlockType::IQ4_NL,
        BlockType::IQ3_S,
        BlockType::IQ2_S,
        BlockType::IQ4_XS,
        BlockType::IQ1_M,
        BlockType::TQ1_0,
        BlockType::TQ2_0,
        BlockType::MXFP4,
        BlockType::NVFP4,
    ];

    const fn facts(self) -> Facts {
        use Scale::{Exponent, FourE4m3, Half, Nibbles};
        let facts = Facts::new;
        match self {
            BlockType::Q4_0 => facts("Q4_0", 2, 32, 18),
            BlockType::Q4_1 => facts("Q4_1", 3, 32, 20).minimum_of(32),
            BlockType::Q5_0 => facts("Q5_0", 6, 32, 22),
            BlockType::Q5_1 => facts("Q5_1", 7, 32, 24).minimum_of(32),
            BlockType::Q8_0 => facts("Q8_0", 8, 32, 34),
            BlockType::Q2_K => {
                facts("Q2_K", 10, 256, 84).scale(Half(80)).sub_scales(0..16).minimum_of(16)
            }
            BlockType::Q3_K => facts("Q3_K", 11, 256, 110).scale(Half(108)).sub_scales(96..108),
            BlockType::Q4_K => facts("Q4_K", 12, 256, 144).sub_scales(4..16).minimum_of(32),
            BlockType::Q5_K => facts("Q5_K", 13, 256, 176).sub_scales(4..16).minimum_of(32),
            BlockType::Q6_K => facts("Q6_K", 14, 256, 210).scale(Half(208)).sub_scales(192..208),
            BlockType::IQ2_XXS => facts("IQ2_XXS", 16, 256, 66),
            BlockType::IQ2_XS => facts("IQ2_XS", 17, 256, 74).sub_scales(66..74),
            BlockType::IQ3_XXS => facts("IQ3_XXS", 18, 256, 98),
            BlockType::IQ1_S => facts("IQ1_S", 19, 256, 50),
            BlockType::IQ4_NL => facts("IQ4_NL", 20, 32, 18),
            BlockType::IQ3_S => facts("IQ3_S", 21, 256, 110).sub_scales(106..110),
            BlockType::IQ2_S => facts("IQ2_S", 22, 256, 82).sub_scales(74..82),
            BlockType::IQ4_XS => facts("IQ4_XS", 23, 256, 136).sub_scales(2..8),
            BlockType::IQ1_M => facts("IQ1_M", 29, 256, 56).scale(Nibbles(48)),
            BlockType::TQ1_0 => facts("TQ1_0", 34, 256, 54).scale(Half(52)),
            BlockType::TQ2_0 => facts("TQ2_0", 35, 256, 66).scale(Half(64)),
            BlockType::MXFP4 => facts("MXFP4", 39, 32, 17).scale(Exponent),
            BlockType::NVFP4 => facts("NVFP4", 40, 64, 36).scale(FourE4m3),
        }
    }

    /// Elements of one block.
    pub const fn elements(self) -> usize {
        self.facts().elements
    }

    /// Bytes of one block.
    pub const fn bytes(self) -> usize {
        self.facts().bytes
    }

    /// The name, as tools print it.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// The number in a tensor's header.
    pub const fn id(self) -> u32 {
        self.facts().id
    }

    /// How a block holds its scale.
    pub(crate) const fn scale(self) -> Scale {
        self.facts().scale
    }

    /// Where a block's scales of sub-blocks lie; empty for types without.
    pub(crate) const fn sub_scales(self) -> Range<usize> {
        self.facts().sub_scales
    }

    /// Elements that share a minimum beside `scale · q`; none where values have none.
    pub const fn minimum_span(self) -> Option<usize> {
        self.facts().minimum_span
    }

    /// Whether a value has a minimum beside `scale · q`.
    pub const fn has_minimum(self) -> bool {
        self.minimum_span().is_some()
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BlockType {
    type Err = Error;

    /// Accepts the names in either case.
    fn from_str(s: &str) -> Result<Self> {
        BlockType::ALL.into_iter().find(|b| b.name().eq_ignore_ascii_case(s)).ok_or_else(|| {
            Error::UnknownName {
                what: "type of quantised weights",
                given: s.to_owned(),
                choices: BlockType::ALL.map(BlockType::name).join(", "),
            }
        })
    }
}
