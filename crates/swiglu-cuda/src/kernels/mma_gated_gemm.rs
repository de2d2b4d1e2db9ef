//! Launches `device/mma_gated_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::elementwise::signed;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Extents, Form, Layout, Multiplier};
use crate::context::Cuda;
use crate::error::Result;
use crate::jit::{KernelFile, Variant, define};
use crate::launch::{Function, LaunchConfig, launch as enqueue};
use crate::stream::Stream;

pub(super) static FILE: KernelFile =
    KernelFile::new("mma_gated_gemm.cu", include_str!("../../device/mma_gated_gemm.cu"));

/// Stages of the ring; with the largest tile 80 KiB, within the 99 KiB of the smallest device.
pub(crate) const STAGES: usize = 4;
/// Bytes of k per stage.
const TILE_K_BYTES: usize = 64;

/// A tile and how many warps share it along each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    tile: [usize; 2],
    warps: [usize; 2],
}

impl Config {
    /// The most arithmetic per byte.
    pub(crate) const LARGE: Config = Config { tile: [128, 64], warps: [4, 2] };
    /// Four times as many tiles.
    pub(crate) const MEDIUM: Config = Config { tile: [64, 32], warps: [4, 1] };
    /// A single fragment of rows.
    pub(crate) const FLAT: Config = Config { tile: [16, 64], warps: [1, 4] };
    /// All of them.
    pub(crate) const ALL: [Config; 3] = [Self::LARGE, Self::MEDIUM, Self::FLAT];

    pub(crate) fn tile(self) -> [usize; 2] {
        self.tile
    }

    /// The shares of mma.sync's rate are those of an H200 in bf16 from 4096 rows on, 140, 150 and 68
    /// TFLOP/s: a warp reads both operands from shared memory for few multiplications.
    pub(crate) fn form(self) -> Form {
        let share = match self.tile[0] * self.tile[1] {
            8_192.. => 0.32,
            2_048.. => 0.35,
            _ => 0.18,
        };
        Form {
            tile: self.tile,
            share: 1,
            split: 1,
            blocks_per_sm: 2,
            hides_epilogue: false,
            narrow_last: false,
            multiplier: Multiplier::Mma { share },
        }
    }

    fn threads(self) -> u32 {
        (32 * self.warps[0] * self.warps[1]) as u32
    }

    fn shared_bytes(self, dtype: DType, orientation: Orientation) -> usize {
        let [tile_m, tile_h] = self.tile;
        let half = match orientation {
            Orientation::OutIn => tile_h * (TILE_K_BYTES + 16),
            Orientation::InOut => {
                let gap = if dtype == DType::F32 { 32 } else { 16 };
                TILE_K_BYTES / dtype.size() * (tile_h * dtype.size() + gap)
            }
        };
        STAGES * (tile_m * (TILE_K_BYTES + 16) + 2 * half)
    }
}

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

fn variant(config: Config, code: GateCode, layout: Layout, copy_bytes: usize) -> Variant {
    let [a, b, c, d, e] = code.defines();
    let [f, g, h] = layout.defines();
    let shared = config.shared_bytes(code.dtype(), layout.orientation);
    let rest = [
        ("TILE_M", config.tile[0]),
        ("TILE_H", config.tile[1]),
        ("WARPS_M", config.warps[0]),
        ("WARPS_H", config.warps[1]),
        ("STAGES", STAGES),
        ("COPY_BYTES", copy_bytes),
        ("SHARED_BYTES", shared),
    ];
    let [i, j, k, l, m, n, o] = rest.map(|(name, value)| define(name, value));
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o])
}

pub(super) fn function(
    cuda: &Cuda,
    config: Config,
    code: GateCode,
    layout: Layout,
    copy_bytes: usize,
) -> Result<Function> {
    let shared = config.shared_bytes(code.dtype(), layout.orientation);
    let variant = variant(config, code, layout, copy_bytes);
    cuda.function(&variant, "mma_gated_gemm", shared as u32)
}

/// The widest copy that every address and row stride is a multiple of.
fn copy_bytes(call: &Call<'_>) -> usize {
    let (w, size) = (&call.weights, call.code.dtype().size() as u64);
    let mut bits = 16 | w.gate | w.up | call.x.data | (w.row_stride as u64 * size);
    if call.m > 1 {
        bits |= call.x.stride as u64 * size;
    }
    1 << bits.trailing_zeros()
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let (cuda, w) = (stream.cuda(), &call.weights);
    let function = function(cuda, config, call.code, call.layout(), copy_bytes(call))?;
    let params = Params {
        x: call.x.data,
        gate: w.gate,
        up: w.up,
        x_stride: call.x.stride,
        weight_stride: signed(w.row_stride),
        extents: call.extents(cuda, config.tile, cuda.facts().sm_count),
        epilogue: call.epilogue(),
    };
    let launch = LaunchConfig {
        grid: [call.tiles(config.tile) as u32, 1, 1],
        block: config.threads(),
        dynamic_shared: config.shared_bytes(call.code.dtype(), w.orientation) as u32,
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the large tile, every layout, tile and copy with the default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |config: Config, code: GateCode, layout: Layout, copy| {
        let [m, h] = config.tile;
        let name = format!("{} {layout} {m}x{h} copy{copy}", code.name());
        all.push(NamedVariant { name, variant: variant(config, code, layout, copy) });
    };
    let out_in = Layout { orientation: Orientation::OutIn, bias: true, saves: false };
    for code in GateCode::all(dtype) {
        push(Config::LARGE, code, out_in, 16);
    }
    let default = super::default_code(dtype);
    for config in Config::ALL {
        for orientation in Orientation::ALL {
            for copy in [16, 8, 4, 2].into_iter().filter(|&c| c >= dtype.size()) {
                push(config, default, Layout { orientation, bias: copy == 16, ..out_in }, copy);
            }
        }
        push(config, default, Layout { saves: true, ..out_in }, 16);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_fits_the_smallest_device() {
        for config in Config::ALL {
            for dtype in DType::ALL {
                for orientation in Orientation::ALL {
                    assert!(config.shared_bytes(dtype, orientation) <= 99 * 1024);
                }
            }
        }
    }
}
