//! The driver's functions that this crate calls, and what their results mean.
//!
//! Types are those of `sys`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::device::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphExec, CUlaunchConfig, CUmodule, CUpointer_attribute,
    CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMapDataType,
    CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
    CUuuid,
};

use crate::device::error::{CudaError, Result};
use crate::device::fork::{expect_no_fork, watch};
use crate::device::library::{Library, functions};

functions! {
    /// Functions of `libcuda`. All of them are in drivers 525 (CUDA 12.0) and newer.
    pub(crate) struct Driver from Library::Driver;
    required {
        fn cuInit = "cuInit"(c_uint) -> c_int;
        fn cuDriverGetVersion = "cuDriverGetVersion"(*mut c_int) -> c_int;
        fn cuGetErrorName = "cuGetErrorName"(c_int, *mut *const c_char) -> c_int;
        fn cuGetErrorString = "cuGetErrorString"(c_int, *mut *const c_char) -> c_int;

        fn cuDeviceGetCount = "cuDeviceGetCount"(*mut c_int) -> c_int;
        fn cuDeviceGet = "cuDeviceGet"(*mut CUdevice, c_int) -> c_int;
        fn cuDeviceGetName = "cuDeviceGetName"(*mut c_char, c_int, CUdevice) -> c_int;
        fn cuDeviceGetAttribute =
            "cuDeviceGetAttribute"(*mut c_int, CUdevice_attribute, CUdevice) -> c_int;
        fn cuDeviceTotalMem = "cuDeviceTotalMem_v2"(*mut usize, CUdevice) -> c_int;

        fn cuDevicePrimaryCtxRetain =
            "cuDevicePrimaryCtxRetain"(*mut CUcontext, CUdevice) -> c_int;
        fn cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease_v2"(CUdevice) -> c_int;
        fn cuCtxGetCurrent = "cuCtxGetCurrent"(*mut CUcontext) -> c_int;
        fn cuCtxSetCurrent = "cuCtxSetCurrent"(CUcontext) -> c_int;

        fn cuMemGetInfo = "cuMemGetInfo_v2"(*mut usize, *mut usize) -> c_int;
        fn cuMemAlloc = "cuMemAlloc_v2"(*mut CUdeviceptr, usize) -> c_int;
        fn cuMemFree = "cuMemFree_v2"(CUdeviceptr) -> c_int;
        fn cuMemHostAlloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint) -> c_int;
        fn cuMemFreeHost = "cuMemFreeHost"(*mut c_void) -> c_int;
        fn cuMemAllocAsync = "cuMemAllocAsync"(*mut CUdeviceptr, usize, CUstream) -> c_int;
        fn cuMemFreeAsync = "cuMemFreeAsync"(CUdeviceptr, CUstream) -> c_int;
        fn cuMemcpyHtoDAsync =
            "cuMemcpyHtoDAsync_v2"(CUdeviceptr, *const c_void, usize, CUstream) -> c_int;
        fn cuMemcpyDtoHAsync =
            "cuMemcpyDtoHAsync_v2"(*mut c_void, CUdeviceptr, usize, CUstream) -> c_int;
        fn cuMemcpyDtoDAsync =
            "cuMemcpyDtoDAsync_v2"(CUdeviceptr, CUdeviceptr, usize, CUstream) -> c_int;
        fn cuMemcpy2DAsync = "cuMemcpy2DAsync_v2"(*const CUDA_MEMCPY2D, CUstream) -> c_int;
        fn cuMemsetD8Async = "cuMemsetD8Async"(CUdeviceptr, u8, usize, CUstream) -> c_int;
        fn cuPointerGetAttribute =
            "cuPointerGetAttribute"(*mut c_void, CUpointer_attribute, CUdeviceptr) -> c_int;

        fn cuStreamCreateWithPriority =
            "cuStreamCreateWithPriority"(*mut CUstream, c_uint, c_int) -> c_int;
        fn cuStreamDestroy = "cuStreamDestroy_v2"(CUstream) -> c_int;
        fn cuStreamSynchronize = "cuStreamSynchronize"(CUstream) -> c_int;
        fn cuStreamQuery = "cuStreamQuery"(CUstream) -> c_int;
        fn cuStreamWaitEvent = "cuStreamWaitEvent"(CUstream, CUevent, c_uint) -> c_int;
        fn cuStreamBeginCapture =
            "cuStreamBeginCapture_v2"(CUstream, CUstreamCaptureMode) -> c_int;
        fn cuStreamEndCapture = "cuStreamEndCapture"(CUstream, *mut CUgraph) -> c_int;
        fn cuThreadExchangeStreamCaptureMode =
            "cuThreadExchangeStreamCaptureMode"(*mut CUstreamCaptureMode) -> c_int;
        fn cuStreamGetCaptureInfo = "cuStreamGetCaptureInfo_v2"(
            CUstream, *mut CUstreamCaptureStatus, *mut u64, *mut CUgraph, *mut *const c_void, *mut usize
        ) -> c_int;
        fn cuStreamIsCapturing =
            "cuStreamIsCapturing"(CUstream, *mut CUstreamCaptureStatus) -> c_int;

        fn cuEventCreate = "cuEventCreate"(*mut CUevent, c_uint) -> c_int;
        fn cuEventDestroy = "cuEventDestroy_v2"(CUevent) -> c_int;
        fn cuEventQuery = "cuEventQuery"(CUevent) -> c_int;
        fn cuEventRecord = "cuEventRecord"(CUevent, CUstream) -> c_int;
        fn cuEventSynchronize = "cuEventSynchronize"(CUevent) -> c_int;
        fn cuEventElapsedTime = "cuEventElapsedTime"(*mut f32, CUevent, CUevent) -> c_int;

        fn cuGraphInstantiateWithFlags =
            "cuGraphInstantiateWithFlags"(*mut CUgraphExec, CUgraph, u64) -> c_int;
        fn cuGraphDestroy = "cuGraphDestroy"(CUgraph) -> c_int;
        fn cuGraphExecDestroy = "cuGraphExecDestroy"(CUgraphExec) -> c_int;
        fn cuGraphLaunch = "cuGraphLaunch"(CUgraphExec, CUstream) -> c_int;

        fn cuModuleLoadData = "cuModuleLoadData"(*mut CUmodule, *const c_void) -> c_int;
        fn cuModuleUnload = "cuModuleUnload"(CUmodule) -> c_int;
        fn cuModuleGetFunction =
            "cuModuleGetFunction"(*mut CUfunction, CUmodule, *const c_char) -> c_int;
        fn cuFuncGetAttribute =
            "cuFuncGetAttribute"(*mut c_int, CUfunction_attribute, CUfunction) -> c_int;
        fn cuFuncSetAttribute =
            "cuFuncSetAttribute"(CUfunction, CUfunction_attribute, c_int) -> c_int;
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor =
            "cuOccupancyMaxActiveBlocksPerMultiprocessor"(*mut c_int, CUfunction, c_int, usize)
            -> c_int;
        fn cuLaunchKernelEx = "cuLaunchKernelEx"(
            *const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void
        ) -> c_int;
        fn cuTensorMapEncodeTiled = "cuTensorMapEncodeTiled"(
            *mut c_void, CUtensorMapDataType, c_uint, *mut c_void, *const u64, *const u64,
            *const u32, *const u32, CUtensorMapInterleave, CUtensorMapSwizzle,
            CUtensorMapL2promotion, CUtensorMapFloatOOBfill
        ) -> c_int;
    }
    optional {
        // Only shown to people.
        fn cuDeviceGetUuid = "cuDeviceGetUuid"(*mut CUuuid, CUdevice) -> c_int;
        // From CUDA 12.4; without it a launch cannot compare the size of its parameters.
        fn cuFuncGetParamInfo =
            "cuFuncGetParamInfo"(CUfunction, usize, *mut usize, *mut usize) -> c_int;
    }
}

pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const NOT_INITIALIZED: c_int = 3;

/// The driver, loaded and initialised on the first call.
///
/// # Errors
/// [`CudaError::LibraryMissing`], [`CudaError::SymbolMissing`], [`CudaError::NoDevice`], or what
/// `cuInit` reports, for example a driver that does not fit its kernel module.
pub(crate) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    expect_no_fork()?;
    let initialised = DRIVER.get_or_init(|| {
        watch();
        let driver = Driver::load()?;
        // SAFETY: flags must be 0.
        driver.check("cuInit", unsafe { (driver.cuInit)(0) })?;
        Ok(driver)
    });
    initialised.as_ref().map_err(Clone::clone)
}

impl Driver {
    /// Turns the result of `call` into an error with the driver's own words.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        match code {
            0 => Ok(()),
            NO_DEVICE => Err(CudaError::NoDevice),
            code => Err(self.describe(call, code)),
        }
    }

    #[cold]
    fn describe(&self, call: &'static str, code: c_int) -> CudaError {
        let text = |get: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: `text` is a valid place for the pointer; it stays null for unknown codes.
            unsafe { get(code, &mut text) };
            if text.is_null() {
                return "unknown to this driver".to_owned();
            }
            // SAFETY: the driver returns a constant, null-terminated string.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let description = match code {
            // During process exit the driver may already have shut down.
            NOT_INITIALIZED => "the driver is not initialised or is shutting down".to_owned(),
            _ => text(self.cuGetErrorString),
        };
        CudaError::Driver { call, code, name: text(self.cuGetErrorName), description }
    }
}

/// Calls a driver function and turns its result into `Result<()>`. The call is unsafe: it stands in
/// an `unsafe` block whose `SAFETY:` comment argues for the arguments.
macro_rules! cu {
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $driver.check(stringify!($name), ($driver.$name)($($arg),*))
    };
}
pub(crate) use cu;
