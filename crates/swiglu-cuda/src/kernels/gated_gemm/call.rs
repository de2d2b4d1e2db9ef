//! One launch of a fused gated GEMM kernel: `device/lib/gated_gemm.cuh`.

use std::fmt;

use swiglu_core::{Orientation, Problem};

use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{Define, define};
use crate::kernels::elementwise::Tensor;
use crate::kernels::gate::{Formula, GateCode};
use crate::kernels::raster;
use crate::kernels::tensor_map::{Boxes, LayerMaps, PANEL, TensorMap, addressable, panel};
use crate::kernels::weights::{Bias, Biases, Weights, weights_lie};

/// What a tile is fitted to, where a kernel fits it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// M.
    pub(crate) tokens: usize,
    /// H.
    pub(crate) features: usize,
    /// Of the weights, as they lie in device memory.
    pub(crate) orientation: Orientation,
    pub(crate) multiprocessors: usize,
}

impl Shape {
    /// That of a problem.
    pub(crate) fn of(problem: &Problem, multiprocessors: usize) -> Self {
        let orientation = weights_lie(problem);
        let (tokens, features) = (problem.m, problem.intermediate);
        Self { tokens, features, orientation, multiprocessors }
    }

    /// So many features for one SM.
    pub(in crate::kernels) fn even(features: usize, orientation: Orientation) -> Self {
        Self { tokens: 1, features, orientation, multiprocessors: 1 }
    }
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) code: GateCode,
    pub(crate) formula: Formula,
    /// M.
    pub(crate) m: usize,
    pub(crate) x: Tensor,
    pub(crate) out: Tensor,
    pub(crate) weights: Weights,
    /// Where the pre-activations of gate and up go, if they are to be stored.
    pub(crate) saved: Option<[Tensor; 2]>,
    /// Those of the layer.
    pub(crate) maps: &'a LayerMaps,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) struct Extents {
    m: i32,
    features: i32,
    k: i32,
    raster_rows: i32,
}

