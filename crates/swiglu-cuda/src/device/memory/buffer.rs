//! Owned device memory.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use swiglu_core::Element;

use super::{Access, Allocation, copy};
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::stream::Stream;

/// Element types that mean the same on host and device.
///
/// # Safety
/// Every bit pattern is a value, and there is no padding.
pub unsafe trait DeviceData: Copy + Send + Sync + 'static {}

// SAFETY: the trait is sealed; its types are f32, f16 and bf16, of which every bit pattern is a value.
unsafe impl<T: Element> DeviceData for T {}

/// `len` elements of device memory, allocated and freed in the order of a stream.
///
/// It can be used on every stream, and dropped at any time: work on one stream waits for the work of others that used the
/// buffer before, and the memory is given back behind all of it. Work that other code enqueues with
/// [`DeviceBuffer::device_ptr`] is not known: its caller orders it, with [`Stream::record`] and [`Stream::wait`].
pub struct DeviceBuffer<T> {
    allocation: Arc<Allocation>,
    ptr: u64,
    len: usize,
    stream: Stream,
    element: PhantomData<T>,
}

impl<T: DeviceData> DeviceBuffer<T> {
    /// A buffer with arbitrary contents.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Capture`]; [`swiglu_core::Error::TooLarge`].
    pub fn new(stream: &Stream, len: usize) -> Result<Self> {
        let allocation = Allocation::new(stream.cuda().memory(), stream.raw_stream());
        Self::in_allocation(&allocation, stream, len)
    }

    /// As [`Self::new`], used and freed together with others: `stream` is the allocation's home.
    fn in_allocation(allocation: &Arc<Allocation>, stream: &Stream, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|&b| b <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| swiglu_core::Error::TooLarge {
            what: "device buffer".into(),
            rows: 1,
            cols: len,
            row_stride: len,
        })?;
        let (ptr, allocation) = (allocation.add_block(bytes)?, allocation.clone());
        Ok(Self { allocation, ptr, len, stream: stream.clone(), element: PhantomData })
    }

    /// A buffer of zeros.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new`].
    pub fn zeros(stream: &Stream, len: usize) -> Result<Self> {
        let mut buffer = Self::new(stream, len)?;
        buffer.poison(0)?;
        Ok(buffer)
    }

    /// A copy of `data`. Waits for the stream.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new`].
    pub fn from_host(stream: &Stream, data: &[T]) -> Result<Self> {
        let mut buffer = Self::new(stream, data.len())?;
        buffer.upload(data)?;
        Ok(buffer)
    }

    /// As [`Self::from_host`], used and freed together with others.
    pub(crate) fn together(
        allocation: &Arc<Allocation>,
        stream: &Stream,
        data: &[T],
    ) -> Result<Self> {
        let mut buffer = Self::in_allocation(allocation, stream, data.len())?;
        buffer.upload(data)?;
        Ok(buffer)
    }

    /// Overwrites the buffer with `data`. Waits for the stream.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] unless the lengths agree; [`CudaError::Capture`].
    pub fn upload(&mut self, data: &[T]) -> Result<()> {
        self.expect_len(data.len())?;
        // Others in the allocation are not: nobody is to wait for nothing.
        if data.is_empty() {
            return Ok(());
        }
        self.allocation.order(self.stream.raw_stream(), Access::Write)?;
        copy::from_host(&self.stream, self.ptr, data)?;
        self.allocation.settle(self.stream.raw_stream());
        Ok(())
    }

    /// A copy on the host. Waits for the stream.
    ///
    /// # Errors
    /// [`CudaError::Capture`]; [`swiglu_core::Error::OutOfMemory`] without memory for it.
    pub fn to_host(&self) -> Result<Vec<T>> {
        let mut data = Vec::new();
        data.try_reserve_exact(self.len).map_err(|e| swiglu_core::Error::OutOfMemory {
            what: format!("{} elements", self.len),
            why: e.to_string(),
        })?;
        self.allocation.order(self.stream.raw_stream(), Access::Read)?;
        copy::to_host(&self.stream, &mut data.spare_capacity_mut()[..self.len], self.ptr)?;
        // SAFETY: the copy has written every element and is complete; every bit pattern is a value.
        unsafe { data.set_len(self.len) };
        Ok(data)
    }

    /// Overwrites every byte with `byte`, in stream order. 0xFF makes every float a NaN.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn poison(&mut self, byte: u8) -> Result<()> {
        let bytes = self.len * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        let held = self.stream.raw_stream().hold()?;
        self.allocation.order(self.stream.raw_stream(), Access::Write)?;
        let driver = self.stream.cuda().driver();
        // SAFETY: the buffer has `bytes` bytes and lives on this stream's device.
        unsafe { cu!(driver, cuMemsetD8Async(self.ptr, byte, bytes, held.handle())) }
    }

    fn expect_len(&self, given: usize) -> Result<()> {
        if given == self.len {
            return Ok(());
        }
        Err(CudaError::Core(swiglu_core::Error::Shape {
            what: "device buffer".into(),
            expected: format!("{} elements", self.len),
            given: format!("{given} elements"),
        }))
    }
}

impl<T> DeviceBuffer<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The address on the device; 0 if there are no elements.
    pub fn device_ptr(&self) -> u64 {
        self.ptr
    }
    /// What knows the streams that use the buffer.
    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }
    /// The stream that the buffer belongs to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("ptr", &format_args!("{:#x}", self.ptr))
            .field("len", &self.len)
            .field("stream", &self.stream)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common;

    #[test]
    fn nobody_waits_for_an_empty_upload() {
        let Some(cuda) = common::device() else { return };
        let stream = cuda.stream();
        let allocation = Allocation::new(cuda.memory(), stream.raw_stream());
        DeviceBuffer::together(&allocation, &stream, &[1.0f32]).unwrap();
        DeviceBuffer::<f32>::together(&allocation, &stream, &[]).unwrap();
        assert!(!allocation.is_written_on(stream.raw_stream()));
    }
}
