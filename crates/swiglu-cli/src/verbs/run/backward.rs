//! `--backward`: a layer that trains, its gradients proved and a step timed beside the unfused way.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Serialize;
use swiglu::{
    Device, Element, Matrix, MatrixRef, Orientation, Path, Problem, Rounding, SavePolicy,
    StridedRef,
};
use swiglu_core::bounds::GradientReference;

use super::RunArgs;
use crate::inputs;
use crate::layer::{Packed, Params, either, out_features};
use crate::step::Step;
use crate::terminal::Terminal;
use crate::verify::factor_roundoff;

/// Multiply-adds of one product that the oracle may take: about a second for all of them.
const BUDGET: f64 = 6.5e7;

#[derive(Debug, Clone, Serialize)]
pub(super) struct GradientReport {
    relative_frobenius: f64,
    max_abs: f64,
    /// What `relative_frobenius` may be.
    bound: f64,
    /// What plain loops in PyTorch's order of roundings are off by.
    eager_error: f64,
    /// The largest |error| of an element ÷ its bound; at most 1.
    worst_element: f64,
    /// What is wrong with it, here or the unfused way.
    #[serde(skip_serializing_if = "Option::is_none")]
    wrong: Option<String>,
    passed: bool,
}

/// What training adds to a report; its times are those of a forward and a backward pass.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TrainingReport {
    gradients: BTreeMap<&'static str, GradientReport>,
    save_policy: SavePolicy,
    /// What is kept between the passes, beside x.
    kept_bytes: usize,
    tokens_verified: usize,
}

impl TrainingReport {
    pub(super) fn passed(&self) -> bool {
        self.gradients.values().all(|g| g.passed)
    }

    /// What was timed, and one line for each gradient.
    pub(super) fn show(&self, m: usize, terminal: &mut Terminal) -> Result<()> {
        let Self { save_policy, kept_bytes, tokens_verified, .. } = self;
        let of = if *tokens_verified < m { format!(" of {m}") } else { String::new() };
        writeln!(
            terminal,
            "      times are of a forward and a backward pass, which keep {kept_bytes} bytes beside x ({save_policy}); \
             gradients of {tokens_verified}{of} tokens:"
        )?;
        for (name, g) in &self.gradients {
            let GradientReport { relative_frobenius, bound, eager_error, worst_element, .. } = g;
            let verdict = match &g.wrong {
                None => format!("worst element {worst_element:.2} of its bound"),
                Some(why) => format!("WRONG: {why}"),
            };
            writeln!(
                terminal,
                "      {name:<8} error {relative_frobenius:.2e} of at most {bound:.2e} (eager {eager_error:.2e}); \
                 {verdict}"
            )?;
        }
        Ok(())
    }
}

/// ∂L/∂y of random values, of a stream of its own: x may be random too.
pub(super) fn out_grad<T: Element>(args: &RunArgs, problem: &Problem) -> Result<Matrix<T>> {
    let seed = args.seed.unwrap_or(0) ^ 0xd7;
    let dy = inputs::normal::<f32>(seed, problem.m, out_features(problem), 1.0)?;
    Ok(dy.view().to_dtype()?)
}

