//! A block that is trained, over tensors where they lie on a CUDA device: each pass is one call.

use std::sync::Arc;

use pyo3::prelude::*;
use swiglu::cuda::{
    BorrowedStream, DeviceGradientsMut, DeviceKept, DeviceMatrixMut, DeviceMatrixRef, DeviceScratch,
};
use swiglu::{Accumulate, CoreError, Element, SavePolicy, with_dtype};

use crate::activation::{Activation, How};
use crate::device;
use crate::dlpack::There;
use crate::elementwise::Place;
use crate::error::Failure;
use crate::gradient::{expect_apart, gradient_mut};
use crate::layer::{Layer, either};
use crate::lent::{OWN_SCRATCH, lent};
use crate::tensor::{Tensor, matrix, matrix_mut};
use crate::weights::Weights;

/// A call of a layer over weights where they lie, on a stream. What Python gives beside it: a function that makes a tensor of so
/// many bytes on the device.
struct Call<'a, 'py> {
    stream: Arc<BorrowedStream>,
    /// Whether the stream stays, with scratch memory of its own.
    stays: bool,
    layer: Arc<Layer>,
    room: &'a Bound<'py, PyAny>,
}

impl<'a, 'py> Call<'a, 'py> {
    fn new(
        (ordinal, raw): Place,
        act: Activation,
        weights: &Weights,
        room: &'a Bound<'py, PyAny>,
    ) -> Result<Self, Failure> {
        let kept = device::kept(ordinal, raw);
        let stays = kept.is_some();
        let stream = match kept {
            Some(stream) => stream,
            // SAFETY: the stream's handle is what its library says.
            None => Arc::new(unsafe { device::cuda(ordinal)?.borrow_stream(raw) }?),
        };
        let how =
            How { act: act.0, numerics: None, arrangement: swiglu::Arrangement::PackedGateFirst };
        let layer = lent(&stream, how, weights)?;
        Ok(Self { stream, stays, layer, room })
    }

    /// Runs `enqueue` with so many bytes of scratch memory: the stream's, where that has some and no graph would refer to it, or
    /// what Python makes, which keeps it for work that was enqueued before.
    fn with_scratch(
        &self,
        bytes: usize,
        enqueue: impl FnOnce(Option<&mut DeviceScratch<'_>>) -> swiglu::Result<()>,
    ) -> Result<(), Failure> {
        let _captured = self.stream.without_loading()?;
        if bytes == 0 || self.stays && bytes <= OWN_SCRATCH && !self.stream.is_capturing()? {
            return Ok(enqueue(None)?);
        }
        let made = self.room.call1((bytes,))?;
        let address: u64 = made.call_method0("data_ptr")?.extract()?;
        // SAFETY: memory of this device, made for this call; its library gives it to nobody before the stream's work is done.
        let mut scratch = unsafe { DeviceScratch::from_raw(self.stream.cuda(), address, bytes) }?;
        Ok(enqueue(Some(&mut scratch))?)
    }

    /// # Safety
    /// As [`matrix`].
    unsafe fn read<'t, T: Element>(
        &self,
        what: &str,
        tensor: &'t Tensor,
    ) -> Result<DeviceMatrixRef<'t, T>, Failure> {
        // SAFETY: the caller's.
        unsafe { matrix(self.stream.cuda(), what, tensor) }
    }

    /// # Safety
    /// As [`matrix_mut`].
    unsafe fn write<'t, T: Element>(
        &self,
        what: &str,
        tensor: &'t Tensor,
    ) -> Result<DeviceMatrixMut<'t, T>, Failure> {
        // SAFETY: the caller's.
        unsafe { matrix_mut(self.stream.cuda(), what, tensor) }
    }

    /// Both halves of a matrix of gate's and up's columns.
    ///
    /// # Safety
    /// As [`matrix_mut`].
    unsafe fn halves<'t, T: Element>(
        &self,
        what: &str,
        [gate, up]: &'t [Tensor; 2],
    ) -> Result<[DeviceMatrixMut<'t, T>; 2], Failure> {
        // SAFETY: the caller's; the halves lie apart.
        unsafe { Ok([self.write(what, gate)?, self.write(what, up)?]) }
    }
}

fn of(there: There) -> Tensor {
    there.0
}

/// The weights and biases of a block.
pub(crate) fn weights(parts: [Option<Tensor>; 6]) -> Result<Weights, CoreError> {
    let [gate, up, down, gate_bias, up_bias, down_bias] = parts;
    let gate = gate.ok_or_else(|| CoreError::Unsupported {
        what: "a block without weights of the gate".into(),
        why: "every block has them".into(),
    })?;
    Ok(Weights(gate, up, down, gate_bias, up_bias, down_bias))
}

