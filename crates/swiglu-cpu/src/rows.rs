//! Input rows as the matrix kernels read them: block after block, each `[step][row]`, every step a `f32`
//! or a pair of bfloat16. Rows are packed once per call and used by every panel.

use std::ops::Range;

use swiglu_core::{DType, Element, F32Lanes, MatrixRef};

use crate::gemm::Blocks;
use crate::isa::Isa;
use crate::panels::{SendPtr, features_per_step};
use crate::quant::{PAIRS, RUN};
use crate::simd::{self, INTEGER_UNIT, Kernel, Simd};

/// What the steps of a row are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Steps {
    /// As in dense weights of the type: a `f32`, or a pair of neighbouring bfloat16.
    Dense,
    /// Each a `f32`, also of bfloat16.
    Wide,
    /// Of bfloat16 in whole runs: inputs 4i and 4i + 2, then 4i + 1 and 4i + 3, as
    /// [`Simd::bytes_to_bf16`] pairs weights; with `sums`, 1 or 2, every run, or every half of one, ends with
    /// the sum of its inputs as a `f32`, times [`INTEGER_UNIT`].
    Runs { sums: usize },
}

impl Steps {
    /// Rows of the largest register tile of such steps.
    pub(crate) fn tile_rows(self, isa: Isa, dtype: DType) -> usize {
        match (self, dtype) {
            (Steps::Dense, DType::Bf16) => simd::pair_rows(isa),
            _ => simd::tile_rows(isa),
        }
    }

    /// Steps of a row of `inputs`.
    pub(crate) fn count(self, dtype: DType, inputs: usize) -> usize {
        match self {
            Steps::Dense => inputs.div_ceil(features_per_step(dtype)),
            Steps::Wide => inputs,
            Steps::Runs { sums } => inputs / RUN * (PAIRS + sums),
        }
    }
}

/// What is packed as rows: those of a matrix, or its columns, where products are summed over its rows.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a, T> {
    Rows(MatrixRef<'a, T>),
    Columns(MatrixRef<'a, T>),
}

impl<T: Copy> Source<'_, T> {
    /// Rows to pack.
    pub(crate) fn rows(self) -> usize {
        match self {
            Source::Rows(m) => m.rows(),
            Source::Columns(m) => m.cols(),
        }
    }

    /// Values of each.
    pub(crate) fn inputs(self) -> usize {
        match self {
            Source::Rows(m) => m.cols(),
            Source::Columns(m) => m.rows(),
        }
    }
}

impl<'a, T> From<MatrixRef<'a, T>> for Source<'a, T> {
    fn from(m: MatrixRef<'a, T>) -> Self {
        Source::Rows(m)
    }
}

/// Rows `first ..` of a matrix, with the packed buffer they go to.
#[derive(Clone, Copy)]
pub(crate) struct PackRows<'a, T> {
    pub(crate) x: Source<'a, T>,
    pub(crate) first: usize,
    pub(crate) blocks: Blocks,
    pub(crate) steps: Steps,
    pub(crate) out: SendPtr<u32>,
}

/// A range of blocks to pack.
pub(crate) struct PackBlocks<'a, T>(pub(crate) PackRows<'a, T>, pub(crate) Range<usize>);

impl<T: Element> Kernel for PackBlocks<'_, T> {
    type Output = ();
    const USES_DOTS: bool = matches!(T::DTYPE, DType::Bf16);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PackBlocks(task, range) = self;
        let steps = task.steps.count(T::DTYPE, task.x.inputs());
        for block in range {
            let rows = task.blocks.range(block);
            // SAFETY: the buffer holds `m · steps` values; a block owns its part of it.
            unsafe {
                let out = task.out.get().add(rows.start * steps);
                match task.x {
                    Source::Rows(x) => {
                        for (lane, r) in rows.clone().enumerate() {
                            let row = x.row(task.first + r);
                            pack_row::<S, T>(row, task.steps, out.add(lane), rows.len());
                        }
                    }
                    Source::Columns(x) => {
                        let columns = task.first + rows.start..task.first + rows.end;
                        pack_columns::<S, T>(x, columns, out);
                    }
                }
            }
        }
    }
}

