//! The simulated libraries, called as a program would that opens them at run time.
// Each test file uses its part; a test may panic.
#![allow(dead_code, unused_imports, clippy::unwrap_used, clippy::panic)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use swiglu_cuda_sim::NotRun;
use swiglu_testing::not_run;

pub(crate) type Handle = *mut c_void;

macro_rules! call {
    ($library:expr, $name:literal ( $($value:expr => $type:ty),* $(,)? )) => {{
        // SAFETY: the signature is that of the function in cuda.h, nvrtc.h or cublasLt.h.
        unsafe {
            let f = $library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name).unwrap();
            f($($value),*)
        }
    }};
}
pub(crate) use call;

pub(crate) struct Sim {
    pub(crate) cuda: Library,
    pub(crate) nvrtc: Library,
    pub(crate) lt: Library,
}

// SAFETY: the handles of a library may be used from any thread.
unsafe impl Sync for Sim {}
// SAFETY: as above.
unsafe impl Send for Sim {}

/// The simulator with a current context, or None after saying why not.
pub(crate) fn sim() -> Option<&'static Sim> {
    static SIM: OnceLock<Result<Sim, NotRun>> = OnceLock::new();
    let sim = SIM.get_or_init(|| {
        let built = swiglu_cuda_sim::build()?;
        let open = |name| {
            let path = built.directory().join(name);
            // SAFETY: the libraries have no initialisers of their own.
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.unwrap()
        };
        let cuda = open("libcuda.so.1");
        Ok(Sim { cuda, nvrtc: open("libnvrtc.so.13"), lt: open("libcublasLt.so.13") })
    });
    let sim = sim.as_ref().map_err(not_run).ok()?;
    let mut context: Handle = null_mut();
    assert_eq!(call!(sim.cuda, b"cuInit"(0 => u32)), 0);
    assert_eq!(
        call!(sim.cuda, b"cuDevicePrimaryCtxRetain"(&mut context => *mut Handle, 0 => c_int)),
        0
    );
    assert_eq!(call!(sim.cuda, b"cuCtxSetCurrent"(context => Handle)), 0);
    Some(sim)
}

/// Device code of a test: what stands for ptx.cuh is never read.
pub(crate) fn compile(
    sim: &Sim,
    source: &str,
    arch: &str,
    defines: &[&str],
) -> Result<Vec<u8>, String> {
    let source = CString::new(format!("#include \"ptx.cuh\"\n{source}")).unwrap();
    let (header, name) = (c"#error the simulator's own file takes its place", c"ptx.cuh");
    let mut program: Handle = null_mut();
    let made = call!(sim.nvrtc, b"nvrtcCreateProgram"(
        &mut program => *mut Handle, source.as_ptr() => *const c_char, null() => *const c_char,
        1 => c_int, &header.as_ptr() => *const *const c_char, &name.as_ptr() => *const *const c_char));
    assert_eq!(made, 0);
    let options: Vec<_> = [format!("--gpu-architecture={arch}"), "--ptxas-options=-v".into()]
        .into_iter()
        .chain(defines.iter().map(|d| format!("-D{d}")))
        .map(|o| CString::new(o).unwrap())
        .collect();
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    let code = call!(sim.nvrtc, b"nvrtcCompileProgram"(
        program => Handle, c_int::try_from(pointers.len()).unwrap() => c_int, pointers.as_ptr() => *const *const c_char));
    let mut size = 0usize;
    call!(sim.nvrtc, b"nvrtcGetProgramLogSize"(program => Handle, &mut size => *mut usize));
    let mut log = vec![0u8; size];
    call!(sim.nvrtc, b"nvrtcGetProgramLog"(program => Handle, log.as_mut_ptr() => *mut u8));
    let log = String::from_utf8_lossy(&log).into_owned();
    let result = if code == 0 {
        assert!(log.contains("0 bytes stack frame, 0 bytes spill stores"), "{log}");
        assert!(log.contains(&format!("' for '{arch}'")), "{log}");
        call!(sim.nvrtc, b"nvrtcGetCUBINSize"(program => Handle, &mut size => *mut usize));
        let mut image = vec![0u8; size];
        call!(sim.nvrtc, b"nvrtcGetCUBIN"(program => Handle, image.as_mut_ptr() => *mut u8));
        Ok(image)
    } else {
        Err(format!("{code}: {log}"))
    };
    call!(sim.nvrtc, b"nvrtcDestroyProgram"(&mut program => *mut Handle));
    result
}

/// A kernel of an image that is compiled for sm_90a.
pub(crate) fn kernel(
    sim: &Sim,
    source: &str,
    defines: &[&str],
    name: &str,
    shared_bytes: u32,
) -> Handle {
    let image = compile(sim, source, "sm_90a", defines).unwrap_or_else(|log| panic!("{log}"));
    let (mut module, mut function): (Handle, Handle) = (null_mut(), null_mut());
    let name = CString::new(name).unwrap();
    let loaded = call!(sim.cuda, b"cuModuleLoadData"(
        &mut module => *mut Handle, image.as_ptr() => *const u8));
    assert_eq!(loaded, 0);
    let found = call!(sim.cuda, b"cuModuleGetFunction"(
        &mut function => *mut Handle, module => Handle, name.as_ptr() => *const c_char));
    assert_eq!(found, 0);
    assert_eq!(
        call!(sim.cuda, b"cuFuncSetAttribute"(
        function => Handle, 8 => c_int, shared_bytes.cast_signed() => c_int)),
        0
    );
    function
}

