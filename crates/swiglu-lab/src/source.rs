//! Identity of the code that a record measured: a hash of what no comment, test or spacing changes.

mod code;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;
use sha2::{Digest, Sha256};

use self::code::{Language, code_of, is_test};
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

/// What any result depends on: files and directories.
const COMMON: [&str; 8] = [
    "crates/swiglu-core/src",
    "crates/swiglu/src",
    "crates/swiglu-cli/src/verbs/lab/peer",
    // What our own peer is made of besides: inputs, packing, copies in rotation.
    "crates/swiglu-cli/src/gpu.rs",
    "crates/swiglu-cli/src/layer.rs",
    "crates/swiglu-cli/src/quantized.rs",
    "crates/swiglu-cli/src/random.rs",
    PEERS,
];

/// Of these, programs count that are no tests.
const PEERS: &str = "lab/peers";

/// What a result on a device depends on besides.
fn paths(device: DeviceKind) -> Vec<&'static str> {
    let own: &[&str] = match device {
        DeviceKind::Cpu => &["crates/swiglu-cpu/src"],
        DeviceKind::Cuda => &["crates/swiglu-cuda/src", "crates/swiglu-cuda/device"],
    };
    COMMON.iter().chain(own).copied().collect()
}

/// Whether a result on a device depends on a file of the repository.
fn counts(device: DeviceKind, path: &str) -> bool {
    let below = |dir: &str| path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'));
    let listed = paths(device).into_iter().any(|listed| path == listed || below(listed));
    let peer = Language::of(path) == Language::Python && !below("lab/peers/tests");
    listed && !is_test(path) && (!below(PEERS) || peer)
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
        let mut code = committed(&root, device)?;
        if code.is_empty() {
            // A repository, but not of this project.
            return None;
        }
        let tree = hash(&code);
        let mut status = vec!["status", "--porcelain", "-z", "--no-renames"];
        status.extend(["--untracked-files=all", "--"]);
        status.extend(paths(device));
        for entry in parts(&git(&root, &status)?) {
            // Two letters and a space.
            let path = std::str::from_utf8(entry.get(3..)?).ok()?;
            if !counts(device, path) {
                continue;
            }
            match std::fs::read(root.join(path)) {
                Ok(text) => code.insert(path.to_owned(), code_of(Language::of(path), &text)),
                Err(_) => code.remove(path),
            };
        }
        let here = hash(&code);
        Some(if here == tree { Source::Tree(tree) } else { Source::Dirty(here) })
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

/// What [`Source::detect`] says of each device, asked once.
#[derive(Debug)]
pub struct Sources {
    dir: PathBuf,
    known: [OnceCell<Source>; 2],
}

impl Sources {
    /// Of the code around the lab `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), known: Default::default() }
    }

    /// The code that results on a device depend on.
    pub fn of(&self, device: DeviceKind) -> &Source {
        let known = &self.known[usize::from(device == DeviceKind::Cuda)];
        known.get_or_init(|| Source::detect(&self.dir, device))
    }
}

/// The code of each file in the last commit, by its path.
fn committed(root: &Path, device: DeviceKind) -> Option<BTreeMap<String, Vec<u8>>> {
    let mut list = vec!["ls-tree", "-r", "-z", "HEAD", "--"];
    list.extend(paths(device));
    let mut files = Vec::new();
    for entry in parts(&git(root, &list)?) {
        // `100644 blob HASH<tab>PATH`.
        let (facts, path) = std::str::from_utf8(entry).ok()?.split_once('\t')?;
        if counts(device, path) {
            files.push((path.to_owned(), facts.rsplit(' ').next()?.to_owned()));
        }
    }
    let blobs = blobs(root, files.iter().map(|(_, blob)| blob.as_str()).collect())?;
    let code = files.into_iter().zip(blobs).map(|((path, _), text)| {
        let code = code_of(Language::of(&path), &text);
        (path, code)
    });
    Some(code.collect())
}

/// What git ends with a zero byte.
fn parts(listed: &[u8]) -> impl Iterator<Item = &[u8]> {
    listed.split(|&byte| byte == 0).filter(|part| !part.is_empty())
}

/// The contents of blobs, in their order.
fn blobs(root: &Path, names: Vec<&str>) -> Option<Vec<Vec<u8>>> {
    let mut child = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["cat-file", "--batch"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut asked = child.stdin.take()?;
    let questions = names.iter().flat_map(|name| [name, "\n"]).collect::<String>();
    // It answers while it is asked: neither pipe may fill up.
    let (written, output) = std::thread::scope(|scope| {
        let writer = scope.spawn(move || asked.write_all(questions.as_bytes()));
        let output = child.wait_with_output();
        (writer.join(), output)
    });
    written.ok()?.ok()?;
    let output = output.ok().filter(|output| output.status.success())?;
    let mut rest = output.stdout.as_slice();
    let mut blobs = Vec::with_capacity(names.len());
    for _ in names {
        // `HASH blob LENGTH<newline>`, the contents, a newline.
        let end = rest.iter().position(|&byte| byte == b'\n')?;
        let facts = std::str::from_utf8(&rest[..end]).ok()?;
        let length: usize = facts.rsplit(' ').next()?.parse().ok()?;
        blobs.push(rest.get(end + 1..end + 1 + length)?.to_vec());
        rest = rest.get(end + 2 + length..)?;
    }
    Some(blobs)
}

fn git(dir: &Path, arguments: &[&str]) -> Option<Vec<u8>> {
    let output = Command::new("git").arg("-C").arg(dir).args(arguments).output().ok()?;
    output.status.success().then_some(output.stdout)
}

fn hash(code: &BTreeMap<String, Vec<u8>>) -> String {
    let mut hash = Sha256::new();
    let files = code.iter().filter(|(_, code)| !code.is_empty());
    for part in files.flat_map(|(path, code)| [path.as_bytes(), code]) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize()[..16])
}

#[cfg(test)]
mod tests;
