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
    /// Whether something differed from that commit.
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

    /// What was noted in the lab `dir` when it was copied, else what git says of the repository around it.
    pub fn detect(dir: &Path) -> Self {
        let noted = || serde_json::from_slice(&std::fs::read(dir.join(COMMIT_FILE)).ok()?).ok();
        if let Some(noted) = noted() {
            return noted;
        }
        let Some(root) = root(dir) else { return Self::default() };
        let status = git(&root, ["status", "--porcelain", "--"].into_iter().chain(MEASURED));
        Self {
            commit: git(&root, ["rev-parse", "HEAD"]),
            dirty: status.is_none_or(|changed| !changed.is_empty()),
        }
    }
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
