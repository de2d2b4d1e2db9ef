//! Quantised weights: panels that keep the bits of the blocks, and the kernels over them.
//!
//! With few rows ([`dots`]) weights are used as the small integers they are, by byte dot products with
//! inputs as fixed-point numbers ([`digits`]). With many rows of bfloat16, where there are dot products
//! of such pairs ([`pairs`]), the integers become bfloat16, chunk by chunk, and are summed apart for each
//! scale. With many rows otherwise ([`decoded`]) chunks are decoded to `f32` and go through the tiles of
//! the dense kernel; with few rows that are to have the same bits they are decoded in registers ([`fused`]).
//! [`Way::of`] chooses.

mod blocks;
mod decoded;
mod digits;
mod dots;
mod fused;
mod pairs;

use std::ops::Range;

use swiglu_core::{
    BlockType, DType, Error, Op, QuantizedGatedLinearParams, QuantizedRef, QuantizedType, Result,
};

use self::blocks::{Blocks, WithBlocks, group_block_bytes, with_blocks};
use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::isa::Isa;
use crate::order::Order;
use crate::panels::{SendPtr, pack_bias};
use crate::simd;
use crate::team::Step;

pub use blocks::quantized_types;
pub(crate) use decoded::{DecodedSums, scratch_bytes};
pub(crate) use digits::{PackDigits, PackUnits, row_bytes, units};
pub(crate) use dots::Dots;
pub(crate) use fused::{FusedSums, panels_fused};
pub(crate) use pairs::{PAIRS, PairSums};

/// Inputs with a common fixed-point scale; every block is whole runs.
pub(crate) const RUN: usize = 32;

/// How quantised weights are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// As integers, with inputs as fixed-point numbers.
    Digits,
    /// As bfloat16 integers, summed apart for each scale.
    Pairs,
    /// Decoded to `f32`.
    Decoded,
}

impl Way {
    /// Of `m` rows of `dtype`. Each way by itself has one order of sums for every number of rows. The common
    /// one is that of many rows; where byte dot products are one instruction and pairs are not taken, integers
    /// are as fast with many rows, see [`digit_rows_max`].
    pub(crate) fn of(isa: Isa, dtype: DType, block: BlockType, m: usize, order: Order) -> Self {
        let as_integers = match order {
            Order::OfRows => m <= digit_rows_max(isa, dtype, block),
            Order::Common => !simd::short_sums(isa) && !takes_pairs(isa, dtype),
        };
        if as_integers {
            Way::Digits
        } else if takes_pairs(isa, dtype) {
            Way::Pairs
        } else {
            Way::Decoded
        }
    }

    /// For people.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Way::Digits => "quantised weights as integers times fixed-point inputs",
            Way::Pairs => "quantised weights as bfloat16 integers, summed apart for each scale",
            Way::Decoded => "quantised weights decoded chunk by chunk into the second-level cache",
        }
    }
}

/// Whether many rows of `dtype` are multiplied as pairs.
pub(crate) fn takes_pairs(isa: Isa, dtype: DType) -> bool {
    dtype == DType::Bf16 && simd::pair_dots(isa)
}

/// Up to this many rows weights are multiplied as integers.
///
/// Measured on a Zen 4, one thread, weights from memory, 4096 × 14336, ms of a block. AVX-512 in f32, digits against
/// decoded with 16, 32, 64 and 128 rows: Q4_0 46/62, 101/119, 211/220, 383/416; Q8_0 46/63, 96/110, 187/226, 346/417;
/// Q4_K 52/58, 103/112, 203/219, 413/414; Q6_K 54/61, 108/113, 223/232, 437/436. In bf16, digits against pairs with 3, 4
/// and 5 rows: Q4_0 8.2/9.8, 11.0/11.4, 13.5/12.8; Q8_0 9.7/16.9, 12.6/18.2, 16.4/19.8; Q4_K 9.7/10.4, 12.9/11.7; Q5_K
/// 10.3/10.6, 13.1/12.2; Q6_K 10.0/15.7, 13.6/20.0, 17.6/21.1.
pub(crate) fn digit_rows_max(isa: Isa, dtype: DType, block: BlockType) -> usize {
    use BlockType::{Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0};
    match simd::dot_rows(isa) {
        rows if takes_pairs(isa, dtype) => match block {
            Q8_0 | Q6_K => rows + 1,
            Q4_K | Q5_K => rows - 1,
            _ => rows,
        },
        // Without dot products of bytes. On a Zen 3 decoded Q4_0 and Q4_K take 0.90 to 0.94 of the time with 5 rows, 1.08
        // to 1.09 with 4.
        _ if simd::short_sums(isa) => match block {
            Q4_0 | Q4_1 | Q4_K | Q5_K | Q8_0 => 4,
            _ => 3,
        },
        rows => 8 * rows,
    }
}

