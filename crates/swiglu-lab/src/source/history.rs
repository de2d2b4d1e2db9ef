//! The code as it was: what has changed since a record was made.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::code::{Language, code_of};
use super::git::{blobs, git, parts};
use super::neutral::{self, CHANGES};
use super::{CHANGED, Source, UNCOMMITTED, counts, matters, paths};
use crate::case::DeviceKind;
use crate::definition::Experiment;
use crate::record::hex;

/// Commits of the relevant paths that are looked at, the newest first: old records are stale anyway.
const COMMITS: &str = "100";
/// Commits that are read at once: fewer processes than one by one, and little too much where the first
/// is the one.
const AT_ONCE: usize = 16;

/// The code of files by their paths.
pub(super) type Files = BTreeMap<String, Arc<[u8]>>;

/// The work tree with its repository, as far as results on a device depend on it.
#[derive(Debug)]
pub(super) struct Checkout {
    pub(super) source: Source,
    /// Of the last commit.
    head: Files,
    /// As they lie in the work tree.
    here: Files,
    history: RefCell<History>,
}

impl Checkout {
    /// Of the repository around `dir`; none where there is none of this project.
    pub(super) fn read(dir: &Path, device: DeviceKind) -> Option<Self> {
        let root = git(dir, &["rev-parse", "--show-toplevel"])?;
        let root = Path::new(std::str::from_utf8(&root).ok()?.trim_end()).to_path_buf();
        let mut history = History::new(root, device);
        let head = history.read(&["HEAD".to_owned()])?.pop_front()?;
        if head.is_empty() {
            // A repository, but not of this project.
            return None;
        }
        let here = with_uncommitted(&history.root, device, &head)?;
        let (tree, now) = (hash(&head), hash(&here));
        history.known.insert(tree.clone(), head.clone());
        history.known.insert(now.clone(), here.clone());
        let source = if now == tree { Source::Tree(tree) } else { Source::Dirty(now) };
        Some(Self { source, head, here, history: RefCell::new(history) })
    }

    /// Why results of an experiment with the committed code of this hash are not of this code; none if
    /// no change since matters to them.
    pub(super) fn why_stale(&self, experiment: &Experiment, then: &str) -> Option<String> {
        let mut history = self.history.borrow_mut();
        let uncommitted = changed(&self.head, &self.here, experiment);
        let Some(then) = history.find(then) else {
            return Some(if uncommitted.is_empty() { CHANGED } else { UNCOMMITTED }.into());
        };
        let changed = changed(then, &self.here, experiment);
        let here: BTreeSet<&str> = changed.intersection(&uncommitted).copied().collect();
        if here.is_empty() {
            named(&changed).map(|files| format!("{files} changed since"))
        } else {
            named(&here).map(|files| format!("{UNCOMMITTED}: {files} changed"))
        }
    }
}

/// The files of a work tree, from those of its last commit.
fn with_uncommitted(root: &Path, device: DeviceKind, head: &Files) -> Option<Files> {
    let mut status = vec!["status", "--porcelain", "-z", "--no-renames"];
    status.extend(["--untracked-files=all", "--"]);
    status.extend(paths(device));
    let mut here = head.clone();
    for entry in parts(&git(root, &status)?) {
        // Two letters and a space.
        let path = std::str::from_utf8(entry.get(3..)?).ok()?;
        if !counts(device, path) {
            continue;
        }
        match std::fs::read(root.join(path)) {
            Ok(text) => here.insert(path.to_owned(), code_of(Language::of(path), &text).into()),
            Err(_) => here.remove(path),
        };
    }
    Some(here)
}

/// The files whose code differs, of those that results of an experiment depend on, but by changes that leave them alone. A
/// file without code is none.
fn changed<'a>(then: &'a Files, now: &'a Files, experiment: &Experiment) -> BTreeSet<&'a str> {
    let code = |files: &'a Files, path: &str| files.get(path).map_or(&[][..], |code| code);
    let differs = |path: &&str| {
        let both = [code(then, path), code(now, path)];
        both[0] != both[1]
            && matters(experiment, path)
            && !neutral::lead(&CHANGES, experiment, path, both)
    };
    then.keys().chain(now.keys()).map(String::as_str).filter(differs).collect()
}

