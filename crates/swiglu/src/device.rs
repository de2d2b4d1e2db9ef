//! Where layers run.

use std::fmt;

use swiglu_core::{Path, Plan, Problem};
use swiglu_cpu::{Cpu, CpuOptions};

use crate::error::Result;
use crate::explain::Explanation;

/// A device that layers are packed for and run on. Cheap to clone; clones share its threads.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Device {
    /// The processor, with an instruction set and a number of threads.
    Cpu(Cpu),
}

impl Device {
    /// The best device of this machine. Without an accelerator that is [`Device::cpu`].
    ///
    /// # Errors
    /// As [`Device::cpu`].
    pub fn best() -> Result<Self> {
        Self::cpu()
    }

    /// The CPU with its widest instruction set and one thread per processor.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Unavailable`] if threads cannot be started.
    pub fn cpu() -> Result<Self> {
        Self::cpu_with(CpuOptions::default())
    }

    /// The CPU with a forced instruction set or number of threads.
    ///
    /// # Errors
    /// [`swiglu_core::Error::OutOfRange`] for zero threads; [`swiglu_core::Error::Unavailable`]
    /// for an instruction set this machine lacks or threads that cannot be started.
    pub fn cpu_with(options: CpuOptions) -> Result<Self> {
        Ok(Device::Cpu(Cpu::new(&options)?))
    }

    /// How a problem will be computed here, from the numbers alone: a layer packed for the same path
    /// says the same.
    pub fn plan(&self, problem: Problem, path: Path) -> Plan {
        match self {
            Device::Cpu(cpu) => cpu.plan(problem, path),
        }
    }

    /// The plan, what it was chosen from, and what the problem costs at least.
    pub fn explain(&self, problem: Problem, path: Path) -> Explanation {
        Explanation::new(self, self.plan(problem, path))
    }

    /// The kind of device: `cpu`.
    pub fn name(&self) -> &'static str {
        match self {
            Device::Cpu(_) => "cpu",
        }
    }

    /// Threads of the host that take part in one call.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.threads(),
        }
    }
}

impl fmt::Display for Device {
    /// The kind and what it was given: `cpu (avx512-bf16, 2 threads)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(cpu) => {
                let plural = if cpu.threads() == 1 { "" } else { "s" };
                write!(f, "cpu ({}, {} thread{plural})", cpu.isa(), cpu.threads())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swiglu_cpu::Isa;

    #[test]
    fn devices_name_what_they_were_given() {
        let options = CpuOptions { isa: Some(Isa::Portable), threads: Some(1) };
        let device = Device::cpu_with(options).unwrap();
        assert_eq!(device.name(), "cpu");
        assert_eq!(device.to_string(), "cpu (portable, 1 thread)");
    }

    #[test]
    fn zero_threads_are_refused() {
        let options = CpuOptions { threads: Some(0), ..CpuOptions::default() };
        let error = Device::cpu_with(options).unwrap_err().to_string();
        assert!(error.contains("threads = 0") && error.contains("expected 1 to"), "{error}");
    }
}
