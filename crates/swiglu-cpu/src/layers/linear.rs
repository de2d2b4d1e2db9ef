//! A linear map: the down projection, and a half of the unfused layer.

use swiglu_core::{Element, MatrixMut, MatrixRef, QuantizedRef, Result, RowScale};

use super::pass::{Shared, linear_map, linear_map_bytes, out_rows};
use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::epilogue::{Added, Epilogue, Factors, Plain};
use crate::order::Order;
use crate::panels::{Panels, Part};
use crate::quant::QuantizedPanels;
use crate::weights::Weights;
use crate::workspace::Tokens;

/// Where the result of a linear map goes.
pub(crate) trait Target: Sync {
    type Epilogue: Epilogue;

    /// What happens to the sums of rows from one on.
    fn epilogue(&self, bias: Option<*const f32>, row: usize) -> Self::Epilogue;
}

/// To rows of T, which it is rounded to.
pub(crate) struct Stored<T>(pub(crate) Shared<T>);

impl<T: Element> Target for Stored<T> {
    type Epilogue = Plain<T>;

    fn epilogue(&self, bias: Option<*const f32>, row: usize) -> Plain<T> {
        Plain { bias, out: self.0.from(row) }
    }
}

/// Onto what rows of O hold, each row with its factor.
pub(crate) struct AddedTo<'a, O> {
    pub(crate) out: Shared<O>,
    pub(crate) scale: RowScale<'a>,
}

impl<O: Element> Target for AddedTo<'_, O> {
    type Epilogue = Added<O>;

    fn epilogue(&self, bias: Option<*const f32>, row: usize) -> Added<O> {
        Added { bias, out: self.out.from(row), scale: Factors::of(self.scale).from(row) }
    }
}

/// A linear map with packed weights.
#[derive(Debug)]
pub(crate) struct Linear<T> {
    weights: Weights<T>,
    order: Order,
}

impl<T: Element> Linear<T> {
    /// Packs the weights of `outputs` features, whose inputs come in parts, into this memory if it has the size.
    pub(crate) fn of_parts(
        cpu: &Cpu,
        memory: Buffer,
        (outputs, order): (usize, Order),
        parts: &[Part<'_, '_, T>],
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        let panels = Panels::linear(cpu, memory, outputs, parts, bias)?;
        Ok(Self { weights: Weights::Dense(panels), order })
    }

    /// The memory of the packed weights.
    pub(crate) fn take_memory(&mut self) -> Buffer {
        self.weights.take_memory()
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

    /// The bias of so many features, which the map has or more.
    pub(crate) fn bias(&self, features: usize) -> Option<&[f32]> {
        // SAFETY: the packed bias has a value for each lane of each panel, and lives as long as the weights.
        self.weights.bias().map(|first| unsafe { std::slice::from_raw_parts(first, features) })
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
        mut out: MatrixMut<'_, T>,
    ) {
        self.forward_to(cpu, workspace, x, &Stored(out_rows(&mut out)));
    }

    /// As [`Self::forward`], to anywhere.
    pub(crate) fn forward_to(
        &self,
        cpu: &Cpu,
        workspace: &mut [u8],
        x: MatrixRef<'_, T>,
        target: &impl Target,
    ) {
        let weights = (&self.weights, self.order);
        linear_map(cpu, weights, workspace, x.into(), |row| {
            target.epilogue(self.weights.bias(), row)
        });
    }
}
