//! Device memory: the allocator, buffers, and matrices in them.

mod buffer;
mod copy;
mod matrix;
mod view;

use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr, CUstream};

use crate::device::context::Context;
use crate::device::driver::{Driver, OUT_OF_MEMORY, cu};
use crate::device::error::{CudaError, Result};
use crate::device::idle::when_idle;
use crate::device::stream::capturing;

pub use buffer::{DeviceBuffer, DeviceData};
pub use matrix::{DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};

/// Allocates and frees a device's memory.
pub(crate) struct Memory {
    context: Arc<Context>,
    /// Whether memory is allocated and freed in stream order.
    pools: bool,
    /// Memory that a captured graph may use: freed with the device.
    retired: Mutex<Vec<CUdeviceptr>>,
}

impl Memory {
    pub(crate) fn new(context: Arc<Context>, plain: bool) -> Result<Self> {
        let pools = !plain
            && context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        Ok(Self { context, pools, retired: Mutex::default() })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.context.driver
    }

    pub(crate) fn is_capturing(&self, stream: CUstream) -> Result<bool> {
        self.context.bind()?;
        capturing(&self.context, stream)
    }

    /// Free and total bytes.
    pub(crate) fn info(&self) -> Result<(usize, usize)> {
        self.context.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places for the results.
        unsafe { cu!(self.driver(), cuMemGetInfo(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// Memory that work enqueued on `stream` from now on may use; 0 for no bytes.
    pub(crate) fn alloc(&self, bytes: usize, stream: CUstream) -> Result<CUdeviceptr> {
        if bytes == 0 {
            return Ok(0);
        }
        if self.is_capturing(stream)? {
            return Err(CudaError::Capture {
                what: format!("allocating {bytes} bytes"),
                hint: "allocate before the capture",
            });
        }
        let driver = self.driver();
        let mut ptr: CUdeviceptr = 0;
        let outcome = if self.pools {
            // SAFETY: a valid place for the address, a valid stream.
            unsafe { cu!(driver, cuMemAllocAsync(&mut ptr, bytes, stream)) }
        } else {
            // SAFETY: a valid place for the address.
            unsafe { cu!(driver, cuMemAlloc(&mut ptr, bytes)) }
        };
        match outcome {
            Ok(()) => Ok(ptr),
            Err(CudaError::Driver { code: OUT_OF_MEMORY, .. }) => {
                let (free, total) = self.info().unwrap_or((0, 0));
                Err(CudaError::OutOfMemory { bytes, free, total })
            }
            Err(e) => Err(e),
        }
    }

    /// Gives memory back once everything enqueued on `stream` so far is done. Never fails: what
    /// cannot be freed now is freed with the device.
    pub(crate) fn free(&self, ptr: CUdeviceptr, stream: CUstream) {
        if ptr == 0 {
            return;
        }
        // In a capture the free would become part of the graph, and the graph may use the memory.
        if self.is_capturing(stream).unwrap_or(true) {
            return self.retire(ptr);
        }
        if self.pools {
            // SAFETY: allocated by `alloc` and freed once.
            let _ = unsafe { cu!(self.driver(), cuMemFreeAsync(ptr, stream)) };
        } else {
            // SAFETY: as above. The driver waits for work that uses it.
            let _ = unsafe { cu!(self.driver(), cuMemFree(ptr)) };
        }
    }

    /// Keeps memory until the device is dropped.
    pub(crate) fn retire(&self, ptr: CUdeviceptr) {
        if ptr != 0 {
            self.retired.lock().unwrap_or_else(|e| e.into_inner()).push(ptr);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let retired = std::mem::take(self.retired.get_mut().unwrap_or_else(|e| e.into_inner()));
        if retired.is_empty() {
            return;
        }
        let driver = self.driver();
        // Memory from a pool is freed without waiting for its users.
        when_idle(&self.context, move || {
            for ptr in retired {
                // SAFETY: allocated by `alloc`, freed once, and nothing uses it any more.
                let _ = unsafe { cu!(driver, cuMemFree(ptr)) };
            }
        });
    }
}