/// Writes the dense steps of some columns, side by side.
#[inline(always)]
unsafe fn pack_columns<S: Simd, T: Element>(
    x: MatrixRef<'_, T>,
    columns: Range<usize>,
    mut out: *mut u32,
) {
    let count = columns.len();
    if T::DTYPE == DType::Bf16 {
        let none = [0u16; 64];
        for pair in 0..x.rows().div_ceil(2) {
            let bits = |row: usize| match row < x.rows() {
                true => x.row(row)[columns.clone()].as_ptr().cast::<u16>(),
                false => none.as_ptr(),
            };
            let (low, high) = (bits(2 * pair), bits(2 * pair + 1));
            // SAFETY: rows have these columns, of which a block has fewer than 64; `out` has a value for each.
            unsafe {
                for c in 0..count {
                    *out.add(c) = u32::from(*low.add(c)) | u32::from(*high.add(c)) << 16;
                }
                out = out.add(count);
            }
        }
        return;
    }
    for row in 0..x.rows() {
        let row = x.row(row);
        let mut done = 0;
        // SAFETY: vectors end inside the row; what is written of them, in the columns; `out` has a value for each.
        unsafe {
            while done < count && columns.start + done + S::LANES <= row.len() {
                let mut lanes = [0.0f32; 64];
                let from = row.as_ptr().add(columns.start + done);
                S::store_f32(lanes.as_mut_ptr(), S::load::<T>(from));
                let n = S::LANES.min(count - done);
                out.add(done).copy_from_nonoverlapping(lanes.as_ptr().cast(), n);
                done += n;
            }
            for c in done..count {
                *out.add(c) = row[columns.start + c].to_f32().to_bits();
            }
            out = out.add(count);
        }
    }
}

/// Writes the steps of `row` to `out`, `out + stride` and so on.
#[inline(always)]
unsafe fn pack_row<S: Simd, T: Element>(row: &[T], steps: Steps, out: *mut u32, stride: usize) {
    match (T::DTYPE, steps) {
        (DType::Bf16, Steps::Runs { sums }) => {
            let run_out = (PAIRS + sums) * stride;
            for (i, run) in row.as_chunks::<RUN>().0.iter().enumerate() {
                // SAFETY: the caller's, for every run.
                unsafe { pack_run::<S>(run.as_ptr().cast(), sums, out.add(i * run_out), stride) };
            }
        }
        (DType::Bf16, Steps::Dense) => {
            let bits = row.as_ptr().cast::<u16>();
            // SAFETY: `bits` holds the row, two elements a step; `out` one value per step.
            unsafe {
                for s in 0..row.len() / 2 {
                    *out.add(s * stride) = bits.add(2 * s).cast::<u32>().read_unaligned().to_le();
                }
                if row.len() % 2 == 1 {
                    *out.add(row.len() / 2 * stride) = u32::from(*bits.add(row.len() - 1));
                }
            }
        }
        _ => {
            let whole = row.len() / S::LANES * S::LANES;
            let mut lanes = [0.0f32; 64];
            // SAFETY: vectors end inside the row; `out` holds one value per element.
            unsafe {
                for k in (0..whole).step_by(S::LANES) {
                    S::store_f32(lanes.as_mut_ptr(), S::load::<T>(row.as_ptr().add(k)));
                    for (i, v) in lanes[..S::LANES].iter().enumerate() {
                        *out.add((k + i) * stride) = v.to_bits();
                    }
                }
                for (k, v) in row.iter().enumerate().skip(whole) {
                    *out.add(k * stride) = v.to_f32().to_bits();
                }
            }
        }
    }
}

/// Writes a run of bfloat16 as [`Steps::Runs`].
#[inline(always)]
unsafe fn pack_run<S: Simd>(bits: *const u16, sums: usize, out: *mut u32, stride: usize) {
    let parts = sums.max(1);
    let (inputs, steps) = (RUN / parts, PAIRS / parts + usize::from(sums > 0));
    for part in 0..parts {
        // SAFETY: `bits` holds a run, four elements a quad; `out` its steps, those of each part and its sum.
        unsafe {
            let (bits, out) = (bits.add(part * inputs), out.add(part * steps * stride));
            for q in 0..inputs / 4 {
                let quad = bits.add(4 * q).cast::<[u16; 4]>().read_unaligned().map(u32::from);
                *out.add(2 * q * stride) = quad[0] | quad[2] << 16;
                *out.add((2 * q + 1) * stride) = quad[1] | quad[3] << 16;
            }
            if sums > 0 {
                *out.add((steps - 1) * stride) = sum_of::<S>(bits, inputs).to_bits();
            }
        }
    }
}

/// The sum of some inputs of a run, times [`INTEGER_UNIT`]: none overflows.
#[inline(always)]
unsafe fn sum_of<S: Simd>(bits: *const u16, inputs: usize) -> f32 {
    let (mut sum, mut lanes) = (S::V::splat(0.0), [0.0f32; 64]);
    // SAFETY: `bits` holds the inputs, a multiple of every vector; there is room for one.
    unsafe {
        for k in (0..inputs).step_by(S::LANES) {
            sum = sum.add(S::load_bf16(bits.add(k)).mul(S::V::splat(INTEGER_UNIT)));
        }
        S::store_f32(lanes.as_mut_ptr(), sum);
    }
    let mut n = S::LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
    }
    lanes[0]
}
