//! Linear maps through cuBLASLt, which is loaded at run time.
//!
//! cuBLASLt counts matrices in columns. A row-major `y = x·W` is the column-major `yᵀ = Wᵀ·xᵀ` over
//! the same memory, so nothing is copied: Wᵀ is its A, xᵀ its B, yᵀ its C and D, and a bias along
//! the output features is one along the rows of D, which its epilogue adds.

mod api;
mod gemm;
mod key;
mod proposals;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use swiglu_core::{DType, Element, Orientation};

use crate::device::arch::Arch;
use crate::device::context::Context;
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::loading;
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
pub use api::cublaslt_version;
use api::{Algorithm, Api, Compute, Owned, Transpose, api, lt};
pub(crate) use gemm::Measured;
pub use gemm::{Gemm, GemmAlgorithm};
use key::Key;

/// Weights of a linear map in device memory that someone else owns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearWeights {
    /// The first element.
    pub(crate) ptr: u64,
    /// Whether a row is an output feature or an input feature.
    pub(crate) orientation: Orientation,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    /// Elements between the starts of two rows.
    pub(crate) row_stride: usize,
    /// `out_features` values of the output's type.
    pub(crate) bias: Option<u64>,
}

/// What becomes of a product, other than that a linear map's is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    /// Whether the left factor is xᵀ: the rows of x are what is summed over.
    pub(crate) transposed: bool,
    /// Whether it is added to what y holds.
    pub(crate) accumulate: bool,
    /// What computes it.
    pub(crate) by: By,
}

/// Which of cuBLASLt's algorithms computes a product.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) enum By {
    /// The one that was measured to be the fastest, where its problem was measured, else what it proposes first.
    #[default]
    Planned,
    /// What it proposes, by number, from 0.
    Proposal(u8),
    /// One that makes each sum in one sequence, for every number of rows of x.
    Fixed,
}

/// Linear maps on one device.
pub(crate) struct Lt {
    api: &'static Api,
    context: Arc<Context>,
    handle: ManuallyDrop<Owned>,
    tf32: bool,
    arch: Arch,
    scratch_bytes: usize,
    /// What was measured of this version of cuBLASLt, in order of preference.
    measured: Vec<Arc<Measured>>,
    /// Descriptors and the chosen algorithm for every problem met so far.
    prepared: RwLock<HashMap<Key, Prepared>>,
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: taken once, and nothing uses it any more.
        let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
        // The library synchronises the device when a handle is destroyed.
        self.context.leave_work(move || drop(handle));
    }
}

/// Problems that are remembered. Serving meets a few hundred; beyond this the memory is worth more.
const REMEMBERED: usize = 4096;

struct Prepared {
    operation: Owned,
    /// The bias is the one thing in a descriptor that differs between layers: written and used
    /// under this lock.
    bias: Mutex<()>,
    weights: Owned,
    x: Owned,
    y: Owned,
    algorithm: Algorithm,
}

impl Lt {
    /// cuBLASLt on a device, with what was measured of its algorithms there, by any version.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`], [`CudaError::SymbolMissing`], or what cuBLASLt reports.
    pub(crate) fn new(cuda: &Cuda, measured: &[Arc<Measured>]) -> Result<Self> {
        loading::expect_allowed(|| "cuBLASLt".into())?;
        let api = api()?;
        cuda.bind()?;
        let (major, minor, _) = cublaslt_version()?;
        let of_this = measured.iter().filter(|measured| measured.version == (major, minor));
        Ok(Self {
            api,
            context: cuda.context().clone(),
            handle: ManuallyDrop::new(Owned::handle(api)?),
            tf32: cuda.tf32(),
            arch: cuda.arch(),
            scratch_bytes: Self::scratch_bytes(cuda.arch()),
            measured: of_this.cloned().collect(),
            prepared: RwLock::default(),
        })
    }

    /// Bytes of scratch memory that a launch may use: what NVIDIA recommends for cuBLAS.
    pub(crate) fn scratch_bytes(arch: Arch) -> usize {
        if arch >= Arch::Sm90a { 32 << 20 } else { 4 << 20 }
    }

