//! Tiles of `device/sm90/sm90_skinny_gated_gemm.cu`, how they are fitted to a layer, and what a block of one takes.

use std::fmt;

use swiglu_core::Orientation;

use crate::kernels::gated_gemm::{Form, Multiplier, Shape};
use crate::kernels::{sm90_register_gemm, sm90_skinny_gemm};

pub(in crate::kernels) const TILE_K: usize = 64;
/// Features or tokens of the rows of an instruction, which a warpgroup multiplies.
pub(super) const GROUP: usize = 64;
/// Three warpgroups of features.
pub(super) const MOST_FEATURES: usize = 3 * GROUP;
/// Tokens in the columns of an instruction, with a sum of the gate's and one of the up's for each two of them in a thread.
pub(super) const MOST_COLUMNS: usize = 192;
/// With more columns than this two warpgroups of features have all registers.
const COLUMNS_OF_THREE: usize = 128;
/// Tiles below each other that a width is fitted to: it is compiled in, and layers meet many numbers of tokens.
const MOST_ROWS: usize = 2;
/// Shared memory of an SM of sm_90; each block costs 1 KiB beside its own.
const SHARED_PER_SM: usize = 228 * 1024;

/// What lies in the rows of an instruction, and how many features a tile has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Features, those of an instruction. Two blocks share an SM.
    Instruction,
    /// Features, an even share of the layer's for each SM, which one block has to itself.
    EvenShare,
    /// As [`Kind::EvenShare`], and tokens in tiles of the same height, no more than there have to be.
    EvenTokens,
    /// Tokens; features as [`Kind::EvenShare`].
    Tokens,
}

/// What runs after the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Next {
    /// Whatever the stream has.
    Unknown,
    /// [`sm90_skinny_gemm`], when this kernel has left an SM.
    SkinnyGemm,
    /// [`sm90_skinny_gemm`], a block of which has room beside those of this kernel.
    SkinnyGemmBeside,
    /// [`sm90_register_gemm`], which leaves this kernel nearly all shared memory.
    RegisterGemmBeside,
}

impl Next {
    /// Shared memory of a block that shares an SM with one of this kernel, if it does.
    fn shared_beside(self) -> Option<usize> {
        match self {
            Next::Unknown | Next::SkinnyGemm => None,
            Next::SkinnyGemmBeside => Some(sm90_skinny_gemm::BESIDE),
            Next::RegisterGemmBeside => Some(sm90_register_gemm::SHARED),
        }
    }
}

/// With fewer stages than this a kernel that another one follows gives them back at once, though instructions then wait
/// for each other. At 4096/14336, with seven, the block takes 0.5 µs less with up to 16 tokens; with 12 stages, at
/// 2048/8192, up to 0.4 more, with 18, at 896/4864, 0.8 more.
const FEW_STAGES: usize = 8;

/// Bytes of weights that come at a pace and are under way to an SM at any time, beside a ring of down weights and
/// beside down weights in registers: what memory gives it in 1.2 or 0.9 µs, where an answer takes 0.9. At 896/4864
/// beside registers 20, 40 and 61 KiB are 0.3, 0.1 and 0.9 µs more with one token, beside a ring 61 are 0.1.
const UNDER_WAY: [usize; 2] = [40 * 1024, 30 * 1024];
/// Where the SM is this kernel's alone and stages are few. A ring of 200 KB that is asked for at once takes 6 µs
/// to come, x behind it, and memory idles for an answer's time when it has. At 4096/14336 82.3 µs with one
/// token, where it was 83.0, and 83.5 with 64 KiB; with more stages, at 2048/8192, nothing or 0.4 more.
const UNDER_WAY_ALONE: usize = 96 * 1024;

/// Bytes of a stage's barriers where weights come at a pace.
const PACED_BARRIERS: usize = 24;

/// Tokens per tile, features, and blocks that work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    /// At most, of [`Kind::EvenTokens`].
    pub(super) tile_m: usize,
    pub(super) kind: Kind,
    /// Blocks that split a tile's k.
    pub(super) split: usize,
    pub(super) next: Next,
}

impl Config {
    /// All of them, whatever comes next.
    pub(crate) const ALL: [Config; 20] = {
        let kinds = [
            (Kind::Instruction, 1),
            (Kind::Instruction, 2),
            (Kind::Instruction, 4),
            (Kind::EvenShare, 1),
        ];
        let tokens = [16, 32, 64, 128];
        let mut all = [Self::by_tokens(1); 20];
        let mut i = 0;
        while i < tokens.len() * kinds.len() {
            let (kind, split) = kinds[i % kinds.len()];
            all[i] = Config { tile_m: tokens[i / kinds.len()], kind, split, next: Next::Unknown };
            i += 1;
        }
        all[i + 1] = Self::by_tokens(2);
        all[i + 2] = Self::by_tokens(3);
        all[i + 3] = Self::EVEN_TOKENS;
        all
    };

