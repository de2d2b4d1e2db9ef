//! The functions of cuBLASLt that are called, and its descriptors as owned values.
//!
//! Numbers are those of `cublasLt.h` and `cublas_api.h`, which are the same in CUDA 12 and 13.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::gemm::GemmAlgorithm;
use crate::device::sys::CUstream;
use swiglu_core::DType;

use crate::device::error::{CudaError, Result};
use crate::device::library::{Library, functions};

/// A descriptor or handle: an address that only the library looks behind.
type Opaque = *mut c_void;

functions! {
    /// Functions of `libcublasLt`.
    pub(super) struct Api from Library::CublasLt;
    required {
        fn cublasLtCreate = "cublasLtCreate"(*mut Opaque) -> c_int;
        fn cublasLtDestroy = "cublasLtDestroy"(Opaque) -> c_int;
        fn cublasLtGetVersion = "cublasLtGetVersion"() -> usize;

        fn cublasLtMatmulDescCreate = "cublasLtMatmulDescCreate"(*mut Opaque, c_int, c_int) -> c_int;
        fn cublasLtMatmulDescSetAttribute =
            "cublasLtMatmulDescSetAttribute"(Opaque, c_int, *const c_void, usize) -> c_int;
        fn cublasLtMatmulDescDestroy = "cublasLtMatmulDescDestroy"(Opaque) -> c_int;

        fn cublasLtMatrixLayoutCreate =
            "cublasLtMatrixLayoutCreate"(*mut Opaque, c_int, u64, u64, i64) -> c_int;
        fn cublasLtMatrixLayoutDestroy = "cublasLtMatrixLayoutDestroy"(Opaque) -> c_int;

        fn cublasLtMatmulPreferenceCreate = "cublasLtMatmulPreferenceCreate"(*mut Opaque) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute =
            "cublasLtMatmulPreferenceSetAttribute"(Opaque, c_int, *const c_void, usize) -> c_int;
        fn cublasLtMatmulPreferenceDestroy = "cublasLtMatmulPreferenceDestroy"(Opaque) -> c_int;

        fn cublasLtMatmulAlgoGetHeuristic = "cublasLtMatmulAlgoGetHeuristic"(
            Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Choice, *mut c_int
        ) -> c_int;
        fn cublasLtMatmulAlgoCheck = "cublasLtMatmulAlgoCheck"(
            Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, *const Algorithm, *mut Choice,
        ) -> c_int;
        fn cublasLtMatmul = "cublasLtMatmul"(
            Opaque, Opaque, *const f32, *const c_void, Opaque, *const c_void, Opaque, *const f32,
            *const c_void, Opaque, *mut c_void, Opaque, *const Algorithm, *mut c_void, usize,
            CUstream
        ) -> c_int;
    }
    optional {
        // Without it the first proposal is taken.
        fn cublasLtMatmulAlgoConfigGetAttribute = "cublasLtMatmulAlgoConfigGetAttribute"(
            *const Algorithm, c_int, *mut c_void, usize, *mut usize
        ) -> c_int;
        // Only shown to people.
        fn cublasLtGetStatusName = "cublasLtGetStatusName"(c_int) -> *const c_char;
        fn cublasLtGetStatusString = "cublasLtGetStatusString"(c_int) -> *const c_char;
    }
}

/// `CUBLAS_STATUS_NOT_SUPPORTED`: valid, but the library has no kernel for it.
pub(super) const NOT_SUPPORTED: c_int = 15;

/// `CUBLAS_COMPUTE_*`: how products are accumulated.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(super) enum Compute {
    F32 = 68,
    FastTf32 = 77,
}

/// `CUBLAS_OP_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub(super) enum Transpose {
    No = 0,
    Yes = 1,
}

/// `cublasLtMatmulDescAttributes_t`.
mod operation {
    pub(super) const TRANSPOSE_A: i32 = 3;
    pub(super) const TRANSPOSE_B: i32 = 4;
    pub(super) const EPILOGUE: i32 = 7;
    pub(super) const BIAS_POINTER: i32 = 8;
}
const EPILOGUE_BIAS: i32 = 4;

/// `cublasLtMatmulPreferenceAttributes_t`.
mod preference {
    pub(super) const MAX_WORKSPACE_BYTES: i32 = 1;
    pub(super) const REDUCTION_SCHEME_MASK: i32 = 3;
    /// Of A; those of B, C and D follow.
    pub(super) const MIN_ALIGNMENT_A_BYTES: i32 = 5;
}

