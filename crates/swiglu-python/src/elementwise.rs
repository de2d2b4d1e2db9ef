//! h = act(gate, up), and its gradient.

use pyo3::prelude::*;
use swiglu::cuda::{BorrowedStream, Cuda, DeviceGateUp, DeviceGateUpMut};
use swiglu::{
    Arrangement, CoreError, Device, Element, GateUpMut, GateUpRef, GatedActivation, Numerics,
    with_dtype,
};

use crate::activation::{Activation, How};
use crate::alike::{Alike, done};
use crate::array::Array;
use crate::device;
use crate::dlpack::Memory;
use crate::error::Failure;
use crate::tensor::{Extents, Rows, Tensor, matrix, matrix_mut};

/// The shape of h, for inputs of `shape` that hold gate and up in this arrangement.
fn result_shape(
    gate: &Tensor,
    up: Option<&Tensor>,
    how: Arrangement,
) -> Result<Extents<usize>, CoreError> {
    let mut shape = gate.shape.clone();
    if let Some(up) = up
        && up.shape != gate.shape
    {
        let (expected, given) = (gate.shape_text(), up.shape_text());
        return Err(CoreError::Shape { what: "up".into(), expected, given });
    }
    if how.is_packed()
        && let Some(last) = shape.last_mut()
    {
        if !last.is_multiple_of(2) {
            let (expected, given) = ("[..., 2H]: an even number of features", gate.shape_text());
            let what = "packed gate and up".into();
            return Err(CoreError::Shape { what, expected: expected.into(), given });
        }
        *last /= 2;
    }
    Ok(shape)
}

fn expect_arranged(how: Arrangement, up: bool) -> Result<(), CoreError> {
    if how.is_packed() != up {
        return Ok(());
    }
    let (what, given) = ("arrangement", how.to_string());
    let expected = match up {
        true => "separate, for gate and up in two arrays",
        false => "gate-first, up-first or interleaved-G, for gate and up in one array",
    };
    Err(CoreError::OutOfRange { what, given, expected: expected.into() })
}

/// Computes h in the host's memory: into `out`, or as a new array; with `of_pytorch` on its threads.
#[pyfunction]
#[pyo3(signature = (act, numerics, arrangement, gate, up=None, out=None, of_pytorch=false))]
pub(crate) fn activation(
    py: Python<'_>,
    act: Activation,
    numerics: Option<&str>,
    arrangement: Option<&str>,
    gate: Tensor,
    up: Option<Tensor>,
    out: Option<Tensor>,
    of_pytorch: bool,
) -> Result<Option<Array>, Failure> {
    let how = How::named(&act, numerics, arrangement)?;
    expect_arranged(how.arrangement, up.is_some())?;
    let shape = result_shape(&gate, up.as_ref(), how.arrangement)?;
    let device = if of_pytorch { device::cpu_of_pytorch() } else { device::named("cpu") }?;
    let act = on_host(&device, how);
    let (made, out) = match out {
        Some(out) => (None, out),
        None => {
            let made = with_dtype!(gate.dtype, T => Array::zeros::<T>(shape.to_vec()))?;
            let out = made.tensor();
            (Some(made), out)
        }
    };
    if out.shape != shape {
        let (expected, given) = (format!("{shape:?}"), out.shape_text());
        return Err(CoreError::Shape { what: "out".into(), expected, given }.into());
    }
    let (how, up) = (how.arrangement, up.as_ref());
    py.detach(|| with_dtype!(gate.dtype, T => compute::<T>(&act, how, &gate, up, &out)))?;
    Ok(made)
}

fn compute<T: Element>(
    act: &GatedActivation,
    how: Arrangement,
    gate: &Tensor,
    up: Option<&Tensor>,
    out: &Tensor,
) -> swiglu::Result<()> {
    // SAFETY: the caller of the Python function keeps the arrays as they are until it returns.
    unsafe {
        let rows = Inputs::<T>::of(how, gate, up)?;
        let inputs = rows.view(how)?;
        let all: Vec<&Tensor> = std::iter::once(gate).chain(up).collect();
        out.fill::<T>("out", &all, |out| act.forward_into(inputs, out))
    }
}

