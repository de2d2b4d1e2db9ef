//! What the fused gated GEMM kernels share: which there are, what each takes, and what follows from its tile.

mod call;

use std::fmt;

use swiglu_core::{DType, Problem};

use self::call::check_tma;
pub(crate) use self::call::{Call, Layout, Shape};
pub(super) use self::call::{Epilogue, Extents, counted};
use super::elementwise::Tensor;
use super::gate::GateCode;
use super::obstacle::Obstacle;
use super::ring::Ring;
use super::sm90_skinny_gated_gemm::Next;
use super::tensor_map::addressable;
use super::weights::Bias;
use super::{
    NamedVariant, decode_mlp, mma_gated_gemm, mma_gemm, simt_gated_gemm, sm90_gated_gemm,
    sm90_register_gemm, sm90_skinny_gated_gemm, sm90_skinny_gemm,
};
use crate::device::arch::Arch;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::KernelFile;
use crate::device::stream::Stream;

/// The device files of all ways of computing a layer.
pub(crate) fn files() -> [&'static KernelFile; 9] {
    let [decode, sm90_decode, sequential] = decode_mlp::files();
    [
        decode,
        sm90_decode,
        sequential,
        &sm90_gated_gemm::FILE,
        &sm90_skinny_gated_gemm::FILE,
        &sm90_skinny_gemm::FILE,
        &sm90_register_gemm::FILE,
        &mma_gated_gemm::FILE,
        &simt_gated_gemm::FILE,
    ]
}

/// What multiplies in a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Multiplier {
    /// wgmma with so many columns of B, and the share of its products that is wanted.
    Wgmma { columns: usize, wanted: f64 },
    /// mma.sync, with this share of its rate where enough warps run. A block has so many, and takes so many bytes of shared
    /// memory, of which few devices have room for as many blocks as [`Form::blocks_per_sm`] says.
    Mma { share: f64, warps: usize, shared: usize },
    /// Fused multiply-adds.
    Fma,
}

/// What a kernel's cost follows from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Form {
    /// Rows and columns of h that one block, or the blocks that split its k, compute at a time.
    pub(crate) tile: [usize; 2],
    /// Blocks of a cluster that share weights, each with a tile of its own.
    pub(crate) share: usize,
    /// Blocks of a cluster that each multiply a part of k of one tile.
    pub(crate) split: usize,
    /// Blocks that run on an SM at the same time.
    pub(crate) blocks_per_sm: usize,
    /// Whether a block multiplies a tile while it activates another.
    pub(crate) hides_epilogue: bool,
    /// Whether narrower tiles fill the last wave: see [`sm90_gated_gemm::Cut`].
    pub(crate) narrow_last: bool,
    pub(crate) multiplier: Multiplier,
}

/// A fused kernel with its tile: data, until it is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    /// Hopper's wgmma and TMA.
    Sm90(sm90_gated_gemm::Config),
    /// The same for few rows.
    Sm90Skinny(sm90_skinny_gated_gemm::Config),
    /// Tensor cores of a warp, from sm_80.
    Mma(mma_gemm::Config),
    /// f32 without tensor cores.
    Simt,
}

impl Kernel {
    /// Every kernel in every tile.
    pub(crate) fn all() -> impl Iterator<Item = Kernel> {
        let sm90 = sm90_gated_gemm::Config::ALL.into_iter().map(Kernel::Sm90);
        let skinny = sm90_skinny_gated_gemm::Config::ALL.into_iter().map(Kernel::Sm90Skinny);
        let mma = mma_gemm::Config::ALL.into_iter().map(Kernel::Mma);
        sm90.chain(skinny).chain(mma).chain([Kernel::Simt])
    }

    /// As what computes h where a feed-forward block of few tokens goes on with a kernel of ours, if it does.
    pub(crate) fn before_down(self) -> impl Iterator<Item = Kernel> {
        let forms = match self {
            Kernel::Sm90Skinny(config) => Some(config.before_down()),
            _ => None,
        };
        forms.into_iter().flatten().map(Kernel::Sm90Skinny)
    }

    /// What runs after it.
    pub(crate) fn next(self) -> Next {
        match self {
            Kernel::Sm90Skinny(config) => config.next(),
            _ => Next::Unknown,
        }
    }

