//! Files and programs of this machine, with what was attempted on what in every error.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use crate::error::{LabError, Result};

/// What a file holds; none if there is no such file.
pub(crate) fn read_if_there(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        text => text.map(Some).map_err(LabError::io("read", path)),
    }
}

/// Writes a file: the old one or the new one is there at any moment, never half of one. Until it is whole its
/// name begins with `prefix`.
pub(crate) fn write_whole(path: &Path, content: &[u8], prefix: &str, mode: u32) -> Result<()> {
    let failed = || LabError::io("write", path);
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(LabError::io("create directory", dir))?;
    let mut file = tempfile::Builder::new()
        .prefix(prefix)
        .permissions(fs::Permissions::from_mode(mode))
        .tempfile_in(dir)
        .map_err(LabError::io("create a file in", dir))?;
    file.write_all(content).map_err(failed())?;
    file.as_file().sync_all().map_err(failed())?;
    file.persist(path).map_err(|e| failed()(e.error))?;
    // The rename itself must reach the disk too.
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed())
}

pub(crate) type TryLock = fn(&File) -> Result<(), fs::TryLockError>;

/// A file, made if it is not there, locked; none if somebody else has the lock.
pub(crate) fn locked(path: &Path, try_lock: TryLock) -> Result<Option<File>> {
    let options = File::options().read(true).write(true).create(true).truncate(false).clone();
    let file = options.open(path).map_err(LabError::io("open", path))?;
    match try_lock(&file) {
        Ok(()) => Ok(Some(file)),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        Err(fs::TryLockError::Error(e)) => Err(LabError::io("lock", path)(e)),
    }
}

/// What is in a directory, sorted; nothing if there is no such directory.
pub(crate) fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = || LabError::io("read directory", dir);
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed())?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths: Vec<PathBuf> = paths.collect::<Result<_, _>>().map_err(failed())?;
    paths.sort();
    Ok(paths)
}

pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The name without its extension.
pub(crate) fn file_stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// SHA-256, in hexadecimal.
pub(crate) fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// SHA-256 of what a file holds, in hexadecimal. It is not taken into memory: programs are large.
///
/// # Errors
/// Those of opening and reading it.
pub fn sha256_of(path: &Path) -> std::io::Result<String> {
    let (mut file, mut hasher) = (File::open(path)?, Sha256::new());
    let mut part = vec![0; 64 << 10];
    loop {
        match file.read(&mut part) {
            Ok(0) => return Ok(hexadecimal(&hasher.finalize())),
            Ok(read) => hasher.update(&part[..read]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a program came to; none if there is no such program, or it failed.
pub(crate) fn ran<S: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = S>,
) -> Option<Output> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output();
    output.ok().filter(|output| output.status.success())
}

/// What such a program printed.
pub(crate) fn said<S: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = S>,
) -> Option<String> {
    Some(String::from_utf8_lossy(&ran(program, args)?.stdout).trim().to_owned())
}

/// RFC 3339 in UTC.
pub(crate) fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
