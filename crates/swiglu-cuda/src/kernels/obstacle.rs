//! Why a kernel does not compute a problem.

use std::fmt;

use swiglu_core::quant::QuantizedType;
use swiglu_core::{DType, Op};

use super::decode_mlp;
use crate::device::arch::Arch;

/// Why a kernel does not compute a problem: a value, so that looking for a kernel costs no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The device has no wgmma instruction.
    NoWgmma(Arch),
    /// Kernels of every architecture were asked for.
    NotPortable,
    /// The kernel has not this element type.
    ElementType(DType),
    /// K is 0.
    NothingToMultiply,
    /// So many groups of tokens have weights of their own.
    Groups(usize),
    /// Tensor cores would round f32, which was not asked for.
    WouldRound,
    /// Rounding was asked for, and another kernel does it faster.
    Tf32AskedFor,
    /// Gate and up lie in memory as T between two steps, which was not asked for.
    RoundsBetween(DType),
    /// cuBLASLt adds biases as values of T.
    RoundsBias(DType),
    /// Gate and up lie in memory as f32 between two steps, and T was asked for.
    KeepsBetween(DType),
    /// T is f32: gate and up as f32 sums are another way's elements.
    SumsAreElements,
    /// K has fewer steps than blocks that split it.
    TooFewToSplit(usize),
    /// Rows of the down projection's weights end within an access.
    PartOfAnAccess { features: usize, access: usize },
    /// The down projection's weights are more than a device's registers hold, or unevenly shared.
    NotInRegisters,
    /// Quantised weights, which the kernel does not unpack.
    Quantized(QuantizedType),
    /// Steps of another operation.
    OtherOperation { computed: Op, asked: Op },
    /// A caller's weights do not lie as the kernels for few tokens read them.
    LentRows,
    /// TMA cannot address a caller's weights.
    LentAddresses,
    /// A caller's biases are not what cuBLASLt adds to sums.
    LentBiases(DType),
    /// The order of its sums, or whether it is taken, follows the number of tokens, and batch invariance was asked for.
    FollowsTokens,
    /// Gate and up are not stored by kernels for few tokens.
    KeepsToItself,
    /// Gate and up lie in memory as f32, where values of T are to be stored.
    StoresSums,
    /// The unfused path was asked for.
    UnfusedAskedFor,
    /// The cost model expects so many hundredths of the time of the way that it would replace.
    Slower { hundredths: u32 },
    /// Of the kernel for whole feed-forward blocks.
    Decode(decode_mlp::Obstacle),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::NoWgmma(arch) => write!(f, "{arch} has no wgmma"),
            Obstacle::NotPortable => {
                f.write_str("only kernels of every architecture were asked for")
            }
            Obstacle::ElementType(dtype) => write!(f, "the kernel has no {dtype}"),
            Obstacle::Groups(groups) => {
                write!(f, "{groups} groups of tokens have weights of their own, and it reads one's")
            }
            Obstacle::NothingToMultiply => f.write_str("there is nothing to multiply"),
            Obstacle::WouldRound => {
                f.write_str("tensor cores would round f32 to tf32, which was not asked for")
            }
            Obstacle::Tf32AskedFor => {
                f.write_str("tf32 was asked for, which tensor cores multiply")
            }
            Obstacle::RoundsBetween(dtype) => {
                write!(f, "gate and up would be rounded to {dtype}, which was not asked for")
            }
            Obstacle::TooFewToSplit(blocks) => {
                write!(f, "K is too short to be split between {blocks} blocks")
            }
            Obstacle::PartOfAnAccess { features, access } => {
                write!(f, "rows of {features} down weights are no multiple of {access}")
            }
            Obstacle::NotInRegisters => {
                f.write_str("an SM's share of the down weights does not fit into its registers")
            }
            Obstacle::RoundsBias(dtype) => write!(f, "biases would be rounded to {dtype}"),
            Obstacle::KeepsBetween(dtype) => {
                write!(f, "gate and up would not be rounded to {dtype}, which was asked for")
            }
            Obstacle::SumsAreElements => {
                f.write_str("gate and up are f32 anyway: it is the unfused path")
            }
            Obstacle::Quantized(block) => {
                write!(f, "weights are {block}, which it does not unpack")
            }
            Obstacle::OtherOperation { computed, asked } => {
                write!(f, "computes {computed}, not {asked}")
            }
            Obstacle::LentRows => f.write_str(
                "it reads lent weights that are [out, in], with rows that begin and end at multiples of 16 bytes",
            ),
            Obstacle::LentAddresses => {
                f.write_str("TMA reads lent weights whose rows begin at multiples of 16 bytes")
            }
            Obstacle::LentBiases(dtype) => {
                write!(f, "cuBLASLt adds no lent biases of {dtype} to sums of f32")
            }
            Obstacle::FollowsTokens => f.write_str(
                "sums are in another order than with other numbers of tokens, and were to be batch-invariant",
            ),
            Obstacle::KeepsToItself => {
                f.write_str("gate and up, which are to be stored, do not leave its kernels")
            }
            Obstacle::StoresSums => {
                f.write_str("gate and up would be stored as f32, and a backward pass takes elements")
            }
            Obstacle::UnfusedAskedFor => f.write_str("the unfused path was asked for"),
            Obstacle::Slower { hundredths } => write!(
                f,
                "{}.{:02} times as long expected as with dh in memory",
                hundredths / 100,
                hundredths % 100
            ),
            Obstacle::Decode(obstacle) => obstacle.fmt(f),
        }
    }
}