    /// Enqueues `y = x·W (+ b)`, with xᵀ in the place of x or added to what y holds as `product` says, accumulated in f32 and
    /// rounded to `Y`, which is `T` or f32; what is added to y, once more. A problem that was met before costs no allocation and no waiting. No tokens or no
    /// output features: nothing is done.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`]; [`CudaError::WrongDevice`]; [`CudaError::Unsupported`]
    /// without input features (the caller writes the bias then), for rows of x that overlap, for rows 2 GiB apart that are
    /// summed over, and where cuBLASLt has no algorithm; what cuBLASLt reports.
    ///
    /// # Safety
    /// `w` describes memory of this device that holds elements of type `T`, and a bias of type `Y`, until
    /// the work is done, and `scratch` is the address of [`Lt::scratch_bytes`] bytes, a multiple of 256, that no work
    /// outside the stream's order uses.
    pub(crate) unsafe fn product<T: Element, Y: Element>(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        w: &LinearWeights,
        y: DeviceMatrixMut<'_, Y>,
        product: Product,
        scratch: u64,
    ) -> Result<()> {
        self.expect(stream, &x, w, &y, product)?;
        let key = Key::of(&x, w, &y, product);
        if key.m == 0 || key.n == 0 {
            return Ok(());
        }
        self.context.bind()?;
        let addresses = [w.ptr, x.device_ptr(), y.device_ptr(), scratch];
        // The lock is held while the work is enqueued: what is looked up is not removed meanwhile.
        let known = self.prepared.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(prepared) = known.get(&key) {
            // SAFETY: passed on from the caller; `prepared` was made for this key.
            return unsafe { self.enqueue(prepared, stream, addresses, w.bias, product) };
        }
        drop(known);
        let prepared = self.prepare(&key)?;
        // SAFETY: as above.
        unsafe { self.enqueue(&prepared, stream, addresses, w.bias, product) }?;
        let mut known = self.prepared.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(key, prepared);
        Ok(())
    }

    fn expect<T: Element, Y: Element>(
        &self,
        stream: &Stream,
        x: &DeviceMatrixRef<'_, T>,
        w: &LinearWeights,
        y: &DeviceMatrixMut<'_, Y>,
        product: Product,
    ) -> Result<()> {
        let (m, x_shape) = match product.transposed {
            true => (x.cols(), [w.in_features, x.cols()]),
            false => (x.rows(), [x.rows(), w.in_features]),
        };
        x.expect_shape("input of a linear map", x_shape)?;
        y.expect_shape("output of a linear map", [m, w.out_features])?;
        let devices = [
            ("stream", stream.cuda().ordinal()),
            ("input of a linear map", x.ordinal()),
            ("output of a linear map", y.ordinal()),
        ];
        for (what, ordinal) in devices {
            if ordinal != self.context.ordinal {
                return Err(CudaError::WrongDevice {
                    what: what.into(),
                    expected: format!("device {}", self.context.ordinal),
                    given: format!("device {ordinal}"),
                });
            }
        }
        let refuse = |why: &str| {
            let what = format!("a linear map {m}×{}×{}", w.in_features, w.out_features);
            Err(CudaError::Unsupported { what, why: why.to_owned() })
        };
        if w.in_features == 0 && m > 0 && w.out_features > 0 {
            return refuse("without input features there is nothing to multiply");
        }
        let [w_rows, w_cols] = w.orientation.shape(w.out_features, w.in_features);
        let overlap = |rows, cols, stride| rows > 1 && stride < cols;
        if overlap(x.rows(), x.cols(), x.row_stride()) || overlap(w_rows, w_cols, w.row_stride) {
            return refuse("rows of a factor overlap; copy it to a dense matrix");
        }
        // Seen with cuBLASLt 13.0: of factors whose rows are summed over, those 2^31 bytes apart are read elsewhere.
        let summed_over = [
            (product.transposed, x.rows(), x.row_stride()),
            (w.orientation == Orientation::InOut, w.in_features, w.row_stride),
        ];
        let far = |&(summed, rows, stride): &(bool, usize, usize)| {
            summed && rows > 1 && stride.saturating_mul(size_of::<T>()) > i32::MAX as usize
        };
        if summed_over.iter().any(far) {
            return refuse("cuBLASLt does not read right rows 2 GiB apart that it sums over");
        }
        Ok(())
    }

