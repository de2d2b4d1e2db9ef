//! Plans of backward passes: every step, by what it is computed, and what that is expected to take.

use swiglu_core::{Op, Orientation, Path, Plan, Problem};

use super::cost::backward as cost;
use super::training::{Refusal, differentiated, differentiates, differentiating};
use super::{BACKEND, Candidate, Planner};
use crate::device::cuda::Cuda;
use crate::kernels::dgated_gemm::{Call, Kernel};
use crate::kernels::obstacle::Obstacle;
use crate::kernels::tensor_map::LayerMaps;

impl Cuda {
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
        let why = "one product over the weights of gate and up";
        all.push(taken("dx", "cublaslt", cost::input(problem, model), why));
        let why = match problem.layout.orientation {
            Orientation::OutIn => {
                "one product for both where they lie one behind the other, else one for each"
            }
            Orientation::InOut => "one product for each",
        };
        all.push(taken("dw_gate, dw_up", "cublaslt", cost::gate_up_weights(problem, model), why));
        if is_block {
            let why = "one product with h, computed again";
            all.push(taken("dw_down", "cublaslt", cost::down_weight(problem, model), why));
        }
        if problem.bias {
            let step = if is_block { "db_gate, db_up, db_down" } else { "db_gate, db_up" };
            let seconds = cost::biases(problem, &model.machine);
            all.push(taken(step, "column_sums", seconds, "sums of columns in one order"));
        }
        all
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
            differentiating(planner, problem).into_iter().map(candidate).collect();
        let unfused = match chosen {
            Some(_) => Err("dh would pass through memory, and gate and up twice".to_owned()),
            None => Ok("dh passes through memory, and gate and up twice".to_owned()),
        };
        let expected = Some(cost::step_by_step(problem, model));
        all.push(Candidate::new(step, "cublaslt + elementwise".into(), expected, unfused));
        all
    }
}
