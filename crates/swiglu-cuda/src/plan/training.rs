//! Plans of the passes of a training step: of the forward pass that stores gate and up, and what differentiates in the backward pass.

use swiglu_core::{DType, Pass, Path, Problem, SavePolicy};

use super::cost::backward::{differentiated as differentiated_cost, step_by_step};
use super::steps::product;
use super::{Planner, Steps, Why, choose, of_h};
use crate::device::cuda::Cuda;
use crate::kernels::dgated_gemm::{Call, Kernel};
use crate::kernels::elementwise::Stored;
use crate::kernels::obstacle::Obstacle;
use crate::kernels::sm90_dgated_gemm::Config;

/// Why a kernel does not differentiate in the epilogue of dy·Wdᵀ.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("{0}")]
    Obstacle(Obstacle),
    /// Of addresses, strides and extents.
    #[error("{0}")]
    Call(String),
}

/// The kernels that could compute gradients of gate and up, and h, in the epilogue of dy·Wdᵀ: Hopper's, which is taken
/// wherever it can be, then that of every architecture in the tile which is expected to be the fastest.
pub(super) fn differentiating(planner: &Planner, problem: &Problem) -> [Kernel; 2] {
    let seconds = |kernel: &Kernel| differentiated_cost(*kernel, problem, &planner.model().machine);
    let portable = Kernel::portable().min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
    let hopper = Kernel::Sm90(Config::of(problem.hidden));
    [hopper, portable.unwrap_or(hopper)]
}

/// Whether one of these is taken for a block, or why not. The portable one must be expected to take less time than a product
/// with dh in memory, unless fused kernels were asked for.
pub(super) fn differentiates(
    planner: &Planner,
    kernel: Kernel,
    problem: &Problem,
    path: Option<Path>,
    call: &Call<'_>,
) -> Result<(), Refusal> {
    let model = planner.model();
    let is_portable = matches!(kernel, Kernel::Mma(_));
    let obstacle = |why| Err(Refusal::Obstacle(why));
    if path == Some(Path::Unfused) {
        return obstacle(Obstacle::UnfusedAskedFor);
    }
    if planner.subject.portable_kernels && !is_portable {
        return obstacle(Obstacle::NotPortable);
    }
    let checked = kernel.check(planner.subject.arch, problem.dtype, problem.hidden, model.tf32);
    checked.or_else(obstacle)?;
    kernel.check_call(call).map_err(Refusal::Call)?;
    if !is_portable || path == Some(Path::Fused) {
        return Ok(());
    }
    let fused = differentiated_cost(kernel, problem, &model.machine);
    let ratio = fused / step_by_step(problem, model);
    if ratio > 1.0 {
        let hundredths = (ratio * 100.0).ceil() as u32;
        return obstacle(Obstacle::Slower { hundredths });
    }
    Ok(())
}

/// The kernel that differentiates in the epilogue of dy·Wdᵀ, if one does.
pub(crate) fn differentiated(
    planner: &Planner,
    problem: &Problem,
    path: Option<Path>,
    call: &Call<'_>,
) -> Option<Kernel> {
    let taken = |kernel: &Kernel| differentiates(planner, *kernel, problem, path, call).is_ok();
    differentiating(planner, problem).into_iter().find(taken)
}

/// The forward pass of a problem with packed weights that stores gate and up: by steps to h, which a block leaves by cuBLASLt,
/// and by a fused kernel where those do not store them.
pub(super) fn choose_saving(
    planner: &Planner,
    problem: &Problem,
    path: Option<Path>,
) -> (Steps, Why) {
    let chosen = |path| choose(planner, &of_h(problem), path, None);
    let (mut steps, mut why) = chosen(path);
    if steps.check_saving().is_err() {
        (steps, why) = chosen(Some(Path::Fused));
    }
    (steps.of(problem.op), why)
}

/// What the product that computes an up again is stored as, so that it is rounded as the forward pass by these steps rounded
/// it: cuBLASLt adds a bias to elements as an element, which only the unfused path does.
pub(crate) fn up_again(saving: Steps, has_biases_of_sums: bool) -> Stored {
    match saving.stored() {
        None if has_biases_of_sums => Stored::Sums,
        _ => Stored::Elements,
    }
}

impl Cuda {
    /// The kernels that compute again at the beginning of a backward pass what a policy did not keep.
    pub fn computed_again_by(
        &self,
        problem: &Problem,
        policy: SavePolicy,
        path: Option<Path>,
    ) -> Option<String> {
        match policy {
            SavePolicy::Save => None,
            SavePolicy::SaveGate => Some(product(self.up_again(problem, path)).into()),
            _ => Some(self.planned(problem.with_pass(Pass::Saving), path).kernel),
        }
    }

    /// [`up_again`] for packed weights.
    pub(crate) fn up_again(&self, problem: &Problem, path: Option<Path>) -> Stored {
        let (steps, _) = choose_saving(Planner::of(self), problem, path);
        up_again(steps, problem.bias && problem.dtype != DType::F32)
    }
}
