//! The Python module `swiglu._native`: what the package `swiglu` calls.
//!
//! Arrays come as `(address, shape, strides, dtype, writable)`, strides in elements, or as objects with `__dlpack__`. A
//! description is trusted: the package, not its users, makes it.

mod activation;
mod alike;
mod array;
mod block;
mod calls;
mod device;
mod dlpack;
mod door;
mod elementwise;
mod error;
mod gradient;
mod host_block;
mod layer;
mod lent;
mod openmp;
mod reading;
mod tensor;
mod weights;

use pyo3::prelude::*;
use swiglu::{Device, Isa};
use swiglu_cuda::library::{self, Library};

use crate::error::Failure;

/// What this build and machine have, as JSON.
#[pyfunction]
fn info(py: Python<'_>) -> Result<String, Failure> {
    let probe = || {
        let devices = Device::probe().into_iter().map(|(name, device)| {
            let found = device.map(|device| device.to_string()).map_err(|why| why.to_string());
            serde_json::json!({ "name": name, "device": found.as_ref().ok(), "missing": found.as_ref().err() })
        });
        let libraries = [Library::Driver, Library::Nvrtc, Library::CublasLt].map(|which| {
            let found = library::load(which);
            let path = found.as_ref().ok().map(|loaded| loaded.path.display().to_string());
            serde_json::json!({ "name": which.to_string(), "path": path, "missing": found.err().map(|e| e.to_string()) })
        });
        serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "isa": Isa::detect(),
            "devices": devices.collect::<Vec<_>>(),
            "cpu_threads": device::cpu_threads(),
            "libraries": libraries,
        })
    };
    layer::json(&py.detach(probe))
}

/// What the package `swiglu` calls: its functions are private to it.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::activation::{Activation, expect_numerics};
    #[pymodule_export]
    use crate::array::Array;
    #[pymodule_export]
    use crate::block::{block_backward, block_backward_gate_up, block_forward};
    #[pymodule_export]
    use crate::device::{
        after_fork, after_fork_in_parent, before_fork, keep_stream, share_threads,
    };
    #[pymodule_export]
    use crate::dlpack::describe_by_table;
    #[pymodule_export]
    use crate::door::Door;
    #[pymodule_export]
    use crate::elementwise::{
        activation, activation_backward, activation_backward_at_once, cuda_activation,
        cuda_activation_backward,
    };
    #[pymodule_export]
    use crate::error::{ShapeError, SwigluError};
    #[pymodule_export]
    use crate::gradient::{cuda_weight_gradient, cuda_weight_gradient_bytes, weight_gradient};
    #[pymodule_export]
    use crate::host_block::{host_block_backward, host_block_forward};
    #[pymodule_export]
    use crate::info;
    #[pymodule_export]
    use crate::layer::Layer;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
