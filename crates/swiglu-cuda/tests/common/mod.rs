//! The device that tests run on: a GPU if the machine has one, else the simulator.

// Every test program uses its own part of this.
#![allow(dead_code, unreachable_pub, clippy::print_stdout)]

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use swiglu_core::Problem;
use swiglu_core::conformance::{self, Backend, Case, GradientCase};
use swiglu_cuda::jit::cache::CacheOptions;
use swiglu_cuda::tuning::{Entry, Outcome, Trial, TuningOptions};
use swiglu_cuda::{Cuda, CudaBackend, CudaError, CudaOptions, library};
use swiglu_cuda_sim::NotRun;
use swiglu_testing::not_run;

/// The first device, or nothing after saying why. `SWIGLU_TEST_DEVICE=sim` takes the simulator also
/// where there is a GPU.
pub fn device() -> Option<Cuda> {
    static DEVICE: OnceLock<Cuda> = OnceLock::new();
    let options = options()?;
    let open = || Cuda::with_options(&options).expect("the device opens");
    Some(DEVICE.get_or_init(open).clone())
}

/// A device by number, or nothing after saying why.
pub fn open(device: usize) -> Option<Result<Cuda, CudaError>> {
    Some(Cuda::with_options(&options()?.with_device(device)))
}

/// Options of a test device: kernels are kept where no user's are, and no user's measurements are read.
pub fn options() -> Option<CudaOptions> {
    let cache = CacheOptions { dir: Some(libraries()?.to_owned()), ..CacheOptions::default() };
    let tuning = TuningOptions { disabled: true, ..TuningOptions::default() };
    Some(CudaOptions::default().with_cache(cache).with_tuning(tuning))
}

/// Makes a device's libraries known, which must happen before any is used, and returns a directory
/// to keep kernels in; or nothing after saying why there is no device.
pub fn libraries() -> Option<&'static Path> {
    static CACHE: OnceLock<Result<PathBuf, NotRun>> = OnceLock::new();
    let cache = CACHE.get_or_init(|| {
        if has_gpu() {
            return Ok(std::env::temp_dir().join("swiglu-test-kernels"));
        }
        let simulator = swiglu_cuda_sim::build()?;
        let first = library::prefer(simulator.directory());
        assert!(first, "a library was looked for before the simulator was named");
        // The directory's name says which simulator made the kernels in it.
        Ok(simulator.directory().join("kernels"))
    });
    // Of each test that has no device, not of the first alone.
    cache.as_deref().map_err(not_run).ok()
}

/// Whether tests run on a GPU.
pub fn has_gpu() -> bool {
    let simulated = std::env::var("SWIGLU_TEST_DEVICE").is_ok_and(|name| name == "sim");
    !simulated && ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists())
}

/// Whether the simulator has every case too, not only a part of them: SWIGLU_TEST_ALL is set.
pub fn every_case() -> bool {
    std::env::var_os(swiglu_testing::ALL).is_some()
}

/// Whether tests run on the simulator with a part of their cases.
pub fn partly() -> bool {
    !has_gpu() && !every_case()
}

/// Compiling kernels takes longest, on a GPU and in the simulator, so cases are run by as many threads as
/// there are processors.
fn outcomes<C: fmt::Display + Sync>(
    cases: &[C],
    run: impl Fn(&C) -> swiglu_core::Result<conformance::Outcome> + Sync,
) -> Vec<Option<String>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let judged = |case: &C| match run(case) {
        Ok(outcome) if outcome.passed() => None,
        Ok(outcome) => Some(format!("{case}: {outcome:?}")),
        Err(error) => Some(format!("{case}: {error}")),
    };
    std::thread::scope(|scope| {
        let part = |i: usize| cases.iter().skip(i).step_by(threads).map(judged).collect::<Vec<_>>();
        let workers: Vec<_> = (0..threads).map(|i| scope.spawn(move || part(i))).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no case panics")).collect()
    })
}

/// Fails with what failed, and says how many cases passed.
fn passed(backend: &CudaBackend, outcomes: Vec<Option<String>>) -> usize {
    let cases = outcomes.len();
    let failed: Vec<String> = outcomes.into_iter().flatten().collect();
    let passed = cases - failed.len();
    println!("{}: {passed} cases", backend.name());
    assert!(
        failed.is_empty(),
        "{}: {} failed, {passed} passed\n{}",
        backend.name(),
        failed.len(),
        failed[..failed.len().min(20)].join("\n")
    );
    passed
}

/// Judges what the backend computes, and says how many cases that were.
pub fn judge(backend: &CudaBackend, cases: impl Iterator<Item = Case>) -> usize {
    let cases: Vec<Case> = cases.filter(|case| backend.computes(case)).collect();
    passed(backend, outcomes(&cases, |case| conformance::run(backend, case)))
}

/// The same of gradients.
pub fn judge_gradients(backend: &CudaBackend, cases: impl Iterator<Item = GradientCase>) -> usize {
    let cases: Vec<GradientCase> = cases.filter(|case| backend.computes(&case.layer)).collect();
    passed(backend, outcomes(&cases, |case| conformance::run_gradients(backend, case)))
}

/// The test device with a record, kept in `dir`, that says of each problem that this way was the fastest.
pub fn preferring(cuda: &Cuda, dir: &Path, way: &str, problems: &[Problem]) -> Cuda {
    let entry = |problem: &Problem| {
        let trial = |name: String| {
            let us = if name == way { 1.0 } else { 2.0 };
            let outcome = Outcome::Measured { median_us: us, p10_us: us, p90_us: us, samples: 1 };
            Trial { way: name, predicted_us: None, outcome }
        };
        let trials = cuda.candidates(problem, None).into_iter().map(|c| trial(c.name)).collect();
        Entry { problem: *problem, tf32: false, trials }
    };
    let tuning = TuningOptions { dir: Some(dir.to_owned()), disabled: false };
    let entries = problems.iter().map(entry).collect();
    cuda.keep_tuning(&tuning, entries).expect("the directory can be written");
    let options = options().expect("there is a device").with_tuning(tuning);
    Cuda::with_options(&options).expect("the device opens")
}
