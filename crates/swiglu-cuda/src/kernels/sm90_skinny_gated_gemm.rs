//! Launches `device/sm90_skinny_gated_gemm.cu`.

use std::fmt;

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Extents, Features, Form, Layout, Multiplier};
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

const TILE_K: usize = 64;
/// Features of the rows of an instruction, which a warpgroup multiplies.
const GROUP: usize = 64;
/// Three warpgroups.
const MOST_FEATURES: usize = 3 * GROUP;
/// Shared memory of a multiprocessor of sm_90; each block costs 1 KiB beside its own.
const SHARED_PER_SM: usize = 228 * 1024;

/// How many features a tile has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Width {
    /// Those of an instruction. Two blocks share a multiprocessor.
    Instruction,
    /// An even share of the layer's for each multiprocessor, which one block has to itself.
    EvenShare,
}

/// Tokens per tile, features, and blocks that work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    tile_m: usize,
    width: Width,
    /// Blocks that split a tile's k.
    split: usize,
}

impl Config {
    /// All of them.
    pub(crate) const ALL: [Config; 16] = {
        let kinds = [
            (Width::Instruction, 1),
            (Width::Instruction, 2),
            (Width::Instruction, 4),
            (Width::EvenShare, 1),
        ];
        let tokens = [16, 32, 64, 128];
        let mut all = [Config { tile_m: 0, width: Width::Instruction, split: 1 }; 16];
        let mut i = 0;
        while i < all.len() {
            let (width, split) = kinds[i % kinds.len()];
            all[i] = Config { tile_m: tokens[i / kinds.len()], width, split };
            i += 1;
        }
        all
    };

    /// Blocks of a cluster.
    pub(crate) fn cluster(self) -> usize {
        self.split
    }

    /// Whether every block has a step of k.
    pub(crate) fn can_split(self, hidden: usize) -> bool {
        hidden.div_ceil(TILE_K) >= self.split
    }

    /// With the tile for these features.
    pub(crate) fn tiling(self, features: Features) -> Tiling {
        match self.width {
            Width::Instruction => Tiling { config: self, tile_h: GROUP, blocks_per_sm: 2 },
            Width::EvenShare => {
                let tile_h = even_share(features);
                Tiling { config: self, tile_h, blocks_per_sm: 1 }
            }
        }
    }
}

impl fmt::Display for Config {
    /// `16x64 split 2`, `16xfitted`: tokens and features of a tile.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.width {
            Width::Instruction => write!(f, "{}x{GROUP} split {}", self.tile_m, self.split),
            Width::EvenShare => write!(f, "{}xfitted", self.tile_m),
        }
    }
}

/// Features of a tile so that each multiprocessor has as many tiles as every other, and these as wide as
/// they can be. [out, in]: whole groups of eight lines of the swizzle. [in, out]: whole lines.
fn even_share(features: Features) -> usize {
    let unit = match features.orientation {
        Orientation::OutIn => 8,
        Orientation::InOut => 64,
    };
    let multiprocessors = features.multiprocessors.max(1);
    let tiles = features.count.div_ceil(multiprocessors * MOST_FEATURES).max(1);
    features.count.div_ceil(multiprocessors * tiles).next_multiple_of(unit).max(unit)
}

/// A configuration with its tile for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    config: Config,
    tile_h: usize,
    blocks_per_sm: usize,
}

impl Tiling {
    /// Rows and columns of h that a block, or those that split its k, compute.
    pub(crate) fn tile(self) -> [usize; 2] {
        [self.config.tile_m, self.tile_h]
    }

    pub(crate) fn form(self) -> Form {
        let rows = self.warpgroups() * GROUP;
        Form {
            tile: self.tile(),
            share: 1,
            split: self.config.split,
            blocks_per_sm: self.blocks_per_sm,
            hides_epilogue: false,
            narrow_last: false,
            multiplier: Multiplier::Wgmma {
                columns: self.config.tile_m,
                wanted: self.tile_h as f64 / rows as f64,
            },
        }
    }

    fn warpgroups(self) -> usize {
        self.tile_h.div_ceil(GROUP)
    }

    /// Three warpgroups with 128 sums of a thread take registers of a fourth.
    fn threads(self) -> usize {
        let producers = if self.warpgroups() == 3 && self.config.tile_m == 128 { 128 } else { 32 };
        self.warpgroups() * 128 + producers
    }

    fn shared_limit(self) -> usize {
        SHARED_PER_SM / self.blocks_per_sm - 1024
    }

    fn stage_bytes(self) -> usize {
        (self.config.tile_m + 2 * self.tile_h) * TILE_K * 2
    }

    /// What the last warpgroup reads behind the ring.
    fn behind_ring(self) -> usize {
        let behind_half = self.warpgroups() * GROUP - self.tile_h;
        behind_half.saturating_sub(self.config.tile_m) * TILE_K * 2
    }

    /// As many as fit.
    pub(crate) fn stages(self) -> usize {
        (self.shared_limit() - 1024 - self.behind_ring()) / (self.stage_bytes() + 16)
    }

