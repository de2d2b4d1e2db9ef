//! Descriptors of matrices for TMA.

use std::ffi::c_void;

use crate::device::sys::{
    CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill as Fill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as Promotion,
    CUtensorMapSwizzle as Swizzle,
};
use swiglu_core::DType;

use super::elementwise::Tensor;
use crate::device::driver::{Driver, cu};
use crate::device::error::{CudaError, Result};
use crate::device::remembered::Remembered;

/// As `ptx::TensorMap`: 128 bytes, aligned to 64.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorMap([u64; 16]);

/// Maps that were encoded before: encoding takes the driver longer than a launch can spare. A map
/// follows from its boxes alone, so that one of memory that was given back is not wrong, only unused.
#[derive(Debug)]
pub(crate) struct LayerMaps {
    /// Weights, of gate and up in the heights of boxes that kernels have, at most ten in a layer: never forgotten.
    pub(super) weights: Remembered<Boxes, TensorMap, 20>,
    /// Inputs and outputs of recent calls. Boxes of few tokens are of every number of them.
    pub(super) operands: Remembered<Boxes, TensorMap, 36>,
}

impl LayerMaps {
    pub(crate) fn new() -> Self {
        Self { weights: Remembered::new(), operands: Remembered::new() }
    }
}

/// A `[rows, cols]` matrix of 16-bit elements, copied in boxes of `box_rows` rows of `box_cols` columns, which
/// are one row of the swizzle: 64 are 128 bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Boxes {
    pub(super) dtype: DType,
    pub(super) matrix: Tensor,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) box_rows: u32,
    pub(super) box_cols: u32,
}

/// Columns of a box that lie in a row of the widest swizzle.
pub(super) const PANEL: u32 = 64;

/// Columns of the boxes that a tile of so many is copied in: the widest that divide it.
pub(super) fn panel(columns: usize) -> u32 {
    match columns {
        _ if columns.is_multiple_of(64) => PANEL,
        _ if columns.is_multiple_of(32) => 32,
        _ => 16,
    }
}

/// Bytes that TMA's addresses and row strides are multiples of.
const ALIGNMENT: u64 = 16;

/// Whether TMA can address the matrix.
pub(crate) fn addressable(matrix: Tensor, rows: usize) -> bool {
    let stride = matrix.stride as u64 * 2;
    matrix.data.is_multiple_of(ALIGNMENT)
        && (rows <= 1 || stride.is_multiple_of(ALIGNMENT) && stride < 1 << 40)
}

/// Whether TMA can write a matrix of so many rows and columns of 16-bit elements. Loads
/// end with the last element, but stores write whole units of 16 bytes: where a row ends within one,
/// they would overwrite what lies behind it (seen on an H200).
pub(super) fn writable(matrix: Tensor, [rows, cols]: [usize; 2]) -> bool {
    addressable(matrix, rows) && (cols as u64 * 2).is_multiple_of(ALIGNMENT)
}

impl TensorMap {
    /// For a launch that does not read it.
    pub(super) const UNUSED: TensorMap = TensorMap([0; 16]);

    pub(super) fn encode(driver: &Driver, boxes: &Boxes) -> Result<Self> {
        /// What newer headers align the driver's type to.
        #[repr(align(128))]
        struct Aligned(TensorMap);
        let mut map = Aligned(TensorMap::UNUSED);
        let dtype = match boxes.dtype {
            DType::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::Bf16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            other => {
                return Err(CudaError::Unsupported {
                    what: format!("a tensor map of {other}"),
                    why: "kernels that use TMA read f16 and bf16".into(),
                });
            }
        };
        let swizzle = match boxes.box_cols {
            16 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let dims = [boxes.cols as u64, boxes.rows as u64];
        // The stride of a single row is never used, but has to be a valid one.
        let stride = if boxes.rows > 1 {
            boxes.matrix.stride as u64 * 2
        } else {
            (dims[0] * 2).next_multiple_of(ALIGNMENT)
        };
        let (strides, extent, steps) = ([stride], [boxes.box_cols, boxes.box_rows], [1, 1]);
        // SAFETY: 128 aligned bytes for the result; two dimensions and one stride, as rank 2 has.
        unsafe {
            cu!(
                driver,
                cuTensorMapEncodeTiled(
                    (&raw mut map.0).cast::<c_void>(),
                    dtype,
                    2,
                    boxes.matrix.data as *mut c_void,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    extent.as_ptr(),
                    steps.as_ptr(),
                    Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    swizzle,
                    Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            )
        }?;
        Ok(map.0)
    }
}
