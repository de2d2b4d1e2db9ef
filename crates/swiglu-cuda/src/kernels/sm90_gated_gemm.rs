//! Launches `device/sm90/sm90_gated_gemm.cu`.

use std::fmt;

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Form, Layout, Multiplier, Shape, counted};
use super::sm90_gemm::{
    CONSUMERS, Operands, TILE_M, clusters, persistent, shared_bytes, stages_beside,
};
use super::tensor_map::{PANEL, TensorMap, panel, writable};
use super::weights::Bias;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{Function, launch as enqueue};
use crate::device::stream::Stream;

mod cut;
pub(crate) use cut::Cut;

pub(super) static FILE: KernelFile = kernel_file!("sm90", "sm90_gated_gemm.cu");

pub(super) use super::sm90_gemm::TILE_K;

/// Columns of h per tile; blocks per cluster: two share the weights of tiles below each other; and
/// whether the two consumers take tiles in turn, so that one stores while the other multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    tile_h: usize,
    cluster: usize,
    ping_pong: bool,
}

impl Config {
    /// The most arithmetic per byte.
    pub(crate) const WIDE: Config = Config { tile_h: 128, cluster: 1, ping_pong: false };
    /// As [`Self::WIDE`], with less traffic from L2.
    pub(crate) const PAIR: Config = Config { tile_h: 128, cluster: 2, ping_pong: false };
    /// Twice as many tiles, for few rows.
    pub(crate) const NARROW: Config = Config { tile_h: 64, cluster: 1, ping_pong: false };
    /// The activation of one tile beside the products of the next: for small K.
    pub(crate) const PING_PONG: Config = Config { tile_h: 64, cluster: 1, ping_pong: true };
    /// As [`Self::PING_PONG`], with shared weights.
    pub(crate) const PING_PONG_PAIR: Config = Config { tile_h: 64, cluster: 2, ping_pong: true };
    /// As [`Self::PING_PONG`], with more arithmetic per byte; narrower tiles, see [`Cut`], fill its last wave.
    pub(crate) const PING_PONG_WIDE: Config = Config { tile_h: 96, cluster: 1, ping_pong: true };
    /// Between the wide and the narrow tile, where their last wave has few tiles.
    pub(crate) const MIDDLE: Config = Config { tile_h: 112, cluster: 1, ping_pong: false };
    /// As [`Self::MIDDLE`], with shared weights.
    pub(crate) const MIDDLE_PAIR: Config = Config { tile_h: 112, cluster: 2, ping_pong: false };
    /// As [`Self::MIDDLE`], a step narrower.
    pub(crate) const LESS: Config = Config { tile_h: 96, cluster: 1, ping_pong: false };
    /// All of them.
    pub(crate) const ALL: [Config; 9] = [
        Self::WIDE,
        Self::PAIR,
        Self::NARROW,
        Self::PING_PONG,
        Self::PING_PONG_PAIR,
        Self::PING_PONG_WIDE,
        Self::MIDDLE,
        Self::MIDDLE_PAIR,
        Self::LESS,
    ];

    /// Whether the consumers take tiles in turn.
    pub(crate) fn ping_pong(self) -> bool {
        self.ping_pong
    }

    /// Whether a row of `[in, out]` weights in a tile is less than the widest row of the swizzle.
    pub(crate) fn copies_narrow_rows(self) -> bool {
        panel(self.tile_h) < PANEL
    }

    /// How the features of a layer are cut.
    pub(crate) fn cut(self, shape: Shape) -> Cut {
        let Shape { tokens, features, .. } = shape;
        let (rows, width) = (tokens.div_ceil(self.tile()[0]), self.tile_h);
        let slots = shape.multiprocessors / self.cluster;
        match self.cuts() && tokens > Cut::NO_LESS {
            true => Cut::best(rows, features, width, slots),
            false => Cut::none(rows, features, width, slots),
        }
    }

    fn cuts(self) -> bool {
        self == Self::PING_PONG_WIDE
    }

    fn rows_per_consumer(self) -> usize {
        if self.ping_pong { TILE_M } else { TILE_M / CONSUMERS }
    }

    /// Rows and columns of h that a cluster computes together.
    pub(crate) fn tile(self) -> [usize; 2] {
        [self.cluster * TILE_M, self.tile_h]
    }

    pub(crate) fn form(self) -> Form {
        Form {
            tile: [TILE_M, self.tile_h],
            share: self.cluster,
            split: 1,
            blocks_per_sm: 1,
            hides_epilogue: self.ping_pong,
            narrow_last: self.cuts(),
            multiplier: Multiplier::Wgmma { columns: 2 * self.tile_h, wanted: 1.0 },
        }
    }

