//! A cache file: what it is, what the compiler said, and the code.
//!
//! ```text
//! magic      8 bytes   "SWIGLUK\n"
//! format     4 bytes   little-endian, as all numbers
//! key       32 bytes   what it was made from
//! digest    32 bytes   SHA-256 of everything after it
//! lengths  4 + 8 bytes of report and code
//! report    JSON
//! code      CUBIN
//! ```

use sha2::{Digest, Sha256};

use crate::device::jit::nvrtc::Report;

/// The version of this layout. It is part of every entry's identity.
pub(super) const FORMAT: u32 = 1;
const MAGIC: &[u8; 8] = b"SWIGLUK\n";

pub(super) fn encode(key: &[u8; 32], report: &Report, cubin: &[u8]) -> Result<Vec<u8>, String> {
    let report = serde_json::to_vec(report).map_err(|e| e.to_string())?;
    let report_len = u32::try_from(report.len()).map_err(|_| "report too long".to_owned())?;
    let mut body = Vec::with_capacity(12 + report.len() + cubin.len());
    body.extend(report_len.to_le_bytes());
    body.extend((cubin.len() as u64).to_le_bytes());
    body.extend(report);
    body.extend(cubin);
    let digest: [u8; 32] = Sha256::digest(&body).into();
    let mut bytes = Vec::with_capacity(76 + body.len());
    bytes.extend(MAGIC);
    bytes.extend(FORMAT.to_le_bytes());
    bytes.extend(key);
    bytes.extend(digest);
    bytes.extend(body);
    Ok(bytes)
}

/// Report and code, if the file is whole and was made from what `key` says.
pub(super) fn decode(bytes: &[u8], key: &[u8; 32]) -> Result<(Report, Vec<u8>), String> {
    let mut rest = bytes;
    if take::<8>(&mut rest)? != *MAGIC {
        return Err("not a kernel of this program".into());
    }
    let format = u32::from_le_bytes(take(&mut rest)?);
    if format != FORMAT {
        return Err(format!("format {format}, expected {FORMAT}"));
    }
    if take::<32>(&mut rest)? != *key {
        return Err("made from other sources than its name says".into());
    }
    let digest = take::<32>(&mut rest)?;
    if <[u8; 32]>::from(Sha256::digest(rest)) != digest {
        return Err("damaged: its digest does not match".into());
    }
    let report_len = u32::from_le_bytes(take(&mut rest)?) as usize;
    let cubin_len = u64::from_le_bytes(take(&mut rest)?);
    let (report, cubin) =
        rest.split_at_checked(report_len).ok_or("damaged: its lengths do not match")?;
    if cubin.len() as u64 != cubin_len || cubin.is_empty() {
        return Err("damaged: its lengths do not match".into());
    }
    let report = serde_json::from_slice(report).map_err(|e| format!("damaged report: {e}"))?;
    Ok((report, cubin.to_vec()))
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], String> {
    let (head, tail) = rest.split_first_chunk::<N>().ok_or("truncated")?;
    *rest = tail;
    Ok(*head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::jit::CompileLog;

    fn sample() -> (Report, Vec<u8>) {
        let report = Report { log: CompileLog::default(), millis: 1.5, nvrtc: (13, 0) };
        (report, b"\x7fELF code".to_vec())
    }

    #[test]
    fn what_was_written_is_read() {
        let (report, cubin) = sample();
        let bytes = encode(&[7; 32], &report, &cubin).unwrap();
        assert_eq!(decode(&bytes, &[7; 32]).unwrap(), (report, cubin));
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let (report, cubin) = sample();
        let bytes = encode(&[7; 32], &report, &cubin).unwrap();
        for len in 0..bytes.len() {
            decode(&bytes[..len], &[7; 32]).unwrap_err();
        }
        for i in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[i] ^= 0x10;
            decode(&changed, &[7; 32]).unwrap_err();
        }
        let mut longer = bytes.clone();
        longer.push(0);
        decode(&longer, &[7; 32]).unwrap_err();
        decode(&bytes, &[8; 32]).unwrap_err();
    }
}
