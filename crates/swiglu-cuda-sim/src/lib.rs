//! Builds the simulator of a CUDA device: `libcuda.so.1`, `libnvrtc.so.13` and `libcublasLt.so.13`
//! for the CPU, from the C++ sources of this crate. See README.md for what it models.
//!
//! ```no_run
//! match swiglu_cuda_sim::build() {
//!     Ok(simulator) => println!("libraries in {}", simulator.directory().display()),
//!     Err(reason) => println!("not run: {reason}"),
//! }
//! ```

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The simulator's libraries, built.
#[derive(Debug, Clone)]
pub struct Simulator {
    directory: PathBuf,
}

impl Simulator {
    /// Where the three libraries lie, under the names by which the real ones are found.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// Why there is no simulator here.
#[derive(Debug, Clone)]
pub struct NotRun(String);

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for NotRun {}

/// Builds the simulator with the host's C++ compiler (`CXX`, c++, g++ or clang++), once: the result
/// is kept under the target directory, named after the sources and the compiler. Any number of
/// processes may build at the same time.
///
/// # Errors
/// [`NotRun`] where the simulator cannot exist (it needs Linux on x86-64 or aarch64 and a C++20
/// compiler) or the build fails; it carries the reason and the compiler's words.
pub fn build() -> Result<Simulator, NotRun> {
    static BUILT: OnceLock<Result<Simulator, NotRun>> = OnceLock::new();
    BUILT.get_or_init(build_once).clone()
}

/// A file of this crate: its path below the crate, and its text.
struct Source(&'static str, &'static str);

macro_rules! sources {
    ($($path:literal)*) => { &[$(Source($path, include_str!(concat!("../", $path)))),*] };
}

/// What kernels include; installed beside the libraries.
const DEVICE: &[Source] =
    sources!["device/cuda_builtins.hpp" "device/device_abi.hpp" "device/ptx.hpp"];

const HEADERS: &[Source] = sources![
    "native/driver.hpp" "native/driver_abi.hpp" "native/fiber.hpp" "native/floats.hpp"
    "native/gang.hpp" "native/image.hpp" "native/launch.hpp" "native/tensor_map.hpp"
    "native/wgmma.hpp"
];

/// What is compiled at once: most of the time goes into the standard library's headers, which files of a unit share.
struct Unit(&'static str, &'static [Source]);

/// The device as its callers see it.
const DRIVER: Unit = Unit(
    "driver",
    sources![
        "native/driver_device.cpp" "native/driver_memory.cpp" "native/driver_module.cpp"
        "native/driver_queue.cpp" "native/driver_stream.cpp" "native/driver_tensor_map.cpp"
    ],
);
/// What runs a kernel.
const EXECUTION: Unit = Unit(
    "execution",
    sources![
        "native/cluster.cpp" "native/fiber.cpp" "native/gang.cpp" "native/grid.cpp"
        "native/launch.cpp" "native/matrix.cpp" "native/mbarrier.cpp" "native/shared_memory.cpp"
        "native/sync.cpp" "native/transfer.cpp" "native/wgmma.cpp"
    ],
);
const COMPILER: Unit = Unit("compiler", sources!["native/nvrtc.cpp"]);
const LINEAR: Unit = Unit("linear", sources!["native/cublaslt.cpp"]);

/// The libraries in the order of their dependencies: name, units, what else is linked.
const LIBRARIES: &[(&str, &[Unit], &[&str])] = &[
    ("libcuda.so.1", &[DRIVER, EXECUTION], &["-ldl"]),
    ("libnvrtc.so.13", &[COMPILER], &["-ldl"]),
    ("libcublasLt.so.13", &[LINEAR], &["-L.", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]),
];

const FLAGS: &[&str] = &[
    "-std=c++20",
    "-O2",
    "-g1",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Idevice",
    "-Inative",
    "-I.",
];

fn build_once() -> Result<Simulator, NotRun> {
    if !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
        return Err(NotRun("the CUDA simulator runs on Linux on x86-64 and aarch64 only".into()));
    }
    let (compiler, version) = find_compiler()?;
    let directory = target_directory()?.join("cuda-sim").join(format!("{:016x}", key(&version)));
    if !directory.join("complete").exists() {
        install(&compiler, &directory)?;
    }
    Ok(Simulator { directory })
}

fn all_sources() -> impl Iterator<Item = &'static Source> {
    let units = LIBRARIES.iter().flat_map(|(_, units, _)| units.iter());
    let sets = [DEVICE, HEADERS].into_iter().chain(units.map(|Unit(_, sources)| *sources));
    sets.flat_map(|set| set.iter())
}

fn key(compiler: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    for Source(path, text) in all_sources() {
        (path, text).hash(&mut hasher);
    }
    (FLAGS, compiler).hash(&mut hasher);
    hasher.finish()
}

