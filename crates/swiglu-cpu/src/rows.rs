//! Input rows as the matrix kernel reads them: block after block, each `[step][row]`, every step a
//! `f32` or, for weights of that type, a pair of bfloat16. Rows are packed once per call and used by every panel.

use std::ops::Range;

use swiglu_core::{DType, Element, MatrixRef};

use crate::gemm::Blocks;
use crate::panels::{SendPtr, features_per_step};
use crate::simd::{Kernel, Simd};

/// Rows `first ..` of a matrix, with the packed buffer they go to.
#[derive(Clone, Copy)]
pub(crate) struct PackRows<'a, T> {
    pub(crate) x: MatrixRef<'a, T>,
    pub(crate) first: usize,
    pub(crate) blocks: Blocks,
    /// Whether every step is one `f32`, also of bfloat16.
    pub(crate) wide: bool,
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
        let per_step = if task.wide { 1 } else { features_per_step(T::DTYPE) };
        let steps = task.x.cols().div_ceil(per_step);
        for block in range {
            let rows = task.blocks.range(block);
            for (lane, r) in rows.clone().enumerate() {
                // SAFETY: the buffer holds `m · steps` values; a block owns its part of it.
                unsafe {
                    let out = task.out.get().add(rows.start * steps + lane);
                    pack_row::<S, T>(task.x.row(task.first + r), task.wide, out, rows.len());
                }
            }
        }
    }
}

/// Writes the steps of `row` to `out`, `out + stride` and so on.
#[inline(always)]
unsafe fn pack_row<S: Simd, T: Element>(row: &[T], wide: bool, out: *mut u32, stride: usize) {
    match T::DTYPE {
        DType::Bf16 if !wide => {
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
