//! What a launch of the decode kernel is compiled and shaped for.

use swiglu_core::{Activation, Numerics, Problem};

use super::super::gate::GateCode;
use super::super::ring::Ring;
use super::format::{Format, Math, UNIT_BYTES};
use super::sm90_decode_mlp::{self, Feeding};
use super::sm90_held_mlp::{self, Held};
use super::{Limits, Obstacle};
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::Function;

static FILE: KernelFile = kernel_file!("decode", "decode_mlp.cu");
static SEQUENTIAL: KernelFile = kernel_file!("decode", "sequential_mlp.cu");

/// The device files of all designs that compute with elements: what is tuned.
pub(in crate::kernels) fn files() -> [&'static KernelFile; 3] {
    [&FILE, &sm90_decode_mlp::FILE, &SEQUENTIAL]
}

/// The most tokens of any type.
pub(crate) const MOST_TOKENS: usize = 16;

/// Which of the two halves a launch computes: PART.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Both = 0,
    GateUp = 1,
    Down = 2,
    Sequential = 3,
}

/// How weights come to shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Feed {
    /// Each lane copies what it multiplies: `decode_mlp.cu`.
    Lanes,
    /// By TMA: `sm90_decode_mlp.cu`.
    Tma(Feeding),
    /// All of a block's at once, quantised: `sm90_held_mlp.cu`.
    Held(Held),
}

/// What a launch is compiled and shaped for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Config {
    pub(super) part: Part,
    pub(super) math: Math,
    pub(super) formats: [Format; 2],
    pub(super) feed: Feed,
    pub(super) stage_x: bool,
    /// That multiply.
    pub(super) warps: usize,
    pub(super) depth: usize,
    pub(super) grid: usize,
    /// Bytes of shared memory before x.
    pub(super) x_at: usize,
    /// Bytes from token to token of x in shared memory.
    pub(super) x_pitch: usize,
    pub(super) shared: usize,
}

/// Bytes from row to row of `bytes` in shared memory: an odd multiple of 64, so that eight rows of a fragment
/// lie in different banks.
pub(super) fn pitch(bytes: usize) -> usize {
    (bytes + UNIT_BYTES - 1) / 128 * 128 + 64
}

/// Features and columns of a tile, as in the device file.
const UNIT_PAIRS: usize = 8;
const UNIT_ROWS: usize = 16;

impl Config {
    /// 16 rows of 64 bytes for each unit, and scales for each lane's two rows.
    fn ring_bytes(warps: usize, depth: usize, formats: [Format; 2]) -> usize {
        let scales = formats.into_iter().map(Format::scale_bytes).max().unwrap_or(0);
        warps * depth * (1024 + 64 * scales)
    }

    pub(super) fn ring(&self) -> usize {
        match self.feed {
            Feed::Lanes => Self::ring_bytes(self.warps, self.depth, self.formats),
            Feed::Tma(feeding) => feeding.ring.bytes(),
            Feed::Held(_) => 0,
        }
    }

