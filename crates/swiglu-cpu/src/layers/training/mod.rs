//! Training: a forward pass that keeps gate and up, and the backward pass.
//!
//! The derivative of the activation is the epilogue of dh = dy·Wdᵀ, where ∂L/∂gate and ∂L/∂up take the place of gate and
//! up and h is computed again. Both lie in one matrix `[M, 2H]`, so that ∂L/∂x is one linear map of 2H inputs. A gradient
//! of weights is a linear map too: columns of one factor are its rows, tokens its inputs, and the other factor its weights,
//! packed for the call. All of them go through the matrix kernel of the forward pass.

mod backward;
mod factor;
mod gated;
mod lent;
mod mlp;
mod saved;

use std::sync::atomic::{AtomicU64, Ordering};

use swiglu_core::{
    Accumulate, Arrangement, Element, Error, GateUpWeights, GatedLinearParams, GradientMut,
    GradientsMut, Half, MatrixMut, MatrixRef, MlpParams, Orientation, Result, SavePolicy,
    StridedRef, WeightLayout,
};

use super::linear::Linear;
use crate::buffer::Buffer;
use crate::columns::sum_columns;
use crate::cpu::Cpu;
use crate::panels::Part;
pub use lent::LentMlp;
pub use saved::Saved;

/// What a gated linear layer has beside its forward weights to be trained.
#[derive(Debug)]
pub(super) struct Training<T> {
    pub(super) policy: SavePolicy,
    /// Which weights these are, of all that there were in this process: what is kept with some is of no use with others.
    of: u64,
    /// From ∂L/∂gate and ∂L/∂up, 2H inputs, to ∂L/∂x.
    dx: Linear<T>,
    /// Up alone, where it is computed again without gate.
    up: Option<Linear<T>>,
}

/// What a block has beside its gated linear layer's.
#[derive(Debug)]
pub(super) struct MlpTraining<T> {
    /// From ∂L/∂y to ∂L/∂h.
    dh: Linear<T>,
    down_orientation: Orientation,
}

/// Refuses to train a layer that was not made for it.
pub(super) fn trained<L>(training: Option<L>) -> Result<L> {
    training.ok_or_else(|| Error::Unsupported {
        what: "training of a layer that was packed for forward passes".into(),
        why: "it lacks the weights in the order that gradients take; make it by for_training"
            .into(),
    })
}

/// Gate and up of weights as matrices of their own, where they lie so.
pub(super) fn apart<'a, T: Element>(
    weights: &GateUpWeights<'a, T>,
) -> Result<[MatrixRef<'a, T>; 2]> {
    let h = weights.intermediate();
    let half = |half| {
        let (tensor, first) = weights.locate(half, 0);
        match weights.layout().orientation {
            Orientation::OutIn => tensor.rows_range(first..first + h),
            Orientation::InOut => tensor.cols_range(first..first + h),
        }
    };
    match h {
        0 => Ok([weights.locate(Half::Gate, 0).0; 2]),
        _ => Ok([half(Half::Gate)?, half(Half::Up)?]),
    }
}

/// From ∂L/∂gate and ∂L/∂up to ∂L/∂x.
fn dx_of<T: Element>(
    cpu: &Cpu,
    memory: Buffer,
    params: &GatedLinearParams<'_, T>,
) -> Result<Linear<T>> {
    let w = &params.weights;
    let layout = w.layout();
    if matches!(layout.arrangement, Arrangement::Interleaved { .. }) {
        let arrangement = Arrangement::Separate;
        let weights = w.convert(WeightLayout { arrangement, ..layout })?;
        return dx_of(cpu, memory, &params.with_weights(weights.view()));
    }
    let (inputs, orientation) = (w.intermediate(), flipped(layout.orientation));
    let [gate_half, up_half] = apart(w)?;
    let parts = [
        Part { inputs, orientation, locate: &|k| (gate_half, k) },
        Part { inputs, orientation, locate: &|k| (up_half, k) },
    ];
    Linear::of_parts(cpu, memory, (w.hidden(), params.numerics.into()), &parts, None)
}