impl Extents {
    /// Tokens, features and k, and row tiles that share a column of weight tiles.
    pub(in crate::kernels) fn new(extents: [usize; 3], raster_rows: usize) -> Self {
        let ([m, features, k], raster_rows) = (extents.map(counted), counted(raster_rows));
        Self { m, features, k, raster_rows }
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) struct Epilogue {
    h: u64,
    h_stride: i64,
    gate_bias: u64,
    up_bias: u64,
    gate: u64,
    up: u64,
    gate_stride: i64,
    up_stride: i64,
    formula: Formula,
}

/// What kernels count with. [`check_call`](super::Kernel::check_call) has seen that it fits.
pub(in crate::kernels) fn counted(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl Call<'_> {
    /// The extents for tiles of this size, of which so many are computed together.
    pub(in crate::kernels) fn extents(
        &self,
        cuda: &Cuda,
        tile: [usize; 2],
        together: u32,
    ) -> Extents {
        let rows = self.m.div_ceil(tile[0]);
        let row_bytes = tile[0].min(self.m) * self.weights.hidden * self.code.dtype().size();
        let cache = cuda.facts().l2_bytes;
        let extents = [self.m, self.weights.intermediate, self.weights.hidden];
        Extents::new(extents, raster::rows(tile, rows, together as usize, row_bytes, cache))
    }

    pub(in crate::kernels) fn epilogue(&self) -> Epilogue {
        let ([gate_bias, up_bias], _) = Biases::of(self.weights.biases);
        let (h, h_stride, formula) = (self.out.data, self.out.stride, self.formula);
        let [gate, up] = self.saved.unwrap_or([Tensor::new(0, 0); 2]);
        let (gate_stride, up_stride) = (gate.stride, up.stride);
        let (gate, up) = (gate.data, up.data);
        Epilogue { h, h_stride, gate_bias, up_bias, gate, up, gate_stride, up_stride, formula }
    }

    pub(in crate::kernels) fn layout(&self) -> Layout {
        Layout {
            orientation: self.weights.orientation,
            bias: Biases::of(self.weights.biases).1,
            saves: self.saved.is_some(),
        }
    }

    /// x in boxes of `tile_m` rows, and of the rows that are left below the last whole tile: rows that do not exist
    /// cost TMA more time than others. A map that no tile needs is the other one.
    pub(in crate::kernels) fn x_maps(&self, cuda: &Cuda, tile_m: usize) -> Result<[TensorMap; 2]> {
        let rows =
            |rows: usize| self.operand_map(cuda, self.x, self.weights.hidden, [rows as u32, PANEL]);
        let left = (self.m % tile_m).next_multiple_of(8);
        Ok(match (self.m >= tile_m, left > 0) {
            (true, true) => [rows(tile_m)?, rows(left)?],
            (true, false) => [rows(tile_m)?; 2],
            (false, _) => [rows(left)?; 2],
        })
    }

    /// A matrix of H columns in boxes of these rows and columns.
    pub(in crate::kernels) fn result_map(
        &self,
        cuda: &Cuda,
        to: Tensor,
        extent: [u32; 2],
    ) -> Result<TensorMap> {
        self.operand_map(cuda, to, self.weights.intermediate, extent)
    }

    fn operand_map(
        &self,
        cuda: &Cuda,
        matrix: Tensor,
        cols: usize,
        [box_rows, box_cols]: [u32; 2],
    ) -> Result<TensorMap> {
        let dtype = self.code.dtype();
        let boxes = Boxes { dtype, matrix, rows: self.m, cols, box_rows, box_cols };
        self.maps.operands.get(boxes, || TensorMap::encode(cuda.driver(), &boxes))
    }

    /// Gate and up, in boxes of `tile_h` features or, `[in, out]`, of `tile_k` input features and a panel of
    /// `tile_h`.
    pub(in crate::kernels) fn weight_maps(
        &self,
        cuda: &Cuda,
        tile_h: usize,
        tile_k: usize,
    ) -> Result<[TensorMap; 2]> {
        let (w, dtype) = (&self.weights, self.code.dtype());
        let [rows, cols] = w.orientation.shape(w.intermediate, w.hidden);
        let [box_rows, box_cols] = match w.orientation {
            Orientation::OutIn => [tile_h as u32, PANEL],
            Orientation::InOut => [tile_k as u32, panel(tile_h)],
        };
        let map = |data| {
            let matrix = Tensor::new(data, w.row_stride);
            let boxes = Boxes { dtype, matrix, rows, cols, box_rows, box_cols };
            self.maps.weights.get(boxes, || TensorMap::encode(cuda.driver(), &boxes))
        };
        Ok([map(w.gate)?, map(w.up)?])
    }

    pub(in crate::kernels) fn shape(&self, cuda: &Cuda) -> Shape {
        Shape {
            tokens: self.m,
            features: self.weights.intermediate,
            orientation: self.weights.orientation,
            multiprocessors: cuda.facts().sm_count as usize,
        }
    }

    pub(in crate::kernels) fn tiles(&self, [rows, columns]: [usize; 2]) -> usize {
        self.m.div_ceil(rows).saturating_mul(self.weights.intermediate.div_ceil(columns))
    }
}

/// How the operands of a launch lie, as far as it is compiled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) orientation: Orientation,
    pub(crate) bias: Bias,
    /// Whether the pre-activations are stored too.
    pub(crate) saves: bool,
}

impl Layout {
    /// ORIENTATION, BIAS and SAVE.
    pub(in crate::kernels) fn defines(self) -> [Define; 3] {
        [
            define("ORIENTATION", self.orientation == Orientation::InOut),
            define("BIAS", self.bias as u8),
            define("SAVE", self.saves),
        ]
    }
}

impl fmt::Display for Layout {
    /// `out-in bias save`; biases of a caller are `element-bias`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.orientation.fmt(f)?;
        f.write_str(["", " bias", " element-bias"][self.bias as usize])?;
        f.write_str(if self.saves { " save" } else { "" })
    }
}

/// Whether TMA can address x and the weights; the output may be anything.
pub(super) fn check_tma(call: &Call<'_>) -> Result<(), String> {
    let w = &call.weights;
    let weights = |data| Tensor::new(data, w.row_stride);
    for (what, tensor, rows) in [
        ("x", call.x, call.m),
        ("the gate weight", weights(w.gate), 2),
        ("the up weight", weights(w.up), 2),
    ] {
        if !addressable(tensor, rows) {
            return Err(format!(
                "TMA needs {what} at a multiple of 16 bytes with rows a multiple of 16 \
                 bytes apart, given address {:#x} and rows {} bytes apart",
                tensor.data,
                tensor.stride * 2
            ));
        }
    }
    Ok(())
}