    /// Blocks that compute a tile.
    pub(crate) fn cluster(self) -> usize {
        self.cluster
    }

    /// Columns of a stage's weights, of gate and up together.
    fn columns(self) -> usize {
        2 * self.tile_h
    }

    /// Panels of a consumer's results that shared memory holds at a time. One of several goes out while the next is
    /// computed, which in ping-pong has a whole tile's time; beside one of gate and one of up there is room for no more.
    fn out_panels(self, saves: bool) -> usize {
        match self.cuts() || saves {
            true => 1,
            false => self.tile_h / panel(self.tile_h) as usize,
        }
    }

    fn out_bytes(self, saves: bool) -> usize {
        let columns = self.out_panels(saves) * panel(self.tile_h) as usize;
        let results = if saves { 3 } else { 1 };
        CONSUMERS * self.rows_per_consumer() * columns * 2 * results
    }

    /// As many as fit beside the output, but of 128 × 96 in ping-pong no fifth, which was slower: see the device file.
    pub(crate) fn stages(self, saves: bool) -> usize {
        let most = if self.cuts() { 4 } else { usize::MAX };
        stages_beside(self.out_bytes(saves), self.columns()).min(most)
    }

    fn shared_bytes(self, saves: bool) -> usize {
        shared_bytes(self.stages(saves), self.columns(), self.out_bytes(saves))
    }
}

#[repr(C, align(64))]
struct Params {
    operands: Operands<2>,
    out: TensorMap,
    gate: TensorMap,
    up: TensorMap,
    epilogue: Epilogue,
}

/// What is compiled of [`Config`] and [`Cut`].
#[derive(Debug, Clone, Copy)]
struct Tiles {
    config: Config,
    tail: usize,
}

impl fmt::Display for Tiles {
    /// `128x96 ping-pong, then 64`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, columns] = self.config.tile();
        write!(f, "{rows}x{columns}")?;
        f.write_str(if self.config.ping_pong { " ping-pong" } else { "" })?;
        match self.tail {
            0 => Ok(()),
            tail => write!(f, ", then {tail}"),
        }
    }
}

fn variant(tiles: Tiles, code: GateCode, layout: Layout, tensor_store: bool) -> Variant {
    let config = tiles.config;
    let [a, b, c, d, e] = code.defines();
    let [f, g, h] = layout.defines();
    let saves = layout.saves;
    let tile = [
        define("OPERANDS", 2usize),
        define("TILE_H", config.tile_h),
        define("CLUSTER", config.cluster),
        define("PING_PONG", config.ping_pong),
        define("STAGES", config.stages(saves)),
        define("TENSOR_STORE", tensor_store),
        define("SHARED_BYTES", config.shared_bytes(saves)),
        define("TAIL_H", tiles.tail),
        define("OUT_PANELS", config.out_panels(saves)),
    ];
    let [i, j, k, l, m, n, o, q, r] = tile;
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, q, r])
}

/// The tiles of launches with aligned operands of a shape, and whether TMA writes its rows, wherever they lie:
/// see `writable`.
fn aligned(config: Config, shape: Shape) -> (Tiles, bool) {
    (Tiles { config, tail: config.cut(shape).tail }, shape.features.is_multiple_of(8))
}

/// Compiles what launches with aligned operands need.
pub(super) fn prepare(
    cuda: &Cuda,
    config: Config,
    code: GateCode,
    layout: Layout,
    shape: Shape,
) -> Result<Function> {
    let (tiles, tensor_store) = aligned(config, shape);
    function(cuda, tiles, code, layout, tensor_store)
}

/// What [`prepare`] compiles.
pub(super) fn needed(config: Config, code: GateCode, layout: Layout, shape: Shape) -> NamedVariant {
    let (tiles, tensor_store) = aligned(config, shape);
    named(tiles, code, layout, tensor_store)
}

fn named(tiles: Tiles, code: GateCode, layout: Layout, tensor_store: bool) -> NamedVariant {
    let store = if tensor_store { "" } else { " element store" };
    NamedVariant {
        name: format!("{} {layout} {tiles}{store}", code.name()),
        variant: variant(tiles, code, layout, tensor_store),
    }
}

