//! What a machine can do at most, as it was measured.

use serde::{Deserialize, Serialize};

/// One measured limit, with what it is the limit of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ceiling {
    /// What was measured, for example `copy` or `bf16 GEMM`.
    pub name: String,
    /// Bytes or operations per second.
    pub per_second: f64,
}

/// The limits that bind a kind of work.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Ceilings {
    /// Bytes per second, to and from memory.
    pub memory: Option<Ceiling>,
    /// Operations per second, by element type (`f32`, `f16`, `bf16`) where the name begins so.
    pub compute: Vec<Ceiling>,
    /// Bytes per second of the caches that the data of one case fit in; none where it was not
    /// measured, or for several cases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Ceiling>,
    /// Results per second of the activation of one case; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<Ceiling>,
}

impl Ceilings {
    /// The limit of arithmetic in an element type: its own, else that of any type, which is the one
    /// whose name begins with none.
    pub fn compute_of(&self, dtype: swiglu_core::DType) -> Option<&Ceiling> {
        let named = |c: &&Ceiling, name: &str| {
            c.name.split_whitespace().next().is_some_and(|word| word == name)
        };
        let any = |c: &&Ceiling| !swiglu_core::DType::ALL.iter().any(|d| named(c, &d.to_string()));
        let own = dtype.to_string();
        self.compute.iter().find(|c| named(c, &own)).or_else(|| self.compute.iter().find(any))
    }
}
