//! PyTorch's threads: the team of its OpenMP runtime, which goes on spinning behind each operation and would keep the
//! processors from threads of our own.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::Library;
use swiglu::ForkJoin;

/// `GOMP_parallel` calls a function on each thread of a team, the caller's among them, and returns when all have returned:
/// how GCC compiles `#pragma omp parallel`; other runtimes of OpenMP have it, too.
type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);
/// `at::get_num_threads()`, which is what `torch.set_num_threads` said, on each thread.
type Threads = unsafe extern "C" fn() -> c_int;

#[derive(Debug)]
pub(crate) struct OpenMp {
    parallel: Parallel,
    threads: Threads,
    /// In a forked child the threads are the parent's, which the runtime does not know.
    gone: AtomicBool,
    /// The functions are there as long as this is.
    _library: Library,
}

impl OpenMp {
    /// Nothing where PyTorch's threads are of another kind.
    pub(crate) fn of_pytorch() -> Option<Self> {
        // SAFETY: PyTorch has loaded what has this name, so no code of its own runs.
        let library = unsafe { Library::new("libtorch_cpu.so") }.ok()?;
        // SAFETY: these are the types of the functions with these names; the first is looked for in what the library needs.
        let (parallel, threads) = unsafe {
            let parallel: Parallel = *library.get(b"GOMP_parallel\0").ok()?;
            let threads: Threads = *library.get(b"_ZN2at15get_num_threadsEv\0").ok()?;
            (parallel, threads)
        };
        Some(Self { parallel, threads, gone: AtomicBool::new(false), _library: library })
    }

    /// Leaves every call to its caller alone.
    pub(crate) fn end(&self) {
        self.gone.store(true, Ordering::Relaxed);
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
        if self.gone.load(Ordering::Relaxed) {
            return 1;
        }
        // SAFETY: it takes nothing.
        usize::try_from(unsafe { (self.threads)() }).unwrap_or(1)
    }

    fn run(&self, threads: usize, part: &(dyn Fn() + Sync)) {
        let threads = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
        // SAFETY: `part` may be called on any thread and lives until this returns; nothing unwinds out of `call`.
        unsafe { (self.parallel)(call, (&raw const part).cast_mut().cast(), threads, 0) };
    }
}
