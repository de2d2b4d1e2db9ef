//! Launches `device/portable/simt_gated_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::elementwise::signed;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Extents, Layout};
use super::weights::Bias;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{Function, LaunchConfig, launch as enqueue};
use crate::device::stream::Stream;

pub(super) static FILE: KernelFile = kernel_file!("portable", "simt_gated_gemm.cu");

/// Rows and columns of h per tile.
pub(crate) const TILE: [usize; 2] = [128, 64];
/// Stages of the ring.
pub(crate) const STAGES: usize = 3;
const THREADS: u32 = 256;
/// Of a stage.
pub(super) const TILE_K: usize = 16;
/// x and two halves of the weights, four floats of padding per k.
const SHARED_BYTES: usize = STAGES * TILE_K * (TILE[0] + 4 + 2 * (TILE[1] + 4)) * 4;

#[repr(C)]
struct Params {
    x: u64,
    gate: u64,
    up: u64,
    x_stride: i64,
    weight_stride: i64,
    extents: Extents,
    epilogue: Epilogue,
}

fn variant(code: GateCode, layout: Layout) -> Variant {
    let [a, b, c, d, e] = code.defines();
    let [f, g, h] = layout.defines();
    let rest = [define("STAGES", STAGES), define("SHARED_BYTES", SHARED_BYTES)];
    let [i, j] = rest;
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j])
}

pub(super) fn named(code: GateCode, layout: Layout) -> NamedVariant {
    let name = format!("{} {layout}", code.name());
    NamedVariant { name, variant: variant(code, layout) }
}

pub(super) fn function(cuda: &Cuda, code: GateCode, layout: Layout) -> Result<Function> {
    let variant = variant(code, layout);
    cuda.function(&variant, "simt_gated_gemm", SHARED_BYTES as u32)
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, call: &Call<'_>) -> Result<()> {
    let (cuda, w) = (stream.cuda(), &call.weights);
    let function = function(cuda, call.code, call.layout())?;
    let params = Params {
        x: call.x.data,
        gate: w.gate,
        up: w.up,
        x_stride: call.x.stride,
        weight_stride: signed(w.row_stride),
        extents: call.extents(cuda, TILE, cuda.facts().sm_count),
        epilogue: call.epilogue(),
    };
    let launch = LaunchConfig {
        grid: [call.tiles(TILE) as u32, 1, 1],
        block: THREADS,
        dynamic_shared: SHARED_BYTES as u32,
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode, and every layout with the default ones.
pub(super) fn variants() -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |code: GateCode, layout: Layout| all.push(named(code, layout));
    let out_in = Layout { orientation: Orientation::OutIn, bias: Bias::Floats, saves: false };
    let in_out = Layout { orientation: Orientation::InOut, ..out_in };
    for code in GateCode::all(DType::F32) {
        push(code, out_in);
    }
    let default = super::default_code(DType::F32);
    for bias in [Bias::None, Bias::Floats] {
        push(default, Layout { bias, ..in_out });
    }
    for bias in [Bias::None, Bias::Elements] {
        push(default, Layout { bias, ..out_in });
    }
    push(default, Layout { saves: true, ..out_in });
    all
}
