//! A linear map: the down projection, and a half of the unfused layer.

use swiglu_core::{Element, MatrixMut, MatrixRef, Orientation, QuantizedRef, Result};

use super::pass::{linear_map, linear_map_bytes};
use crate::cpu::Cpu;
use crate::epilogue::{Plain, Rows};
use crate::order::Order;
use crate::panels::Panels;
use crate::quant::QuantizedPanels;
use crate::weights::Weights;
use crate::workspace::Tokens;

/// A linear map with packed weights.
#[derive(Debug)]
pub(crate) struct Linear<T> {
    weights: Weights<T>,
    order: Order,
}

impl<T: Element> Linear<T> {
    /// Packs the weights of `outputs` features; `locate` gives the tensor and the index of each.
    pub(crate) fn new<'a>(
        cpu: &Cpu,
        outputs: usize,
        inputs: usize,
        order: Order,
        orientation: Orientation,
        bias: Option<&[f32]>,
        locate: &(dyn Fn(usize) -> (MatrixRef<'a, T>, usize) + Sync),
    ) -> Result<Self> {
        let panels = Panels::linear(cpu, outputs, inputs, orientation, locate, bias)?;
        Ok(Self { weights: Weights::Dense(panels), order })
    }

    /// Packs quantised weights.
    pub(crate) fn quantized(
        cpu: &Cpu,
        w: QuantizedRef<'_>,
        order: Order,
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        let weights = Weights::Quantized(QuantizedPanels::linear(cpu, w, bias)?);
        Ok(Self { weights, order })
    }

    /// The packed weights.
    pub(crate) fn weights(&self) -> &Weights<T> {
        &self.weights
    }

    /// What happens to the sums.
    pub(crate) fn epilogue(&self, out: Rows<T>) -> Plain<T> {
        Plain { bias: self.weights.bias(), out }
    }

    /// Bytes of workspace that [`Self::forward`] takes.
    pub(crate) fn workspace_bytes(&self, cpu: &Cpu, tokens: Tokens) -> usize {
        linear_map_bytes(cpu, (&self.weights, self.order), tokens)
    }

    /// out = x·W + b; the shapes are the caller's.
    pub(crate) fn forward(
        &self,
        cpu: &Cpu,
        workspace: &mut [u8],
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) {
        let weights = (&self.weights, self.order);
        linear_map(cpu, weights, workspace, x, out, |out| self.epilogue(out));
    }
}
