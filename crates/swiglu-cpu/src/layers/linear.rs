//! A linear map: the down projection, and a half of the unfused layer.

use swiglu_core::{Element, MatrixMut, MatrixRef, Orientation, Result};

use super::pass::linear_map;
use crate::cpu::Cpu;
use crate::epilogue::{Plain, Rows};
use crate::panels::Panels;
use crate::workspace::Workspaces;

/// A linear map with packed weights.
#[derive(Debug)]
pub(crate) struct Linear<T> {
    cpu: Cpu,
    panels: Panels<T>,
    workspaces: Workspaces,
}

impl<T: Element> Linear<T> {
    /// Packs the weights of `outputs` features; `locate` gives the tensor and the index of each.
    pub(crate) fn new<'a>(
        cpu: &Cpu,
        outputs: usize,
        inputs: usize,
        orientation: Orientation,
        bias: Option<&[f32]>,
        locate: &(dyn Fn(usize) -> (MatrixRef<'a, T>, usize) + Sync),
    ) -> Result<Self> {
        let panels = Panels::linear(cpu, outputs, inputs, orientation, locate, bias)?;
        Ok(Self { cpu: cpu.clone(), panels, workspaces: Workspaces::default() })
    }

    /// The packed weights.
    pub(crate) fn panels(&self) -> &Panels<T> {
        &self.panels
    }

    /// What happens to the sums.
    pub(crate) fn epilogue(&self, out: Rows<T>) -> Plain<T> {
        Plain { bias: self.panels.bias(), out }
    }

    /// out = x·W + b; the shapes are the caller's.
    pub(crate) fn forward(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        linear_map(&self.cpu, &self.panels, &self.workspaces, x, out, |out| self.epilogue(out))
    }
}
