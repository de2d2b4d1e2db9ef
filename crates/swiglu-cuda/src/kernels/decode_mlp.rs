//! Launches `device/decode_mlp.cu`: the feed-forward block for a few tokens.

use std::fmt;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use swiglu_core::{Activation, DType, Numerics, Op, Problem};

use super::NamedVariant;
use super::elementwise::{Tensor, signed};
use super::gate::{Formula, GateCode};
use super::gated_gemm::counted;
use crate::arch::Arch;
use crate::context::{Context, Cuda, DeviceFacts};
use crate::error::Result;
use crate::jit::{KernelFile, Variant, define};
use crate::launch::{Function, LaunchConfig, launch as enqueue};
use crate::stream::Stream;

static FILE: KernelFile =
    KernelFile::new("decode_mlp.cu", include_str!("../../device/decode_mlp.cu"));
static SEQUENTIAL: KernelFile =
    KernelFile::new("sequential_mlp.cu", include_str!("../../device/sequential_mlp.cu"));

/// The device files of all designs.
pub(super) fn files() -> [&'static KernelFile; 2] {
    [&FILE, &SEQUENTIAL]
}

/// How the decode kernel computes a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Design {
    /// One, whose blocks all run at the same time and wait for each other between the two halves.
    OneLaunch,
    /// Two, the second of which starts while the first ends, where the device can do that.
    TwoLaunches,
    /// One launch of one thread block, as a warning: fused, and on one multiprocessor. Only
    /// measurements ask for it.
    Sequential,
}

impl Design {
    /// What plans choose from.
    pub(crate) const ALL: [Design; 2] = [Design::OneLaunch, Design::TwoLaunches];
}

impl fmt::Display for Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Design::OneLaunch => "decode_mlp one launch",
            Design::TwoLaunches => "decode_mlp two launches",
            Design::Sequential => "sequential_mlp",
        })
    }
}

/// What the kernel needs to know of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) multiprocessors: usize,
    /// Bytes of shared memory that a block can have.
    pub(crate) shared: usize,
    /// Whether the blocks of a launch can be made to run at the same time.
    pub(crate) cooperative: bool,
    /// Whether a launch may start before the one before it has ended.
    pub(crate) programmatic: bool,
}

impl Limits {
    pub(crate) fn new(context: &Context, facts: &DeviceFacts, arch: Arch) -> Self {
        let cooperative = Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH;
        Self {
            multiprocessors: facts.sm_count as usize,
            shared: facts.shared_bytes_optin,
            cooperative: context.attribute(cooperative).is_ok_and(|value| value != 0),
            programmatic: arch >= Arch::Sm90a,
        }
    }
}

/// Why the kernel does not compute a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// It computes whole feed-forward blocks.
    NotABlock(Op),
    /// Without tokens or features there is nothing to stream.
    Empty,
    /// More tokens than it has sums for.
    Tokens { given: usize, most: usize },
    /// The device cannot promise that all blocks of a launch run at once.
    NotCooperative,
    /// The ring, the partial sums and x do not fit into a block's shared memory.
    SharedMemory { needed: usize, given: usize },
    /// An extent is more than the kernel counts to.
    Extent(usize),
    /// Rows of x are not whole 16 bytes, and x does not fit into shared memory.
    Unaligned,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::NotABlock(op) => write!(f, "computes mlp, not {op}"),
            Obstacle::Empty => f.write_str("an extent is 0: there is nothing to stream"),
            Obstacle::Tokens { given, most } => {
                write!(f, "{given} tokens; expected at most {most}, above which x is tiled better")
            }
            Obstacle::NotCooperative => {
                f.write_str("the device has no cooperative launch, so no barrier of the grid")
            }
            Obstacle::SharedMemory { needed, given } => {
                write!(f, "needs {needed} bytes of shared memory, a block has {given}")
            }
            Obstacle::Extent(n) => write!(f, "{n} is more than the kernel counts to"),
            Obstacle::Unaligned => {
                f.write_str("rows of x are not whole 16 bytes, and x does not fit shared memory")
            }
        }
    }
}

