//! Where a matrix lies in device memory, and whether it may.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::sys::CUpointer_attribute as Attribute;
use swiglu_core::Error;

use super::{Access, Allocation, DeviceBuffer};
use crate::device::cuda::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::stream::Stream;

/// Elements from the first of the first row to the last of the last one.
pub(super) fn span<T>(what: &str, rows: usize, cols: usize, row_stride: usize) -> Result<usize> {
    if rows == 0 || cols == 0 {
        return Ok(0);
    }
    (rows - 1)
        .checked_mul(row_stride)
        .and_then(|n| n.checked_add(cols))
        .filter(|n| n.checked_mul(size_of::<T>()).is_some_and(|b| b <= isize::MAX as usize))
        .ok_or_else(|| Error::TooLarge { what: what.to_owned(), rows, cols, row_stride }.into())
}

/// Where a view lies and how; what borrowed matrices consist of.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) ptr: u64,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) ordinal: usize,
    /// What it lies in, if that is known to us.
    pub(super) memory: Option<&'a Arc<Allocation>>,
}

impl<'a> View<'a> {
    pub(super) fn in_buffer<T>(
        what: &str,
        buffer: &'a DeviceBuffer<T>,
        [rows, cols, row_stride]: [usize; 3],
    ) -> Result<Self> {
        let (needed, given) = (span::<T>(what, rows, cols, row_stride)?, buffer.len());
        if needed > given {
            let what = what.to_owned();
            return Err(
                Error::BufferTooShort { what, rows, cols, row_stride, needed, given }.into()
            );
        }
        let (ptr, ordinal) = (buffer.device_ptr(), buffer.stream().cuda().ordinal());
        Ok(Self { ptr, rows, cols, row_stride, ordinal, memory: Some(buffer.allocation()) })
    }

    pub(super) fn expect_shape(&self, what: &str, expected: [usize; 2]) -> Result<()> {
        match [self.rows, self.cols] {
            shape if shape == expected => Ok(()),
            shape => Err(Error::shape(what, expected, shape).into()),
        }
    }

    /// Lets work enqueued on `stream` next wait for other streams' work with this memory. With foreign memory it is the
    /// caller who orders work.
    pub(super) fn admit(
        &self,
        what: &str,
        shape: [usize; 2],
        stream: &Stream,
        access: Access,
    ) -> Result<()> {
        self.expect_shape(what, shape)?;
        self.expect_device(what, stream.cuda())?;
        if self.rows == 0 || self.cols == 0 {
            return Ok(());
        }
        self.memory.map_or(Ok(()), |memory| memory.order(stream.raw_stream(), access))
    }

    /// Notes that all work on `stream` is done.
    pub(super) fn settle(&self, stream: &Stream) {
        if let Some(memory) = self.memory {
            memory.settle(stream.raw_stream());
        }
    }

    pub(super) fn foreign<T>(
        what: &str,
        cuda: &Cuda,
        ptr: u64,
        [rows, cols, row_stride]: [usize; 3],
    ) -> Result<Self> {
        let view = Self::trusted::<T>(what, cuda, ptr, [rows, cols, row_stride])?;
        let bytes = span::<T>(what, rows, cols, row_stride)? * size_of::<T>();
        if bytes > 0 {
            expect_device_memory(what, cuda, ptr, bytes as u64)?;
        }
        Ok(view)
    }

    /// As [`Self::foreign`], of memory that the caller vouches for.
    pub(super) fn trusted<T>(
        what: &str,
        cuda: &Cuda,
        ptr: u64,
        [rows, cols, row_stride]: [usize; 3],
    ) -> Result<Self> {
        span::<T>(what, rows, cols, row_stride)?;
        if !ptr.is_multiple_of(align_of::<T>() as u64) {
            return Err(CudaError::Misaligned {
                what: what.to_owned(),
                ptr,
                required: align_of::<T>(),
            });
        }
        Ok(Self { ptr, rows, cols, row_stride, ordinal: cuda.ordinal(), memory: None })
    }

    pub(super) fn refuse_overlapping_rows(self, what: &str) -> Result<Self> {
        let Self { rows, cols, row_stride, .. } = self;
        if rows > 1 && row_stride < cols {
            return Err(Error::OverlappingRows { what: what.into(), cols, row_stride }.into());
        }
        Ok(self)
    }

