//! What was chosen for the layers of one problem, by the number of tokens.

use std::sync::{Arc, PoisonError, Weak};

use swiglu_core::{DType, Path, Problem};

use super::{Algorithm, ByTokens, Planner, Why, choose, of_pass};
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
    /// Whether an algorithm takes the weights as they lie, or why not.
    pub(crate) fn check(&self, algorithm: &Algorithm, dtype: DType) -> Result<(), Obstacle> {
        if !self.is_whole && (algorithm.design().is_some() || algorithm.is_pair()) {
            return Err(Obstacle::LentRows);
        }
        if self.copy_bytes < TMA_BYTES && algorithm.needs_tma() {
            return Err(Obstacle::LentAddresses);
        }
        if self.biased && dtype != DType::F32 && algorithm.stored() == Some(Stored::Sums) {
            return Err(Obstacle::LentBiases(dtype));
        }
        Ok(())
    }

    /// How many times as long an algorithm takes as over weights whose rows begin at multiples of 16 bytes. Two bytes at a time,
    /// which pass through registers, were measured on an H100 to take 13 to 62 times as long as the kernels with TMA,
    /// which take about half as long as this one; of 4 and 8 bytes it is the number of copies. cuBLASLt loses less,
    /// 2 to 9 times on an H200 (docs/lent-weights.md), wherever both could be taken.
    pub(super) fn slower(&self, algorithm: Algorithm) -> f64 {
        match (algorithm.kernel_of_h(), self.copy_bytes) {
            (Some(Kernel::Mma(_)), 8) => 2.0,
            (Some(Kernel::Mma(_)), 4) => 4.0,
            (Some(Kernel::Mma(_)), ..4) => 24.0,
            _ => 1.0,
        }
    }
}

/// What layers of the same problem choose, on the path that was asked for: each number of tokens is planned once,
/// however many layers of a model are the same.
pub(crate) struct Choices {
    /// What chooses while the layers live, whatever planners have followed it: so what they have prepared is what they launch.
    pub(crate) planner: Arc<Planner>,
    /// With no tokens.
    problem: Problem,
    path: Option<Path>,
    lent: Option<Lent>,
    algorithms: ByTokens<Algorithm>,
}

impl Choices {
    /// What is chosen for layers of this problem, whatever its number of tokens: one for all that are the same.
    pub(crate) fn of(
        planner: &Arc<Planner>,
        problem: &Problem,
        path: Option<Path>,
        lent: Option<Lent>,
    ) -> Arc<Self> {
        let problem = problem.with_m(0);
        let same = |c: &Arc<Self>| (c.problem, c.path, c.lent) == (problem, path, lent);
        // Nothing that panics is done under the lock.
        let mut all = planner.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter().filter_map(Weak::upgrade).find(same);
        known.unwrap_or_else(|| {
            let (planner, algorithms) = (planner.clone(), ByTokens::new());
            let new = Arc::new(Self { planner, problem, path, lent, algorithms });
            all.retain(|choices| choices.strong_count() > 0);
            all.push(Arc::downgrade(&new));
            new
        })
    }

    /// The problem with `m` tokens, of quantised weights those of a pass.
    pub(crate) fn problem(&self, m: usize) -> Problem {
        of_pass(&self.problem.with_m(m))
    }

    /// The algorithm for `m` tokens. It allocates nothing after the first of a number of tokens.
    pub(crate) fn get(&self, m: usize) -> Algorithm {
        self.algorithms.get(m, || self.choose(m).0)
    }

    /// The same, and why.
    pub(crate) fn choose(&self, m: usize) -> (Algorithm, Why) {
        choose(&self.planner, &self.problem(m), self.path, self.lent.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use swiglu_core::{Activation, Op};

    use super::*;
    use crate::common;

    #[test]
    fn layers_of_the_same_problem_share_what_is_chosen() {
        let Some(cuda) = common::device() else { return };
        let planner = Planner::of(&cuda);
        let problem = |h| Problem::new(Op::GatedLinear, 5, 64, h, DType::Bf16, Activation::SWIGLU);
        let lent = Lent { copy_bytes: 2, is_whole: true, biased: false };
        let of = |h, path, lent| Choices::of(planner, &problem(h), path, lent);
        let first = of(96, None, None);
        assert!(Arc::ptr_eq(&first, &Choices::of(planner, &problem(96).with_m(7), None, None)));
        for other in [of(88, None, None), of(96, Some(Path::Fused), None), of(96, None, Some(lent))]
        {
            assert!(!Arc::ptr_eq(&first, &other));
        }
        for m in [1, 5, 5, 300] {
            assert_eq!(first.get(m), first.choose(m).0);
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
            let (algorithm, _) = choose(planner, &problem, None, Some(&lent));
            assert_eq!(lent.check(&algorithm, DType::Bf16), Ok(()), "{lent:?}");
            assert!(copy_bytes == 16 || !algorithm.needs_tma(), "{algorithm}");
            let unfused = copy_bytes < 16 && !biased;
            assert_eq!(algorithm.path() == Path::Unfused, unfused, "{lent:?}: {algorithm}");
        }
    }
}
