//! Launches `device/elementwise_forward.cu` and `device/elementwise_backward.cu`.

use swiglu_core::DType;

use super::NamedVariant;
use super::gate::{Formula, GateCode};
use crate::context::Cuda;
use crate::error::Result;
use crate::jit::{KernelFile, Variant, define};
use crate::launch::{LaunchConfig, launch};
use crate::stream::Stream;

static FORWARD: KernelFile =
    KernelFile::new("elementwise_forward.cu", include_str!("../../device/elementwise_forward.cu"));
static BACKWARD: KernelFile = KernelFile::new(
    "elementwise_backward.cu",
    include_str!("../../device/elementwise_backward.cu"),
);

/// As in `device/elementwise.cuh`.
const THREADS: u32 = 256;
/// Bytes of an operand that a thread has under way, in vectors of one access each.
const BYTES_IN_FLIGHT: u64 = 16;

/// An extent or stride as kernels take it. None reaches the sign bit: allocations do not.
pub(crate) fn signed(n: usize) -> i64 {
    n.cast_signed() as i64
}

/// A `[rows, cols]` tensor on the device.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tensor {
    /// Address of the first element.
    pub(crate) data: u64,
    /// Elements from row to row.
    pub(crate) stride: i64,
}

impl Tensor {
    pub(crate) fn new(data: u64, stride: usize) -> Self {
        Self { data, stride: signed(stride) }
    }
}

/// How gate and up lie, with the tensors that hold them: `up` is not read where they are
/// interleaved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GateUp {
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    /// Features per group where they are interleaved in one tensor, else 0.
    pub(crate) group: usize,
}

impl GateUp {
    fn arrangement(&self) -> u8 {
        match self.group {
            0 => 0,
            1 => 2,
            _ => 1,
        }
    }

    fn tensors(&self) -> impl Iterator<Item = Tensor> {
        let up = (self.group == 0).then_some(self.up);
        std::iter::once(self.gate).chain(up)
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct Tiling {
    rows: i64,
    cols: i64,
    tile_rows: i64,
    tile_cols: i64,
    lane_bits: u32,
    group: u32,
}

#[repr(C)]
struct ForwardParams {
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    tiling: Tiling,
    formula: Formula,
}

#[repr(C)]
struct BackwardParams {
    out_grad: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_grad: Tensor,
    up_grad: Tensor,
    tiling: Tiling,
    formula: Formula,
}

/// What both directions compute on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) code: GateCode,
    pub(crate) formula: Formula,
}

/// h = act(gate, up).
///
/// # Safety
/// The tensors are memory of the stream's device that stays valid until the kernel has run, `out`
/// overlaps no other tensor except an equal one, and its rows do not overlap.
pub(crate) unsafe fn forward(
    stream: &Stream,
    extent: Extent,
    inputs: GateUp,
    out: Tensor,
) -> Result<()> {
    let cut = Cut::new(&extent, &[inputs], &[out]);
    let Some(cut) = cut else { return Ok(()) };
    let params = ForwardParams {
        gate: inputs.gate,
        up: inputs.up,
        out,
        tiling: cut.tiling,
        formula: extent.formula,
    };
    let entry = match cut.bytes {
        16 if cut.is_dense() => "elementwise_forward_dense",
        16 => "elementwise_forward_16",
        8 => "elementwise_forward_8",
        4 => "elementwise_forward_4",
        _ => "elementwise_forward_2",
    };
    let variant = variant(&FORWARD, extent.code, inputs.arrangement());
    let function = stream.cuda().function(&variant, entry, 0)?;
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { launch(stream, &function, &cut.launch(), &params) }
}

/// (∂L/∂gate, ∂L/∂up) from ∂L/∂h; `grads` lie as `inputs` do and may be the same memory.
///
/// # Safety
/// As [`forward`], for the tensors of `grads`.
pub(crate) unsafe fn backward(
    stream: &Stream,
    extent: Extent,
    out_grad: Tensor,
    inputs: GateUp,
    grads: GateUp,
) -> Result<()> {
    let cut = Cut::new(&extent, &[inputs, grads], &[out_grad]);
    let Some(cut) = cut else { return Ok(()) };
    let params = BackwardParams {
        out_grad,
        gate: inputs.gate,
        up: inputs.up,
        gate_grad: grads.gate,
        up_grad: grads.up,
        tiling: cut.tiling,
        formula: extent.formula,
    };
    let entry = match cut.bytes {
        16 if cut.is_dense() => "elementwise_backward_dense",
        16 => "elementwise_backward_16",
        8 => "elementwise_backward_8",
        4 => "elementwise_backward_4",
        _ => "elementwise_backward_2",
    };
    let variant = variant(&BACKWARD, extent.code, inputs.arrangement());
    let function = stream.cuda().function(&variant, entry, 0)?;
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { launch(stream, &function, &cut.launch(), &params) }
}

fn variant(file: &'static KernelFile, code: GateCode, arrangement: u8) -> Variant {
    let [a, b, c, d, e] = code.defines();
    Variant::new(file, [a, b, c, d, e, define("ARRANGEMENT", arrangement)])
}

/// The kernels of an element type: every code for tensors apart, SwiGLU for the interleaved ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut codes = GateCode::all(dtype);
    // Without a linear map before it, `pre_round` is `fused`.
    codes.retain(|code| !code.name().contains("pre_round"));
    for (i, code) in codes.into_iter().enumerate() {
        for (arrangement, label) in [(0, "apart"), (1, "grouped"), (2, "alternating")] {
            if arrangement > 0 && i > 0 {
                continue;
            }
            for file in [&FORWARD, &BACKWARD] {
                all.push(NamedVariant {
                    name: format!("{} {label}", code.name()),
                    variant: variant(file, code, arrangement),
                });
            }
        }
    }
    all
}

