//! What a device can do at most, measured by its own copy and by cuBLASLt: the yardsticks of its
//! speed.

mod product;

use serde::Serialize;
use swiglu_core::{DType, Element, Orientation, bf16, f16};

use crate::device::cuda::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::library::Library;
use crate::device::memory::DeviceBuffer;
use crate::device::stream::Stream;
pub use product::Product;

/// Measurements, of which the median counts.
const SAMPLES: usize = 11;

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ceilings {
    /// Bytes per second of a copy in device memory, read and written ones together.
    pub copy: f64,
    /// Operations per second of a large f32 product, in TF32 where the device was made for it;
    /// `None` without cuBLASLt.
    pub gemm_f32: Option<f64>,
    /// Of a large f16 product.
    pub gemm_f16: Option<f64>,
    /// Of a large bf16 product.
    pub gemm_bf16: Option<f64>,
}

impl Ceilings {
    /// Operations per second of a large product of this element type.
    pub fn gemm(&self, dtype: DType) -> Option<f64> {
        match dtype {
            DType::F32 => self.gemm_f32,
            DType::F16 => self.gemm_f16,
            DType::Bf16 => self.gemm_bf16,
            _ => None,
        }
    }
}

/// All limits; about a second.
///
/// # Errors
/// [`CudaError::OutOfMemory`], or what the driver reports.
pub fn measure(cuda: &Cuda) -> Result<Ceilings> {
    Ok(Ceilings {
        copy: copy(cuda)?,
        gemm_f32: optional(gemm::<f32>(cuda))?,
        gemm_f16: optional(gemm::<f16>(cuda))?,
        gemm_bf16: optional(gemm::<bf16>(cuda))?,
    })
}

/// A rate that is unknown where cuBLASLt is not installed.
fn optional(rate: Result<f64>) -> Result<Option<f64>> {
    match rate {
        Ok(rate) => Ok(Some(rate)),
        Err(
            CudaError::LibraryMissing { library: Library::CublasLt, .. }
            | CudaError::SymbolMissing { library: Library::CublasLt, .. },
        ) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Bytes per second of a copy in device memory, far larger than L2.
///
/// # Errors
/// As [`measure`].
pub fn copy(cuda: &Cuda) -> Result<f64> {
    let (free, _) = cuda.memory_info()?;
    let bytes = (8 * cuda.facts().l2_bytes).max(16 << 20).min(free / 4);
    let stream = cuda.stream();
    let source = DeviceBuffer::<f32>::zeros(&stream, bytes / 4)?;
    let target = DeviceBuffer::<f32>::new(&stream, bytes / 4)?;
    let bytes = source.len() * 4;
    let seconds = median_seconds(&stream, || {
        let (to, from) = (target.device_ptr(), source.device_ptr());
        let held = stream.raw_stream().hold()?;
        // SAFETY: both buffers have as many bytes and live until the stream was waited for.
        unsafe { cu!(cuda.driver(), cuMemcpyDtoDAsync(to, from, bytes, held.handle())) }
    })?;
    Ok(2.0 * bytes as f64 / seconds)
}

/// Operations per second of a square product through cuBLASLt, with tiles enough for every
/// SM many times over.
///
/// # Errors
/// As [`measure`]; [`CudaError::LibraryMissing`] without cuBLASLt.
pub fn gemm<T: Element>(cuda: &Cuda) -> Result<f64> {
    let side = (cuda.facts().sm_count as usize * 64).next_multiple_of(256).clamp(256, 8192);
    let stream = cuda.stream();
    let mut product = Product::<T, T>::new(&stream, [side; 3], false, Orientation::OutIn)?;
    let seconds = median_seconds(&stream, || product.enqueue(&stream))?;
    Ok(2.0 * (side as f64).powi(3) / seconds)
}

/// Of work on an otherwise idle device, by its own clock. Waits for the last of it.
fn median_seconds(stream: &Stream, mut enqueue: impl FnMut() -> Result<()>) -> Result<f64> {
    // The first call chooses and loads a kernel, the second finds the clocks still low.
    enqueue()?;
    enqueue()?;
    let mut marks = vec![stream.record()?];
    for _ in 0..SAMPLES {
        enqueue()?;
        marks.push(stream.record()?);
    }
    let mut times = Vec::with_capacity(SAMPLES);
    for pair in marks.windows(2) {
        times.push(f64::from(pair[1].elapsed_ms(&pair[0])?) / 1e3);
    }
    times.sort_unstable_by(f64::total_cmp);
    // A simulated clock may stand still.
    Ok(times[SAMPLES / 2].max(1e-9))
}
