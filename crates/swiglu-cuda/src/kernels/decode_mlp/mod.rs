//! Launches `device/decode/decode_mlp.cu`, `device/decode/sm90_decode_mlp.cu` and `device/decode/sm90_held_mlp.cu`: the feed-forward block
//! for a few tokens.

mod config;
mod format;
mod limits;
mod sm90_decode_mlp;
mod sm90_held_mlp;
mod variants;

use std::fmt;

use swiglu_core::{DType, Op, Problem};

use super::NamedVariant;
use super::elementwise::{Tensor, signed};
use super::gate::{Formula, GateCode};
use super::gated_gemm::counted;
use super::ring::Ring;
use super::weights::{Bias, Biases};
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::launch::{LaunchConfig, launch as enqueue};
use crate::device::stream::Stream;
pub(crate) use config::MOST_TOKENS;
pub(super) use config::files;
use config::{Config, Feed, Part};
pub(crate) use format::Format;
pub(crate) use limits::{Limits, Obstacle};
use sm90_decode_mlp::Form;
pub(super) use variants::{sm90_variants, variants};

/// How the decode kernel computes a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Design {
    /// One, whose blocks all run at the same time and wait for each other between the two halves.
    OneLaunch,
    /// Two, the second of which starts while the first ends, where the device can do that.
    TwoLaunches,
    /// As [`Design::OneLaunch`], with weights that come through TMA of sm_90, and 8 warps that
    /// multiply.
    BulkOneLaunch,
    /// The same with twice the warps that multiply, and stages of twice the size; not for 4-bit weights with
    /// more than 8 tokens, of which a thread of so many warps has too few registers.
    BulkOneLaunchWide,
    /// As [`Design::TwoLaunches`] on sm_90, with quantised weights so few that an SM's share fits into its
    /// shared memory, all of it under way before there are tokens.
    HeldLaunches,
    /// One launch of one thread block, as a warning: fused, and on one SM. Only
    /// measurements ask for it.
    Sequential,
}

impl Design {
    /// Those of every architecture.
    pub(crate) const COMMON: [Design; 2] = [Design::OneLaunch, Design::TwoLaunches];

    /// What plans choose from.
    pub(crate) fn every() -> impl Iterator<Item = Design> {
        let of_sm90 = [Design::BulkOneLaunch, Design::BulkOneLaunchWide, Design::HeldLaunches];
        Self::COMMON.into_iter().chain(of_sm90)
    }

    /// Whether plans take it for a problem only where a tuning record says so: the cost model was fitted to
    /// what TMA feeds with 16-bit values, whose products are a fraction of f32's.
    pub(crate) fn waits_for_tuning(self, problem: &Problem) -> bool {
        problem.dtype == DType::F32 && self.needs_tma()
    }

    pub(crate) fn needs_tma(self) -> bool {
        match self {
            Design::BulkOneLaunch | Design::BulkOneLaunchWide | Design::HeldLaunches => true,
            Design::OneLaunch | Design::TwoLaunches | Design::Sequential => false,
        }
    }

    /// Whether its blocks wait for each other, so that all of them must run at once.
    pub(crate) fn has_meetings(self) -> bool {
        match self {
            Design::OneLaunch | Design::BulkOneLaunch | Design::BulkOneLaunchWide => true,
            Design::TwoLaunches | Design::HeldLaunches | Design::Sequential => false,
        }
    }

    /// The kernel's name.
    pub(crate) fn kernel(self) -> &'static str {
        match self {
            Design::OneLaunch | Design::TwoLaunches => "decode_mlp",
            Design::BulkOneLaunch | Design::BulkOneLaunchWide => "sm90_decode_mlp",
            Design::HeldLaunches => "sm90_held_mlp",
            Design::Sequential => "sequential_mlp",
        }
    }
}