    fn shared_bytes(self) -> usize {
        1024 + self.stages() * (self.stage_bytes() + 16) + self.behind_ring()
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

fn variant(tiling: Tiling, code: GateCode, layout: Layout) -> Variant {
    let [a, b, c, d, e] = code.defines();
    let [f, g, h] = layout.defines();
    let tile = [
        define("TILE_M", tiling.config.tile_m),
        define("TILE_H", tiling.tile_h),
        define("SPLIT", tiling.config.split),
        define("RESIDENTS", tiling.blocks_per_sm),
        define("STAGES", tiling.stages()),
        define("SHARED_BYTES", tiling.shared_bytes()),
    ];
    let [i, j, k, l, m, n] = tile;
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n])
}

pub(super) fn function(
    cuda: &Cuda,
    tiling: Tiling,
    code: GateCode,
    layout: Layout,
) -> Result<Function> {
    let variant = variant(tiling, code, layout);
    cuda.function(&variant, "sm90_skinny_gated_gemm", tiling.shared_bytes() as u32)
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`]. No grid before this one on the stream writes the weights: they
/// are read before it has ended.
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let cuda = stream.cuda();
    let tiling = config.tiling(call.features(cuda));
    let function = function(cuda, tiling, call.code, call.layout())?;
    let [gate, up] = call.weight_maps(cuda, tiling.tile_h, TILE_K)?;
    let tile = tiling.tile();
    let params = Params {
        x: call.x_map(cuda, config.tile_m)?,
        gate,
        up,
        extents: call.extents(tile, cuda.facts().sm_count),
        epilogue: call.epilogue(),
    };
    let launch = LaunchConfig {
        grid: [(call.tiles(tile) * config.cluster()) as u32, 1, 1],
        block: tiling.threads() as u32,
        dynamic_shared: tiling.shared_bytes() as u32,
        cluster: (config.cluster() > 1).then_some(config.cluster() as u32),
        // It waits before it reads anything but weights, or writes. Graphs can hold such launches since then.
        programmatic: cuda.facts().driver_version >= (12, 3),
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the largest tiles, every layout and form, in one width to three, with the
/// default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |tiling: Tiling, code: GateCode, layout: Layout| {
        let Tiling { config, tile_h, blocks_per_sm } = tiling;
        let Config { tile_m, split, .. } = config;
        let form = format!("split{split} residents{blocks_per_sm}");
        let name = format!("{} {layout} {tile_m}x{tile_h} {form}", code.name());
        all.push(NamedVariant { name, variant: variant(tiling, code, layout) });
    };
    let out_in = Layout { orientation: Orientation::OutIn, bias: true, saves: false };
    let largest = |split, width, tile_h| {
        let config = Config { tile_m: 128, width, split };
        config.tiling(Features::even(tile_h, Orientation::OutIn))
    };
    let split = largest(2, Width::Instruction, GROUP);
    let widest = largest(1, Width::EvenShare, MOST_FEATURES);
    for code in GateCode::all(dtype) {
        push(split, code, out_in);
        push(widest, code, out_in);
    }
    let default = super::default_code(dtype);
    for config in Config::ALL {
        let widths: &[usize] = match config.width {
            Width::Instruction => &[GROUP],
            Width::EvenShare => &[40, 112, MOST_FEATURES],
        };
        for &tile_h in widths {
            for (orientation, bias) in [(Orientation::OutIn, false), (Orientation::InOut, true)] {
                let tiling = config.tiling(Features::even(tile_h, orientation));
                push(tiling, default, Layout { orientation, bias, saves: false });
            }
        }
    }
    push(split, default, Layout { saves: true, ..out_in });
    push(widest, default, Layout { saves: true, ..out_in });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVEN: Config = Config { tile_m: 16, width: Width::EvenShare, split: 1 };

    fn features(count: usize, orientation: Orientation) -> Features {
        Features { count, orientation, multiprocessors: 132 }
    }

    #[test]
    fn blocks_fit_a_multiprocessor() {
        for config in Config::ALL {
            for count in (0..60_000).step_by(97) {
                let tiling = config.tiling(features(count, Orientation::OutIn));
                let all = (tiling.shared_bytes() + 1024) * tiling.blocks_per_sm;
                assert!(all <= SHARED_PER_SM && tiling.stages() >= 3, "{tiling:?}");
            }
        }
        assert_eq!(size_of::<Params>(), 512);
    }

    #[test]
    fn every_multiprocessor_has_as_many_tiles() {
        let fitted = |count| EVEN.tiling(features(count, Orientation::OutIn)).tile_h;
        assert_eq!([14336, 18944, 8192, 4864].map(fitted), [112, 144, 64, 40]);
        // Two tiles each, and what has less than eight features for each.
        assert_eq!([28672, 256, 0].map(fitted), [112, 8, 8]);
        let in_out = EVEN.tiling(features(14336, Orientation::InOut));
        assert_eq!(in_out.tile_h, 128);
    }

    #[test]
    fn names_tell_forms_apart() {
        let mut names: Vec<_> = Config::ALL.map(|config| config.to_string()).into();
        assert_eq!(names[..2], ["16x64 split 1", "16x64 split 2"]);
        assert_eq!(names[3], "16xfitted");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Config::ALL.len());
    }

    #[test]
    fn k_is_split_into_whole_steps() {
        let config = Config { tile_m: 16, width: Width::Instruction, split: 4 };
        assert!(!config.can_split(192) && config.can_split(193));
    }
}