/// The most tokens of any type.
pub(crate) const MOST_TOKENS: usize = 16;

/// How products are computed, and the most tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Math {
    Fma(usize),
    Tensor(usize),
}

impl Math {
    /// For so many tokens: tensor cores above two, see the head of the device file.
    fn of(dtype: DType, m: usize) -> Result<Self, Obstacle> {
        const F32: [usize; 4] = [1, 2, 4, 8];
        let most = if dtype == DType::F32 { 8 } else { MOST_TOKENS };
        let refused = Obstacle::Tokens { given: m, most };
        match (dtype, m) {
            (_, 0) => Err(Obstacle::Empty),
            (DType::F32, _) => F32.into_iter().find(|&n| m <= n).map(Math::Fma).ok_or(refused),
            (_, 1..=2) => Ok(Math::Fma(m)),
            (_, 3..=8) => Ok(Math::Tensor(8)),
            (_, 9..=16) => Ok(Math::Tensor(16)),
            _ => Err(refused),
        }
    }

    fn tokens(self) -> usize {
        match self {
            Math::Fma(tokens) | Math::Tensor(tokens) => tokens,
        }
    }
}

/// Which of the two halves a launch computes: PART.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Part {
    Both = 0,
    GateUp = 1,
    Down = 2,
    Sequential = 3,
}

/// What a launch is compiled and shaped for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Config {
    part: Part,
    math: Math,
    stage_x: bool,
    warps: usize,
    depth: usize,
    grid: usize,
    /// Bytes of shared memory before x.
    x_at: usize,
    /// Bytes from token to token of x in shared memory.
    x_pitch: usize,
    shared: usize,
}

/// Rows that partial sums of a tile are for, and floats between tokens: as in the device file.
const UNIT_PAIRS: usize = 8;
const UNIT_ROWS: usize = 16;
const TOKEN_PITCH: usize = 20;

impl Config {
    fn ring_bytes(warps: usize, depth: usize) -> usize {
        warps * depth * 1024
    }

    fn new(
        part: Part,
        math: Math,
        problem: &Problem,
        (stage_x, warps, depth): (bool, usize, usize),
        grid: usize,
    ) -> Self {
        let pairs = problem.intermediate.div_ceil(grid);
        let rows = problem.hidden.div_ceil(grid);
        let tiles = match part {
            Part::Both => pairs.div_ceil(UNIT_PAIRS).max(rows.div_ceil(UNIT_ROWS)),
            Part::GateUp => pairs.div_ceil(UNIT_PAIRS),
            Part::Down => rows.div_ceil(UNIT_ROWS),
            // It keeps its sums in registers.
            Part::Sequential => 0,
        };
        let slots = (warps + tiles) * math.tokens() * TOKEN_PITCH * 4;
        let x_at = (Self::ring_bytes(warps, depth) + slots).next_multiple_of(16);
        // An odd multiple of 64 bytes: eight rows of a fragment then lie in different banks.
        let row = (problem.hidden * problem.dtype.size()).next_multiple_of(64);
        let x_pitch = if row.is_multiple_of(128) { row + 64 } else { row };
        let x = if stage_x { problem.m * x_pitch } else { 0 };
        Self { part, math, stage_x, warps, depth, grid, x_at, x_pitch, shared: x_at + x }
    }

    /// One block of 16 warps, without shared memory.
    fn sequential(m: usize) -> Result<Self, Obstacle> {
        let tokens = [1, 4, MOST_TOKENS].into_iter().find(|&n| m <= n);
        let refused = Obstacle::Tokens { given: m, most: MOST_TOKENS };
        let math = Math::Fma(tokens.ok_or(refused)?);
        Ok(Self {
            part: Part::Sequential,
            math,
            stage_x: false,
            warps: 16,
            depth: 0,
            grid: 1,
            x_at: 0,
            x_pitch: 0,
            shared: 0,
        })
    }