impl<T: Element> Training<T> {
    pub(super) fn new(
        cpu: &Cpu,
        [dx, up]: [Buffer; 2],
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
    ) -> Result<Self> {
        let w = &params.weights;
        let (k, h, order) = (w.hidden(), w.intermediate(), params.numerics.into());
        let dx = dx_of(cpu, dx, params)?;
        let up = match policy {
            SavePolicy::SaveGate => {
                let (inputs, orientation) = (k, w.layout().orientation);
                let part = Part { inputs, orientation, locate: &|j| w.locate(Half::Up, j) };
                Some(Linear::of_parts(cpu, up, (h, order), &[part], params.up_bias)?)
            }
            _ => None,
        };
        static MADE: AtomicU64 = AtomicU64::new(0);
        Ok(Self { policy, of: MADE.fetch_add(1, Ordering::Relaxed), dx, up })
    }

    /// What is kept, and whose it is.
    pub(super) fn kept_by(&self) -> (SavePolicy, u64) {
        (self.policy, self.of)
    }

    /// The memory of the weights, which are gone then.
    pub(super) fn take_memory(&mut self) -> [Buffer; 2] {
        let up = self.up.as_mut().map_or(Buffer::empty(), Linear::take_memory);
        [self.dx.take_memory(), up]
    }

    pub(super) fn bytes(&self) -> usize {
        let up = self.up.as_ref().map_or(0, |up| up.weights().bytes_with_biases());
        self.dx.weights().bytes_with_biases() + up
    }
}

pub(super) const fn flipped(orientation: Orientation) -> Orientation {
    match orientation {
        Orientation::OutIn => Orientation::InOut,
        Orientation::InOut => Orientation::OutIn,
    }
}

impl<T: Element> MlpTraining<T> {
    pub(super) fn new(cpu: &Cpu, memory: Buffer, params: &MlpParams<'_, T>) -> Result<Self> {
        let w = &params.gated.weights;
        let part = Part {
            inputs: w.hidden(),
            orientation: flipped(params.down_orientation),
            locate: &|h| (params.down, h),
        };
        let outputs = (w.intermediate(), params.gated.numerics.into());
        let dh = Linear::of_parts(cpu, memory, outputs, &[part], None)?;
        Ok(Self { dh, down_orientation: params.down_orientation })
    }
}

pub(super) fn expect_shape<T>(
    what: &str,
    m: StridedRef<'_, T>,
    expected: [usize; 2],
) -> Result<()> {
    match m.shape() == expected {
        true => Ok(()),
        false => Err(Error::shape(what, expected, m.shape())),
    }
}

/// Whether anything is wanted that follows from ∂L/∂h.
pub(super) fn wants_dh<T>(into: &GradientsMut<'_, T>) -> bool {
    wants_inner(into) || into.row_scale_grad.is_some()
}

/// Whether anything is wanted that follows from the gradients of gate and up.
pub(super) fn wants_inner<T>(into: &GradientsMut<'_, T>) -> bool {
    into.dx.is_some()
        || into.gate.is_some()
        || into.up.is_some()
        || into.gate_bias.is_some()
        || into.up_bias.is_some()
}

/// Sums the gradient of a block's down bias, where that is wanted; whether anything else is.
pub(super) fn begin<T: Element>(
    cpu: &Cpu,
    dy: MatrixRef<'_, T>,
    into: &mut GradientsMut<'_, T>,
) -> bool {
    if let Some(bias) = &mut into.down_bias {
        sum_columns(cpu, (dy, into.row_scale), bias, into.accumulate);
    }
    wants_dh(into) || into.down.is_some()
}

/// The gradients of no tokens: zeros, or what is there.
pub(super) fn clear<T: Element>(into: &mut GradientsMut<'_, T>) {
    if into.accumulate == Accumulate::Add {
        return;
    }
    [&mut into.gate, &mut into.up, &mut into.down].into_iter().flatten().for_each(zero);
    let biases = [&mut into.gate_bias, &mut into.up_bias, &mut into.down_bias];
    biases.into_iter().flatten().for_each(|bias| bias.fill(0.0));
}

fn zero<T: Element>(place: &mut GradientMut<'_, T>) {
    fn rows<V: Element>(m: &mut MatrixMut<'_, V>) {
        (0..m.rows()).for_each(|r| m.row_mut(r).fill(V::default()));
    }
    match place {
        GradientMut::Element(m) => rows(m),
        GradientMut::F32(m) => rows(m),
        other => unreachable!("{other:?} is computed nowhere"),
    }
}
