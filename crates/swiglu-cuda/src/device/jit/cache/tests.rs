//! The cache under everything that happens to caches. Modules are compiled for real; without a
//! compiler these tests say "not run".

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::*;
use crate::common;
use crate::device::jit::CompileLog;
use crate::device::jit::variant::{KernelFile, define};

static FILE: KernelFile = KernelFile::new(
    "cache_test.cu",
    "#include \"lib/ptx.cuh\"\n\
     struct Fill { int* out; };\n\
     KERNEL(32, 1, fill)(KERNEL_PARAMS(Fill) p) { p.out[threadIdx.x] = VALUE; }\n",
);
const ARCH: Arch = Arch::Sm80;

fn variant() -> Variant {
    Variant::new(&FILE, [define("VALUE", 7)])
}

/// Whether there is a compiler; the caller returns if there is none.
fn compiler() -> bool {
    // The simulator's compiler will do, too. It must be known before any other is looked for.
    common::libraries();
    let version = nvrtc::version();
    if let Err(e) = &version {
        swiglu_testing::not_run(e);
    }
    version.is_ok()
}

fn entry_in(dir: &Path) -> PathBuf {
    dir.join(Identity::of(&variant(), ARCH).file_name(nvrtc::version().unwrap()))
}

fn origin(cache: &KernelCache) -> Origin {
    let module = cache.module(&variant(), ARCH).unwrap();
    assert!(!module.cubin.is_empty());
    module.origin
}

/// This test program again, as another process that runs only [`worker`].
fn worker_process(dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["device::jit::cache::tests::worker", "--exact", "--nocapture", "--test-threads=1"])
        .env("SWIGLU_CACHE_DIR", dir)
        .env("SWIGLU_CACHE_TEST_WORKER", "1")
        .env_remove("SWIGLU_CACHE_READ_ONLY_DIR")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn worker() {
    if std::env::var_os("SWIGLU_CACHE_TEST_WORKER").is_none() {
        return; // Only meant for the processes of other tests.
    }
    if std::env::var_os("SWIGLU_CACHE_TEST_BARE").is_none() {
        common::libraries();
    }
    let cache = KernelCache::new(&CacheOptions::default());
    let module = match std::env::var("SWIGLU_CACHE_TEST_WORKER").as_deref() {
        Ok("keep") => {
            // Not compiled here: the compiler needs files of its own.
            let log = CompileLog::default();
            let report = Report { log, millis: 0.0, nvrtc: (13, 0) };
            let compiled = Compiled { cubin: vec![1; 100_000], report };
            cache.keep(cache.dir.as_deref().unwrap(), &Identity::of(&variant(), ARCH), &compiled);
            Ok(Module::compiled(compiled))
        }
        _ => cache.module(&variant(), ARCH),
    };
    match module {
        Ok(module) => println!("origin {:?}, {} bytes", module.origin, module.cubin.len()),
        Err(e) => println!("error {e}"),
    }
    cache.warnings().iter().for_each(|w| println!("warning {}: {}", w.path.display(), w.what));
}

#[test]
fn the_second_time_nothing_is_compiled() {
    if !compiler() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let nested = dir.path().join("not/there/yet");
    let first = KernelCache::at(&nested).module(&variant(), ARCH).unwrap();
    let second = KernelCache::at(&nested).module(&variant(), ARCH).unwrap();
    assert_eq!((first.origin, second.origin), (Origin::Compiled, Origin::Cache));
    assert!(first.cubin == second.cubin);
    assert_eq!(first.report.log, second.report.log);
    let names: Vec<_> = first.report.log.entries.iter().map(|entry| &*entry.name).collect();
    // On H200s NVRTC 13.0 now and then reports nothing of what it compiles first: `swiglu kernels` complains of that.
    assert!(names.is_empty() || names == ["fill"], "{:?}", first.report);
    let other = Variant::new(&FILE, [define("VALUE", 8)]);
    let other = KernelCache::at(&nested).module(&other, ARCH).unwrap();
    assert_eq!(other.origin, Origin::Compiled);
    let disabled = CacheOptions { disabled: true, ..CacheOptions::default() };
    assert_eq!(origin(&KernelCache::new(&disabled)), Origin::Compiled);
    let left: Vec<_> = fs::read_dir(&nested).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 4, "two entries and their locks: {left:?}");
}