/// Packed quantised weights and biases.
#[derive(Debug)]
pub(crate) struct QuantizedPanels {
    block: BlockType,
    data: Buffer,
    bias: Option<Buffer>,
    panels: usize,
    inputs: usize,
    lanes: usize,
}

impl QuantizedPanels {
    /// Gate and up features side by side, as in [`crate::panels::Panels::gated`].
    pub(crate) fn gated(cpu: &Cpu, params: &QuantizedGatedLinearParams<'_>) -> Result<Self> {
        let lanes = simd::lanes(cpu.isa());
        let features = params.intermediate();
        let biases = [params.gate_bias, params.up_bias];
        let row = |panel: usize, lane: usize| {
            let h = panel * lanes + lane % lanes;
            let half = if lane < lanes { params.gate } else { params.up };
            (h < features).then(|| half.row(h))
        };
        let bias = biases.iter().any(Option::is_some).then_some(|panel: usize, lane: usize| {
            let h = panel * lanes + lane % lanes;
            biases[lane / lanes].and_then(|b| b.get(h)).copied().unwrap_or(0.0)
        });
        Self::pack(cpu, params.gate, features.div_ceil(lanes), &row, bias)
    }

    /// Panel p holds output features `2·p·LANES ..`.
    pub(crate) fn linear(cpu: &Cpu, w: QuantizedRef<'_>, bias: Option<&[f32]>) -> Result<Self> {
        let width = 2 * simd::lanes(cpu.isa());
        let row = |panel: usize, lane: usize| {
            let o = panel * width + lane;
            (o < w.rows()).then(|| w.row(o))
        };
        let bias = bias.map(|b| {
            move |panel: usize, lane: usize| b.get(panel * width + lane).copied().unwrap_or(0.0)
        });
        Self::pack(cpu, w, w.rows().div_ceil(width), &row, bias)
    }

    /// `row` gives the blocks of each output lane.
    fn pack<'a>(
        cpu: &Cpu,
        like: QuantizedRef<'_>,
        panels: usize,
        row: &(dyn Fn(usize, usize) -> Option<&'a [u8]> + Sync),
        bias: Option<impl Fn(usize, usize) -> f32>,
    ) -> Result<Self> {
        let inputs = like.cols();
        let block = computed_block(like.kind()).map_err(|why| Error::Unsupported {
            what: format!("computing with {} weights", like.kind()),
            why: format!("{why}; decode them"),
        })?;
        let lanes = simd::lanes(cpu.isa());
        let mut this = Self { block, data: Buffer::zeroed(0)?, bias: None, panels, inputs, lanes };
        this.data = Buffer::zeroed(panels * this.panel_bytes())?;
        this.bias = bias.map(|bias| pack_bias(panels, 2 * lanes, bias)).transpose()?;
        let data = SendPtr(this.data.as_mut_ptr());
        let panel_bytes = this.panel_bytes();
        let pack = |range: Range<usize>, _: usize| {
            for panel in range {
                // SAFETY: panels are disjoint parts of `data`, each packed by one worker.
                let out = unsafe {
                    std::slice::from_raw_parts_mut(data.get().add(panel * panel_bytes), panel_bytes)
                };
                for lane in 0..2 * lanes {
                    if let Some(row) = row(panel, lane) {
                        with_blocks(block, PackLane { out, lanes: 2 * lanes, lane, row });
                    }
                }
            }
        };
        cpu.run(cpu.threads(), &[Step { units: panels, run: &pack }]);
        Ok(this)
    }

