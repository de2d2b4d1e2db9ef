//! What a launch of `device/sm90_decode_mlp.cu` is compiled and shaped for.

use swiglu_core::Problem;

use super::super::gated_gemm::counted;
use super::config::{Config, Feed, Math, Part, pitch};
use super::{Limits, Obstacle};
use crate::jit::{Define, KernelFile, define};

pub(super) static FILE: KernelFile =
    KernelFile::new("sm90_decode_mlp.cu", include_str!("../../../device/sm90_decode_mlp.cu"));

/// Warps that multiply.
pub(super) const WARPS: usize = 8;
/// Units of 64 bytes of a stage that a warp multiplies at most.
const GROUP: usize = 4;
/// Bytes of a row in a stage at most.
const MOST_PIECE: usize = GROUP * WARPS * UNIT;
const UNIT: usize = 64;
/// Where the ring begins in shared memory: behind two barriers for each of the most stages, and zeros.
const RING_AT: usize = 16 * MOST_STAGES + 128;
const MOST_STAGES: usize = 64;
/// What stages are to hold: 16 rows of 1 KiB, an odd multiple of 64 bytes apart.
const STAGE_BYTES: usize = 16 * (1024 + UNIT);

/// How the rows of a matrix are cut, as in the device file.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Pieces {
    /// Features or columns of a tile.
    tile: i32,
    /// Bytes of a row in a stage, and from row to row there.
    bytes: i32,
    pitch: i32,
    /// Along a row.
    count: i32,
    /// Features or columns of every block, and how many of the first blocks have one more.
    share: i32,
    rest: i32,
}

impl Pieces {
    /// `total` features or columns for `grid` blocks: even shares, in even tiles of at most `most`, each of
    /// them `lines` rows of `row` bytes, in even pieces.
    fn new([total, grid]: [usize; 2], most: usize, lines: usize, row: usize) -> Self {
        let largest = total.div_ceil(grid);
        let tile = largest.div_ceil(largest.div_ceil(most));
        let room = STAGE_BYTES / (lines * tile) / UNIT * UNIT;
        // An odd multiple of 64 bytes.
        let widest = if room.is_multiple_of(2 * UNIT) { room - UNIT } else { room };
        let row = row.next_multiple_of(16);
        let bytes = row.div_ceil(row.div_ceil(widest.min(MOST_PIECE))).next_multiple_of(UNIT);
        let count = row.div_ceil(bytes);
        let numbers = [tile, bytes, pitch(bytes), count, total / grid, total % grid];
        let [tile, bytes, pitch, count, share, rest] = numbers.map(counted);
        Self { tile, bytes, pitch, count, share, rest }
    }

    fn stage_bytes(&self, lines: usize) -> usize {
        lines * self.tile as usize * self.pitch as usize
    }

    /// Stages of the largest share.
    fn stages(&self) -> usize {
        let largest = self.share + i32::from(self.rest > 0);
        (largest as usize).div_ceil(self.tile as usize) * self.count as usize
    }
}

/// The ring that the copy engine fills, and what lies behind it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Ring {
    gate_up: Pieces,
    down: Pieces,
    stages: u32,
    stage_bytes: u32,
    slots_at: u32,
    h_pitch: u32,
}

impl Ring {
    pub(super) fn bytes(&self) -> usize {
        (self.stages * self.stage_bytes) as usize
    }
}

/// Which tokens are copied to shared memory, and the least ring that this must leave.
struct Staging {
    x: bool,
    h: bool,
    ring: usize,
}

/// In order of preference. 21 KB are under way at any time; while blocks wait for each other, 30 to 50
/// KB more arrive.
fn stagings(part: Part) -> &'static [Staging] {
    const NONE: Staging = Staging { x: false, h: false, ring: 2 * STAGE_BYTES };
    match part {
        Part::GateUp => &[Staging { x: true, h: false, ring: 3 * STAGE_BYTES }, NONE],
        Part::Down => &[Staging { x: false, h: true, ring: 3 * STAGE_BYTES }, NONE],
        Part::Both | Part::Sequential => &[
            Staging { x: true, h: true, ring: 6 * STAGE_BYTES },
            Staging { x: true, h: false, ring: 3 * STAGE_BYTES },
            NONE,
        ],
    }
}

