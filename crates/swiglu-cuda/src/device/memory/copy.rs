//! Copies between host and device. All but [`enqueue`] wait for their stream: the host's memory is free to
//! be used again when they return.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use crate::device::sys::{CUDA_MEMCPY2D, CUmemorytype};

use super::DeviceData;
use crate::device::driver::cu;
use crate::device::error::Result;
use crate::device::raw_stream::Held;
use crate::device::stream::Stream;

/// A stream that may copy, and be waited for, while the result lives.
fn ready(stream: &Stream) -> Result<Held<'_>> {
    let held = stream.raw_stream().hold()?;
    stream.refuse_capture("copying between host and device", "copy before or after the capture")?;
    Ok(held)
}

/// Writes `data` to `ptr`, which has room for it.
pub(super) fn from_host<T: DeviceData>(stream: &Stream, ptr: u64, data: &[T]) -> Result<()> {
    let bytes = size_of_val(data);
    if bytes == 0 {
        return Ok(());
    }
    let held = ready(stream)?;
    let source = data.as_ptr().cast::<c_void>();
    let driver = stream.cuda().driver();
    // SAFETY: the source is a slice, the target has room by contract of this function, and the
    // slice is borrowed until the copy is complete.
    let outcome = unsafe { cu!(driver, cuMemcpyHtoDAsync(ptr, source, bytes, held.handle())) };
    outcome.and(stream.wait_for_all(&held))
}

/// Fills `data` from `ptr`, which has as many elements.
pub(super) fn to_host<T: DeviceData>(
    stream: &Stream,
    data: &mut [MaybeUninit<T>],
    ptr: u64,
) -> Result<()> {
    let bytes = size_of_val(data);
    if bytes == 0 {
        return Ok(());
    }
    let held = ready(stream)?;
    let target = data.as_mut_ptr().cast::<c_void>();
    let driver = stream.cuda().driver();
    // SAFETY: the target is a slice, the source has as many bytes by contract of this function, and
    // the slice is borrowed until the copy is complete.
    let outcome = unsafe { cu!(driver, cuMemcpyDtoHAsync(target, ptr, bytes, held.handle())) };
    outcome.and(stream.wait_for_all(&held))
}

/// Which way a copy goes.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    ToDevice,
    ToHost,
}

/// Rows of `width` bytes; on each side they start `pitch` bytes apart.
pub(super) struct Rows {
    pub(super) direction: Direction,
    pub(super) device: u64,
    pub(super) device_pitch: usize,
    pub(super) host: *mut c_void,
    pub(super) host_pitch: usize,
    pub(super) width: usize,
    pub(super) rows: usize,
}

/// Copies rows and waits.
///
/// # Safety
/// Both sides span the rows and stay valid during the call; rows of the side that is written do
/// not overlap, and nothing else uses the host's side.
pub(super) unsafe fn rows(stream: &Stream, copy: &Rows) -> Result<()> {
    if copy.width == 0 || copy.rows == 0 {
        return Ok(());
    }
    let held = ready(stream)?;
    // SAFETY: passed on from the caller.
    let outcome = unsafe { pieces(stream, &held, copy) };
    // Also after a failure: copies enqueued before it may still run.
    outcome.and(stream.wait_for_all(&held))
}

/// Enqueues copies of rows, also some of them where it fails.
///
/// # Safety
/// As [`rows`], until the stream has been waited for.
pub(super) unsafe fn enqueue(stream: &Stream, copy: &Rows) -> Result<()> {
    if copy.width == 0 || copy.rows == 0 {
        return Ok(());
    }
    let held = ready(stream)?;
    // SAFETY: passed on from the caller.
    unsafe { pieces(stream, &held, copy) }
}

/// Enqueues copies of rows, of which there are some.
///
/// # Safety
/// As [`enqueue`].
unsafe fn pieces(stream: &Stream, held: &Held<'_>, copy: &Rows) -> Result<()> {
    // The driver takes pitches up to this, and none that is shorter than a row.
    const MAX_PITCH: usize = i32::MAX as usize;
    let pitches = [copy.device_pitch, copy.host_pitch];
    if copy.rows == 1 || pitches == [copy.width; 2] {
        // SAFETY: rows without gaps are one piece.
        return unsafe { flat(stream, held, copy, 0, copy.width * copy.rows) };
    }
    if pitches.iter().all(|pitch| (copy.width..=MAX_PITCH).contains(pitch)) {
        let driver = stream.cuda().driver();
        // SAFETY: the caller vouches for both sides.
        return unsafe { cu!(driver, cuMemcpy2DAsync(&describe(copy), held.handle())) };
    }
    for row in 0..copy.rows {
        // SAFETY: one of the rows that both sides span.
        unsafe { flat(stream, held, copy, row, copy.width) }?;
    }
    Ok(())
}

/// Copies `bytes` bytes from the start of a row.
///
/// # Safety
/// Both sides have them; otherwise as [`enqueue`].
unsafe fn flat(
    stream: &Stream,
    held: &Held<'_>,
    copy: &Rows,
    row: usize,
    bytes: usize,
) -> Result<()> {
    let driver = stream.cuda().driver();
    let device = copy.device + (row * copy.device_pitch) as u64;
    let host = copy.host.wrapping_byte_add(row * copy.host_pitch);
    match copy.direction {
        // SAFETY: the caller vouches for both sides.
        Direction::ToDevice => unsafe {
            cu!(driver, cuMemcpyHtoDAsync(device, host, bytes, held.handle()))
        },
        // SAFETY: as above.
        Direction::ToHost => unsafe {
            cu!(driver, cuMemcpyDtoHAsync(host, device, bytes, held.handle()))
        },
    }
}

fn describe(copy: &Rows) -> CUDA_MEMCPY2D {
    let device = (CUmemorytype::CU_MEMORYTYPE_DEVICE, copy.device, copy.device_pitch);
    let host = (CUmemorytype::CU_MEMORYTYPE_HOST, 0, copy.host_pitch);
    let (source, target) = match copy.direction {
        Direction::ToDevice => (host, device),
        Direction::ToHost => (device, host),
    };
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: source.0,
        // Read for the side that is the host's, ignored for the other.
        srcHost: copy.host,
        srcDevice: source.1,
        srcArray: std::ptr::null_mut(),
        srcPitch: source.2,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: target.0,
        dstHost: copy.host,
        dstDevice: target.1,
        dstArray: std::ptr::null_mut(),
        dstPitch: target.2,
        WidthInBytes: copy.width,
        Height: copy.rows,
    }
}