    const EVEN_TOKENS: Config =
        Config { tile_m: MOST_COLUMNS, kind: Kind::EvenTokens, split: 1, next: Next::Unknown };

    const fn by_tokens(warpgroups: usize) -> Config {
        Config { tile_m: GROUP * warpgroups, kind: Kind::Tokens, split: 1, next: Next::Unknown }
    }

    /// Blocks of a cluster.
    pub(crate) fn cluster(self) -> usize {
        self.split
    }

    /// Whether every block has a step of k.
    pub(crate) fn can_split(self, hidden: usize) -> bool {
        hidden.div_ceil(TILE_K) >= self.split
    }

    /// As what a kernel of ours for the down projection follows. Those with an even share for few enough tokens: the
    /// others were slower.
    pub(in crate::kernels) fn before_down(self) -> impl Iterator<Item = Config> {
        let even = self.kind == Kind::EvenShare;
        let few = |tokens| even && self.tile_m <= tokens;
        // Its tile has more tokens, but no tile has fewer.
        let very_few = even && self.tile_m == Self::ALL[0].tile_m;
        let forms = [
            (few(sm90_skinny_gemm::MOST_TOKENS), Next::SkinnyGemm),
            (few(sm90_skinny_gemm::MOST_TOKENS), Next::SkinnyGemmBeside),
            (very_few, Next::RegisterGemmBeside),
        ];
        let next = forms.into_iter().filter_map(|(fits, next)| fits.then_some(next));
        next.map(move |next| Config { next, ..self })
    }

    /// What runs after it.
    pub(in crate::kernels) fn next(self) -> Next {
        self.next
    }

    /// Whether a tile's width is fitted to so many tiles below each other.
    pub(crate) fn fits_rows(self, rows: usize) -> bool {
        match self.kind {
            Kind::Tokens => rows <= MOST_ROWS,
            Kind::EvenTokens => true,
            Kind::Instruction | Kind::EvenShare => rows <= 1,
        }
    }

    /// Features of a tile with tokens in the rows: as many as a thread has registers for, beside others, with a sum of
    /// the gate's and one of the up's for each two of them.
    pub(super) fn most_by_tokens(self) -> usize {
        if self.tile_m > 2 * GROUP { 112 } else { 160 }
    }

    /// Up to so many of them gate and up have in one instruction, whose columns are a multiple of 16 here.
    pub(super) fn together(self) -> usize {
        if self.tile_m > 2 * GROUP { 80 } else { 128 }
    }

    /// With the tile for this shape.
    pub(crate) fn tiling(self, shape: Shape) -> Tiling {
        let rows = shape.tokens.div_ceil(self.tile_m).max(1);
        let share = |rows: usize, most| even_share(shape, shape.multiprocessors / rows, most);
        let (tile_m, tile_h) = match self.kind {
            Kind::Instruction => (self.tile_m, GROUP),
            Kind::EvenShare => (self.tile_m, share(1, MOST_FEATURES)),
            Kind::EvenTokens => {
                // Not of eights: each height is compiled.
                let tile_m = shape.tokens.div_ceil(rows).next_multiple_of(16).max(16);
                let groups = if tile_m > COLUMNS_OF_THREE { 2 } else { 3 };
                (tile_m, share(rows, groups * GROUP))
            }
            Kind::Tokens => {
                let share = share(rows.min(MOST_ROWS), self.most_by_tokens());
                let unit = if share > self.together() { 16 } else { 8 };
                (self.tile_m, share.next_multiple_of(unit))
            }
        };
        let blocks_per_sm = if self.kind == Kind::Instruction { 2 } else { 1 };
        Tiling { config: Self { tile_m, ..self }, tile_h, blocks_per_sm }
    }
}

impl fmt::Display for Config {
    /// `16x64 split 2`, `16xfitted`, `fittedxfitted`, `64xfitted by tokens`: tokens and features of a tile.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Instruction => write!(f, "{}x{GROUP} split {}", self.tile_m, self.split),
            Kind::EvenShare => write!(f, "{}xfitted", self.tile_m),
            Kind::EvenTokens => f.write_str("fittedxfitted"),
            Kind::Tokens => write!(f, "{}xfitted by tokens", self.tile_m),
        }
    }
}

/// Features of a tile, at most `most` of them, so that each SM has as many tiles as every other, and these
/// as wide as they can be. [out, in]: whole groups of eight lines of the swizzle. [in, out]: whole lines.
pub(in crate::kernels) fn even_share(shape: Shape, multiprocessors: usize, most: usize) -> usize {
    let unit = match shape.orientation {
        Orientation::OutIn => 8,
        Orientation::InOut => 64,
    };
    let (multiprocessors, most) = (multiprocessors.max(1), most / unit * unit);
    let tiles = shape.features.div_ceil(multiprocessors * most).max(1);
    shape.features.div_ceil(multiprocessors * tiles).next_multiple_of(unit).max(unit)
}

/// A configuration with its tile for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    pub(super) config: Config,
    pub(super) tile_h: usize,
    pub(super) blocks_per_sm: usize,
}

