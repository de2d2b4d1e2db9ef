//! What computes a layer: a list of steps, each by one algorithm.

use std::fmt;

use swiglu_core::{DType, Op, Orientation, Path, Problem, Rounding};

use super::cost;
use super::machine::Model;
use super::planner::Planner;
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

/// What computes one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// x → h, by one kernel.
    Gated(Kernel),
    /// x → gate and up in memory, by cuBLASLt.
    Products(Stored),
    /// Gate and up in memory → h.
    Elementwise(Stored),
    /// h → y.
    Down(Down),
    /// x → y, the whole block for a few tokens.
    Decode(Design),
}

/// The steps of a layer, in the order of their launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Steps([Option<Algorithm>; 3]);

impl Algorithm {
    /// Whether it gives what the problem asks for, or why not.
    fn check(self, planner: &Planner, problem: &Problem) -> Result<(), Obstacle> {
        if let (Some(types), false) = (problem.quantized, matches!(self, Algorithm::Decode(_))) {
            return Err(Obstacle::Quantized(types.gate_up));
        }
        if planner.portable_kernels && self.needs_tma() {
            return Err(Obstacle::NotPortable);
        }
        if problem.groups != 1 {
            return Err(Obstacle::Groups(problem.groups));
        }
        if problem.numerics.batch_invariant && !self.sums_in_one_order(planner, problem) {
            return Err(Obstacle::FollowsTokens);
        }
        let Model { limits, tf32, .. } = planner.model();
        let dtype = problem.dtype;
        let (rounding, rounds) = (problem.numerics.rounding, dtype != DType::F32);
        match self {
            Algorithm::Gated(kernel) => kernel.check_problem(planner.arch(), problem, *tf32),
            Algorithm::Products(_) if problem.hidden == 0 => Err(Obstacle::NothingToMultiply),
            Algorithm::Products(Stored::Elements) => match rounding {
                Rounding::Fused if rounds => Err(Obstacle::RoundsBetween(dtype)),
                _ if rounds && problem.bias => Err(Obstacle::RoundsBias(dtype)),
                _ => Ok(()),
            },
            Algorithm::Products(Stored::Sums) => match rounding {
                _ if !rounds => Err(Obstacle::SumsAreElements),
                Rounding::Fused => Ok(()),
                Rounding::PreRound | Rounding::Eager => Err(Obstacle::KeepsBetween(dtype)),
            },
            Algorithm::Elementwise(_) => Ok(()),
            Algorithm::Down(down) => down.check(limits.multiprocessors, problem),
            Algorithm::Decode(design) => {
                let decode = Decode::check_problem(design, problem, limits);
                decode.map(drop).map_err(Obstacle::Decode)
            }
        }
    }

    /// Whether each sum is made in the order of k by the instruction that all numbers of tokens of a layer have: tiles of
    /// every height and width then give the same bits, also where tokens are the instruction's columns. cuBLASLt is asked
    /// for one algorithm.
    fn sums_in_one_order(self, planner: &Planner, problem: &Problem) -> bool {
        let two_rows = Tensor::new(0, problem.hidden);
        let wgmma = planner.arch() == Arch::Sm90a && !planner.portable_kernels;
        let wgmma = wgmma && problem.dtype != DType::F32 && problem.hidden > 0;
        let wgmma = wgmma && addressable(two_rows, 2);
        match self {
            Algorithm::Gated(kernel) => {
                kernel.needs_tma() == wgmma && kernel.sums_in_order_of_k(problem.bias)
            }
            Algorithm::Elementwise(_) | Algorithm::Down(Down::CublasLt) => true,
            Algorithm::Products(_) | Algorithm::Down(_) | Algorithm::Decode(_) => false,
        }
    }

    pub(super) fn needs_tma(self) -> bool {
        match self {
            Algorithm::Decode(design) => design.needs_tma(),
            Algorithm::Gated(kernel) => kernel.needs_tma(),
            Algorithm::Products(_) | Algorithm::Elementwise(_) | Algorithm::Down(_) => false,
        }
    }

    /// Whether it is taken only where a tuning record says so.
    fn waits_for_tuning(self, problem: &Problem) -> bool {
        match self {
            Algorithm::Decode(design) => design.waits_for_tuning(problem),
            Algorithm::Gated(kernel) => {
                let in_out = weights_lie(problem) == Orientation::InOut;
                kernel.cluster() > 1 || in_out && kernel.copies_narrow_rows()
            }
            Algorithm::Products(_) | Algorithm::Elementwise(_) => false,
            // The cost of ours is predicted from its form, without what both kernels share, and fitted to no measurement.
            Algorithm::Down(down) => down != Down::CublasLt,
        }
    }