/// Compiles what [`forward`] with these arguments would.
pub(crate) fn prepare_forward(cuda: &Cuda, code: GateCode, group: usize) -> Result<()> {
    let none = Tensor { data: 0, stride: 0 };
    let arrangement = GateUp { gate: none, up: none, group }.arrangement();
    let variant = variant(&FORWARD, code, arrangement);
    // The two that a call on matrices of this library takes: rows with strides, and dense ones.
    for entry in ["elementwise_forward_16", "elementwise_forward_dense"] {
        cuda.function(&variant, entry, 0)?;
    }
    Ok(())
}

/// A problem cut into accesses, tiles and blocks.
#[derive(Debug, PartialEq)]
struct Cut {
    /// Bytes per access.
    bytes: u64,
    tiling: Tiling,
}

impl Cut {
    /// `None` if there is nothing to compute.
    fn new(extent: &Extent, pairs: &[GateUp], single: &[Tensor]) -> Option<Self> {
        let (rows, cols) = (extent.rows as u64, extent.cols as u64);
        if rows == 0 || cols == 0 {
            return None;
        }
        let size = extent.code.dtype().size() as u64;
        let packed = |pair: &GateUp| cols * if pair.group > 0 { 2 } else { 1 };
        // Rows that follow each other without a gap are one long row, which has one tail, not many.
        let dense = rows == 1
            || single.iter().all(|t| t.stride as u64 == cols)
                && pairs.iter().all(|p| p.tensors().all(|t| t.stride as u64 == packed(p)));
        let (rows, cols) = if dense { (1, rows * cols) } else { (rows, cols) };
        let addresses = pairs.iter().flat_map(GateUp::tensors).chain(single.iter().copied());
        // Bits that are set in none are what everything is a multiple of.
        let mut bits = 16;
        for tensor in addresses {
            bits |= tensor.data;
            if rows > 1 {
                bits |= tensor.stride as u64 * size;
            }
        }
        for pair in pairs {
            if pair.group > 1 {
                bits |= pair.group as u64 * size;
            }
        }
        let bytes = 1 << bits.trailing_zeros();
        let vectors = cols.div_ceil(bytes / size);
        let unroll = BYTES_IN_FLIGHT / bytes;
        let lanes = vectors.div_ceil(unroll).next_power_of_two().min(u64::from(THREADS));
        let group = pairs.first().map_or(0, |p| p.group);
        let tiling = Tiling {
            rows: rows.cast_signed(),
            cols: cols.cast_signed(),
            tile_rows: rows.div_ceil(u64::from(THREADS) / lanes).cast_signed(),
            tile_cols: vectors.div_ceil(unroll * lanes).cast_signed(),
            lane_bits: lanes.trailing_zeros(),
            group: group as u32,
        };
        Some(Self { bytes, tiling })
    }