/// The first compiler that answers, and what it says of itself.
fn find_compiler() -> Result<(OsString, String), NotRun> {
    let named = std::env::var_os("CXX").filter(|cxx| !cxx.is_empty());
    let candidates = match named {
        Some(cxx) => vec![cxx],
        None => ["c++", "g++", "clang++"].map(OsString::from).to_vec(),
    };
    for candidate in &candidates {
        let answer = Command::new(candidate).arg("--version").output();
        if let Ok(output) = answer
            && output.status.success()
        {
            let version = String::from_utf8_lossy(&output.stdout).into_owned();
            return Ok((candidate.clone(), format!("{}\n{version}", candidate.display())));
        }
    }
    let names: Vec<_> = candidates.iter().map(|c| c.display().to_string()).collect();
    Err(NotRun(format!(
        "the CUDA simulator needs a C++ compiler; none of {} runs (set CXX to name one)",
        names.join(", ")
    )))
}

/// The target directory of the running executable, or of this workspace.
fn target_directory() -> Result<PathBuf, NotRun> {
    let tagged = |path: &&Path| path.join("CACHEDIR.TAG").exists();
    let executable = std::env::current_exe().ok();
    if let Some(target) = executable.as_deref().and_then(|exe| exe.ancestors().find(tagged)) {
        return Ok(target.to_path_buf());
    }
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    fs::create_dir_all(&workspace).map_err(|e| failed("make", &workspace, &e))?;
    workspace.canonicalize().map_err(|e| failed("find", &workspace, &e))
}

fn failed(what: &str, path: &Path, error: &std::io::Error) -> NotRun {
    NotRun(format!("the CUDA simulator: could not {what} {}: {error}", path.display()))
}

/// Builds beside the final place, then renames: the directory appears whole or not at all.
fn install(compiler: &OsString, directory: &Path) -> Result<(), NotRun> {
    let beside = directory.with_extension(format!("building-{}", std::process::id()));
    let made = compile_libraries(compiler, &beside).and_then(|()| {
        fs::write(beside.join("complete"), "").map_err(|e| failed("write", &beside, &e))?;
        match fs::rename(&beside, directory) {
            // Another process was first; what it built is the same.
            Err(_) if directory.join("complete").exists() => Ok(()),
            other => other.map_err(|e| failed("rename", &beside, &e)),
        }
    });
    // What is left after a lost race or a failure is of no use to anyone.
    let _ = fs::remove_dir_all(&beside);
    made
}

fn compile_libraries(compiler: &OsString, directory: &Path) -> Result<(), NotRun> {
    for Source(path, text) in all_sources() {
        let path = directory.join(path);
        let parent = path.parent().unwrap_or(directory);
        fs::create_dir_all(parent).map_err(|e| failed("make", parent, &e))?;
        fs::write(&path, text).map_err(|e| failed("write", &path, &e))?;
    }
    let units: Vec<_> = LIBRARIES.iter().flat_map(|(_, units, _)| units.iter()).collect();
    compile_units(compiler, directory, &units)?;
    for (name, units, links) in LIBRARIES {
        let mut command = Command::new(compiler);
        command.current_dir(directory).args(["-shared", "-o", name]);
        command.arg(format!("-Wl,-soname,{name}"));
        command.args(units.iter().map(|Unit(name, _)| format!("{name}.o")));
        command.args(["-Wl,--no-undefined"]).args(*links);
        run(&mut command)?;
    }
    Ok(())
}

/// Compiles the units on as many threads as there are processors.
fn compile_units(compiler: &OsString, directory: &Path, units: &[&Unit]) -> Result<(), NotRun> {
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(units.len());
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(Unit(name, sources)) = units.get(i) else { return Ok(()) };
            let included = sources.iter().map(|Source(path, _)| format!("#include \"{path}\"\n"));
            let file = format!("{name}.cpp");
            fs::write(directory.join(&file), included.collect::<String>())
                .map_err(|e| failed("write", directory, &e))?;
            let mut command = Command::new(compiler);
            command.current_dir(directory).args(FLAGS);
            // The simulated compiler calls this one.
            command.arg(format!("-DSIM_CXX=\"{}\"", compiler.display()));
            run(command.args(["-c", &file, "-o", &format!("{name}.o")]))?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let gone = || Err(NotRun("the CUDA simulator: a build thread ended early".into()));
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| gone()))
    })
}

fn run(command: &mut Command) -> Result<(), NotRun> {
    let text = format!("{command:?}");
    let output =
        command.output().map_err(|e| NotRun(format!("the CUDA simulator: {text}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(NotRun(format!("the CUDA simulator does not build: {text}\n{words}")))
}
