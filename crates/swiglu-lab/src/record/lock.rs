//! Who measures: one run at a time on the machine, or one on each accelerator.

use std::fs::{self, File};
use std::io::{Error, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, getuid, test_kill_process};

use crate::error::{LabError, Result};
use crate::files::{TryLock, entries, file_name, locked};

/// Where the names of files begin that runs hold while they measure.
const LOCK: &str = ".lock";
/// Stands between a run's name and its process in a lock's file.
const SIGNED: &str = ", process ";
/// Says where the locks of a user lie, instead of below the directory for temporary files.
const DIRECTORY_VARIABLE: &str = "SWIGLU_LAB_LOCK_DIR";

/// What a run needs for itself while it measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measured<'a> {
    /// Every processor, cache and the memory: nobody else may measure anything.
    Machine,
    /// One accelerator, by its identity. Runs on others do not disturb it; a run on the machine does.
    Device(&'a str),
}

/// Held while a run measures; given back when dropped, also by a kill.
#[derive(Debug)]
pub struct RunLock {
    pub(super) files: Vec<File>,
}

impl Drop for RunLock {
    fn drop(&mut self) {
        for file in &self.files {
            // A signature that stays would be believed if its process number came up again. The file that runs
            // share has none, and where a signature cannot be taken back, it says what a killed run's does.
            let _ = file.set_len(0);
            // Closing alone does not do it at once: a process that another thread starts right now has
            // a copy of the descriptor until it becomes its program. If unlocking fails, closing remains.
            let _ = file.unlock();
        }
    }
}

/// A lock's file that a run signed which still runs.
struct Holder {
    file: PathBuf,
    run: String,
    signature: String,
}

impl Holder {
    /// A killed run leaves its file signed.
    fn read(file: PathBuf) -> Option<Self> {
        let text = fs::read_to_string(&file).ok()?;
        let (run, process) = text.trim().rsplit_once(SIGNED)?;
        let signature = text.trim().to_owned();
        runs(process.parse().ok()?).then(|| Self { file, run: run.to_owned(), signature })
    }
}

fn runs(process: i32) -> bool {
    let Some(pid) = Pid::from_raw(process) else { return false };
    test_kill_process(pid).map_or_else(|e| e == Errno::PERM, |()| true)
}

/// An error of a user's locks, with what says where they lie.
pub(crate) fn movable(error: LabError) -> LabError {
    match error {
        LabError::Io { action, path, source } => {
            let why = format!("{source}; {DIRECTORY_VARIABLE} says where locks are to lie");
            LabError::Io { action, path, source: Error::new(source.kind(), why) }
        }
        other => other,
    }
}

/// A directory of locks. Whoever takes them there knows of each other.
#[derive(Debug, Clone)]
pub struct Locks {
    root: PathBuf,
}

impl Locks {
    /// Those in `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Those that all processes of the user share on this machine, wherever their records lie: in
    /// `SWIGLU_LAB_LOCK_DIR`, else in a directory for this user among temporary files. Processes with other
    /// directories of temporary files, or a relative path and another current directory, share none.
    ///
    /// # Errors
    /// [`LabError::Io`] if that directory cannot be made, or is another user's.
    pub fn of_user() -> Result<Self> {
        if let Some(given) = std::env::var_os(DIRECTORY_VARIABLE).filter(|dir| !dir.is_empty()) {
            return Ok(Self::new(given));
        }
        Self::below(&std::env::temp_dir())
    }

    /// Whether both lie in one directory, which exists.
    pub(super) fn is(&self, other: &Self) -> bool {
        let [one, two] = [self, other].map(|locks| fs::canonicalize(&locks.root).ok());
        one.is_some() && one == two
    }