    /// Panels.
    pub(crate) fn panels(&self) -> usize {
        self.panels
    }
    /// Input features.
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }
    /// Blocks of an output feature.
    fn groups(&self) -> usize {
        self.inputs / self.block.elements()
    }
    /// Bytes of one block of every lane.
    fn group_bytes(&self) -> usize {
        2 * self.lanes * group_block_bytes(self.block)
    }
    fn panel_bytes(&self) -> usize {
        self.groups() * self.group_bytes()
    }
    /// Floating-point operations of `m` rows.
    pub(crate) fn flops(&self, m: usize) -> f64 {
        2.0 * m as f64 * (self.panels * 2 * self.lanes) as f64 * self.inputs as f64
    }
    /// All bytes of weights.
    pub(crate) fn bytes(&self) -> usize {
        self.data.bytes()
    }
    /// All bytes, those of biases among them.
    pub(crate) fn bytes_with_biases(&self) -> usize {
        self.data.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }
    /// `2 · LANES` biases per panel.
    pub(crate) fn bias(&self) -> Option<*const f32> {
        self.bias.as_ref().map(|b| b.as_ptr().cast())
    }
    fn panel(&self, panel: usize) -> Weights {
        // SAFETY: the caller's panel is one of these, so both ends are inside the buffer.
        let (start, end) = unsafe {
            (self.data.as_ptr().add(panel * self.panel_bytes()), {
                self.data.as_ptr().add(self.data.bytes())
            })
        };
        Weights { block: self.block, start, end, groups: self.groups() }
    }

    /// The type of the blocks.
    pub(crate) fn block(&self) -> BlockType {
        self.block
    }

    /// What digits of inputs must know of the weights: their offset, and whether the halves of a run
    /// have scales (and minima) of their own.
    pub(crate) fn offset_and_halves(&self) -> (u32, bool) {
        struct Of;
        impl WithBlocks for Of {
            type Output = (u32, bool);
            fn run<B: Blocks>(self) -> (u32, bool) {
                (B::OFFSET, B::SPANS == 2)
            }
        }
        with_blocks(self.block, Of)
    }
}

/// The blocks of one panel.
#[derive(Clone, Copy)]
struct Weights {
    block: BlockType,
    start: *const u8,
    /// The end of all weights, where prefetching stops.
    end: *const u8,
    groups: usize,
}

/// Refuses quantised weights that there are no kernels for, saying what would be computed: they are decoded.
///
/// # Errors
/// [`Error::Unsupported`], which says what there are kernels for.
pub fn expect_quantized(op: Op, dtype: DType, kind: QuantizedType) -> Result<()> {
    let what = || format!("computing {op} of {dtype} with {kind} weights");
    computed_block(kind).map(drop).map_err(|why| Error::Unsupported { what: what(), why })
}

/// The block type, if there are kernels for it, or why not.
fn computed_block(kind: QuantizedType) -> std::result::Result<BlockType, String> {
    kind.block().filter(|_| quantized_types().contains(&kind)).ok_or_else(|| {
        let names: Vec<&str> = quantized_types().iter().map(|t| t.name()).collect();
        format!("the CPU has kernels for {}", names.join(", "))
    })
}

/// Copies the blocks of one output feature to its lane of every group.
struct PackLane<'a> {
    out: &'a mut [u8],
    lanes: usize,
    lane: usize,
    row: &'a [u8],
}

impl WithBlocks for PackLane<'_> {
    type Output = ();

    fn run<B: Blocks>(self) {
        let Self { out, lanes, lane, row } = self;
        let groups = out.chunks_exact_mut(lanes * B::BYTES);
        for (group, b) in groups.zip(row.chunks_exact(B::TYPE.bytes())) {
            let (head, words) = group.split_at_mut(2 * lanes * B::HALVES);
            for (i, values) in head.chunks_exact_mut(2 * lanes).enumerate() {
                values[2 * lane..][..2].copy_from_slice(&B::file_half(b, i).to_le_bytes());
            }
            let mut words = words.chunks_exact_mut(4 * lanes);
            B::file_words(b, &mut |w| {
                if let Some(word) = words.next() {
                    word[4 * lane..][..4].copy_from_slice(&w.to_le_bytes());
                }
            });
        }
    }
}

#[cfg(test)]
mod tests;
