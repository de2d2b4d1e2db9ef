//! What calls of a layer enqueue on a stream, over tensors that lie where they do.

use swiglu::Element;
use swiglu::cuda::{BorrowedStream, DeviceScratch};

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
