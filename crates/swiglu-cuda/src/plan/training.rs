//! Plans of the passes of a training step: of the forward pass that stores gate and up, and of the backward pass every step, by
//! what it is computed, and what that is expected to take.

use std::sync::Arc;

use swiglu_core::{DType, Op, Orientation, Pass, Path, Plan, Problem, SavePolicy};

use super::algorithm::product;
use super::cost::backward as cost;
use super::tuning::{DOWN, DX, GATE_UP, gemms_of_step};
use super::{Algorithm, BACKEND, Candidate, Planner, Why, choose, of_h};
use crate::device::cuda::Cuda;
use crate::device::lt::Measured;
use crate::kernels::dgated_gemm::{Call, Kernel};
use crate::kernels::elementwise::Stored;
use crate::kernels::gate::GateCode;
use crate::kernels::obstacle::Obstacle;
use crate::kernels::sm90_dgated_gemm::Config;
use crate::kernels::tensor_map::LayerMaps;

/// Why a kernel does not differentiate in the epilogue of dy·Wdᵀ.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
enum Refusal {
    #[error("{0}")]
    Obstacle(Obstacle),
    /// Of addresses, strides and extents.
    #[error("{0}")]
    Call(String),
}

/// The kernels that could compute gradients of gate and up, and h, in the epilogue of dy·Wdᵀ: Hopper's, which is taken
/// wherever it can be, then that of every architecture in the tile which is expected to be the fastest.
fn differentiating(planner: &Planner, problem: &Problem, factors: Option<GateCode>) -> [Kernel; 2] {
    let seconds =
        |kernel: &Kernel| cost::differentiated(*kernel, problem, &planner.model().machine);
    let portable = Kernel::portable().min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
    let hopper = Kernel::Sm90(Config::of(problem.hidden, factors));
    [hopper, portable.unwrap_or(hopper)]
}

/// Whether one of these is taken for a block, or why not. The portable one must be expected to take less time than a product
/// with dh in memory, unless fused kernels were asked for.
fn differentiates(
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
    let fused = cost::differentiated(kernel, problem, &model.machine);
    let ratio = fused / cost::step_by_step(problem, model);
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
    let factors = call.scale.map(|_| call.code);
    differentiating(planner, problem, factors).into_iter().find(taken)
}

/// The forward pass of a problem with packed weights that stores gate and up: by an algorithm for h, behind which a block goes on with cuBLASLt,
/// and by a fused kernel where those do not store them.
pub(super) fn choose_saving(
    planner: &Planner,
    problem: &Problem,
    path: Option<Path>,
) -> (Algorithm, Why) {
    let chosen = |path| choose(planner, &of_h(problem), path, None);
    let (mut algorithm, mut why) = chosen(path);
    if algorithm.check_saving().is_err() {
        (algorithm, why) = chosen(Some(Path::Fused));
    }
    (algorithm.of(problem.op), why)
}

