//! What a decode kernel multiplies, and how it reads weights.

use swiglu_core::quant::{BlockType, QuantizedType};
use swiglu_core::{DType, Problem};

use super::Obstacle;
use super::config::MOST_TOKENS;

/// Bytes of a row that four lanes take together.
pub(super) const UNIT_BYTES: usize = 64;
/// Bytes of scales before a group of units.
const GROUP_SCALES: usize = 16;
/// Quantised weights that meet 64 bytes of 16-bit tokens.
const QUANTIZED_BLOCK: usize = 32;

/// How products are computed, and the most tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Math {
    Fma(usize),
    Tensor(usize),
}

impl Math {
    /// For so many tokens: tensor cores above two, see the head of the device file.
    pub(super) fn of(dtype: DType, m: usize) -> Result<Self, Obstacle> {
        const F32: [usize; 4] = [1, 2, 4, 8];
        let most = if dtype == DType::F32 { 8 } else { MOST_TOKENS };
        let refused = Obstacle::Tokens { given: m, most };
        match (dtype, m) {
            (_, 0) => Err(Obstacle::Empty),
            (DType::F32, _) => F32.into_iter().find(|&n| m <= n).map(Math::Fma).ok_or(refused),
            (_, 1..=2) => Ok(Math::Fma(m)),
            (_, 3..=8) => Ok(Math::Tensor(8)),
            (_, 9..=16) => Ok(Math::Tensor(16)),
            _ => Err(refused),
        }
    }

    /// For a problem, with elements or quantised weights.
    pub(super) fn of_problem(problem: &Problem) -> Result<Self, Obstacle> {
        match problem.quantized {
            None => Self::of(problem.dtype, problem.m),
            Some(_) => Self::of_quantized(problem.dtype, problem.m),
        }
    }

    /// The same in the kernel whose weights come through TMA: a second token is cheaper on tensor
    /// cores there.
    pub(super) fn by_tma(self, dtype: DType) -> Self {
        match (self, dtype) {
            (Math::Fma(2), DType::F16 | DType::Bf16) => Math::Tensor(8),
            (math, _) => math,
        }
    }

    /// Quantised weights are multiplied on tensor cores, as values of 16 bits.
    pub(super) fn of_quantized(dtype: DType, m: usize) -> Result<Self, Obstacle> {
        match (dtype, m) {
            (DType::F32, _) => Err(Obstacle::QuantizedF32),
            (_, 0) => Err(Obstacle::Empty),
            (_, 1..=8) => Ok(Math::Tensor(8)),
            (_, 9..=MOST_TOKENS) => Ok(Math::Tensor(MOST_TOKENS)),
            _ => Err(Obstacle::Tokens { given: m, most: MOST_TOKENS }),
        }
    }

    pub(super) fn tokens(self) -> usize {
        match self {
            Math::Fma(tokens) | Math::Tensor(tokens) => tokens,
        }
    }
}

/// What the bytes of a row of weights are, as the device file counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Format {
    /// Values of T.
    Elements = 0,
    /// Signed bytes with a scale per 32: Q8_0.
    Bytes = 1,
    /// Nibbles with a scale per 32: Q4_0.
    Nibbles = 2,
    /// Signed bytes with a scale per row.
    RowBytes = 3,
    /// e4m3 with a scale per row.
    RowE4m3 = 4,
    /// e4m3 with a scale per 128 of a row.
    BlockE4m3 = 5,
}

impl Format {
    /// Those of quantised weights.
    pub(crate) const QUANTIZED: [Format; 5] =
        [Format::Bytes, Format::Nibbles, Format::RowBytes, Format::RowE4m3, Format::BlockE4m3];

