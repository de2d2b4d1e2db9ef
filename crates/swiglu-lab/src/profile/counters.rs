//! What the hardware counted while a kernel ran.

use serde::{Deserialize, Serialize};

use super::class::Class;

/// Counters of one launch; what the device does not count is absent.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Microseconds, with the profiler attached: longer than without.
    pub us: Option<f64>,
    /// Of the device memory's peak, in percent.
    pub dram_percent: Option<f64>,
    /// Bytes read from device memory.
    pub dram_read_bytes: Option<f64>,
    /// Bytes written to device memory.
    pub dram_written_bytes: Option<f64>,
    /// Cycles in which the tensor pipe worked, in percent.
    pub tensor_percent: Option<f64>,
    /// Of the multiprocessors' peak in any pipe, in percent.
    pub sm_percent: Option<f64>,
    /// Warps that were resident, in percent of the most.
    pub occupancy_percent: Option<f64>,
    /// Sectors found in the second-level cache, in percent.
    pub l2_hit_percent: Option<f64>,
    /// Registers of each thread.
    pub registers: Option<f64>,
}

/// A kernel and what was counted in its last launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelCounters {
    /// Its name.
    pub kernel: String,
    /// Launches that were seen.
    pub launches: usize,
    /// Counters of the last one: the first ones warm up.
    pub counters: Counters,
}

impl Counters {
    /// What the counters say the time consists of; none if they are absent.
    pub fn class(&self) -> Option<Class> {
        const EXPLAINED: f64 = 60.0;
        let compute = match (self.tensor_percent, self.sm_percent) {
            (Some(t), Some(s)) => Some(t.max(s)),
            (t, s) => t.or(s),
        };
        let (memory, compute) = (self.dram_percent?, compute?);
        Some(match memory.max(compute) {
            most if most < EXPLAINED => Class::Latency,
            _ if memory >= compute => Class::Memory,
            _ => Class::Compute,
        })
    }

    /// Bytes read and written.
    pub fn dram_bytes(&self) -> Option<f64> {
        Some(self.dram_read_bytes? + self.dram_written_bytes?)
    }
}