/// Gate and up as rows.
struct Inputs<'a, T>(Rows<'a, T>, Option<Rows<'a, T>>);

impl<'a, T: Element> Inputs<'a, T> {
    /// # Safety
    /// As [`Tensor::rows`].
    unsafe fn of(
        how: Arrangement,
        gate: &'a Tensor,
        up: Option<&'a Tensor>,
    ) -> Result<Self, CoreError> {
        // SAFETY: the caller's.
        unsafe {
            let first = gate.rows::<T>(if how.is_packed() { "gate and up" } else { "gate" })?;
            Ok(Self(first, up.map(|up| up.rows::<T>("up")).transpose()?))
        }
    }

    fn view(&self, how: Arrangement) -> Result<GateUpRef<'_, T>, CoreError> {
        match &self.1 {
            Some(second) => GateUpRef::separate(self.0.view(), second.view()),
            None => GateUpRef::packed(self.0.view(), how),
        }
    }
}

/// Computes the gradients of gate and up, tensors of PyTorch's in the host's memory: into `grad_gate` and `grad_up`, or both
/// into `grad_gate`, arranged as the inputs.
#[pyfunction]
pub(crate) fn activation_backward(
    py: Python<'_>,
    act: Activation,
    numerics: Option<&str>,
    arrangement: Option<&str>,
    grad: Tensor,
    gate: Tensor,
    up: Option<Tensor>,
    grad_gate: Tensor,
    grad_up: Option<Tensor>,
) -> Result<(), Failure> {
    let how = How::named(&act, numerics, arrangement)?;
    expect_arranged(how.arrangement, up.is_some())?;
    expect_arranged(how.arrangement, grad_up.is_some())?;
    let act = on_host(&device::cpu_of_pytorch()?, how);
    let how = how.arrangement;
    let (inputs, grads) = ((&gate, up.as_ref()), (&grad_gate, grad_up.as_ref()));
    py.detach(
        || with_dtype!(gate.dtype, T => differentiate::<T>(&act, how, &grad, inputs, grads)),
    )?;
    Ok(())
}

fn differentiate<T: Element>(
    act: &GatedActivation,
    how: Arrangement,
    grad: &Tensor,
    (gate, up): Pair<'_>,
    (grad_gate, grad_up): Pair<'_>,
) -> swiglu::Result<()> {
    if grad_up.is_some_and(|grad_up| !grad_up.is_apart(grad_gate)) {
        let what = "gradients of gate and up in the same memory".into();
        let why = "each is written apart; give them as one array in the arrangement of the inputs";
        return Err(CoreError::Unsupported { what, why: why.into() }.into());
    }
    let read: Vec<&Tensor> = [grad, gate].into_iter().chain(up).collect();
    // SAFETY: as in `compute`; the gradients lie apart from what is read, or are computed beside it.
    unsafe {
        let dh = grad.rows::<T>("gradient of the output")?;
        let rows = Inputs::<T>::of(how, gate, up)?;
        let inputs = rows.view(how)?;
        let what = "gradient of the gate";
        grad_gate.fill::<T>(what, &read, |first| match grad_up {
            Some(grad_up) => grad_up.fill::<T>("gradient of up", &read, |second| {
                let grads = GateUpMut::separate(first, second)?;
                act.backward_into(dh.view(), inputs, grads)
            }),
            None => act.backward_into(dh.view(), inputs, GateUpMut::packed(first, how)?),
        })
    }
}

/// A CUDA device and one of its streams, as numbers.
pub(crate) type Place = (usize, u64);

/// Enqueues h = act(gate, up) on a stream.
///
/// # Errors
/// As the library's.
#[pyfunction]
pub(crate) fn cuda_activation(
    place: Place,
    act: Activation,
    numerics: Option<&str>,
    arrangement: Option<&str>,
    gate: Tensor,
    up: Option<Tensor>,
    out: Tensor,
) -> Result<(), Failure> {
    let how = How::named(&act, numerics, arrangement)?;
    // SAFETY: the stream's handle is what its library says.
    let stream = unsafe { device::cuda(place.0)?.borrow_stream(place.1) }?;
    with_dtype!(gate.dtype, T => enqueue::<T>(&stream, how, &gate, up.as_ref(), &out))
}

