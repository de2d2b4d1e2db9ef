//! Launches `device/sm90/sm90_dgated_gemm.cu`.

use std::fmt;

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::dgated_gemm::Call;
use super::elementwise::Tensor;
use super::gate::{Formula, GateCode};
use super::gated_gemm::{Extents, Form, Multiplier, counted};
use super::raster;
use super::sm90_gated_gemm::Cut;
use super::sm90_gemm::{
    Operands, TILE_K, TILE_M, clusters, persistent, shared_bytes, stages_beside,
};
use super::tensor_map::{Boxes, PANEL, TensorMap, addressable, writable};
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{Function, launch as enqueue};
use crate::device::stream::Stream;

pub(super) static FILE: KernelFile = kernel_file!("sm90", "sm90_dgated_gemm.cu");

/// Rows of a slab, of which 64 columns are a panel.
const SLAB_ROWS: usize = 64;

/// Columns of h per tile, and consumers, half of which are a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    tile_h: usize,
    consumers: usize,
}

impl Config {
    /// The most arithmetic per byte.
    pub(crate) const WIDE: Config = Config { tile_h: 192, consumers: 2 };
    /// With an epilogue of twice as many warps: for small K, where it takes as long as the products.
    pub(crate) const NARROW: Config = Config { tile_h: 128, consumers: 4 };
    /// All of them.
    pub(crate) const ALL: [Config; 2] = [Self::WIDE, Self::NARROW];

    /// What is taken for K. `factors`: the formula, where rows have factors, for which the wide tile has no registers beside
    /// some.
    pub(crate) fn of(hidden: usize, factors: Option<GateCode>) -> Config {
        let has_registers = factors.is_none_or(GateCode::is_short);
        if hidden >= 2048 && has_registers { Self::WIDE } else { Self::NARROW }
    }

    /// Tile sizes and the like, by name.
    pub(crate) fn parameters(self) -> [(&'static str, usize); 4] {
        let Self { tile_h, consumers } = self;
        let stages = self.stages();
        [("tile_m", TILE_M), ("tile_h", tile_h), ("stages", stages), ("consumers", consumers)]
    }

    /// What its cost follows from: one matrix of weights is the work of two with half as many columns.
    pub(crate) fn form(self) -> Form {
        Form {
            tile: [TILE_M, self.tile_h / 2],
            share: 1,
            split: 1,
            blocks_per_sm: 1,
            hides_epilogue: true,
            narrow_last: true,
            multiplier: Multiplier::Wgmma { columns: self.tile_h, wanted: 1.0 },
        }
    }

    fn epilogue_bytes(self) -> usize {
        self.consumers * (3 * SLAB_ROWS * PANEL as usize * 2 + 8)
    }

    fn stages(self) -> usize {
        stages_beside(self.epilogue_bytes(), self.tile_h)
    }

    fn shared_bytes(self) -> usize {
        shared_bytes(self.stages(), self.tile_h, self.epilogue_bytes())
    }

    /// How the columns are cut, as those of [`Self::form`].
    fn cut(self, rows: usize, features: usize, multiprocessors: usize) -> Cut {
        let cut = Cut::best(rows, features.div_ceil(2), self.tile_h / 2, multiprocessors);
        match cut.tail {
            0 => Cut { full_columns: features, ..cut },
            tail => Cut { full_columns: 2 * cut.full_columns, tail: 2 * tail, ..cut },
        }
    }
}

impl fmt::Display for Config {
    /// `sm90_dgated_gemm 128x192 2 consumers`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm90_dgated_gemm {TILE_M}x{} {} consumers", self.tile_h, self.consumers)
    }
}

#[repr(C, align(64))]
struct Params {
    operands: Operands<1>,
    gate: TensorMap,
    up: TensorMap,
    gate_grad: TensorMap,
    up_grad: TensorMap,
    h: TensorMap,
    formula: Formula,
    stores_h: i32,
    scale: u64,
    dots: u64,
}

