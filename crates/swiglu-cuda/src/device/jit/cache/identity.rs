//! What a cache entry was made from.

use sha2::{Digest, Sha256};

use super::entry::FORMAT;
use crate::device::arch::Arch;
use crate::device::digest::{hex, of_texts};
use crate::device::jit::nvrtc::{Version, options};
use crate::device::jit::source::{Header, sources_of};
use crate::device::jit::variant::Variant;

/// A digest of everything that decides a module, except the compiler's version.
///
/// The version stands apart because a machine without a compiler can use a module that any version
/// made from the same sources. NVRTC tells its major and minor number: what one patch of it compiled wrong
/// the next one finds here, until the directory is emptied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    digest: [u8; 32],
    /// For people who look into the directory: file and architecture.
    label: String,
}

impl Identity {
    pub(super) fn of(variant: &Variant, arch: Arch) -> Self {
        let file = variant.file();
        let stem = file.name().strip_suffix(".cu").unwrap_or(file.name());
        Self {
            digest: digest(FORMAT, sources_of(file), &options(variant, arch)),
            label: format!("{stem}-{arch}"),
        }
    }

    /// The key of the entry that a compiler of this version makes.
    pub(super) fn key(&self, (major, minor): Version) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.digest);
        hash.update(major.to_le_bytes());
        hash.update(minor.to_le_bytes());
        hash.finalize().into()
    }

    pub(super) fn file_name(&self, (major, minor): Version) -> String {
        format!("{}{major}.{minor}.cubin", self.prefix())
    }

    /// The compiler's version in the name of an entry of this identity.
    pub(super) fn version_in(&self, name: &str) -> Option<Version> {
        let version = name.strip_prefix(&self.prefix())?.strip_suffix(".cubin")?;
        let (major, minor) = version.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    fn prefix(&self) -> String {
        format!("{}-{}-nvrtc", self.label, hex(&self.digest[..16]))
    }

    /// The first digits of the digest.
    pub(super) fn short(&self) -> String {
        hex(&self.digest[..8])
    }
}

/// What the compiler is given.
fn digest(format: u32, sources: impl Iterator<Item = Header>, options: &[String]) -> [u8; 32] {
    let format = format!("swiglu kernel, format {format}");
    let sources = sources.flat_map(|(name, contents)| [name, contents]);
    let options = options.iter().map(String::as_str);
    of_texts([&*format].into_iter().chain(sources).chain(["options"]).chain(options))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::jit::variant::{KernelFile, define};

    #[test]
    fn the_identity_changes_with_each_ingredient() {
        let sources: &[Header] = &[("a.cu", "x"), ("b.cuh", "y")];
        let options = ["-DA=1".to_owned(), "--std=c++17".to_owned()];
        let of = |format, sources: &[Header], options: &[String]| {
            digest(format, sources.iter().copied(), options)
        };
        let base = of(1, sources, &options);
        let changed = [
            of(2, sources, &options),
            of(1, &[("a.cu", "z"), ("b.cuh", "y")], &options),
            of(1, &[("a.cu", "x"), ("b.cuh", "z")], &options),
            of(1, &[("c.cu", "x"), ("b.cuh", "y")], &options),
            of(1, &sources[..1], &options),
            of(1, sources, &options[..1]),
            of(1, sources, &["-DA=2".to_owned(), "--std=c++17".to_owned()]),
            of(1, sources, &["--std=c++17".to_owned(), "-DA=1".to_owned()]),
            // The same bytes in a row, cut elsewhere.
            of(1, &[("a.cux", ""), ("b.cuh", "y")], &options),
        ];
        assert!(changed.iter().all(|other| *other != base));
        assert_eq!(base, of(1, sources, &options));
    }

    #[test]
    fn variants_architectures_and_compilers_have_entries_of_their_own() {
        static FILE: KernelFile = KernelFile::new("a.cu", "");
        let plain = Variant::new(&FILE, []);
        let other = Variant::new(&FILE, [define("A", 1)]);
        let id = Identity::of(&plain, Arch::Sm90a);
        assert_ne!(id.digest, Identity::of(&other, Arch::Sm90a).digest);
        assert_ne!(id.digest, Identity::of(&plain, Arch::Sm80).digest);
        assert_ne!(id.key((13, 0)), id.key((13, 1)));
        let name = id.file_name((13, 0));
        assert!(name.starts_with("a-sm_90a-") && name.ends_with("-nvrtc13.0.cubin"), "{name}");
        assert_eq!(id.version_in(&name), Some((13, 0)));
        assert_eq!(id.version_in(&format!("{name}.lock")), None);
        assert_eq!(Identity::of(&other, Arch::Sm90a).version_in(&name), None);
    }
}