    /// The rings of a block, or of a warp where each has its own, with the least that is left for one.
    pub(super) fn rings(&self, problem: &Problem) -> Vec<Ring> {
        match self.feed {
            Feed::Lanes => {
                let units = |rows: usize, tile: usize, format: Format, extent: usize| {
                    let unit = UNIT_BYTES / problem.dtype.size();
                    let row = match format {
                        Format::Elements => extent.div_ceil(unit),
                        _ => format.units(extent),
                    };
                    (rows / self.grid).div_ceil(tile) * row / self.warps
                };
                let (k, h) = (problem.hidden, problem.intermediate);
                let gate_up = units(h, UNIT_PAIRS, self.formats[0], k);
                let down = units(k, UNIT_ROWS, self.formats[1], h);
                let filled = match self.part {
                    Part::Both => gate_up + down,
                    Part::GateUp => gate_up,
                    Part::Down => down,
                    Part::Sequential => return Vec::new(),
                };
                vec![Ring { stages: self.depth, filled }]
            }
            Feed::Tma(feeding) => feeding.ring.rings(self.stage_x).to_vec(),
            // All of it is there at once.
            Feed::Held(_) => Vec::new(),
        }
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> usize {
        let copying = match self.feed {
            Feed::Lanes | Feed::Held(_) => 0,
            Feed::Tma(_) => sm90_decode_mlp::COPYING,
        };
        (self.warps + copying) * 32
    }

    /// A launch of nothing, for the fields that a kernel has no use for.
    pub(super) const NOTHING: Self = Self {
        part: Part::Both,
        math: Math::Fma(1),
        formats: [Format::Elements; 2],
        feed: Feed::Lanes,
        stage_x: false,
        warps: 0,
        depth: 0,
        grid: 1,
        x_at: 0,
        x_pitch: 0,
        shared: 0,
    };

    fn new(
        part: Part,
        (math, formats): (Math, [Format; 2]),
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
        let slots = (warps + tiles) * math.tokens() * UNIT_ROWS * size_of::<f32>();
        let x_at = (Self::ring_bytes(warps, depth, formats) + slots).next_multiple_of(16);
        let whole = 64 * formats[0].blocks();
        let x_pitch = pitch((problem.hidden * problem.dtype.size()).next_multiple_of(whole));
        let x = if stage_x { problem.m * x_pitch } else { 0 };
        let shared = x_at + x;
        let feed = Feed::Lanes;
        Self { part, math, formats, feed, stage_x, warps, depth, grid, x_at, x_pitch, shared }
    }

    /// One block of 16 warps, without shared memory.
    pub(super) fn sequential(m: usize) -> Result<Self, Obstacle> {
        let tokens = [1, 4, MOST_TOKENS].into_iter().find(|&n| m <= n);
        let refused = Obstacle::Tokens { given: m, most: MOST_TOKENS };
        let math = Math::Fma(tokens.ok_or(refused)?);
        Ok(Self { part: Part::Sequential, math, warps: 16, ..Self::NOTHING })
    }

    /// The deepest ring that fits, x in shared memory if possible.
    pub(super) fn fit(part: Part, problem: &Problem, limits: &Limits) -> Result<Self, Obstacle> {
        let formats = Format::of_problem(problem)?;
        let math = Math::of_problem(problem)?;
        const ONE: [(usize, usize); 3] = [(16, 8), (16, 4), (8, 4)];
        // Two blocks of the two launches can be on an SM together.
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
                    let config =
                        Self::new(part, (math, formats), problem, (stage_x, warps, depth), grid);
                    if config.shared <= limits.shared {
                        return Ok(config);
                    }
                    least = least.min(config.shared);
                }
            }
        }
        Err(Obstacle::SharedMemory { needed: least, given: limits.shared })
    }

    pub(super) fn variant(self, code: GateCode) -> Variant {
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
        let shared = [
            ("TENSOR", usize::from(matches!(self.math, Math::Tensor(_)))),
            ("TOKENS", self.math.tokens()),
            ("STAGE_X", usize::from(self.stage_x)),
            ("WARPS", self.warps),
            ("PART", self.part as usize),
        ];
        let [f, g, h, i, j] = shared.map(|(name, value)| define(name, value));
        let formats = [
            ("FORMAT_GATE_UP", self.formats[0] as usize),
            ("FORMAT_DOWN", self.formats[1] as usize),
        ];
        let [k, l] = formats.map(|(name, value)| define(name, value));
        if let Feed::Tma(feeding) = self.feed {
            let [j, m, n, o] = feeding.defines();
            let all = [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o];
            return Variant::new(&sm90_decode_mlp::FILE, all);
        }
        if let Feed::Held(held) = self.feed {
            let [h, i, m, n, o, q] = held.defines(self.shared);
            let all = [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, q];
            return Variant::new(&sm90_held_mlp::FILE, all);
        }
        let ring_bytes = Self::ring_bytes(self.warps, self.depth, self.formats);
        let [m, n] = [("DEPTH", self.depth), ("RING_BYTES", ring_bytes)]
            .map(|(name, value)| define(name, value));
        Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n])
    }

    pub(super) fn function(self, cuda: &Cuda, code: GateCode) -> Result<Function> {
        let entry = match (self.part, self.feed) {
            (Part::Sequential, _) => "sequential_mlp",
            (_, Feed::Lanes) => "decode_mlp",
            (_, Feed::Tma(_)) => "sm90_decode_mlp",
            (_, Feed::Held(_)) => "sm90_held_mlp",
        };
        let function = cuda.function(&self.variant(code), entry, self.shared as u32)?;
        if matches!(self.feed, Feed::Held(_)) {
            // Blocks of both halves, and of the next block's first, are on an SM together.
            function.keep_all_shared()?;
        }
        Ok(function)
    }
}

/// More waves of blocks than this would be a device of very little shared memory.
const MOST_WAVES: usize = 64;
