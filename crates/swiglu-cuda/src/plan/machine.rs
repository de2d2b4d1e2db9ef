//! What the cost model knows of a device: every rate is a field, which follows from the driver's facts and the architecture
//! ([`Machine::new`]).

use serde::{Deserialize, Serialize};

use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;
use crate::kernels::decode_mlp::Limits;

/// What the model needs to know of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Machine {
    pub(crate) multiprocessors: f64,
    /// Cycles per second.
    pub(crate) clock: f64,
    /// Bytes per second of device memory.
    pub(crate) memory: f64,
    /// Bytes of L2; 0 where the driver does not tell.
    pub(crate) cache: f64,
    /// Operations per cycle and SM: 16-bit products on tensor cores.
    pub(crate) tensor: f64,
    /// What `mma.sync`, which any warp issues, reaches of that.
    pub(crate) mma_share: f64,
    /// Bytes of shared memory that the blocks of an SM divide.
    pub(crate) shared: usize,
    /// Bytes per cycle that L2 gives all SMs together.
    pub(crate) l2: f64,
    /// Bytes per cycle in which a kernel writes to L2 what the next one reads there.
    pub(crate) kept: f64,
    /// Seconds from a launch behind another to the first instruction, and from the last one to the
    /// next launch.
    pub(crate) launch: f64,
    /// Seconds of a barrier of the whole grid.
    pub(crate) barrier: f64,
}

/// All that estimates are made from, beside the problem.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Model {
    pub(crate) machine: Machine,
    /// What the decode kernels need to know of the device.
    pub(crate) limits: Limits,
    /// Whether f32 products round their inputs to TF32.
    pub(crate) tf32: bool,
}

/// What a device says that its speed follows from, as records of measurements keep it: as in [`DeviceFacts`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Highest clock of the SMs in kHz.
    pub clock_khz: u32,
    /// Bytes per second of device memory.
    pub memory_bandwidth: u64,
    /// Bytes of L2.
    pub l2_bytes: usize,
    /// Bytes of shared memory that one block can have.
    pub shared_bytes_optin: usize,
}

impl From<&DeviceFacts> for Rates {
    fn from(facts: &DeviceFacts) -> Self {
        let &DeviceFacts { clock_khz, memory_bandwidth, l2_bytes, shared_bytes_optin, .. } = facts;
        Self { clock_khz, memory_bandwidth, l2_bytes, shared_bytes_optin }
    }
}

/// Share of L2 within which what a kernel writes is still there for the next one, and bytes
/// per cycle of it: fitted on an H200 to the unfused path of the shipped record. Of f32 sums it was not fitted.
const KEPT_SHARE: f64 = 0.5;
pub(super) const KEPT_BYTES: f64 = 6000.0;
/// Bytes per cycle that L2 gives all SMs together: fitted on an H200.
/// Published measurements of 4 KB (arXiv 2402.13499) make every small tile far too slow.
pub(super) const L2_BYTES: f64 = 12000.0;
/// Seconds of a launch behind another: fitted on an H200.
pub(super) const LAUNCH: f64 = 1.7e-6;
/// Seconds of a barrier of the grid, the middle of what `decode_mlp.cu` expects of it, 0.8 to 1.5 µs. What decode kernels
/// take beside the stream of weights was fitted with it in it.
pub(super) const BARRIER: f64 = 1.15e-6;
/// Share of the memory's nominal rate that a stream of reads reaches: fitted on an H200.
pub(super) const MEMORY_SHARE: f64 = 0.85;
/// Share of the greatest clock that remains where tensor cores are busy with random data, because of
/// the power they draw: fitted on an H200.
pub(super) const CLOCK_SHARE: f64 = 0.74;
/// Bytes of shared memory that every block takes beside its own.
pub(super) const BESIDE_SHARED: usize = 1024;

impl Machine {
    pub(crate) fn new(rates: &Rates, sm_count: u32, arch: Arch) -> Self {
        // Dense 16-bit products with f32 sums, from the vendor's data sheets: rate over SMs
        // and clock.
        let (tensor, mma_share) = match arch {
            Arch::Sm80 | Arch::Sm87 => (2048.0, 0.85),
            Arch::Sm86 | Arch::Sm89 => (1024.0, 0.85),
            // mma.sync reaches about 0.62 of wgmma's rate (arXiv 2402.13499).
            Arch::Sm90a => (4096.0, 0.62),
            Arch::Sm100a | Arch::Sm103a | Arch::Sm110a => (8192.0, 0.25),
            Arch::Sm120a | Arch::Sm121a => (1024.0, 0.85),
        };
        // A driver that does not tell leaves values of the right size.
        let known = |value: f64, else_: f64| if value > 0.0 { value } else { else_ };
        Self {
            multiprocessors: f64::from(sm_count.max(1)),
            clock: known(f64::from(rates.clock_khz) * 1e3, 1.7e9) * CLOCK_SHARE,
            memory: known(rates.memory_bandwidth as f64, 1e12) * MEMORY_SHARE,
            cache: rates.l2_bytes as f64,
            tensor,
            mma_share,
            // A block may have all but the 1024 bytes that each takes beside its own.
            shared: rates.shared_bytes_optin + BESIDE_SHARED,
            l2: L2_BYTES,
            kept: KEPT_BYTES,
            launch: LAUNCH,
            barrier: BARRIER,
        }
    }

    /// Seconds for these bytes from memory.
    pub(super) fn stream(&self, bytes: f64) -> f64 {
        bytes / self.memory
    }

    /// Seconds in which one kernel writes these bytes, or the next one reads them.
    pub(super) fn pass_on(&self, bytes: f64) -> f64 {
        match bytes <= self.cache * KEPT_SHARE {
            true => bytes / (self.kept * self.clock),
            false => self.stream(bytes),
        }
    }
}