/// `cublasLtMatmulAlgoConfigAttributes_t`.
mod config {
    pub(super) const ID: i32 = 0;
    pub(super) const TILE: i32 = 1;
    pub(super) const SPLIT_K: i32 = 2;
    pub(super) const REDUCTION: i32 = 3;
    pub(super) const SWIZZLING: i32 = 4;
    pub(super) const OPTION: i32 = 5;
    pub(super) const STAGES: i32 = 6;
    pub(super) const INNER_SHAPE: i32 = 7;
    pub(super) const CLUSTER: i32 = 8;
}
/// `CUBLASLT_MATMUL_TILE_128x128` and `_128x160`.
const SHORT_TILES: [u32; 2] = [20, 29];
/// `CUBLASLT_CLUSTER_SHAPE_2x1x1` and `_1x2x1`.
const PAIRS: [u16; 2] = [3, 5];

/// Parts of a long sum are added in the type that they were accumulated in. The library's default
/// also admits adding them in the type of the output: several roundings to 8 bits in bf16.
const REDUCTION_COMPUTE_TYPE: u32 = 2;
/// A sum is made in one sequence.
const REDUCTION_NONE: u32 = 0;

/// `cublasLtMatmulAlgo_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Choice {
    pub(super) algorithm: Algorithm,
    pub(super) workspace_bytes: usize,
    pub(super) state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Api {
    /// Whether an algorithm has tiles of 128 × 128 or 128 × 160 in clusters of two.
    pub(super) fn has_short_tiles(&self, algorithm: &Algorithm) -> bool {
        let tile = self.config(algorithm, config::TILE);
        let cluster = self.config(algorithm, config::CLUSTER);
        tile.is_some_and(|tile| SHORT_TILES.contains(&tile))
            && cluster.is_some_and(|cluster| PAIRS.contains(&cluster))
    }

    /// What identifies an algorithm, where the library says it.
    pub(super) fn identify(&self, algorithm: &Algorithm) -> Option<GemmAlgorithm> {
        let number = |attribute| self.config::<u32>(algorithm, attribute);
        let short = |attribute| self.config::<u16>(algorithm, attribute);
        Some(GemmAlgorithm {
            id: number(config::ID)?,
            tile: number(config::TILE)?,
            stages: number(config::STAGES)?,
            cluster: short(config::CLUSTER)?,
            inner_shape: short(config::INNER_SHAPE)?,
            split_k: number(config::SPLIT_K)?,
            reduction: number(config::REDUCTION)?,
            swizzling: number(config::SWIZZLING)?,
            option: number(config::OPTION)?,
        })
    }

    fn config<V: Copy + Default>(&self, algorithm: &Algorithm, attribute: i32) -> Option<V> {
        let get = self.cublasLtMatmulAlgoConfigGetAttribute?;
        let (mut value, mut written) = (V::default(), 0);
        // SAFETY: a place of the size that is given, which the library refuses if the attribute has another.
        let status = unsafe {
            get(algorithm, attribute, (&raw mut value).cast(), size_of::<V>(), &mut written)
        };
        (status == 0 && written == size_of::<V>()).then_some(value)
    }
}

/// `cudaDataType_t`.
pub(super) fn data_type(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(2),
        DType::Bf16 => Ok(14),
        other => Err(CudaError::Unsupported {
            what: format!("a linear map of {other}"),
            why: "choose one of f32, f16, bf16".into(),
        }),
    }
}
const SCALE_F32: c_int = 0;

/// The library, loaded on the first call.
pub(super) fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(Api::load).as_ref().map_err(Clone::clone)
}

/// The version of cuBLASLt: major, minor, patch. Needs no device.
///
/// # Errors
/// [`CudaError::LibraryMissing`], [`CudaError::SymbolMissing`].
pub fn cublaslt_version() -> Result<(usize, usize, usize)> {
    // SAFETY: takes nothing and needs no device.
    let version = unsafe { (api()?.cublasLtGetVersion)() };
    Ok((version / 10_000, version / 100 % 100, version % 100))
}

impl Api {
    /// Turns the result of `call` into an error with the library's own words.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.describe(call, code)) }
    }

    #[cold]
    fn describe(&self, call: &'static str, code: c_int) -> CudaError {
        let text = |get: Option<unsafe extern "C" fn(c_int) -> *const c_char>| {
            // SAFETY: any number may be asked for.
            let text = get.map_or(std::ptr::null(), |get| unsafe { get(code) });
            if text.is_null() {
                return "a status without a text".to_owned();
            }
            // SAFETY: the library returns a constant, null-terminated string.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let (name, description) =
            (text(self.cublasLtGetStatusName), text(self.cublasLtGetStatusString));
        CudaError::Driver { call, code, name, description }
    }
}

