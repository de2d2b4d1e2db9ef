//! Launches `device/sm90/sm90_skinny_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::elementwise::Tensor;
use super::gate::element_define;
use super::gated_gemm::{Extents, Shape};
use super::ring::Ring;
use super::sm90_skinny_gated_gemm::even_share;
use super::tensor_map::{Boxes, LayerMaps, PANEL, TensorMap};
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{Function, LaunchConfig, launch as enqueue};
use crate::device::lt::LinearWeights;
use crate::device::stream::Stream;

pub(super) static FILE: KernelFile = kernel_file!("sm90", "sm90_skinny_gemm.cu");

/// Tokens of the widest tile. Every block reads all tokens: with more of them that is most of what it reads.
pub(crate) const MOST_TOKENS: usize = 32;

/// Features of an instruction, of which a tile may have fewer.
const MOST_FEATURES: usize = 64;
/// Bytes of a panel's line: 64 of k.
const LINE: usize = 128;
/// Warps that ask for weights and for tokens, two each.
const FEEDERS: usize = 4;
/// Of a stage, where there is room for so many stages: fewer are more waits, more are fewer stages to wait for.
const PANELS: usize = 2;
/// Shared memory of a block on sm_90.
const ALONE: usize = 227 * 1024;
/// What a block takes of it beside one of the kernel before it, or of that before the next one.
pub(super) const BESIDE: usize = 104 * 1024;

/// Bytes of weights under way to an SM that is this kernel's alone: tokens come behind what was asked for before
/// them, and memory would idle when all of a ring has come. With 96 to 128 KiB 25.4, 25.5 and 82.3 µs at 2048/8192 with one
/// token and 8 and at 4096/14336 with one, where it was 25.7, 26.0 and 83.0; with 64 KiB 25.7, 25.8, 83.2.
const UNDER_WAY: usize = 128 * 1024;

/// One launch: y = x·W + b.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) dtype: DType,
    /// At most [`MOST_TOKENS`].
    pub(crate) m: usize,
    /// At a multiple of 16 bytes, with rows a multiple of 16 bytes apart.
    pub(crate) x: Tensor,
    /// `[out, in]`, as `x`.
    pub(crate) weights: LinearWeights,
    pub(crate) y: Tensor,
    /// Those of the layer.
    pub(crate) maps: &'a LayerMaps,
    /// Whether blocks of the kernel before it leave room.
    pub(crate) beside: bool,
}

/// How a product is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    tile_m: usize,
    tile_h: usize,
    panels: usize,
    stages: usize,
    /// That multiply stages in turn.
    warpgroups: usize,
}

impl Tiling {
    /// For `m` tokens, `in_features` and `out_features` on so many SMs; `beside` blocks of another kernel,
    /// or alone.
    pub(crate) fn new(
        [m, inputs, outputs]: [usize; 3],
        multiprocessors: usize,
        beside: bool,
    ) -> Self {
        let shape = Shape {
            tokens: m,
            features: outputs,
            orientation: Orientation::OutIn,
            multiprocessors,
        };
        let tile_m = match m {
            0..=8 => 8,
            9..=16 => 16,
            _ => MOST_TOKENS,
        };
        let tile_h = even_share(shape, multiprocessors, MOST_FEATURES);
        // Six have more than half of an SM's registers: two blocks must not share one, which blocks of the
        // kernel before it have left, while others are empty.
        let (warpgroups, shared) = if beside { (6, BESIDE) } else { (4, ALONE) };
        let one_of = |panels| Self { tile_m, tile_h, panels, stages: 1, warpgroups };
        let stages = |one: Self| (shared - 1024 - one.behind_ring()) / (one.ring() + 16);
        let fits = |one: &Self| stages(*one) >= warpgroups;
        let one = Some(one_of(PANELS)).filter(fits).unwrap_or_else(|| one_of(1));
        // No more than there is to hold, but room for the sums.
        let used =
            inputs.div_ceil(one.panels * PANEL as usize).max(one.sums().div_ceil(one.ring()));
        // A stage stays with the warpgroup that multiplies it: see the device file.
        let whole = |stages: usize| stages / warpgroups * warpgroups;
        Self { stages: used.next_multiple_of(warpgroups).min(whole(stages(one))), ..one }
    }

