//! What a machine can do at most, as it was measured, and what binds a time beside that.

use std::fmt;

use serde::{Deserialize, Serialize};
use swiglu_core::{DType, Op, Problem};

use crate::case::Heat;

/// What a kernel's time consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Bytes on their way from and to memory.
    Memory,
    /// Bytes on their way from and to the caches.
    Cache,
    /// Arithmetic.
    Compute,
    /// Neither: starting, waiting, too few threads to keep either busy.
    Latency,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Class::Memory => "memory-bound",
            Class::Cache => "cache-bound",
            Class::Compute => "compute-bound",
            Class::Latency => "latency-bound",
        })
    }
}

/// A time, and the work done in it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Microseconds.
    pub us: f64,
    /// Bytes moved from and to memory, or the caches where they are held there.
    pub bytes: f64,
    /// Floating-point operations; results of an activation.
    pub flops: f64,
}

/// Below this fraction of both ceilings neither of them explains the time. It is the fraction under
/// which Nsight Compute, too, speaks of latency.
pub(super) const EXPLAINED: f64 = 0.6;

/// A time beside the least that the ceilings allow.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Classified {
    /// What the time consists of; none where no ceiling is known.
    pub class: Option<Class>,
    /// Bytes ÷ time, in 10⁹ per second.
    pub gbps: f64,
    /// Operations ÷ time, in 10⁹ per second.
    pub gflops: f64,
    /// Bytes ÷ the ceiling of memory, or of the caches, in microseconds.
    pub memory_us: Option<f64>,
    /// Operations ÷ the compute ceiling, in microseconds.
    pub compute_us: Option<f64>,
}

impl Classified {
    /// The larger of the two floors.
    pub fn floor_us(&self) -> Option<f64> {
        [self.memory_us, self.compute_us].into_iter().flatten().reduce(f64::max)
    }
}

/// Compares a time with the ceilings, in bytes and operations per second; `None` is unknown.
pub fn classify(work: Work, memory: Option<f64>, compute: Option<f64>) -> Classified {
    let floor = |amount: f64, rate: Option<f64>| {
        rate.filter(|r| r.is_finite() && *r > 0.0).map(|r| amount / r * 1e6)
    };
    let (memory_us, compute_us) = (floor(work.bytes, memory), floor(work.flops, compute));
    let (m, c) = (memory_us.unwrap_or(0.0), compute_us.unwrap_or(0.0));
    let class = match memory_us.or(compute_us) {
        None => None,
        Some(_) if work.us.is_nan() || work.us <= 0.0 => None,
        Some(_) if m.max(c) < EXPLAINED * work.us => Some(Class::Latency),
        Some(_) => Some(if m > c { Class::Memory } else { Class::Compute }),
    };
    let rate = |amount: f64| if work.us > 0.0 { amount / (work.us * 1e3) } else { 0.0 };
    Classified { class, gbps: rate(work.bytes), gflops: rate(work.flops), memory_us, compute_us }
}

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
    /// What bytes are held against.
    pub fn traffic(&self, heat: Heat) -> Option<&Ceiling> {
        match heat {
            Heat::Cold => self.memory.as_ref(),
            Heat::Hot => self.cache.as_ref(),
        }
    }

    /// What operations are held against.
    pub fn arithmetic(&self, problem: &Problem) -> Option<&Ceiling> {
        match problem.op {
            Op::Activation => self.activation.as_ref(),
            _ => self.compute_of(problem.dtype),
        }
    }

    /// The limit of arithmetic in an element type: its own, else that of any type, which is the one
    /// whose name begins with none.
    pub fn compute_of(&self, dtype: DType) -> Option<&Ceiling> {
        let named = |c: &&Ceiling, name: &str| {
            c.name.split_whitespace().next().is_some_and(|word| word == name)
        };
        let any = |c: &&Ceiling| !DType::ALL.iter().any(|d| named(c, &d.to_string()));
        let own = dtype.to_string();
        self.compute.iter().find(|c| named(c, &own)).or_else(|| self.compute.iter().find(any))
    }
}
