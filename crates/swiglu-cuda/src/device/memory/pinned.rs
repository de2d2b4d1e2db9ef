//! Host memory that the copy engines reach by themselves.

use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use swiglu_core::{Error, MatrixMut, MatrixRef};

use super::{DeviceData, Memory};
use crate::device::cuda::Cuda;
use crate::device::driver::{Driver, OUT_OF_MEMORY};
use crate::device::error::Result;
use crate::device::fork::is_child;
use crate::device::raw_event::relaxed;

/// A dense `[rows, cols]` matrix in page-locked memory of the host: made once and used for call after call. Copies between
/// it and the device take no detour through memory of the driver.
///
/// It is used like any matrix of the host, from which it differs in speed alone: calls are done with it when they return.
/// The system has little of such memory, and making it takes long. One that is dropped waits for the next
/// that fits, or for [`Cuda::trim`].
pub struct PinnedMatrix<T> {
    block: Block,
    memory: Arc<Memory>,
    /// In the block, or nowhere without elements.
    first: NonNull<T>,
    rows: usize,
    cols: usize,
}

// SAFETY: it owns its memory, which is the host's, as a `Vec<T>` does.
unsafe impl<T: Send> Send for PinnedMatrix<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for PinnedMatrix<T> {}

impl<T: DeviceData> PinnedMatrix<T> {
    /// A matrix of zeros.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::OutOfMemory`] if the system locks no more memory.
    pub fn zeros(cuda: &Cuda, rows: usize, cols: usize) -> Result<Self> {
        let bytes = rows
            .checked_mul(cols)
            .and_then(|n| n.checked_mul(size_of::<T>()))
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .ok_or_else(|| Error::TooLarge {
                what: "pinned matrix".into(),
                rows,
                cols,
                row_stride: cols,
            })?;
        let memory = cuda.memory().clone();
        let block = memory.pinned(bytes)?;
        let first = NonNull::new(block.address.cast::<T>()).unwrap_or(NonNull::dangling());
        // SAFETY: the block has the bytes, at an address that suits every type; nothing else uses it.
        unsafe { first.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { block, memory, first, rows, cols })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }
    /// `[rows, cols]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }
    /// The elements, row by row.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: all elements were written when the matrix was made, and every pattern of bits is one.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.rows * self.cols) }
    }
    /// The elements, row by row.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above; the matrix is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.rows * self.cols) }
    }
    /// A borrowed view.
    pub fn view(&self) -> MatrixRef<'_, T> {
        match MatrixRef::new(self.as_slice(), self.rows, self.cols) {
            Ok(view) => view,
            Err(error) => unreachable!("the slice has the elements: {error}"),
        }
    }
    /// A mutable view.
    pub fn view_mut(&mut self) -> MatrixMut<'_, T> {
        let (rows, cols) = (self.rows, self.cols);
        match MatrixMut::new(self.as_mut_slice(), rows, cols) {
            Ok(view) => view,
            Err(error) => unreachable!("the slice has the elements: {error}"),
        }
    }
}

impl<'a, T: DeviceData> From<&'a PinnedMatrix<T>> for MatrixRef<'a, T> {
    fn from(m: &'a PinnedMatrix<T>) -> Self {
        m.view()
    }
}

impl<'a, T: DeviceData> From<&'a mut PinnedMatrix<T>> for MatrixMut<'a, T> {
    fn from(m: &'a mut PinnedMatrix<T>) -> Self {
        m.view_mut()
    }
}

impl<T> fmt::Debug for PinnedMatrix<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMatrix").field("rows", &self.rows).field("cols", &self.cols).finish()
    }
}

impl<T> Drop for PinnedMatrix<T> {
    /// Freeing would wait for the device.
    fn drop(&mut self) {
        if !is_child() {
            self.memory.pinned.give_back(self.block);
        }
    }
}

/// Locked pages; none for no bytes.
#[derive(Clone, Copy)]
pub(super) struct Block {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: an address of memory that whoever has the block owns.
unsafe impl Send for Block {}

impl Block {
    /// Frees the pages; may wait for the device.
    pub(super) fn free(self, driver: &'static Driver) {
        let _ = relaxed(driver, |driver| {
            // SAFETY: it was made by `cuMemHostAlloc` and is freed once, by its owner.
            unsafe { (driver.cuMemFreeHost)(self.address.cast()) }
        });
    }
}

/// Blocks that no matrix has, the smallest first.
#[derive(Default)]
pub(super) struct Pinned(Mutex<Vec<Block>>);

impl Pinned {
    fn free(&self) -> MutexGuard<'_, Vec<Block>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The smallest block that has the bytes, unless most of it would be left over.
    fn take(&self, bytes: usize) -> Option<Block> {
        let mut free = self.free();
        let at = free.partition_point(|block| block.bytes < bytes);
        let fits = free.get(at).is_some_and(|block| block.bytes / 2 <= bytes);
        fits.then(|| free.remove(at))
    }

    fn give_back(&self, block: Block) {
        if block.bytes > 0 {
            let mut free = self.free();
            let at = free.partition_point(|other| other.bytes < block.bytes);
            free.insert(at, block);
        }
    }

    /// Takes all that no matrix has.
    pub(super) fn take_all(&self) -> Vec<Block> {
        std::mem::take(&mut *self.free())
    }
}

impl Memory {
    /// A block of the host's memory of at least so many bytes.
    fn pinned(&self, bytes: usize) -> Result<Block> {
        /// All devices' copies take it for locked.
        const PORTABLE: u32 = 1;
        if bytes == 0 {
            return Ok(Block { address: null_mut(), bytes: 0 });
        }
        if let Some(block) = self.pinned.take(bytes) {
            return Ok(block);
        }
        self.context().bind()?;
        let mut address = null_mut();
        let code = relaxed(self.driver(), |driver| {
            // SAFETY: a valid place for the address.
            unsafe { (driver.cuMemHostAlloc)(&mut address, bytes, PORTABLE) }
        });
        if code == OUT_OF_MEMORY {
            return Err(Error::OutOfMemory {
                what: format!("{bytes} bytes of page-locked memory"),
                why: "the system locks no more".into(),
            }
            .into());
        }
        self.driver().check("cuMemHostAlloc", code)?;
        Ok(Block { address: address.cast(), bytes })
    }

    /// Frees page-locked memory that no matrix has, and returns its bytes; may wait for the device.
    pub(crate) fn free_pinned(&self) -> usize {
        if self.context().bind().is_err() {
            return 0;
        }
        let blocks = self.pinned.take_all();
        blocks.iter().for_each(|block| block.free(self.driver()));
        blocks.iter().map(|block| block.bytes).sum()
    }
}