    /// Seconds that the cost model expects.
    fn seconds(self, model: &Model, problem: &Problem) -> f64 {
        let Model { machine, limits, tf32 } = model;
        match self {
            Algorithm::Gated(kernel) => cost::fused(kernel, problem, machine),
            Algorithm::Products(stored) => cost::products(stored, problem, machine, *tf32),
            Algorithm::Elementwise(stored) => cost::elementwise(stored, problem, machine),
            Algorithm::Down(Down::CublasLt) => cost::down(problem, machine, *tf32),
            Algorithm::Down(_) => cost::skinny_down(problem, machine),
            Algorithm::Decode(design) => {
                let decode = Decode::check_problem(design, problem, limits);
                decode.map_or(f64::INFINITY, |d| cost::decode(&d, problem, machine, limits))
            }
        }
    }

    /// What is compiled for it, of a problem with packed weights that has been checked.
    fn needed(self, planner: &Planner, problem: &Problem) -> Vec<NamedVariant> {
        let Problem { activation, numerics, dtype, .. } = problem;
        let limits = planner.limits();
        let code = GateCode::new(activation, *numerics, *dtype);
        let one = match self {
            Algorithm::Products(_) => None,
            Algorithm::Gated(kernel) => kernel.needed(problem, code, limits.multiprocessors),
            Algorithm::Elementwise(stored) => {
                let code = GateCode::elementwise(activation, *numerics, *dtype);
                Some(elementwise::needed(code, stored))
            }
            Algorithm::Down(down) => down.needed(problem, limits.multiprocessors),
            Algorithm::Decode(design) => {
                let decode = Decode::check_problem(design, problem, limits);
                return decode.map_or_else(|_| Vec::new(), |decode| decode.needed(code).collect());
            }
        };
        one.into_iter().collect()
    }

    /// Tile sizes and the like, by name.
    fn parameters(self, cuda: &Cuda, problem: &Problem) -> Vec<(&'static str, usize)> {
        match self {
            Algorithm::Gated(kernel) => {
                let shape = Shape::of(problem, cuda.facts().sm_count as usize);
                kernel.parameters(shape).to_vec()
            }
            Algorithm::Products(_) | Algorithm::Elementwise(_) => Vec::new(),
            Algorithm::Down(down) => down.parameters(cuda, problem),
            Algorithm::Decode(design) => {
                let decode = Decode::check_problem(design, problem, Planner::of(cuda).limits());
                decode.map_or_else(|_| Vec::new(), |decode| decode.parameters().to_vec())
            }
        }
    }

    /// The kernel's name, without its tile.
    fn kernel(self) -> &'static str {
        match self {
            Algorithm::Gated(kernel) => kernel.name(),
            Algorithm::Products(Stored::Elements) => "cublaslt",
            Algorithm::Products(Stored::Sums) => "cublaslt f32",
            Algorithm::Elementwise(_) => "elementwise",
            Algorithm::Down(down) => down.kernel(),
            Algorithm::Decode(design) => design.kernel(),
        }
    }
}

impl Steps {
    /// One kernel for h.
    pub(crate) const fn gated(kernel: Kernel) -> Self {
        Self([Some(Algorithm::Gated(kernel)), None, None])
    }

    /// cuBLASLt, then the element-wise kernel, with gate and up in memory between them.
    pub(crate) const fn unfused(stored: Stored) -> Self {
        Self([Some(Algorithm::Products(stored)), Some(Algorithm::Elementwise(stored)), None])
    }

    /// The whole block by a decode kernel.
    pub(crate) const fn decode(design: Design) -> Self {
        Self([Some(Algorithm::Decode(design)), None, None])
    }

    /// A kernel for h that one of ours for the down projection follows: both are made to run side by side.
    fn pair(kernel: Kernel) -> Self {
        Self::gated(kernel).then(Algorithm::Down(Down::of(kernel.next())))
    }

    fn then(mut self, next: Algorithm) -> Self {
        if let Some(free) = self.0.iter_mut().find(|step| step.is_none()) {
            *free = Some(next);
        }
        self
    }

    /// Every list for an operation. The ways to h are those of the gated linear layer; a block goes on with cuBLASLt.
    pub(crate) fn all(op: Op) -> impl Iterator<Item = Steps> {
        let block = op == Op::Mlp;
        let decode = Design::every().map(Self::decode).filter(move |_| block);
        let kernels = Kernel::all().map(Self::gated);
        let unfused = [Stored::Elements, Stored::Sums].map(Self::unfused);
        let pairs = Kernel::all().flat_map(Kernel::before_down).map(Self::pair);
        let h = kernels.chain(unfused).map(move |steps| steps.of(op));
        decode.chain(h).chain(pairs.filter(move |_| block))
    }

    /// Steps to h as steps of an operation.
    pub(crate) fn of(self, op: Op) -> Self {
        match op == Op::Mlp && self.op() != Op::Mlp {
            true => self.then(Algorithm::Down(Down::CublasLt)),
            false => self,
        }
    }

