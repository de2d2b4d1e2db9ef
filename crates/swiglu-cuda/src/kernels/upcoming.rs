//! What a kernel brings to the second-level cache for the one after it: `device/sm90_skinny_gated_gemm.cu`.

use swiglu_core::DType;

use super::elementwise::signed;
use super::gated_gemm::counted;
use crate::lt::LinearWeights;

/// Weights that the next grid reads first: so many bytes of each row. By default none.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Upcoming {
    data: u64,
    row_bytes: i64,
    rows: i32,
    bytes: i32,
}

/// The part of the second-level cache that weights may take which are not read yet. An H200's memory gives a quarter of
/// it in 3 µs, which is what is expected to pass between two grids.
const UPCOMING_SHARE: usize = 4;

impl Upcoming {
    /// As many bytes of each row of `[out, in]` weights as that part of a cache of so many has room for.
    pub(crate) fn of(weights: &LinearWeights, dtype: DType, cache: usize) -> Self {
        let LinearWeights { ptr, in_features, out_features: rows, row_stride, .. } = *weights;
        let row = (in_features * dtype.size()).next_multiple_of(16);
        let room = cache / UPCOMING_SHARE / rows.max(1);
        // Whole lines, where there are not all of them.
        let bytes = if row <= room { row } else { room / 128 * 128 };
        if bytes == 0 {
            return Self::default();
        }
        let row_bytes = signed(row_stride * dtype.size());
        Self { data: ptr, row_bytes, rows: counted(rows), bytes: counted(bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swiglu_core::Orientation;

    #[test]
    fn what_is_upcoming_fits_into_a_part_of_the_cache() {
        let weights = |in_features, out_features| LinearWeights {
            ptr: 256,
            orientation: Orientation::OutIn,
            in_features,
            out_features,
            row_stride: in_features + 8,
            bias: None,
        };
        let of = |[k, n]: [usize; 2], cache| {
            let next = Upcoming::of(&weights(k, n), DType::Bf16, cache);
            (next.rows, next.bytes)
        };
        // All of it, whole units of 16 bytes; or the first whole lines of every row.
        assert_eq!(of([4864, 896], 50 << 20), (896, 9728));
        assert_eq!(of([5, 3], 50 << 20), (3, 16));
        assert_eq!(of([14_336, 4096], 50 << 20), (4096, 3200));
        // A cache that is not known or too small, and nothing.
        for none in [of([4864, 896], 0), of([4864, 896], 4 * 896 * 127), of([0, 8], 1 << 20)] {
            assert_eq!(none, (0, 0));
        }
    }
}
