//! A block in the host's memory over weights that may change from call to call: each pass is one call.

use pyo3::prelude::*;
use swiglu::{
    Accumulate, Arrangement, CallOptions, CoreError, Cpu, Device, Element, GradientsMut, LentMlp,
    MlpParams, Orientation, RowScale, with_dtype,
};

use crate::activation::Activation;
use crate::block::{Places, split, weights};
use crate::device;
use crate::error::Failure;
use crate::gradient::{expect_apart, host_gradient_mut, rows_mut};
use crate::tensor::Tensor;
use crate::weights::Weights;

/// A block of these weights on PyTorch's threads.
struct Call {
    act: Activation,
    weights: Weights,
}

impl Call {
    fn new(act: Activation, parts: [Option<Tensor>; 6]) -> Result<Self, Failure> {
        Ok(Self { act, weights: weights(parts)? })
    }

    fn with<T: Element>(
        &self,
        cpu: &Cpu,
        f: impl FnOnce(&LentMlp<'_, T>) -> Result<(), CoreError>,
    ) -> swiglu::Result<()> {
        let how = (self.act, None, Arrangement::PackedGateFirst);
        self.weights.with_params::<T, _>(how, |gated, down| {
            let (down, bias) = down.ok_or_else(|| CoreError::Unsupported {
                what: "a block without a down projection".into(),
                why: "a gated linear layer is no block".into(),
            })?;
            let params = MlpParams::new(gated, down, Orientation::OutIn).with_down_bias(bias);
            Ok(f(&LentMlp::new(cpu, params)?)?)
        })
    }
}

fn cpu() -> swiglu::Result<Cpu> {
    let Device::Cpu(cpu) = device::cpu_of_pytorch()? else { unreachable!("the name is the CPU's") };
    Ok(cpu)
}

/// Writes a block: y where it has a place, and gate and up, `[M, 2H]`, where they have one. Alone they have the same bits.
#[pyfunction]
pub(crate) fn host_block_forward(
    py: Python<'_>,
    act: Activation,
    x: Tensor,
    parts: [Option<Tensor>; 6],
    y: Option<Tensor>,
    kept: Option<Tensor>,
) -> Result<(), Failure> {
    let call = Call::new(act, parts)?;
    Ok(py
        .detach(|| with_dtype!(x.dtype, T => forward::<T>(&call, &x, y.as_ref(), kept.as_ref())))?)
}

fn forward<T: Element>(
    call: &Call,
    x: &Tensor,
    y: Option<&Tensor>,
    kept: Option<&Tensor>,
) -> swiglu::Result<()> {
    let options = CallOptions::default();
    // SAFETY: the caller of the Python function keeps the arrays as they are until it returns; what is written was made for
    // this call.
    let (x, y, kept) = unsafe {
        let kept = kept.map(|kept| rows_mut::<T>("gate and up", kept)).transpose()?;
        (x.rows::<T>("x")?, y.map(|y| rows_mut::<T>("out", y)).transpose()?, kept)
    };
    call.with::<T>(&cpu()?, |block| match (y, kept) {
        (Some(y), kept) => block.forward(x.view(), y, kept, &options),
        (None, Some(kept)) => block.pre_activations(x.view(), kept, &options),
        (None, None) => Ok(()),
    })
}

/// Writes the gradients of a block that have a place, from that of y: of x, of the weights of gate, up and down, which are added
/// to what is there if that is said, and of the biases, in f32, which are added to what is there too. Packed weights of gate and
/// up have their gradient in the place of gate's. Gate and up, `[M, 2H]`, stay as they are. `factors`: as `block_backward`'s.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's")]
pub(crate) fn host_block_backward(
    py: Python<'_>,
    act: Activation,
    x: Tensor,
    grad: Tensor,
    parts: [Option<Tensor>; 6],
    kept: Tensor,
    mut into: [Option<Tensor>; 4],
    mut biases: [Option<Tensor>; 3],
    factors: [Option<Tensor>; 2],
    add: bool,
) -> Result<(), Failure> {
    let call = Call::new(act, parts)?;
    let inputs = [x, grad, kept];
    let Weights(gate, up, down, ..) = &call.weights;
    for (i, place) in into.iter().enumerate() {
        let Some(place) = place else { continue };
        expect_apart(inputs.iter().chain([gate]).chain(up).chain(down), place)?;
        if !into[..i].iter().flatten().all(|other| other.is_apart(place)) {
            return Err(CoreError::Unsupported {
                what: "a gradient of the weights in the memory of another".into(),
                why: "give each weight a main_grad of its own".into(),
            }
            .into());
        }
    }
    if up.is_none() {
        split(&mut into[1..3], |both| both.row_halves("gradient of packed weights"))?;
        split(&mut biases[..2], |both| both.column_halves("gradient of packed biases"))?;
    }
    let accumulate = if add { Accumulate::Add } else { Accumulate::Overwrite };
    let ([row_scale, row_scale_grad], apart) = (factors, false);
    let places = Places { into, biases, row_scale, row_scale_grad, accumulate, apart };
    Ok(py.detach(|| with_dtype!(inputs[0].dtype, T => backward::<T>(&call, &inputs, &places)))?)
}

fn backward<T: Element>(
    call: &Call,
    [x, grad, kept]: &[Tensor; 3],
    Places { into, biases, row_scale, row_scale_grad, accumulate, .. }: &Places,
) -> swiglu::Result<()> {
    // SAFETY: as in `forward`; places lie apart from what is read and from each other, and those of biases were made for this call.
    unsafe {
        let (x, grad) = (x.rows::<T>("x")?, grad.rows::<T>("gradient of the output")?);
        let kept = kept.rows::<T>("gate and up")?;
        let weight = |i: usize| into[i].as_ref().map(|to| host_gradient_mut::<T>(to)).transpose();
        let bias = |i: usize| {
            let to = biases[i].as_ref();
            to.map(|to| rows_mut::<f32>("gradient of a bias", to)).transpose()
        };
        let mut sums = [bias(0)?, bias(1)?, bias(2)?];
        let mut places = GradientsMut::<T>::default();
        let dx = into[0].as_ref();
        places.dx = dx.map(|to| rows_mut::<T>("gradient of x", to)).transpose()?;
        (places.gate, places.up, places.down) = (weight(1)?, weight(2)?, weight(3)?);
        [places.gate_bias, places.up_bias, places.down_bias] =
            sums.each_mut().map(|sum| sum.as_mut().map(|sum| sum.row_mut(0)));
        let row_scale = row_scale.as_ref().map(|t| t.rows::<f32>("row scale")).transpose()?;
        let view = row_scale.as_ref().map(|rows| rows.view());
        places.row_scale = view.as_ref().map_or(RowScale::None, |m| RowScale::Rows(m.row(0)));
        let to = row_scale_grad.as_ref();
        let mut to = to.map(|to| rows_mut::<f32>("gradient of the row scale", to)).transpose()?;
        places.row_scale_grad = to.as_mut().map(|to| to.row_mut(0));
        places.accumulate = *accumulate;
        call.with::<T>(&cpu()?, |block| {
            block.backward(x.view(), grad.view(), kept.view(), places, &CallOptions::default())
        })
    }
}
