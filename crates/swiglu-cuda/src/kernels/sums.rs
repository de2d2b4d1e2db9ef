//! Launches `device/elementwise/sums.cu`.

use swiglu_core::{Accumulate, DType};

use super::NamedVariant;
use super::dgated_gemm::RowFactors;
use super::elementwise::{Tensor, signed};
use super::gate::element_define;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{LaunchConfig, launch};
use crate::device::stream::Stream;

static FILE: KernelFile = kernel_file!("elementwise", "sums.cu");
const THREADS: u32 = 256;
/// Columns of a block, and the bytes of its warps' sums of them.
const COLUMNS: usize = 64;
const SHARED: u32 = THREADS / 32 * COLUMNS as u32 * 4;
/// Rows of a block, a warp's each.
const ROWS: usize = THREADS as usize / 32;

#[repr(C)]
struct ColumnSumsParams {
    matrix: u64,
    out: u64,
    stride: i64,
    rows: i64,
    cols: i64,
    accumulate: i64,
    scale: u64,
}

#[repr(C)]
struct ScaleRowsParams {
    dh: u64,
    h: u64,
    scale: u64,
    dots: u64,
    dh_stride: i64,
    h_stride: i64,
    rows: i64,
    cols: i64,
}

#[repr(C)]
struct RowDotsParams {
    dots: u64,
    dy: u64,
    bias: u64,
    out: u64,
    parts: i64,
    dy_stride: i64,
    rows: i64,
    cols: i64,
}

#[repr(C)]
struct RoundSumsParams {
    sums: u64,
    out: u64,
    sums_stride: i64,
    out_stride: i64,
    rows: i64,
    cols: i64,
}

fn variant(dtype: DType) -> Variant {
    Variant::new(&FILE, [element_define(dtype), define("SHARED_BYTES", SHARED)])
}

/// Writes the sum of each column of a `[rows, cols]` matrix of T, each row times its factor where there are some, to the f32
/// vector `out`, or adds it.
///
/// # Safety
/// The addresses are memory of the stream's device that stays valid until the kernel has run.
pub(crate) unsafe fn column_sums(
    stream: &Stream,
    dtype: DType,
    (matrix, scale): (Tensor, Option<u64>),
    [rows, cols]: [usize; 2],
    out: u64,
    accumulate: Accumulate,
) -> Result<()> {
    if cols == 0 {
        return Ok(());
    }
    let entry = if scale.is_some() { "scaled_column_sums" } else { "column_sums" };
    let function = stream.cuda().function(&variant(dtype), entry, SHARED)?;
    let params = ColumnSumsParams {
        matrix: matrix.data,
        out,
        scale: scale.unwrap_or(0),
        stride: matrix.stride,
        rows: signed(rows),
        cols: signed(cols),
        accumulate: i64::from(accumulate == Accumulate::Add),
    };
    let config = LaunchConfig {
        grid: [cols.div_ceil(COLUMNS) as u32, 1, 1],
        block: THREADS,
        dynamic_shared: SHARED,
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { launch(stream, &function, &config, &params) }
}

/// Multiplies rows of dh, and of h, `[rows, cols]` of T, with their factors, and writes the sum of h·dh of each before that,
/// where there is h.
///
/// # Safety
/// As [`column_sums`].
pub(crate) unsafe fn scale_rows(
    stream: &Stream,
    dtype: DType,
    (dh, h): (Tensor, Option<Tensor>),
    [rows, cols]: [usize; 2],
    scale: RowFactors,
) -> Result<()> {
    let h = h.unwrap_or(Tensor::new(0, 0));
    let params = ScaleRowsParams {
        dh: dh.data,
        h: h.data,
        scale: scale.factors,
        dots: scale.dots,
        dh_stride: dh.stride,
        h_stride: h.stride,
        rows: signed(rows),
        cols: signed(cols),
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { of_rows(stream, dtype, "scale_rows", rows, &params) }
}

/// Writes the gradient of each row's factor: of `parts` sums of h·dh, `[parts, rows]`, and of dy·b where there is a bias of T.
///
/// # Safety
/// As [`column_sums`].
pub(crate) unsafe fn row_dots(
    stream: &Stream,
    dtype: DType,
    (dots, parts): (u64, usize),
    (dy, bias): (Tensor, Option<u64>),
    [rows, cols]: [usize; 2],
    out: u64,
) -> Result<()> {
    let params = RowDotsParams {
        dots,
        dy: dy.data,
        bias: bias.unwrap_or(0),
        out,
        parts: signed(parts),
        dy_stride: dy.stride,
        rows: signed(rows),
        cols: signed(cols),
    };
    // SAFETY: as above.
    unsafe { of_rows(stream, dtype, "row_dots", rows, &params) }
}

/// Launches a warp for each row, if there are any.
///
/// # Safety
/// As [`column_sums`]; the parameters are those of the kernel.
unsafe fn of_rows<P>(
    stream: &Stream,
    dtype: DType,
    entry: &'static str,
    rows: usize,
    params: &P,
) -> Result<()> {
    if rows == 0 {
        return Ok(());
    }
    let function = stream.cuda().function(&variant(dtype), entry, 0)?;
    let grid = [rows.div_ceil(ROWS) as u32, 1, 1];
    let config = LaunchConfig { grid, block: THREADS, ..LaunchConfig::default() };
    // SAFETY: as the caller says.
    unsafe { launch(stream, &function, &config, params) }
}

/// Rounds a `[rows, cols]` matrix of f32 to T.
///
/// # Safety
/// As [`column_sums`].
pub(crate) unsafe fn round_sums(
    stream: &Stream,
    dtype: DType,
    sums: Tensor,
    out: Tensor,
    [rows, cols]: [usize; 2],
) -> Result<()> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let function = stream.cuda().function(&variant(dtype), "round_sums", 0)?;
    let params = RoundSumsParams {
        sums: sums.data,
        out: out.data,
        sums_stride: sums.stride,
        out_stride: out.stride,
        rows: signed(rows),
        cols: signed(cols),
    };
    let x = cols.div_ceil(THREADS as usize).min(1 << 16) as u32;
    let config = LaunchConfig {
        grid: [x, rows.min(65535) as u32, 1],
        block: THREADS,
        ..LaunchConfig::default()
    };
    // SAFETY: as above.
    unsafe { launch(stream, &function, &config, &params) }
}

pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    vec![NamedVariant { name: dtype.to_string(), variant: variant(dtype) }]
}
