//! Cases of backward passes: every gradient against its own reference, from one call with all of them.

use std::fmt;

use serde::Serialize;

use super::{Backend, Case, Outcome, Padded, Parameters, suite};
use crate::bounds::{self, Judgement, Reference};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::gradients::{GradientMut, GradientsMut, SavePolicy};
use crate::layout::Orientation;
use crate::matrix::Matrix;
use crate::problem::Accumulate;
use crate::problem::Op;
use crate::random;
use crate::scale::RowScale;
use crate::strided::StridedRef;
use half::{bf16, f16};

/// How ∂L/∂y, or ∂L/∂h of a gated linear layer, lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lie {
    /// Rows with gaps between them.
    Rows,
    /// Columns of adjacent elements.
    Columns,
    /// One row for all tokens.
    SameRow,
    /// One value.
    OneValue,
}

const LIES: [Lie; 4] = [Lie::Rows, Lie::Columns, Lie::SameRow, Lie::OneValue];

/// A case of a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GradientCase {
    /// The layer and its input.
    pub layer: Case,
    /// What is kept.
    pub policy: SavePolicy,
    /// How the gradient of the result lies.
    pub dy: Lie,
    /// Whether gradients of weights are values of `f32` in place of T.
    pub in_f32: bool,
    /// Whether they are added to what is there.
    pub accumulate: Accumulate,
    /// Whether rows of a block's result had factors, and whether their gradients are wanted.
    pub row_scale: Scaled,
}

/// What a case has to do with factors of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaled {
    /// Nothing.
    No,
    /// Each row has a factor of its own.
    By,
    /// All rows have the factor 1, and its gradient is wanted.
    Gradient,
    /// Both.
    ByAndGradient,
}

impl Scaled {
    fn by(self) -> bool {
        matches!(self, Scaled::By | Scaled::ByAndGradient)
    }

    fn gradient(self) -> bool {
        matches!(self, Scaled::Gradient | Scaled::ByAndGradient)
    }
}

impl fmt::Display for GradientCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, policy, dy, in_f32, accumulate, row_scale } = self;
        let dtype = if *in_f32 { DType::F32 } else { layer.dtype };
        write!(f, "backward {layer} {policy} dy={dy:?} {accumulate:?} in {dtype}")?;
        match row_scale {
            Scaled::No => Ok(()),
            scaled => write!(f, " row_scale={scaled:?}"),
        }
    }
}

/// The cases of backward passes for the given element types, over the layers of [`suite`].
pub fn gradient_suite(dtypes: &[DType]) -> Vec<GradientCase> {
    let layers = suite(dtypes).into_iter().filter(|case| case.op != Op::Activation);
    let with = |(i, layer): (usize, Case)| GradientCase {
        layer,
        policy: SavePolicy::ALL[i % 3],
        dy: LIES[i / 2 % 4],
        in_f32: i % 5 < 2,
        accumulate: if i % 7 < 3 { Accumulate::Add } else { Accumulate::Overwrite },
        // In no step with the other modes, which go by other numbers.
        row_scale: match i % 11 {
            0 | 1 if layer.op == Op::Mlp => Scaled::ByAndGradient,
            2 if layer.op == Op::Mlp => Scaled::By,
            3 if layer.op == Op::Mlp => Scaled::Gradient,
            _ => Scaled::No,
        },
    };
    layers.enumerate().map(with).collect()
}

/// Computes and judges one case; the outcome is that of the gradient that is the worst.
///
/// # Errors
/// Whatever the backend reports.
pub fn run_gradients<B: Backend>(backend: &B, case: &GradientCase) -> Result<Outcome> {
    match (case.layer.dtype, case.in_f32) {
        (DType::F32, _) => run_as::<f32, f32, B>(backend, case),
        (DType::F16, true) => run_as::<f16, f32, B>(backend, case),
        (DType::F16, false) => run_as::<f16, f16, B>(backend, case),
        (DType::Bf16, true) => run_as::<bf16, f32, B>(backend, case),
        (DType::Bf16, false) => run_as::<bf16, bf16, B>(backend, case),
    }
}

/// Where a gradient of weights goes, as its element type asks for.
trait Place<T>: Element {
    fn place(m: &mut Padded<Self>) -> Result<GradientMut<'_, T>>;
}