    /// The name of the kernel, without its tile.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kernel::Sm90(_) => "sm90_gated_gemm",
            Kernel::Sm90Skinny(_) => "sm90_skinny_gated_gemm",
            Kernel::Mma(_) => "mma_gated_gemm",
            Kernel::Simt => "simt_gated_gemm",
        }
    }

    /// Rows and columns of h per tile.
    pub(crate) fn tile(self, shape: Shape) -> [usize; 2] {
        match self {
            Kernel::Sm90(config) => config.tile(),
            Kernel::Sm90Skinny(config) => config.tiling(shape).tile(),
            Kernel::Mma(config) => config.tile(),
            Kernel::Simt => simt_gated_gemm::TILE,
        }
    }

    /// Blocks that work together.
    pub(crate) fn cluster(self) -> usize {
        match self {
            Kernel::Sm90(config) => config.cluster(),
            Kernel::Sm90Skinny(config) => config.cluster(),
            Kernel::Mma(_) | Kernel::Simt => 1,
        }
    }

    /// Whether each sum is made from the first k to the last: no blocks share k, and no bias is what it begins with.
    pub(crate) fn sums_in_order_of_k(self, bias: bool) -> bool {
        match self {
            Kernel::Sm90(config) => !(bias && config.ping_pong()),
            Kernel::Sm90Skinny(config) => config.cluster() == 1,
            Kernel::Mma(_) | Kernel::Simt => true,
        }
    }

    /// What its cost follows from.
    pub(crate) fn form(self, shape: Shape) -> Form {
        match self {
            Kernel::Sm90(config) => config.form(),
            Kernel::Sm90Skinny(config) => config.tiling(shape).form(),
            Kernel::Mma(config) => config.form(),
            Kernel::Simt => Form {
                tile: simt_gated_gemm::TILE,
                share: 1,
                split: 1,
                blocks_per_sm: 1,
                hides_epilogue: false,
                narrow_last: false,
                multiplier: Multiplier::Fma,
            },
        }
    }

    fn stages(self, shape: Shape) -> usize {
        match self {
            Kernel::Sm90(config) => config.stages(false),
            Kernel::Sm90Skinny(config) => config.tiling(shape).stages(),
            Kernel::Mma(config) => config.stages(),
            Kernel::Simt => simt_gated_gemm::STAGES,
        }
    }

    /// Its ring for a problem.
    pub(crate) fn ring(self, problem: &Problem, multiprocessors: usize) -> Ring {
        // Of k, that the blocks which split it take together.
        let step = match self {
            Kernel::Sm90(_) => sm90_gated_gemm::TILE_K,
            Kernel::Sm90Skinny(config) => config.cluster() * sm90_skinny_gated_gemm::TILE_K,
            Kernel::Mma(config) => config.step(problem.dtype),
            Kernel::Simt => simt_gated_gemm::TILE_K,
        };
        let stages = self.stages(Shape::of(problem, multiprocessors));
        Ring { stages, filled: problem.hidden / step }
    }

    /// Tile sizes and the like, by name.
    pub(crate) fn parameters(self, shape: Shape) -> [(&'static str, usize); 4] {
        let [tile_m, tile_h] = self.tile(shape);
        let stages = self.stages(shape);
        [("tile_m", tile_m), ("tile_h", tile_h), ("stages", stages), ("cluster", self.cluster())]
    }

    /// Whether weights `[in, out]` are copied in rows of less than 128 bytes, which nobody measured.
    pub(crate) fn copies_narrow_rows(self) -> bool {
        matches!(self, Kernel::Sm90(config) if config.copies_narrow_rows())
    }

    /// Whether addresses and row strides must be those that TMA takes.
    pub(crate) fn needs_tma(self) -> bool {
        match self {
            Kernel::Sm90(_) | Kernel::Sm90Skinny(_) => true,
            Kernel::Mma(_) | Kernel::Simt => false,
        }
    }

    /// Whether the kernel computes a problem on an architecture, or why not: what can be said before
    /// there are addresses. `tf32`: whether f32 factors may be rounded.
    pub(crate) fn check_problem(
        self,
        arch: Arch,
        problem: &Problem,
        tf32: bool,
    ) -> Result<(), Obstacle> {
        let dtype = problem.dtype;
        let wgmma = self.needs_tma();
        match self {
            _ if wgmma && arch != Arch::Sm90a => Err(Obstacle::NoWgmma(arch)),
            _ if wgmma && dtype == DType::F32 => Err(Obstacle::ElementType(dtype)),
            _ if wgmma && problem.hidden == 0 => Err(Obstacle::NothingToMultiply),
            Kernel::Sm90Skinny(config) if !config.can_split(problem.hidden) => {
                Err(Obstacle::TooFewToSplit(config.cluster()))
            }
            Kernel::Mma(_) if dtype == DType::F32 && !tf32 => Err(Obstacle::WouldRound),
            Kernel::Simt if dtype != DType::F32 => Err(Obstacle::ElementType(dtype)),
            Kernel::Simt if tf32 => Err(Obstacle::Tf32AskedFor),
            Kernel::Sm90(_) | Kernel::Sm90Skinny(_) | Kernel::Mma(_) | Kernel::Simt => Ok(()),
        }
    }

    /// Whether these addresses, strides and extents can be launched, or why not.
    pub(crate) fn check_call(self, cuda: &Cuda, call: &Call<'_>) -> Result<(), String> {
        let w = &call.weights;
        let tiles = call.tiles(self.tile(call.shape(cuda)));
        let largest = call.m.max(w.intermediate).max(w.hidden).max(tiles);
        if largest > i32::MAX as usize {
            return Err(format!("{largest} is more than a kernel counts to"));
        }
        let bytes = w.intermediate.max(w.hidden).saturating_mul(call.code.dtype().size());
        // It counts places within a row in bytes.
        if matches!(self, Kernel::Mma(_)) && bytes > i32::MAX as usize {
            return Err(format!("rows of {bytes} bytes are more than the kernel counts to"));
        }
        match self {
            Kernel::Sm90(_) | Kernel::Sm90Skinny(_) => check_tma(call),
            Kernel::Mma(_) | Kernel::Simt => Ok(()),
        }
    }

    /// Enqueues h = act(x·Wg + bg, x·Wu + bu).
    ///
    /// # Safety
    /// The call's addresses are memory of the stream's device that stays valid until the kernel has
    /// run; out overlaps nothing else, and its rows do not overlap. No kernel that this one may run beside, the
    /// one before it on the stream, writes the weights. Both checks have passed.
    pub(crate) unsafe fn launch(self, stream: &Stream, call: &Call<'_>) -> Result<()> {
        if call.m == 0 || call.weights.intermediate == 0 {
            return Ok(());
        }
        // SAFETY: as the caller says.
        unsafe {
            match self {
                Kernel::Sm90(config) => sm90_gated_gemm::launch(stream, config, call),
                Kernel::Sm90Skinny(config) => sm90_skinny_gated_gemm::launch(stream, config, call),
                Kernel::Mma(config) => mma_gated_gemm::launch(stream, config, call),
                Kernel::Simt => simt_gated_gemm::launch(stream, call),
            }
        }
    }

    /// What [`Self::prepare`] compiles for a problem with packed weights on so many SMs; none for a problem
    /// whose x it does not take.
    pub(crate) fn needed(
        self,
        problem: &Problem,
        code: GateCode,
        multiprocessors: usize,
    ) -> Option<NamedVariant> {
        let shape = Shape::of(problem, multiprocessors);
        let bias = if problem.bias { Bias::Floats } else { Bias::None };
        let layout = Layout { orientation: shape.orientation, bias, saves: false };
        if !self.takes_rows_of(problem) {
            return None;
        }
        Some(match self {
            Kernel::Sm90(config) => sm90_gated_gemm::needed(config, code, layout, shape),
            Kernel::Sm90Skinny(config) => {
                sm90_skinny_gated_gemm::named(config.tiling(shape), code, layout)
            }
            Kernel::Mma(config) => {
                mma_gated_gemm::needed(config, code, layout, [problem.m, problem.hidden])
            }
            Kernel::Simt => simt_gated_gemm::named(code, layout),
        })
    }

    /// Whether it takes rows of x that lie one behind the other.
    pub(crate) fn takes_rows_of(self, problem: &Problem) -> bool {
        !self.needs_tma() || addressable(Tensor::new(0, problem.hidden), problem.m)
    }

    /// Compiles what a launch needs.
    pub(crate) fn prepare(self, cuda: &Cuda, call: &Call<'_>) -> Result<()> {
        let (code, layout, shape) = (call.code, call.layout(), call.shape(cuda));
        let function = match self {
            Kernel::Sm90(config) => sm90_gated_gemm::prepare(cuda, config, code, layout, shape),
            Kernel::Sm90Skinny(config) => {
                sm90_skinny_gated_gemm::function(cuda, config.tiling(shape), code, layout)
            }
            Kernel::Mma(config) => mma_gated_gemm::prepare(cuda, config, call),
            Kernel::Simt => simt_gated_gemm::function(cuda, code, layout),
        };
        function.map(drop)
    }
}

