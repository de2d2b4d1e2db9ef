//! Lists of cases: the quick ones and the project's goals.

use std::path::Path;

use clap::ValueEnum;
use swiglu_lab::{Case, DeviceKind};

/// A list of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Suite {
    /// One of each kind, in under a minute
    Quick,
    /// Every row of the project's goals; on the CPU with one thread and with all
    Goals,
    /// What the host spends on calls of a CUDA device: the first one, and enqueuing others
    Host,
}

const CPU_QUICK: &str = include_str!("suites/cpu-quick.toml");
const CPU_GOALS: &str = include_str!("suites/cpu-goals.toml");
const CUDA_QUICK: &str = include_str!("suites/cuda-quick.toml");
const CUDA_GOALS: &str = include_str!("suites/cuda-goals.toml");

impl Suite {
    /// The cases for a device; none of what the host spends, which is measured otherwise.
    pub(super) fn cases(self, device: DeviceKind) -> swiglu_lab::Result<Vec<Case>> {
        let suites: &[&str] = match (self, device) {
            (Suite::Quick, DeviceKind::Cpu) => &[CPU_QUICK],
            (Suite::Goals, DeviceKind::Cpu) => &[CPU_GOALS],
            (Suite::Quick, DeviceKind::Cuda) => &[CUDA_QUICK],
            (Suite::Goals, DeviceKind::Cuda) => &[CUDA_QUICK, CUDA_GOALS],
            (Suite::Host, _) => &[],
        };
        let mut cases = Vec::new();
        for suite in suites {
            cases.extend(Case::read_sweeps(suite, Path::new("a suite of bench"), device)?);
        }
        Ok(cases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_of_a_suite_are_read_and_differ() {
        for (suite, device, count) in [
            (Suite::Quick, DeviceKind::Cpu, 12),
            (Suite::Goals, DeviceKind::Cpu, 32),
            (Suite::Quick, DeviceKind::Cuda, 12),
            (Suite::Goals, DeviceKind::Cuda, 41),
        ] {
            let cases = suite.cases(device).unwrap();
            let keys: std::collections::BTreeSet<String> = cases.iter().map(Case::key).collect();
            assert_eq!((keys.len(), cases.len()), (count, count), "{suite:?}");
        }
    }
}
