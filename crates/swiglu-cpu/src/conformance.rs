//! The CPU backend as the conformance suite sees it.

use swiglu_core::conformance::Backend;
use swiglu_core::{
    Activation, Element, GateUpRef, GatedLinearParams, MatrixMut, MatrixRef, MlpParams, Numerics,
    Path, QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedType, Result,
};

use crate::{Cpu, GatedLinear, Mlp, quantized_types};

/// A device on one path. Layers are packed for every case, as a user would.
#[derive(Debug, Clone)]
pub struct CpuBackend {
    /// The device.
    pub cpu: Cpu,
    /// Fused or not.
    pub path: Path,
}

impl Backend for CpuBackend {
    /// `avx2 fused, 2 threads`.
    fn name(&self) -> String {
        let plural = if self.cpu.threads() == 1 { "" } else { "s" };
        format!("{} {}, {} thread{plural}", self.cpu.isa(), self.path, self.cpu.threads())
    }

    fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        self.cpu.activation(act, numerics, inputs, out)
    }

    fn gated_linear<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        GatedLinear::with_path(&self.cpu, params, self.path)?.forward(x, out)
    }

    fn mlp<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        Mlp::with_path(&self.cpu, params, self.path)?.forward(x, out)
    }

    fn quantized_types(&self) -> &[QuantizedType] {
        quantized_types()
    }

    fn quantized_gated_linear<T: Element>(
        &self,
        params: &QuantizedGatedLinearParams<'_>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        GatedLinear::quantized(&self.cpu, params)?.forward(x, out)
    }

    fn quantized_mlp<T: Element>(
        &self,
        params: &QuantizedMlpParams<'_>,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        Mlp::quantized(&self.cpu, params)?.forward(x, out)
    }
}
