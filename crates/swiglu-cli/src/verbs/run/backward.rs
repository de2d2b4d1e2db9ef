//! `--backward`: a layer that trains, its gradients proved and a step timed beside the unfused way.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use serde::Serialize;
use swiglu::{
    CallOptions, Device, Element, Gradients, Matrix, MatrixRef, Orientation, Path, SavePolicy,
    Wanted,
};
use swiglu_core::bounds::{self, GradientReference};
use swiglu_cpu::{GatedLinear, Mlp};

use super::args::{MIN_TURNS, RunArgs};
use crate::inputs;
use crate::layer::Params;
use crate::timing::{Summary, Wall, interleave};

/// Multiply-adds of one product that the oracle may take: about a second for all of them.
const BUDGET: f64 = 6.5e7;

/// A gradient against float64.
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
    passed: bool,
}

/// What training adds to a report; its times are those of a forward and a backward pass.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TrainingReport {
    pub(super) gradients: BTreeMap<&'static str, GradientReport>,
    pub(super) save_policy: SavePolicy,
    /// What is kept between the passes, beside x.
    pub(super) kept_bytes: usize,
    /// Tokens whose gradients were verified.
    pub(super) tokens_verified: usize,
}

impl TrainingReport {
    pub(super) fn passed(&self) -> bool {
        self.gradients.values().all(|g| g.passed)
    }

    /// One line for each gradient.
    pub(super) fn lines(&self) -> String {
        let line = |(name, g): (&&str, &GradientReport)| {
            let GradientReport { relative_frobenius, bound, eager_error, worst_element, .. } = g;
            let verdict = if g.passed { "" } else { "; WRONG" };
            format!(
                "      {name:<8} error {relative_frobenius:.2e} of at most {bound:.2e} (eager {eager_error:.2e}); \
                 worst element {worst_element:.2} of its bound{verdict}\n"
            )
        };
        self.gradients.iter().map(line).collect()
    }
}

/// A layer of either operation.
enum Trained<T> {
    GatedLinear(Box<GatedLinear<T>>),
    Mlp(Box<Mlp<T>>),
}

impl<T: Element> Trained<T> {
    fn new(
        device: &Device,
        params: &Params<'_, T>,
        policy: SavePolicy,
        path: Path,
    ) -> anyhow::Result<Self> {
        Ok(match (device, params) {
            (Device::Cpu(cpu), Params::GatedLinear(p)) => Self::GatedLinear(Box::new(
                GatedLinear::for_training_with_path(cpu, p, policy, path)?,
            )),
            (Device::Cpu(cpu), Params::Mlp(p)) => {
                Self::Mlp(Box::new(Mlp::for_training_with_path(cpu, p, policy, path)?))
            }
            _ => bail!(
                "--backward proves and times steps on the CPU, given the device {}; take --device cpu (the library trains \
                 on CUDA devices too)",
                device.name()
            ),
        })
    }

    /// A forward and a backward pass, into what there is.
    fn step(
        &self,
        x: MatrixRef<'_, T>,
        y: &mut Matrix<T>,
        dy: &Matrix<T>,
        gradients: &mut Gradients<T>,
    ) -> anyhow::Result<usize> {
        let (options, into) = (CallOptions::default(), gradients.as_mut());
        Ok(match self {
            Trained::GatedLinear(layer) => {
                let saved = layer.forward_train(x, y.view_mut(), &options)?;
                let kept = saved.kept_bytes();
                layer.backward_into(saved, dy, into, &options)?;
                kept
            }
            Trained::Mlp(layer) => {
                let saved = layer.forward_train(x, y.view_mut(), &options)?;
                let kept = saved.kept_bytes();
                layer.backward_into(saved, dy, into, &options)?;
                kept
            }
        })
    }

    fn zeros(&self, m: usize, bias: bool) -> anyhow::Result<Gradients<T>> {
        let shapes = match self {
            Trained::GatedLinear(layer) => layer.gradient_shapes()?,
            Trained::Mlp(layer) => layer.gradient_shapes()?,
        };
        Ok(Gradients::zeros(m, &shapes, Wanted::ALL, bias)?)
    }
}

/// The layer, the way it is compared with, and ∂L/∂y.
pub(super) struct Training<T> {
    layers: [Trained<T>; 2],
    policy: SavePolicy,
    dy: Matrix<T>,
    bias: bool,
    seconds: f64,
}

impl<T: Element> Training<T> {
    pub(super) fn new(
        args: &RunArgs,
        device: &Device,
        params: &Params<'_, T>,
        x: &Matrix<T>,
    ) -> anyhow::Result<Self> {
        let policy = args.keep.unwrap_or_default();
        let layer = |path| Trained::new(device, params, policy, path);
        let layers = [layer(Path::Fused)?, layer(Path::Unfused)?];
        // A stream of its own: x may be random too.
        let seed = args.seed.unwrap_or(0) ^ 0xd7;
        let dy = inputs::normal::<f32>(seed, x.rows(), params.out_features(), 1.0)?;
        let (dy, bias) = (dy.view().to_dtype()?, params.problem(1).bias);
        Ok(Self { layers, policy, dy, bias, seconds: args.seconds })
    }

    /// Times of a step, ours and the unfused one, in turns.
    pub(super) fn time(&self, x: MatrixRef<'_, T>) -> anyhow::Result<[Summary; 2]> {
        let step = |layer: &Trained<T>| -> anyhow::Result<_> {
            let gradients = layer.zeros(x.rows(), self.bias)?;
            Ok((Matrix::zeros(x.rows(), self.dy.cols())?, gradients))
        };
        let [fused, unfused] = &self.layers;
        let ((mut y, mut of_fused), (mut z, mut of_unfused)) = (step(fused)?, step(unfused)?);
        let mut fused = Wall(|| fused.step(x, &mut y, &self.dy, &mut of_fused).map(drop));
        let mut unfused = Wall(|| unfused.step(x, &mut z, &self.dy, &mut of_unfused).map(drop));
        let budget = Duration::from_secs_f64(self.seconds);
        let times = interleave(&mut [&mut fused, &mut unfused], budget, MIN_TURNS)?;
        Ok([times[0], times[1]])
    }

