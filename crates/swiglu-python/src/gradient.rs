//! The gradient of a weight, added to what an array holds: the products of a backward pass that others compute.

use pyo3::prelude::*;
use swiglu::cuda::{Cuda, DeviceGradientMut, DeviceScratch};
use swiglu::{
    Accumulate, CoreError, Cpu, DType, Device, Element, GradientMut, MatrixMut, with_dtype,
};

use crate::device;
use crate::elementwise::Place;
use crate::error::Failure;
use crate::tensor::{Tensor, matrix, matrix_mut};

const INTO: &str = "gradient of the weights";

fn how(overwrite: bool) -> Accumulate {
    if overwrite { Accumulate::Overwrite } else { Accumulate::Add }
}

/// Refuses a place where a factor lies: what is read would be written meanwhile.
pub(crate) fn expect_apart<'a>(
    factors: impl IntoIterator<Item = &'a Tensor>,
    into: &Tensor,
) -> Result<(), CoreError> {
    if factors.into_iter().all(|factor| factor.is_apart(into)) {
        return Ok(());
    }
    let what = format!("a {INTO} in the memory of a factor");
    Err(CoreError::Unsupported { what, why: "give it memory of its own".into() })
}

/// into += gradsᵀ·inputs in the host's memory, or = where it is overwritten: `[N, K]` of f32 or of the factors' type, from
/// `[M, N]` and `[M, K]`.
#[pyfunction]
pub(crate) fn weight_gradient(
    py: Python<'_>,
    grads: Tensor,
    inputs: Tensor,
    into: Tensor,
    overwrite: bool,
) -> Result<(), Failure> {
    expect_apart([&grads, &inputs], &into)?;
    let Device::Cpu(cpu) = device::cpu_of_pytorch()? else { unreachable!("the name is the CPU's") };
    Ok(py.detach(|| {
        with_dtype!(grads.dtype, T => on_host::<T>(&cpu, [&grads, &inputs], &into, how(overwrite)))
    })?)
}

fn on_host<T: Element>(
    cpu: &Cpu,
    [grads, inputs]: [&Tensor; 2],
    into: &Tensor,
    how: Accumulate,
) -> swiglu::Result<()> {
    // SAFETY: the caller of the Python function keeps the arrays as they are until it returns; the place lies apart.
    unsafe {
        let (grads, inputs) =
            (grads.rows::<T>("gradient of the results")?, inputs.rows::<T>("inputs")?);
        Ok(cpu.weight_gradient(grads.view(), inputs.view(), host_gradient_mut(into)?, how)?)
    }
}

/// The place of a weight's gradient in the host's memory: of f32 or of T.
///
/// # Safety
/// As [`rows_mut`].
pub(crate) unsafe fn host_gradient_mut<T: Element>(
    into: &Tensor,
) -> Result<GradientMut<'_, T>, CoreError> {
    // SAFETY: the caller's.
    Ok(unsafe {
        match into.dtype {
            DType::F32 => GradientMut::F32(rows_mut(INTO, into)?),
            _ => GradientMut::Element(rows_mut(INTO, into)?),
        }
    })
}

/// # Safety
/// The description is true of memory of the host that nothing else uses while the result lives.
pub(crate) unsafe fn rows_mut<'a, V: Element>(
    what: &str,
    into: &'a Tensor,
) -> Result<MatrixMut<'a, V>, CoreError> {
    into.expect_type::<V>(what)?;
    let [rows, cols, stride] = into.strided(what)?;
    if rows == 0 || cols == 0 {
        return MatrixMut::with_stride(&mut [], rows, cols, cols);
    }
    if !into.address.is_multiple_of(align_of::<V>()) {
        let what = format!("{what} that begins between two elements");
        return Err(CoreError::Unsupported { what, why: "kernels write whole elements".into() });
    }
    let len = (rows - 1) * stride + cols;
    // SAFETY: the caller's: the array begins at the address, which is aligned, and this is its extent.
    let data = unsafe { std::slice::from_raw_parts_mut(into.address as *mut V, len) };
    MatrixMut::with_stride(data, rows, cols, stride)
}

/// Bytes of scratch memory of `cuda_weight_gradient`.
#[pyfunction]
pub(crate) fn cuda_weight_gradient_bytes(ordinal: usize) -> Result<usize, Failure> {
    Ok(device::cuda(ordinal)?.weight_gradient_bytes())
}

/// Enqueues what `weight_gradient` computes on a stream.
#[pyfunction]
pub(crate) fn cuda_weight_gradient(
    place: Place,
    grads: Tensor,
    inputs: Tensor,
    into: Tensor,
    overwrite: bool,
    scratch: (u64, usize),
) -> Result<(), Failure> {
    expect_apart([&grads, &inputs], &into)?;
    with_dtype!(grads.dtype, T => enqueue::<T>(place, [&grads, &inputs], &into, how(overwrite), scratch))
}

fn enqueue<T: Element>(
    (ordinal, raw): Place,
    [grads, inputs]: [&Tensor; 2],
    into: &Tensor,
    how: Accumulate,
    (scratch, bytes): (u64, usize),
) -> Result<(), Failure> {
    let cuda = device::cuda(ordinal)?;
    // SAFETY: the stream's handle, and the tensors' addresses, extents and device are what their library says, which orders
    // work on the stream and keeps memory that it uses; the scratch memory is nobody else's until that work is done.
    unsafe {
        let stream = cuda.borrow_stream(raw)?;
        let _captured = stream.without_loading()?;
        let grads = matrix::<T>(&cuda, "gradient of the results", grads)?;
        let inputs = matrix::<T>(&cuda, "inputs", inputs)?;
        let into = gradient_mut::<T>(&cuda, into)?;
        let mut scratch = DeviceScratch::from_raw(&cuda, scratch, bytes)?;
        cuda.weight_gradient(&stream, grads, inputs, into, how, Some(&mut scratch))?;
    }
    Ok(())
}

/// The place of a weight's gradient: of f32 or of T.
///
/// # Safety
/// As [`matrix_mut`].
pub(crate) unsafe fn gradient_mut<'a, T: Element>(
    cuda: &Cuda,
    into: &'a Tensor,
) -> Result<DeviceGradientMut<'a, T>, Failure> {
    // SAFETY: the caller's.
    Ok(unsafe {
        match into.dtype {
            DType::F32 => DeviceGradientMut::F32(matrix_mut::<f32>(cuda, INTO, into)?),
            _ => DeviceGradientMut::Element(matrix_mut::<T>(cuda, INTO, into)?),
        }
    })
}