impl Config {
    /// The largest ring beside x and h in shared memory, if it is large enough; else without them.
    pub(super) fn fit_sm90(
        part: Part,
        problem: &Problem,
        limits: &Limits,
    ) -> Result<Self, Obstacle> {
        if !limits.copy_engine {
            return Err(Obstacle::NoCopyEngine);
        }
        if let Some(types) = problem.quantized {
            return Err(Obstacle::OnlyElements(types.gate_up));
        }
        let math = Math::of(problem.dtype, problem.m)?;
        // Two blocks of the two launches can be on a multiprocessor together: the system keeps 1 KiB
        // of each block's half.
        let half = (limits.shared + 1024) / 2 - 1024;
        let budgets = [half, limits.shared];
        let budgets = if part == Part::Both { &budgets[1..] } else { &budgets[..] };
        let mut least = usize::MAX;
        for staging in stagings(part) {
            for &budget in budgets {
                match Self::with_ring(part, math, problem, limits, staging, budget) {
                    Ok(config) => return Ok(config),
                    Err(needed) => least = least.min(needed),
                }
            }
        }
        Err(Obstacle::SharedMemory { needed: least, given: limits.shared })
    }

    /// With as many stages as there is room for and use of, or the bytes of shared memory that the
    /// least ring would need.
    fn with_ring(
        part: Part,
        math: Math,
        problem: &Problem,
        limits: &Limits,
        staging: &Staging,
        budget: usize,
    ) -> Result<Self, usize> {
        let grid = limits.multiprocessors.max(1);
        let size = problem.dtype.size();
        let [x_row, h_row] = [problem.hidden, problem.intermediate].map(|k| k * size);
        let gate_up = Pieces::new([problem.intermediate, grid], 8, 2, x_row);
        let down = Pieces::new([problem.hidden, grid], 16, 1, h_row);
        let [x_pitch, h_pitch] = [x_row, h_row].map(|row| pitch(row.next_multiple_of(UNIT)));
        // (stages of a block, bytes of one)
        let of_gate_up = (gate_up.stages(), gate_up.stage_bytes(2));
        let of_down = (down.stages(), down.stage_bytes(1));
        let (used, stage_bytes) = match part {
            Part::GateUp => of_gate_up,
            Part::Down => of_down,
            Part::Both | Part::Sequential => {
                (of_gate_up.0 + of_down.0, of_gate_up.1.max(of_down.1))
            }
        };
        let slots = 2 * WARPS * math.tokens() * 16 * size_of::<f32>();
        let x = if staging.x { problem.m * x_pitch } else { 0 };
        let h = if staging.h { problem.m * h_pitch } else { 0 };
        let around = RING_AT + slots + x.max(h);
        let stages = (budget.saturating_sub(around) / stage_bytes).min(used).min(MOST_STAGES);
        let enough = staging.ring.div_ceil(stage_bytes).min(used).min(MOST_STAGES);
        if stages < enough {
            return Err(around + enough * stage_bytes);
        }
        let slots_at = RING_AT + stages * stage_bytes;
        let [stages, stage_bytes, h_pitch] = [stages, stage_bytes, h_pitch].map(|n| n as u32);
        let ring = Ring { gate_up, down, stages, stage_bytes, slots_at: slots_at as u32, h_pitch };
        Ok(Self {
            part,
            math,
            feed: Feed::CopyEngine { ring, stage_h: staging.h },
            stage_x: staging.x,
            warps: WARPS,
            grid,
            x_at: slots_at + slots,
            x_pitch,
            shared: slots_at + slots + x.max(h),
            ..Self::NOTHING
        })
    }
}

/// Warps that ask for copies: see the head of the device file.
pub(super) fn producers(part: Part) -> usize {
    if part == Part::Both { 4 } else { 2 }
}

/// What the device file is compiled with beside the rest.
pub(super) fn defines(part: Part, stage_h: bool) -> [Define; 4] {
    [
        define("PRODUCERS", producers(part)),
        define("STAGE_H", usize::from(stage_h)),
        define("RING_AT", RING_AT),
        define("MOST_PIECE", MOST_PIECE),
    ]
}