/// Enqueues a block: y where it has a place, and gate and up, `[M, 2H]`, where they have one. Alone they have the same bits.
#[pyfunction]
pub(crate) fn block_forward(
    place: Place,
    act: Activation,
    x: There,
    parts: [Option<There>; 6],
    y: Option<There>,
    kept: Option<There>,
    room: &Bound<'_, PyAny>,
) -> Result<(), Failure> {
    let weights = weights(parts.map(|t| t.map(of)))?;
    let call = Call::new(place, act, &weights, room)?;
    let (x, y) = (x.0, y.map(of));
    let kept = kept.map(|kept| kept.0.column_halves("gate and up")).transpose()?;
    with_dtype!(x.dtype, T => forward::<T>(&call, &x, y.as_ref(), kept.as_ref()))
}

fn forward<T: Element>(
    call: &Call<'_, '_>,
    x: &Tensor,
    y: Option<&Tensor>,
    kept: Option<&[Tensor; 2]>,
) -> Result<(), Failure> {
    // SAFETY: the tensors' addresses, extents and device are what their library says, which orders work on the stream and keeps
    // memory that it uses; what is written was made for this call.
    let (x, y, kept) = unsafe {
        let x = call.read::<T>("x", x)?;
        let y = y.map(|y| call.write::<T>("out", y)).transpose()?;
        let kept = kept.map(|kept| call.halves::<T>("gate and up", kept)).transpose()?;
        (x, y, kept)
    };
    let policy =
        if y.is_some() && kept.is_some() { SavePolicy::Save } else { SavePolicy::Recompute };
    let (layer, stream) = (&call.layer, &*call.stream);
    let bytes = either!(layer, layer => layer.training_bytes::<T>(x.rows(), policy))?;
    call.with_scratch(bytes, |scratch| match (y, kept) {
        (Some(y), Some(kept)) => {
            either!(layer, layer => layer.forward_saving_on::<T>(stream, x, y, kept, scratch))
        }
        (None, Some(kept)) => {
            either!(layer, layer => layer.pre_activations_on::<T>(stream, x, kept, scratch))
        }
        (Some(y), None) => match scratch {
            Some(scratch) => {
                either!(layer, layer => layer.forward_with::<T>(stream, x, y, scratch))
            }
            None => either!(layer, layer => layer.forward_on::<T>(stream, x, y)),
        },
        (None, None) => Ok(()),
    })
}

/// Enqueues the gradients of a block that have a place, from that of y: of x, of the weights of gate, up and down, which are added
/// to what is there if that is said, and of the biases, in f32, which are added to what is there too. Packed weights of gate and up
/// have their gradient in the place of gate's. Gate and up, `[M, 2H]`, stay as they are unless they are `consumed`. `factors`: what
/// rows of y were multiplied with before that gradient, and a place for the gradients of these, M values of f32 each.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's")]
pub(crate) fn block_backward(
    place: Place,
    act: Activation,
    x: There,
    grad: There,
    parts: [Option<There>; 6],
    kept: There,
    consumed: bool,
    into: [Option<There>; 4],
    biases: [Option<There>; 3],
    factors: [Option<There>; 2],
    add: bool,
    room: &Bound<'_, PyAny>,
) -> Result<(), Failure> {
    let weights = weights(parts.map(|t| t.map(of)))?;
    let call = Call::new(place, act, &weights, room)?;
    let (x, grad, kept, into) = (x.0, grad.0, kept.0, into.map(|t| t.map(of)));
    let borrowed = (!consumed).then_some(&kept);
    for place in into.iter().flatten() {
        let weights = [&weights.0].into_iter().chain(&weights.1).chain(&weights.2);
        expect_apart([&x, &grad].into_iter().chain(weights).chain(borrowed), place)?;
    }
    let (mut into, mut biases) = (into, biases.map(|t| t.map(of)));
    // Two tensors may lie one behind the other by chance, which is not to change a bit.
    let apart = weights.1.is_some();
    if !apart {
        split(&mut into[1..3], |both| both.row_halves("gradient of packed weights"))?;
        split(&mut biases[..2], |both| both.column_halves("gradient of packed biases"))?;
    }
    let kept = kept.column_halves("gate and up")?;
    let accumulate = if add { Accumulate::Add } else { Accumulate::Overwrite };
    let inputs = Inputs { x, grad, kept, consumed };
    let [row_scale, row_scale_grad] = factors.map(|t| t.map(of));
    let places = Places { into, biases, row_scale, row_scale_grad, accumulate, apart };
    with_dtype!(inputs.x.dtype, T => backward::<T>(&call, &inputs, &places))
}

