//! Weights and biases in device memory, as kernels read them.

use swiglu_core::{Op, Orientation, Problem};

/// How a layer's weights lie in device memory: those of a block are packed `[out, in]`, whichever way they came.
pub(crate) fn weights_lie(problem: &Problem) -> Orientation {
    match problem.op {
        Op::Mlp => Orientation::OutIn,
        _ => problem.layout.orientation,
    }
}

/// Gate and up weights in device memory, of the same orientation and row stride.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Weights {
    pub(crate) gate: u64,
    pub(crate) up: u64,
    /// Elements from row to row.
    pub(crate) row_stride: usize,
    pub(crate) orientation: Orientation,
    /// K.
    pub(crate) hidden: usize,
    /// H.
    pub(crate) intermediate: usize,
    pub(crate) biases: Option<Biases>,
}

/// Addresses of the gate's and the up's biases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Biases {
    /// f32, with [`BIAS_PADDING`] zeros behind each.
    Floats([u64; 2]),
    /// H values of T each, a caller's; 0 where there is none.
    Elements([u64; 2]),
}

impl Biases {
    /// The two addresses, zeros without biases, and what lies there.
    pub(super) fn of(biases: Option<Self>) -> ([u64; 2], Bias) {
        match biases {
            None => ([0; 2], Bias::None),
            Some(Biases::Floats(at)) => (at, Bias::Floats),
            Some(Biases::Elements(at)) => (at, Bias::Elements),
        }
    }
}

/// What biases are, as far as it is compiled in: BIAS of `gated_gemm.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    None = 0,
    Floats = 1,
    Elements = 2,
}

/// Kernels read biases for whole tiles: the most columns that a tile has beyond the last, and one more.
pub(crate) const BIAS_PADDING: usize = 128;
