//! Launches `device/sm90/sm90_skinny_gated_gemm.cu`.

mod tiling;

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Extents, Layout, Shape};
use super::tensor_map::TensorMap;
use super::weights::Bias;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{Function, LaunchConfig, launch as enqueue};
use crate::device::stream::Stream;
pub(crate) use tiling::{Config, Next};
use tiling::{GROUP, Kind, MOST_COLUMNS, MOST_FEATURES, Tiling};
pub(super) use tiling::{TILE_K, even_share};

pub(super) static FILE: KernelFile = kernel_file!("sm90", "sm90_skinny_gated_gemm.cu");

#[repr(C, align(64))]
struct Params {
    x: TensorMap,
    last_x: TensorMap,
    gate: TensorMap,
    up: TensorMap,
    x_rows: u64,
    x_stride: i64,
    extents: Extents,
    epilogue: Epilogue,
}
// As in the device file.
const _: () = assert!(size_of::<Params>() == 640);

fn variant(tiling: Tiling, code: GateCode, layout: Layout) -> Variant {
    let [a, b, c, d, e] = code.defines();
    let [f, g, h] = layout.defines();
    let tile = [
        define("TILE_M", tiling.config.tile_m),
        define("TILE_H", tiling.tile_h),
        define("TOKEN_ROWS", tiling.by_tokens()),
        define("SPLIT", tiling.config.split),
        define("RESIDENTS", tiling.blocks_per_sm),
        define("STAGES", tiling.stages()),
        define("SHARED_BYTES", tiling.shared_bytes()),
        define("RELEASE_AT_ONCE", tiling.releases_at_once()),
        define("UNDER_WAY", tiling.under_way()),
        define("X_AT_ONCE", tiling.x_at_once()),
    ];
    let [i, j, k, l, m, n, o, q, r, s] = tile;
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, q, r, s])
}

pub(super) fn named(tiling: Tiling, code: GateCode, layout: Layout) -> NamedVariant {
    let Tiling { config, tile_h, blocks_per_sm } = tiling;
    let Config { tile_m, split, next, .. } = config;
    let by = if tiling.by_tokens() { " by tokens" } else { "" };
    let next = match next {
        Next::Unknown => "",
        Next::SkinnyGemm => " before skinny_gemm",
        Next::SkinnyGemmBeside => " beside skinny_gemm",
        Next::RegisterGemmBeside => " beside register_gemm",
    };
    let form = format!("{tile_m}x{tile_h}{by} split{split} residents{blocks_per_sm}{next}");
    let name = format!("{} {layout} {form}", code.name());
    NamedVariant { name, variant: variant(tiling, code, layout) }
}

pub(super) fn function(
    cuda: &Cuda,
    tiling: Tiling,
    code: GateCode,
    layout: Layout,
) -> Result<Function> {
    let variant = variant(tiling, code, layout);
    let shared = tiling.requested_bytes() as u32;
    let function = cuda.function(&variant, "sm90_skinny_gated_gemm", shared)?;
    if tiling.shares() {
        function.keep_all_shared()?;
    }
    Ok(function)
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`]. No grid before this one on the stream writes the weights: they
/// are read before it has ended.
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let cuda = stream.cuda();
    let tiling = config.tiling(call.shape(cuda));
    let function = function(cuda, tiling, call.code, call.layout())?;
    let [gate, up] = call.weight_maps(cuda, tiling.tile_h, TILE_K)?;
    let tile = tiling.tile();
    let [x, last_x] = call.x_maps(cuda, tile[0])?;
    let params = Params {
        x,
        last_x,
        gate,
        up,
        x_rows: call.x.data,
        x_stride: call.x.stride,
        extents: call.extents(cuda, tile, cuda.facts().sm_count),
        epilogue: call.epilogue(),
    };
    let launch = LaunchConfig {
        grid: [(call.tiles(tile) * config.cluster()) as u32, 1, 1],
        block: tiling.threads() as u32,
        dynamic_shared: tiling.requested_bytes() as u32,
        cluster: (config.cluster() > 1).then_some(config.cluster() as u32),
        // It waits before it reads anything but weights, or writes. Graphs can hold such launches since then.
        programmatic: cuda.facts().driver_version >= (12, 3),
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the largest tiles, every layout and form, in one width to four, with the
/// default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |tiling: Tiling, code: GateCode, layout: Layout| {
        all.push(named(tiling, code, layout));
    };
    let out_in = Layout { orientation: Orientation::OutIn, bias: Bias::Floats, saves: false };
    let largest = |tile_m, split, kind, tile_h| {
        let config = Config { tile_m, kind, split, next: Next::Unknown };
        config.tiling(Shape { tokens: tile_m, ..Shape::even(tile_h, Orientation::OutIn) })
    };
    let largest = [
        largest(128, 2, Kind::Instruction, GROUP),
        largest(128, 1, Kind::EvenShare, MOST_FEATURES),
        largest(128, 1, Kind::Tokens, 160),
        largest(192, 1, Kind::Tokens, 112),
        largest(MOST_COLUMNS, 1, Kind::EvenTokens, 2 * GROUP),
    ];
    for code in GateCode::all(dtype) {
        for tiling in largest {
            push(tiling, code, out_in);
        }
    }
    let default = super::default_code(dtype);
    let before = Config::ALL.into_iter().flat_map(Config::before_down);
    for config in Config::ALL.into_iter().chain(before) {
        let widths: &[usize] = match config.kind {
            Kind::Instruction => &[GROUP],
            Kind::EvenShare => &[40, 112, MOST_FEATURES],
            Kind::EvenTokens => &[112, 2 * GROUP],
            Kind::Tokens => &[40, 72, 112, 160],
        };
        let heights: &[usize] = match config.kind {
            Kind::EvenTokens => &[112, 144, 160, 176, MOST_COLUMNS],
            _ => &[1],
        };
        let mut tilings = Vec::new();
        for (&tile_h, &tokens) in widths.iter().flat_map(|w| heights.iter().map(move |h| (w, h))) {
            for (orientation, bias) in
                [(Orientation::OutIn, Bias::None), (Orientation::InOut, Bias::Floats)]
            {
                let tiling = config.tiling(Shape { tokens, ..Shape::even(tile_h, orientation) });
                // Weights of a feed-forward block are packed.
                if config.next != Next::Unknown && orientation == Orientation::InOut {
                    continue;
                }
                if !tilings.contains(&(tiling, orientation)) {
                    tilings.push((tiling, orientation));
                    push(tiling, default, Layout { orientation, bias, saves: false });
                }
            }
        }
    }
    for tiling in largest {
        push(tiling, default, Layout { bias: Bias::Elements, ..out_in });
        push(tiling, default, Layout { saves: true, ..out_in });
    }
    all
}
