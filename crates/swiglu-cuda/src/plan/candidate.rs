//! What could compute a problem, for whoever asks why it does or does not.

use swiglu_core::Numerics;

use super::Algorithm;

/// An algorithm for a problem, and what speaks for or against it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Candidate {
    pub(crate) algorithm: Option<Algorithm>,
    /// What it computes of a backward pass, for example `dx`; [`None`] where it computes all that the problem asks for.
    pub step: Option<String>,
    /// The kernels with their tiles, for example `sm90_gated_gemm 128x64` or `cublaslt + elementwise`.
    pub name: String,
    /// Whether the plan uses it.
    pub chosen: bool,
    /// The rounding that it computes the problem with; [`None`] where it does not compute it.
    pub numerics: Option<Numerics>,
    /// Why it does not give what the problem asks for.
    pub refusal: Option<String>,
    /// Microseconds that the cost model alone expects, where it computes the problem.
    pub predicted_us: Option<f64>,
    /// Microseconds that plans go by: the same, corrected by what was measured near.
    pub expected_us: Option<f64>,
    /// Microseconds that were measured for this very problem.
    pub measured_us: Option<f64>,
    /// Why, or why not.
    pub reason: String,
}

impl Candidate {
    /// One of which nothing was measured, with the seconds that are expected of it: why it is taken, or why not.
    pub(super) fn new(
        step: Option<&str>,
        name: String,
        seconds: Option<f64>,
        why: Result<String, String>,
    ) -> Self {
        let us = seconds.map(|seconds| seconds * 1e6);
        Self {
            algorithm: None,
            step: step.map(str::to_owned),
            name,
            chosen: why.is_ok(),
            numerics: None,
            refusal: why.clone().err(),
            predicted_us: us,
            expected_us: us,
            measured_us: None,
            reason: why.unwrap_or_else(|why| why),
        }
    }
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.name)
    }
}
