//! A device that is full. On its own, because it limits the memory of a simulated device.

mod common;

use common::{device, has_gpu};
use swiglu_cuda::{CudaError, DeviceBuffer};

#[test]
fn a_full_device_is_an_error_with_numbers_and_recovers() {
    if !has_gpu() {
        // SAFETY: the only test of this program; no other thread reads the environment yet.
        unsafe { std::env::set_var("SWIGLU_SIM_MEMORY_LIMIT", "1048576") };
    }
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let (_, total) = cuda.memory_info().unwrap();
    let bytes = total + (1 << 20);
    let error = DeviceBuffer::<f32>::new(&stream, bytes / 4).unwrap_err();
    let CudaError::OutOfMemory { bytes: asked, free, total: limit } = error else {
        panic!("{error}")
    };
    assert_eq!((asked, limit), (bytes / 4 * 4, total));
    assert!(free <= total);
    let error = cuda.reserve_workspace(&stream, bytes).unwrap_err();
    assert!(matches!(error, CudaError::OutOfMemory { .. }), "{error}");
    let core = swiglu_core::Error::from(error);
    assert!(matches!(core, swiglu_core::Error::OutOfMemory { .. }), "{core}");
    // What fits still does, again and again: each time more than could be free if any had been kept.
    for _ in 0..10 {
        let half = DeviceBuffer::<f32>::zeros(&stream, total / 8).unwrap();
        assert_eq!(half.len(), total / 8);
        stream.synchronize().unwrap();
    }
    cuda.reserve_workspace(&stream, 1 << 16).unwrap();
}
