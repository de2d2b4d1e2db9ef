//! The CPU backend as the conformance suite sees it.

use swiglu::{
    Activation, Element, GateUpRef, GatedLinearParams, MatrixMut, MatrixRef, MlpParams, Numerics,
};
use swiglu_core::Result;
use swiglu_core::conformance::Backend;
use swiglu_cpu::{Cpu, GatedLinear, Mlp};

/// One instruction set with one number of threads.
#[derive(Debug)]
pub(super) struct CpuBackend(pub(super) Cpu);

impl CpuBackend {
    /// The instruction set.
    pub(super) fn kernel(&self) -> &'static str {
        self.0.isa().name()
    }

    pub(super) fn label(&self) -> String {
        let plural = if self.0.threads() == 1 { "" } else { "s" };
        format!("{}, {} thread{plural}", self.kernel(), self.0.threads())
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        self.label()
    }

    fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        self.0.activation(act, numerics, inputs, out)
    }

    fn gated_linear<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        GatedLinear::new(&self.0, params)?.forward(x, out)
    }

    fn mlp<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        Mlp::new(&self.0, params)?.forward(x, out)
    }
}