impl fmt::Display for Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Design::OneLaunch => "decode_mlp one launch",
            Design::TwoLaunches => "decode_mlp two launches",
            Design::BulkOneLaunch => "sm90_decode_mlp 8 warps",
            Design::BulkOneLaunchWide => "sm90_decode_mlp 16 warps",
            Design::HeldLaunches => "sm90_held_mlp",
            Design::Sequential => "sequential_mlp",
        })
    }
}

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
        if problem.numerics.batch_invariant {
            return Err(Obstacle::FewTokens);
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
        if design.has_meetings() && !limits.cooperative {
            return Err(Obstacle::NotCooperative);
        }
        let (first, second) = match design {
            Design::OneLaunch => (Config::fit(Part::Both, problem, limits)?, None),
            Design::TwoLaunches => {
                let down = Config::fit(Part::Down, problem, limits)?;
                (Config::fit(Part::GateUp, problem, limits)?, Some(down))
            }
            Design::BulkOneLaunch => (Config::fit_sm90(&Form::NARROW, problem, limits)?, None),
            Design::BulkOneLaunchWide => (Config::fit_sm90(&Form::WIDE, problem, limits)?, None),
            Design::HeldLaunches => {
                let [gate_up, down] = Config::fit_held(problem, limits)?;
                (gate_up, Some(down))
            }
            Design::Sequential => {
                if let Some(types) = problem.quantized {
                    return Err(Obstacle::Blocks(types.gate_up));
                }
                (Config::sequential(problem.m)?, None)
            }
        };
        Ok(Self { design, first, second, programmatic })
    }

    pub(crate) fn design(&self) -> Design {
        self.design
    }

    /// Whether x is copied to shared memory as a whole.
    pub(crate) fn stages_x(&self) -> bool {
        self.first.stage_x
    }

    /// By name, for people.
    pub(crate) fn parameters(&self) -> [(&'static str, usize); 4] {
        let first = &self.first;
        [
            ("launches", 1 + usize::from(self.second.is_some())),
            ("blocks", first.grid),
            ("warps", first.warps),
            ("ring_kib", first.ring() / 1024),
        ]
    }

    /// Whether the kernel takes this x of `[m, hidden]`, or why not: plans know no strides.
    pub(crate) fn check_x(&self, x: Tensor, problem: &Problem) -> Result<(), Obstacle> {
        let end = problem.hidden * problem.dtype.size();
        let whole = end.is_multiple_of(16) && is_wide(x, problem.m, problem.dtype);
        let by_elements = self.first.stage_x || matches!(self.first.feed, Feed::Held(_));
        if by_elements || whole { Ok(()) } else { Err(Obstacle::Unaligned) }
    }

    /// The rings of all launches for a problem that has been checked.
    pub(crate) fn rings(&self, problem: &Problem) -> Vec<Ring> {
        let launches = [Some(self.first), self.second].into_iter().flatten();
        launches.flat_map(|config| config.rings(problem)).collect()
    }

    /// What [`Self::prepare`] compiles.
    pub(crate) fn needed(&self, code: GateCode) -> impl Iterator<Item = NamedVariant> {
        let launches = [Some(self.first), self.second].into_iter().flatten();
        launches.map(move |config| variants::named(config, code))
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
        let ([gate_bias, up_bias], bias) = Biases::of(w.biases);
        let params = Params {
            x: call.x.data,
            gate: w.gate,
            up: w.up,
            down: w.down,
            h: call.h.data,
            y: call.y.data,
            x_stride: call.x.stride,
            h_stride: call.h.stride,
            y_stride: call.y.stride,
            gate_stride: signed(w.gate_stride),
            down_stride: signed(w.down_stride),
            scales: w.scales,
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
            element_biases: u32::from(bias == Bias::Elements),
            formula: call.formula,
        };
        let launch = LaunchConfig {
            grid: [config.grid as u32, 1, 1],
            block: config.threads() as u32,
            dynamic_shared: config.shared as u32,
            cluster: match config.feed {
                Feed::Held(held) => held.cluster(),
                Feed::Lanes | Feed::Tma(_) => None,
            },
            programmatic: match config.feed {
                Feed::Lanes => config.part == Part::Down && self.programmatic,
                // Graphs can hold such launches since then.
                Feed::Tma(_) | Feed::Held(_) => stream.cuda().facts().driver_version >= (12, 3),
            },
            cooperative: config.part == Part::Both,
        };
        // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
        unsafe {
            match config.feed {
                Feed::Lanes | Feed::Held(_) => enqueue(stream, &function, &launch, &params),
                Feed::Tma(feeding) => {
                    let params = Sm90Params { block: params, ring: feeding.ring };
                    enqueue(stream, &function, &launch, &params)
                }
            }
        }
    }
}

/// Scales of rows of quantised weights in device memory, f32; where blocks have scales, they lie in the rows.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Scales {
    pub(crate) gate: u64,
    pub(crate) up: u64,
    pub(crate) down: u64,
}

/// Weights in device memory, all `[out, in]`, rows padded with zeros to whole 16 bytes; quantised
/// ones as [`crate::layers`] lays them out, to whole units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BlockWeights {
    pub(crate) gate: u64,
    pub(crate) up: u64,
    pub(crate) down: u64,
    /// Bytes from row to row; gate and up lie alike.
    pub(crate) gate_stride: usize,
    pub(crate) down_stride: usize,
    /// Of quantised weights, else zeros.
    pub(crate) scales: Scales,
    /// K.
    pub(crate) hidden: usize,
    /// H.
    pub(crate) intermediate: usize,
    /// bg and bu.
    pub(crate) biases: Option<Biases>,
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
    /// Of the workspace; rows are padded to whole 16 bytes, for quantised weights to whole units.
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
    h_stride: i64,
    y_stride: i64,
    gate_stride: i64,
    down_stride: i64,
    scales: Scales,
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
    element_biases: u32,
    formula: Formula,
}

/// Of `sm90_decode_mlp.cu`.
#[repr(C)]
struct Sm90Params {
    block: Params,
    ring: sm90_decode_mlp::Ring,
}

#[cfg(test)]
mod tests;
