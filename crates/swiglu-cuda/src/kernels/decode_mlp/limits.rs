//! What a device lets a decode kernel have, and why one does not compute a problem.

use std::fmt;

use swiglu_core::Op;
use swiglu_core::quant::QuantizedType;

use crate::device::arch::Arch;
use crate::device::context::Context;
use crate::device::facts::DeviceFacts;
use crate::device::sys::CUdevice_attribute as Attribute;

/// What the kernel needs to know of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) multiprocessors: usize,
    /// Bytes of shared memory that a block can have.
    pub(crate) shared: usize,
    /// Whether the blocks of a launch can be made to run at the same time.
    pub(crate) cooperative: bool,
    /// Whether a launch may start before the one before it has ended.
    pub(crate) programmatic: bool,
    /// Whether it has TMA that `sm90_decode_mlp.cu` is written for, and the clusters of
    /// `sm90_held_mlp.cu`.
    pub(crate) tma: bool,
}

impl Limits {
    pub(crate) fn new(context: &Context, facts: &DeviceFacts, arch: Arch) -> Self {
        let cooperative = Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH;
        Self::of_arch(arch, facts, context.attribute(cooperative).is_ok_and(|value| value != 0))
    }

    /// Those of a device with cooperative launches or without.
    pub(crate) fn of_arch(arch: Arch, facts: &DeviceFacts, cooperative: bool) -> Self {
        Self {
            multiprocessors: facts.sm_count as usize,
            shared: facts.shared_bytes_optin,
            cooperative,
            programmatic: arch >= Arch::Sm90a,
            tma: arch == Arch::Sm90a,
        }
    }
}

/// Why the kernel does not compute a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// It computes whole feed-forward blocks.
    NotABlock(Op),
    /// Batch invariance asks for one order of sums with all numbers of tokens.
    FewTokens,
    /// Without tokens or features there is nothing to stream.
    Empty,
    /// More tokens than it has sums for.
    Tokens { given: usize, most: usize },
    /// The device cannot promise that all blocks of a launch run at once.
    NotCooperative,
    /// The ring, the partial sums and x do not fit into a block's shared memory.
    SharedMemory { needed: usize, given: usize },
    /// Quantised weights that the kernel does not unpack.
    Blocks(QuantizedType),
    /// More tokens with 4-bit weights than a thread of 16 warps has registers for.
    Registers { given: usize, most: usize },
    /// Another architecture than sm_90a.
    NoTma,
    /// Weights that are not quantised.
    Elements,
    /// Rows so long that a thread has too few registers for its part of the tokens.
    LongRows,
    /// Quantised weights with activations of f32.
    QuantizedF32,
    /// An extent is more than the kernel counts to.
    Extent(usize),
    /// Rows of x are not whole 16 bytes, and x does not fit into shared memory.
    Unaligned,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::NotABlock(op) => write!(f, "computes mlp, not {op}"),
            Obstacle::FewTokens => f.write_str(
                "is for few tokens, with sums in another order than those of many: not batch-invariant",
            ),
            Obstacle::Empty => f.write_str("an extent is 0: there is nothing to stream"),
            Obstacle::Tokens { given, most } => {
                write!(f, "{given} tokens; expected at most {most}, above which x is tiled better")
            }
            Obstacle::NotCooperative => {
                f.write_str("the device has no cooperative launch, so no barrier of the grid")
            }
            Obstacle::SharedMemory { needed, given } => {
                write!(f, "needs {needed} bytes of shared memory, a block has {given}")
            }
            Obstacle::Blocks(given) => {
                write!(f, "unpacks Q8_0, Q4_0, I8, F8_E4M3 and F8_E4M3_128x128, not {given}")
            }
            Obstacle::Registers { given, most } => write!(
                f,
                "{given} tokens with 4-bit weights; with 16 warps a thread has registers for at most {most}"
            ),
            Obstacle::NoTma => f.write_str("is written for TMA of sm_90a"),
            Obstacle::Elements => f.write_str("is written for quantised weights"),
            Obstacle::LongRows => f.write_str("rows so long that tokens do not fit into registers"),
            Obstacle::QuantizedF32 => {
                f.write_str("quantised weights are multiplied with f16 or bf16, not with f32")
            }
            Obstacle::Extent(n) => write!(f, "{n} is more than the kernel counts to"),
            Obstacle::Unaligned => {
                f.write_str("rows of x are not whole 16 bytes, and x does not fit shared memory")
            }
        }
    }
}