/// Calls a function of cuBLASLt and turns its result into `Result<()>`; unsafe, as `cu!` is.
macro_rules! lt {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $api.check(stringify!($name), ($api.$name)($($arg),*))
    };
}
pub(super) use lt;

/// Something that the library made and that it destroys with a function of its own.
pub(super) struct Owned {
    raw: Opaque,
    destroy: unsafe extern "C" fn(Opaque) -> c_int,
}

// SAFETY: handles and descriptors are plain memory without ties to a thread. A handle may be used by
// several threads at once; descriptors are only read after they were made, but for the bias, which
// is written under a lock.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    pub(super) fn raw(&self) -> Opaque {
        self.raw
    }

    /// A handle for the device whose context is current.
    pub(super) fn handle(api: &Api) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid place for the handle.
        unsafe { lt!(api, cublasLtCreate(&mut raw)) }?;
        Ok(Self { raw, destroy: api.cublasLtDestroy })
    }

    /// D = op(A)·op(B), with or without a bias along the rows of D.
    pub(super) fn operation(
        api: &Api,
        compute: Compute,
        [transpose_a, transpose_b]: [Transpose; 2],
        bias: bool,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid place for the descriptor.
        unsafe { lt!(api, cublasLtMatmulDescCreate(&mut raw, compute as c_int, SCALE_F32)) }?;
        let made = Self { raw, destroy: api.cublasLtMatmulDescDestroy };
        made.set_operation(api, operation::TRANSPOSE_A, &(transpose_a as i32))?;
        made.set_operation(api, operation::TRANSPOSE_B, &(transpose_b as i32))?;
        if bias {
            made.set_operation(api, operation::EPILOGUE, &EPILOGUE_BIAS)?;
        }
        Ok(made)
    }

    /// The address of the bias, of an operation that has one.
    pub(super) fn set_bias(&self, api: &Api, address: u64) -> Result<()> {
        self.set_operation(api, operation::BIAS_POINTER, &address)
    }

    fn set_operation<V: Copy>(&self, api: &Api, attribute: i32, value: &V) -> Result<()> {
        let (place, size) = ((&raw const *value).cast(), size_of::<V>());
        // SAFETY: a value of the size that is given; the library refuses a wrong one.
        unsafe { lt!(api, cublasLtMatmulDescSetAttribute(self.raw, attribute, place, size)) }
    }

    /// A column-major matrix whose columns start `leading` elements apart.
    pub(super) fn layout(
        api: &Api,
        dtype: DType,
        rows: usize,
        cols: usize,
        leading: usize,
    ) -> Result<Self> {
        let data_type = data_type(dtype)?;
        let (rows, cols, leading) = (rows as u64, cols as u64, leading.cast_signed() as i64);
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid place for the descriptor.
        unsafe { lt!(api, cublasLtMatrixLayoutCreate(&mut raw, data_type, rows, cols, leading)) }?;
        Ok(Self { raw, destroy: api.cublasLtMatrixLayoutDestroy })
    }

    /// What an algorithm may use: scratch memory, the alignments of A, B, C and D in bytes, and whether it may make long
    /// sums in parts.
    pub(super) fn preference(
        api: &Api,
        scratch: usize,
        alignments: [u32; 4],
        parts: bool,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid place for the descriptor.
        unsafe { lt!(api, cublasLtMatmulPreferenceCreate(&mut raw)) }?;
        let made = Self { raw, destroy: api.cublasLtMatmulPreferenceDestroy };
        made.set_preference(api, preference::MAX_WORKSPACE_BYTES, &scratch)?;
        let schemes = if parts { REDUCTION_COMPUTE_TYPE } else { REDUCTION_NONE };
        made.set_preference(api, preference::REDUCTION_SCHEME_MASK, &schemes)?;
        for (attribute, bytes) in (preference::MIN_ALIGNMENT_A_BYTES..).zip(alignments) {
            made.set_preference(api, attribute, &bytes)?;
        }
        Ok(made)
    }

    fn set_preference<V: Copy>(&self, api: &Api, attribute: i32, value: &V) -> Result<()> {
        let (place, size) = ((&raw const *value).cast(), size_of::<V>());
        // SAFETY: a value of the size that is given; the library refuses a wrong one.
        unsafe { lt!(api, cublasLtMatmulPreferenceSetAttribute(self.raw, attribute, place, size)) }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the function that this one belongs to, and destroyed once.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}
