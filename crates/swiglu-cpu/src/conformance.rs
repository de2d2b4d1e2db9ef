//! The CPU backend as the conformance suite sees it.

use swiglu_core::conformance::Backend;
use swiglu_core::{
    Activation, Element, GateUpRef, GatedLinearParams, GradientsMut, Matrix, MatrixMut, MatrixRef,
    MlpParams, Numerics, Path, QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedType,
    Result, SavePolicy, StridedRef,
};

use crate::{CallOptions, Cpu, GatedLinear, Mlp, quantized_types};

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

    fn trains(&self) -> bool {
        true
    }

    fn gated_linear_backward<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
        x: MatrixRef<'_, T>,
        dh: StridedRef<'_, T>,
        into: GradientsMut<'_, T>,
    ) -> Result<()> {
        let layer = GatedLinear::for_training_with_path(&self.cpu, params, policy, self.path)?;
        let mut h = Matrix::zeros(x.rows(), layer.intermediate())?;
        let saved = layer.forward_train(x, h.view_mut(), &CallOptions::default())?;
        layer.backward_into(saved, dh, into, &CallOptions::default())
    }

    fn mlp_backward<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        policy: SavePolicy,
        x: MatrixRef<'_, T>,
        dy: StridedRef<'_, T>,
        into: GradientsMut<'_, T>,
    ) -> Result<()> {
        let layer = Mlp::for_training_with_path(&self.cpu, params, policy, self.path)?;
        let mut y = Matrix::zeros(x.rows(), x.cols())?;
        let saved = layer.forward_train(x, y.view_mut(), &CallOptions::default())?;
        layer.backward_into(saved, dy, into, &CallOptions::default())
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
