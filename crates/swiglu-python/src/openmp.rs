//! PyTorch's threads: the team of its OpenMP runtime, which goes on spinning behind each operation and would keep the
//! processors from threads of our own.

use std::ffi::{c_int, c_uint, c_void};

use libloading::os::unix::{Library, RTLD_LAZY};
use swiglu::ForkJoin;

/// `GOMP_parallel` calls a function on each thread of a team, the caller's among them, and returns when all have returned:
/// how GCC compiles `#pragma omp parallel`; other runtimes of OpenMP have it, too.
type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);
/// `at::get_num_threads()`, which is what `torch.set_num_threads` said.
type Threads = unsafe extern "C" fn() -> c_int;

/// Opens what is loaded, and loads nothing.
const RTLD_NOLOAD: c_int = 4;

#[derive(Debug)]
pub(crate) struct OpenMp {
    parallel: Parallel,
    threads: Threads,
    /// A forked child has one thread, and its runtime would wait for the parent's.
    process: u32,
    /// The functions are there as long as this is.
    _library: Library,
}

impl OpenMp {
    /// Whether this is the process that it was found in.
    pub(crate) fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// Nothing without a PyTorch that is loaded, and whose library needs a runtime of OpenMP's.
    pub(crate) fn of_pytorch() -> Option<Self> {
        // SAFETY: what is loaded already is initialised.
        let library = unsafe { Library::open(Some("libtorch_cpu.so"), RTLD_LAZY | RTLD_NOLOAD) };
        let library = library.ok()?;
        // SAFETY: these are the types of the functions with these names. A runtime that was loaded for all is the one that
        // PyTorch calls, else the one that its library needs.
        let (parallel, threads) = unsafe {
            let parallel: Parallel = match Library::this().get(b"GOMP_parallel\0") {
                Ok(parallel) => *parallel,
                Err(_) => *library.get(b"GOMP_parallel\0").ok()?,
            };
            let threads: Threads = *library.get(b"_ZN2at15get_num_threadsEv\0").ok()?;
            (parallel, threads)
        };
        Some(Self { parallel, threads, process: std::process::id(), _library: library })
    }
}

/// Calls the part that `data` points to.
extern "C" fn call(data: *mut c_void) {
    // SAFETY: what `run` gave, and it has not returned.
    let part = unsafe { *data.cast::<&(dyn Fn() + Sync)>() };
    part();
}

impl ForkJoin for OpenMp {
    fn threads(&self) -> usize {
        if !self.is_here() {
            return 1;
        }
        // SAFETY: it takes nothing.
        usize::try_from(unsafe { (self.threads)() }).unwrap_or(1)
    }

    fn run(&self, _: usize, part: &(dyn Fn() + Sync)) {
        // A team of another size than PyTorch's own would end threads, which its next operation would start again.
        const AS_MANY_AS_THERE_ARE: c_uint = 0;
        // SAFETY: `part` may be called on any thread and lives until this returns; nothing unwinds out of `call`.
        unsafe {
            (self.parallel)(call, (&raw const part).cast_mut().cast(), AS_MANY_AS_THERE_ARE, 0);
        }
    }
}
