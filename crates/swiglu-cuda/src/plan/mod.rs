//! Which algorithm computes a problem, from the numbers alone.

mod algorithm;
mod by_tokens;
pub(crate) mod calibration;
mod candidate;
mod choices;
mod cost;
mod machine;
mod planner;
mod target;
mod training;
pub mod tuning;

pub(crate) use algorithm::{Algorithm, ToH};
pub(crate) use by_tokens::ByTokens;
pub use candidate::Candidate;
pub(crate) use choices::{Choices, Lent};
pub use planner::CudaOptions;
pub(crate) use planner::Planner;
pub use target::{Target, Ways};
pub(crate) use training::{differentiated, up_again};

use swiglu_core::{Op, Pass, Path, Plan, Problem};

use crate::device::cuda::Cuda;
use crate::device::error::CudaError;
use crate::kernels::decode_mlp::{self, Decode, Design, MOST_TOKENS};
use crate::kernels::elementwise::Stored;
use crate::kernels::gated_gemm::{Kernel, Shape};
use crate::kernels::obstacle::Obstacle;
use crate::kernels::weights::weights_lie;
use crate::plan::tuning::Origin;

/// As plans name it.
const BACKEND: &str = "cuda";

/// Why a choice was made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Why {
    AskedFor,
    /// It took the least time of those that were measured.
    Fastest(Origin),
    /// The cost model expects the least time, corrected by what was measured near.
    Near(Origin),
    /// The cost model expects the least time.
    LowestCost,
    NoFusedKernel,
}

/// Times whose quotient is less than this count as the same.
const SAME: f64 = 1.004;

/// The first algorithm of those that take as long as the fastest: so noise does not change the choice from one number of tokens
/// to the next, each with kernels to compile.
fn least(op: Op, cost: impl Fn(Algorithm) -> Option<f64>) -> Option<Algorithm> {
    // Estimates take longer than all the rest; there are fewer algorithms than this.
    let mut all = [f64::INFINITY; 128];
    for (algorithm, seconds) in Algorithm::all(op).zip(&mut all) {
        *seconds = cost(algorithm).unwrap_or(f64::INFINITY);
    }
    let fastest = all.into_iter().fold(f64::INFINITY, f64::min);
    let mut costs = Algorithm::all(op).zip(all);
    costs
        .find(|(_, seconds)| seconds.is_finite() && *seconds <= fastest * SAME)
        .map(|(algorithm, _)| algorithm)
}

/// What a layer runs for `problem`, by weights that may be lent: on the path asked for, else by the fastest algorithm that rounds as
/// asked. The unfused path that is asked for keeps elements. It allocates nothing.
pub(crate) fn choose(
    planner: &Planner,
    problem: &Problem,
    path: Option<Path>,
    lent: Option<&Lent>,
) -> (Algorithm, Why) {
    let unfused = Algorithm::unfused(Stored::Elements).of(problem.op);
    // Without input features there is nothing for cuBLASLt to multiply.
    if path == Some(Path::Unfused) && problem.hidden > 0 {
        return (unfused, Why::AskedFor);
    }
    let admitted = |algorithm: &Algorithm| {
        let asked = path.is_none() || algorithm.path() == Path::Fused;
        let taken = || lent.is_none_or(|lent| lent.check(algorithm, problem.dtype).is_ok());
        asked && taken() && algorithm.check(planner, problem).is_ok()
    };
    let slower = |algorithm| lent.map_or(1.0, |lent| lent.slower(algorithm));
    let model = planner.model();
    if let Some((origin, near)) = planner.tuning().near(problem, model.tf32) {
        let corrected = |algorithm: Algorithm| {
            let seconds = near.seconds(algorithm, problem, model).filter(|_| admitted(&algorithm));
            Some(seconds? * slower(algorithm))
        };
        if let Some(algorithm) = least(problem.op, corrected) {
            let here = near.exact(problem).is_some() && origin != Origin::Like;
            return (algorithm, if here { Why::Fastest(origin) } else { Why::Near(origin) });
        }
    }
    let expected = |algorithm: Algorithm| {
        let known = !algorithm.waits_for_tuning(problem) && admitted(&algorithm);
        known.then(|| algorithm.seconds(model, problem) * slower(algorithm))
    };
    match least(problem.op, expected) {
        Some(algorithm) => (algorithm, Why::LowestCost),
        // A fused kernel exists for every problem: see the tests of `gated_gemm`.
        None => (unfused, Why::NoFusedKernel),
    }
}