    fn of(kind: QuantizedType) -> Result<Self, Obstacle> {
        match kind {
            QuantizedType::Block(BlockType::Q8_0) => Ok(Format::Bytes),
            QuantizedType::Block(BlockType::Q4_0) => Ok(Format::Nibbles),
            QuantizedType::I8 => Ok(Format::RowBytes),
            QuantizedType::F8E4m3 => Ok(Format::RowE4m3),
            QuantizedType::F8E4m3Blocks => Ok(Format::BlockE4m3),
            other => Err(Obstacle::Blocks(other)),
        }
    }

    /// The type of weights that lie so.
    pub(super) fn kind(self) -> Option<QuantizedType> {
        match self {
            Format::Elements => None,
            Format::Bytes => Some(QuantizedType::Block(BlockType::Q8_0)),
            Format::Nibbles => Some(QuantizedType::Block(BlockType::Q4_0)),
            Format::RowBytes => Some(QuantizedType::I8),
            Format::RowE4m3 => Some(QuantizedType::F8E4m3),
            Format::BlockE4m3 => Some(QuantizedType::F8E4m3Blocks),
        }
    }

    /// Of gate and up, and of the down weight.
    pub(crate) fn of_problem(problem: &Problem) -> Result<[Self; 2], Obstacle> {
        let Some(types) = problem.quantized else { return Ok([Format::Elements; 2]) };
        let down = types.down.unwrap_or(types.gate_up);
        Ok([Self::of(types.gate_up)?, Self::of(down)?])
    }

    /// Blocks of k, each 64 bytes of x, that 64 bytes of a row hold.
    pub(crate) fn blocks(self) -> usize {
        match self {
            Format::Elements => 1,
            Format::Nibbles => 4,
            Format::Bytes | Format::RowBytes | Format::RowE4m3 | Format::BlockE4m3 => 2,
        }
    }

    /// Whether blocks have scales, which lie in their rows.
    fn scales_blocks(self) -> bool {
        self.scale_bytes() > 0
    }

    /// Whether rows have scales, which lie apart from them.
    pub(super) fn scales_rows(self) -> bool {
        matches!(self, Format::RowBytes | Format::RowE4m3)
    }

    /// Units of 64 bytes before which the scales of all of them lie, in 16 bytes.
    pub(crate) fn group_units(self) -> usize {
        match self {
            Format::Elements | Format::RowBytes | Format::RowE4m3 => 1,
            Format::Nibbles => 2,
            Format::Bytes => 4,
            Format::BlockE4m3 => 8,
        }
    }

    /// Units of a row of `k` quantised weights.
    pub(crate) fn units(self, k: usize) -> usize {
        k.div_ceil(self.blocks() * QUANTIZED_BLOCK)
    }

    /// Bytes of so many units of a row, from its start.
    pub(crate) fn bytes_of(self, units: usize) -> usize {
        let groups = units.div_ceil(self.group_units());
        units * UNIT_BYTES + if self.scales_blocks() { groups * GROUP_SCALES } else { 0 }
    }

    /// Bytes from the start of a row to a unit.
    pub(crate) fn unit_at(self, unit: usize) -> usize {
        self.bytes_of(unit + 1) - UNIT_BYTES
    }

    /// Bytes from the start of a row to the scales of a unit.
    pub(crate) fn scales_at(self, unit: usize) -> usize {
        let within = unit % self.group_units();
        // Two units of 128 of k share a scale.
        let sharing = if self == Format::BlockE4m3 { 2 } else { 1 };
        self.bytes_of(unit - within) + within / sharing * self.scale_bytes()
    }

    /// Bytes of a token's row of `k` values that products read.
    pub(super) fn token_bytes(self, k: usize, size: usize) -> usize {
        match self {
            Format::Elements => k * size,
            _ => self.units(k) * self.blocks() * UNIT_BYTES,
        }
    }

    /// Bytes of the scales that lie in the ring beside 64 bytes of a row.
    pub(crate) fn scale_bytes(self) -> usize {
        match self {
            Format::Elements | Format::RowBytes | Format::RowE4m3 => 0,
            Format::Bytes | Format::Nibbles => 2 * self.blocks(),
            Format::BlockE4m3 => 4,
        }
    }
}
