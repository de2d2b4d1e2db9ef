//! Digests of texts, and how they are written.

use sha2::{Digest, Sha256};

/// SHA-256 of every text with its length, so that no two lists run together into the same bytes.
pub(crate) fn of_texts<T: AsRef<str>>(texts: impl Iterator<Item = T>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update((text.as_ref().len() as u64).to_le_bytes());
        hash.update(text.as_ref());
    }
    hash.finalize().into()
}

/// Two digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
