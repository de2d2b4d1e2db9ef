//! Results of calls with arrays of no known library: DLPack hands them on.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use swiglu::{DType, Element, Matrix};

use crate::dlpack;
use crate::tensor::Tensor;

/// A dense array in the host's memory, for `from_dlpack` of any library.
#[pyclass(frozen, module = "swiglu._native")]
pub(crate) struct Array {
    address: usize,
    shape: Vec<usize>,
    dtype: DType,
    memory: Arc<dyn Send + Sync>,
}

impl Array {
    /// Of `shape`, whose last dimension is a row of the matrix.
    pub(crate) fn zeros<T: Element>(shape: Vec<usize>) -> swiglu::Result<Self> {
        let cols = shape.last().copied().unwrap_or(0);
        let rows = shape.iter().take(shape.len().saturating_sub(1)).product();
        let mut matrix = Matrix::<T>::zeros(rows, cols)?;
        // The matrix is never touched again: its memory is reached by this address alone.
        let address = matrix.as_mut_slice().as_mut_ptr() as usize;
        Ok(Self { address, shape, dtype: T::DTYPE, memory: Arc::new(matrix.into_vec()) })
    }

    pub(crate) fn tensor(&self) -> Tensor {
        let (address, shape) = (self.address, self.shape.as_slice().into());
        let strides = dlpack::dense_strides(&self.shape);
        Tensor { address, shape, strides, dtype: self.dtype, writable: true, _owner: None }
    }
}

#[pymethods]
impl Array {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<Bound<'py, PyAny>>,
        dl_device: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // There is no stream in the host's memory, and every version is answered with the one that all consumers read.
        let _ = (stream, max_version);
        let here = match dl_device {
            Some(device) => device.extract::<(i32, i32)>()? == (1, 0),
            None => true,
        };
        if !here || copy == Some(true) {
            let text = "this array is lent as it is: neither copied nor moved to another device";
            return Err(pyo3::exceptions::PyBufferError::new_err(text));
        }
        dlpack::export(py, &self.tensor(), self.memory.clone())
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    fn __repr__(&self) -> String {
        format!("swiglu.Array(shape={:?}, dtype={})", self.shape, self.dtype)
    }
}
