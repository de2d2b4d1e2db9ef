//! What a launch of `device/decode/sm90_decode_mlp.cu` is compiled and shaped for.

use swiglu_core::Problem;

use super::super::gated_gemm::counted;
use super::super::ring;
use super::config::{Config, Feed, Part, pitch};
use super::format::{Format, Math, UNIT_BYTES as UNIT};
use super::{Limits, Obstacle};
use crate::device::jit::{Define, KernelFile, define, kernel_file};

pub(super) static FILE: KernelFile = kernel_file!("decode", "sm90_decode_mlp.cu");

/// Warps that ask for weights.
const PRODUCERS: usize = 4;
/// Those, and the one that asks for tokens.
pub(super) const COPYING: usize = PRODUCERS + 1;
/// Where the ring begins in shared memory: behind barriers and zeros.
const RING_AT: usize = 768;
const MOST_STAGES: usize = 32;
/// The least stages of tokens, and their bytes where pieces of rows can be shortened for it.
const LEAST_TOKEN_STAGES: usize = 2;
const TOKEN_STAGE_BYTES: usize = 32 * 1024;
/// Tiles whose sums have a place while they are added up, as in the device file.
const SLOT_SETS: usize = 2;
/// Of the ring of tokens, and the bytes it may take where x takes less.
const MOST_TOKEN_STAGES: usize = 12;
const TOKEN_BYTES: usize = 24 * 1024;
/// Bytes of gate and up rows under way, where there is a limit: see the head of the device file.
const UNDER_WAY: usize = 60 * 1024;

/// How many multiply, and in pieces of what size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) warps: usize,
    /// What stages are to hold: 16 rows of 1 or 2 KiB, an odd multiple of 64 bytes apart.
    stage_bytes: usize,
    /// Whether gate and up rows are asked for in moderation where they all fit into the ring: measured with
    /// 8 warps only.
    limited: bool,
}

impl Form {
    pub(super) const NARROW: Self =
        Self { warps: 8, stage_bytes: 16 * (1024 + UNIT), limited: true };
    pub(super) const WIDE: Self =
        Self { warps: 16, stage_bytes: 16 * (2048 + UNIT), limited: false };

    /// Bytes of a row that the warps multiply in one turn.
    fn turn(&self) -> usize {
        self.warps * UNIT
    }

    /// Units of a stage for each warp at most: the device file is compiled for 2 or 4.
    fn group(&self, [gate_up, down]: [Pieces; 2]) -> usize {
        if gate_up.units.max(down.units) as usize * UNIT > 2 * self.turn() { 4 } else { 2 }
    }
}

/// How the rows of a matrix are cut, as in the device file.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Pieces {
    /// Features or columns of a tile.
    tile: i32,
    /// Bytes of a row in a stage, and from row to row there.
    bytes: i32,
    units: i32,
    pitch: i32,
    /// Along a row.
    count: i32,
    /// Features or columns of every block, and how many of the first blocks have one more.
    share: i32,
    rest: i32,
}

/// The rows of a matrix: features or columns, the most of a tile and the rows of each, what a row holds, and
/// the tokens that meet it.
struct Rows {
    total: usize,
    most: usize,
    lines: usize,
    format: Format,
    /// K or H, and bytes of an element.
    extent: usize,
    size: usize,
    tokens: usize,
}

impl Rows {
    /// Units of a row, and the most of a piece in a stage that has `room` bytes for it.
    fn units(&self, form: &Form, room: usize) -> (usize, usize) {
        match self.format {
            Format::Elements => {
                let room = room / UNIT * UNIT;
                // An odd multiple of 64 bytes; from 1 KiB on rather whole turns of the warps.
                let room = if room.is_multiple_of(2 * UNIT) { room - UNIT } else { room };
                let room = if room < 1536 { room.min(1024) } else { room.min(2048) };
                ((self.extent * self.size).div_ceil(UNIT), room / UNIT)
            }
            format => {
                // Whole turns of the warps, which are whole groups; scales come beside them.
                let of_tokens = self.tokens * format.blocks() * UNIT;
                let most = (room / UNIT).min(TOKEN_STAGE_BYTES / of_tokens).max(form.warps);
                (format.units(self.extent), most / form.warps * form.warps)
            }
        }
    }
}

