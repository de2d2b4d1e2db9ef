//! DLPack, by which array libraries lend each other memory: its structures as dlpack.h (v0.8) declares them, in capsules.
#![expect(
    clippy::cast_possible_wrap,
    reason = "extents of arrays that exist; DLPack counts in i64"
)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple, PyType};
use swiglu::{CoreError, DType};

use crate::error::Failure;
use crate::tensor::{Extents, Tensor};

const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
/// `kDLCPU`; `kDLCUDAHost` is memory of the host too.
const CPU: i32 = 1;
const CUDA_HOST: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Type {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: Type,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
pub(crate) struct DlManagedTensor {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

const TYPES: [(DType, Type); 3] = [
    (DType::F32, Type { code: 2, bits: 32, lanes: 1 }),
    (DType::F16, Type { code: 2, bits: 16, lanes: 1 }),
    (DType::Bf16, Type { code: 4, bits: 16, lanes: 1 }),
];

/// A tensor that was lent to us: given back when it is dropped.
pub(crate) struct Managed(NonNull<DlManagedTensor>);

// SAFETY: DLPack lets a deleter be called on any thread; what is lent is reached through the tensor's description alone.
unsafe impl Send for Managed {}
// SAFETY: as above; nothing is written through a shared reference.
unsafe impl Sync for Managed {}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: the capsule was renamed when this was made, so that nobody else calls it.
        unsafe {
            if let Some(delete) = self.0.as_ref().deleter {
                delete(self.0.as_ptr());
            }
        }
    }
}

/// What `__dlpack__` gives, if it lies in the host's memory.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> Result<Tensor, Failure> {
    let py = object.py();
    let Ok(lend) = object.getattr("__dlpack__") else {
        let kind = object.get_type();
        let text = format!("expected an array (numpy, or with __dlpack__), given {kind}");
        return Err(PyTypeError::new_err(text).into());
    };
    let refused = |why: PyErr| -> Failure {
        // What interrupts a program is no refusal.
        if !why.is_instance_of::<PyException>(py) {
            return why.into();
        }
        let (what, why) = ("an array that DLPack does not lend".into(), why.to_string());
        CoreError::Unsupported { what, why }.into()
    };
    let capsule = lend.call0().map_err(refused)?;
    let capsule = capsule.cast::<PyCapsule>().map_err(|why| refused(why.into()))?;
    // SAFETY: a capsule of this name holds a `DLManagedTensor`; the call refuses another name, with an exception.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
    let Some(managed) = NonNull::new(managed.cast::<DlManagedTensor>()) else {
        return Err(refused(PyErr::fetch(py)));
    };
    // SAFETY: the capsule is alive; its new name says that the tensor is ours, which is dropped below in any case.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py).into());
    }
    let owner = Managed(managed);
    // SAFETY: lent until the deleter is called.
    let tensor = unsafe { &managed.as_ref().tensor };
    let Device { kind, .. } = tensor.device;
    if kind != CPU && kind != CUDA_HOST {
        let what = format!("an array on DLPack's device type {kind}");
        let why = "this function computes in the host's memory; copy it there, or call swiglu.torch with a CUDA tensor";
        return Err(CoreError::Unsupported { what, why: why.into() }.into());
    }
    // SAFETY: lent until the deleter is called, by `owner`.
    let made = unsafe { described(tensor, Some(owner)) }?;
    Ok(made)
}

