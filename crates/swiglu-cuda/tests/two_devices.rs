//! Memory and streams of different devices do not mix. On its own, because it adds a device to the
//! simulator.

mod common;

use common::{has_gpu, open};
use swiglu_cuda::{Cuda, CudaError, DeviceMatrix, DeviceMatrixRef};

#[test]
fn devices_are_kept_apart() {
    if !has_gpu() {
        // SAFETY: the only test of this program; no other thread reads the environment yet.
        unsafe { std::env::set_var("SWIGLU_SIM_DEVICES", "2") };
    }
    let Some(first) = open(0) else { return };
    let first = first.unwrap();
    if Cuda::device_count().unwrap() < 2 {
        swiglu_testing::not_run("one GPU");
        return;
    }
    let second = open(1).unwrap().unwrap();
    assert_eq!((first.ordinal(), second.ordinal()), (0, 1));
    let wrong = |error: CudaError| {
        assert!(matches!(error, CudaError::WrongDevice { .. }), "{error}");
    };
    let there = DeviceMatrix::<f32>::zeros(&second.stream(), 2, 2).unwrap();
    wrong(there.view().expect_device("x", &first).unwrap_err());
    wrong(there.view().to_host(&first.stream()).unwrap_err());
    let ptr = there.view().device_ptr();
    // SAFETY: refused.
    let foreign = unsafe { DeviceMatrixRef::<f32>::from_raw(&first, ptr, 2, 2, 2) };
    wrong(foreign.unwrap_err());
    // SAFETY: alive until the end of the test.
    let own = unsafe { DeviceMatrixRef::<f32>::from_raw(&second, ptr, 2, 2, 2) }.unwrap();
    assert_eq!(own.to_host(&second.stream()).unwrap().as_slice(), [0.0; 4]);
    let stream = second.new_stream().unwrap();
    let graph = stream.capture(|| Ok::<(), CudaError>(())).unwrap();
    // SAFETY: refused.
    wrong(unsafe { graph.launch(&first.stream()) }.unwrap_err());
}
