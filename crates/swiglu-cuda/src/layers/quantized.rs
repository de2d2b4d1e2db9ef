//! Quantised weights of a block: they stay as they are in device memory, laid out once for the decode kernels.

use std::sync::Arc;

use swiglu_core::quant::{BlockType, QuantizedMlpParams, QuantizedRef, QuantizedType, SCALE_BLOCK};
use swiglu_core::{DType, Element, Error as CoreError, Matrix, Op, Problem, f16};

use crate::device::error::{CudaError, Result};
use crate::device::memory::{Allocation, DeviceBuffer};
use crate::device::stream::Stream;
use crate::kernels::decode_mlp::{BlockWeights, Format, MOST_TOKENS, Scales};
use crate::kernels::weights::Biases;

/// The types of quantised weights that there are kernels for.
pub fn quantized_types() -> &'static [QuantizedType] {
    &[
        QuantizedType::Block(BlockType::Q8_0),
        QuantizedType::Block(BlockType::Q4_0),
        QuantizedType::I8,
        QuantizedType::F8E4m3,
        QuantizedType::F8E4m3Blocks,
    ]
}

/// Tokens that are computed together with quantised weights.
pub const fn quantized_tokens() -> usize {
    MOST_TOKENS
}

/// Refuses what no kernel computes with quantised weights, saying what would be computed: as
/// [`Mlp::from_quantized`](crate::Mlp::from_quantized), which knows the device's memory too.
///
/// # Errors
/// [`CoreError::Unsupported`].
pub fn expect_quantized(op: Op, dtype: DType, kind: QuantizedType) -> swiglu_core::Result<()> {
    let why = match (op, dtype) {
        (Op::Mlp, _) if !quantized_types().contains(&kind) => {
            let names: Vec<&str> = quantized_types().iter().map(|t| t.name()).collect();
            format!("a CUDA device has kernels for {}", names.join(", "))
        }
        (Op::Mlp, DType::F32) => {
            "a CUDA device multiplies them with f16 or bf16; choose one of these".to_owned()
        }
        (Op::Mlp, _) => return Ok(()),
        _ => "a CUDA device has kernels for them in whole feed-forward blocks (mlp)".to_owned(),
    };
    let what = format!("computing {op} of {dtype} with {kind} weights");
    Err(CoreError::Unsupported { what, why })
}

/// The weights and biases of a block, laid out for the decode kernels.
#[derive(Debug)]
pub(super) struct QuantizedWeights<T> {
    hidden: usize,
    intermediate: usize,
    gate_up: Rows,
    down: Rows,
    /// bg, then bu.
    biases: Option<DeviceBuffer<f32>>,
    down_bias: Option<DeviceBuffer<T>>,
    /// What all of it lies in.
    allocation: Arc<Allocation>,
}

/// Rows of quantised weights on the device: whole units of 64 bytes, padded with zeros, with the scales of
/// blocks between them, see [`Format`]. Lane t of the four that share a row of a unit has its 16 bytes at 16·t.
#[derive(Debug)]
struct Rows {
    /// Bytes, two in the bits of each value.
    values: DeviceBuffer<f16>,
    /// Of whole rows, where they have one.
    scales: DeviceBuffer<f32>,
    /// Bytes from row to row.
    stride: usize,
}

/// Elements of a block, and those of them that one lane multiplies.
const BLOCK: usize = 32;
const LANE: usize = 8;
/// Elements that the largest unit multiplies: rows of h are whole units.
const MOST_UNIT: usize = 4 * BLOCK;

impl Rows {
    fn new(
        allocation: &Arc<Allocation>,
        stream: &Stream,
        matrices: &[QuantizedRef<'_>],
        format: Format,
        dtype: DType,
    ) -> Result<Self> {
        let stride = format.bytes_of(format.units(matrices[0].cols()));
        let rows: usize = matrices.iter().map(QuantizedRef::rows).sum();
        let mut values = Matrix::<u8>::zeros(rows, stride)?.into_vec();
        let all = matrices.iter().flat_map(|m| (0..m.rows()).map(move |r| (m, r)));
        let mut scales = Vec::new();
        for ((matrix, row), to) in all.zip(values.chunks_exact_mut(stride.max(1))) {
            match format {
                Format::Elements | Format::Bytes | Format::Nibbles => {
                    lay_out_blocks(matrix.row(row), format, to);
                }
                Format::RowBytes => scales.push(lay_out_integers(matrix, row, to)),
                Format::RowE4m3 => scales.extend(lay_out_e4m3(matrix, row, format, dtype, to)),
                Format::BlockE4m3 => {
                    let factors = lay_out_e4m3(matrix, row, format, dtype, to);
                    for (part, factor) in factors.into_iter().enumerate() {
                        let unit = part * SCALE_BLOCK / (format.blocks() * BLOCK);
                        let at = format.scales_at(unit);
                        to[at..][..4].copy_from_slice(&factor.to_le_bytes());
                    }
                }
            }
        }
        let halves = values.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b));
        let values = DeviceBuffer::together(allocation, stream, &halves.collect::<Vec<_>>())?;
        let scales = DeviceBuffer::together(allocation, stream, &scales)?;
        Ok(Self { values, scales, stride })
    }
}