    /// The products that were met so far, and what identifies the algorithm that each is computed by.
    #[cfg(test)]
    pub(crate) fn met(&self) -> Vec<(Gemm, Option<GemmAlgorithm>)> {
        let prepared = self.prepared.read().unwrap();
        let met = |(key, prepared): (&Key, &Prepared)| {
            Some((key.gemm()?, self.api.identify(&prepared.algorithm)))
        };
        prepared.iter().filter_map(met).collect()
    }

    fn prepare(&self, key: &Key) -> Result<Prepared> {
        let described = self.describe(key)?;
        let algorithm = self.algorithm(key, &described)?;
        Ok(Prepared { algorithm, ..described })
    }

    /// The descriptors of a problem, with no algorithm.
    fn describe(&self, key: &Key) -> Result<Prepared> {
        let api = self.api;
        let [x_stride, w_stride, y_stride] = key.strides;
        let compute = match key.dtype == DType::F32 && self.tf32 {
            true => Compute::FastTf32,
            false => Compute::F32,
        };
        let (rows, cols) = match key.transpose {
            Transpose::Yes => (key.k, key.n),
            Transpose::No => (key.n, key.k),
        };
        let (transpose_x, x_rows, x_cols) = match key.product.transposed {
            true => (Transpose::Yes, key.m, key.k),
            false => (Transpose::No, key.k, key.m),
        };
        Ok(Prepared {
            operation: Owned::operation(api, compute, [key.transpose, transpose_x], key.bias)?,
            bias: Mutex::default(),
            weights: Owned::layout(api, key.dtype, rows, cols, w_stride)?,
            x: Owned::layout(api, key.dtype, x_rows, x_cols, x_stride)?,
            y: Owned::layout(api, key.out, key.n, key.m, y_stride)?,
            algorithm: Algorithm::default(),
        })
    }

    /// # Safety
    /// As [`Lt::product`]; `prepared` was made for the problem that the addresses belong to.
    unsafe fn enqueue(
        &self,
        prepared: &Prepared,
        stream: &Stream,
        [w, x, y, scratch]: [u64; 4],
        bias: Option<u64>,
        product: Product,
    ) -> Result<()> {
        let _exclusive = match bias {
            Some(address) => {
                let lock = prepared.bias.lock().unwrap_or_else(PoisonError::into_inner);
                prepared.operation.set_bias(self.api, address)?;
                Some(lock)
            }
            None => None,
        };
        let held = stream.raw_stream().hold()?;
        let (one, before) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let y = y as *mut c_void;
        // SAFETY: live descriptors; the caller vouches for the memory. The two factors are read
        // before the call returns (the pointer mode is the host's), and C is y, which is not read with a factor of 0.
        unsafe {
            lt!(
                self.api,
                cublasLtMatmul(
                    self.handle.raw(),
                    prepared.operation.raw(),
                    &one,
                    w as *const c_void,
                    prepared.weights.raw(),
                    x as *const c_void,
                    prepared.x.raw(),
                    &before,
                    y,
                    prepared.y.raw(),
                    y,
                    prepared.y.raw(),
                    &prepared.algorithm,
                    scratch as *mut c_void,
                    self.scratch_bytes,
                    held.handle(),
                )
            )
        }
    }
}

impl fmt::Debug for Lt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.prepared.read().unwrap_or_else(PoisonError::into_inner).len();
        f.debug_struct("Lt")
            .field("device", &self.context.ordinal)
            .field("tf32", &self.tf32)
            .field("problems", &problems)
            .finish_non_exhaustive()
    }
}