    /// The deepest ring that fits, x in shared memory if possible.
    fn fit(part: Part, problem: &Problem, limits: &Limits) -> Result<Self, Obstacle> {
        let math = Math::of(problem.dtype, problem.m)?;
        const ONE: [(usize, usize); 3] = [(16, 8), (16, 4), (8, 4)];
        // Two blocks of the two launches can be on a multiprocessor together.
        const TWO: [(usize, usize); 2] = [(8, 8), (8, 4)];
        let rings = if part == Part::Both { &ONE[..] } else { &TWO[..] };
        // One launch must run at once; of two each may be longer than a wave.
        let waves = if part == Part::Both { 1..=1 } else { 1..=MOST_WAVES };
        let mut least = usize::MAX;
        for wave in waves {
            for stage_x in [true, false] {
                if part == Part::Down && stage_x {
                    continue;
                }
                for &(warps, depth) in rings {
                    let grid = limits.multiprocessors.max(1) * wave;
                    let config = Self::new(part, math, problem, (stage_x, warps, depth), grid);
                    if config.shared <= limits.shared {
                        return Ok(config);
                    }
                    least = least.min(config.shared);
                }
            }
        }
        Err(Obstacle::SharedMemory { needed: least, given: limits.shared })
    }

    fn variant(self, code: GateCode) -> Variant {
        // The down projection has no activation: one module for all of them.
        let code = match self.part {
            Part::Down => {
                let numerics = Numerics::default_for(code.dtype());
                GateCode::new(&Activation::SWIGLU, numerics, code.dtype())
            }
            _ => code,
        };
        let [a, b, c, d, e] = code.defines();
        if self.part == Part::Sequential {
            let rest = [define("TOKENS", self.math.tokens()), define("WARPS", self.warps)];
            return Variant::new(&SEQUENTIAL, [a, b, c, d, e, rest[0], rest[1]]);
        }
        let rest = [
            ("TENSOR", usize::from(matches!(self.math, Math::Tensor(_)))),
            ("TOKENS", self.math.tokens()),
            ("STAGE_X", usize::from(self.stage_x)),
            ("WARPS", self.warps),
            ("DEPTH", self.depth),
            ("PART", self.part as usize),
            ("RING_BYTES", Self::ring_bytes(self.warps, self.depth)),
        ];
        let [f, g, h, i, j, k, l] = rest.map(|(name, value)| define(name, value));
        Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l])
    }

    fn function(self, cuda: &Cuda, code: GateCode) -> Result<Function> {
        let entry = if self.part == Part::Sequential { "sequential_mlp" } else { "decode_mlp" };
        cuda.function(&self.variant(code), entry, self.shared as u32)
    }
}

/// More waves of blocks than this would be a device of very little shared memory.
const MOST_WAVES: usize = 64;

/// The launches of a call: data, until they are enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decode {
    design: Design,
    first: Config,
    second: Option<Config>,
    programmatic: bool,
}

impl Decode {
    /// The launches for a problem on a device, or why there are none.
    pub(crate) fn check_problem(
        design: Design,
        problem: &Problem,
        limits: &Limits,
    ) -> Result<Self, Obstacle> {
        if problem.op != Op::Mlp {
            return Err(Obstacle::NotABlock(problem.op));
        }
        if problem.m.min(problem.hidden).min(problem.intermediate) == 0 {
            return Err(Obstacle::Empty);
        }
        // Tokens by features, and bytes of a row, are counted in 32 bits.
        let largest = problem.hidden.max(problem.intermediate).saturating_mul(16);
        if largest > i32::MAX as usize {
            return Err(Obstacle::Extent(largest / 16));
        }
        let programmatic = limits.programmatic;
        match design {
            Design::OneLaunch if !limits.cooperative => Err(Obstacle::NotCooperative),
            Design::OneLaunch => {
                let first = Config::fit(Part::Both, problem, limits)?;
                Ok(Self { design, first, second: None, programmatic })
            }
            Design::TwoLaunches => {
                let first = Config::fit(Part::GateUp, problem, limits)?;
                let second = Some(Config::fit(Part::Down, problem, limits)?);
                Ok(Self { design, first, second, programmatic })
            }
            Design::Sequential => {
                let first = Config::sequential(problem.m)?;
                Ok(Self { design, first, second: None, programmatic })
            }
        }
    }