/// The kernel that is expected to be the fastest for the gated linear layer of those that take a call.
pub(crate) fn best_kernel(
    planner: &Planner,
    problem: &Problem,
    takes: impl Fn(&Kernel) -> bool,
) -> Option<Kernel> {
    let algorithm = |kernel: &Kernel| Algorithm::gated(*kernel);
    let computes =
        |kernel: &Kernel| algorithm(kernel).check(planner, problem).is_ok() && takes(kernel);
    let seconds = |kernel: &Kernel| algorithm(kernel).seconds(planner.model(), problem);
    Kernel::all().filter(computes).min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
}

/// Refuses an algorithm that does not compute a problem; one that rounds otherwise does.
pub(crate) fn expect_candidate(
    cuda: &Cuda,
    candidate: &Candidate,
    problem: &Problem,
) -> crate::device::error::Result<Algorithm> {
    let refused = |why: String| CudaError::Unsupported { what: candidate.to_string(), why };
    let algorithm = candidate.algorithm.ok_or_else(|| refused("it is of no layer".into()))?;
    match algorithm.check(Planner::of(cuda), problem) {
        Ok(()) | Err(Obstacle::RoundsBetween(_) | Obstacle::RoundsBias(_)) => Ok(algorithm),
        Err(why) => Err(refused(why.to_string())),
    }
}

/// The reason for people.
pub(crate) fn explain(
    algorithm: Algorithm,
    why: Why,
    problem: &Problem,
    planner: &Planner,
) -> String {
    let model = planner.model();
    let said = match (why, algorithm.kernel_of_h(), algorithm.stored()) {
        (Why::AskedFor, _, Some(_)) => "asked for: linear maps, then the activation",
        (Why::AskedFor, ..) => "asked for",
        (Why::Fastest(Origin::Shipped), ..) => "the fastest, measured and shipped",
        (Why::Fastest(_), ..) => "the fastest, measured",
        (Why::Near(origin), ..) => {
            let like = if origin == Origin::Like { " on a device like this one" } else { "" };
            let near = planner.tuning().near(problem, model.tf32);
            let of = near.map_or_else(String::new, |(_, near)| {
                let tokens: Vec<_> = near.tokens().map(|m| m.to_string()).collect();
                let [hidden, intermediate] = near.shape.size;
                format!("{hidden}/{intermediate} with {} tokens{like}", tokens.join(" and "))
            });
            return format!("the least time expected from measurements of {of}");
        }
        (Why::LowestCost, Some(kernel), _) => {
            let sms = model.machine.multiprocessors;
            let form = kernel.form(Shape::of(problem, sms as usize));
            let [rows, columns] = form.tile;
            let tiles = problem.m.div_ceil(rows) * problem.intermediate.div_ceil(columns);
            let slots = sms * cost::residents(&form, &model.machine) as f64;
            let waves = (tiles * form.split) as f64 / slots;
            return format!("the least time expected: {tiles} tiles are {waves:.2} waves");
        }
        (Why::LowestCost, None, Some(Stored::Elements)) => {
            "the least time expected, with the same rounding"
        }
        (Why::LowestCost, None, Some(Stored::Sums)) => {
            "the least time expected, with nothing rounded between: gate and up pass as f32"
        }
        (Why::LowestCost, None, None) => {
            "the least time expected: each weight once, the next ones under way at any time"
        }
        (Why::NoFusedKernel, ..) => "no fused kernel computes this",
    };
    said.into()
}

/// What computes h of a problem with packed weights.
fn of_h(problem: &Problem) -> Problem {
    let mut of_h = problem.with_op(Op::GatedLinear);
    of_h.layout.orientation = weights_lie(problem);
    of_h
}

