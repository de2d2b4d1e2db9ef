//! What the kernels share that compute dh = dy·Wdᵀ with the activation's derivative as its epilogue: from gate and up their
//! gradients, and h once more where the gradient of Wd is wanted.

use std::fmt;

use swiglu_core::{DType, Orientation, Problem};

use super::elementwise::Tensor;
use super::gate::{Formula, GateCode};
use super::gated_gemm::Form;
use super::obstacle::Obstacle;
use super::tensor_map::{LayerMaps, PANEL};
use super::{mma_dgated_gemm, mma_gemm, sm90_dgated_gemm};
use crate::device::arch::Arch;
use crate::device::error::Result;
use crate::device::lt::LinearWeights;
use crate::device::stream::Stream;

/// Factors of rows, with addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowFactors {
    /// M values of f32, or 0: they are 1.
    pub(crate) factors: u64,
    /// Where sums of h·dh go, M for each part of the columns ([`Kernel::columns_of_dots`]), or 0.
    pub(crate) dots: u64,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) code: GateCode,
    pub(crate) formula: Formula,
    /// M.
    pub(crate) m: usize,
    /// ∂L/∂y, `[M, K]`.
    pub(crate) out_grad: Tensor,
    /// Wd, from H to K features.
    pub(crate) down: LinearWeights,
    /// Gate and up, `[M, H]`.
    pub(crate) inputs: [Tensor; 2],
    /// Their gradients, which may lie where they do.
    pub(crate) grads: [Tensor; 2],
    /// Where h goes, if anywhere.
    pub(crate) h: Option<Tensor>,
    /// What dh and h are multiplied with.
    pub(crate) scale: Option<RowFactors>,
    /// Those of the layer.
    pub(crate) maps: &'a LayerMaps,
}

impl<'a> Call<'a> {
    /// A call as plans know it: dense matrices at whole addresses, and packed weights.
    pub(crate) fn dense(problem: &Problem, maps: &'a LayerMaps) -> Self {
        let Problem { m, hidden: k, intermediate: h, activation, numerics, dtype, .. } = *problem;
        let rows = |cols| Tensor::new(0, cols);
        let down = LinearWeights {
            ptr: 0,
            orientation: Orientation::OutIn,
            in_features: h,
            out_features: k,
            row_stride: h.next_multiple_of(16 / dtype.size()),
            bias: None,
        };
        Self {
            code: GateCode::new(&activation, numerics, dtype),
            formula: Formula::new(&activation),
            m,
            out_grad: rows(k),
            down,
            inputs: [rows(h); 2],
            grads: [rows(h); 2],
            h: Some(rows(h)),
            scale: None,
            maps,
        }
    }
}

/// A kernel with its tile: data, until it is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    /// Hopper's wgmma and TMA.
    Sm90(sm90_dgated_gemm::Config),
    /// Tensor cores of a warp, from sm_80.
    Mma(mma_gemm::Config),
}

impl Kernel {
    /// Those of every architecture, in every tile.
    pub(crate) fn portable() -> impl Iterator<Item = Kernel> {
        mma_gemm::Config::ALL.into_iter().map(Kernel::Mma)
    }

    /// Tile sizes and the like, by name.
    pub(crate) fn parameters(self) -> [(&'static str, usize); 4] {
        match self {
            Kernel::Sm90(config) => config.parameters(),
            Kernel::Mma(config) => {
                let [tile_m, tile_h] = config.wide_tile();
                let (stages, warps) = (config.stages(), config.warps());
                [("tile_m", tile_m), ("tile_h", tile_h), ("stages", stages), ("warps", warps)]
            }
        }
    }

    /// Columns that a sum of h·dh is over.
    pub(crate) fn columns_of_dots(self) -> usize {
        match self {
            Kernel::Sm90(_) => PANEL as usize,
            Kernel::Mma(config) => config.wide_tile()[1] / config.warps_along()[1],
        }
    }

    /// What its cost follows from: that of two matrices of weights with half as many columns each.
    pub(crate) fn form(self) -> Form {
        match self {
            Kernel::Sm90(config) => config.form(),
            Kernel::Mma(config) => config.form(),
        }
    }

    /// Whether it computes a block on an architecture, or why not: what can be said before there are addresses. `tf32`:
    /// whether f32 factors may be rounded.
    pub(crate) fn check(
        self,
        arch: Arch,
        dtype: DType,
        hidden: usize,
        tf32: bool,
    ) -> std::result::Result<(), Obstacle> {
        match self {
            Kernel::Sm90(_) if arch != Arch::Sm90a => Err(Obstacle::NoWgmma(arch)),
            Kernel::Sm90(_) if dtype == DType::F32 => Err(Obstacle::ElementType(dtype)),
            Kernel::Mma(_) if dtype == DType::F32 && !tf32 => Err(Obstacle::WouldRound),
            _ if hidden == 0 => Err(Obstacle::NothingToMultiply),
            _ => Ok(()),
        }
    }

    /// Whether these addresses, strides and extents can be launched, or why not.
    pub(crate) fn check_call(self, call: &Call<'_>) -> std::result::Result<(), String> {
        match self {
            Kernel::Sm90(_) => sm90_dgated_gemm::check_call(call),
            Kernel::Mma(config) => mma_dgated_gemm::check_call(config, call),
        }
    }

    /// Enqueues the gradients of gate and up, and h.
    ///
    /// # Safety
    /// The call's addresses are memory of the stream's device that stays valid until the kernel has run; what is written
    /// overlaps nothing else, but for gradients that lie exactly as gate and up do. Both checks have passed.
    pub(crate) unsafe fn launch(self, stream: &Stream, call: &Call<'_>) -> Result<()> {
        if call.m == 0 || call.down.in_features == 0 {
            return Ok(());
        }
        // SAFETY: as the caller says.
        unsafe {
            match self {
                Kernel::Sm90(config) => sm90_dgated_gemm::launch(stream, config, call),
                Kernel::Mma(config) => mma_dgated_gemm::launch(stream, config, call),
            }
        }
    }
}

impl fmt::Display for Kernel {
    /// `mma_dgated_gemm 128x128`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kernel::Sm90(config) => config.fmt(f),
            Kernel::Mma(config) => {
                let [rows, columns] = config.wide_tile();
                write!(f, "mma_dgated_gemm {rows}x{columns}")
            }
        }
    }
}

#[cfg(test)]
mod tests;