/// h for tensors that are as kernels take them: of one type and memory, and on a CUDA device, where it is enqueued on the
/// current stream, dense in the end and nowhere the same memory. `false` where anything speaks against it, and nothing was
/// done.
pub(crate) fn activation_at_once(
    py: Python<'_>,
    how: How,
    tensors: &Alike,
) -> Result<bool, Failure> {
    let (inputs, out) = (tensors.inputs(), &tensors.outputs()[0]);
    let (gate, up) = (&inputs[0], inputs.get(1));
    if !result_shape(gate, up, how.arrangement).is_ok_and(|shape| shape == out.shape) {
        return Ok(false);
    }
    done(match tensors.memory {
        Memory::Host => at_once_on_host(py, how, out, |act| {
            expect_arranged(how.arrangement, up.is_some())?;
            with_dtype!(gate.dtype, T => compute::<T>(act, how.arrangement, gate, up, out))
        }),
        Memory::Cuda(_) => {
            let Some(stream) = tensors.current_stream() else { return Ok(false) };
            with_dtype!(gate.dtype, T => enqueue::<T>(&stream, how, gate, up, out))
        }
    })
}

/// The gradients of gate and up for tensors that are as kernels take them, as [`activation_at_once`]. `False` where anything
/// speaks against it, and nothing was done.
#[pyfunction]
pub(crate) fn activation_backward_at_once(
    act: &Bound<'_, Activation>,
    numerics: Option<&str>,
    arrangement: Option<&str>,
    grad: &Bound<'_, PyAny>,
    gate: &Bound<'_, PyAny>,
    up: Option<&Bound<'_, PyAny>>,
    grad_gate: &Bound<'_, PyAny>,
    grad_up: Option<&Bound<'_, PyAny>>,
) -> Result<bool, Failure> {
    let (inputs, outputs) =
        ([grad, gate].into_iter().chain(up), [grad_gate].into_iter().chain(grad_up));
    let tensors = Alike::of(inputs).and_then(|inputs| inputs.writing(outputs));
    let Some(tensors) = tensors else { return Ok(false) };
    let Ok(how) = How::named(act.get(), numerics, arrangement) else { return Ok(false) };
    let (inputs, outputs) = (tensors.inputs(), tensors.outputs());
    let (grad, inputs, grads) =
        (&inputs[0], (&inputs[1], inputs.get(2)), (&outputs[0], outputs.get(1)));
    let fits = result_shape(inputs.0, inputs.1, how.arrangement)
        .is_ok_and(|shape| shape == grad.shape)
        && outputs.iter().all(|grads| grads.shape == inputs.0.shape);
    if !fits {
        return Ok(false);
    }
    done(match tensors.memory {
        Memory::Host => at_once_on_host(act.py(), how, grads.0, |act| {
            let how = how.arrangement;
            expect_arranged(how, inputs.1.is_some())?;
            expect_arranged(how, grads.1.is_some())?;
            with_dtype!(grad.dtype, T => differentiate::<T>(act, how, grad, inputs, grads))
        }),
        Memory::Cuda(_) => {
            let Some(stream) = tensors.current_stream() else { return Ok(false) };
            with_dtype!(grad.dtype, T => enqueue_backward::<T>(&stream, how, grad, inputs, grads))
        }
    })
}

/// Elements of a result that are computed sooner than the interpreter is left and taken again.
const AT_ONCE: usize = 1 << 12;

fn at_once_on_host(
    py: Python<'_>,
    how: How,
    out: &Tensor,
    compute: impl Fn(&GatedActivation) -> swiglu::Result<()> + Send + Sync,
) -> Result<(), Failure> {
    let act = on_host(&device::cpu_of_pytorch()?, how);
    match out.shape.iter().product::<usize>() <= AT_ONCE {
        true => compute(&act),
        false => py.detach(|| compute(&act)),
    }?;
    Ok(())
}

