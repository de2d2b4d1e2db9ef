//! Launches `device/lib/probe.cu`.

use super::NamedVariant;
use super::elementwise::signed;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, kernel_file};
use crate::device::launch::{LaunchConfig, launch};
use crate::device::stream::Stream;

static FILE: KernelFile = kernel_file!("lib", "probe.cu");

const THREADS: u32 = 256;
const READERS: u32 = 512;
/// Blocks that read on an SM at the same time.
const READERS_PER_SM: u32 = 2;
/// Bytes of a read, and of all reads of a block's threads that are under way together: buffers are multiples of it.
const VECTOR: usize = 16;
const READ_AT_ONCE: usize = VECTOR * READERS as usize * 8;

#[repr(C)]
#[derive(Default)]
struct ProbeParams {
    data: u64,
    count: i64,
}

/// What a kernel does that is timed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Probe {
    /// Nothing, on every SM.
    Nothing,
    /// So many barriers of a grid of a block on each SM, at a word of device memory that is 0 before its first use.
    Barriers { word: u64, count: usize },
    /// Every one of [`readers`] blocks reads `bytes` bytes of zeros, [`whole_reads`] of them.
    Reads { data: u64, bytes: usize },
    /// Cycles of the SMs' clock, on one SM.
    Cycles(usize),
}

/// Bytes, rounded up to what blocks read.
pub(crate) fn whole_reads(bytes: usize) -> usize {
    bytes.next_multiple_of(READ_AT_ONCE)
}

/// Blocks that read at the same time.
pub(crate) fn readers(multiprocessors: u32) -> usize {
    (multiprocessors * READERS_PER_SM) as usize
}

/// The device file.
pub(crate) fn file() -> &'static KernelFile {
    &FILE
}

fn variant() -> Variant {
    Variant::new(&FILE, [])
}

/// Enqueues a probe.
///
/// # Safety
/// The addresses are memory of the stream's device with the extent that [`Probe`] says, which stays valid until the
/// kernel has run and which nothing else uses meanwhile.
pub(crate) unsafe fn enqueue(stream: &Stream, probe: Probe) -> Result<()> {
    let sms = stream.cuda().facts().sm_count;
    let (entry, grid, block) = match probe {
        Probe::Nothing => ("probe_nothing", sms, THREADS),
        Probe::Barriers { .. } => ("probe_barriers", sms, THREADS),
        Probe::Reads { .. } => ("probe_reads", sms * READERS_PER_SM, READERS),
        Probe::Cycles(_) => ("probe_cycles", 1, THREADS),
    };
    let params = match probe {
        Probe::Nothing => ProbeParams::default(),
        Probe::Barriers { word, count } => ProbeParams { data: word, count: signed(count) },
        Probe::Reads { data, bytes } => ProbeParams { data, count: signed(bytes / VECTOR) },
        Probe::Cycles(count) => ProbeParams { count: signed(count), ..ProbeParams::default() },
    };
    let config = LaunchConfig {
        grid: [grid, 1, 1],
        block,
        cooperative: matches!(probe, Probe::Barriers { .. }),
        ..LaunchConfig::default()
    };
    let function = stream.cuda().function(&variant(), entry, 0)?;
    // SAFETY: the parameters are those of the kernels; the caller vouches for the memory.
    unsafe { launch(stream, &function, &config, &params) }
}

pub(super) fn variants() -> Vec<NamedVariant> {
    vec![NamedVariant { name: "rates of a device".into(), variant: variant() }]
}