impl<T: Element> Place<T> for f32 {
    fn place(m: &mut Padded<f32>) -> Result<GradientMut<'_, T>> {
        Ok(GradientMut::F32(m.view_mut()?))
    }
}
impl Place<f16> for f16 {
    fn place(m: &mut Padded<f16>) -> Result<GradientMut<'_, f16>> {
        Ok(GradientMut::Element(m.view_mut()?))
    }
}
impl Place<bf16> for bf16 {
    fn place(m: &mut Padded<bf16>) -> Result<GradientMut<'_, bf16>> {
        Ok(GradientMut::Element(m.view_mut()?))
    }
}

/// The memory of one gradient, what was in it, and how it lies.
struct Gradient<V> {
    name: &'static str,
    memory: Padded<V>,
    before: Matrix<f64>,
    orientation: Orientation,
}

impl<V: Element> Gradient<V> {
    /// Poisoned, or with values that are added to.
    fn new(
        name: &'static str,
        [rows, cols]: [usize; 2],
        orientation: Orientation,
        case: &GradientCase,
    ) -> Result<Self> {
        let [rows, cols] = orientation.shape(rows, cols);
        let mut memory = Padded::poisoned(rows, cols, case.layer.padding);
        let mut before = Matrix::zeros(rows, cols)?;
        if case.accumulate == Accumulate::Add {
            for at in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                let index = (at.0 * cols + at.1) as u64;
                let value = V::from_f32(random::normal(case.layer.seed ^ 0xadd, index));
                memory.data[at.0 * memory.stride + at.1] = value;
                before[at] = value.to_f64();
            }
        }
        Ok(Self { name, memory, before, orientation })
    }

    /// Holds it against its reference, which has a row for each output feature.
    fn judge(&self, reference: &Reference, accumulate: Accumulate) -> Result<Outcome> {
        let fault = self.memory.gap_written().map(|gap| format!("{}: {gap}", self.name));
        let out = self.memory.view()?;
        let [rows, cols] = reference.value.shape();
        let at = |r: usize, c: usize| match self.orientation {
            Orientation::OutIn => (r, c),
            Orientation::InOut => (c, r),
        };
        let places = || (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c)));
        let out = places().map(|(r, c)| at(r, c)).map(|(r, c)| out.row(r)[c]);
        let out = Matrix::from_values(out, rows, cols)?;
        let judgement = match accumulate {
            Accumulate::Overwrite => reference.judge(out.view())?,
            Accumulate::Add => {
                let before = places().map(|(r, c)| self.before[at(r, c)]);
                let before = Matrix::from_values(before, rows, cols)?;
                reference.accumulated_on(&before, V::DTYPE)?.judge(out.view())?
            }
        };
        let outside = |j: &Judgement| (!j.passed()).then(|| outside(self.name, j));
        Ok(Outcome { fault: fault.or_else(|| outside(&judgement)), judgement })
    }
}

fn outside(name: &str, j: &Judgement) -> String {
    format!(
        "{name}: element {:?} is {:.2} × its bound away; relative error {:.2e}, limit {:.2e}",
        j.worst_at, j.worst_ratio, j.relative_frobenius, j.frobenius_limit
    )
}

fn bias(name: &'static str, n: usize, case: &GradientCase) -> Result<Gradient<f32>> {
    let without_gap = GradientCase { layer: Case { padding: 0, ..case.layer }, ..*case };
    Gradient::new(name, [1, n], Orientation::OutIn, &without_gap)
}

/// ∂L/∂y of a case, by rows, and the values behind it.
fn dy<T: Element>(case: &GradientCase, [rows, cols]: [usize; 2]) -> Vec<T> {
    let (count, seed) = match case.dy {
        Lie::Rows | Lie::Columns => (rows * (cols + case.layer.padding) + cols, 0xd),
        Lie::SameRow => (cols, 0xe),
        Lie::OneValue => (1, 0xf),
    };
    let seed = case.layer.seed ^ seed;
    (0..count.max(1) as u64).map(|i| T::from_f32(random::normal(seed, i))).collect()
}

fn strides(case: &GradientCase, [rows, cols]: [usize; 2]) -> [usize; 2] {
    match case.dy {
        Lie::Rows => [cols + case.layer.padding, 1],
        Lie::Columns => [1, rows],
        Lie::SameRow => [0, 1],
        Lie::OneValue => [0, 0],
    }
}

