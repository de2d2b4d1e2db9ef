//! What a run needs where it happens, as one directory with a content hash: the program, the
//! definitions, the peers.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::code::{COMMIT_FILE, Code};
use crate::error::{LabError, Result};
use crate::files::{entries, file_name, sha256, sha256_of};

/// The hash and path of every other file.
const MANIFEST: &str = "MANIFEST";
pub(super) const PROGRAM: &str = "swiglu";
pub(super) const LAB: &str = "lab";
/// What is no part of a bundle, beside what is hidden.
const LEFT_OUT: [&str; 2] = ["__pycache__", "tests"];

/// A bundle, removed with this.
pub(super) struct Bundle {
    pub(super) dir: TempDir,
    /// SHA-256 of its list of files with theirs.
    pub(super) hash: String,
    pub(super) bytes: u64,
}

impl Bundle {
    /// Gathers a program, the definitions of a lab and the peers in a directory.
    pub(super) fn new(program: &Path, lab: &Path, peers: &Path) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("swiglu-bundle-").tempdir();
        let dir = dir.map_err(LabError::io("create a directory in", &std::env::temp_dir()))?;
        let root = dir.path();
        let (mut manifest, mut bytes) = (String::new(), 0);
        let mut add = |from: &Path, to: &str| copy(from, root, to, &mut manifest, &mut bytes);
        add(program, PROGRAM)?;
        add(&lab.join("experiments"), &format!("{LAB}/experiments"))?;
        if peers.is_dir() {
            add(peers, &format!("{LAB}/peers"))?;
        }
        // There is no repository to ask which commit it is of.
        let code = serde_json::to_string(&Code::detect(lab, program))
            .map_err(LabError::io("describe", lab))?;
        let listed = root.join(MANIFEST);
        let write = |text: &str| fs::write(&listed, text).map_err(LabError::io("write", &listed));
        write(&code)?;
        copy(&listed, root, &format!("{LAB}/{COMMIT_FILE}"), &mut manifest, &mut bytes)?;
        write(&manifest)?;
        Ok(Self { hash: sha256(manifest), bytes, dir })
    }

    /// That a copy of a bundle in `dir` has the files that it was made of.
    pub(super) fn check(dir: &Path, expected: &str) -> Result<()> {
        let expect = |file: &str, expected: &str| {
            let path = dir.join(file);
            let found = hash_of(&path)?;
            if found == expected {
                return Ok(());
            }
            let (what, expected) = (format!("SHA-256 of {}", path.display()), expected.to_owned());
            let advice = "it was changed or not copied whole: remove the directory and run again";
            Err(LabError::Foreign { what, found, expected, advice })
        };
        expect(MANIFEST, expected)?;
        let path = dir.join(MANIFEST);
        let manifest = fs::read_to_string(&path).map_err(LabError::io("read", &path))?;
        let mut listed = manifest.lines().filter_map(|line| line.split_once("  "));
        listed.try_for_each(|(hash, file)| expect(file, hash))
    }
}

/// Copies a file, or what is in a directory, and lists it.
fn copy(from: &Path, root: &Path, to: &str, manifest: &mut String, bytes: &mut u64) -> Result<()> {
    if from.is_dir() {
        for entry in entries(from)? {
            let name = file_name(&entry);
            if !name.starts_with('.') && !LEFT_OUT.contains(&name.as_str()) {
                copy(&entry, root, &format!("{to}/{name}"), manifest, bytes)?;
            }
        }
        return Ok(());
    }
    let path = root.join(to);
    let dir = path.parent().unwrap_or(root);
    fs::create_dir_all(dir).map_err(LabError::io("create directory", dir))?;
    *bytes += fs::copy(from, &path).map_err(LabError::io("copy", from))?;
    manifest.push_str(&format!("{}  {to}\n", hash_of(&path)?));
    Ok(())
}

fn hash_of(path: &Path) -> Result<String> {
    sha256_of(path).map_err(LabError::io("read", path))
}
