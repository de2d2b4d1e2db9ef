//! What the choice of cuBLASLt's algorithm for a linear map depends on.

use std::fmt;

use swiglu_core::{DType, Element, Orientation};

use super::api::Transpose;
use super::gemm::Gemm;
use super::proposals::FIXED_ALIGNMENT;
use super::{By, LinearWeights, Product};
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};

/// What the choice of an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Of x and W.
    pub(super) dtype: DType,
    /// Of y and the bias: cuBLASLt takes a bias to be of the type of its D.
    pub(super) out: DType,
    /// Elements between two rows of x, W and y.
    pub(super) strides: [usize; 3],
    pub(super) transpose: Transpose,
    pub(super) product: Product,
    pub(super) bias: bool,
    /// Bytes of which the addresses are multiples: W, x, y read, y written (and bias).
    pub(super) alignments: [u32; 4],
}

impl Key {
    pub(super) fn of<T: Element, Y: Element>(
        x: &DeviceMatrixRef<'_, T>,
        w: &LinearWeights,
        y: &DeviceMatrixMut<'_, Y>,
        product: Product,
    ) -> Self {
        let m = if product.transposed { x.cols() } else { x.rows() };
        let (n, k) = (w.out_features, w.in_features);
        let transpose = match w.orientation {
            Orientation::OutIn => Transpose::Yes,
            Orientation::InOut => Transpose::No,
        };
        let [w_rows, w_cols] = if transpose == Transpose::Yes { [n, k] } else { [k, n] };
        // A single row has no stride, and may be said to have any. Where the algorithm is one for every number of rows, it
        // follows the stride of these.
        let fixed = product.by == By::Fixed;
        let any = |stride, cols| !fixed || stride < cols;
        let stride =
            |rows, cols, stride| if rows == 1 && any(stride, cols) { cols } else { stride };
        let written = y.device_ptr();
        let strides = [
            stride(x.rows(), x.cols(), x.row_stride()),
            stride(w_rows, w_cols, w.row_stride),
            stride(m, n, y.row_stride()),
        ];
        let of_rows = |address: u64, row_bytes: usize| match fixed {
            true => alignment(address | row_bytes as u64).min(FIXED_ALIGNMENT),
            false => alignment(address),
        };
        let (of_x, of_y) = (strides[0] * size_of::<T>(), strides[2] * size_of::<Y>());
        Self {
            m,
            n,
            k,
            dtype: T::DTYPE,
            out: Y::DTYPE,
            strides,
            transpose,
            product,
            bias: w.bias.is_some(),
            alignments: [
                alignment(w.ptr),
                of_rows(x.device_ptr(), of_x),
                of_rows(written, of_y),
                // The epilogue reads the bias as it writes D.
                of_rows(written | w.bias.unwrap_or(0), of_y),
            ],
        }
    }
}

impl Key {
    /// What is measured of algorithms for it; nothing with a bias, or of f32.
    pub(super) fn gemm(&self) -> Option<Gemm> {
        let Self { m, k, n, dtype, out, product: Product { transposed, accumulate, .. }, .. } =
            *self;
        let weights = match self.transpose {
            Transpose::Yes => Orientation::OutIn,
            Transpose::No => Orientation::InOut,
        };
        let gemm = Gemm { m, k, n, transposed, weights, accumulate, dtype, out };
        (!self.bias && dtype != DType::F32).then_some(gemm)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, w, y] = self.strides;
        write!(
            f,
            "a linear map {}×{}×{} of {} to {} (row strides {x}, {w}, {y}; alignments {:?})",
            self.m, self.k, self.n, self.dtype, self.out, self.alignments
        )
    }
}

/// The largest power of two up to 256 that divides an address. (Strides need no such number:
/// cuBLASLt sees them in its layouts.)
pub(super) fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}
