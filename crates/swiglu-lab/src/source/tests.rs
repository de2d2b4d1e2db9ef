use super::git::git;
use super::history::committed;
use super::*;
use crate::testkit::{DEFINITION, experiment, parse, with};

/// The root of this repository, where git is and the tests run in one.
fn root() -> Option<PathBuf> {
    let root = git(Path::new(env!("CARGO_MANIFEST_DIR")), &["rev-parse", "--show-toplevel"])?;
    Some(String::from_utf8(root).unwrap().trim_end().into())
}

#[test]
fn every_path_names_something() {
    let Some(root) = root() else { return eprintln!("not run: no git, or no repository") };
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        let code = committed(&root, device).unwrap();
        for path in paths(device) {
            let named = code.iter().any(|(file, code)| file.starts_with(path) && !code.is_empty());
            assert!(named, "{path}");
        }
        assert!(code.keys().all(|path| Language::of(path) != Language::Unknown));
        assert!(!code.keys().any(|path| path.contains("/tests/")));
        let of_device = OF_A_KIND.iter().filter(|(_, listed)| counts(device, listed));
        let of_none = OF_NONE.iter().filter(|listed| counts(device, listed));
        let of_peers = OF_A_PEER.iter().map(|(_, listed)| listed);
        let own = OF_A_DEVICE.iter().map(|(_, listed)| listed).chain(of_peers);
        for listed in of_device.map(|(_, listed)| listed).chain(of_none).chain(own) {
            let named = code.iter().any(|(file, code)| is_at(file, listed) && !code.is_empty());
            assert!(named, "{listed}");
        }
    }
    let counted = |path| [DeviceKind::Cpu, DeviceKind::Cuda].into_iter().any(|d| counts(d, path));
    assert!(OF_A_KIND.iter().all(|(_, listed)| counted(listed)));
    assert!(OF_NONE.iter().all(|listed| counted(listed)));
}

/// What no result depends on is used by nothing else that counts; `lib.rs` only makes it public.
#[test]
fn nothing_that_counts_uses_the_conformance_suite() {
    let Some(root) = root() else { return eprintln!("not run: no git, or no repository") };
    let mut own = 0;
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        for (path, code) in committed(&root, device).unwrap() {
            if OF_NONE.iter().any(|listed| is_at(&path, listed)) {
                own += 1;
            } else if !path.ends_with("/lib.rs") {
                let code = String::from_utf8_lossy(&code);
                let names = ["conformance", "CpuBackend", "CudaBackend"];
                assert!(!names.iter().any(|name| code.contains(name)), "{path}");
            }
        }
    }
    assert!(own >= 6, "{own}");
}

/// What a kernel of another kind includes is not of this kind alone.
#[test]
fn device_files_of_blocks_are_included_by_no_others() {
    let device = Path::new(env!("CARGO_MANIFEST_DIR")).join("../swiglu-cuda/device");
    let is_of_blocks = |name: &str| {
        let path = format!("crates/swiglu-cuda/device/{name}");
        OF_A_KIND.iter().any(|(_, listed)| is_at(&path, listed))
    };
    let mut found = 0;
    for path in std::fs::read_dir(device).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for included in text.lines().filter_map(|line| line.strip_prefix("#include \"")) {
            let included = included.trim_end_matches('"');
            assert!(is_of_blocks(name) || !is_of_blocks(included), "{name} includes {included}");
            found += usize::from(is_of_blocks(included));
        }
    }
    assert!(found > 0);
}

/// By its name a file does not count; that is right where nothing but tests declares it.
#[test]
fn what_is_named_as_tests_is_compiled_for_tests_alone() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut dirs, mut found) = (vec![], 0);
    for name in ["swiglu-core", "swiglu", "swiglu-cpu", "swiglu-cuda", "swiglu-cli"] {
        dirs.push(crates.join(name).join("src"));
    }
    while let Some(dir) = dirs.pop() {
        for path in std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() {
                dirs.push(path);
            } else if is_test(name) {
                let declared = match name {
                    "tests.rs" => "#[cfg(test)]\nmod tests;".to_owned(),
                    _ => format!("#[cfg(test)]\n#[path = \"{name}\"]\nmod "),
                };
                let beside = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path());
                let parents = beside.chain([dir.with_extension("rs")]);
                let texts = parents.filter_map(|path| std::fs::read_to_string(path).ok());
                let declarations = texts.map(|text| text.matches(&declared).count()).sum::<usize>();
                assert!(declarations > 0, "{}", path.display());
                found += 1;
            }
        }
    }
    assert!(found > 5);
}