    pub(super) fn expect_device(&self, what: &str, cuda: &Cuda) -> Result<()> {
        if self.ordinal == cuda.ordinal() {
            return Ok(());
        }
        Err(CudaError::WrongDevice {
            what: what.to_owned(),
            expected: format!("device {}", cuda.ordinal()),
            given: format!("device {}", self.ordinal),
        })
    }

    pub(super) fn byte_range<T>(&self) -> Range<u64> {
        let elements = match self.rows == 0 || self.cols == 0 {
            true => 0,
            false => (self.rows - 1) * self.row_stride + self.cols,
        };
        self.ptr..self.ptr + (elements * size_of::<T>()) as u64
    }

    pub(super) fn part<T>(
        self,
        what: &'static str,
        range: Range<usize>,
        of_rows: bool,
    ) -> Result<Self> {
        let extent = if of_rows { self.rows } else { self.cols };
        if range.start > range.end || range.end > extent {
            return Err(Error::OutOfRange {
                what,
                given: format!("{}..{}", range.start, range.end),
                expected: format!("within 0..{extent}"),
            }
            .into());
        }
        let step = if of_rows { self.row_stride } else { 1 };
        let empty = range.is_empty() || self.rows == 0 || self.cols == 0;
        let offset = if empty { 0 } else { range.start * step * size_of::<T>() };
        let ptr = self.ptr + offset as u64;
        Ok(match of_rows {
            true => Self { ptr, rows: range.len(), ..self },
            false => Self { ptr, cols: range.len(), ..self },
        })
    }
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View")
            .field("ptr", &format_args!("{:#x}", self.ptr))
            .field("shape", &[self.rows, self.cols])
            .field("row_stride", &self.row_stride)
            .field("device", &self.ordinal)
            .finish()
    }
}

/// Refuses an address that is not memory of `cuda`'s device, or has fewer than `bytes` bytes.
fn expect_device_memory(what: &str, cuda: &Cuda, ptr: u64, bytes: u64) -> Result<()> {
    const DEVICE_MEMORY: c_uint = 2;
    let wrong = |given: String| CudaError::WrongDevice {
        what: what.to_owned(),
        expected: format!("device {}", cuda.ordinal()),
        given,
    };
    cuda.bind()?;
    let end = ptr.checked_add(bytes).ok_or_else(|| CudaError::OutsideAllocation {
        what: what.to_owned(),
        ptr,
        needed: bytes,
        available: 0,
    })?;
    // Memory that is mapped in pieces (PyTorch's expandable segments) is one range per piece.
    let mut known_to = ptr;
    while known_to < end {
        let kind: c_uint =
            match attribute(cuda, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, known_to) {
                Ok(kind) => kind,
                Err(_) if known_to > ptr => {
                    let (needed, available) = (bytes, known_to - ptr);
                    let what = what.to_owned();
                    return Err(CudaError::OutsideAllocation { what, ptr, needed, available });
                }
                // The driver knows only what was allocated or registered through it.
                Err(_) => return Err(wrong(format!("the unknown address {ptr:#x}"))),
            };
        if kind != DEVICE_MEMORY {
            return Err(wrong("host memory".into()));
        }
        let ordinal: c_int =
            attribute(cuda, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, known_to)?;
        if usize::try_from(ordinal) != Ok(cuda.ordinal()) {
            return Err(wrong(format!("device {ordinal}")));
        }
        let start: u64 =
            attribute(cuda, Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, known_to)?;
        let size: usize = attribute(cuda, Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, known_to)?;
        let next = start.saturating_add(size as u64);
        if next <= known_to {
            return Err(wrong(format!("the unknown address {known_to:#x}")));
        }
        known_to = next;
    }
    Ok(())
}

fn attribute<V: Default>(cuda: &Cuda, attribute: Attribute, ptr: u64) -> Result<V> {
    let mut value = V::default();
    let place = (&raw mut value).cast::<c_void>();
    // SAFETY: `V` is the type that the driver documents for the attribute; any address may be asked.
    unsafe { cu!(cuda.driver(), cuPointerGetAttribute(place, attribute, ptr)) }?;
    Ok(value)
}
