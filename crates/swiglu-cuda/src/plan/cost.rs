//! What an algorithm is expected to cost, from the numbers alone.
//!
//! The model is a roofline per wave of tiles. The blocks that run together each multiply a tile: as
//! long as the tensor cores need for it, or as its operands need from L2, and
//! then, unless another tile is multiplied meanwhile, as long as the activation takes. No algorithm is
//! faster than memory gives the weights and the input. Every constant has a name and a source; how those that were fitted
//! describe the H200 that they were fitted on: docs/kernels/cost-model.md. Only the order of the results decides.

use swiglu_core::{DType, Op, Problem};

use super::machine::{BARRIER, BESIDE_SHARED, LAUNCH, Machine, Model};
use crate::kernels::decode_mlp::{Decode, Design, MOST_TOKENS};
use crate::kernels::elementwise::Stored;
use crate::kernels::gated_gemm::{Form, Kernel, Multiplier, Shape};
use crate::kernels::sm90_gated_gemm::Cut;
use crate::kernels::sm90_skinny_gemm::Tiling;

pub(super) mod backward;

/// f32 operations per cycle and SM without tensor cores: 128 fused multiply-adds.
const FMA: f64 = 256.0;
/// Of [`FMA`], our kernel and cuBLAS: to be measured.
const SIMT_SHARE: f64 = 0.5;
const CUBLAS_FMA_SHARE: f64 = 0.85;
/// Cycles until the first tile's operands have come: fitted on an H200.
const FILL: f64 = 400.0;
/// Cycles per result of the epilogue: an exponential and a reciprocal at 16 per cycle, and as long
/// again for the rest of it. Fitted on an H200.
const ACTIVATION: f64 = 4.0 / 16.0;
/// Cycles that a sum takes through the shared memory of a cluster, per value and block: 8 bytes
/// written, 8 read, at half of 128 bytes per cycle.
const EXCHANGE: f64 = 0.25;
/// Cycles that a barrier of a cluster takes, with the fence of memory in it: fitted on an H200.
const CLUSTER_BARRIER: f64 = 2500.0;

/// How near wgmma comes to its rate with so many columns: a row of A is read from shared memory for
/// fewer results. Measured on the H800 (arXiv 2402.13499): 665, 660, 648, 477, 287, 158 TFLOP/s.
fn wgmma_share(columns: usize) -> f64 {
    match columns {
        256.. => 1.0,
        128.. => 0.99,
        64.. => 0.97,
        32.. => 0.72,
        16.. => 0.43,
        _ => 0.24,
    }
}

/// How near mma.sync comes to what many warps reach: an H200 with shared memory taken away from it, 128x64 and 64x64 in four
/// warps, 64x32 in four. Two have two of the four tensor cores.
fn warps_share(warps: usize) -> f64 {
    match warps {
        8.. => 1.0,
        4.. => 0.77,
        _ => 0.5,
    }
}

/// Blocks on an SM.
pub(super) fn residents(form: &Form, machine: &Machine) -> usize {
    match form.multiplier {
        Multiplier::Mma { shared, .. } => {
            form.blocks_per_sm.min(machine.shared / (shared + BESIDE_SHARED)).max(1)
        }
        _ => form.blocks_per_sm,
    }
}

/// The cycles of a tile on the multiplier, of `together` that take turns on it.
fn multiply_cycles(form: &Form, problem: &Problem, machine: &Machine, together: f64) -> f64 {
    let rate = match form.multiplier {
        Multiplier::Wgmma { columns, wanted } => machine.tensor * wgmma_share(columns) * wanted,
        Multiplier::Mma { share, warps, .. } => {
            let tf32 = if problem.dtype == DType::F32 { 0.5 } else { 1.0 };
            machine.tensor
                * tf32
                * machine.mma_share
                * share
                * warps_share(warps * together as usize)
        }
        Multiplier::Fma => FMA * SIMT_SHARE,
    };
    let [rows, columns] = form.tile;
    let k = problem.hidden.div_ceil(64) * 64;
    4.0 * (rows * columns) as f64 * k as f64 / form.split as f64 / rate
}

