//! What a device can do at most, measured by its own copy and by cuBLASLt: the yardsticks of its
//! speed.

use std::sync::Arc;

use serde::Serialize;
use swiglu_core::{DType, Element, Orientation, bf16, f16, random};

use crate::device::cuda::Cuda;
use crate::device::driver::cu;
use crate::device::error::{CudaError, Result};
use crate::device::library::Library;
use crate::device::lt::{LinearWeights, Lt, Product as Form};
use crate::device::memory::{DeviceBuffer, DeviceMatrix};
use crate::device::stream::Stream;

/// Measurements, of which the median counts.
const SAMPLES: usize = 11;
/// Random values that fill a matrix by repetition: enough that no two tiles of a product are alike,
/// so that the device draws the power of real work.
const RANDOM_VALUES: usize = (1 << 16) - 1;

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
    let mut product = Product::<T>::new(&stream, [side; 3], false, Orientation::OutIn)?;
    let seconds = median_seconds(&stream, || product.enqueue(&stream))?;
    Ok(2.0 * (side as f64).powi(3) / seconds)
}

/// A product `[m, k]·[k, n]` of dense matrices through cuBLASLt, to be timed: x as it is or, `transposed`, with its rows
/// summed over, and weights of an orientation. The products of a layer and of its backward pass are of these forms.
#[derive(Debug)]
pub struct Product<T> {
    lt: Arc<Lt>,
    x: DeviceMatrix<T>,
    weights: DeviceMatrix<T>,
    y: DeviceMatrix<T>,
    orientation: Orientation,
    form: Form,
}

impl<T: Element> Product<T> {
    /// Of random values.
    ///
    /// # Errors
    /// As [`gemm`].
    pub fn new(
        stream: &Stream,
        [m, k, n]: [usize; 3],
        transposed: bool,
        orientation: Orientation,
    ) -> Result<Self> {
        let values: Vec<T> =
            (0..RANDOM_VALUES).map(|i| T::from_f32(random::normal(0, i as u64))).collect();
        let matrix = |[rows, cols]: [usize; 2]| {
            let values: Vec<T> = values.iter().copied().cycle().take(rows * cols).collect();
            let mut matrix = DeviceMatrix::<T>::new(stream, rows, cols)?;
            matrix.buffer_mut().upload(&values)?;
            Ok::<_, CudaError>(matrix)
        };
        Ok(Self {
            lt: stream.cuda().lt()?,
            x: matrix(if transposed { [k, m] } else { [m, k] })?,
            weights: matrix(orientation.shape(n, k))?,
            y: DeviceMatrix::new(stream, m, n)?,
            orientation,
            form: Form { transposed, ..Form::default() },
        })
    }

    /// Enqueues it.
    ///
    /// # Errors
    /// What cuBLASLt reports.
    pub fn enqueue(&mut self, stream: &Stream) -> Result<()> {
        let (k, n) = match self.orientation {
            Orientation::OutIn => (self.weights.cols(), self.weights.rows()),
            Orientation::InOut => (self.weights.rows(), self.weights.cols()),
        };
        let weights = LinearWeights {
            ptr: self.weights.buffer().device_ptr(),
            orientation: self.orientation,
            in_features: k,
            out_features: n,
            row_stride: self.weights.cols(),
            bias: None,
        };
        let cuda = stream.cuda();
        self.weights.view().admit("weights", self.weights.shape(), stream)?;
        self.x.view().admit("x", self.x.shape(), stream)?;
        let shape = self.y.shape();
        self.y.view_mut().admit("y", shape, stream)?;
        cuda.with_workspace(stream, None, Lt::scratch_bytes(cuda.arch()), |work| {
            let (x, y) = (self.x.view(), self.y.view_mut());
            // SAFETY: the matrices are freed behind the work that was admitted; the scratch memory is the stream's own.
            unsafe { self.lt.product(stream, x, &weights, y, self.form, work.ptr) }
        })
    }
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
