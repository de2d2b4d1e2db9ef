//! The kernels: one launcher per device file, and the list of all variants.

use crate::context::Arch;
use crate::jit::Variant;

/// A variant with a name that people can read.
#[derive(Debug, Clone, Copy)]
pub struct NamedVariant {
    /// For example `bf16, separate`.
    pub name: &'static str,
    /// What is compiled.
    pub variant: Variant,
}

/// Every variant that a device of this architecture may launch.
pub fn registry(_arch: Arch) -> Vec<NamedVariant> {
    Vec::new()
}