/// Where a lane's eight elements of a block begin in a row of bytes: of its 16 of a unit a block has eight.
fn lane_at(format: Format, block: usize, lane: usize) -> usize {
    format.unit_at(block / 2) + lane * 16 + block % 2 * LANE
}

/// Integers of eight bits of a lane, biased by 128.
fn biased(codes: [u8; LANE]) -> [u8; LANE] {
    (u64::from_ne_bytes(codes) ^ 0x8080_8080_8080_8080).to_ne_bytes()
}

/// Lays out a row of Q8_0 or Q4_0 blocks: see [`Rows`]. Of a lane's 16 bytes block b of a unit has
/// bytes 8b to 8b + 7, biased by 128; or word b, nibble i / 2 + 4·(i % 2) for element i of the lane's
/// eight, biased by 8 as in the file. Scales are f16; where a padded value is not 0, its scale is.
fn lay_out_blocks(row: &[u8], format: Format, to: &mut [u8]) {
    // An f16 scale, then the values.
    let bytes = if format == Format::Nibbles { 2 + BLOCK / 2 } else { 2 + BLOCK };
    for (block, from) in row.chunks_exact(bytes).enumerate() {
        let (unit, within) = (block / format.blocks(), block % format.blocks());
        let (scale, codes) = from.split_at(2);
        to[format.scales_at(unit) + 2 * within..][..2].copy_from_slice(scale);
        if format == Format::Nibbles {
            let at = format.unit_at(unit) + within * 4;
            // A block's first half is in the lower nibbles, its second in the upper.
            for (lane, shift) in [0, 0, 4, 4].into_iter().enumerate() {
                let nibbles = codes[lane % 2 * LANE..][..LANE].iter().enumerate();
                let word = nibbles.fold(0, |word, (i, &pair)| {
                    word | u32::from(pair >> shift & 15) << (4 * (i / 2 + 4 * (i % 2)))
                });
                to[at + lane * 16..][..4].copy_from_slice(&word.to_le_bytes());
            }
        } else {
            for (lane, &codes) in codes.as_chunks().0.iter().enumerate() {
                to[lane_at(format, block, lane)..][..LANE].copy_from_slice(&biased(codes));
            }
        }
    }
}

/// Codes of eight bits as lanes have them, of which `first` is the first one's place in its row: where the eight of
/// each begin in a row of the format, and these, the last lane's filled up with `none`.
fn lanes(
    codes: &[u8],
    first: usize,
    format: Format,
    none: u8,
) -> impl Iterator<Item = (usize, [u8; LANE])> {
    codes.chunks(LANE).zip(first / LANE..).map(move |(codes, lane)| {
        let mut eight = [none; LANE];
        eight[..codes.len()].copy_from_slice(codes);
        (lane_at(format, lane / (BLOCK / LANE), lane % (BLOCK / LANE)), eight)
    })
}

/// Lays out a row of integers, as blocks of Q8_0; returns its scale.
fn lay_out_integers(matrix: &QuantizedRef<'_>, row: usize, to: &mut [u8]) -> f32 {
    to.fill(0x80);
    for (at, codes) in lanes(matrix.row(row), 0, Format::RowBytes, 0) {
        to[at..][..LANE].copy_from_slice(&biased(codes));
    }
    matrix.row_scales(row).0[0]
}