/// A module that our own peer uses is part of what is measured.
#[test]
fn what_our_own_peer_is_made_of_is_among_the_paths() {
    let peer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../swiglu-cli/src/verbs/lab/peer");
    let mut found = 0;
    for file in std::fs::read_dir(peer).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for used in text.lines().filter_map(|line| line.strip_prefix("use crate::")) {
            let module = used.split([':', ';']).next().unwrap();
            // Of `args` only the names of operations, and no item of the crate's root, is used.
            if module == "args" || module.starts_with(char::is_uppercase) {
                continue;
            }
            let path = format!("crates/swiglu-cli/src/{module}.rs");
            assert!(COMMON.contains(&path.as_str()), "{path}");
            found += 1;
        }
    }
    assert!(found > 0);
}

/// A repository of its own.
struct Repository(tempfile::TempDir);

impl Repository {
    fn new() -> Option<Self> {
        let repository = Self(tempfile::tempdir().unwrap());
        repository.run(&["init", "-q"])?;
        Some(repository)
    }

    fn run(&self, arguments: &[&str]) -> Option<Vec<u8>> {
        let identity = ["-c", "user.name=t", "-c", "user.email=t@t"];
        let all: Vec<&str> = identity.iter().chain(arguments).copied().collect();
        git(self.0.path(), &all)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn commit(&self) {
        self.run(&["add", "-A"]).unwrap();
        self.run(&["commit", "-qm", "c"]).unwrap();
    }
}

#[test]
fn code_is_committed_dirty_or_unknown() {
    let bare = tempfile::tempdir().unwrap();
    assert_eq!(Source::detect(bare.path(), DeviceKind::Cpu), Source::Unknown);
    let Some(repository) = Repository::new() else { return eprintln!("not run: no git") };
    let here = repository.0.path();
    let write = |path: &str, text: &str| repository.write(path, text);
    // A copy without a repository says what it was told.
    write(SOURCE_FILE, r#"{"cpu": "tree:ab", "cuda": "dirty:cd"}"#);
    assert_eq!(Source::detect(here, DeviceKind::Cpu), Source::Tree("ab".into()));
    assert_eq!(Source::detect(here, DeviceKind::Cuda), Source::Dirty("cd".into()));
    std::fs::remove_file(here.join(SOURCE_FILE)).unwrap();
    write("crates/swiglu-cpu/src/gemm.rs", "one");
    write("lab/peers/torch_peer.py", "one");
    write("README.md", "one");
    assert_eq!(Source::detect(here, DeviceKind::Cpu), Source::Unknown);
    repository.run(&["add", "."]).unwrap();
    assert_eq!(Source::detect(here, DeviceKind::Cpu), Source::Unknown);
    repository.commit();
    let clean = Source::detect(here, DeviceKind::Cpu);
    assert!(matches!(clean, Source::Tree(_)));
    assert_eq!(clean.staleness(&clean.to_string()), None);
    write("README.md", "two");
    assert_eq!(Source::detect(here, DeviceKind::Cpu), clean);
    write("crates/swiglu-cpu/src/gemm.rs", "two");
    let dirty = Source::detect(here, DeviceKind::Cpu);
    assert!(matches!(dirty, Source::Dirty(_)));
    // Other changes are another identity: a run that goes on must be of the same code.
    write("crates/swiglu-cpu/src/gemm.rs", "three");
    assert_ne!(Source::detect(here, DeviceKind::Cpu), dirty);
    assert_ne!(Source::detect(here, DeviceKind::Cuda), dirty);
    assert!(dirty.staleness(&clean.to_string()).unwrap().contains("uncommitted"));
    repository.commit();
    let next = Source::detect(here, DeviceKind::Cpu);
    assert!(next.staleness(&clean.to_string()).unwrap().contains("changed since"));
    assert!(next.staleness(&dirty.to_string()).unwrap().contains("uncommitted"));
}

/// Comments, tests and spacing are in no result, committed or not; what is staged counts as it lies in
/// the work tree.
#[test]
fn what_no_result_depends_on_makes_nothing_stale() {
    let Some(repository) = Repository::new() else { return eprintln!("not run: no git") };
    let (gemm, peer) = ("crates/swiglu-cpu/src/gemm.rs", "lab/peers/torch_peer.py");
    repository.write(gemm, "fn f() { 1 }\n");
    repository.write(peer, "f()\n");
    repository.write("crates/swiglu-cuda/device/a.cu", "f();\n");
    repository.commit();
    let detect = || Source::detect(repository.0.path(), DeviceKind::Cpu);
    let clean = detect();
    assert!(matches!(clean, Source::Tree(_)));
    let harmless = [
        (gemm, "// Why.\n\nfn f() { 1 } // what\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n"),
        (peer, "# Why.\n\nf()  # what\n"),
        ("crates/swiglu-cpu/src/tests.rs", "fn g() {}\n"),
        ("crates/swiglu-core/src/gate_tests.rs", "fn g() {}\n"),
        ("crates/swiglu-core/src/notes.rs", "//! Notes.\n"),
        ("lab/peers/tests/test_a.py", "g()\n"),
        ("lab/peers/README.md", "Peers.\n"),
        ("crates/swiglu-cuda/device/a.cu", "g();\n"),
        ("crates/swiglu-cli/src/main.rs", "fn main() {}\n"),
    ];
    for (path, text) in harmless {
        repository.write(path, text);
        assert_eq!(detect(), clean, "{path}");
    }
    repository.run(&["add", "."]).unwrap();
    assert_eq!(detect(), clean);
    repository.commit();
    assert_eq!(detect(), clean);
    // Each of these is a change, and none any more when it is taken back.
    let files = [
        (gemm, "fn f() { 2 }\n"),
        (peer, "if f():\n    f()\n"),
        ("crates/swiglu-cpu/src/new.rs", "fn g() {}\n"),
        ("crates/swiglu-core/src/with space é.rs", "fn g() {}\n"),
    ];
    for (path, text) in files {
        let before = std::fs::read_to_string(repository.0.path().join(path)).ok();
        repository.write(path, text);
        let dirty = detect();
        assert!(matches!(dirty, Source::Dirty(_)), "{path}");
        repository.run(&["add", "."]).unwrap();
        assert_eq!(detect(), dirty, "{path}");
        match before {
            Some(before) => repository.write(path, &before),
            None => std::fs::remove_file(repository.0.path().join(path)).unwrap(),
        }
        assert_eq!(detect(), clean, "{path}");
        repository.run(&["add", "."]).unwrap();
    }
    std::fs::remove_file(repository.0.path().join(gemm)).unwrap();
    assert!(matches!(detect(), Source::Dirty(_)));
    // A committed change has the hash that it had before.
    repository.write(gemm, "fn f() { 2 } // two\n");
    let Source::Dirty(hash) = detect() else { panic!("{:?}", detect()) };
    repository.commit();
    assert_eq!(detect(), Source::Tree(hash));
}

#[test]
fn each_device_is_asked_once() {
    let Some(repository) = Repository::new() else { return eprintln!("not run: no git") };
    repository.write("crates/swiglu-cpu/src/gemm.rs", "fn f() {}\n");
    repository.commit();
    let sources = Sources::new(repository.0.path());
    let [cpu, cuda] = [DeviceKind::Cpu, DeviceKind::Cuda].map(|device| sources.of(device).clone());
    assert!(matches!(cpu, Source::Tree(_)));
    assert_eq!(cuda, Source::Unknown);
    repository.write("crates/swiglu-cpu/src/gemm.rs", "fn g() {}\n");
    assert_eq!(*sources.of(DeviceKind::Cpu), cpu);
}

const QUANTIZED: &str = "crates/swiglu-core/src/bounds/quantized.rs";

/// A change counts for the experiments whose results depend on the file, and is named.
#[test]
fn a_record_is_stale_for_what_its_results_depend_on() {
    let Some(repository) = Repository::new() else { return eprintln!("not run: no git") };
    let [gemm, torch, ggml] =
        ["crates/swiglu-cpu/src/gemm.rs", "lab/peers/torch_peer.py", "lab/peers/ggml_peer.py"];
    let files = [gemm, torch, ggml, QUANTIZED, "lab/peers/common/ggml.py"];
    let all = |text: &str| files.iter().for_each(|file| repository.write(file, text));
    let change = |file: &str| repository.write(file, "two\n");
    all("one\n");
    repository.commit();
    let then = Source::detect(repository.0.path(), DeviceKind::Cpu).to_string();

    let of_torch = experiment();
    let of_ggml = parse(&with("peer = \"other\"", "peer = \"ggml\"")).unwrap();
    let quantized = DEFINITION
        .replace("op = \"activation\"", "op = \"mlp\"\nweights = [\"Q4_0\"]")
        .replace("{ intermediate = 32 }", "{ hidden = 32, intermediate = 32 }");
    let quantized = parse(&quantized).unwrap();
    let stale = || {
        let sources = Sources::new(repository.0.path());
        [&of_torch, &of_ggml, &quantized].map(|e| sources.why_stale(e, &then).unwrap_or_default())
    };
    assert_eq!(stale(), ["", "", ""]);
    for (kind, listed) in OF_A_KIND {
        let below = format!("{listed}/mod.rs");
        let matter = |e: &Experiment| matters(e, listed) && matters(e, &below);
        assert!(matter(&quantized) && !matter(&of_torch), "{kind:?} {listed}");
    }
    let of_cuda = parse(&with("device = \"cpu\"", "device = \"cuda\"")).unwrap();
    let of_peer = |name: &str| {
        let all =
            ["torch", "other", "copy"].into_iter().fold(DEFINITION.to_owned(), |text, peer| {
                text.replace(&format!("peer = \"{peer}\""), &format!("peer = \"{name}\""))
            });
        parse(&all).unwrap()
    };
    for (device, listed) in OF_A_DEVICE {
        assert_eq!(matters(&of_cuda, listed), device == DeviceKind::Cuda, "{listed}");
        assert_eq!(matters(&of_torch, listed), device == DeviceKind::Cpu, "{listed}");
    }
    for (peer, listed) in OF_A_PEER {
        let with = of_peer(peer);
        assert!(matters(&with, listed) && !matters(&of_torch, listed), "{listed}");
        assert!(!matters(&with, "lab/peers/common/protocol.py"), "{peer}");
    }
    let of_weight_only = of_peer("weight-only");
    for (listed, of_others) in [
        ("lab/peers/weight_only_peer.py", false),
        ("lab/peers/weight_only_ways/kernels.py", false),
        ("lab/peers/triton_ways/kernels.py", false),
        ("lab/peers/torch_ways/base.py", true),
        ("lab/peers/common/protocol.py", true),
    ] {
        assert!(matters(&of_weight_only, listed), "{listed}");
        assert_eq!(matters(&of_torch, listed), of_others, "{listed}");
    }
    change(ggml);
    assert_eq!(stale(), ["", &format!("{UNCOMMITTED}: {ggml} has changed"), ""]);
    repository.commit();
    assert_eq!(stale(), ["", &format!("{ggml} has changed since"), ""]);
    change(QUANTIZED);
    repository.commit();
    let of_bounds = format!("{QUANTIZED} has changed since");
    assert_eq!(stale(), ["", &format!("{ggml} has changed since"), &of_bounds]);
    change(torch);
    change("lab/peers/common/ggml.py");
    repository.commit();
    let of_peers = [
        format!("{torch} has changed since"),
        "lab/peers/common/ggml.py and 2 more files have changed since".to_owned(),
        format!("{QUANTIZED} and 1 more file have changed since"),
    ];
    assert_eq!(stale(), of_peers);
    // What is uncommitted is told before what is committed.
    change(gemm);
    assert_eq!(stale(), [&*format!("{UNCOMMITTED}: {gemm} has changed"); 3]);
    repository.commit();
    assert!(stale()[0].starts_with(&format!("{gemm} and 1 more file")), "{:?}", stale());
    // Taken back, in another commit.
    all("one\n");
    repository.commit();
    assert_eq!(stale(), ["", "", ""]);
    // Code that no commit has.
    change(ggml);
    repository.commit();
    let sources = Sources::new(repository.0.path());
    assert_eq!(sources.why_stale(&of_torch, "tree:00").unwrap(), CHANGED);
    assert!(sources.why_stale(&of_torch, "dirty:00").unwrap().contains("was measured with"));
    assert!(sources.why_stale(&of_torch, "unknown").unwrap().contains("not known"));
}
