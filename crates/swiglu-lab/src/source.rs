//! Identity of the code that a record measured.

use std::path::Path;
use std::process::Command;

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::case::DeviceKind;
use crate::record::hex;

/// The code as it is now: what a result depends on, and no more.
///
/// As text: `tree:HASH` for committed code, `dirty:HASH` where there are changes, `unknown` outside
/// a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Source {
    /// Everything relevant is committed.
    Tree(String),
    /// Something relevant is not.
    Dirty(String),
    /// There is no repository to ask.
    Unknown,
}

/// What any result depends on.
const COMMON: [&str; 9] = [
    "crates/swiglu-core/src",
    "crates/swiglu/src",
    "crates/swiglu-cli/src/verbs/lab/peer",
    // What our own peer is made of besides: inputs, packing, copies in rotation.
    "crates/swiglu-cli/src/gpu.rs",
    "crates/swiglu-cli/src/layer.rs",
    "crates/swiglu-cli/src/quantized.rs",
    "crates/swiglu-cli/src/random.rs",
    ":(glob)lab/peers/**/*.py",
    ":(exclude)lab/peers/tests",
];

/// What a result on a device depends on besides.
fn paths(device: DeviceKind) -> Vec<&'static str> {
    let own: &[&str] = match device {
        DeviceKind::Cpu => &["crates/swiglu-cpu/src"],
        DeviceKind::Cuda => &["crates/swiglu-cuda/src", "crates/swiglu-cuda/device"],
    };
    COMMON.iter().chain(own).copied().collect()
}

/// Where a copy of the lab without its repository keeps what [`Source::detect`] said when it was made:
/// a JSON object with `cpu` and `cuda`.
const SOURCE_FILE: &str = "source.json";

impl Source {
    /// What was noted in the lab `dir`, where it is such a copy, else what git says of the repository
    /// around it.
    pub fn detect(dir: &Path, device: DeviceKind) -> Self {
        let noted = Self::noted(dir, device);
        noted.or_else(|| Self::ask_git(dir, device)).unwrap_or(Source::Unknown)
    }

    fn noted(dir: &Path, device: DeviceKind) -> Option<Self> {
        let text = std::fs::read_to_string(dir.join(SOURCE_FILE)).ok()?;
        let noted: serde_json::Value = serde_json::from_str(&text).ok()?;
        let key = match device {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        };
        match noted.get(key)?.as_str()?.split_once(':')? {
            ("tree", hash) => Some(Source::Tree(hash.to_owned())),
            ("dirty", hash) => Some(Source::Dirty(hash.to_owned())),
            _ => None,
        }
    }

    fn ask_git(dir: &Path, device: DeviceKind) -> Option<Self> {
        let root = git(dir, &["rev-parse", "--show-toplevel"])?;
        let root = Path::new(std::str::from_utf8(&root).ok()?.trim_end()).to_path_buf();
        let paths = paths(device);
        let with_paths = |arguments: &[&'static str]| {
            let arguments: Vec<&str> = arguments.iter().chain(&paths).copied().collect();
            git(&root, &arguments)
        };
        let listed = with_paths(&["ls-files", "--stage", "--"])?;
        if listed.is_empty() {
            // A repository, but not of this project.
            return None;
        }
        let changed = with_paths(&["status", "--porcelain", "--untracked-files=all", "--"])?;
        if changed.is_empty() {
            return Some(Source::Tree(short(&[&listed])));
        }
        let difference = with_paths(&["diff", "HEAD", "--"])?;
        Some(Source::Dirty(short(&[&listed, &changed, &difference])))
    }

    /// Why a record of `recorded` is not of this code; none if it is, or if nobody can tell.
    pub fn staleness(&self, recorded: &str) -> Option<String> {
        match self {
            Source::Unknown => None,
            _ if recorded == self.to_string() && recorded.starts_with("tree:") => None,
            _ if recorded.starts_with("dirty") => {
                Some("it was measured with uncommitted changes of the code".into())
            }
            _ if recorded == "unknown" => Some("it is not known which code was measured".into()),
            Source::Dirty(_) => Some("the code has uncommitted changes".into()),
            Source::Tree(_) => Some("the code has changed since".into()),
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Tree(hash) => write!(f, "tree:{hash}"),
            Source::Dirty(hash) => write!(f, "dirty:{hash}"),
            Source::Unknown => f.write_str("unknown"),
        }
    }
}

fn git(dir: &Path, arguments: &[&str]) -> Option<Vec<u8>> {
    let output = Command::new("git").arg("-C").arg(dir).args(arguments).output().ok()?;
    output.status.success().then_some(output.stdout)
}

fn short(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hex(&hash.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// The root of this repository, where git is and the tests run in one.
    fn root() -> Option<PathBuf> {
        let root = git(Path::new(env!("CARGO_MANIFEST_DIR")), &["rev-parse", "--show-toplevel"])?;
        Some(String::from_utf8(root).unwrap().trim_end().into())
    }

    #[test]
    fn every_path_names_something() {
        let Some(root) = root() else { return eprintln!("not run: no git, or no repository") };
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            for path in paths(device).iter().map(|path| path.trim_start_matches(":(exclude)")) {
                let listed = git(&root, &["ls-files", "--", path]);
                assert!(listed.is_some_and(|files| !files.is_empty()), "{path}");
            }
        }
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

    #[test]
    fn code_is_committed_dirty_or_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        assert_eq!(Source::detect(here, DeviceKind::Cpu), Source::Unknown);
        let run = |arguments: &[&str]| {
            let identity = ["-c", "user.name=t", "-c", "user.email=t@t"];
            let all: Vec<&str> = identity.iter().chain(arguments).copied().collect();
            git(here, &all)
        };
        if run(&["init", "-q"]).is_none() {
            return;
        }
        let write = |path: &str, text: &str| {
            let path = here.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        // A copy without a repository says what it was told.
        write(SOURCE_FILE, r#"{"cpu": "tree:ab", "cuda": "dirty:cd"}"#);
        assert_eq!(Source::detect(here, DeviceKind::Cpu), Source::Tree("ab".into()));
        assert_eq!(Source::detect(here, DeviceKind::Cuda), Source::Dirty("cd".into()));
        std::fs::remove_file(here.join(SOURCE_FILE)).unwrap();
        write("crates/swiglu-cpu/src/gemm.rs", "one");
        write("lab/peers/torch_peer.py", "one");
        write("README.md", "one");
        run(&["add", "."]).unwrap();
        run(&["commit", "-qm", "c"]).unwrap();
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
        run(&["commit", "-qam", "c"]).unwrap();
        let next = Source::detect(here, DeviceKind::Cpu);
        assert!(next.staleness(&clean.to_string()).unwrap().contains("changed since"));
        assert!(next.staleness(&dirty.to_string()).unwrap().contains("uncommitted"));
    }
}
