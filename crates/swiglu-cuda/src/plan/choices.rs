//! What was chosen for the layers of one problem, by the number of tokens.

use std::convert::Infallible;

use swiglu_core::{DType, Path, Problem};

use super::by_tokens::ByTokens;
use super::planner::Planner;
use super::steps::Steps;
use super::{Why, choose_for, of_pass};
use crate::device::cuda::Cuda;
use crate::kernels::elementwise::Stored;
use crate::kernels::gated_gemm::Kernel;
use crate::kernels::obstacle::Obstacle;

/// How a caller's weights lie, as far as plans depend on it beside their orientation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Lent {
    /// What rows begin at a multiple of: bytes that a kernel copies at once, at most 16.
    pub(crate) copy_bytes: usize,
    /// Whether the kernels for few tokens of a block read them.
    pub(crate) is_whole: bool,
    /// Whether gate or up have biases, which are of T.
    pub(crate) biased: bool,
}

/// Bytes that TMA needs rows at a multiple of.
const TMA_BYTES: usize = 16;

impl Lent {
    /// Whether steps take the weights as they lie, or why not.
    pub(crate) fn check(&self, steps: &Steps, dtype: DType) -> Result<(), Obstacle> {
        if !self.is_whole && (steps.design().is_some() || steps.is_pair()) {
            return Err(Obstacle::LentRows);
        }
        if self.copy_bytes < TMA_BYTES && steps.needs_tma() {
            return Err(Obstacle::LentAddresses);
        }
        if self.biased && dtype != DType::F32 && steps.stored() == Some(Stored::Sums) {
            return Err(Obstacle::LentBiases(dtype));
        }
        Ok(())
    }

    /// How many times as long steps take as over weights whose rows begin at multiples of 16 bytes. Two bytes at a time,
    /// which pass through registers, were measured on an H100 to take 13 to 62 times as long as the kernels with TMA,
    /// which take about half as long as this one; of 4 and 8 bytes it is the number of copies. cuBLASLt loses less,
    /// 2 to 9 times on an H200 (docs/lent-weights.md), wherever both could be taken.
    pub(super) fn slower(&self, steps: Steps) -> f64 {
        match (steps.kernel_of_h(), self.copy_bytes) {
            (Some(Kernel::Mma(_)), 8) => 2.0,
            (Some(Kernel::Mma(_)), 4) => 4.0,
            (Some(Kernel::Mma(_)), ..4) => 24.0,
            _ => 1.0,
        }
    }
}

/// What layers of the same problem choose, on the path that was asked for: each number of tokens is planned once,
/// however many layers of a model are the same.
#[derive(Debug)]
pub(crate) struct Choices {
    /// With no tokens.
    problem: Problem,
    path: Option<Path>,
    lent: Option<Lent>,
    steps: ByTokens<Steps>,
    /// Of the planner that chooses, whatever planners have followed it.
    generation: usize,
}

impl Choices {
    pub(super) fn new(
        problem: &Problem,
        path: Option<Path>,
        lent: Option<Lent>,
        generation: usize,
    ) -> Self {
        Self { problem: problem.with_m(0), path, lent, steps: ByTokens::new(), generation }
    }

    /// The planner that chooses: one while the layers live, so that what they have prepared is what they launch.
    pub(crate) fn planner<'a>(&self, cuda: &'a Cuda) -> &'a Planner {
        Planner::at(cuda, self.generation)
    }

    pub(super) fn is_of(&self, problem: &Problem, path: Option<Path>, lent: Option<Lent>) -> bool {
        self.problem == problem.with_m(0) && (self.path, self.lent) == (path, lent)
    }

    /// The problem with `m` tokens, of quantised weights those of a pass.
    pub(crate) fn problem(&self, m: usize) -> Problem {
        of_pass(&self.problem.with_m(m))
    }

    /// The steps for `m` tokens. It allocates nothing after the first of a number of tokens.
    pub(crate) fn get(&self, planner: &Planner, m: usize) -> Steps {
        let make = || Ok(self.choose(planner, m).0);
        let Ok(steps) = self.steps.get::<Infallible>(m, make);
        steps
    }

    /// The same, and why.
    pub(crate) fn choose(&self, planner: &Planner, m: usize) -> (Steps, Why) {
        choose_for(planner, &self.problem(m), self.path, self.lent.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use swiglu_core::{Activation, Op};

    use super::*;
    use crate::common;

    #[test]
    fn layers_of_the_same_problem_share_what_is_chosen() {
        let Some(cuda) = common::device() else { return };
        let planner = Planner::of(&cuda);
        let problem = |h| Problem::new(Op::GatedLinear, 5, 64, h, DType::Bf16, Activation::SWIGLU);
        let lent = Lent { copy_bytes: 2, is_whole: true, biased: false };
        let of = |h, path, lent| planner.choices(&problem(h), path, lent);
        let first = of(96, None, None);
        assert!(Arc::ptr_eq(&first, &planner.choices(&problem(96).with_m(7), None, None)));
        for other in [of(88, None, None), of(96, Some(Path::Fused), None), of(96, None, Some(lent))]
        {
            assert!(!Arc::ptr_eq(&first, &other), "{other:?}");
        }
        for m in [1, 5, 5, 300] {
            assert_eq!(first.get(planner, m), first.choose(planner, m).0);
        }
        // The layers hold it, and nothing else.
        let weak = Arc::downgrade(&first);
        drop(first);
        assert_eq!(weak.strong_count(), 0);
    }

    #[test]
    fn lent_rows_that_tma_does_not_address_go_elsewhere() {
        let Some(cuda) = common::device() else { return };
        let planner = Planner::of(&cuda);
        let problem =
            Problem::new(Op::GatedLinear, 512, 4096, 14336, DType::Bf16, Activation::SWIGLU);
        for (copy_bytes, biased) in [(16, false), (8, false), (2, false), (2, true), (16, true)] {
            let lent = Lent { copy_bytes, is_whole: true, biased };
            let (steps, _) = choose_for(planner, &problem, None, Some(&lent));
            assert_eq!(lent.check(&steps, DType::Bf16), Ok(()), "{lent:?}");
            assert!(copy_bytes == 16 || !steps.needs_tma(), "{steps}");
            let unfused = copy_bytes < 16 && !biased;
            assert_eq!(steps.path() == Path::Unfused, unfused, "{lent:?}: {steps}");
        }
    }
}
