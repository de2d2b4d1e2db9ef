//! Decoding of blocks, a function for each type.

mod codebook;
mod four_bits;
mod grids;
mod k;
mod plain;
mod ternary;

use half::f16;

use crate::quant::BlockType;

pub use k::{decode_q4_k, decode_q5_k, decode_q6_k};
pub use plain::{decode_q4_0, decode_q4_1, decode_q5_0, decode_q5_1, decode_q8_0};

impl BlockType {
    /// Decodes whole blocks in order; bytes past the last whole block are left out.
    pub fn decode(self, bytes: &[u8], mut emit: impl FnMut(f32)) {
        self.decode_blocks(bytes, &mut |values| values.iter().copied().for_each(&mut emit));
    }

    /// As [`Self::decode`], with each value as the two terms that are exact in `f32` and whose sum it
    /// is: `scale · q` and the minimum, 0 for types without one.
    pub fn terms(self, bytes: &[u8], mut emit: impl FnMut(f32, f32)) {
        if !self.decode_terms(bytes, &mut |terms| terms.iter().for_each(|&(a, b)| emit(a, b))) {
            self.decode(bytes, |product| emit(product, 0.0));
        }
    }

    /// The terms of each whole block; `false` for types without minima, of which there are none.
    fn decode_terms(self, bytes: &[u8], emit: Emit<'_, (f32, f32)>) -> bool {
        match self {
            BlockType::Q4_1 => each(bytes, emit, |b| plain::q4_1(b, both)),
            BlockType::Q5_1 => each(bytes, emit, |b| plain::q5_1(b, both)),
            BlockType::Q2_K => each(bytes, emit, |b| k::q2_k(b, both)),
            BlockType::Q4_K => each(bytes, emit, |b| k::q4_k(b, both)),
            BlockType::Q5_K => each(bytes, emit, |b| k::q5_k(b, both)),
            _ => return false,
        }
        true
    }

    /// The values of each whole block. What is made of them is no part of this: all types would be compiled for each of
    /// its uses.
    fn decode_blocks(self, bytes: &[u8], emit: Emit<'_, f32>) {
        match self {
            BlockType::Q4_0 => each(bytes, emit, decode_q4_0),
            BlockType::Q4_1 => each(bytes, emit, decode_q4_1),
            BlockType::Q5_0 => each(bytes, emit, decode_q5_0),
            BlockType::Q5_1 => each(bytes, emit, decode_q5_1),
            BlockType::Q8_0 => each(bytes, emit, decode_q8_0),
            BlockType::Q2_K => each(bytes, emit, |b| k::q2_k(b, sum)),
            BlockType::Q3_K => each(bytes, emit, k::q3_k),
            BlockType::Q4_K => each(bytes, emit, decode_q4_k),
            BlockType::Q5_K => each(bytes, emit, decode_q5_k),
            BlockType::Q6_K => each(bytes, emit, decode_q6_k),
            BlockType::IQ2_XXS => each(bytes, emit, codebook::iq2_xxs),
            BlockType::IQ2_XS => each(bytes, emit, codebook::iq2_xs),
            BlockType::IQ3_XXS => each(bytes, emit, codebook::iq3_xxs),
            BlockType::IQ1_S => each(bytes, emit, codebook::iq1_s),
            BlockType::IQ4_NL => each(bytes, emit, four_bits::iq4_nl),
            BlockType::IQ3_S => each(bytes, emit, codebook::iq3_s),
            BlockType::IQ2_S => each(bytes, emit, codebook::iq2_s),
            BlockType::IQ4_XS => each(bytes, emit, four_bits::iq4_xs),
            BlockType::IQ1_M => each(bytes, emit, codebook::iq1_m),
            BlockType::TQ1_0 => each(bytes, emit, ternary::tq1_0),
            BlockType::TQ2_0 => each(bytes, emit, ternary::tq2_0),
            BlockType::MXFP4 => each(bytes, emit, four_bits::mxfp4),
            BlockType::NVFP4 => each(bytes, emit, four_bits::nvfp4),
        }
    }
}

/// Takes the values of a block.
type Emit<'a, V> = &'a mut dyn FnMut(&[V]);

fn both(product: f32, minimum: f32) -> (f32, f32) {
    (product, minimum)
}

fn sum(product: f32, minimum: f32) -> f32 {
    product + minimum
}

fn each<const BYTES: usize, const N: usize, V>(
    bytes: &[u8],
    emit: Emit<'_, V>,
    block: fn(&[u8; BYTES]) -> [V; N],
) {
    for b in bytes.as_chunks::<BYTES>().0 {
        emit(&block(b));
    }
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Nibble `i` of bytes that hold two neighbours each, the first one low.
fn nibble_of_pairs(b: &[u8], i: usize) -> u8 {
    b[i / 2] >> (4 * (i % 2)) & 15
}

/// Bit pair of element `i`: byte l of each 32 holds elements l, l + 32, l + 64 and l + 96 of a run of
/// 128, the first one lowest.
fn two_bits(q: &[u8], i: usize) -> u8 {
    q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}