/// # Safety
/// The description and what it points to are valid.
unsafe fn described(tensor: &DlTensor, owner: Option<Managed>) -> Result<Tensor, CoreError> {
    let same = |t: Type| {
        (t.code, t.bits, t.lanes) == (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    };
    let Some(dtype) = TYPES.iter().find(|(_, t)| same(*t)).map(|(dtype, _)| *dtype) else {
        let Type { code, bits, lanes } = tensor.dtype;
        let what = format!("DLPack's type (code {code}, {bits} bits, {lanes} lanes)");
        let why = "kernels compute with f32, f16 and bf16; convert it".into();
        return Err(CoreError::Unsupported { what, why });
    };
    let dims = usize::try_from(tensor.ndim).unwrap_or(0);
    let extents = |ptr: *mut i64| -> &[i64] {
        if dims == 0 || ptr.is_null() {
            return &[];
        }
        // SAFETY: an array of `ndim` numbers, as long as the tensor is lent.
        unsafe { std::slice::from_raw_parts(ptr, dims) }
    };
    let shape: Extents<usize> = extents(tensor.shape).iter().map(|&n| n.max(0) as usize).collect();
    let strides = match tensor.strides.is_null() {
        true => dense_strides(&shape),
        false => extents(tensor.strides).iter().map(|&s| s as isize).collect(),
    };
    let address = tensor.data as usize + tensor.byte_offset as usize;
    Ok(Tensor { address, shape, strides, dtype, writable: true, _owner: owner })
}

/// The table of functions by which PyTorch describes its tensors: `DLPackExchangeAPI` of dlpack.h, from v1.2 on.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    previous: *const c_void,
    /// An allocator, and two exchanges of tensors that are kept.
    _others: [*const c_void; 3],
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> i32>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32>,
}

/// The table, and the types of tensors that it is for.
struct Known {
    exchange: &'static Exchange,
    types: [usize; 2],
}

// SAFETY: the table is constant, and its functions may be called from any thread that holds the interpreter.
unsafe impl Send for Known {}
// SAFETY: as above.
unsafe impl Sync for Known {}

static KNOWN: OnceLock<Known> = OnceLock::new();
const CUDA: i32 = 2;

/// Takes tensors of these types by their library's table from now on; whether there is one that this module can read.
#[pyfunction]
pub(crate) fn describe_by_table(
    tensor: &Bound<'_, PyType>,
    parameter: &Bound<'_, PyType>,
) -> PyResult<bool> {
    let Ok(capsule) = tensor.getattr("__dlpack_c_exchange_api__") else { return Ok(false) };
    let Ok(capsule) = capsule.cast::<PyCapsule>() else { return Ok(false) };
    const TABLE: &CStr = c"dlpack_exchange_api";
    // SAFETY: validity asks for the name without an exception; a capsule of this name holds the table, which lives as long
    // as the process.
    let exchange = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), TABLE.as_ptr()) == 0 {
            return Ok(false);
        }
        &*ffi::PyCapsule_GetPointer(capsule.as_ptr(), TABLE.as_ptr()).cast::<Exchange>()
    };
    if exchange.major != 1 || exchange.describe.is_none() || exchange.current_stream.is_none() {
        return Ok(false);
    }
    let types = [tensor.as_ptr() as usize, parameter.as_ptr() as usize];
    KNOWN.get_or_init(|| Known { exchange, types });
    Ok(true)
}

/// Where kernels reach a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    Host,
    /// Of the CUDA device of a number.
    Cuda(i32),
}

/// Whether an object is of a type that the table is for.
pub(crate) fn is_known(object: &Bound<'_, PyAny>) -> bool {
    let kind = object.get_type_ptr() as usize;
    KNOWN.get().is_some_and(|known| known.types.contains(&kind))
}

/// Whether it is a tensor that is no parameter.
pub(crate) fn is_tensor(object: &Bound<'_, PyAny>) -> bool {
    KNOWN.get().is_some_and(|known| known.types[0] == object.get_type_ptr() as usize)
}

/// Whether a tensor's values are those in memory with another sign. The method is called as Python calls it, without the tuple that
/// PyO3 makes for the stable ABI of Python 3.9.
fn is_negated(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (py, end) = (object.py(), std::ptr::null_mut::<ffi::PyObject>());
    // SAFETY: an object and a name that are alive, followed by null; the result is ours.
    let negated = unsafe {
        let name = intern!(py, "is_neg").as_ptr();
        Bound::from_owned_ptr_or_err(
            py,
            ffi::PyObject_CallMethodObjArgs(object.as_ptr(), name, end),
        )
    }?;
    negated.is_truthy()
}