fn run_as<T: Element, V: Place<T>, B: Backend>(
    backend: &B,
    case: &GradientCase,
) -> Result<Outcome> {
    let Case { op, m, hidden: k, intermediate: h, padding, scale, seed, layout, .. } = case.layer;
    let x = Padded::<T>::random(seed, m, k, padding, scale);
    let parameters = Parameters::<T>::new(&case.layer)?;
    let is_block = match op {
        Op::Mlp => true,
        Op::GatedLinear => false,
        _ => return Err(without_weights(case)),
    };
    let shape = [m, if is_block { k } else { h }];
    let values = dy::<T>(case, shape);
    let dy = StridedRef::new(&values, shape, strides(case, shape))?;
    let overwritten = GradientCase { accumulate: Accumulate::Overwrite, ..*case };
    let mut dx = Gradient::<T>::new("dx", [m, k], Orientation::OutIn, &overwritten)?;
    let weight = |name, shape| Gradient::<V>::new(name, shape, layout.orientation, case);
    let (mut gate, mut up) = (weight("dw_gate", [h, k])?, weight("dw_up", [h, k])?);
    let mut down = weight("dw_down", [k, h])?;
    let mut biases =
        [bias("db_gate", h, case)?, bias("db_up", h, case)?, bias("db_down", k, case)?];
    let [gate_bias, up_bias, down_bias] = &mut biases;
    // Some of them 0, and negative.
    let factor = |row| (4.0 * random::normal(seed ^ 0x5ca1e, row)).round() * 0.3;
    let factors: Vec<f32> = (0..m as u64).map(factor).collect();
    let scale = if case.row_scale.by() { RowScale::Rows(&factors) } else { RowScale::None };
    let mut of_factors = bias("d_row_scale", m, &overwritten)?;
    let into = GradientsMut {
        dx: Some(dx.memory.view_mut()?),
        gate: Some(V::place(&mut gate.memory)?),
        up: Some(V::place(&mut up.memory)?),
        down: is_block.then(|| V::place(&mut down.memory)).transpose()?,
        gate_bias: Some(&mut gate_bias.memory.data),
        up_bias: Some(&mut up_bias.memory.data),
        down_bias: is_block.then_some(&mut down_bias.memory.data),
        row_scale: scale,
        row_scale_grad: case.row_scale.gradient().then_some(&mut of_factors.memory.data),
        accumulate: case.accumulate,
    };
    let rows = dy.to_rows()?;
    let (x, rows, roundoff) = (x.view()?, rows.view()?, backend.factor_roundoff(T::DTYPE));
    // What is added is rounded once, with what it is added to.
    let stored = if case.accumulate == Accumulate::Add { DType::F32 } else { V::DTYPE };
    let expected = if is_block {
        let params = parameters.mlp();
        backend.mlp_backward(&params, case.policy, x, dy, into)?;
        bounds::scaled_mlp_backward(x, &params, (rows, scale), stored, roundoff)?
    } else {
        let params = parameters.gated();
        backend.gated_linear_backward(&params, case.policy, x, dy, into)?;
        bounds::gated_linear_backward(x, &params, rows, stored, roundoff)?
    };
    let [gate_bias, up_bias, down_bias] = &biases;
    let mut outcomes = vec![
        dx.judge(&expected.dx, Accumulate::Overwrite)?,
        gate.judge(&expected.gate, case.accumulate)?,
        up.judge(&expected.up, case.accumulate)?,
        gate_bias.judge(&expected.gate_bias, case.accumulate)?,
        up_bias.judge(&expected.up_bias, case.accumulate)?,
    ];
    if let Some(reference) = &expected.down {
        outcomes.push(down.judge(reference, case.accumulate)?);
    }
    if let Some(reference) = &expected.down_bias {
        outcomes.push(down_bias.judge(reference, case.accumulate)?);
    }
    if let (Some(reference), true) = (&expected.row_scale, case.row_scale.gradient()) {
        outcomes.push(of_factors.judge(reference, Accumulate::Overwrite)?);
    }
    worst(outcomes).ok_or_else(|| without_weights(case))
}

fn without_weights(case: &GradientCase) -> Error {
    let why = "gradients of weights are of layers that have some".into();
    Error::Unsupported { what: case.to_string(), why }
}

/// The outcome with a fault, or else the one nearest to its bounds.
fn worst(outcomes: Vec<Outcome>) -> Option<Outcome> {
    let size = |o: &Outcome| (o.fault.is_some(), o.judgement.worst_ratio);
    outcomes.into_iter().max_by(|a, b| {
        let ((a_fault, a), (b_fault, b)) = (size(a), size(b));
        a_fault.cmp(&b_fault).then(a.total_cmp(&b))
    })
}

/// What a backend computes by itself: gradients of a layer that it packs for the call.
pub(super) fn refused(name: &str, op: Op) -> Error {
    Error::Unsupported {
        what: format!("the backward pass of {op} on {name}"),
        why: "it computes forward passes".into(),
    }
}

#[cfg(test)]
#[path = "gradients_tests.rs"]
mod tests;
