//! Launches `device/elementwise/fill_rows.cu`.

use swiglu_core::DType;

use super::NamedVariant;
use super::elementwise::{Tensor, signed};
use super::gate::element_define;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, kernel_file};
use crate::device::launch::{LaunchConfig, launch};
use crate::device::stream::Stream;

static FILE: KernelFile = kernel_file!("elementwise", "fill_rows.cu");
const THREADS: u32 = 256;

#[repr(C)]
struct Params {
    out: u64,
    row: u64,
    stride: i64,
    rows: i64,
    cols: i64,
}

fn variant(dtype: DType) -> Variant {
    Variant::new(&FILE, [element_define(dtype)])
}

/// Writes `row`, or zeros, to every row of `out` `[rows, cols]`.
///
/// # Safety
/// The addresses are memory of the stream's device that stays valid until the kernel has run.
pub(crate) unsafe fn fill_rows(
    stream: &Stream,
    dtype: DType,
    out: Tensor,
    [rows, cols]: [usize; 2],
    row: Option<u64>,
) -> Result<()> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let function = stream.cuda().function(&variant(dtype), "fill_rows", 0)?;
    let params = Params {
        out: out.data,
        row: row.unwrap_or(0),
        stride: out.stride,
        rows: signed(rows),
        cols: signed(cols),
    };
    let x = cols.div_ceil(THREADS as usize).min(1 << 16) as u32;
    let config = LaunchConfig {
        grid: [x, rows.min(65535) as u32, 1],
        block: THREADS,
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { launch(stream, &function, &config, &params) }
}

pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    vec![NamedVariant { name: dtype.to_string(), variant: variant(dtype) }]
}
