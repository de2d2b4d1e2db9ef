use std::sync::Barrier;

use super::*;
use crate::common::{self, device};
use crate::device::cuda::Cuda;
use crate::device::jit::Variant;
use crate::device::jit::variant::{KernelFile, define};
use crate::device::memory::DeviceBuffer;

static FILE: KernelFile = KernelFile::new(
    "launch_test.cu",
    "#include \"lib/ptx.cuh\"\n\
     struct Fill { float* out; int count; float value; };\n\
     KERNEL(128, 1, fill)(KERNEL_PARAMS(Fill) p) {\n\
       const int i = blockIdx.x * blockDim.x + threadIdx.x;\n\
       if (i < p.count) p.out[i] = p.value + VALUE;\n\
     }\n\
     KERNEL(128, 1, leave)(KERNEL_PARAMS(Fill) p) {}\n",
);

#[repr(C)]
struct Fill {
    out: u64,
    count: i32,
    value: f32,
}

fn variant(value: i32) -> Variant {
    Variant::new(&FILE, [define("VALUE", value)])
}

/// 256 zeros, and what makes them 3.
fn filling(cuda: &Cuda, stream: &Stream) -> (DeviceBuffer<f32>, Function, Fill) {
    let buffer = DeviceBuffer::<f32>::zeros(stream, 256).unwrap();
    let params = Fill { out: buffer.device_ptr(), count: 256, value: 1.0 };
    (buffer, cuda.function(&variant(2), "fill", 0).unwrap(), params)
}

const CONFIG: LaunchConfig = LaunchConfig {
    grid: [2, 1, 1],
    block: 128,
    dynamic_shared: 0,
    cluster: None,
    programmatic: false,
    cooperative: false,
};

#[test]
fn a_kernel_gets_its_parameters() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let buffer = DeviceBuffer::<f32>::zeros(&stream, 200).unwrap();
    let params = Fill { out: buffer.device_ptr(), count: 150, value: 0.5 };
    let function = cuda.function(&variant(2), "fill", 0).unwrap();
    assert!(function.0.registers > 0 && function.0.max_threads >= 128, "{function:?}");
    for config in [
        CONFIG,
        LaunchConfig { programmatic: true, ..CONFIG },
        LaunchConfig { cooperative: true, ..CONFIG },
    ] {
        // SAFETY: the kernel writes 150 of 200 elements and takes these parameters.
        unsafe { launch(&stream, &function, &config, &params) }.unwrap();
        let values = buffer.to_host().unwrap();
        assert!(values[..150].iter().all(|&v| v == 2.5) && values[150..] == [0.0; 50]);
    }
    assert!(cuda.cache_warnings().is_empty(), "{:?}", cuda.cache_warnings());
}

#[test]
fn a_launch_that_does_not_fit_its_kernel_is_refused() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let function = cuda.function(&variant(2), "leave", 0).unwrap();
    let params = Fill { out: 0, count: 0, value: 0.0 };
    let refused = |config: LaunchConfig, part: &str| {
        // SAFETY: the kernel does nothing.
        let error = unsafe { launch(&stream, &function, &config, &params) }.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, CudaError::Launch { kernel: "leave", .. }), "{text}");
        assert!(text.contains(part), "{text}");
    };
    refused(LaunchConfig { block: 2048, ..CONFIG }, "threads per block");
    refused(LaunchConfig { dynamic_shared: 64 << 10, ..CONFIG }, "dynamic shared memory");
    refused(LaunchConfig { cluster: Some(3), ..CONFIG }, "blocks in x");
    if function.0.params.is_some() {
        // SAFETY: refused because of its size.
        let error = unsafe { launch(&stream, &function, &CONFIG, &0u8) }.unwrap_err();
        assert!(error.to_string().contains("bytes of parameters"), "{error}");
    }
    // Asked for once, it may be used; more than the device has is refused.
    let large = cuda.function(&variant(2), "leave", 64 << 10).unwrap();
    let config = LaunchConfig { dynamic_shared: 64 << 10, ..CONFIG };
    // SAFETY: the kernel does nothing.
    unsafe { launch(&stream, &large, &config, &params) }.unwrap();
    let error = cuda.function(&variant(2), "leave", 1 << 30).unwrap_err();
    assert!(error.to_string().contains("dynamic shared memory"), "{error}");
    stream.synchronize().unwrap();
}

#[test]
fn what_does_not_compile_or_exist_is_named() {
    let Some(cuda) = device() else { return };
    let error = cuda.function(&Variant::new(&FILE, []), "fill", 0).unwrap_err();
    let CudaError::Compile { file, log, .. } = &error else { panic!("{error}") };
    assert!(file == "launch_test.cu" && log.contains("VALUE"), "{error}");
    let error = cuda.function(&variant(2), "no_such_kernel", 0).unwrap_err();
    assert!(matches!(error, CudaError::Driver { call: "cuModuleGetFunction", .. }), "{error}");
}

#[test]
fn threads_that_want_one_kernel_share_it() {
    let Some(cuda) = device() else { return };
    let (start, variant) = (Barrier::new(8), variant(3));
    let load = || {
        start.wait();
        cuda.function(&variant, "fill", 0).unwrap().0.raw as usize
    };
    let raw: Vec<usize> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(load)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(raw.iter().all(|&f| f == raw[0]), "{raw:?}");
}

#[test]
fn a_captured_kernel_runs_with_the_parameters_of_its_capture() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let (mut buffer, function, params) = filling(&cuda, &stream);
    let graph = stream
        .capture(|| {
            // SAFETY: the kernel writes the buffer's elements and takes these parameters.
            unsafe { launch(&stream, &function, &CONFIG, &params) }
        })
        .unwrap();
    assert_eq!(buffer.to_host().unwrap(), [0.0; 256]);
    for _ in 0..2 {
        buffer.poison(0).unwrap();
        // SAFETY: the buffer is alive and nothing else runs.
        unsafe { graph.launch(&stream) }.unwrap();
        assert_eq!(buffer.to_host().unwrap(), [3.0; 256]);
    }
}

/// The first synchronises the device, to unload what it has loaded: that would end the capture of the second.
#[test]
fn a_capture_goes_on_while_another_handle_is_dropped() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let (mut buffer, function, params) = filling(&cuda, &stream);
    let other = common::open(0).unwrap().unwrap();
    drop(other.function(&variant(2), "fill", 0).unwrap());
    let graph = stream
        .capture(|| {
            // SAFETY: the kernel writes the buffer's elements and takes these parameters.
            unsafe { launch(&stream, &function, &CONFIG, &params) }?;
            std::thread::scope(|scope| scope.spawn(|| drop(other)).join().unwrap());
            // SAFETY: as above.
            unsafe { launch(&stream, &function, &CONFIG, &params) }
        })
        .unwrap();
    buffer.poison(0).unwrap();
    // SAFETY: the buffer is alive and nothing else runs.
    unsafe { graph.launch(&stream) }.unwrap();
    assert_eq!(buffer.to_host().unwrap(), [3.0; 256]);
}