/// A tensor and its memory: none of another kind or memory, or of what kernels do not compute with.
pub(crate) fn by_table(object: &Bound<'_, PyAny>) -> Option<(Tensor, Memory)> {
    let known = KNOWN.get()?;
    // The table says nothing of values that are negated where they are read.
    if !is_known(object) || is_negated(object).ok()? {
        return None;
    }
    let mut tensor = std::mem::MaybeUninit::<DlTensor>::uninit();
    // SAFETY: an object of the table's type, and a place for its description.
    if unsafe { known.exchange.describe?(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
        // It has set an exception, which says what the slower way will find too.
        drop(PyErr::take(object.py()));
        return None;
    }
    // SAFETY: it was described.
    let tensor = unsafe { tensor.assume_init() };
    let memory = match tensor.device.kind {
        CPU => Memory::Host,
        CUDA => Memory::Cuda(tensor.device.id),
        _ => return None,
    };
    // SAFETY: the object is alive, and with it what describes it.
    let described = unsafe { described(&tensor, None) }.ok()?;
    Some((described, memory))
}

/// A tensor in a CUDA device's memory: described by its library's table, or by a tuple.
pub(crate) struct There(pub(crate) Tensor);

impl<'py> FromPyObject<'_, 'py> for There {
    type Error = Failure;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> Result<Self, Failure> {
        if object.is_instance_of::<PyTuple>() {
            return Ok(Self(object.extract()?));
        }
        match by_table(&object) {
            Some((tensor, Memory::Cuda(_))) => Ok(Self(tensor)),
            _ => Err(CoreError::Unsupported {
                what: format!("{} as a tensor in a CUDA device's memory", object.get_type()),
                why: "PyTorch does not describe it as one of f32, f16 or bf16".into(),
            }
            .into()),
        }
    }
}

/// The stream that PyTorch enqueues work of a device on.
pub(crate) fn current_stream(device: i32) -> Option<u64> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: a valid place for the handle.
    let failed = unsafe { KNOWN.get()?.exchange.current_stream?(CUDA, device, &mut stream) };
    (failed == 0).then_some(stream as u64)
}

pub(crate) fn dense_strides(shape: &[usize]) -> Extents<isize> {
    let mut strides = Extents::from_elem(1, shape.len());
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1) as isize;
    }
    strides
}

/// What an exported tensor refers to and keeps alive.
struct Lent {
    _memory: Arc<dyn Send + Sync>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// A capsule over `tensor`, whose memory `memory` keeps.
pub(crate) fn export<'py>(
    py: Python<'py>,
    tensor: &Tensor,
    memory: Arc<dyn Send + Sync>,
) -> PyResult<Bound<'py, PyAny>> {
    let dtype = TYPES.iter().find(|(dtype, _)| *dtype == tensor.dtype).map(|(_, t)| *t);
    let dtype =
        dtype.ok_or_else(|| PyTypeError::new_err("an element type without a DLPack code"))?;
    let mut lent = Box::new(Lent {
        _memory: memory,
        shape: tensor.shape.iter().map(|&n| n as i64).collect(),
        strides: tensor.strides.iter().map(|&s| s as i64).collect(),
    });
    let (shape, strides) = (lent.shape.as_mut_ptr(), lent.strides.as_mut_ptr());
    let managed = Box::into_raw(Box::new(DlManagedTensor {
        tensor: DlTensor {
            data: tensor.address as *mut c_void,
            device: Device { kind: CPU, id: 0 },
            ndim: tensor.shape.len() as i32,
            dtype,
            shape,
            strides,
            byte_offset: 0,
        },
        manager: Box::into_raw(lent).cast(),
        deleter: Some(delete),
    }));
    // SAFETY: the pointer is not null, the name lives for ever, and the destructor is for what it holds.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(end_capsule));
        if capsule.is_null() {
            delete(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
    // SAFETY: made by `export`, and called once, by whoever took the tensor or by the capsule's end.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.manager.cast::<Lent>()));
    }
}

/// A capsule that nobody took has its first name still.
unsafe extern "C" fn end_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with a capsule that `export` made; validity asks for the name without an exception.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
