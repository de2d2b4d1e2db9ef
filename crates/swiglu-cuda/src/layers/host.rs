//! Calls over matrices of the host.

use swiglu_core::{Element, MatrixMut, MatrixRef};

use super::weights::padded;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;

/// Lets `enqueue` compute `out` from one input, or two, in memory of the device, where rows begin at multiples of 16
/// bytes: their copies are enqueued around it, and the stream is waited for once.
pub(super) fn through_device<T: Element>(
    cuda: &Cuda,
    inputs: (MatrixRef<'_, T>, Option<MatrixRef<'_, T>>),
    out: MatrixMut<'_, T>,
    enqueue: impl FnOnce(
        &Stream,
        DeviceMatrixRef<'_, T>,
        Option<DeviceMatrixRef<'_, T>>,
        DeviceMatrixMut<'_, T>,
    ) -> Result<()>,
) -> Result<()> {
    let (first, second) = inputs;
    let shapes = [Some(out.shape()), Some(first.shape()), second.map(|m| m.shape())];
    let total = shapes.iter().flatten().map(bytes::<T>).fold(0, usize::saturating_add);
    let stream = cuda.stream();
    // The sources are read until the stream has been waited for, which a capture would refuse.
    let _held = stream.raw_stream().hold_over()?;
    cuda.with_staging(&stream, total, |mut ptr| {
        let mut place = |shape: [usize; 2]| {
            let ([rows, cols], at) = (shape, ptr);
            ptr += bytes::<T>(&shape) as u64;
            // SAFETY: a part of the memory for all of them, which nothing else uses.
            unsafe { DeviceMatrixMut::from_raw_trusted(cuda, at, rows, cols, padded::<T>(cols)) }
        };
        let mut y = place(out.shape())?;
        let mut a = place(first.shape())?;
        let mut b = second.map(|second| place(second.shape())).transpose()?;
        let reading = Waiting(&stream);
        // SAFETY: both sources are borrowed until the stream has been waited for, below.
        unsafe { a.send(&stream, first) }?;
        if let (Some(b), Some(second)) = (&mut b, second) {
            // SAFETY: as above.
            unsafe { b.send(&stream, second) }?;
        }
        enqueue(&stream, a.as_ref(), b.as_ref().map(DeviceMatrixMut::as_ref), y.reborrow())?;
        y.as_ref().download(&stream, out)?;
        std::mem::forget(reading);
        Ok(())
    })
}

/// Waits for a stream when it is dropped: on the ways out where nothing else did.
struct Waiting<'a>(&'a Stream);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // What the stream reports, the next call on it does too.
        let _ = self.0.synchronize();
    }
}

/// What a matrix takes of the memory, to the begin of the next.
fn bytes<T: Element>([rows, cols]: &[usize; 2]) -> usize {
    let bytes = rows.saturating_mul(padded::<T>(*cols) * size_of::<T>());
    bytes.checked_next_multiple_of(256).unwrap_or(bytes)
}