/// [`super::dgated_gemm::Kernel::check_call`].
pub(super) fn check_call(call: &Call<'_>) -> std::result::Result<(), String> {
    let (m, features) = (call.m, call.down.in_features);
    let largest = m.max(features).max(call.down.out_features);
    let tiles = m.div_ceil(TILE_M).saturating_mul(features.div_ceil(PANEL as usize));
    if largest.max(tiles) > i32::MAX as usize {
        return Err(format!("{largest} is more than a kernel counts to"));
    }
    let down = Tensor::new(call.down.ptr, call.down.row_stride);
    let reads = [
        ("the gradient of the output", call.out_grad, m),
        ("the down weight", down, 2),
        ("the saved gate", call.inputs[0], m),
        ("the saved up", call.inputs[1], m),
    ];
    let grads =
        [("the gradient of the gate", call.grads[0]), ("the gradient of the up", call.grads[1])];
    let writes = grads.into_iter().chain(call.h.map(|h| ("h", h)));
    let read = reads.iter().map(|&(what, t, rows)| (what, t, addressable(t, rows)));
    let written = writes.map(|(what, t)| (what, t, writable(t, [m, features])));
    match read.chain(written).find(|(.., takes)| !takes) {
        None => Ok(()),
        Some((what, tensor, _)) => Err(format!(
            "TMA needs {what} at a multiple of 16 bytes with rows a multiple of 16 bytes apart, and writes whole units of \
             16 bytes, given address {:#x}, rows {} bytes apart and {features} columns",
            tensor.data,
            tensor.stride * 2,
        )),
    }
}

fn variant(
    config: Config,
    tail: usize,
    code: GateCode,
    orientation: Orientation,
    scaled: bool,
) -> Variant {
    let [a, b, c, d, e] = code.defines();
    Variant::new(
        &FILE,
        [
            a,
            b,
            c,
            d,
            e,
            define("OPERANDS", 1usize),
            // What is summed over are the rows of a weight `[out, in]`.
            define("ORIENTATION", orientation == Orientation::OutIn),
            define("TILE_H", config.tile_h),
            define("TAIL_H", tail),
            define("CLUSTER", 1usize),
            define("PING_PONG", true),
            define("CONSUMERS", config.consumers),
            define("STAGES", config.stages()),
            define("SHARED_BYTES", config.shared_bytes()),
            define("ROW_SCALE", scaled),
        ],
    )
}

fn function(cuda: &Cuda, config: Config, tail: usize, call: &Call<'_>) -> Result<Function> {
    let variant = variant(config, tail, call.code, call.down.orientation, call.scale.is_some());
    cuda.function(&variant, "sm90_dgated_gemm", config.shared_bytes() as u32)
}