impl Tiling {
    /// Rows and columns of h that a block, or those that split its k, compute.
    pub(crate) fn tile(self) -> [usize; 2] {
        [self.config.tile_m, self.tile_h]
    }

    pub(crate) fn form(self) -> Form {
        let multiplier = match self.config.kind {
            Kind::Tokens => {
                let instructions = if self.tile_h > self.config.together() { 2 } else { 1 };
                Multiplier::Wgmma { columns: 2 * self.tile_h / instructions, wanted: 1.0 }
            }
            _ => Multiplier::Wgmma {
                columns: self.config.tile_m,
                wanted: self.tile_h as f64 / (self.warpgroups() * GROUP) as f64,
            },
        };
        Form {
            tile: self.tile(),
            share: 1,
            split: self.config.split,
            blocks_per_sm: self.blocks_per_sm,
            hides_epilogue: false,
            narrow_last: false,
            multiplier,
        }
    }

    pub(super) fn by_tokens(self) -> bool {
        self.config.kind == Kind::Tokens
    }

    pub(super) fn warpgroups(self) -> usize {
        let rows = if self.by_tokens() { self.config.tile_m } else { self.tile_h };
        rows.div_ceil(GROUP)
    }

    /// Warpgroups with many sums take registers of one more.
    pub(super) fn threads(self) -> usize {
        let crowded = match self.config.kind {
            Kind::Tokens => {
                let room = [usize::MAX, 96, 64];
                self.tile_h > room[self.warpgroups() - 1]
            }
            _ => {
                self.config.tile_m
                    >= [usize::MAX, COLUMNS_OF_THREE + 1, COLUMNS_OF_THREE][self.warpgroups() - 1]
            }
        };
        let producers = match crowded {
            true => 128,
            false if self.paced() => 64,
            false => 32,
        };
        self.warpgroups() * 128 + producers
    }

    pub(super) fn shared_limit(self) -> usize {
        let left = self.config.next.shared_beside().map_or(0, |bytes| bytes + 1024);
        (SHARED_PER_SM - left) / self.blocks_per_sm - 1024
    }

    pub(super) fn stage_bytes(self) -> usize {
        (self.config.tile_m + 2 * self.tile_h) * TILE_K * 2
    }

    /// What the last warpgroup reads behind the ring.
    pub(super) fn behind_ring(self) -> usize {
        if self.by_tokens() {
            return 0;
        }
        let behind_half = self.warpgroups() * GROUP - self.tile_h;
        behind_half.saturating_sub(self.config.tile_m) * TILE_K * 2
    }

    /// Whether weights come at a pace.
    pub(super) fn paced(self) -> bool {
        match self.config.next {
            Next::Unknown => false,
            Next::SkinnyGemm => self.fitting(PACED_BARRIERS) < FEW_STAGES,
            Next::SkinnyGemmBeside | Next::RegisterGemmBeside => true,
        }
    }

    /// Of a stage: one more where weights come at a pace.
    pub(super) fn barrier_bytes(self) -> usize {
        if self.paced() { PACED_BARRIERS } else { 16 }
    }

    /// Stages of weights under way, where they come at a pace: fewer than there are. 0: all.
    pub(super) fn under_way(self) -> usize {
        let bytes = match self.config.next {
            _ if !self.paced() => return 0,
            Next::Unknown | Next::SkinnyGemm => UNDER_WAY_ALONE,
            Next::SkinnyGemmBeside => UNDER_WAY[0],
            Next::RegisterGemmBeside => UNDER_WAY[1],
        };
        let stage = 2 * self.tile_h * TILE_K * 2;
        (bytes / stage).min(self.stages() - 1).max(1)
    }

    /// As many as fit.
    pub(crate) fn stages(self) -> usize {
        self.fitting(self.barrier_bytes())
    }

    /// Stages, with so many bytes of barriers each.
    pub(super) fn fitting(self, barriers: usize) -> usize {
        (self.shared_limit() - 1024 - self.behind_ring()) / (self.stage_bytes() + barriers)
    }

    /// What a launch asks for. Two blocks that leave room must not share an SM: others would be empty.
    pub(super) fn requested_bytes(self) -> usize {
        let least = if self.shares() { self.shared_limit() } else { 0 };
        self.shared_bytes().max(least)
    }

    /// Whether blocks share SMs with those of the next kernel.
    pub(super) fn shares(self) -> bool {
        self.config.next.shared_beside().is_some()
    }

    /// Whether the threads that multiply ask for x.
    pub(super) fn x_at_once(self) -> bool {
        self.config.next == Next::RegisterGemmBeside
    }

    pub(super) fn releases_at_once(self) -> bool {
        self.config.next != Next::Unknown && self.stages() < FEW_STAGES
    }

    pub(super) fn shared_bytes(self) -> usize {
        1024 + self.stages() * (self.stage_bytes() + self.barrier_bytes()) + self.behind_ring()
    }
}

#[cfg(test)]
mod tests;