/// What the product that computes an up again is stored as, so that it is rounded as the forward pass by this algorithm rounded
/// it: cuBLASLt adds a bias to elements as an element, which only the unfused path does.
pub(crate) fn up_again(saving: Algorithm, has_biases_of_sums: bool) -> Stored {
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
        let (algorithm, _) = choose_saving(Planner::of(self), problem, path);
        up_again(algorithm, problem.bias && problem.dtype != DType::F32)
    }

    /// The backward pass of a problem with packed weights.
    pub(super) fn backward_plan(&self, problem: Problem, path: Option<Path>) -> Plan {
        let all = self.backward_candidates(&problem, path).into_iter();
        let chosen = all.filter(|step| step.chosen).map(|step| (step.name, step.reason));
        let (mut kernels, reasons): (Vec<_>, Vec<_>) = chosen.unzip();
        // Steps by the same kernel come one behind the other.
        kernels.dedup();
        let kernel = self.differentiated(&problem, path);
        let parameters = kernel.into_iter().flat_map(Kernel::parameters);
        let parameters = parameters.map(|(name, value)| (name.to_owned(), value)).collect();
        let path = if kernel.is_some() { Path::Fused } else { Path::Unfused };
        Plan::new(problem, BACKEND, kernels.join(" + "), path)
            .with_parameters(parameters)
            .with_reason(reasons.into_iter().next().unwrap_or_default())
    }

    /// [`differentiated`] for dense matrices; none for a layer without a down projection.
    pub(crate) fn differentiated(&self, problem: &Problem, path: Option<Path>) -> Option<Kernel> {
        let maps = LayerMaps::new();
        let call = Call::dense(problem, &maps);
        let is_block = problem.op == Op::Mlp;
        is_block.then(|| differentiated(Planner::of(self), problem, path, &call)).flatten()
    }

    /// What computes each step of the backward pass, and what does not.
    pub(super) fn backward_candidates(
        &self,
        problem: &Problem,
        path: Option<Path>,
    ) -> Vec<Candidate> {
        let model = Planner::of(self).model();
        let taken = |step: &str, name: &str, seconds: f64, why: &str| {
            Candidate::new(Some(step), name.into(), Some(seconds), Ok(why.into()))
        };
        let is_block = problem.op == Op::Mlp;
        let mut all = match is_block {
            true => self.of_gate_up(problem, path),
            false => {
                let seconds = cost::activation(problem, &model.machine);
                vec![taken("dgate, dup", "elementwise", seconds, "one pass over dh, gate and up")]
            }
        };
        let product = |step: &str, seconds: f64, why: &str| {
            let why =
                self.by_measured(problem, step).map_or(why.to_owned(), |by| format!("{why}; {by}"));
            taken(step, "cublaslt", seconds, &why)
        };
        let why = "one product over the weights of gate and up";
        all.push(product(DX, cost::input(problem, model), why));
        let why = match problem.layout.orientation {
            Orientation::OutIn => {
                "one product for both where they lie one behind the other, else one for each"
            }
            Orientation::InOut => "one product for each",
        };
        all.push(product(GATE_UP, cost::gate_up_weights(problem, model), why));
        if is_block {
            let why = "one product with h, computed again";
            all.push(product(DOWN, cost::down_weight(problem, model), why));
        }
        if problem.bias {
            let step = if is_block { "db_gate, db_up, db_down" } else { "db_gate, db_up" };
            let seconds = cost::biases(problem, &model.machine);
            all.push(taken(step, "column_sums", seconds, "sums of columns in one order"));
        }
        all
    }

    /// What was measured of cuBLASLt's proposals for a product. It loads nothing.
    fn by_measured(&self, problem: &Problem, step: &str) -> Option<String> {
        let (_, gemm) = gemms_of_step(problem).into_iter().find(|(of, _)| *of == step)?;
        let exact = |measured: &Arc<Measured>| Some((measured.version, measured.exact(&gemm)?));
        let ((major, minor), (_, share)) =
            Planner::of(self).tuning().gemms.iter().find_map(exact)?;
        let version = format!("cuBLASLt {major}.{minor}");
        Some(match share < 1.0 {
            true => format!(
                "with {version} by the proposal that was measured to take {share:.2} of the first's time, where \
                 it is made"
            ),
            false => format!("the first proposal of {version} was measured to be the fastest"),
        })
    }

    /// The kernels that differentiate in the epilogue of dh, and the way step by step.
    fn of_gate_up(&self, problem: &Problem, path: Option<Path>) -> Vec<Candidate> {
        let (planner, maps) = (Planner::of(self), LayerMaps::new());
        let (model, call) = (planner.model(), Call::dense(problem, &maps));
        let step = Some("dgate, dup, h");
        let chosen = self.differentiated(problem, path);
        let seconds = |kernel| cost::differentiated(kernel, problem, &model.machine);
        let candidate = |kernel: Kernel| {
            let why = differentiates(planner, kernel, problem, path, &call);
            let computes = matches!(why, Ok(()) | Err(Refusal::Obstacle(Obstacle::Slower { .. })));
            let expected = computes.then(|| seconds(kernel));
            let why = match (why, chosen) {
                (Err(why), _) => Err(why.to_string()),
                (Ok(()), Some(other)) if other != kernel => {
                    let share = seconds(kernel) / seconds(other);
                    Err(match share > 1.0 {
                        true => format!("{share:.2} times as long expected"),
                        // The architecture's own goes before the portable ones, whose costs nobody measured.
                        false => format!("{other} goes before it wherever that takes the call"),
                    })
                }
                (Ok(()), _) => Ok("the derivative in the epilogue of dh: nothing passes through \
                                   memory between"
                    .to_owned()),
            };
            Candidate::new(step, kernel.to_string(), expected, why)
        };
        let mut all: Vec<_> =
            differentiating(planner, problem, None).into_iter().map(candidate).collect();
        let unfused = match chosen {
            Some(_) => Err("dh would pass through memory, and gate and up twice".to_owned()),
            None => Ok("dh passes through memory, and gate and up twice".to_owned()),
        };
        let expected = Some(cost::step_by_step(problem, model));
        all.push(Candidate::new(step, "cublaslt + elementwise".into(), expected, unfused));
        all
    }
}