/// Gives gate and up each its half of what the first has.
pub(crate) fn split(
    places: &mut [Option<Tensor>],
    halves: impl Fn(&Tensor) -> Result<[Tensor; 2], CoreError>,
) -> Result<(), CoreError> {
    if let [gate, up] = places
        && let Some(both) = gate.take()
    {
        let [first, second] = halves(&both)?;
        (*gate, *up) = (Some(first), Some(second));
    }
    Ok(())
}

/// What a backward pass reads; gate and up may be `consumed`.
struct Inputs {
    x: Tensor,
    grad: Tensor,
    kept: [Tensor; 2],
    consumed: bool,
}

/// What it writes: the gradients of x, gate, up and down, of their biases, and of rows' factors, with these.
pub(crate) struct Places {
    pub(crate) into: [Option<Tensor>; 4],
    pub(crate) biases: [Option<Tensor>; 3],
    pub(crate) row_scale: Option<Tensor>,
    pub(crate) row_scale_grad: Option<Tensor>,
    pub(crate) accumulate: Accumulate,
    /// Whether weights of gate and of up are two tensors, wherever these lie on a device.
    pub(crate) apart: bool,
}

fn backward<T: Element>(
    call: &Call<'_, '_>,
    Inputs { x, grad, kept, consumed }: &Inputs,
    Places { into, biases, row_scale, row_scale_grad, accumulate, apart }: &Places,
) -> Result<(), Failure> {
    let cuda = call.stream.cuda();
    // SAFETY: as in `forward`; gate and up are nobody's any more where they are consumed.
    let (x, grad, kept, into) = unsafe {
        let weight = |i: usize| into[i].as_ref().map(|to| gradient_mut::<T>(cuda, to)).transpose();
        let bias = |i: usize| {
            let to = biases[i].as_ref();
            to.map(|to| call.write::<f32>("gradient of a bias", to)).transpose()
        };
        let mut places =
            DeviceGradientsMut::default().with_accumulate(*accumulate).with_apart(*apart);
        let dx = into[0].as_ref();
        places.dx = dx.map(|to| call.write::<T>("gradient of x", to)).transpose()?;
        (places.gate, places.up, places.down) = (weight(1)?, weight(2)?, weight(3)?);
        (places.gate_bias, places.up_bias, places.down_bias) = (bias(0)?, bias(1)?, bias(2)?);
        places.row_scale =
            row_scale.as_ref().map(|t| call.read::<f32>("row scale", t)).transpose()?;
        let to = row_scale_grad.as_ref();
        places.row_scale_grad =
            to.map(|to| call.write::<f32>("gradient of the row scale", to)).transpose()?;
        let kept: DeviceKept<'_, T> = match consumed {
            true => call.halves("gate and up", kept)?.into(),
            false => [call.read("gate", &kept[0])?, call.read("up", &kept[1])?].into(),
        };
        (call.read::<T>("x", x)?, call.read::<T>("gradient of the output", grad)?, kept, places)
    };
    let layer = &call.layer;
    let bytes = either!(layer, layer => layer.backward_bytes::<T>(&grad, &kept, &into))?;
    call.with_scratch(bytes, |scratch| {
        either!(layer, layer => layer.backward_on::<T>(&call.stream, x, grad, kept, into, scratch))
    })
}

/// Enqueues the gradients of gate and up, `[M, 2H]`, from that of a block's result.
#[pyfunction]
pub(crate) fn block_backward_gate_up(
    place: Place,
    act: Activation,
    grad: There,
    parts: [Option<There>; 6],
    kept: There,
    into: There,
    room: &Bound<'_, PyAny>,
) -> Result<(), Failure> {
    let weights = weights(parts.map(|t| t.map(of)))?;
    let call = Call::new(place, act, &weights, room)?;
    let kept = kept.0.column_halves("gate and up")?;
    let into = into.0.column_halves("gradients of gate and up")?;
    with_dtype!(grad.0.dtype, T => backward_gate_up::<T>(&call, &grad.0, &kept, &into))
}

fn backward_gate_up<T: Element>(
    call: &Call<'_, '_>,
    grad: &Tensor,
    kept: &[Tensor; 2],
    into: &[Tensor; 2],
) -> Result<(), Failure> {
    // SAFETY: as in `forward`.
    let (grad, kept, into) = unsafe {
        let kept = [call.read::<T>("gate", &kept[0])?, call.read("up", &kept[1])?];
        (call.read("grad", grad)?, kept, call.halves("gradients of gate and up", into)?)
    };
    let layer = &call.layer;
    let bytes = either!(layer, layer => layer.backward_gate_up_bytes::<T>(grad.rows()))?;
    call.with_scratch(bytes, |scratch| {
        either!(layer, layer => {
            layer.backward_gate_up_on::<T>(&call.stream, grad, kept, into, None, scratch)
        })
    })
}
