//! Launches `device/mma_gated_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::elementwise::signed;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Extents, Form, Layout, Multiplier};
use super::weights::Bias;
use crate::device::context::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define};
use crate::device::launch::{Function, LaunchConfig, launch as enqueue};
use crate::device::stream::Stream;

pub(super) static FILE: KernelFile =
    KernelFile::new("mma_gated_gemm.cu", include_str!("../../device/mma_gated_gemm.cu"));

/// A tile, how many warps share it along each side, and the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    tile: [usize; 2],
    warps: [usize; 2],
    stages: usize,
    /// Bytes of k per stage. The more, the fewer times warps meet; 128 are a whole line of the cache of each row.
    k_bytes: usize,
}

impl Config {
    /// The most arithmetic per byte, and eight warps where one block has an SM to itself.
    pub(crate) const TALL: Config =
        Config { tile: [256, 64], warps: [4, 2], stages: 4, k_bytes: 64 };
    /// Two blocks on the SMs of an H200, of which one multiplies while the other activates.
    pub(crate) const LARGE: Config =
        Config { tile: [128, 64], warps: [2, 2], stages: 3, k_bytes: 128 };
    /// Up to 64 tokens, and few tiles.
    pub(crate) const MEDIUM: Config =
        Config { tile: [64, 64], warps: [1, 4], stages: 3, k_bytes: 128 };
    /// The same with half of the features.
    pub(crate) const SMALL: Config =
        Config { tile: [64, 32], warps: [1, 2], stages: 3, k_bytes: 128 };
    /// A single fragment of rows.
    pub(crate) const FLAT: Config =
        Config { tile: [16, 32], warps: [1, 2], stages: 4, k_bytes: 128 };
    /// All of them.
    pub(crate) const ALL: [Config; 5] =
        [Self::TALL, Self::LARGE, Self::MEDIUM, Self::SMALL, Self::FLAT];

    pub(crate) fn tile(self) -> [usize; 2] {
        self.tile
    }

    pub(crate) fn stages(self) -> usize {
        self.stages
    }

    /// k of a stage.
    pub(super) fn step(self, dtype: DType) -> usize {
        self.k_bytes / dtype.size()
    }

    /// Blocks on an SM are those of an H200, as registers and its shared memory allow. The shares of mma.sync's
    /// rate are of it too, in bf16 with 4096 rows of 4096, 14336 features: 369, 404, 376, 349 and, of a tile twice as
    /// wide as the flat one, 165 TFLOP/s in one run; with few tokens, which it is for, that is better than it says.
    pub(crate) fn form(self) -> Form {
        let (share, blocks_per_sm) = match self {
            Self::TALL => (0.92, 1),
            Self::LARGE => (0.98, 2),
            Self::MEDIUM => (0.90, 3),
            Self::SMALL => (0.82, 4),
            _ => (0.5, 5),
        };
        Form {
            tile: self.tile,
            share: 1,
            split: 1,
            blocks_per_sm,
            hides_epilogue: false,
            narrow_last: false,
            multiplier: Multiplier::Mma {
                share,
                warps: self.warps[0] * self.warps[1],
                shared: self.shared_bytes(),
            },
        }
    }

    fn threads(self) -> u32 {
        (32 * self.warps[0] * self.warps[1]) as u32
    }

    /// A stage has rows of x and of both halves of the weights; `[in, out]` these take the same space the other way
    /// round.
    fn shared_bytes(self) -> usize {
        let [tile_m, tile_h] = self.tile;
        self.stages * self.k_bytes * (tile_m + 2 * tile_h)
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
    let rest = [
        ("TILE_M", config.tile[0]),
        ("TILE_H", config.tile[1]),
        ("WARPS_M", config.warps[0]),
        ("WARPS_H", config.warps[1]),
        ("STAGES", config.stages),
        ("TILE_K_BYTES", config.k_bytes),
        ("COPY_BYTES", copy_bytes),
        ("SHARED_BYTES", config.shared_bytes()),
    ];
    let [i, j, k, l, m, n, o, p] = rest.map(|(name, value)| define(name, value));
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p])
}

fn function(
    cuda: &Cuda,
    config: Config,
    code: GateCode,
    layout: Layout,
    copy_bytes: usize,
) -> Result<Function> {
    let variant = variant(config, code, layout, copy_bytes);
    cuda.function(&variant, "mma_gated_gemm", config.shared_bytes() as u32)
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

/// That of a call with rows of x and of packed weights one behind the other.
fn copy_bytes_of(m: usize, hidden: usize, dtype: DType) -> usize {
    let row = if m > 1 { hidden * dtype.size() } else { 0 };
    1 << (16 | row).trailing_zeros()
}

/// What a call with `m` tokens and packed weights launches.
pub(super) fn needed(
    config: Config,
    code: GateCode,
    layout: Layout,
    [m, hidden]: [usize; 2],
) -> NamedVariant {
    named(config, code, layout, copy_bytes_of(m, hidden, code.dtype()))
}

fn named(config: Config, code: GateCode, layout: Layout, copy: usize) -> NamedVariant {
    let [m, h] = config.tile;
    let name = format!("{} {layout} {m}x{h} copy{copy}", code.name());
    NamedVariant { name, variant: variant(config, code, layout, copy) }
}

/// The function that a call launches.
pub(super) fn prepare(cuda: &Cuda, config: Config, call: &Call<'_>) -> Result<Function> {
    function(cuda, config, call.code, call.layout(), copy_bytes(call))
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let (cuda, w) = (stream.cuda(), &call.weights);
    let function = prepare(cuda, config, call)?;
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
        dynamic_shared: config.shared_bytes() as u32,
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the large tile, every layout, tile and copy with the default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |config: Config, code: GateCode, layout: Layout, copy| {
        all.push(named(config, code, layout, copy));
    };
    let out_in = Layout { orientation: Orientation::OutIn, bias: Bias::Floats, saves: false };
    for code in GateCode::all(dtype) {
        push(Config::LARGE, code, out_in, 16);
    }
    let default = super::default_code(dtype);
    for config in Config::ALL {
        for orientation in Orientation::ALL {
            for copy in [16, 8, 4, 2].into_iter().filter(|&c| c >= dtype.size()) {
                let bias = if copy == 16 { Bias::Floats } else { Bias::None };
                push(config, default, Layout { orientation, bias, ..out_in }, copy);
            }
        }
        push(config, default, Layout { bias: Bias::Elements, ..out_in }, 16);
        push(config, default, Layout { saves: true, ..out_in }, 16);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_fits_the_smallest_device() {
        assert!(Config::ALL.iter().all(|config| config.shared_bytes() <= 99 * 1024));
    }
}
