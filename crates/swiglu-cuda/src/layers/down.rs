//! The down projection y = h·Wd + bd: by cuBLASLt, or, behind the gated layer of few tokens, by the same
//! kernel without its gate, which asks for the weights while that layer ends.

use std::sync::Arc;

use swiglu_core::{Activation, Element, MatrixRef, Numerics, Orientation};

use super::plan::Choice;
use super::weights::DownBuffer;
use crate::activation::tensor;
use crate::context::Cuda;
use crate::error::Result;
use crate::kernels::gate::{Formula, GateCode};
use crate::kernels::gated_gemm::{Call, Kernel, Layout, Weights};
use crate::kernels::sm90_skinny_gated_gemm::{Tiling, launch_linear, prepare_linear};
use crate::kernels::tensor_map::LayerMaps;
use crate::lt::{LinearWeights, Lt};
use crate::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::stream::Stream;

/// The weight and bias of a block's second half.
#[derive(Debug)]
pub(super) struct Down<T> {
    weights: DownBuffer<T>,
    lt: Arc<Lt>,
    maps: LayerMaps,
    multiprocessors: usize,
}

impl<T: Element> Down<T> {
    pub(super) fn new(
        cuda: &Cuda,
        weight: MatrixRef<'_, T>,
        orientation: Orientation,
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        let lt = cuda.lt()?;
        let weights = DownBuffer::new(&cuda.stream(), weight, orientation, bias)?;
        let multiprocessors = cuda.facts().sm_count as usize;
        Ok(Self { weights, lt, maps: LayerMaps::new(), multiprocessors })
    }

    pub(super) fn linear(&self) -> LinearWeights {
        self.weights.linear()
    }

    /// The tiles in which `m` rows of h are multiplied behind what computes them; none: cuBLASLt.
    fn tiles(&self, behind: Choice, m: usize) -> Option<Tiling> {
        let w = self.linear();
        match behind {
            Choice::Fused(Kernel::Sm90Skinny(_)) => {
                Tiling::of_linear(m, [w.in_features, w.out_features], self.multiprocessors)
            }
            _ => None,
        }
    }

    /// An activation has no part in it: one module for all of them.
    fn code() -> GateCode {
        GateCode::new(&Activation::SWIGLU, Numerics::default_for(T::DTYPE), T::DTYPE)
    }

    /// Compiles what `m` tokens need.
    pub(super) fn prepare(&self, cuda: &Cuda, behind: Choice, m: usize) -> Result<()> {
        let Some(tiling) = self.tiles(behind, m) else { return Ok(()) };
        let bias = self.linear().bias.is_some();
        let layout = Layout { orientation: Orientation::OutIn, bias, saves: false };
        prepare_linear(cuda, tiling, Self::code(), layout)
    }

    /// Enqueues it behind `behind`, which writes h.
    ///
    /// # Safety
    /// `scratch` has room for cuBLASLt's, and h begins at a multiple of 16 bytes, as do its rows.
    pub(super) unsafe fn enqueue(
        &self,
        stream: &Stream,
        behind: Choice,
        h: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        scratch: u64,
    ) -> Result<()> {
        let w = self.linear();
        let Some(tiling) = self.tiles(behind, h.rows()) else {
            // SAFETY: as the caller says.
            return unsafe { self.lt.launch(stream, h, &w, out, scratch) };
        };
        let call = Call {
            code: Self::code(),
            formula: Formula::new(&Activation::SWIGLU),
            m: h.rows(),
            x: tensor(&h),
            out: tensor(&out.as_ref()),
            weights: Weights {
                gate: w.ptr,
                up: w.ptr,
                row_stride: w.row_stride,
                orientation: w.orientation,
                hidden: w.in_features,
                intermediate: w.out_features,
                biases: w.bias.map(|bias| [bias; 2]),
            },
            saved: None,
            maps: &self.maps,
        };
        // SAFETY: h and out are views of this device, out is borrowed mutably, and the weights live as long as
        // `self` and are written by no kernel.
        unsafe { launch_linear(stream, tiling, &call) }
    }
}
