//! What a launch of `device/decode/sm90_held_mlp.cu` is compiled and shaped for.

use swiglu_core::Problem;

use super::config::{Config, Feed, Part};
use super::format::{Format, Math, UNIT_BYTES};
use super::{Limits, Obstacle};
use crate::device::jit::{Define, KernelFile, define, kernel_file};

pub(super) static FILE: KernelFile = kernel_file!("decode", "sm90_held_mlp.cu");

/// Of a block of down rows, and of one of gate and up before what those leave is known.
const MOST_WARPS: usize = 16;
/// Those of gate and up with pieces of k of their own: a slot of sums for each tile and place.
const MOST_PLACES: usize = 8;
/// Registers of a thread for tokens; beside them it has room for factors, sums and addresses.
const MOST_REGISTERS: usize = 48;
/// Bytes of shared memory that a block takes beside what it asks for.
const RESERVED: usize = 1024;
/// Blocks that share k of down rows, in order of preference: in larger clusters each reads less of h.
const CLUSTERS: [usize; 2] = [4, 2];
/// SMs come in pairs. Larger clusters lie within a part of the device, and leave some of it empty.
const PAIR: usize = 2;
/// Rows of a tile.
const TILE: usize = 16;

/// How the rows and pieces of k of a half are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Held {
    /// Of 16 rows, of a block.
    tiles: usize,
    /// Warps with pieces of their own, how many pieces each has, and warps that share these and have tiles of their own.
    places: usize,
    steps: usize,
    beside: usize,
    /// Blocks that share k.
    cluster: usize,
}

impl Held {
    /// Of a block that has so many tiles and pieces, of at most so many warps and places. No warp would do without: those
    /// beside each other are as few as have the same number of tiles at most.
    fn new(tiles: usize, pieces: usize, warps: usize, places: usize, cluster: usize) -> Self {
        let steps = pieces.div_ceil(places.min(warps));
        let places = pieces.div_ceil(steps);
        let own = tiles.div_ceil(warps / places);
        Self { tiles, places, steps, beside: tiles.div_ceil(own), cluster }
    }

    /// Of a thread, for 16 bytes of a token of each eight.
    fn registers(self, format: Format, math: Math) -> usize {
        self.steps * format.blocks() * math.tokens() / 8 * 4
    }

    fn warps(self) -> usize {
        self.places * self.beside
    }

    /// Units of all warps, slots for their sums, and for down rows what all blocks of the cluster have summed of this one's,
    /// and the barrier it comes by, which both halves have room for.
    fn shared_bytes(self, part: Part, format: Format, math: Math) -> usize {
        let tile = TILE * math.tokens() * size_of::<f32>();
        let units = self.warps() * self.tiles.div_ceil(self.beside) * self.steps;
        let parts = if part == Part::Down { self.tiles * tile } else { 0 };
        units * TILE * (UNIT_BYTES + 4 * format.scale_bytes())
            + self.places * self.tiles * tile
            + parts
            + 8
    }

    /// Blocks of a cluster, for launches.
    pub(super) fn cluster(self) -> Option<u32> {
        (self.cluster > 1).then_some(self.cluster as u32)
    }

    /// What the device file is compiled with beside the rest.
    pub(super) fn defines(self, shared: usize) -> [Define; 6] {
        [
            define("TILES", self.tiles),
            define("PLACES", self.places),
            define("STEPS", self.steps),
            define("BESIDE", self.beside),
            define("CLUSTER", self.cluster),
            define("SHARED_BYTES", shared),
        ]
    }
}

/// Of blocks of both halves on an SM, each of whose four parts has 16384 registers for whole warps: 64 for a thread
/// with eight tokens, 80 with sixteen.
fn most_warps(math: Math) -> usize {
    let registers = if math.tokens() > 8 { 80 } else { 64 };
    4 * (16384 / (32 * registers))
}

impl Config {
    /// Both halves, of quantised weights, if these fit into shared memory together.
    pub(super) fn fit_held(problem: &Problem, limits: &Limits) -> Result<[Self; 2], Obstacle> {
        if !limits.tma {
            return Err(Obstacle::NoTma);
        }
        if problem.quantized.is_none() {
            return Err(Obstacle::Elements);
        }
        let kinds = (Math::of_problem(problem)?, Format::of_problem(problem)?);
        // A warp more for gate and up is a tile less for another: what blocks of both halves leave of an SM goes there.
        let most = most_warps(kinds.0);
        let first = Self::held_gate_up(kinds, problem, limits, MOST_WARPS)?;
        let left = MOST_WARPS.min(most - first.warps);
        let mut least = usize::MAX;
        for cluster in CLUSTERS {
            let Some(down) = Self::held_down(kinds, problem, limits, left, cluster) else {
                continue;
            };
            let gate_up = Self::held_gate_up(kinds, problem, limits, most - down.warps)?;
            let needed = gate_up.shared + RESERVED + down.shared;
            if needed <= limits.shared {
                return Ok([gate_up, down]);
            }
            least = least.min(needed);
        }
        Err(match least {
            usize::MAX => Obstacle::LongRows,
            needed => Obstacle::SharedMemory { needed, given: limits.shared },
        })
    }

    fn held_gate_up(
        (math, formats): (Math, [Format; 2]),
        problem: &Problem,
        limits: &Limits,
        warps: usize,
    ) -> Result<Self, Obstacle> {
        let grid = limits.multiprocessors.clamp(1, problem.intermediate);
        // A tile has the gate and up rows of as many features.
        let tiles = problem.intermediate.div_ceil(grid).div_ceil(TILE / 2);
        let held = Held::new(tiles, formats[0].units(problem.hidden), warps, MOST_PLACES, 1);
        Self::with_held(Part::GateUp, (math, formats[0]), held, grid).ok_or(Obstacle::LongRows)
    }

    fn held_down(
        (math, formats): (Math, [Format; 2]),
        problem: &Problem,
        limits: &Limits,
        warps: usize,
        cluster: usize,
    ) -> Option<Self> {
        let left = if cluster > PAIR { limits.multiprocessors / 8 } else { 0 };
        let groups = ((limits.multiprocessors - left) / cluster).min(problem.hidden);
        let tiles = problem.hidden.div_ceil(groups.max(1)).div_ceil(TILE);
        let pieces = formats[1].units(problem.intermediate).div_ceil(cluster);
        let held = Held::new(tiles, pieces, warps, warps, cluster);
        let config = Self::with_held(Part::Down, (math, formats[1]), held, groups * cluster)?;
        (groups > 0).then_some(config)
    }

    /// Of tokens that fit into registers.
    fn with_held(
        part: Part,
        (math, format): (Math, Format),
        held: Held,
        grid: usize,
    ) -> Option<Self> {
        let config = Self {
            part,
            math,
            // A half has no use for the other's.
            formats: [format; 2],
            feed: Feed::Held(held),
            warps: held.warps(),
            grid,
            shared: held.shared_bytes(part, format, math),
            ..Self::NOTHING
        };
        (held.registers(format, math) <= MOST_REGISTERS).then_some(config)
    }
}
