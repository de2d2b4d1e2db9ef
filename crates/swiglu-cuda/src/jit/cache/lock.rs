//! One compiling process per entry.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

/// Takes an advisory lock on a file, which is created where it is missing and never removed:
/// removing it would let two processes lock two files of one name. The system releases the lock
/// when the process ends, however it ends.
///
/// # Errors
/// Why there is no lock: the directory cannot be written, the file system has no locks, or another
/// process held it for all of `patience`.
pub(super) fn acquire(path: &Path, patience: Duration) -> Result<File, String> {
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
                    "another process has compiled this for more than {} s; compiling it here too",
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