/// Quantised weights are computed with at most [`MOST_TOKENS`] tokens at a time: what one of these
/// passes is.
fn of_pass(problem: &Problem) -> Problem {
    match problem.quantized {
        Some(_) => problem.with_m(problem.m.clamp(1, MOST_TOKENS)),
        None => *problem,
    }
}

/// Why quantised weights of this problem are decoded, where no kernel computes with them.
fn decoded_because(planner: &Planner, problem: &Problem) -> Option<decode_mlp::Obstacle> {
    problem.quantized?;
    let pass = of_pass(problem);
    let why = |design| Decode::check_problem(design, &pass, planner.limits()).err();
    match Design::COMMON.map(why) {
        // Without features nothing is multiplied, however weights are stored.
        [Some(why), Some(_)] if why != decode_mlp::Obstacle::Empty => Some(why),
        _ => None,
    }
}

/// What the unfused path that is asked for can round: gate and up lie in memory as T between its two steps.
pub(crate) fn unfused_rounding(problem: Problem) -> Problem {
    problem.with_numerics(problem.numerics.unfused())
}

/// Refuses what no layer of a CUDA device computes.
pub(crate) fn expect_computed(problem: &Problem) -> swiglu_core::Result<()> {
    problem.expect_computed()?;
    problem.rows.expect_none("on a CUDA device", "take the CPU (Device::cpu)")
}

impl Cuda {
    /// How a problem is computed: on `path`, else on the one that is expected to be faster; of a backward pass, which takes
    /// several steps, each by one algorithm, [`Self::candidates`] has them. Making a plan has no effects.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Unsupported`] for what no layer computes: [`Problem::expect_computed`], and any row steps.
    pub fn plan(&self, problem: Problem, path: Option<Path>) -> swiglu_core::Result<Plan> {
        expect_computed(&problem)?;
        Ok(self.planned(problem, path))
    }

    /// The plan of what layers compute.
    pub(crate) fn planned(&self, problem: Problem, path: Option<Path>) -> Plan {
        if problem.op == Op::Activation {
            return Plan::new(problem, BACKEND, "elementwise", Path::Fused)
                .with_reason("one pass: each value is read once and written once");
        }
        if let Some(why) = decoded_because(Planner::of(self), &problem) {
            let mut plan = self.planned(problem.with_quantized(None), path);
            plan.reason += &format!("; weights decoded to {}: {why}", problem.dtype);
            return plan;
        }
        if problem.pass == Pass::Backward {
            return self.backward_plan(problem, path);
        }
        let pass = of_pass(&problem);
        let (algorithm, why) = self.chosen(&pass, path);
        let reason = explain(algorithm, why, &pass, Planner::of(self));
        self.plan_of(problem, algorithm, reason)
    }

    /// The plan that follows from the choice of an algorithm, for a reason.
    pub(crate) fn plan_of(
        &self,
        problem: Problem,
        algorithm: Algorithm,
        mut reason: String,
    ) -> Plan {
        let mut parameters = algorithm.parameters(self, &of_pass(&problem));
        if problem.quantized.is_some() {
            let passes = problem.m.div_ceil(MOST_TOKENS);
            parameters.push(("passes", passes));
            if passes > 1 {
                reason += &format!(
                    "; {MOST_TOKENS} tokens at a time, {passes} times all weights: for many tokens decode \
                     them"
                );
            }
        }
        let rounds = algorithm.stored() == Some(Stored::Elements);
        let problem = if rounds { unfused_rounding(problem) } else { problem };
        let parameters = parameters.into_iter().map(|(name, value)| (name.to_owned(), value));
        Plan::new(problem, BACKEND, algorithm.kernels(), algorithm.path())
            .with_parameters(parameters.collect())
            .with_reason(reason)
    }