/// Device memory that lives as long as the test process.
pub(crate) fn upload<T: Copy>(sim: &Sim, values: &[T]) -> u64 {
    let (mut address, bytes) = (0u64, std::mem::size_of_val(values));
    assert_eq!(call!(sim.cuda, b"cuMemAlloc_v2"(&mut address => *mut u64, bytes => usize)), 0);
    assert_eq!(
        call!(sim.cuda, b"cuMemcpyHtoD_v2"(
        address => u64, values.as_ptr() => *const T, bytes => usize)),
        0
    );
    // The copy may be staged only, and other streams do not wait for it.
    assert_eq!(call!(sim.cuda, b"cuStreamSynchronize"(null_mut() => Handle)), 0);
    address
}

pub(crate) fn download<T: Copy + Default>(sim: &Sim, address: u64, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    let bytes = std::mem::size_of_val(&values[..]);
    assert_eq!(
        call!(sim.cuda, b"cuMemcpyDtoH_v2"(
        values.as_mut_ptr() => *mut T, address => u64, bytes => usize)),
        0
    );
    values
}

/// The result of a launch of `grid` blocks of `block` threads with one parameter struct.
pub(crate) fn launch_on<P>(
    sim: &Sim,
    stream: Handle,
    function: Handle,
    grid: u32,
    block: u32,
    shared_bytes: u32,
    params: &P,
) -> c_int {
    let mut pointers = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    call!(sim.cuda, b"cuLaunchKernel"(
        function => Handle, grid => u32, 1 => u32, 1 => u32, block => u32, 1 => u32, 1 => u32,
        shared_bytes => u32, stream => Handle, pointers.as_mut_ptr() => *mut *mut c_void,
        null_mut() => *mut *mut c_void))
}

/// The same on the test's own stream, carried out: what the launch or waiting for it returned.
pub(crate) fn launch<P>(
    sim: &Sim,
    function: Handle,
    grid: u32,
    block: u32,
    shared_bytes: u32,
    params: &P,
) -> c_int {
    let stream = own_stream(sim);
    finished(sim, launch_on(sim, stream, function, grid, block, shared_bytes, params))
}

/// CUlaunchAttribute of a flag, and CUlaunchConfig, of cuda.h.
#[repr(C)]
struct Attribute {
    id: u32,
    padding: u32,
    flag: c_int,
    rest: [u32; 15],
}
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *const Attribute,
    count: u32,
}

/// As [`launch_on`], of a grid that may start before the one before it has ended.
pub(crate) fn launch_programmatic<P>(
    sim: &Sim,
    stream: Handle,
    function: Handle,
    grid: u32,
    block: u32,
    shared: u32,
    params: &P,
) -> c_int {
    const PROGRAMMATIC: u32 = 6;
    let attribute = Attribute { id: PROGRAMMATIC, padding: 0, flag: 1, rest: [0; 15] };
    let config = Config {
        grid: [grid, 1, 1],
        block: [block, 1, 1],
        shared,
        stream,
        attributes: &raw const attribute,
        count: 1,
    };
    let mut pointers = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    call!(sim.cuda, b"cuLaunchKernelEx"(
        &raw const config => *const Config, function => Handle,
        pointers.as_mut_ptr() => *mut *mut c_void, null_mut() => *mut *mut c_void))
}

/// How the calling thread's streams run from now on.
pub(crate) fn run_streams(sim: &Sim, mode: &str, seed: u64) {
    type Set = unsafe extern "C" fn(*const c_char, u64);
    let mode = CString::new(mode).unwrap();
    // SAFETY: the signature is that of the simulator.
    unsafe { sim.cuda.get::<Set>(b"sim_set_streams").unwrap()(mode.as_ptr(), seed) };
}

/// What a launch on the test's own stream returned, or, if nothing went wrong, waiting for it.
pub(crate) fn finished(sim: &Sim, launched: c_int) -> c_int {
    match launched {
        0 => call!(sim.cuda, b"cuStreamSynchronize"(own_stream(sim) => Handle)),
        code => code,
    }
}

/// A stream of the calling test, which runs beside others.
pub(crate) fn own_stream(sim: &Sim) -> Handle {
    use std::cell::Cell;
    thread_local! { static OWN: Cell<Handle> = const { Cell::new(null_mut()) } }
    if OWN.get().is_null() {
        OWN.set(stream(sim));
    }
    OWN.get()
}

pub(crate) fn stream(sim: &Sim) -> Handle {
    let mut stream: Handle = null_mut();
    assert_eq!(call!(sim.cuda, b"cuStreamCreate"(&mut stream => *mut Handle, 1 => u32)), 0);
    stream
}

/// A CUtensorMap of 16-bit elements [rows, columns], dense.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap([u64; 16]);

pub(crate) fn tensor_map(
    sim: &Sim,
    base: u64,
    rows: u64,
    columns: u64,
    box_rows: u32,
    box_columns: u32,
    swizzle: c_int,
) -> TensorMap {
    let mut map = TensorMap([0; 16]);
    let code = call!(sim.cuda, b"cuTensorMapEncodeTiled"(
        &mut map => *mut TensorMap, 9 => c_int, 2 => u32, base => u64,
        [columns, rows].as_ptr() => *const u64, [columns * 2].as_ptr() => *const u64,
        [box_columns, box_rows].as_ptr() => *const u32, [1u32, 1].as_ptr() => *const u32,
        0 => c_int, swizzle => c_int, 2 => c_int, 0 => c_int));
    assert_eq!(code, 0);
    map
}

/// Small whole numbers, so that 16-bit products and sums are exact.
pub(crate) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(((state >> 16) % 17) as i16 - 8)
    };
    (0..count).map(|_| next()).collect()
}

/// a [m, k] · b [k, n], given as functions of their indices.
pub(crate) fn product(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let element = |i: usize, j: usize| (0..k).map(|l| a(i, l) * b(l, j)).sum();
    (0..m * n).map(|e| element(e / n, e % n)).collect()
}
