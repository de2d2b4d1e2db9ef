//! What computes a layer, each step with its kernel: the table of all, and what each says of a problem.

use std::fmt;

use swiglu_core::{DType, Op, Orientation, Path, Problem, Rounding};

use super::machine::Model;
use super::{Planner, cost};
use crate::device::arch::Arch;
use crate::device::cuda::Cuda;
use crate::kernels::NamedVariant;
use crate::kernels::decode_mlp::{self, Decode, Design};
use crate::kernels::down::Down;
use crate::kernels::elementwise::{self, Stored, Tensor};
use crate::kernels::gate::GateCode;
use crate::kernels::gated_gemm::{Kernel, Shape};
use crate::kernels::obstacle::Obstacle;
use crate::kernels::tensor_map::addressable;
use crate::kernels::weights::weights_lie;

/// What computes a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// x → y, the whole block for a few tokens.
    Decode(Design),
    /// x → h, then of a block h → y. Kernels of ours for both are made to run side by side.
    ByH(ToH, Option<Down>),
}

/// What computes h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToH {
    /// One kernel.
    Gated(Kernel),
    /// cuBLASLt, then the element-wise kernel, with gate and up in memory between them.
    Unfused(Stored),
}

/// What multiplies on the unfused path.
pub(super) fn product(stored: Stored) -> &'static str {
    match stored {
        Stored::Elements => "cublaslt",
        Stored::Sums => "cublaslt f32",
    }
}

/// Whether gate and up in memory are rounded as the problem asks for, or why not.
fn check_unfused(stored: Stored, problem: &Problem) -> Result<(), Obstacle> {
    let (dtype, rounding) = (problem.dtype, problem.numerics.rounding);
    let rounds = dtype != DType::F32;
    match (stored, rounding) {
        _ if problem.hidden == 0 => Err(Obstacle::NothingToMultiply),
        (Stored::Elements, Rounding::Fused) if rounds => Err(Obstacle::RoundsBetween(dtype)),
        (Stored::Elements, _) if rounds && problem.bias => Err(Obstacle::RoundsBias(dtype)),
        (Stored::Sums, _) if !rounds => Err(Obstacle::SumsAreElements),
        (Stored::Elements, _) | (Stored::Sums, Rounding::Fused) => Ok(()),
        (Stored::Sums, _) => Err(Obstacle::KeepsBetween(dtype)),
    }
}

/// Whether each sum of a kernel is made in the order of k by the instruction that all numbers of tokens of a layer have: tiles
/// of every height and width then give the same bits, also where tokens are the instruction's columns.
fn sums_in_one_order(kernel: Kernel, planner: &Planner, problem: &Problem) -> bool {
    let two_rows = Tensor::new(0, problem.hidden);
    let wgmma = planner.subject.arch == Arch::Sm90a && !planner.subject.portable_kernels;
    let wgmma = wgmma && problem.dtype != DType::F32 && problem.hidden > 0;
    let wgmma = wgmma && addressable(two_rows, 2);
    kernel.needs_tma() == wgmma && kernel.sums_in_order_of_k(problem.bias)
}

impl Algorithm {
    /// One kernel for h.
    pub(crate) const fn gated(kernel: Kernel) -> Self {
        Self::ByH(ToH::Gated(kernel), None)
    }

    /// h by cuBLASLt and the element-wise kernel.
    pub(crate) const fn unfused(stored: Stored) -> Self {
        Self::ByH(ToH::Unfused(stored), None)
    }

    /// The table: every algorithm for an operation. Those for h are those of the gated linear layer; a block goes on with cuBLASLt, or with the
    /// kernel of ours that follows the one for h.
    pub(crate) fn all(op: Op) -> impl Iterator<Item = Algorithm> {
        let block = op == Op::Mlp;
        let decode = Design::every().map(Self::Decode).filter(move |_| block);
        let kernels = Kernel::all().map(Self::gated);
        let unfused = [Stored::Elements, Stored::Sums].map(Self::unfused);
        let pair = |kernel: Kernel| Self::ByH(ToH::Gated(kernel), Some(Down::of(kernel.next())));
        let pairs = Kernel::all().flat_map(Kernel::before_down).map(pair);
        let h = kernels.chain(unfused).map(move |algorithm| algorithm.of(op));
        decode.chain(h).chain(pairs.filter(move |_| block))
    }