/// The first of some files and how many more, with the verb.
fn named(files: &BTreeSet<&str>) -> Option<String> {
    let first = files.first()?;
    Some(match files.len() - 1 {
        0 => format!("{first} has"),
        1 => format!("{first} and 1 more file have"),
        more => format!("{first} and {more} more files have"),
    })
}

/// The code of commits, read as far back as somebody asked.
#[derive(Debug)]
struct History {
    root: PathBuf,
    device: DeviceKind,
    /// What was not read yet, the newest first; none before somebody asked.
    commits: Option<VecDeque<String>>,
    /// What was read and has no hash yet.
    read: VecDeque<Files>,
    /// By [`hash`].
    known: BTreeMap<String, Files>,
    /// By blob: most are in many commits. The same text can be of two languages.
    code: BTreeMap<(String, Language), Arc<[u8]>>,
}

impl History {
    fn new(root: PathBuf, device: DeviceKind) -> Self {
        let (commits, read) = (None, VecDeque::new());
        Self { root, device, commits, read, known: BTreeMap::new(), code: BTreeMap::new() }
    }

    /// The code of this hash, as a commit has it.
    fn find(&mut self, wanted: &str) -> Option<&Files> {
        while !self.known.contains_key(wanted) {
            let files = self.next()?;
            self.known.insert(hash(&files), files);
        }
        self.known.get(wanted)
    }

    /// The next commit back.
    fn next(&mut self) -> Option<Files> {
        if self.read.is_empty() {
            let commits = self.commits.take();
            let mut commits = commits.or_else(|| self.commits()).unwrap_or_default();
            let next: Vec<_> = commits.drain(..AT_ONCE.min(commits.len())).collect();
            // What cannot be read ends the history.
            let read = self.read(&next);
            self.commits = Some(if read.is_some() { commits } else { VecDeque::new() });
            self.read = read.unwrap_or_default();
        }
        self.read.pop_front()
    }

    fn commits(&self) -> Option<VecDeque<String>> {
        let mut list = vec!["rev-list", "-n", COMMITS, "HEAD", "--"];
        list.extend(paths(self.device));
        let listed = String::from_utf8(git(&self.root, &list)?).ok()?;
        Some(listed.lines().map(str::to_owned).collect())
    }

    fn read(&mut self, commits: &[String]) -> Option<VecDeque<Files>> {
        let listed = commits.iter().map(|commit| listed(&self.root, self.device, commit));
        let listed: Vec<Vec<_>> = listed.collect::<Option<_>>()?;
        let of = |(path, blob): &(String, String)| (blob.clone(), Language::of(path));
        let asked: BTreeSet<_> = listed.iter().flatten().map(of).collect();
        let missing: Vec<_> = asked.iter().filter(|&key| !self.code.contains_key(key)).collect();
        let names: Vec<&str> = missing.iter().map(|(blob, _)| blob.as_str()).collect();
        for (key, text) in missing.into_iter().zip(blobs(&self.root, &names)?) {
            self.code.insert(key.clone(), code_of(key.1, &text).into());
        }
        let code = |file: &_| self.code.get(&of(file)).cloned();
        let files = |listed: Vec<(String, String)>| {
            listed.into_iter().map(|file| Some((file.0.clone(), code(&file)?))).collect()
        };
        listed.into_iter().map(files).collect()
    }
}

/// The relevant files of a commit: paths and blobs.
fn listed(root: &Path, device: DeviceKind, commit: &str) -> Option<Vec<(String, String)>> {
    let mut list = vec!["ls-tree", "-r", "-z", commit, "--"];
    list.extend(paths(device));
    let mut files = Vec::new();
    for entry in parts(&git(root, &list)?) {
        // `100644 blob HASH<tab>PATH`.
        let (facts, path) = std::str::from_utf8(entry).ok()?.split_once('\t')?;
        if counts(device, path) {
            files.push((path.to_owned(), facts.rsplit(' ').next()?.to_owned()));
        }
    }
    Some(files)
}

/// The code of each file in the last commit.
#[cfg(test)]
pub(super) fn committed(root: &Path, device: DeviceKind) -> Option<Files> {
    History::new(root.to_owned(), device).read(&["HEAD".to_owned()])?.pop_front()
}

/// Identity of code, as records have it.
fn hash(files: &Files) -> String {
    let mut hash = Sha256::new();
    let files = files.iter().filter(|(_, code)| !code.is_empty());
    for part in files.flat_map(|(path, code)| [path.as_bytes(), code]) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize()[..16])
}