    pub(crate) fn design(&self) -> Design {
        self.design
    }

    /// Bytes that the rings of the whole device hold: what is under way at any time.
    pub(crate) fn ring_bytes(&self, limits: &Limits) -> usize {
        Config::ring_bytes(self.first.warps, self.first.depth) * limits.multiprocessors
    }

    /// By name, for people.
    pub(crate) fn parameters(&self) -> [(&'static str, usize); 4] {
        let first = &self.first;
        [
            ("launches", 1 + usize::from(self.second.is_some())),
            ("blocks", first.grid),
            ("warps", first.warps),
            ("ring_kib", Config::ring_bytes(first.warps, first.depth) / 1024),
        ]
    }

    /// Whether the kernel takes this x of `[m, hidden]`, or why not: plans know no strides.
    pub(crate) fn check_x(&self, x: Tensor, problem: &Problem) -> Result<(), Obstacle> {
        let end = problem.hidden * problem.dtype.size();
        let whole = end.is_multiple_of(16) && is_wide(x, problem.m, problem.dtype);
        if self.first.stage_x || whole { Ok(()) } else { Err(Obstacle::Unaligned) }
    }

    /// Compiles what a call needs.
    pub(crate) fn prepare(&self, cuda: &Cuda, code: GateCode) -> Result<()> {
        for config in [Some(self.first), self.second].into_iter().flatten() {
            config.function(cuda, code)?;
        }
        Ok(())
    }

    /// Enqueues y = act(x·Wg + bg, x·Wu + bu)·Wd + bd.
    ///
    /// # Safety
    /// The call's addresses are memory of the stream's device that stays valid until the kernels
    /// have run; h and y overlap nothing else; the barrier's word belongs to the stream and was 0
    /// before its first use. Both checks have passed for this problem and x.
    pub(crate) unsafe fn launch(&self, stream: &Stream, call: &Call) -> Result<()> {
        // SAFETY: as the caller says.
        unsafe { self.launch_part(stream, self.first, call) }?;
        match self.second {
            // SAFETY: as the caller says; the stream orders the two.
            Some(second) => unsafe { self.launch_part(stream, second, call) },
            None => Ok(()),
        }
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn launch_part(&self, stream: &Stream, config: Config, call: &Call) -> Result<()> {
        let function = config.function(stream.cuda(), call.code)?;
        let w = &call.weights;
        let [gate_bias, up_bias] = w.biases.unwrap_or_default();
        let params = Params {
            x: call.x.data,
            gate: w.gate,
            up: w.up,
            down: w.down,
            h: call.h.data,
            y: call.y.data,
            x_stride: call.x.stride,
            gate_stride: signed(w.gate_stride),
            down_stride: signed(w.down_stride),
            h_stride: call.h.stride,
            y_stride: call.y.stride,
            gate_bias,
            up_bias,
            down_bias: w.down_bias.unwrap_or(0),
            barrier: call.barrier,
            m: counted(call.m),
            k: counted(w.hidden),
            features: counted(w.intermediate),
            x_at: config.x_at as u32,
            x_pitch: config.x_pitch as u32,
            x_wide: u32::from(is_wide(call.x, call.m, call.code.dtype())),
            formula: call.formula,
        };
        let launch = LaunchConfig {
            grid: [config.grid as u32, 1, 1],
            block: (config.warps * 32) as u32,
            dynamic_shared: config.shared as u32,
            cluster: None,
            programmatic: config.part == Part::Down && self.programmatic,
            cooperative: config.part == Part::Both,
        };
        // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
        unsafe { enqueue(stream, &function, &launch, &params) }
    }
}

/// Weights in device memory, all `[out, in]`, rows padded with zeros to whole 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BlockWeights {
    pub(crate) gate: u64,
    pub(crate) up: u64,
    pub(crate) down: u64,
    /// Elements from row to row.
    pub(crate) gate_stride: usize,
    pub(crate) down_stride: usize,
    /// K.
    pub(crate) hidden: usize,
    /// H.
    pub(crate) intermediate: usize,
    /// Addresses of bg and bu, f32.
    pub(crate) biases: Option<[u64; 2]>,
    /// Address of bd, values of T.
    pub(crate) down_bias: Option<u64>,
}

/// One call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) code: GateCode,
    pub(crate) formula: Formula,
    /// M.
    pub(crate) m: usize,
    pub(crate) x: Tensor,
    /// Of the workspace; rows are padded to whole 16 bytes.
    pub(crate) h: Tensor,
    pub(crate) y: Tensor,
    pub(crate) weights: BlockWeights,
    /// Address of the word at which blocks of the grid count.
    pub(crate) barrier: u64,
}