    /// Every gradient against float64, of as many tokens as the oracle is quick for; a fast wrong way to compare with
    /// would make a meaningless ratio, so that it is judged too.
    pub(super) fn verify(
        &self,
        x: MatrixRef<'_, T>,
        params: &Params<'_, T>,
    ) -> anyhow::Result<TrainingReport> {
        let problem = params.problem(1);
        let most = BUDGET / (problem.hidden * problem.intermediate).max(1) as f64;
        let m = x.rows().min(most.max(1.0) as usize);
        let (x, dy) = (x.rows_range(0..m)?, self.dy.view().rows_range(0..m)?);
        let dy = Matrix::from_values((0..m).flat_map(|i| dy.row(i)).copied(), m, dy.cols())?;
        let mut reports = Vec::new();
        let mut kept_bytes = 0;
        for (layer, path) in self.layers.iter().zip([Path::Fused, Path::Unfused]) {
            let mut y = Matrix::zeros(m, dy.cols())?;
            let mut gradients = layer.zeros(m, self.bias)?;
            let kept = layer.step(x, &mut y, &dy, &mut gradients)?;
            kept_bytes = kept_bytes.max(kept);
            reports.push(judge(&in_numerics(params, path), x, &dy, &gradients)?);
        }
        let unfused_passed = reports.pop().is_none_or(|r| r.values().all(|g| g.passed));
        let mut gradients = reports.pop().unwrap_or_default();
        if !unfused_passed {
            gradients.values_mut().for_each(|g| g.passed = false);
        }
        let rows = self.dy.rows();
        let kept_bytes = kept_bytes.checked_div(m).map_or(0, |bytes| bytes * rows);
        Ok(TrainingReport { gradients, save_policy: self.policy, kept_bytes, tokens_verified: m })
    }
}

/// A path that passes gate and up through memory rounds them.
fn in_numerics<'a, T: Element>(params: &Params<'a, T>, path: Path) -> Params<'a, T> {
    let numerics = params.problem(1).numerics;
    match (path, numerics.rounding) {
        (Path::Unfused, swiglu::Rounding::Fused) => {
            params.with_numerics(numerics.with_rounding(swiglu::Rounding::PreRound))
        }
        _ => *params,
    }
}

fn judge<T: Element>(
    params: &Params<'_, T>,
    x: MatrixRef<'_, T>,
    dy: &Matrix<T>,
    gradients: &Gradients<T>,
) -> anyhow::Result<BTreeMap<&'static str, GradientReport>> {
    let expected = match params {
        Params::GatedLinear(p) => bounds::gated_linear_backward(x, p, dy.view(), T::DTYPE, 0.0)?,
        Params::Mlp(p) => bounds::mlp_backward(x, p, dy.view(), T::DTYPE, 0.0)?,
        _ => {
            bail!("--backward: quantised weights have no gradients; --decode-weights decodes them")
        }
    };
    let problem = params.problem(1);
    let gate_up = problem.layout.orientation;
    let down = match params {
        Params::Mlp(p) => p.down_orientation,
        _ => gate_up,
    };
    let mut reports = BTreeMap::new();
    let matrices = [
        ("dx", &gradients.dx, Some(&expected.dx), Orientation::OutIn),
        ("dw_gate", &gradients.gate, Some(&expected.gate), gate_up),
        ("dw_up", &gradients.up, Some(&expected.up), gate_up),
        ("dw_down", &gradients.down, expected.down.as_ref(), down),
    ];
    for (name, matrix, reference, orientation) in matrices {
        if let (Some(matrix), Some(reference)) = (matrix, reference) {
            reports.insert(name, of(reference, by_outputs(matrix, orientation)?.view())?);
        }
    }
    let biases = [
        ("db_gate", &gradients.gate_bias, Some(&expected.gate_bias)),
        ("db_up", &gradients.up_bias, Some(&expected.up_bias)),
        ("db_down", &gradients.down_bias, expected.down_bias.as_ref()),
    ];
    for (name, bias, reference) in biases {
        if let (Some(bias), Some(reference)) = (bias, reference) {
            reports.insert(name, of(reference, MatrixRef::row_vector(bias))?);
        }
    }
    Ok(reports)
}

/// A gradient with a row for each output feature.
fn by_outputs<T: Element>(m: &Matrix<T>, orientation: Orientation) -> anyhow::Result<Matrix<T>> {
    if orientation == Orientation::OutIn {
        return Ok(m.try_clone()?);
    }
    let values = (0..m.cols()).flat_map(|c| (0..m.rows()).map(move |r| m[(r, c)]));
    Ok(Matrix::from_values(values, m.cols(), m.rows())?)
}

fn of<V: Element>(
    reference: &GradientReference,
    out: MatrixRef<'_, V>,
) -> anyhow::Result<GradientReport> {
    let judgement = reference.judge(out)?;
    Ok(GradientReport {
        relative_frobenius: judgement.relative_frobenius,
        max_abs: judgement.max_abs,
        bound: judgement.frobenius_limit,
        eager_error: reference.eager_error,
        worst_element: judgement.worst_ratio,
        passed: judgement.passed() && judgement.overflow.is_none() && judgement.lost.is_none(),
    })
}
