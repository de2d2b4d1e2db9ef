//! Writing: complete or not at all.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use half::f16;
use swiglu_core::{DType, Element, MatrixRef};

use super::MAGIC;
use crate::error::{FormatError, Result};

/// Data starts at a multiple of this, so that it can be mapped.
const ALIGNMENT: usize = 64;
/// Magic, version and a two-byte length.
const PREFIX: usize = 10;

/// Writes a matrix as version 1.0, C order: `<f4` for `f32` and, exactly widened, for `bf16`,
/// which has no descriptor in this format; `<f2` for `f16`.
///
/// The file appears whole under its name or not at all: it is written beside it, synchronised and
/// renamed. Where the name is a link, `overwrite` replaces the file that it leads to.
///
/// # Errors
/// [`FormatError::AlreadyExists`] unless `overwrite`; [`FormatError::NotAFile`] if something else
/// than a file is in the way; [`FormatError::Io`].
pub fn write<T: Element>(path: &Path, m: MatrixRef<'_, T>, overwrite: bool) -> Result<()> {
    let (rows, cols) = (m.rows(), m.cols());
    match T::DTYPE {
        DType::F16 => write_rows(path, "<f2", rows, cols, overwrite, |r, out| {
            // Through f32, which is exact.
            out.extend(m.row(r).iter().flat_map(|v| f16::from_f32(v.to_f32()).to_le_bytes()));
        }),
        _ => write_rows(path, "<f4", rows, cols, overwrite, |r, out| {
            out.extend(m.row(r).iter().flat_map(|v| v.to_f32().to_le_bytes()));
        }),
    }
}

/// As [`write()`], `<f8`.
///
/// # Errors
/// As [`write()`].
pub fn write_f64(path: &Path, m: MatrixRef<'_, f64>, overwrite: bool) -> Result<()> {
    write_rows(path, "<f8", m.rows(), m.cols(), overwrite, |r, out| {
        out.extend(m.row(r).iter().flat_map(|v| v.to_le_bytes()));
    })
}

fn header(descr: &str, rows: usize, cols: usize) -> Vec<u8> {
    let dict =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
    let total = (PREFIX + dict.len() + 1).next_multiple_of(ALIGNMENT);
    let mut out = Vec::with_capacity(total);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[1, 0]);
    // Two numbers of at most twenty digits: the dictionary is far below 65536 bytes.
    out.extend_from_slice(&((total - PREFIX) as u16).to_le_bytes());
    out.extend_from_slice(dict.as_bytes());
    out.resize(total - 1, b' ');
    out.push(b'\n');
    out
}

fn write_rows(
    path: &Path,
    descr: &str,
    rows: usize,
    cols: usize,
    overwrite: bool,
    mut row: impl FnMut(usize, &mut Vec<u8>),
) -> Result<()> {
    check_target(path, overwrite)?;
    let followed = if overwrite { behind_link(path)? } else { None };
    let path = followed.as_deref().unwrap_or(path);
    let dir = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".").suffix(".npy.tmp");
    // A temporary file is private by default; the result should be as readable as any output.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    // Dropping it removes it, so that every early return leaves nothing behind.
    let temp = builder.tempfile_in(dir).map_err(|e| {
        // The system's own words would name the temporary file.
        let why = match e.kind() {
            io::ErrorKind::NotFound if !dir.is_dir() => "there is no such directory".to_owned(),
            kind => kind.to_string(),
        };
        let why = format!("no file can be made in {}: {why}", dir.display());
        FormatError::io(path, "create")(io::Error::new(e.kind(), why))
    })?;
    let mut fill = |file: &File| -> io::Result<()> {
        let mut out = BufWriter::new(file);
        out.write_all(&header(descr, rows, cols))?;
        let mut bytes = Vec::new();
        for r in 0..rows {
            bytes.clear();
            row(r, &mut bytes);
            out.write_all(&bytes)?;
        }
        out.flush()?;
        drop(out);
        file.sync_all()
    };
    fill(temp.as_file()).map_err(FormatError::io(path, "write"))?;
    let renamed = if overwrite { temp.persist(path) } else { temp.persist_noclobber(path) };
    match renamed {
        Ok(_) => {}
        // Someone else was faster.
        Err(e) if !overwrite && e.error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(FormatError::AlreadyExists { path: path.to_owned() });
        }
        Err(e) => return Err(FormatError::io(path, "rename to")(e.error)),
    }
    // Makes the new name itself durable where directories can be synchronised; where they
    // cannot, the file is complete all the same.
    if let Ok(dir) = File::open(dir) {
        let _ = dir.sync_all();
    }
    Ok(())
}

/// What a link leads to; none for anything else, as for what is not there. A rename would replace the link.
fn behind_link(path: &Path) -> Result<Option<PathBuf>> {
    match std::fs::symlink_metadata(path) {
        Ok(m) if m.is_symlink() => {
            path.canonicalize().map(Some).map_err(FormatError::io(path, "follow"))
        }
        _ => Ok(None),
    }
}

/// Only a regular file may be replaced: renaming over a device would remove the device.
fn check_target(path: &Path, overwrite: bool) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(m) if m.is_dir() => {
            Err(FormatError::NotAFile { path: path.to_owned(), found: "is a directory" })
        }
        Ok(m) if !m.is_file() => {
            Err(FormatError::NotAFile { path: path.to_owned(), found: "is a device or pipe" })
        }
        Ok(_) if !overwrite => Err(FormatError::AlreadyExists { path: path.to_owned() }),
        _ => Ok(()),
    }
}
