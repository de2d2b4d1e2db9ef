//! Launches `device/portable/mma_dgated_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::dgated_gemm::Call;
use super::elementwise::Tensor;
use super::gate::{Formula, GateCode};
use super::gated_gemm::Extents;
use super::mma_gemm::{Config, Operands, bits, widest};
use super::raster;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::launch as enqueue;
use crate::device::stream::Stream;

pub(super) static FILE: KernelFile = kernel_file!("portable", "mma_dgated_gemm.cu");

#[repr(C)]
struct Params {
    operands: Operands<1>,
    gate: Tensor,
    up: Tensor,
    gate_grad: Tensor,
    up_grad: Tensor,
    /// At address 0 where it is not wanted.
    h: Tensor,
    formula: Formula,
    scale: u64,
    dots: u64,
}

/// Bytes of an access: to what is multiplied, and to gate, up and the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Widths {
    copy: usize,
    access: usize,
}

impl Widths {
    fn of(call: &Call<'_>) -> Self {
        let (m, dtype) = (call.m, call.code.dtype());
        let down = Tensor::new(call.down.ptr, call.down.row_stride);
        let copy = widest([bits(call.out_grad, m, dtype), bits(down, 2, dtype)]);
        let results = call.inputs.into_iter().chain(call.grads).chain(call.h);
        Self { copy, access: widest(results.map(|matrix| bits(matrix, m, dtype))) }
    }
}

fn tiles(config: Config, call: &Call<'_>) -> usize {
    let [rows, columns] = config.wide_tile();
    call.m.div_ceil(rows).saturating_mul(call.down.in_features.div_ceil(columns))
}

/// [`super::dgated_gemm::Kernel::check_call`].
pub(super) fn check_call(config: Config, call: &Call<'_>) -> std::result::Result<(), String> {
    let row = call.down.in_features.max(call.down.out_features);
    // It counts places within a row in bytes.
    let bytes = row.saturating_mul(call.code.dtype().size());
    let largest = bytes.max(call.m).max(tiles(config, call));
    if largest > i32::MAX as usize {
        return Err(format!("{largest} is more than a kernel counts to"));
    }
    Ok(())
}

fn variant(
    config: Config,
    widths: Widths,
    code: GateCode,
    orientation: Orientation,
    scaled: bool,
) -> Variant {
    let [a, b, c, d, e] = code.defines();
    let [f, g, h, i, j, k, l, m, n] = config.defines(1, widths.copy);
    // What is summed over are the rows of a weight `[out, in]`.
    let o = define("ORIENTATION", orientation == Orientation::OutIn);
    let p = define("ACCESS_BYTES", widths.access);
    let q = define("ROW_SCALE", scaled);
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q])
}

/// # Safety
/// As [`super::dgated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let (cuda, down, dtype) = (stream.cuda(), &call.down, call.code.dtype());
    let scaled = call.scale.is_some();
    let variant = variant(config, Widths::of(call), call.code, down.orientation, scaled);
    let function = cuda.function(&variant, "mma_dgated_gemm", config.shared_bytes())?;
    let [tile_m, _] = config.tile();
    let (rows, row_bytes) =
        (call.m.div_ceil(tile_m), tile_m.min(call.m) * down.out_features * dtype.size());
    let (sms, cache) = (cuda.facts().sm_count as usize, cuda.facts().l2_bytes);
    let raster = raster::rows(config.tile(), rows, sms, row_bytes, cache);
    let extents = Extents::new([call.m, down.in_features, down.out_features], raster);
    let params = Params {
        operands: Operands::new(call.out_grad, [down.ptr], down.row_stride, extents),
        gate: call.inputs[0],
        up: call.inputs[1],
        gate_grad: call.grads[0],
        up_grad: call.grads[1],
        h: call.h.unwrap_or(Tensor::new(0, 0)),
        formula: call.formula,
        scale: call.scale.map_or(0, |scale| scale.factors),
        dots: call.scale.map_or(0, |scale| scale.dots),
    };
    let launch = config.launch(tiles(config, call));
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the large tile, every layout, tile, copy and access with the default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let named =
        |config: Config, widths: Widths, code: GateCode, orientation: Orientation, scaled| {
            let ([m, h], Widths { copy, access }) = (config.wide_tile(), widths);
            let of_scaled = super::of_scaled(scaled);
            let name = format!(
                "{} {orientation} {m}x{h} copy{copy} access{access}{of_scaled}",
                code.name()
            );
            NamedVariant { name, variant: variant(config, widths, code, orientation, scaled) }
        };
    let whole = Widths { copy: 16, access: 16 };
    let of_codes = |scaled| {
        let codes = GateCode::all(dtype).into_iter();
        codes.map(move |code| named(Config::LARGE, whole, code, Orientation::OutIn, scaled))
    };
    let mut all: Vec<_> = [false, true].into_iter().flat_map(of_codes).collect();
    let default = super::default_code(dtype);
    let bytes = || [16, 8, 4, 2].into_iter().filter(|&bytes| bytes >= dtype.size());
    for config in Config::ALL {
        for orientation in Orientation::ALL {
            let copies = bytes().map(|copy| Widths { copy, ..whole });
            all.extend(copies.map(|widths| named(config, widths, default, orientation, false)));
        }
        let accesses = bytes().skip(1).map(|access| Widths { access, ..whole });
        let dense = Orientation::OutIn;
        all.extend(accesses.map(|widths| named(config, widths, default, dense, false)));
        if config != Config::LARGE {
            all.push(named(config, whole, default, dense, true));
        }
    }
    all
}
