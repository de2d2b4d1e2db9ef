//! Tensors that a call can take as they are, as their library's table describes them.

use std::sync::Arc;

use pyo3::prelude::*;
use swiglu::cuda::BorrowedStream;

use crate::device;
use crate::dlpack::{self, Memory};
use crate::error::Failure;
use crate::tensor::Tensor;

/// Whether a call was made; what it was refused for before anything was done, the slower way will say.
pub(crate) fn done(call: Result<(), Failure>) -> Result<bool, Failure> {
    use swiglu::ErrorKind::{Argument, DType, Layout, Shape, Unsupported};
    match call {
        Ok(()) => Ok(true),
        Err(Failure::Library(why))
            if matches!(why.kind(), Argument | DType | Layout | Shape | Unsupported) =>
        {
            Ok(false)
        }
        Err(why) => Err(why),
    }
}

/// Tensors of one type and memory, described by their library's table.
pub(crate) struct Alike {
    /// The inputs, and behind them what is written.
    pub(crate) tensors: Vec<Tensor>,
    inputs: usize,
    pub(crate) memory: Memory,
}

impl Alike {
    pub(crate) fn of<'a, 'py: 'a>(
        inputs: impl IntoIterator<Item = &'a Bound<'py, PyAny>>,
    ) -> Option<Self> {
        let mut objects = inputs.into_iter();
        let (first, memory) = dlpack::by_table(objects.next()?)?;
        let mut tensors = Vec::with_capacity(8);
        tensors.push(first);
        let mut inputs = Self { tensors, inputs: 1, memory };
        inputs.add(objects)?;
        inputs.inputs = inputs.tensors.len();
        Some(inputs)
    }

    /// With what is written.
    pub(crate) fn writing<'a, 'py: 'a>(
        mut self,
        outputs: impl IntoIterator<Item = &'a Bound<'py, PyAny>>,
    ) -> Option<Self> {
        self.add(outputs)?;
        Some(self)
    }

    fn add<'a, 'py: 'a>(
        &mut self,
        objects: impl IntoIterator<Item = &'a Bound<'py, PyAny>>,
    ) -> Option<()> {
        for object in objects {
            let (tensor, there) = dlpack::by_table(object)?;
            if there != self.memory || tensor.dtype != self.tensors[0].dtype {
                return None;
            }
            self.tensors.push(tensor);
        }
        Some(())
    }

    pub(crate) fn inputs(&self) -> &[Tensor] {
        &self.tensors[..self.inputs]
    }

    pub(crate) fn outputs(&self) -> &[Tensor] {
        &self.tensors[self.inputs..]
    }

    /// The kept stream of PyTorch's that is current, if CUDA's kernels take these tensors without a copy.
    pub(crate) fn current_stream(&self) -> Option<Arc<BorrowedStream>> {
        let Memory::Cuda(device) = self.memory else { return None };
        let outputs = self.outputs();
        let ready =
            |input: &Tensor| input.is_rows() && outputs.iter().all(|out| input.is_apart(out));
        if !outputs.iter().all(Tensor::is_dense) || !self.inputs().iter().all(ready) {
            return None;
        }
        let stream = device::kept(device.try_into().ok()?, dlpack::current_stream(device)?)?;
        // Else the call would change what is current for others.
        stream.cuda().is_current().then_some(stream)
    }
}
