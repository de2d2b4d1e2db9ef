//! Which commit was measured, and how long ago that was.
//!
//! A record's age is printed and never a verdict: what changed since may matter or not, and `lab gate`
//! measures whether it does.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::case::DeviceKind;
use crate::files::said;

/// Where a copy of the lab without its repository keeps the commit that it was made from, as JSON.
pub const COMMIT_FILE: &str = "commit.json";

/// What may hold measured code, from the root of the repository.
const MEASURED: [&str; 3] = ["crates", "lab/peers", "Cargo.lock"];

/// The code that a run measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    /// The commit; none outside a repository.
    pub commit: Option<String>,
    /// Whether something differed from that commit, or nothing says that the program was built of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dirty: bool,
}

impl Code {
    /// The commit in a few digits, for people.
    pub fn short(&self) -> String {
        let commit = self.commit.as_deref();
        let short = commit.map_or("an unknown commit", |c| c.get(..9).unwrap_or(c));
        format!("{short}{}", if self.dirty { ", with changes" } else { "" })
    }

    /// The commit that was noted in the lab `dir`, else that of the repository around it.
    pub(crate) fn commit(dir: &Path) -> Option<String> {
        match noted(dir) {
            Some(noted) => noted.commit,
            None => git(&root(dir)?, ["rev-parse", "HEAD"]),
        }
    }

    /// What was noted in the lab `dir` when it was copied, else what git says of the repository around it, which the
    /// program that measures is expected to be built of.
    pub fn detect(dir: &Path, program: &Path) -> Self {
        if let Some(noted) = noted(dir) {
            return noted;
        }
        let Some(root) = root(dir) else { return Self::default() };
        let status = git(&root, ["status", "--porcelain", "--"].into_iter().chain(MEASURED));
        Self {
            commit: Self::commit(dir),
            dirty: status.is_none_or(|changed| !changed.is_empty()) || !is_built_of(&root, program),
        }
    }
}

/// What was written beside a copy of a lab.
fn noted(dir: &Path) -> Option<Code> {
    serde_json::from_slice(&std::fs::read(dir.join(COMMIT_FILE)).ok()?).ok()
}

/// Whether a program was built of the files of a repository as they are, by the list that cargo writes beside it.
fn is_built_of(root: &Path, program: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|of| of.modified()).ok();
    let list = std::fs::read_to_string(program.with_extension("d")).unwrap_or_default();
    let files = list.split_once(": ").map_or("", |(_, files)| files);
    // A blank in a name has a backslash before it.
    let files = files.replace("\\ ", "\0");
    let files = files.split_whitespace().map(|file| PathBuf::from(file.replace('\0', " ")));
    let mut ours = files.filter(|file| file.starts_with(root)).peekable();
    let built = modified(program);
    ours.peek().is_some()
        && ours.all(|file| modified(&file).zip(built).is_some_and(|(file, built)| file <= built))
}

/// The repository around a lab, asked for ages.
#[derive(Debug, Clone)]
pub struct History {
    root: Option<PathBuf>,
}

impl History {
    /// Of the repository around the lab `dir`, if there is one.
    pub fn around(dir: &Path) -> Self {
        Self { root: root(dir) }
    }

    /// Commits since `code` that touch the backend of a device; none if there is no repository, or it does
    /// not have that commit.
    pub fn age(&self, code: &Code, device: DeviceKind) -> Option<u64> {
        let backend = match device {
            DeviceKind::Cpu => "crates/swiglu-cpu",
            DeviceKind::Cuda => "crates/swiglu-cuda",
        };
        let range = format!("{}..HEAD", code.commit.as_deref()?);
        let counted = ["rev-list", "--count", &range, "--", "crates/swiglu-core", backend];
        git(self.root.as_deref()?, counted)?.parse().ok()
    }
}

fn root(dir: &Path) -> Option<PathBuf> {
    git(dir, ["rev-parse", "--show-toplevel"]).map(PathBuf::from)
}

fn git<'a>(dir: &'a Path, arguments: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let dir = ["-C".as_ref(), dir.as_os_str()];
    said("git", dir.into_iter().chain(arguments.into_iter().map(OsStr::new)))
}
