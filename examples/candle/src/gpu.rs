//! The block on a CUDA device: a layer over candle's weights where they lie, on candle's stream, into candle's memory.

use candle_core::cuda::cudarc::driver::{DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::cuda::{CudaDType, CudaStorage};
use candle_core::{Error, Layout, Result, Storage, Tensor, WithDType, bail};
use swiglu::cuda::{
    Cuda, DeviceGatedLinearParams, DeviceMatrixMut, DeviceMatrixRef, DeviceMlpParams,
};
use swiglu::{Activation, Element, Mlp, Orientation};

/// A layer over the weights of gate, up and down, on their device.
///
/// # Safety
/// The tensors outlive the layer and the work that is enqueued with it.
pub unsafe fn layer<T: Element + WithDType + CudaDType + DeviceRepr>(
    weights: [&Tensor; 3],
) -> Result<(Mlp, Cuda)> {
    let [gate, up, down] = weights.map(Tensor::storage_and_layout);
    let Storage::Cuda(first) = &*gate.0 else { bail!("a weight is not on a CUDA device") };
    let cuda = Cuda::new(first.device.cuda_stream().context().ordinal()).map_err(Error::wrap)?;
    let view = |(storage, layout): (&Storage, &Layout)| {
        let Storage::Cuda(storage) = storage else { bail!("a weight is not on a CUDA device") };
        let (address, [rows, cols]) = place::<T>(storage, layout)?;
        // SAFETY: candle's memory of the weight, which the caller keeps.
        unsafe { DeviceMatrixRef::<T>::from_raw(&cuda, address, rows, cols, cols) }
            .map_err(Error::wrap)
    };
    let (gate, up) = (view((&gate.0, gate.1))?, view((&up.0, up.1))?);
    let down = view((&down.0, down.1))?;
    let layer = || {
        let (lie, act) = (Orientation::OutIn, Activation::SWIGLU);
        let gated = DeviceGatedLinearParams::separate(gate, up, lie, act)?;
        // SAFETY: the caller's.
        unsafe { Mlp::from_device(&cuda, &DeviceMlpParams::new(gated, down, lie)?) }
    };
    Ok((layer().map_err(Error::wrap)?, cuda))
}

/// y in a new slice of candle's.
pub fn forward<T: Element + WithDType + CudaDType + DeviceRepr>(
    (mlp, cuda): (&Mlp, &Cuda),
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<CudaStorage> {
    let stream = storage.device.cuda_stream();
    let (from, [rows, cols]) = place::<T>(storage, layout)?;
    // SAFETY: every element is written below.
    let mut y = unsafe { storage.device.alloc::<T>(rows * cols) }?;
    {
        let (to, _written) = y.device_ptr_mut(&stream);
        // SAFETY: memory of candle's on this device, whose work is on this stream; the borrow of the stream ends here.
        let call = || unsafe {
            let stream = cuda.borrow_stream(stream.cu_stream() as u64)?;
            let x = DeviceMatrixRef::<T>::from_raw_trusted(cuda, from, rows, cols, cols)?;
            let y = DeviceMatrixMut::from_raw_trusted(cuda, to, rows, cols, cols)?;
            mlp.forward_on(&stream, x, y)
        };
        call().map_err(Error::wrap)?;
    }
    Ok(CudaStorage::wrap_cuda_slice(y, storage.device.clone()))
}

/// The address of a tensor's first element, and its rows of the last dimension.
fn place<T: CudaDType + DeviceRepr>(
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(u64, [usize; 2])> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, given {layout:?}; call contiguous()");
    };
    let cols = layout.dims().last().copied().unwrap_or(1);
    // All work is on candle's one stream of the device, so that nothing has to be waited for.
    let stream = storage.device.cuda_stream();
    let (address, _read) = storage.as_cuda_slice::<T>()?.device_ptr(&stream);
    Ok((address + (start * size_of::<T>()) as u64, [(end - start) / cols.max(1), cols]))
}