    /// The steps to h, and the one behind them, of a block that goes on with cuBLASLt.
    pub(super) fn to_h(self) -> Option<(Self, Self)> {
        let lt = Algorithm::Down(Down::CublasLt);
        let mut h = self;
        let last = h.0.iter_mut().find(|step| **step == Some(lt))?;
        *last = None;
        Some((h, Self([Some(lt), None, None])))
    }

    /// What they compute.
    fn op(&self) -> Op {
        let to_y = |step| matches!(step, Algorithm::Down(_) | Algorithm::Decode(_));
        if self.iter().any(to_y) { Op::Mlp } else { Op::GatedLinear }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Algorithm> {
        self.0.into_iter().flatten()
    }

    /// The decode kernel, where it computes the whole block.
    pub(crate) fn design(&self) -> Option<Design> {
        self.iter().find_map(|step| match step {
            Algorithm::Decode(design) => Some(design),
            _ => None,
        })
    }

    /// The kernel for h, where one computes it.
    pub(crate) fn kernel_of_h(&self) -> Option<Kernel> {
        self.iter().find_map(|step| match step {
            Algorithm::Gated(kernel) => Some(kernel),
            _ => None,
        })
    }

    /// What gate and up lie in memory as, if they do.
    pub(crate) fn stored(&self) -> Option<Stored> {
        self.iter().find_map(|step| match step {
            Algorithm::Products(stored) => Some(stored),
            _ => None,
        })
    }

    /// The kernel for y, where it comes behind h.
    pub(crate) fn down(&self) -> Option<Down> {
        self.iter().find_map(|step| match step {
            Algorithm::Down(down) => Some(down),
            _ => None,
        })
    }

    /// Whether two kernels of ours run side by side.
    pub(crate) fn is_pair(&self) -> bool {
        self.down().is_some_and(|down| down != Down::CublasLt)
    }

    pub(crate) fn path(&self) -> Path {
        if self.stored().is_some() { Path::Unfused } else { Path::Fused }
    }

    /// Whether these steps give what the problem asks for, or why not. It allocates nothing.
    pub(crate) fn check(&self, planner: &Planner, problem: &Problem) -> Result<(), Obstacle> {
        match (self.op(), problem.op) {
            (Op::Mlp, Op::Mlp) | (Op::GatedLinear, Op::GatedLinear) => {}
            (Op::Mlp, op) => {
                return Err(Obstacle::Decode(decode_mlp::Obstacle::NotABlock(op)));
            }
            (computed, asked) => return Err(Obstacle::OtherOperation { computed, asked }),
        }
        self.iter().try_for_each(|step| step.check(planner, problem))
    }

    /// Whether gate and up can be stored beside what these steps compute, or why not.
    pub(crate) fn check_saving(&self) -> Result<(), Obstacle> {
        match () {
            () if self.design().is_some() || self.is_pair() => Err(Obstacle::KeepsToItself),
            // Nothing else writes them rounded and h from what they were before.
            () if self.stored() == Some(Stored::Sums) => Err(Obstacle::StoresSums),
            () => Ok(()),
        }
    }

    /// What is compiled for them, of a problem with packed weights that has been checked.
    pub(crate) fn needed<'a>(
        &'a self,
        planner: &'a Planner,
        problem: &'a Problem,
    ) -> impl Iterator<Item = NamedVariant> + 'a {
        self.iter().flat_map(|step| step.needed(planner, problem))
    }

    /// Whether they are taken only where a tuning record says so.
    pub(super) fn waits_for_tuning(&self, problem: &Problem) -> bool {
        self.iter().any(|step| step.waits_for_tuning(problem))
    }

    /// Seconds that the cost model expects.
    pub(crate) fn seconds(&self, model: &Model, problem: &Problem) -> f64 {
        self.iter().map(|step| step.seconds(model, problem)).sum()
    }

    /// Tile sizes and the like of all steps, by name.
    pub(super) fn parameters(&self, cuda: &Cuda, problem: &Problem) -> Vec<(&'static str, usize)> {
        self.iter().flat_map(|step| step.parameters(cuda, problem)).collect()
    }

    /// The kernels' names, without tiles.
    pub(crate) fn kernels(&self) -> String {
        let named = self.iter().filter(|step| *step != Algorithm::Down(Down::CublasLt));
        named.map(Algorithm::kernel).collect::<Vec<_>>().join(" + ")
    }
}

impl fmt::Display for Steps {
    /// As records name them: `sm90_gated_gemm 128x64`, `cublaslt + elementwise`. That a block goes on with cuBLASLt goes
    /// without saying.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = String::new();
        for step in self.iter() {
            match step {
                Algorithm::Gated(kernel) => name += &kernel.to_string(),
                Algorithm::Decode(design) => name += &design.to_string(),
                Algorithm::Products(_) => name += step.kernel(),
                Algorithm::Elementwise(_) => name = format!("{name} + {}", step.kernel()),
                Algorithm::Down(down) => name += down.joined(),
            }
        }
        f.pad(&name)
    }
}