/// The time of work that has several limits at once. Where one is far above the others it is that
/// one; limits close to each other get in each other's way. The exponent was fitted on an H200.
fn bound_by(limits: [f64; 2]) -> f64 {
    let [a, b] = limits;
    a.hypot(b)
}

/// Seconds of a launch of so many cycles, and seconds of memory, that come together.
fn launched(cycles: f64, traffic: f64, machine: &Machine) -> f64 {
    machine.launch + FILL / machine.clock + bound_by([cycles / machine.clock, traffic])
}

/// What kernels for few rows take as a multiple of what follows from their form, where there are more tokens than a
/// tile has: between what an H200 took with two shapes.
const MORE_THAN_A_TILE: f64 = 1.35;
/// The same where the width of tiles is fitted to two of them below each other: fitted with [`BESIDE_FUSED`].
const TWO_FITTED_TILES: f64 = 1.05;

/// Seconds that a fused kernel takes for h.
pub(crate) fn fused(kernel: Kernel, problem: &Problem, machine: &Machine) -> f64 {
    let form = kernel.form(Shape::of(problem, machine.multiprocessors as usize));
    let share = match (kernel, problem.m.div_ceil(form.tile[0])) {
        (Kernel::Sm90Skinny(config), rows @ 2..) if config.fits_rows(rows) => TWO_FITTED_TILES,
        (Kernel::Sm90Skinny(_), 2..) => MORE_THAN_A_TILE,
        _ => 1.0,
    };
    let bytes = problem.with_op(Op::GatedLinear).compulsory_bytes();
    share * of_tiles(&form, problem, machine, Ends { cycles: ACTIVATION, bytes })
}

/// What tiles end with, beside their products.
struct Ends {
    /// Cycles per result of two sums.
    cycles: f64,
    /// Of memory, in all: what is read and written once.
    bytes: f64,
}

fn of_tiles(form: &Form, problem: &Problem, machine: &Machine, ends: Ends) -> f64 {
    let size = problem.dtype.size() as f64;
    let [rows, columns] = form.tile;
    // Blocks of a cluster either share weights, each with a tile, of which the last may lie below all rows, or a tile's k.
    let row_tiles = problem.m.div_ceil(rows).next_multiple_of(form.share);
    let tiles = row_tiles as f64 * problem.intermediate.div_ceil(columns) as f64;
    let blocks = tiles * form.split as f64;
    let per_cluster = (form.share * form.split) as f64;
    let residents = residents(form, machine) as f64;
    let slots = (machine.multiprocessors * residents / per_cluster).floor().max(1.0) * per_cluster;
    let running = blocks.min(slots);
    // Blocks on one SM take turns on its tensor cores and special-function units, and the
    // SM with the most blocks is the last.
    let together = (running / machine.multiprocessors).ceil().max(1.0);
    let multiply = multiply_cycles(form, problem, machine, together) * together;
    // Rows that do not exist are not fetched.
    let fetched = rows.min(problem.m) as f64 + 2.0 * columns as f64 / form.share as f64;
    let operands = fetched * problem.hidden as f64 / form.split as f64 * size;
    let from_l2 = operands * running / machine.l2;
    let results = (rows * columns) as f64;
    let mut epilogue = results / form.split as f64 * ends.cycles * together;
    if form.split > 1 {
        epilogue += 2.0 * results * EXCHANGE + 2.0 * CLUSTER_BARRIER;
    }
    let waves = match form.narrow_last && problem.m > Cut::NO_LESS {
        true => {
            let rows = problem.m.div_ceil(rows);
            Cut::best(rows, problem.intermediate, columns, slots as usize).waves
        }
        false => (blocks / slots).ceil().max(1.0),
    };
    // The ring is filled during the epilogue, too.
    let cycles = match form.hides_epilogue {
        true => waves * bound_by([multiply.max(epilogue), from_l2]) + epilogue,
        false => waves * bound_by([multiply + epilogue, from_l2]),
    };
    launched(cycles, machine.stream(ends.bytes), machine)
}

