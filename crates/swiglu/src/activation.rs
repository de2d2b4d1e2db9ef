//! The activation operation: gate and up are given, there are no weights.

use swiglu_core::{
    Activation, Arrangement, DType, Element, GateUpMut, GateUpRef, Matrix, MatrixMut, MatrixRef,
    Numerics, Op, Orientation, Plan, Problem, WeightLayout,
};

use crate::device::Device;
use crate::error::Result;
use crate::explain::Explanation;

/// h = act(gate, up), element by element, for gate and up in any [`Arrangement`].
///
/// ```
/// use swiglu::{Activation, Device, GateUpRef, GatedActivation, MatrixRef};
///
/// let act = GatedActivation::new(&Device::cpu()?, Activation::REGLU);
/// let (gate, up) = ([1.0f32, -1.0, 2.0, 3.0], [5.0, 6.0, 7.0, -8.0]);
/// let inputs = GateUpRef::separate(MatrixRef::new(&gate, 2, 2)?, MatrixRef::new(&up, 2, 2)?)?;
/// assert_eq!(act.forward(inputs)?.as_slice(), [5.0, 0.0, 14.0, -24.0]);
/// # Ok::<(), swiglu::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GatedActivation {
    device: Device,
    activation: Activation,
    numerics: Option<Numerics>,
}

impl GatedActivation {
    /// The activation on a device.
    pub fn new(device: &Device, activation: Activation) -> Self {
        Self { device: device.clone(), activation, numerics: None }
    }

    /// Rounds otherwise than [`Numerics::default_for`] the element type of a call.
    #[must_use]
    pub fn with_numerics(self, numerics: Numerics) -> Self {
        Self { numerics: Some(numerics), ..self }
    }

    /// The activation.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The numerics of a call with elements of `dtype`.
    pub fn numerics(&self, dtype: DType) -> Numerics {
        self.numerics.unwrap_or_else(|| Numerics::default_for(dtype))
    }

    /// h `[M, H]` in a new matrix.
    ///
    /// # Errors
    /// [`swiglu_core::Error::TooLarge`] if the result does not fit the address space.
    pub fn forward<T: Element>(&self, inputs: GateUpRef<'_, T>) -> Result<Matrix<T>> {
        let mut out = Matrix::zeros(inputs.rows(), inputs.intermediate())?;
        self.forward_into(inputs, &mut out)?;
        Ok(out)
    }

    /// Writes h into `out`, without a buffer between.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if `out` is not `[M, H]`.
    pub fn forward_into<'out, T: Element>(
        &self,
        inputs: GateUpRef<'_, T>,
        out: impl Into<MatrixMut<'out, T>>,
    ) -> Result<()> {
        let (act, numerics, out) = (&self.activation, self.numerics(T::DTYPE), out.into());
        match &self.device {
            Device::Cpu(cpu) => Ok(cpu.activation(act, numerics, inputs, out)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Ok(cuda.activation_host(act, numerics, inputs, out)?),
        }
    }

    /// Writes (∂L/∂gate, ∂L/∂up) into `grads`, from ∂L/∂h `[M, H]` and the inputs of the forward pass.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if ∂L/∂h is not `[M, H]`, or `grads` has another shape or arrangement than `inputs`.
    pub fn backward_into<'d, T: Element>(
        &self,
        out_grad: impl Into<MatrixRef<'d, T>>,
        inputs: GateUpRef<'_, T>,
        grads: GateUpMut<'_, T>,
    ) -> Result<()> {
        let (act, numerics, dh) = (&self.activation, self.numerics(T::DTYPE), out_grad.into());
        match &self.device {
            Device::Cpu(cpu) => Ok(cpu.activation_backward(act, numerics, dh, inputs, grads)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                Ok(cuda.activation_backward_host(act, numerics, dh, inputs, grads)?)
            }
        }
    }

    fn problem(
        &self,
        m: usize,
        intermediate: usize,
        dtype: DType,
        arrangement: Arrangement,
    ) -> Problem {
        Problem::new(Op::Activation, m, 0, intermediate, dtype, self.activation)
            .with_numerics(self.numerics(dtype))
            .with_layout(WeightLayout { orientation: Orientation::OutIn, arrangement })
    }

    /// How an `[m, intermediate]` result will be computed.
    ///
    /// # Errors
    /// As [`Device::plan`].
    pub fn plan(
        &self,
        m: usize,
        intermediate: usize,
        dtype: DType,
        arrangement: Arrangement,
    ) -> Result<Plan> {
        Ok(self.device.plan(self.problem(m, intermediate, dtype, arrangement), None)?)
    }

    /// The plan, what it was chosen from, and what the problem costs at least.
    ///
    /// # Errors
    /// As [`Device::plan`].
    pub fn explain(
        &self,
        m: usize,
        intermediate: usize,
        dtype: DType,
        arrangement: Arrangement,
    ) -> Result<Explanation> {
        Ok(self.device.explain(self.problem(m, intermediate, dtype, arrangement), None)?)
    }
}