impl Pieces {
    /// Even shares for `grid` blocks, in even tiles, each of them in even pieces.
    fn new(form: &Form, rows: &Rows, grid: usize) -> Self {
        let largest = rows.total.div_ceil(grid);
        let tile = largest.div_ceil(largest.div_ceil(rows.most));
        let (all, room) = rows.units(form, form.stage_bytes / (rows.lines * tile));
        let units = all.div_ceil(all.div_ceil(room)).next_multiple_of(rows.format.group_units());
        let bytes = rows.format.bytes_of(units);
        let (share, rest) = (rows.total / grid, rows.total % grid);
        let numbers = [tile, bytes, units, pitch(bytes), all.div_ceil(units), share, rest];
        let [tile, bytes, units, pitch, count, share, rest] = numbers.map(counted);
        Self { tile, bytes, units, pitch, count, share, rest }
    }

    /// Bytes of a token's row that meet a piece, from token to token.
    fn token_pitch(&self, format: Format) -> usize {
        pitch(self.units as usize * format.blocks() * UNIT)
    }

    fn stage_bytes(&self, lines: usize) -> usize {
        lines * self.tile as usize * self.pitch as usize
    }

    /// Features or columns of the blocks that have the most.
    fn largest_share(&self) -> usize {
        (self.share + i32::from(self.rest > 0)) as usize
    }

    /// Tiles of the largest share.
    fn tiles(&self) -> usize {
        self.largest_share().div_ceil(self.tile as usize)
    }

    /// Stages of it.
    fn stages(&self) -> usize {
        self.tiles() * self.count as usize
    }
}

/// The rings that TMA fills, and what lies around them.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Ring {
    gate_up: Pieces,
    down: Pieces,
    stages: u32,
    stage_bytes: u32,
    limit: u32,
    slots_at: u32,
    token_stages: u32,
    token_pitch: u32,
    scales_at: u32,
}

impl Ring {
    pub(super) fn bytes(&self) -> usize {
        (self.stages * self.stage_bytes) as usize
    }

    /// That of weights and that of tokens, which has pieces of x only where x is not in shared memory as a whole.
    pub(super) fn rings(&self, stage_x: bool) -> [ring::Ring; 2] {
        let weights = self.gate_up.stages() + self.down.stages();
        let tokens = if stage_x { self.down.stages() } else { weights };
        [(self.stages, weights), (self.token_stages, tokens)]
            .map(|(stages, filled)| ring::Ring { stages: stages as usize, filled })
    }
}

/// How weights and tokens come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Feeding {
    pub(super) ring: Ring,
    /// Units of a stage that a warp multiplies at most: 2 or 4.
    pub(super) group: usize,
    /// Whether down tiles have more than eight rows.
    pub(super) down_high: bool,
}

impl Feeding {
    /// What the device file is compiled with beside the rest.
    pub(super) fn defines(&self) -> [Define; 4] {
        [
            define("PRODUCERS", PRODUCERS),
            define("GROUP", self.group),
            define("DOWN_HIGH", usize::from(self.down_high)),
            define("RING_AT", RING_AT),
        ]
    }
}

/// Whether x lies in shared memory, and the least ring that this must leave, in order of preference. 21 KB
/// are under way at any time; while blocks wait for each other, 30 to 50 KB more arrive.
const STAGINGS: [(bool, usize); 2] = [(true, 68 * 1024), (false, 34 * 1024)];

impl Config {
    /// The longest ring that fits, x in shared memory if possible.
    pub(super) fn fit_sm90(
        form: &Form,
        problem: &Problem,
        limits: &Limits,
    ) -> Result<Self, Obstacle> {
        if !limits.tma {
            return Err(Obstacle::NoTma);
        }
        let math = Math::of_problem(problem)?.by_tma(problem.dtype);
        let kinds = (math, Format::of_problem(problem)?);
        if form.warps > Form::NARROW.warps
            && kinds.1.contains(&Format::Nibbles)
            && kinds.0.tokens() > 8
        {
            return Err(Obstacle::Registers { given: problem.m, most: 8 });
        }
        let mut least = usize::MAX;
        for (stage_x, ring) in STAGINGS {
            // Copies of x have no zeros behind them, and products read whole units.
            let whole = kinds.1[0].token_bytes(problem.hidden, problem.dtype.size());
            if !stage_x && whole != problem.hidden * problem.dtype.size() {
                continue;
            }
            match Self::with_ring(form, kinds, problem, limits, (stage_x, ring)) {
                Ok(config) => return Ok(config),
                Err(needed) => least = least.min(needed),
            }
        }
        Err(Obstacle::SharedMemory { needed: least, given: limits.shared })
    }

