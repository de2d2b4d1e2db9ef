//! What the order of sums follows.

use swiglu_core::Numerics;

/// Whether the number of rows decides by which kernels, and so in which order, products are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The fastest of each number of rows.
    OfRows,
    /// One for every number, [`Numerics::batch_invariant`]: in tiles of vectors, one accumulator from a row's first
    /// product to its last ([`crate::gemm::SideBySide`]); AMX tiles wherever there are any; quantised weights in
    /// one way, see [`crate::quant::Way::of`].
    Common,
}

impl From<Numerics> for Order {
    fn from(numerics: Numerics) -> Self {
        if numerics.batch_invariant { Order::Common } else { Order::OfRows }
    }
}