    /// Whether it is one long row with a block for each tile.
    fn is_dense(&self) -> bool {
        let t = &self.tiling;
        t.rows == 1 && 1 << t.lane_bits == THREADS && t.tile_cols <= i64::from(i32::MAX)
    }

    fn launch(&self) -> LaunchConfig {
        // One block a tile, up to what a grid can have; blocks then walk on.
        let x = self.tiling.tile_cols.min(i64::from(i32::MAX)) as u32;
        let y = self.tiling.tile_rows.min(65535) as u32;
        LaunchConfig { grid: [x, y, 1], block: THREADS, ..LaunchConfig::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swiglu_core::{Activation, Numerics};

    fn extent(rows: usize, cols: usize, dtype: DType) -> Extent {
        let act = Activation::SWIGLU;
        let code = GateCode::elementwise(&act, Numerics::default_for(dtype), dtype);
        Extent { rows, cols, code, formula: Formula::new(&act) }
    }

    fn cut(e: &Extent, stride: usize, misalignment: u64) -> Cut {
        let t = |data| Tensor::new(data, stride);
        let inputs = GateUp { gate: t(4096), up: t(8192 + misalignment), group: 0 };
        Cut::new(e, &[inputs], &[t(1 << 20)]).unwrap()
    }

    #[test]
    fn the_widest_access_that_every_address_allows() {
        let e = extent(3, 100, DType::Bf16);
        assert_eq!(cut(&e, 104, 0).bytes, 16);
        assert_eq!(cut(&e, 108, 0).bytes, 8);
        assert_eq!(cut(&e, 106, 0).bytes, 4);
        assert_eq!(cut(&e, 105, 0).bytes, 2);
        assert_eq!(cut(&e, 104, 2).bytes, 2);
        assert_eq!(cut(&extent(3, 100, DType::F32), 101, 0).bytes, 4);
    }

    #[test]
    fn dense_rows_are_one_row() {
        let c = cut(&extent(3, 101, DType::F16), 101, 0);
        assert_eq!((c.bytes, c.tiling.rows, c.tiling.cols), (16, 1, 303));
        assert!(!c.is_dense(), "too little for a tile");
        assert!(cut(&extent(3, 1001, DType::F16), 1001, 0).is_dense());
        let c = cut(&extent(3, 101, DType::F16), 104, 0);
        assert_eq!((c.bytes, c.tiling.rows, c.tiling.cols), (16, 3, 101));
        assert!(!cut(&extent(3, 1001, DType::F16), 1008, 0).is_dense());
    }

    #[test]
    fn every_vector_has_a_lane() {
        for cols in [1, 7, 8, 9, 63, 64, 65, 511, 4096, 4097, 100_003] {
            for rows in [1, 2, 300, 70_000] {
                let c = cut(&extent(rows, cols, DType::Bf16), cols.next_multiple_of(8), 0);
                let t = c.tiling;
                let lanes = 1i64 << t.lane_bits;
                assert!(t.tile_cols * lanes * 8 >= t.cols, "{cols}");
                assert!(t.tile_rows * (256 / lanes) >= t.rows, "{rows}");
                assert!((t.tile_cols - 1) * lanes * 8 < t.cols, "a tile without work");
            }
        }
    }

    #[test]
    fn nothing_to_compute_is_no_launch() {
        let none = Tensor { data: 0, stride: 0 };
        let inputs = GateUp { gate: none, up: none, group: 0 };
        assert_eq!(Cut::new(&extent(0, 5, DType::F32), &[inputs], &[none]), None);
        assert_eq!(Cut::new(&extent(5, 0, DType::F32), &[inputs], &[none]), None);
    }
}
