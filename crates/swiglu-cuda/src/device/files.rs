//! Files that several processes share: read within a limit, written whole or not at all, locked.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A variable of the environment.
pub(crate) type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The path that a variable names; none where it is empty.
pub(crate) fn named_by(env: Environment<'_>, variable: &str) -> Option<PathBuf> {
    env(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The user's directory `name`, in that of `xdg`, a variable, else in `in_home`, by the XDG Base Directory Specification.
pub(crate) fn users_directory(
    env: Environment<'_>,
    xdg: &str,
    in_home: &str,
    name: &str,
) -> Option<PathBuf> {
    let absolute = |variable| named_by(env, variable).filter(|path| path.is_absolute());
    let base = absolute(xdg).or_else(|| Some(absolute("HOME")?.join(in_home)));
    Some(base?.join(name))
}

/// Takes an advisory lock on a file, which is created where it is missing and never removed:
/// removing it would let two processes lock two files of one name. The system releases the lock
/// when the process ends, however it ends.
///
/// # Errors
/// Why there is no lock: the directory cannot be written, the file system has no locks, or another
/// process held it for all of `patience`.
pub(crate) fn lock(path: &Path, patience: Duration) -> Result<File, String> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(|e| e.to_string())?;
    }
    let mut options = OpenOptions::new();
    // Opened for writing because some network file systems lock nothing else.
    let file =
        options.create(true).truncate(false).write(true).open(path).map_err(|e| e.to_string())?;
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(format!("not locked: {e}")),
            Err(TryLockError::WouldBlock) if start.elapsed() >= patience => {
                return Err(format!(
                    "another process has held it for more than {} s",
                    patience.as_secs()
                ));
            }
            Err(TryLockError::WouldBlock) => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(50));
            }
        }
    }
}

/// The file's bytes, or nothing if there is none.
///
/// # Errors
/// Why it was not read: more than `limit` bytes, or what the system says.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, String> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let mut bytes = Vec::new();
    let read = file.take(limit + 1).read_to_end(&mut bytes);
    match read {
        Ok(n) if n as u64 > limit => Err("too large".into()),
        Ok(_) => Ok(Some(bytes)),
        Err(e) => Err(e.to_string()),
    }
}

/// Writes a file that appears whole or not at all.
pub(crate) fn write_whole(dir: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(dir)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".new-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any new file: an image's cache is made by one user and read by another.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(dir)?;
    file.write_all(bytes)?;
    // The rename must not reach the disk before the contents.
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