#[test]
fn what_does_not_verify_is_made_again() {
    if !compiler() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(origin(&KernelCache::at(dir.path())), Origin::Compiled);
    let path = entry_in(dir.path());
    let good = fs::read(&path).unwrap();
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let other = entry::encode(
        &[0; 32],
        &Report { log: CompileLog::default(), millis: 0.0, nvrtc: (13, 0) },
        b"code of something else",
    );
    let bad = [
        flipped,
        good[..good.len() / 2].to_vec(),
        Vec::new(),
        b"not ours at all".repeat(100),
        other.unwrap(),
    ];
    for bytes in bad {
        fs::write(&path, &bytes).unwrap();
        let cache = KernelCache::at(dir.path());
        assert_eq!(origin(&cache), Origin::Compiled);
        assert_eq!(cache.warnings().len(), 1, "{:?}", cache.warnings());
        assert_eq!(origin(&KernelCache::at(dir.path())), Origin::Cache);
    }
    // A directory in the place of the entry can be neither read nor replaced.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let cache = KernelCache::at(dir.path());
    assert_eq!(origin(&cache), Origin::Compiled);
    assert!(!cache.warnings().is_empty());
}

#[test]
fn the_read_only_directory_comes_first_and_stays_as_it_is() {
    if !compiler() {
        return;
    }
    let (shared, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let both = || {
        let dirs = [shared.path(), own.path()].map(|d| Some(d.to_owned()));
        let [read_only_dir, dir] = dirs;
        KernelCache::new(&CacheOptions { dir, read_only_dir, disabled: false })
    };
    assert_eq!(origin(&both()), Origin::Compiled);
    assert!(fs::read_dir(shared.path()).unwrap().next().is_none());
    assert_eq!(origin(&both()), Origin::Cache);
    origin(&KernelCache::at(shared.path()));
    assert_eq!(origin(&both()), Origin::ReadOnly);
    // A damaged file there is left to whoever owns it.
    fs::write(entry_in(shared.path()), b"damaged").unwrap();
    let cache = both();
    assert_eq!(origin(&cache), Origin::Cache);
    assert_eq!(cache.warnings().len(), 1);
    assert_eq!(fs::read(entry_in(shared.path())).unwrap(), b"damaged");
    // Its compiler need not be ours.
    let identity = Identity::of(&variant(), ARCH);
    let report = Report { log: CompileLog::default(), millis: 0.0, nvrtc: (99, 1) };
    let bytes = entry::encode(&identity.key((99, 1)), &report, b"code").unwrap();
    fs::write(shared.path().join(identity.file_name((99, 1))), bytes).unwrap();
    let module = both().module(&variant(), ARCH).unwrap();
    assert_eq!((module.origin, module.report.nvrtc), (Origin::ReadOnly, (99, 1)));
}

#[test]
fn eight_processes_compile_once() {
    if !compiler() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let processes: Vec<_> = (0..8).map(|_| worker_process(dir.path()).spawn().unwrap()).collect();
    let said: Vec<String> =
        processes.into_iter().map(|p| said(&p.wait_with_output().unwrap())).collect();
    let count = |what: &str| said.iter().filter(|text| text.contains(what)).count();
    let counts = (count("origin Compiled"), count("origin Cache"), count("warning"));
    assert_eq!(counts, (1, 7, 0), "{said:?}");
}

#[test]
fn nobody_waits_for_the_dead_or_for_ever() {
    if !compiler() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let name = format!("{}.lock", entry_in(dir.path()).file_name().unwrap().display());
    let held = files::lock(&dir.path().join(&name), PATIENCE).unwrap();
    let impatient =
        KernelCache { patience: Duration::from_millis(20), ..KernelCache::at(dir.path()) };
    assert_eq!(origin(&impatient), Origin::Compiled);
    assert!(impatient.warnings()[0].what.contains("another process"));
    assert_eq!(origin(&KernelCache::at(dir.path())), Origin::Cache);
    // The system takes the lock back from a process that is gone; the file stays.
    drop(held);
    fs::remove_file(entry_in(dir.path())).unwrap();
    assert_eq!(origin(&KernelCache::at(dir.path())), Origin::Compiled);
    // What cannot be opened as a file cannot be locked.
    fs::remove_file(dir.path().join(&name)).unwrap();
    fs::create_dir(dir.path().join(&name)).unwrap();
    fs::remove_file(entry_in(dir.path())).unwrap();
    let cache = KernelCache::at(dir.path());
    assert_eq!((origin(&cache), cache.warnings().len()), (Origin::Compiled, 1));
}

#[test]
fn without_a_place_to_write_kernels_are_compiled_each_time() {
    if !compiler() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    for dir in [file.path().join("below-a-file"), PathBuf::from("/proc/swiglu")] {
        let cache = KernelCache::at(&dir);
        assert_eq!(origin(&cache), Origin::Compiled);
        assert_eq!(origin(&cache), Origin::Compiled);
        assert!(!cache.warnings().is_empty(), "{}", dir.display());
    }
    let nowhere = KernelCache::resolve(&CacheOptions::default(), &|_| None);
    assert_eq!(origin(&nowhere), Origin::Compiled);
    assert_eq!(nowhere.warnings().len(), 1);
    let misnamed = CacheOptions { read_only_dir: Some("/no/such".into()), ..Default::default() };
    let warnings = KernelCache::resolve(&misnamed, &|_| Some("/h".into())).warnings();
    assert_eq!(warnings[0].path, Path::new("/no/such"));
}

/// A limit on the size of files makes writes fail as they do on a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_costs_time_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = worker_process(dir.path());
    worker.env("SWIGLU_CACHE_TEST_WORKER", "keep").env("SWIGLU_CACHE_TEST_BARE", "1");
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\""]);
    limited.arg(worker.get_program()).args(worker.get_args());
    limited.envs(worker.get_envs().filter_map(|(k, v)| Some((k, v?))));
    let text = said(&limited.output().unwrap());
    assert!(text.contains("origin Compiled, 100000 bytes"), "{text}");
    assert!(text.contains("not kept: File too large"), "{text}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "what was begun is removed");
    // The same without the limit.
    assert!(!said(&worker.output().unwrap()).contains("warning"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// What a machine without toolkit does with a directory that another one has filled.
#[test]
fn without_a_compiler_the_cache_is_enough() {
    if !compiler() {
        return;
    }
    let (filled, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    origin(&KernelCache::at(filled.path()));
    let bare = |read_only: &Path| {
        let mut command = worker_process(empty.path());
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"] {
            command.env_remove(name);
        }
        command.env_remove("SWIGLU_CUDA_LIBRARY_PATH").env("PATH", "").env("HOME", "/nonexistent");
        command.env("SWIGLU_CACHE_TEST_BARE", "1").env("SWIGLU_CACHE_READ_ONLY_DIR", read_only);
        said(&command.output().unwrap())
    };
    let missing = bare(empty.path());
    if !missing.contains("error") {
        swiglu_testing::not_run("the system has a compiler that cannot be hidden");
        return;
    }
    for expected in ["libnvrtc", "the loader's path", "/usr/local/cuda/lib64", "pip install"] {
        assert!(missing.contains(expected), "{missing}");
    }
    let text = bare(filled.path());
    assert!(text.contains("origin ReadOnly"), "{text}");
}

#[test]
fn the_environment_names_the_directories() {
    let of = |options: &CacheOptions, pairs: &[(&str, &str)]| {
        let cache = KernelCache::resolve(options, &|name| {
            pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v))
        });
        let text = |dir: Option<PathBuf>| dir.map(|d| d.to_string_lossy().into_owned());
        (text(cache.read_only), text(cache.dir))
    };
    let none = CacheOptions::default();
    let some = |s: &str| Some(s.to_owned());
    assert_eq!(of(&none, &[("HOME", "/h")]), (None, some("/h/.cache/swiglu")));
    let xdg = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x")];
    assert_eq!(of(&none, &xdg), (None, some("/x/swiglu")));
    assert_eq!(of(&none, &[("XDG_CACHE_HOME", "relative"), ("HOME", "")]), (None, None));
    let both = [("SWIGLU_CACHE_DIR", "d"), ("SWIGLU_CACHE_READ_ONLY_DIR", "r"), xdg[0]];
    assert_eq!(of(&none, &both), (some("r"), some("d")));
    let given = CacheOptions { dir: Some("g".into()), ..none.clone() };
    assert_eq!(of(&given, &both), (some("r"), some("g")));
    assert_eq!(of(&CacheOptions { disabled: true, ..none }, &both), (None, None));
}