    /// Every algorithm for a problem, with what speaks for or against it; tuners try one after the other
    /// ([`crate::GatedLinear::forward_by`], [`crate::Mlp::forward_by`]). Of a backward pass every step, with the algorithms
    /// for it, for all gradients.
    pub fn candidates(&self, problem: &Problem, path: Option<Path>) -> Vec<Candidate> {
        if problem.op == Op::Activation {
            let Plan { kernel, reason, .. } = self.planned(*problem, path);
            let numerics = Some(problem.numerics);
            return vec![Candidate { numerics, ..Candidate::new(None, kernel, None, Ok(reason)) }];
        }
        if decoded_because(Planner::of(self), problem).is_some() {
            return self.candidates(&problem.with_quantized(None), path);
        }
        if problem.pass == Pass::Backward {
            return self.backward_candidates(problem, path);
        }
        let chosen = self.chosen(&of_pass(problem), path);
        Algorithm::all(problem.op)
            .map(|algorithm| self.candidate(algorithm, problem, chosen))
            .collect()
    }

    /// The algorithm for a forward pass, which may have to store gate and up.
    fn chosen(&self, problem: &Problem, path: Option<Path>) -> (Algorithm, Why) {
        match problem.pass {
            Pass::Saving => training::choose_saving(Planner::of(self), problem, path),
            _ => choose(Planner::of(self), problem, path, None),
        }
    }

    /// One of them, beside what was chosen and why.
    fn candidate(
        &self,
        algorithm: Algorithm,
        problem: &Problem,
        chosen: (Algorithm, Why),
    ) -> Candidate {
        let passes = problem.quantized.map_or(1, |_| problem.m.div_ceil(MOST_TOKENS));
        let problem = &of_pass(problem);
        let planner = Planner::of(self);
        let mut check = algorithm.check(planner, problem);
        if problem.pass == Pass::Saving {
            check = check.and_then(|()| algorithm.check_saving());
        }
        let numerics = match check {
            Ok(()) => Some(problem.numerics),
            Err(Obstacle::RoundsBetween(_) | Obstacle::RoundsBias(_)) => {
                Some(unfused_rounding(*problem).numerics)
            }
            Err(_) => None,
        };
        let (model, near) = (planner.model(), planner.tuning().near(problem, self.tf32()));
        // On another device it took another time.
        let here = near.filter(|(origin, _)| *origin != Origin::Like);
        let exact = here.and_then(|(_, near)| near.exact(problem));
        let measured = |algorithm: Algorithm| Some(exact?.time(algorithm)?.us);
        let corrected = |algorithm: Algorithm| near?.1.seconds(algorithm, problem, model);
        let expects = |algorithm: Algorithm| {
            corrected(algorithm).unwrap_or_else(|| algorithm.seconds(model, problem))
        };
        let measured_us = measured(algorithm);
        let ratio = measured_us.zip(measured(chosen.0)).map(|(us, fastest)| us / fastest);
        // With measurements near that decide, what was not measured is not taken.
        let waits = match (near, chosen.1) {
            (Some(_), Why::Near(_) | Why::Fastest(_)) => corrected(algorithm).is_none(),
            _ => algorithm.waits_for_tuning(problem),
        };
        let reason = match (&check, ratio) {
            _ if algorithm == chosen.0 => explain(algorithm, chosen.1, problem, planner),
            (Err(obstacle), _) => obstacle.to_string(),
            (Ok(()), Some(ratio)) => format!("{ratio:.2} times as long measured"),
            (Ok(()), None) => {
                let ratio = expects(algorithm) / expects(chosen.0);
                let only = "; taken only once `swiglu tune` has measured it";
                let only = if waits { only } else { "" };
                format!("{ratio:.2} times as long expected{only}")
            }
        };
        let us = |seconds: f64| seconds * 1e6 * passes as f64;
        Candidate {
            algorithm: Some(algorithm),
            chosen: algorithm == chosen.0,
            numerics,
            refusal: check.err().map(|obstacle| obstacle.to_string()),
            predicted_us: numerics.map(|_| us(algorithm.seconds(model, problem))),
            expected_us: numerics.map(|_| us(expects(algorithm))),
            measured_us,
            ..Candidate::new(None, algorithm.to_string(), None, Ok(reason))
        }
    }
}

#[cfg(test)]
mod tests;