/// # Safety
/// As [`super::dgated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let cuda = stream.cuda();
    let (m, features, k) = (call.m, call.down.in_features, call.down.out_features);
    let sms = clusters(cuda, 1);
    let rows = m.div_ceil(TILE_M);
    let Cut { full_columns, tail, .. } = config.cut(rows, features, sms);
    let function = function(cuda, config, tail, call)?;
    let dtype = call.code.dtype();
    let map = |maps: &dyn Fn(Boxes) -> Result<TensorMap>,
               matrix,
               shape: [usize; 2],
               box_rows,
               box_cols| {
        let [rows, cols] = shape;
        maps(Boxes { dtype, matrix, rows, cols, box_rows, box_cols })
    };
    let encode = |boxes: &Boxes| TensorMap::encode(cuda.driver(), boxes);
    let operand = |boxes: Boxes| call.maps.operands.get(boxes, || encode(&boxes));
    let weight = |boxes: Boxes| call.maps.weights.get(boxes, || encode(&boxes));
    let x_rows = |rows: usize| map(&operand, call.out_grad, [m, k], rows as u32, PANEL);
    let left = (m % TILE_M).next_multiple_of(8);
    let [x, last_x] = match (m >= TILE_M, left > 0) {
        (true, true) => [x_rows(TILE_M)?, x_rows(left)?],
        (true, false) => [x_rows(TILE_M)?; 2],
        (false, _) => [x_rows(left)?; 2],
    };
    let down = Tensor::new(call.down.ptr, call.down.row_stride);
    let w = |tile: usize| match call.down.orientation {
        Orientation::OutIn => map(&weight, down, [k, features], TILE_K as u32, PANEL),
        Orientation::InOut => map(&weight, down, [features, k], tile as u32, PANEL),
    };
    let slab = |matrix| map(&operand, matrix, [m, features], SLAB_ROWS as u32, PANEL);
    let row_bytes = TILE_M.min(m) * k * dtype.size();
    let raster =
        raster::rows([TILE_M, config.tile_h / 2], rows, sms, row_bytes, cuda.facts().l2_bytes);
    let params = Params {
        operands: Operands {
            x,
            last_x,
            w: [w(config.tile_h)?],
            tail_w: [if tail > 0 { w(tail)? } else { TensorMap::UNUSED }],
            full_columns: counted(full_columns),
            extents: Extents::new([m, features, k], raster),
        },
        gate: slab(call.inputs[0])?,
        up: slab(call.inputs[1])?,
        gate_grad: slab(call.grads[0])?,
        up_grad: slab(call.grads[1])?,
        h: call.h.map_or(Ok(TensorMap::UNUSED), slab)?,
        formula: call.formula,
        stores_h: call.h.is_some().into(),
        scale: call.scale.map_or(0, |scale| scale.factors),
        dots: call.scale.map_or(0, |scale| scale.dots),
    };
    let narrow = (features - full_columns).div_ceil(tail.max(1));
    let tiles = rows * (full_columns.div_ceil(config.tile_h) + narrow);
    let launch = persistent(cuda, tiles, 1, config.consumers, config.shared_bytes());
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode, every tile and layout with the default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let named = |config: Config, tail: usize, code: GateCode, orientation: Orientation, scaled| {
        let tail_name = if tail > 0 { format!(", then {tail}") } else { String::new() };
        NamedVariant {
            name: format!(
                "{} {orientation} {config}{tail_name}{}",
                code.name(),
                super::of_scaled(scaled)
            ),
            variant: variant(config, tail, code, orientation, scaled),
        }
    };
    let default = super::default_code(dtype);
    let of_codes = |scaled| {
        let codes = GateCode::all(dtype).into_iter();
        codes.map(move |code| named(Config::NARROW, 0, code, Orientation::OutIn, scaled))
    };
    let mut all: Vec<_> = [false, true].into_iter().flat_map(of_codes).collect();
    let short = GateCode::all(dtype).into_iter().filter(|&code| code.is_short() && code != default);
    all.extend(short.map(|code| named(Config::WIDE, 0, code, Orientation::OutIn, true)));
    for config in Config::ALL {
        for orientation in Orientation::ALL {
            for tail in [0, 128, 64].into_iter().filter(|&tail| tail < config.tile_h) {
                if (config, tail, orientation) != (Config::NARROW, 0, Orientation::OutIn) {
                    all.extend(
                        [false, true]
                            .map(|scaled| named(config, tail, default, orientation, scaled)),
                    );
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
    use swiglu_core::Activation;

    #[test]
    fn the_ring_fills_the_shared_memory() {
        assert_eq!(Config::ALL.map(Config::stages), [4, 4]);
        for config in Config::ALL {
            let (used, stage) = (config.shared_bytes(), stage_bytes(config.tile_h));
            assert!(used <= SHARED_LIMIT && used + stage > SHARED_LIMIT, "{config}: {used}");
        }
        assert_eq!(size_of::<Params>(), 1280);
    }

    #[test]
    fn the_wide_tile_is_for_what_it_has_registers_for() {
        let code =
            |act, numerics: &str| GateCode::new(&act, numerics.parse().unwrap(), DType::Bf16);
        let swiglu = |numerics| Some(code(Activation::SWIGLU, numerics));
        assert_eq!(Config::of(2048, None), Config::WIDE);
        assert_eq!(Config::of(2048, swiglu("fused+fast")), Config::WIDE);
        assert_eq!(Config::of(2048, swiglu("fused+precise")), Config::NARROW);
        assert_eq!(Config::of(2047, None), Config::NARROW);
    }

    #[test]
    fn cuts_are_whole_panels_and_cover_the_columns() {
        for config in Config::ALL {
            for features in [1, 64, 172, 2048, 4864, 8191, 14336] {
                for rows in [1, 2, 3, 16, 64] {
                    let Cut { full_columns, tail, .. } = config.cut(rows, features, 132);
                    match tail {
                        0 => assert_eq!(full_columns, features),
                        _ => {
                            assert!(
                                full_columns < features
                                    && full_columns.is_multiple_of(config.tile_h)
                            );
                            assert!(tail < config.tile_h && tail.is_multiple_of(64));
                        }
                    }
                }
            }
        }
    }
}
