//! Sums over the rows of a matrix: gradients of biases.

use std::ops::Range;

use swiglu_core::{Accumulate, DType, Element, F32Lanes, MatrixRef, RowScale};

use crate::compiled;
use crate::cpu::Cpu;
use crate::epilogue::{Factors, Rows};
use crate::panels::SendPtr;
use crate::simd::{Kernel, Simd};
use crate::team::Step;

/// Columns of a unit of work: of eight vectors of the widest façade.
const SEGMENT: usize = 128;

/// Writes the sum of each column to `out`, or adds it; each is one accumulator over the rows in order, times their factors.
pub(crate) fn sum_columns<T: Element>(
    cpu: &Cpu,
    (m, scale): (MatrixRef<'_, T>, RowScale<'_>),
    out: &mut [f32],
    accumulate: Accumulate,
) {
    let rows =
        Rows { first: m.as_slice().as_ptr().cast_mut(), stride: m.row_stride(), cols: m.cols() };
    let (first, out) = (SendPtr(rows.first), SendPtr(out.as_mut_ptr()));
    let (count, cols) = (m.rows(), m.cols());
    let run = |segments: Range<usize>, _: usize| {
        let out = Rows { first: out.get(), stride: 0, cols };
        let rows = Rows { first: first.get(), stride: rows.stride, cols };
        let add = accumulate == Accumulate::Add;
        // SAFETY: the instruction set was checked when the device was made; segments are disjoint columns, of which `out`
        // has one value each.
        unsafe {
            let scale = (scale != RowScale::None).then(|| Factors::of(scale));
            let sums = ColumnSums { rows, count, scale, out, add, segments };
            compiled::column_sums(cpu.isa(), sums);
        }
    };
    let bytes = (count * cols * size_of::<T>()) as f64;
    cpu.run_work((0.0, bytes), &[Step { units: cols.div_ceil(SEGMENT), run: &run }]);
}

/// Some segments of columns.
pub(crate) struct ColumnSums<T> {
    /// Read only.
    rows: Rows<T>,
    count: usize,
    scale: Option<Factors>,
    out: Rows<f32>,
    add: bool,
    segments: Range<usize>,
}

impl<T: Element> Kernel for ColumnSums<T> {
    type Output = ();
    const USES_DOTS: bool = matches!(T::DTYPE, DType::Bf16);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let end = (self.segments.end * SEGMENT).min(self.rows.cols);
        for first in (self.segments.start * SEGMENT..end).step_by(8 * S::LANES) {
            let mut sums = [S::V::splat(0.0); 8];
            // SAFETY: the rows are valid, and columns past the last are neither read nor written.
            unsafe {
                for r in 0..self.count {
                    let factor = self.scale.map(|scale| S::V::splat(scale.of_row(r)));
                    for (v, sum) in sums.iter_mut().enumerate() {
                        let value = self.rows.read::<S>(r, first + v * S::LANES);
                        *sum = sum.add(factor.map_or(value, |factor| value.mul(factor)));
                    }
                }
                for (v, sum) in sums.into_iter().enumerate() {
                    let col = first + v * S::LANES;
                    let sum = if self.add { sum.add(self.out.read::<S>(0, col)) } else { sum };
                    self.out.write::<S>(0, col, sum);
                }
            }
        }
    }
}
