//! Weights as arrays of other libraries, packed for a device or lent.

use pyo3::prelude::*;
use swiglu::cuda::{Cuda, DeviceGatedLinearParams, DeviceMatrixRef, DeviceMlpParams};
use swiglu::{
    Arrangement, Device, Element, GateUpWeights, GatedLinear, GatedLinearParams, Matrix, MatrixRef,
    Mlp, MlpParams, Numerics, Orientation, WeightLayout,
};

use crate::activation::Activation;
use crate::device;
use crate::error::Failure;
use crate::layer::Kind;
use crate::tensor::{Rows, Tensor, matrix};

/// Weights of gate, up and down, then their biases, as arrays: a layer without down is a gated linear layer, one without up
/// has both in the first.
#[derive(FromPyObject)]
pub(crate) struct Weights(
    pub(crate) Tensor,
    pub(crate) Option<Tensor>,
    pub(crate) Option<Tensor>,
    pub(crate) Option<Tensor>,
    pub(crate) Option<Tensor>,
    pub(crate) Option<Tensor>,
);

/// The down projection and its bias.
type Down<'a, T> = (MatrixRef<'a, T>, Option<&'a [f32]>);

impl Weights {
    pub(crate) fn pack<T: Element>(
        &self,
        device: &Device,
        activation: Activation,
        numerics: Option<Numerics>,
        how: Arrangement,
    ) -> swiglu::Result<Kind> {
        self.with_params::<T, _>((activation, numerics, how), |gated, down| match down {
            None => Ok(Kind::GatedLinear(GatedLinear::from_params(device, &gated)?)),
            Some((down, bias)) => {
                let params = MlpParams::new(gated, down, Orientation::OutIn).with_down_bias(bias);
                Ok(Kind::Mlp(Mlp::from_params(device, &params)?))
            }
        })
    }

    /// Calls `f` with the parameters of the gated layer, and with down and its bias where there is one, which lie in the host's
    /// memory, or in copies where they are no rows of adjacent elements.
    pub(crate) fn with_params<T: Element, R>(
        &self,
        (activation, numerics, how): (Activation, Option<Numerics>, Arrangement),
        f: impl FnOnce(GatedLinearParams<'_, T>, Option<Down<'_, T>>) -> swiglu::Result<R>,
    ) -> swiglu::Result<R> {
        let Self(w_gate, w_up, w_down, b_gate, b_up, b_down) = self;
        // SAFETY: the caller of the Python function keeps the arrays as they are until it returns.
        let gate = unsafe { w_gate.rows::<T>("w_gate")? };
        let up = rows::<T>(w_up, "w_up")?;
        let weights = match &up {
            Some(up) => GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?,
            None => GateUpWeights::packed(
                gate.view(),
                WeightLayout { orientation: Orientation::OutIn, arrangement: how },
            )?,
        };
        let (gate_bias, up_bias) = (bias::<T>(b_gate, "b_gate")?, bias::<T>(b_up, "b_up")?);
        let mut params = GatedLinearParams::new(weights, activation.0)
            .with_gate_bias(gate_bias.as_ref().map(|b| b.as_slice()))
            .with_up_bias(up_bias.as_ref().map(|b| b.as_slice()));
        if let Some(numerics) = numerics {
            params = params.with_numerics(numerics);
        }
        let (down, down_bias) = (rows::<T>(w_down, "w_down")?, bias::<T>(b_down, "b_down")?);
        let down_bias = down_bias.as_ref().map(|b| b.as_slice());
        f(params, down.as_ref().map(|down| (down.view(), down_bias)))
    }

    pub(crate) fn borrow<T: Element>(
        &self,
        ordinal: usize,
        activation: Activation,
        numerics: Option<Numerics>,
    ) -> Result<Kind, Failure> {
        let Self(w_gate, w_up, w_down, b_gate, b_up, b_down) = self;
        let cuda = device::cuda(ordinal)?;
        let (out_in, act) = (Orientation::OutIn, activation.0);
        // SAFETY: the addresses are of this device's memory, whose values a layer reads in calls alone: the caller of
        // each call says that they are still what they were said to be. No kernel of this crate writes weights.
        unsafe {
            let gate = matrix::<T>(&cuda, "w_gate", w_gate)?;
            let mut params = match w_up {
                Some(up) => {
                    let up = matrix::<T>(&cuda, "w_up", up)?;
                    DeviceGatedLinearParams::separate(gate, up, out_in, act)?
                }
                None => DeviceGatedLinearParams::packed(gate, out_in, act)?,
            };
            if let Some(numerics) = numerics {
                params = params.numerics(numerics);
            }
            let there = |bias, what| bias_there::<T>(&cuda, bias, what);
            let params = params.biases(there(b_gate, "b_gate")?, there(b_up, "b_up")?)?;
            let Some(down) = w_down else {
                return Ok(Kind::GatedLinear(GatedLinear::from_device(&cuda, &params)?));
            };
            let down = matrix::<T>(&cuda, "w_down", down)?;
            let mut params = DeviceMlpParams::new(params, down, out_in)?;
            if let Some(bias) = there(b_down, "b_down")? {
                params = params.down_bias(bias)?;
            }
            Ok(Kind::Mlp(Mlp::from_device(&cuda, &params)?))
        }
    }
}

fn rows<'a, T: Element>(
    tensor: &'a Option<Tensor>,
    what: &str,
) -> swiglu::Result<Option<Rows<'a, T>>> {
    // SAFETY: the caller of the Python function keeps the arrays as they are until it returns.
    Ok(tensor.as_ref().map(|tensor| unsafe { tensor.rows::<T>(what) }).transpose()?)
}

/// The values of a bias in f32, as layers of the host take it.
fn bias<T: Element>(tensor: &Option<Tensor>, what: &str) -> swiglu::Result<Option<Matrix<f32>>> {
    let bias = rows::<T>(tensor, what)?;
    Ok(bias.map(|bias| bias.view().to_dtype::<f32>()).transpose()?)
}

/// # Safety
/// As [`matrix`].
unsafe fn bias_there<'a, T: Element>(
    cuda: &Cuda,
    bias: &'a Option<Tensor>,
    what: &str,
) -> Result<Option<DeviceMatrixRef<'a, T>>, Failure> {
    // SAFETY: the caller's.
    bias.as_ref().map(|bias| unsafe { matrix::<T>(cuda, what, bias) }).transpose()
}