/// Seconds of a product `[m, k]` by `[k, n]` by cuBLASLt, which has tiles for every shape and splits
/// k where they are few. `results` are the seconds that these take to be written.
fn product(shape: [usize; 3], dtype: DType, results: f64, model: &Model) -> f64 {
    let ([m, k, n], machine) = (shape.map(|extent| extent as f64), &model.machine);
    let rate = match dtype {
        DType::F32 if model.tf32 => machine.tensor / 2.0,
        DType::F32 => FMA * CUBLAS_FMA_SHARE,
        _ => machine.tensor,
    };
    let size = dtype.size() as f64;
    let cycles = |[rows, columns]: [f64; 2]| {
        let tiles = (m / rows).ceil() * (n / columns).ceil();
        let waves = tiles / machine.multiprocessors;
        // Few tiles are split along k, at some cost: half a wave is the least.
        let waves = if waves > 1.0 { waves.ceil() } else { waves.max(0.5) };
        // Two blocks share a column of weights.
        let operands = (rows.min(m) + columns / 2.0) * k * size;
        let from_l2 = operands * tiles.min(machine.multiprocessors) / machine.l2;
        waves * bound_by([2.0 * rows * columns * k / rate, from_l2])
    };
    let shapes = [[128.0, 256.0], [128.0, 128.0], [64.0, 128.0], [16.0, 128.0]];
    let cycles = shapes.into_iter().map(cycles).fold(f64::INFINITY, f64::min);
    let traffic = machine.stream((m * k + k * n) * size) + results;
    launched(cycles, traffic, machine)
}

/// Bytes of so many values of T.
fn bytes(problem: &Problem, values: f64) -> f64 {
    values * problem.dtype.size() as f64
}

/// Seconds that cuBLASLt takes longer for a down projection of few tokens, which it splits along k: fitted on an H200.
const FEW_TOKENS: f64 = 2.5e-6;

/// Seconds of the down projection.
pub(crate) fn down(problem: &Problem, model: &Model) -> f64 {
    let shape = [problem.m, problem.intermediate, problem.hidden];
    let split = if problem.m <= MOST_TOKENS { FEW_TOKENS } else { 0.0 };
    let results = model.machine.stream(bytes(problem, problem.m as f64 * problem.hidden as f64));
    split + product(shape, problem.dtype, results, model)
}

/// Seconds of the down projection of few tokens by `sm90_skinny_gemm`: predicted from its form, fitted to nothing.
pub(crate) fn skinny_down(problem: &Problem, machine: &Machine) -> f64 {
    let [m, k, n] = [problem.m, problem.intermediate, problem.hidden];
    let [tile_m, tile_h] = Tiling::new([m, k, n], machine.multiprocessors as usize, false).tile();
    let tiles = n.div_ceil(tile_h) as f64;
    let waves = (tiles / machine.multiprocessors).ceil();
    // Of 16 of k shared memory gives 64 rows at 128 bytes per cycle, and then the tokens'.
    let multiply = (k.div_ceil(16) * (64 + tile_m)) as f64 * 32.0 / 128.0;
    let size = problem.dtype.size() as f64;
    let [m, k, n] = [m, k, n].map(|extent| extent as f64);
    let from_l2 = (m + tile_h as f64) * k * size * tiles.min(machine.multiprocessors) / machine.l2;
    let cycles = waves * bound_by([multiply, from_l2]);
    let traffic = machine.stream((m * k + k * n + m * n) * size);
    launched(cycles, traffic, machine)
}

/// The unfused path of 16-bit types as a multiple of what follows from its form, up to 64 tokens, up to 256 and
/// beyond: fitted on an H200, so that it stands to the fused kernels without clusters as it was measured, whose
/// estimates are too long where its own are too short.
const BESIDE_FUSED: [f64; 3] = [1.12, 1.21, 1.29];

fn beside_fused(problem: &Problem) -> f64 {
    match problem.m {
        _ if problem.dtype == DType::F32 => 1.0,
        ..=64 => BESIDE_FUSED[0],
        65..=256 => BESIDE_FUSED[1],
        _ => BESIDE_FUSED[2],
    }
}

