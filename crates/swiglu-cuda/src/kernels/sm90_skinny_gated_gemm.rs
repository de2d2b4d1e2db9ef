//! Launches `device/sm90_skinny_gated_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Extents, Form, Layout, Multiplier};
use super::tensor_map::TensorMap;
use crate::context::Cuda;
use crate::error::Result;
use crate::jit::{KernelFile, Variant, define};
use crate::launch::{Function, LaunchConfig, launch as enqueue};
use crate::stream::Stream;

pub(super) static FILE: KernelFile = KernelFile::new(
    "sm90_skinny_gated_gemm.cu",
    include_str!("../../device/sm90_skinny_gated_gemm.cu"),
);

const TILE_H: usize = 64;
const TILE_K: usize = 64;
const THREADS: u32 = 160;
const BLOCKS_PER_SM: usize = 2;
/// Half of what a multiprocessor of sm_90 has, less the 1 KiB that each block costs.
const SHARED_LIMIT: usize = 228 * 1024 / BLOCKS_PER_SM - 1024;

/// Tokens per tile, and blocks that split its k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    tile_m: usize,
    split: usize,
}

impl Config {
    /// All of them.
    pub(crate) const ALL: [Config; 12] = {
        let (tiles, splits) = ([16, 32, 64, 128], [1, 2, 4]);
        let mut all = [Config { tile_m: 0, split: 0 }; 12];
        let mut i = 0;
        while i < all.len() {
            all[i] = Config { tile_m: tiles[i / splits.len()], split: splits[i % splits.len()] };
            i += 1;
        }
        all
    };

    /// Rows and columns of h that a cluster computes.
    pub(crate) fn tile(self) -> [usize; 2] {
        [self.tile_m, TILE_H]
    }

    /// Blocks that compute a tile.
    pub(crate) fn cluster(self) -> usize {
        self.split
    }

    /// Whether every block has a step of k.
    pub(crate) fn can_split(self, hidden: usize) -> bool {
        hidden.div_ceil(TILE_K) >= self.split
    }

    pub(crate) fn form(self) -> Form {
        Form {
            tile: self.tile(),
            share: 1,
            split: self.split,
            blocks_per_sm: BLOCKS_PER_SM,
            hides_epilogue: false,
            multiplier: Multiplier::Wgmma { columns: self.tile_m },
        }
    }

    fn stage_bytes(self) -> usize {
        (self.tile_m + 2 * TILE_H) * TILE_K * 2
    }

    /// As many as fit.
    pub(crate) fn stages(self) -> usize {
        (SHARED_LIMIT - 1024) / (self.stage_bytes() + 16)
    }

    fn shared_bytes(self) -> usize {
        1024 + self.stages() * (self.stage_bytes() + 16)
    }
}

#[repr(C, align(64))]
struct Params {
    x: TensorMap,
    gate: TensorMap,
    up: TensorMap,
    extents: Extents,
    epilogue: Epilogue,
}

fn variant(config: Config, code: GateCode, layout: Layout) -> Variant {
    let [a, b, c, d, e] = code.defines();
    let [f, g, h] = layout.defines();
    let tile = [
        define("TILE_M", config.tile_m),
        define("SPLIT", config.split),
        define("STAGES", config.stages()),
        define("SHARED_BYTES", config.shared_bytes()),
    ];
    let [i, j, k, l] = tile;
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l])
}

pub(super) fn function(
    cuda: &Cuda,
    config: Config,
    code: GateCode,
    layout: Layout,
) -> Result<Function> {
    let variant = variant(config, code, layout);
    cuda.function(&variant, "sm90_skinny_gated_gemm", config.shared_bytes() as u32)
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let cuda = stream.cuda();
    let function = function(cuda, config, call.code, call.layout())?;
    let [gate, up] = call.weight_maps(cuda, TILE_H, TILE_K)?;
    let tiles = call.tiles(config.tile());
    let params = Params {
        x: call.x_map(cuda, config.tile_m)?,
        gate,
        up,
        extents: call.extents(config.tile(), cuda.facts().sm_count),
        epilogue: call.epilogue(),
    };
    let launch = LaunchConfig {
        grid: [(tiles * config.split) as u32, 1, 1],
        block: THREADS,
        dynamic_shared: config.shared_bytes() as u32,
        cluster: (config.split > 1).then_some(config.split as u32),
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the largest tile, every layout and form with the default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |config: Config, code: GateCode, layout: Layout| {
        let Config { tile_m, split } = config;
        let name = format!("{} {layout} {tile_m}x{TILE_H} split{split}", code.name());
        all.push(NamedVariant { name, variant: variant(config, code, layout) });
    };
    let out_in = Layout { orientation: Orientation::OutIn, bias: true, saves: false };
    let largest = Config { tile_m: 128, split: 2 };
    for code in GateCode::all(dtype) {
        push(largest, code, out_in);
    }
    let default = super::default_code(dtype);
    for config in Config::ALL {
        push(config, default, Layout { bias: false, ..out_in });
        push(config, default, Layout { orientation: Orientation::InOut, ..out_in });
    }
    push(largest, default, Layout { saves: true, ..out_in });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_blocks_fit_a_multiprocessor() {
        for config in Config::ALL {
            assert!(config.shared_bytes() <= SHARED_LIMIT && config.stages() >= 3, "{config:?}");
        }
        assert_eq!(Config::ALL[11], Config { tile_m: 128, split: 4 });
        assert_eq!(size_of::<Params>(), 512);
    }

    #[test]
    fn k_is_split_into_whole_steps() {
        let config = Config { tile_m: 16, split: 4 };
        assert!(!config.can_split(192) && config.can_split(193));
    }
}
