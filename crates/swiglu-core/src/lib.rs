//! Types and definitions shared by every backend of `swiglu`: problems, activations, numerics,
//! weight layouts, plans, errors, and the float64 oracle with the error bounds derived from it.
//!
//! Vocabulary: x `[M, K]` is the input, Wg and Wu the gate and up weights from K to H features,
//! h = act(x·Wg + bg, x·Wu + bu) the gated linear layer, y = h·Wd + bd the feed-forward block.
//! M counts tokens, K is the hidden and H the intermediate size.
//!
//! This crate does no I/O and has no unsafe code.

#![forbid(unsafe_code)]

mod activation;
pub mod bounds;
pub mod conformance;
mod dtype;
mod error;
pub mod gate;
mod gradients;
mod lanes;
mod layout;
mod matrix;
mod numerics;
pub mod oracle;
mod plan;
mod problem;
pub mod quant;
pub mod random;
mod rows;
mod scale;
mod setters;
mod strided;

pub use activation::{ACTIVATION_NAMES, Activation, GateFn};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use gradients::{GradientMut, GradientShapes, Gradients, GradientsMut, SavePolicy, Wanted};
pub use half::{bf16, f16};
pub use lanes::F32Lanes;
pub use layout::{
    Arrangement, GateUpMut, GateUpRef, GateUpWeights, Half, Orientation, OwnedGateUp, WeightLayout,
};
pub use matrix::{Matrix, MatrixMut, MatrixRef};
pub use numerics::{ExpMode, Numerics, Rounding};
pub use plan::{Path, Plan};
pub use problem::{Accumulate, GatedLinearParams, MlpParams, Op, Pass, Problem};
pub use quant::{
    BlockType, QuantizedGatedLinearParams, QuantizedMatrix, QuantizedMlpParams, QuantizedRef,
    QuantizedType, QuantizedTypes,
};
pub use rows::{Norm, NormKind, OwnedRowParams, RowParams, RowSteps, Sparsity};
pub use scale::RowScale;
pub use strided::{AdjacentRows, StridedRef};
