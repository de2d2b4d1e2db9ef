//! How a problem will be computed: data that can be printed, compared and stored.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::problem::Problem;
use crate::setters;

/// Whether intermediates stay in registers or pass through memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// One kernel; pre-activations never reach memory.
    Fused,
    /// Separate linear maps, then the activation over their results.
    Unfused,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Path::Fused => "fused",
            Path::Unfused => "unfused",
        })
    }
}

/// The chosen way of computing a [`Problem`]. Making one has no effects; only running it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Plan {
    /// What is computed.
    pub problem: Problem,
    /// The backend, for example `cpu`.
    pub backend: String,
    /// The kernel within it, for example `avx512-bf16`.
    pub kernel: String,
    /// Fused or not.
    pub path: Path,
    /// Threads of the host that may take part; 0 where a device of its own computes.
    pub threads: usize,
    /// Tile sizes and the like, by name.
    pub parameters: BTreeMap<String, usize>,
    /// Why this plan.
    pub reason: String,
}

impl Plan {
    /// A plan of a kernel without parameters, on a device of its own.
    pub fn new(
        problem: Problem,
        backend: impl Into<String>,
        kernel: impl Into<String>,
        path: Path,
    ) -> Self {
        let (backend, kernel) = (backend.into(), kernel.into());
        let (parameters, reason) = (BTreeMap::new(), String::new());
        Self { problem, backend, kernel, path, threads: 0, parameters, reason }
    }

    setters! {
        /// Threads of the host that may take part.
        with_threads(threads: usize);
        /// Tile sizes and the like, by name.
        with_parameters(parameters: BTreeMap<String, usize>);
        /// Why this plan.
        with_reason(reason: impl Into<String>, reason.into());
    }
}

impl fmt::Display for Plan {
    /// One line: `cpu/avx512-bf16 fused gated-linear, 2 threads, row_block=12 …`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} {} {}", self.backend, self.kernel, self.path, self.problem.op)?;
        if self.threads > 0 {
            write!(f, ", {} thread{}", self.threads, if self.threads == 1 { "" } else { "s" })?;
        }
        for (name, value) in &self.parameters {
            write!(f, ", {name}={value}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, DType, Numerics, Op};

    #[test]
    fn plans_print_and_survive_json() {
        let problem = Problem::new(Op::Mlp, 1, 576, 1536, DType::Bf16, Activation::CLAMPED_SWIGLU)
            .with_numerics(Numerics::default())
            .with_bias(true);
        let plan = Plan {
            problem,
            backend: "cpu".into(),
            kernel: "avx2".into(),
            path: Path::Fused,
            threads: 2,
            parameters: BTreeMap::from([("row_block".into(), 6)]),
            reason: "only candidate".into(),
        };
        assert_eq!(plan.to_string(), "cpu/avx2 fused mlp, 2 threads, row_block=6");
        let json = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
        assert!(!json.contains("groups"), "{json}");
        let experts = Plan { problem: problem.with_groups(8), ..plan };
        let json = serde_json::to_string(&experts).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), experts);
        assert_eq!(problem.flops(), 6.0 * 576.0 * 1536.0);
        assert_eq!(problem.compulsory_bytes(), 2.0 * (3.0 * 576.0 * 1536.0 + 2.0 * 576.0));
    }
}