fn on_host(device: &Device, how: How) -> GatedActivation {
    let act = GatedActivation::new(device, how.act);
    match how.numerics {
        Some(numerics) => act.with_numerics(numerics),
        None => act,
    }
}

fn enqueue<T: Element>(
    stream: &BorrowedStream,
    how: How,
    gate: &Tensor,
    up: Option<&Tensor>,
    out: &Tensor,
) -> Result<(), Failure> {
    let cuda = stream.cuda();
    expect_arranged(how.arrangement, up.is_some())?;
    let numerics = how.numerics.unwrap_or(Numerics::default_for(T::DTYPE));
    let _captured = stream.without_loading()?;
    // SAFETY: the tensors' addresses, extents and device are what their library says, which orders work on the stream
    // and keeps memory that it uses.
    unsafe {
        let inputs = gate_up::<T>(cuda, how.arrangement, gate, up)?;
        let out = matrix_mut::<T>(cuda, "out", out)?;
        cuda.activation(stream, &how.act, numerics, inputs, out)?;
    }
    Ok(())
}

/// Enqueues the gradients of gate and up on a stream: into `grad_gate` and `grad_up`, or both into `grad_gate`, arranged as
/// the inputs.
#[pyfunction]
pub(crate) fn cuda_activation_backward(
    place: Place,
    act: Activation,
    numerics: Option<&str>,
    arrangement: Option<&str>,
    grad: Tensor,
    gate: Tensor,
    up: Option<Tensor>,
    grad_gate: Tensor,
    grad_up: Option<Tensor>,
) -> Result<(), Failure> {
    let how = How::named(&act, numerics, arrangement)?;
    let inputs = (&gate, up.as_ref());
    let grads = (&grad_gate, grad_up.as_ref());
    // SAFETY: the stream's handle is what its library says.
    let stream = unsafe { device::cuda(place.0)?.borrow_stream(place.1) }?;
    with_dtype!(gate.dtype, T => enqueue_backward::<T>(&stream, how, &grad, inputs, grads))
}

type Pair<'a> = (&'a Tensor, Option<&'a Tensor>);

fn enqueue_backward<T: Element>(
    stream: &BorrowedStream,
    how: How,
    grad: &Tensor,
    inputs: Pair<'_>,
    grads: Pair<'_>,
) -> Result<(), Failure> {
    let cuda = stream.cuda();
    expect_arranged(how.arrangement, inputs.1.is_some())?;
    expect_arranged(how.arrangement, grads.1.is_some())?;
    let numerics = how.numerics.unwrap_or(Numerics::default_for(T::DTYPE));
    let _captured = stream.without_loading()?;
    // SAFETY: as in `enqueue`.
    unsafe {
        let grad = matrix::<T>(cuda, "gradient of the output", grad)?;
        let inputs = gate_up::<T>(cuda, how.arrangement, inputs.0, inputs.1)?;
        let first = matrix_mut::<T>(cuda, "gradient of the gate", grads.0)?;
        let grads = match grads.1 {
            Some(up) => {
                let up = matrix_mut::<T>(cuda, "gradient of up", up)?;
                DeviceGateUpMut::separate(first, up)?
            }
            None => DeviceGateUpMut::packed(first, how.arrangement)?,
        };
        cuda.activation_backward(stream, &how.act, numerics, grad, inputs, grads)?;
    }
    Ok(())
}

/// # Safety
/// As [`matrix`].
unsafe fn gate_up<'a, T: Element>(
    cuda: &Cuda,
    how: Arrangement,
    gate: &'a Tensor,
    up: Option<&'a Tensor>,
) -> Result<DeviceGateUp<'a, T>, Failure> {
    // SAFETY: the caller's.
    unsafe {
        let first = matrix::<T>(cuda, "gate", gate)?;
        Ok(match up {
            Some(up) => DeviceGateUp::separate(first, matrix::<T>(cuda, "up", up)?)?,
            None => DeviceGateUp::packed(first, how)?,
        })
    }
}