    fn below(temporary: &Path) -> Result<Self> {
        let user = getuid().as_raw();
        let root = temporary.join(format!("swiglu-lab-{user}"));
        match fs::DirBuilder::new().mode(0o700).create(&root) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => {
                return Err(movable(LabError::io("create directory", &root)(e)));
            }
            _ => {}
        }
        // Anybody may make names there: what lies under this one must not lead elsewhere.
        let found = fs::symlink_metadata(&root).map_err(LabError::io("read", &root))?;
        if !found.is_dir() || found.uid() != user {
            let source =
                Error::new(ErrorKind::PermissionDenied, "it is another user's or no directory");
            return Err(movable(LabError::io("use the locks in", &root)(source)));
        }
        Ok(Self::new(root))
    }

    /// The right to measure, signed with a run's name.
    ///
    /// # Errors
    /// [`LabError::Busy`] if another run measures what this one needs; [`LabError::Io`].
    pub fn take(&self, measured: Measured<'_>, run: &str) -> Result<RunLock> {
        fs::create_dir_all(&self.root).map_err(LabError::io("create directory", &self.root))?;
        let mut lock = RunLock { files: Vec::new() };
        if measured != Measured::Machine {
            lock.files.push(self.lock(&self.root.join(LOCK), File::try_lock_shared)?);
        }
        let own = self.path_of(measured);
        let mut file = self.lock(&own, File::try_lock)?;
        file.set_len(0)
            .and_then(|()| writeln!(file, "{run}{SIGNED}{}", std::process::id()))
            .map_err(LabError::io("write", &own))?;
        lock.files.push(file);
        Ok(lock)
    }

    /// The file that is signed.
    fn path_of(&self, measured: Measured<'_>) -> PathBuf {
        self.root.join(match measured {
            Measured::Machine => LOCK.to_owned(),
            Measured::Device(id) => {
                format!("{LOCK}-{}", id.replace(|c: char| !c.is_ascii_alphanumeric(), "-"))
            }
        })
    }

    /// That no other run has the name of one that has signed here: two would write one record. Both have
    /// signed before they look, so at least one of them sees the other.
    pub(super) fn expect_alone(&self, measured: Measured<'_>, run: &str) -> Result<()> {
        let own = self.path_of(measured);
        match self.holders()?.into_iter().find(|h| h.file != own && h.run == run) {
            None => Ok(()),
            Some(other) => Err(LabError::Busy { holder: other.signature }),
        }
    }

    /// A lock's file, locked by `try_lock`.
    fn lock(&self, path: &Path, try_lock: TryLock) -> Result<File> {
        if let Some(file) = locked(path, try_lock)? {
            return Ok(file);
        }
        let of_a_run = |h: &Holder| file_name(path) == LOCK || h.file == path;
        let holders = self.holders()?.into_iter().filter(of_a_run);
        let holders: Vec<String> = holders.map(|h| h.signature).collect();
        Err(LabError::Busy { holder: holders.join("; ") })
    }

    /// The runs that signed a lock and still run.
    fn holders(&self) -> Result<Vec<Holder>> {
        let locks = entries(&self.root)?.into_iter().filter(|p| file_name(p).starts_with(LOCK));
        Ok(locks.filter_map(Holder::read).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a process that is being started holds one for a moment.
    #[test]
    fn a_lock_is_given_back_though_its_descriptor_has_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let locks = Locks::new(dir.path());
        let lock = locks.take(Measured::Machine, "a run").unwrap();
        let copy = lock.files[0].try_clone().unwrap();
        let another = || locks.take(Measured::Machine, "another");
        assert!(matches!(another(), Err(LabError::Busy { .. })));
        drop(lock);
        another().unwrap();
        drop(copy);
    }

    #[test]
    fn locks_of_a_user_lie_in_a_directory_that_no_other_can_change() {
        use std::os::unix::fs::{PermissionsExt, symlink};

        let dir = tempfile::tempdir().unwrap();
        let locks = Locks::below(dir.path()).unwrap();
        let found = fs::metadata(&locks.root).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o700);
        assert_eq!(found.uid(), getuid().as_raw());
        // Every process finds the same ones.
        assert_eq!(Locks::below(dir.path()).unwrap().root, locks.root);
        // A name that leads elsewhere is not followed.
        let elsewhere = tempfile::tempdir().unwrap();
        fs::remove_dir_all(&locks.root).unwrap();
        symlink(elsewhere.path(), &locks.root).unwrap();
        let refused = Locks::below(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("SWIGLU_LAB_LOCK_DIR"), "{refused}");
        let none = Locks::below(&dir.path().join("none")).unwrap_err();
        assert!(matches!(none, LabError::Io { .. }), "{none}");
        assert!(none.to_string().contains("SWIGLU_LAB_LOCK_DIR"), "{none}");
    }
}