fn function(
    cuda: &Cuda,
    tiles: Tiles,
    code: GateCode,
    layout: Layout,
    tensor_store: bool,
) -> Result<Function> {
    let variant = variant(tiles, code, layout, tensor_store);
    let shared = tiles.config.shared_bytes(layout.saves);
    cuda.function(&variant, "sm90_gated_gemm", shared as u32)
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let (cuda, layout) = (stream.cuda(), call.layout());
    let written = std::iter::once(call.out).chain(call.saved.into_iter().flatten());
    let tensor_store = written.clone().all(|to| writable(to, [call.m, call.weights.intermediate]));
    let Cut { full_columns, tail, .. } = config.cut(call.shape(cuda));
    let function = function(cuda, Tiles { config, tail }, call.code, layout, tensor_store)?;
    let w = call.weight_maps(cuda, config.tile_h, TILE_K)?;
    let tail_w = match (tail, call.weights.orientation) {
        (0, _) => [TensorMap::UNUSED; 2],
        (_, Orientation::OutIn) => call.weight_maps(cuda, tail, TILE_K)?,
        // Boxes are panels, whatever the tile.
        (_, Orientation::InOut) => w,
    };
    let rows = call.m.div_ceil(config.tile()[0]);
    let narrow = (call.weights.intermediate - full_columns).div_ceil(tail.max(1));
    let tiles = rows * (full_columns.div_ceil(config.tile_h) + narrow);
    let together = clusters(cuda, config.cluster) as u32;
    let [x, last_x] = call.x_maps(cuda, TILE_M)?;
    let mut results = [TensorMap::UNUSED; 3];
    if tensor_store {
        let extent = [config.rows_per_consumer() as u32, panel(config.tile_h)];
        for (map, to) in results.iter_mut().zip(written) {
            *map = call.result_map(cuda, to, extent)?;
        }
    }
    let [out, gate, up] = results;
    let extents = call.extents(cuda, config.tile(), together);
    let params = Params {
        operands: Operands { x, last_x, w, tail_w, full_columns: counted(full_columns), extents },
        out,
        gate,
        up,
        epilogue: call.epilogue(),
    };
    let shared = config.shared_bytes(layout.saves);
    let launch = persistent(cuda, tiles, config.cluster, CONSUMERS, shared);
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the widest tiles, every layout and tile with the default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |tiles: Tiles, code: GateCode, layout: Layout, tensor_store: bool| {
        all.push(named(tiles, code, layout, tensor_store));
    };
    let out_in = Layout { orientation: Orientation::OutIn, bias: Bias::Floats, saves: false };
    for code in GateCode::all(dtype) {
        push(Tiles { config: Config::WIDE, tail: 0 }, code, out_in, true);
        let [tail, ..] = cut::WIDTHS;
        push(Tiles { config: Config::PING_PONG_WIDE, tail }, code, out_in, true);
    }
    let default = super::default_code(dtype);
    for config in Config::ALL {
        let tiles = Tiles { config, tail: 0 };
        for orientation in Orientation::ALL {
            for bias in [Bias::None, Bias::Floats] {
                for store in [false, true] {
                    push(tiles, default, Layout { orientation, bias, ..out_in }, store);
                }
            }
        }
        push(tiles, default, Layout { bias: Bias::Elements, ..out_in }, true);
        push(tiles, default, Layout { saves: true, ..out_in }, true);
    }
    for tail in cut::WIDTHS {
        let tiles = Tiles { config: Config::PING_PONG_WIDE, tail };
        push(tiles, default, Layout { saves: true, ..out_in }, true);
        for orientation in Orientation::ALL {
            for bias in [Bias::None, Bias::Floats] {
                for store in [false, true] {
                    push(tiles, default, Layout { orientation, bias, ..out_in }, store);
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::sm90_gemm::{SHARED_LIMIT, stage_bytes};
    use super::*;

    #[test]
    fn the_ring_fills_the_shared_memory() {
        assert_eq!(Config::WIDE.stages(false), 4);
        assert_eq!(Config::NARROW.stages(false), 6);
        assert_eq!(Config::PING_PONG.stages(false), 6);
        assert_eq!(Config::PING_PONG_WIDE.stages(false), 4);
        assert_eq!(Config::PING_PONG_WIDE.stages(true), 4);
        assert_eq!(Config::MIDDLE.stages(false), 4);
        assert_eq!(Config::LESS.stages(false), 5);
        for config in Config::ALL {
            for saves in [false, true] {
                let (used, stage) = (config.shared_bytes(saves), stage_bytes(config.columns()));
                assert!(used <= SHARED_LIMIT);
                assert!(config.cuts() || used + stage > SHARED_LIMIT);
            }
        }
        assert_eq!(size_of::<Params>(), 1344);
    }
}