    /// An algorithm for h as one for an operation.
    pub(crate) fn of(self, op: Op) -> Self {
        match self {
            Self::ByH(to_h, None) if op == Op::Mlp => Self::ByH(to_h, Some(Down::CublasLt)),
            _ => self,
        }
    }

    /// The algorithm for h of a block that goes on with cuBLASLt.
    pub(super) fn to_h(self) -> Option<Self> {
        match self {
            Self::ByH(to_h, Some(Down::CublasLt)) => Some(Self::ByH(to_h, None)),
            _ => None,
        }
    }

    /// What it computes.
    fn op(&self) -> Op {
        if let Self::ByH(_, None) = self { Op::GatedLinear } else { Op::Mlp }
    }

    /// The decode kernel, where it computes the whole block.
    pub(crate) fn design(&self) -> Option<Design> {
        if let Self::Decode(design) = *self { Some(design) } else { None }
    }

    /// The kernel for h, where one computes it.
    pub(crate) fn kernel_of_h(&self) -> Option<Kernel> {
        if let Self::ByH(ToH::Gated(kernel), _) = *self { Some(kernel) } else { None }
    }

    /// What gate and up lie in memory as, if they do.
    pub(crate) fn stored(&self) -> Option<Stored> {
        if let Self::ByH(ToH::Unfused(stored), _) = *self { Some(stored) } else { None }
    }

    /// The kernel for y, where it comes behind h.
    pub(crate) fn down(&self) -> Option<Down> {
        if let Self::ByH(_, down) = *self { down } else { None }
    }

    /// Whether two kernels of ours run side by side.
    pub(crate) fn is_pair(&self) -> bool {
        self.down().is_some_and(|down| down != Down::CublasLt)
    }

    pub(crate) fn path(&self) -> Path {
        if self.stored().is_some() { Path::Unfused } else { Path::Fused }
    }

    pub(super) fn needs_tma(&self) -> bool {
        self.design().is_some_and(Design::needs_tma)
            || self.kernel_of_h().is_some_and(Kernel::needs_tma)
    }

    /// Whether it gives what the problem asks for, or why not. It allocates nothing.
    pub(crate) fn check(&self, planner: &Planner, problem: &Problem) -> Result<(), Obstacle> {
        match (self.op(), problem.op) {
            (computed, asked) if computed == asked => {}
            (Op::Mlp, op) => return Err(Obstacle::Decode(decode_mlp::Obstacle::NotABlock(op))),
            (computed, asked) => return Err(Obstacle::OtherOperation { computed, asked }),
        }
        if let (Some(types), Self::ByH(..)) = (problem.quantized, self) {
            return Err(Obstacle::Quantized(types.gate_up));
        }
        if planner.subject.portable_kernels && self.needs_tma() {
            return Err(Obstacle::NotPortable);
        }
        if problem.groups != 1 {
            return Err(Obstacle::Groups(problem.groups));
        }
        let invariant = problem.numerics.batch_invariant;
        let in_one_order = |kernel| sums_in_one_order(kernel, planner, problem);
        if invariant && !self.kernel_of_h().is_some_and(in_one_order) {
            return Err(Obstacle::FollowsTokens);
        }
        let Model { limits, tf32, .. } = planner.model();
        let arch = planner.subject.arch;
        match *self {
            Self::Decode(design) => {
                Decode::check_problem(design, problem, limits).map(drop).map_err(Obstacle::Decode)
            }
            Self::ByH(ToH::Gated(kernel), _) => kernel.check_problem(arch, problem, *tf32),
            Self::ByH(ToH::Unfused(stored), _) => check_unfused(stored, problem),
        }?;
        match self.down() {
            // cuBLASLt is asked for one algorithm.
            Some(_) if invariant && self.is_pair() => Err(Obstacle::FollowsTokens),
            Some(down) => down.check(limits.multiprocessors, problem),
            None => Ok(()),
        }
    }

    /// Whether gate and up can be stored beside what it computes, or why not.
    pub(crate) fn check_saving(&self) -> Result<(), Obstacle> {
        match () {
            () if self.design().is_some() || self.is_pair() => Err(Obstacle::KeepsToItself),
            // Nothing else writes them rounded and h from what they were before.
            () if self.stored() == Some(Stored::Sums) => Err(Obstacle::StoresSums),
            () => Ok(()),
        }
    }