/// Seconds in which gate and up pass through memory once.
fn between(stored: Stored, problem: &Problem, machine: &Machine) -> f64 {
    let elements = problem.m as f64 * problem.intermediate as f64;
    machine.pass_on(2.0 * elements * stored.size(problem.dtype) as f64)
}

/// Seconds of gate and up by one product of the unfused path.
pub(crate) fn products(stored: Stored, problem: &Problem, model: &Model) -> f64 {
    let shape = [problem.m, problem.hidden, 2 * problem.intermediate];
    let written = between(stored, problem, &model.machine);
    beside_fused(problem) * product(shape, problem.dtype, written, model)
}

/// Seconds of the activation behind them, which reads both again and writes h.
pub(crate) fn elementwise(stored: Stored, problem: &Problem, machine: &Machine) -> f64 {
    let written = bytes(problem, problem.m as f64 * problem.intermediate as f64);
    let moved = between(stored, problem, machine) + machine.stream(written);
    beside_fused(problem) * (machine.launch + moved)
}

/// What a decode kernel takes as a multiple of the stream of its weights, and microseconds beside it, with
/// at most 4, 8 and 16 tokens.
type DecodeTimes = [(f64, f64); 3];

/// Fitted on an H200 to bf16 blocks of three shapes with 1 to 16 tokens.
const DECODE: DecodeTimes = [(1.02, 8.2), (1.04, 8.5), (1.07, 10.6)];
const BULK_DECODE: DecodeTimes = [(1.0, 6.0), (1.06, 6.55), (1.12, 9.0)];
const BULK_DECODE_WIDE: DecodeTimes = [(0.95, 6.5), (1.045, 6.7), (1.0, 10.2)];
/// Fitted there to one shape in Q8_0 and Q4_0, before its blocks had more warps: too much rather than too little, and still
/// less than for any other way where this one can be had.
const HELD_DECODE: DecodeTimes = [(0.56, 5.95), (0.62, 6.5), (0.85, 8.1)];
/// Multiple of the stream for quantised weights by [`Design::OneLaunch`] and [`Design::TwoLaunches`], whose
/// instructions it is that take the time: it depends on the type, on an H200 too.
const UNPACKED_BY_LANES: f64 = 1.6;
/// Multiple of the stream where x has no room beside the ring of [`Design::BulkOneLaunchWide`].
const X_IN_PIECES: f64 = 1.2;

/// Seconds of a feed-forward block by the decode kernel: every weight once from memory, and what it does
/// not hide of the gaps before, between and behind its two halves.
pub(crate) fn decode(decode: &Decode, problem: &Problem, model: &Model) -> f64 {
    let (design, machine) = (decode.design(), &model.machine);
    let times = match design {
        // One SM, 64 bytes per cycle.
        Design::Sequential => {
            return machine.launch + problem.compulsory_bytes() / (64.0 * machine.clock);
        }
        Design::OneLaunch | Design::TwoLaunches => DECODE,
        Design::BulkOneLaunch => BULK_DECODE,
        Design::BulkOneLaunchWide => BULK_DECODE_WIDE,
        Design::HeldLaunches => HELD_DECODE,
    };
    let (mut share, microseconds) = match problem.m {
        ..=4 => times[0],
        5..=8 => times[1],
        _ => times[2],
    };
    if design == Design::BulkOneLaunchWide && !decode.stages_x() {
        share *= X_IN_PIECES;
    }
    if matches!(design, Design::OneLaunch | Design::TwoLaunches) && problem.quantized.is_some() {
        share *= UNPACKED_BY_LANES;
    }
    let two = design == Design::TwoLaunches && !model.limits.programmatic;
    let launch = if two { machine.launch } else { 0.0 };
    // The launch and the barrier that the microseconds were fitted with are in them.
    let mut beside = machine.launch - LAUNCH;
    if design.has_meetings() {
        beside += machine.barrier - BARRIER;
    }
    launch + microseconds * 1e-6 + beside + share * machine.stream(problem.compulsory_bytes())
}

#[cfg(test)]
mod tests;