/// Lays out a row of e4m3, four of a lane's eight in a word; returns its scales. The device file knows no NaN:
/// what it would make one of is one with a scale that is NaN, since any factor of it is.
fn lay_out_e4m3(
    matrix: &QuantizedRef<'_>,
    row: usize,
    format: Format,
    dtype: DType,
    to: &mut [u8],
) -> Vec<f32> {
    let (factors, columns) = matrix.row_scales(row);
    let codes = matrix.row(row).chunks(columns.max(1));
    let parts = codes.zip(factors).enumerate().map(|(part, (codes, &factor))| {
        if codes.iter().any(|&code| e4m3_is_nan(code)) {
            return f32::NAN;
        }
        for (at, [a, b, c, d, e, f, g, h]) in lanes(codes, part * columns, format, 0) {
            let words = [e4m3_word([a, b, c, d], dtype), e4m3_word([e, f, g, h], dtype)];
            to[at..][..LANE].copy_from_slice(words.map(u32::to_le_bytes).as_flattened());
        }
        factor
    });
    parts.collect()
}

/// Whether an e4m3 is no number: all bits but the sign's are 1.
fn e4m3_is_nan(code: u8) -> bool {
    code & 0x7F == 0x7F
}

/// Four e4m3 in a word, as the device file unpacks them for a type: the first two in halves of their own, the other
/// two in the bits that these leave.
fn e4m3_word([a, b, c, d]: [u8; 4], dtype: DType) -> u32 {
    let pair = |low: u8, high: u8| u32::from(low) | u32::from(high) << 16;
    let (first, second) = (pair(a, b), pair(c, d));
    let (sign, magnitude) = (0x0080_0080, 0x007F_007F);
    let [first, second] = match dtype {
        DType::F16 => [
            (first & sign) << 8 | (first & magnitude) << 7,
            (second & sign) << 7 | second & magnitude,
        ],
        _ => [
            (first & sign) << 8 | (first & magnitude) << 4,
            (second & 0x0070_0070) << 8 | (second & sign) << 4 | second & 0x000F_000F,
        ],
    };
    first | second
}

impl<T: Element> QuantizedWeights<T> {
    pub(super) fn new(
        stream: &Stream,
        params: &QuantizedMlpParams<'_>,
        problem: &Problem,
    ) -> Result<Self> {
        let [gate_up, down] = Format::of_problem(problem).map_err(|why| {
            CudaError::Unsupported { what: problem.to_string(), why: why.to_string() }
        })?;
        let allocation = Allocation::new(stream.cuda().memory(), stream.raw_stream());
        let gated = &params.gated;
        let biases = match (gated.gate_bias, gated.up_bias) {
            (None, None) => None,
            (gate, up) => {
                let zeros = || vec![0.0; params.gated.intermediate()];
                let mut both = gate.map_or_else(zeros, <[f32]>::to_vec);
                both.extend(up.map_or_else(zeros, <[f32]>::to_vec));
                Some(DeviceBuffer::together(&allocation, stream, &both)?)
            }
        };
        let rounded = |b: &[f32]| b.iter().map(|&b| T::from_f32(b)).collect::<Vec<T>>();
        let down_bias =
            params.down_bias.map(|b| DeviceBuffer::together(&allocation, stream, &rounded(b)));
        Ok(Self {
            hidden: problem.hidden,
            intermediate: problem.intermediate,
            gate_up: Rows::new(&allocation, stream, &[gated.gate, gated.up], gate_up, T::DTYPE)?,
            down: Rows::new(&allocation, stream, &[params.down], down, T::DTYPE)?,
            biases,
            down_bias: down_bias.transpose()?,
            allocation,
        })
    }

    /// Features of h, padded to whole units.
    pub(super) fn whole_units(intermediate: usize) -> usize {
        intermediate.next_multiple_of(MOST_UNIT)
    }

    pub(super) fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }

    pub(super) fn bytes(&self) -> usize {
        self.allocation.bytes()
    }

    /// As the decode kernels take them.
    pub(super) fn block(&self) -> BlockWeights {
        let h = self.intermediate;
        let up = h * self.gate_up.stride;
        let up_scales = if self.gate_up.scales.is_empty() { 0 } else { h * size_of::<f32>() };
        let gate = self.gate_up.values.device_ptr();
        let scales = self.gate_up.scales.device_ptr();
        BlockWeights {
            gate,
            up: gate + up as u64,
            down: self.down.values.device_ptr(),
            gate_stride: self.gate_up.stride,
            down_stride: self.down.stride,
            scales: Scales {
                gate: scales,
                up: scales + up_scales as u64,
                down: self.down.scales.device_ptr(),
            },
            hidden: self.hidden,
            intermediate: h,
            biases: self.biases.as_ref().map(|b| {
                let gate = b.device_ptr();
                Biases::Floats([gate, gate + (h * size_of::<f32>()) as u64])
            }),
            down_bias: self.down_bias.as_ref().map(DeviceBuffer::device_ptr),
        }
    }
}