    fn ring(self) -> usize {
        self.stages * self.panels * (self.tile_m + self.tile_h) * LINE
    }

    /// The ring for a product with so many input features.
    pub(crate) fn ring_for(self, inputs: usize) -> Ring {
        Ring { stages: self.stages, filled: inputs / (self.panels * PANEL as usize) }
    }

    fn sums(self) -> usize {
        self.warpgroups * self.tile_m * (self.tile_h + 4) * size_of::<f32>()
    }

    /// What the instruction reads behind the last features.
    fn behind_ring(self) -> usize {
        let rows = (MOST_FEATURES - self.tile_h).saturating_sub(self.panels * self.tile_m);
        rows * LINE
    }

    /// Stages of weights under way, fewer than there are; 0: all. An even number: of each feeder's own.
    fn under_way(self) -> usize {
        let stages = UNDER_WAY / (self.panels * self.tile_h * LINE) / 2 * 2;
        if stages < self.stages { stages } else { 0 }
    }

    fn shared_bytes(self) -> usize {
        1024 + self.ring() + 16 * self.stages + self.behind_ring()
    }

    /// Rows and columns of y that a block computes.
    pub(crate) fn tile(self) -> [usize; 2] {
        [self.tile_m, self.tile_h]
    }

    /// Tile sizes and the like, by name.
    pub(crate) fn parameters(self) -> [(&'static str, usize); 2] {
        [("down_tile_h", self.tile_h), ("down_stages", self.stages)]
    }

    pub(super) fn named(self, dtype: DType) -> NamedVariant {
        let Tiling { tile_m, tile_h, panels, stages, warpgroups } = self;
        let name = format!(
            "{dtype} {tile_m}x{tile_h} panels{panels} stages{stages} warpgroups{warpgroups}"
        );
        NamedVariant { name, variant: self.variant(dtype) }
    }

    fn variant(self, dtype: DType) -> Variant {
        let tile = [
            ("TILE_M", self.tile_m),
            ("TILE_H", self.tile_h),
            ("PANELS", self.panels),
            ("WARPGROUPS", self.warpgroups),
            ("STAGES", self.stages),
            ("UNDER_WAY", self.under_way()),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        let [a, b, c, d, e, f, g] = tile.map(|(name, value)| define(name, value));
        Variant::new(&FILE, [element_define(dtype), a, b, c, d, e, f, g])
    }
}

#[repr(C, align(64))]
struct Params {
    tokens: TensorMap,
    weights: TensorMap,
    extents: Extents,
    y: u64,
    y_stride: i64,
    bias: u64,
}

pub(crate) fn function(cuda: &Cuda, tiling: Tiling, dtype: DType) -> Result<Function> {
    let shared = tiling.shared_bytes() as u32;
    let function = cuda.function(&tiling.variant(dtype), "sm90_skinny_gemm", shared)?;
    function.keep_all_shared()?;
    Ok(function)
}

/// The tiling of a product on a device; `beside` as [`Call`].
pub(crate) fn tiling(cuda: &Cuda, shape: [usize; 3], beside: bool) -> Tiling {
    Tiling::new(shape, cuda.facts().sm_count as usize, beside)
}

/// Enqueues y = x·W + b.
///
/// # Safety
/// The call's addresses are memory of the stream's device that stays valid until the kernel has run; y overlaps
/// nothing else, and its rows do not overlap. There are tokens, and features of both kinds. No grid before this one on
/// the stream writes the weights: they are read before it has ended.
/// That grid lets this one go only after its own wait, or not at all: this one lets the next grid go before its wait, and
/// what that reads before waiting must have been written.
pub(crate) unsafe fn launch(stream: &Stream, call: &Call<'_>) -> Result<()> {
    let (cuda, w) = (stream.cuda(), &call.weights);
    let tiling = tiling(cuda, [call.m, w.in_features, w.out_features], call.beside);
    let function = function(cuda, tiling, call.dtype)?;
    let boxes = |matrix, rows, box_rows: usize| Boxes {
        dtype: call.dtype,
        matrix,
        rows,
        cols: w.in_features,
        box_rows: box_rows as u32,
        box_cols: PANEL,
    };
    let encode = |boxes: Boxes| move || TensorMap::encode(cuda.driver(), &boxes);
    // Rows that do not exist cost TMA more time than others.
    let tokens = boxes(call.x, call.m, call.m);
    let weights = boxes(Tensor::new(w.ptr, w.row_stride), w.out_features, tiling.tile_h);
    let params = Params {
        tokens: call.maps.operands.get(tokens, encode(tokens))?,
        weights: call.maps.weights.get(weights, encode(weights))?,
        extents: Extents::new([call.m, w.out_features, w.in_features], 1),
        y: call.y.data,
        y_stride: call.y.stride,
        bias: w.bias.unwrap_or(0),
    };
    let launch = LaunchConfig {
        grid: [w.out_features.div_ceil(tiling.tile_h) as u32, 1, 1],
        block: (tiling.warpgroups * 128 + FEEDERS * 32) as u32,
        dynamic_shared: tiling.shared_bytes() as u32,
        // It waits before it reads anything but weights, or writes. Graphs can hold such launches since then.
        programmatic: cuda.facts().driver_version >= (12, 3),
        ..LaunchConfig::default()
    };
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every tile of tokens with the widths that models of an H200's SMs have, and the widest.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let widths = [896, 2048, 4096, 8192];
    let tilings = [8, 16, MOST_TOKENS].into_iter().flat_map(|m| {
        let of = move |beside| {
            widths.map(move |outputs| Tiling::new([m, 4 * outputs, outputs], 132, beside))
        };
        [false, true].into_iter().flat_map(of)
    });
    tilings.map(|tiling| tiling.named(dtype)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [bool; 2] = [false, true];

    #[test]
    fn blocks_fit_a_multiprocessor() {
        for (m, beside) in (1..=MOST_TOKENS).flat_map(|m| FORMS.map(|beside| (m, beside))) {
            for outputs in (1..20_000).step_by(89) {
                for inputs in [1, 64, 4864, 14_336, 65_536] {
                    let tiling = Tiling::new([m, inputs, outputs], 132, beside);
                    let room = if beside { BESIDE } else { ALONE };
                    assert!(tiling.tile_m >= m && tiling.shared_bytes() <= room, "{tiling:?}");
                    let Tiling { stages, warpgroups, .. } = tiling;
                    assert!(stages >= warpgroups && tiling.ring() >= tiling.sums(), "{tiling:?}");
                    assert!(stages.is_multiple_of(warpgroups), "{tiling:?}");
                }
            }
        }
        assert_eq!(size_of::<Params>(), 320);
    }

    #[test]
    fn every_multiprocessor_has_as_many_features() {
        let fitted = |outputs| Tiling::new([16, 4 * outputs, outputs], 132, false).tile_h;
        assert_eq!([896, 2048, 3584, 4096, 8192].map(fitted), [8, 16, 32, 32, 64]);
        // Two tiles each, and fewer than eight features for each.
        assert_eq!([16_384, 256].map(fitted), [64, 8]);
    }

    /// Memory gives an SM 21 KB in the time that an answer takes; with 32 tokens most of the narrowest
    /// tile's stages are theirs. Beside another kernel there is less, and the other one's.
    #[test]
    fn enough_is_under_way() {
        for outputs in [896, 2048, 4096, 8192] {
            for (m, beside) in [1, 16, 32].into_iter().flat_map(|m| FORMS.map(|b| (m, b))) {
                let tiling = Tiling::new([m, 4 * outputs, outputs], 132, beside);
                let weights = tiling.stages * tiling.panels * tiling.tile_h * LINE;
                let all = tiling.tile_h * 8 * outputs;
                let least = if beside { 12 } else { 36 } * 1024;
                assert!(weights >= all.min(least), "{tiling:?}");
            }
        }
    }
}