    /// What is compiled for it, of a problem with packed weights that has been checked.
    pub(crate) fn needed(&self, planner: &Planner, problem: &Problem) -> Vec<NamedVariant> {
        let Problem { activation, numerics, dtype, .. } = problem;
        let (limits, code) = (planner.limits(), GateCode::new(activation, *numerics, *dtype));
        let to_h = match *self {
            Self::Decode(design) => {
                let decode = Decode::check_problem(design, problem, limits);
                return decode.iter().flat_map(|decode| decode.needed(code)).collect();
            }
            Self::ByH(ToH::Gated(kernel), _) => {
                kernel.needed(problem, code, limits.multiprocessors)
            }
            Self::ByH(ToH::Unfused(stored), _) => {
                let code = GateCode::elementwise(activation, *numerics, *dtype);
                Some(elementwise::needed(code, stored))
            }
        };
        let down = self.down().and_then(|down| down.needed(problem, limits.multiprocessors));
        to_h.into_iter().chain(down).collect()
    }

    /// Whether it is taken only where a tuning record says so. The cost of a down projection of ours is predicted from its
    /// form, without what both kernels share, and fitted to no measurement.
    pub(super) fn waits_for_tuning(&self, problem: &Problem) -> bool {
        let in_out = weights_lie(problem) == Orientation::InOut;
        let kernel = |kernel: Kernel| kernel.cluster() > 1 || in_out && kernel.copies_narrow_rows();
        self.is_pair()
            || self.kernel_of_h().is_some_and(kernel)
            || self.design().is_some_and(|design| design.waits_for_tuning(problem))
    }

    /// Seconds that the cost model expects.
    pub(crate) fn seconds(&self, model: &Model, problem: &Problem) -> f64 {
        let machine = &model.machine;
        let to_h = match *self {
            Self::Decode(design) => {
                let decode = Decode::check_problem(design, problem, &model.limits);
                return decode.map_or(f64::INFINITY, |d| cost::decode(&d, problem, model));
            }
            Self::ByH(ToH::Gated(kernel), _) => cost::fused(kernel, problem, machine),
            Self::ByH(ToH::Unfused(stored), _) => {
                cost::products(stored, problem, model) + cost::elementwise(stored, problem, machine)
            }
        };
        to_h + match self.down() {
            Some(Down::CublasLt) => cost::down(problem, model),
            Some(_) => cost::skinny_down(problem, machine),
            None => 0.0,
        }
    }

    /// Tile sizes and the like of all steps, by name.
    pub(super) fn parameters(&self, cuda: &Cuda, problem: &Problem) -> Vec<(&'static str, usize)> {
        let mut all = match *self {
            Self::Decode(design) => {
                let decode = Decode::check_problem(design, problem, Planner::of(cuda).limits());
                decode.iter().flat_map(Decode::parameters).collect()
            }
            Self::ByH(ToH::Gated(kernel), _) => {
                kernel.parameters(Shape::of(problem, cuda.facts().sm_count as usize)).to_vec()
            }
            Self::ByH(ToH::Unfused(_), _) => Vec::new(),
        };
        all.extend(self.down().into_iter().flat_map(|down| down.parameters(cuda, problem)));
        all
    }

    /// The kernels' names, without tiles.
    pub(crate) fn kernels(&self) -> String {
        let mut names = match *self {
            Self::Decode(design) => vec![design.kernel()],
            Self::ByH(ToH::Gated(kernel), _) => vec![kernel.name()],
            Self::ByH(ToH::Unfused(stored), _) => vec![product(stored), "elementwise"],
        };
        names.extend(self.down().filter(|_| self.is_pair()).map(Down::kernel));
        names.join(" + ")
    }
}

impl fmt::Display for Algorithm {
    /// As records name them: `sm90_gated_gemm 128x64`, `cublaslt + elementwise`. That a block goes on with cuBLASLt goes
    /// without saying.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to_h = match self {
            Self::Decode(design) => design.to_string(),
            Self::ByH(ToH::Gated(kernel), _) => kernel.to_string(),
            Self::ByH(ToH::Unfused(stored), _) => format!("{} + elementwise", product(*stored)),
        };
        f.pad(&(to_h + self.down().map_or("", Down::joined)))
    }
}
