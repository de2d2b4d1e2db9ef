//! What calls of a layer enqueue on a stream, over tensors that lie where they do.

use swiglu::Element;
use swiglu::cuda::{BorrowedStream, Cuda, DeviceScratch};

use crate::device;
use crate::elementwise::Place;
use crate::error::Failure;
use crate::layer::{Layer, either};
use crate::tensor::{Tensor, matrix, matrix_mut};

impl Layer {
    pub(crate) fn compute<T: Element>(&self, x: &Tensor, out: &Tensor) -> swiglu::Result<()> {
        // SAFETY: the caller of the Python function keeps the arrays as they are until it returns.
        unsafe {
            let rows = x.rows::<T>("x")?;
            out.fill::<T>(
                "out",
                &[x],
                |out| either!(self, layer => layer.forward_into(rows.view(), out)),
            )
        }
    }

    pub(crate) fn enqueue<T: Element>(
        &self,
        (ordinal, raw): Place,
        x: &Tensor,
        out: &Tensor,
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: the stream's handle is what its library says.
        let stream = unsafe { cuda.borrow_stream(raw) }?;
        self.enqueue_on::<T>(&stream, x, out, (scratch, bytes))
    }

    pub(crate) fn save<T: Element>(
        &self,
        (ordinal, raw): Place,
        [x, out, gate, up]: [&Tensor; 4],
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: as in `enqueue` and `enqueue_on`.
        unsafe {
            let stream = cuda.borrow_stream(raw)?;
            let _captured = stream.without_loading()?;
            let x = matrix::<T>(&cuda, "x", x)?;
            let out = matrix_mut::<T>(&cuda, "out", out)?;
            let kept = [matrix_mut::<T>(&cuda, "gate", gate)?, matrix_mut::<T>(&cuda, "up", up)?];
            let mut scratch = scratch_of(&cuda, (scratch, bytes))?;
            let scratch = scratch.as_mut();
            either!(self, layer => layer.forward_saving_on::<T>(&stream, x, out, kept, scratch))?;
        }
        Ok(())
    }

    pub(crate) fn keep<T: Element>(
        &self,
        (ordinal, raw): Place,
        [x, gate, up]: [&Tensor; 3],
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: as in `enqueue` and `enqueue_on`.
        unsafe {
            let stream = cuda.borrow_stream(raw)?;
            let _captured = stream.without_loading()?;
            let x = matrix::<T>(&cuda, "x", x)?;
            let kept = [matrix_mut::<T>(&cuda, "gate", gate)?, matrix_mut::<T>(&cuda, "up", up)?];
            let mut scratch = scratch_of(&cuda, (scratch, bytes))?;
            let scratch = scratch.as_mut();
            either!(self, layer => layer.pre_activations_on::<T>(&stream, x, kept, scratch))?;
        }
        Ok(())
    }

    pub(crate) fn differentiate<T: Element>(
        &self,
        (ordinal, raw): Place,
        [grad, gate, up, gate_grad, up_grad]: [&Tensor; 5],
        h: Option<&Tensor>,
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: as in `enqueue` and `enqueue_on`.
        unsafe {
            let stream = cuda.borrow_stream(raw)?;
            let _captured = stream.without_loading()?;
            let grad = matrix::<T>(&cuda, "grad", grad)?;
            let kept = [matrix::<T>(&cuda, "gate", gate)?, matrix::<T>(&cuda, "up", up)?];
            let grads = [
                matrix_mut::<T>(&cuda, "gate_grad", gate_grad)?,
                matrix_mut::<T>(&cuda, "up_grad", up_grad)?,
            ];
            let h = h.map(|h| matrix_mut::<T>(&cuda, "h", h)).transpose()?;
            let mut scratch = scratch_of(&cuda, (scratch, bytes))?;
            let scratch = scratch.as_mut();
            either!(self, layer => {
                layer.backward_gate_up_on::<T>(&stream, grad, kept, grads, h, scratch)
            })?;
        }
        Ok(())
    }

    pub(crate) fn enqueue_on<T: Element>(
        &self,
        stream: &BorrowedStream,
        x: &Tensor,
        out: &Tensor,
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = stream.cuda();
        let _captured = stream.without_loading()?;
        // SAFETY: the tensors' addresses, extents and device are what their library says, which orders work on the
        // stream and keeps memory that it uses; the scratch memory is nobody else's until that work is done.
        unsafe {
            let x = matrix::<T>(cuda, "x", x)?;
            let out = matrix_mut::<T>(cuda, "out", out)?;
            if bytes == 0 {
                either!(self, layer => layer.forward_on::<T>(stream, x, out))?;
            } else {
                let mut scratch = DeviceScratch::from_raw(cuda, scratch, bytes)?;
                either!(self, layer => layer.forward_with::<T>(stream, x, out, &mut scratch))?;
            }
        }
        Ok(())
    }
}

/// Scratch memory of the caller; without any it is the stream's.
///
/// # Safety
/// As [`DeviceScratch::from_raw`].
unsafe fn scratch_of<'a>(
    cuda: &Cuda,
    (scratch, bytes): (u64, usize),
) -> Result<Option<DeviceScratch<'a>>, Failure> {
    // SAFETY: the caller's.
    let lent = || unsafe { DeviceScratch::from_raw(cuda, scratch, bytes) };
    Ok((bytes > 0).then(lent).transpose()?)
}
