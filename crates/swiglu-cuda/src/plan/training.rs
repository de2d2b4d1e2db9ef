//! Plans of the passes of a training step: of the forward pass that stores gate and up, and of the steps of the backward pass.

use std::collections::BTreeMap;

use swiglu_core::{DType, Op, Orientation, Pass, Path, Plan, Problem, SavePolicy};

use super::{BACKEND, Candidate, Planner, Steps, Why, choose};
use crate::device::context::Cuda;
use crate::kernels::elementwise::Stored;
use crate::kernels::obstacle::Obstacle;
use crate::kernels::sm90_dgated_gemm::{self as dgated, Config};
use crate::kernels::tensor_map::LayerMaps;

/// Which lists of steps one is chosen of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Among {
    All,
    /// Those to h, which a block leaves by cuBLASLt.
    StepByStep,
    /// The fused ones of these.
    Fused,
}

/// The steps that store gate and up, by what is chosen of others.
pub(crate) fn saving<W>(op: Op, hidden: usize, chosen: impl Fn(Among) -> (Steps, W)) -> (Steps, W) {
    let first = chosen(match op {
        Op::Mlp if hidden == 0 => Among::Fused,
        Op::Mlp => Among::StepByStep,
        _ => Among::All,
    });
    match first.0.check_saving() {
        Ok(()) => first,
        Err(_) => chosen(Among::Fused),
    }
}

/// The tile of the kernel that computes gradients of gate and up, and h, in the epilogue of dy·Wdᵀ, or why it does not.
pub(crate) fn differentiated(
    planner: &Planner,
    dtype: DType,
    hidden: usize,
    path: Option<Path>,
) -> Result<Config, Obstacle> {
    match path {
        Some(Path::Unfused) => Err(Obstacle::UnfusedAskedFor),
        _ if planner.portable_kernels => Err(Obstacle::NotPortable),
        _ => dgated::check(planner.arch(), dtype, hidden).map(|()| Config::of(hidden)),
    }
}

/// The forward pass of a problem with packed weights that stores gate and up.
pub(super) fn choose_saving(
    planner: &Planner,
    problem: &Problem,
    path: Option<Path>,
) -> (Steps, Why) {
    let mut to_h = problem.with_op(Op::GatedLinear);
    if problem.op == Op::Mlp {
        to_h.layout.orientation = Orientation::OutIn;
    }
    saving(problem.op, problem.hidden, |among| {
        let (steps, why) = match among {
            Among::All => choose(planner, problem, path),
            Among::StepByStep => choose(planner, &to_h, path),
            Among::Fused => choose(planner, &to_h, Some(Path::Fused)),
        };
        (steps.of(problem.op), why)
    })
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
    /// The backward pass of a problem with packed weights.
    pub(super) fn backward_plan(&self, problem: Problem, path: Option<Path>) -> Plan {
        let steps = self.backward_candidates(&problem, path);
        let mut kernels: Vec<String> = Vec::new();
        for step in steps.iter().filter(|step| step.chosen) {
            if !kernels.contains(&step.name) {
                kernels.push(step.name.clone());
            }
        }
        let config = self.differentiated(&problem, path);
        let (path, parameters) = match &config {
            Ok(config) => (Path::Fused, config.parameters().map(|(n, v)| (n.to_owned(), v)).into()),
            Err(_) => (Path::Unfused, BTreeMap::new()),
        };
        let reason = steps.iter().find(|step| step.chosen).map(|step| step.reason.clone());
        Plan::new(problem, BACKEND, kernels.join(" + "), path)
            .with_parameters(parameters)
            .with_reason(reason.unwrap_or_default())
    }

    /// The kernels that compute again at the beginning of a backward pass what a policy did not keep.
    pub fn computed_again_by(
        &self,
        problem: &Problem,
        policy: SavePolicy,
        path: Option<Path>,
    ) -> Option<String> {
        match policy {
            SavePolicy::Save => None,
            SavePolicy::SaveGate => Some(match self.up_again(problem, path) {
                Stored::Elements => "cublaslt".into(),
                Stored::Sums => "cublaslt f32".into(),
            }),
            _ => Some(self.plan(problem.with_pass(Pass::Saving), path).kernel),
        }
    }

    /// [`up_again`] for packed weights.
    pub(crate) fn up_again(&self, problem: &Problem, path: Option<Path>) -> Stored {
        let (steps, _) = choose_saving(Planner::of(self), problem, path);
        up_again(steps, problem.bias && problem.dtype != DType::F32)
    }

    /// [`differentiated`] for a block of dense matrices.
    pub(crate) fn differentiated(
        &self,
        problem: &Problem,
        path: Option<Path>,
    ) -> Result<Config, String> {
        if problem.op != Op::Mlp {
            return Err(Obstacle::NoDown.to_string());
        }
        let Problem { dtype, hidden, .. } = *problem;
        let config = differentiated(Planner::of(self), dtype, hidden, path);
        let config = config.map_err(|obstacle| obstacle.to_string())?;
        dgated::check_call(&dgated::Call::dense(problem, &LayerMaps::new()))?;
        Ok(config)
    }

    /// What computes each step of the backward pass, and what does not.
    pub(super) fn backward_candidates(
        &self,
        problem: &Problem,
        path: Option<Path>,
    ) -> Vec<Candidate> {
        let lt = |step: &str, reason: &str| of_step(step, "cublaslt".into(), Ok(reason.to_owned()));
        let mut all = Vec::new();
        if problem.op == Op::Mlp {
            let (step, config) = ("dgate, dup, h", self.differentiated(problem, path));
            let unfused = match &config {
                Ok(_) => Err("dh would pass through memory, and gate and up twice".to_owned()),
                Err(_) => Ok("dh passes through memory, and gate and up twice".to_owned()),
            };
            let name = Config::of(problem.hidden).to_string();
            let why = "the derivative in the epilogue of dh: nothing passes through memory between";
            all.push(of_step(step, name, config.map(|_| why.to_owned())));
            all.push(of_step(step, "cublaslt + elementwise".into(), unfused));
        } else {
            let why = "one pass over dh, gate and up".to_owned();
            all.push(of_step("dgate, dup", "elementwise".into(), Ok(why)));
        }
        all.push(lt("dx", "one product over the weights of gate and up"));
        let weights = match problem.layout.orientation {
            Orientation::OutIn => {
                "one product for both where they lie one behind the other, else one for each"
            }
            Orientation::InOut => "one product for each",
        };
        all.push(lt("dw_gate, dw_up", weights));
        if problem.op == Op::Mlp {
            all.push(lt("dw_down", "one product with h, computed again"));
        }
        if problem.bias {
            let step =
                if problem.op == Op::Mlp { "db_gate, db_up, db_down" } else { "db_gate, db_up" };
            let why = "sums of columns in one order".to_owned();
            all.push(of_step(step, "column_sums".into(), Ok(why)));
        }
        all
    }
}

/// A candidate for a step: why it is taken, or why not.
fn of_step(step: &str, name: String, why: Result<String, String>) -> Candidate {
    let (chosen, refusal) = (why.is_ok(), why.as_ref().err().cloned());
    let reason = why.unwrap_or_else(|why| why);
    let step = Some(step.to_owned());
    Candidate {
        steps: None,
        step,
        name,
        chosen,
        numerics: None,
        refusal,
        predicted_us: None,
        expected_us: None,
        measured_us: None,
        reason,
    }
}