/// Whether every row of x starts at a multiple of 16 bytes.
fn is_wide(x: Tensor, m: usize, dtype: DType) -> bool {
    let stride = if m > 1 { x.stride.unsigned_abs() * dtype.size() as u64 } else { 0 };
    (x.data | stride).is_multiple_of(16)
}

#[repr(C)]
struct Params {
    x: u64,
    gate: u64,
    up: u64,
    down: u64,
    h: u64,
    y: u64,
    x_stride: i64,
    gate_stride: i64,
    down_stride: i64,
    h_stride: i64,
    y_stride: i64,
    gate_bias: u64,
    up_bias: u64,
    down_bias: u64,
    barrier: u64,
    m: i32,
    k: i32,
    features: i32,
    x_at: u32,
    x_pitch: u32,
    x_wide: u32,
    formula: Formula,
}

/// Every activation and mode with tensor cores or, in f32, without; every class of tokens, ring and
/// place of x with the default one.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all: Vec<NamedVariant> = Vec::new();
    let mut push = |code: GateCode, part, m, ring: (bool, usize, usize)| {
        let Ok(math) = Math::of(dtype, m) else { return };
        let (stage_x, warps, depth) = ring;
        let (grid, x_at, x_pitch, shared) = (1, 0, 0, 0);
        let config = Config { part, math, stage_x, warps, depth, grid, x_at, x_pitch, shared };
        let (part, tokens) = (["both", "gate-up", "down"][part as usize], math.tokens());
        let x = if stage_x { "" } else { " cached-x" };
        let code_name = code.name();
        all.push(NamedVariant {
            name: format!("{code_name} {part} {tokens} tokens {warps}x{depth}{x}"),
            variant: config.variant(code),
        });
    };
    let most = if dtype == DType::F32 { 4 } else { 8 };
    for code in GateCode::all(dtype) {
        push(code, Part::Both, most, (true, 16, 8));
    }
    let default = super::default_code(dtype);
    for m in [1, 2, 4, 8, 16] {
        for ring in [(true, 16, 8), (true, 16, 4), (true, 8, 4), (false, 16, 8), (false, 8, 4)] {
            if m != most || ring != (true, 16, 8) {
                push(default, Part::Both, m, ring);
            }
        }
        push(default, Part::GateUp, m, (true, 8, 8));
        push(default, Part::GateUp, m, (false, 8, 8));
        push(default, Part::Down, m, (false, 8, 8));
    }
    for tokens in [1, 4, MOST_TOKENS] {
        let Ok(config) = Config::sequential(tokens) else { continue };
        all.push(NamedVariant {
            name: format!("{} {tokens} tokens sequential", default.name()),
            variant: config.variant(default),
        });
    }
    // In f32 eight tokens are the most; 4 and 8 of 16-bit types share tensor cores.
    let mut seen: Vec<Variant> = Vec::new();
    all.retain(|v| {
        let new = !seen.contains(&v.variant);
        seen.push(v.variant);
        new
    });
    all
}