/// Every gradient against float64, of as many tokens as the oracle is quick for; a fast wrong way to compare with
/// would make a meaningless ratio, so that it is judged too.
pub(super) fn verify<T: Element>(
    device: &Device,
    params: &Params<'_, T>,
    [ours, unfused]: [&Packed; 2],
    save_policy: SavePolicy,
    [x, dy]: [MatrixRef<'_, T>; 2],
) -> Result<TrainingReport> {
    let problem = params.problem(1);
    let most = BUDGET / (problem.hidden * problem.intermediate).max(1) as f64;
    let (all, m) = (x.rows(), x.rows().min(most.max(1.0) as usize));
    let (x, dy) = (x.rows_range(0..m)?, dy.rows_range(0..m)?);
    let mut kept_bytes = 0;
    let mut judged = |layer: &Packed, path| -> Result<_> {
        let mut step = Step::new(&params.problem(m), params.down_orientation())?;
        kept_bytes = step.run(layer, x, dy)?.max(kept_bytes);
        judge(device, &in_numerics(params, layer, path, m), [x, dy], &step)
    };
    let mut gradients = judged(ours, Path::Fused)?;
    for (name, theirs) in judged(unfused, Path::Unfused)? {
        if let (Some(why), Some(ours)) = (theirs.wrong, gradients.get_mut(name)) {
            ours.passed = false;
            ours.wrong.get_or_insert(format!("the unfused way: {why}"));
        }
    }
    let kept_bytes = kept_bytes.checked_div(m).map_or(0, |bytes| bytes * all);
    Ok(TrainingReport { gradients, save_policy, kept_bytes, tokens_verified: m })
}

/// Where ∂L/∂h passes through memory it is rounded.
fn in_numerics<'a, T: Element>(
    params: &Params<'a, T>,
    layer: &Packed,
    path: Path,
    m: usize,
) -> Params<'a, T> {
    let numerics = params.problem(1).numerics;
    // On a device what one kernel does not compute takes memory; the CPU has none of it.
    let stored = || {
        either!(layer, layer => layer.backward_gate_up_bytes::<T>(m)).is_ok_and(|bytes| bytes > 0)
    };
    match numerics.rounding {
        Rounding::Fused if path == Path::Unfused || stored() => {
            params.with_numerics(numerics.with_rounding(Rounding::PreRound))
        }
        _ => *params,
    }
}

fn judge<T: Element>(
    device: &Device,
    params: &Params<'_, T>,
    [x, dy]: [MatrixRef<'_, T>; 2],
    step: &Step<T>,
) -> Result<BTreeMap<&'static str, GradientReport>> {
    let expected = params.gradients(x, dy, factor_roundoff(device, T::DTYPE))?;
    let names = ["dx", "dw_gate", "dw_up", "dw_down"];
    let references = [&expected.dx, &expected.gate, &expected.up];
    let references = names.into_iter().zip(references.into_iter().chain(&expected.down));
    let mut reports = BTreeMap::new();
    for ((matrix, lies), (name, reference)) in step.matrices().skip(1).zip(references) {
        // A reference has a row for each output feature.
        let rows = match lies {
            Orientation::OutIn => StridedRef::from(matrix),
            Orientation::InOut => StridedRef::from(matrix).transposed(),
        };
        reports.insert(name, of(reference, rows.to_rows()?.view()?)?);
    }
    let biases = step.gradients.iter().flat_map(|gradients| {
        [
            ("db_gate", &gradients.gate_bias, Some(&expected.gate_bias)),
            ("db_up", &gradients.up_bias, Some(&expected.up_bias)),
            ("db_down", &gradients.down_bias, expected.down_bias.as_ref()),
        ]
    });
    for (name, bias, reference) in biases {
        if let (Some(bias), Some(reference)) = (bias, reference) {
            reports.insert(name, of(reference, MatrixRef::row_vector(bias))?);
        }
    }
    Ok(reports)
}

fn of<V: Element>(reference: &GradientReference, out: MatrixRef<'_, V>) -> Result<GradientReport> {
    let judgement = reference.judge(out)?;
    let beyond =
        judgement.overflow.map(|o| o.to_string()).or(judgement.lost.map(|l| l.to_string()));
    let exceeded = || (!judgement.passed()).then(|| swiglu_lab::complaint(&judgement, &[]));
    let wrong = beyond.or_else(exceeded);
    Ok(GradientReport {
        relative_frobenius: judgement.relative_frobenius,
        max_abs: judgement.max_abs,
        bound: judgement.frobenius_limit,
        eager_error: reference.eager_error,
        worst_element: judgement.worst_ratio,
        passed: wrong.is_none(),
        wrong,
    })
}