impl fmt::Display for Kernel {
    /// `sm90_gated_gemm 128x64`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        let tile = |[rows, columns]: [usize; 2]| format!("{name} {rows}x{columns}");
        f.pad(&match self {
            Kernel::Sm90(config) if config.ping_pong() => tile(config.tile()) + " ping-pong",
            Kernel::Sm90(config) => tile(config.tile()),
            Kernel::Sm90Skinny(config) => format!("{name} {config}"),
            Kernel::Mma(config) => tile(config.tile()),
            Kernel::Simt => tile(simt_gated_gemm::TILE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swiglu_core::{Activation, Numerics, Op, Orientation, WeightLayout};

    #[test]
    fn some_kernel_computes_everything_on_every_architecture() {
        let everything = Activation::family().into_iter().flat_map(|activation| {
            DType::ALL.into_iter().flat_map(move |dtype| {
                Orientation::ALL.into_iter().flat_map(move |orientation| {
                    [0, 64].map(|hidden| {
                        Problem::new(Op::GatedLinear, 1, hidden, 64, dtype, activation)
                            .with_numerics(Numerics::default_for(dtype))
                            .with_layout(WeightLayout { orientation, ..WeightLayout::HF })
                    })
                })
            })
        });
        for problem in everything {
            for arch in Arch::ALL {
                for tf32 in [false, true] {
                    let computes = |k: Kernel| k.check_problem(arch, &problem, tf32).is_ok();
                    assert!(Kernel::all().any(computes), "{problem} on {arch}, tf32 {tf32}");
                }
            }
        }
    }
}