    /// With as many stages as there is room for and use of, or the bytes of shared memory that the
    /// least ring would need.
    fn with_ring(
        form: &Form,
        (math, formats): (Math, [Format; 2]),
        problem: &Problem,
        limits: &Limits,
        (stage_x, least): (bool, usize),
    ) -> Result<Self, usize> {
        let grid = limits.multiprocessors.max(1);
        let (m, size) = (problem.m, problem.dtype.size());
        let rows = [
            (problem.intermediate, 8, 2, problem.hidden),
            (problem.hidden, 16, 1, problem.intermediate),
        ];
        let [gate_up, down] = [0, 1].map(|i| {
            let ((total, most, lines, extent), format) = (rows[i], formats[i]);
            Pieces::new(form, &Rows { total, most, lines, format, extent, size, tokens: m }, grid)
        });
        let x_row = formats[0].token_bytes(problem.hidden, size);
        let x_pitch = pitch(x_row.next_multiple_of(UNIT));
        let stage_bytes = gate_up.stage_bytes(2).max(down.stage_bytes(1));

        // Pieces of h take the place of x.
        let x = if stage_x { m * x_pitch } else { 0 };
        let slots = SLOT_SETS * form.warps * math.tokens() * 16 * size_of::<f32>();
        let (of_x, of_h) = (gate_up.token_pitch(formats[0]), down.token_pitch(formats[1]));
        let (token_pitch, token_uses) = match stage_x {
            true => (of_h, down.stages()),
            false => (of_x.max(of_h), gate_up.stages() + down.stages()),
        };
        let of_tokens = m * token_pitch;
        let room = (x.max(TOKEN_BYTES) / of_tokens).max(LEAST_TOKEN_STAGES);
        let token_stages = room.min(token_uses).min(MOST_TOKEN_STAGES);

        // Of gate and up rows, and of down rows.
        let scales = [(&gate_up, 2), (&down, 1)].into_iter().zip(formats);
        let scales = scales.filter(|(_, format)| format.scales_rows());
        let scales = scales.map(|((pieces, lines), _)| lines * pieces.largest_share());
        let scales = (scales.sum::<usize>() * size_of::<f32>()).next_multiple_of(UNIT);

        let around = RING_AT + slots + scales + x.max(token_stages * of_tokens);
        let used = (gate_up.stages() + down.stages()).min(MOST_STAGES);
        let stages = (limits.shared.saturating_sub(around) / stage_bytes).min(used);
        let enough = least.div_ceil(stage_bytes).max(2).min(used);
        if stages < enough {
            return Err(around + enough * stage_bytes);
        }
        let limit = match form.limited && gate_up.stages() <= stages {
            true => UNDER_WAY.div_ceil(stage_bytes) as u32,
            false => u32::MAX,
        };
        let slots_at = RING_AT + stages * stage_bytes;
        let scales_at = slots_at + slots;
        let scales_end = scales_at + scales;
        let ring = Ring {
            gate_up,
            down,
            stages: stages as u32,
            stage_bytes: stage_bytes as u32,
            limit,
            slots_at: slots_at as u32,
            token_stages: token_stages as u32,
            token_pitch: token_pitch as u32,
            scales_at: scales_at as u32,
        };
        let down_high = matches!(math, Math::Tensor(_)) || down.tile > 8;
        // Quantised weights are multiplied unit by unit.
        let elements = formats == [Format::Elements; 2];
        let group = if elements { form.group([gate_up, down]) } else { 2 };
        let feeding = Feeding { ring, group, down_high };
        Ok(Self {
            part: Part::Both,
            math,
            formats,
            feed: Feed::Tma(feeding),
            stage_x,
            warps: form.warps,
            grid,
            x_at: scales_end,
            x_pitch,
            shared: around + stages * stage_bytes,
            ..Self::NOTHING
        })
    }
}
