//! What the peers have in common: a case with an order to compute it, and the job that is made of it.

use std::collections::BTreeMap;

use anyhow::bail;
use swiglu::{DType, Device, Element, Numerics, Problem, bf16, f16};
use swiglu_lab::{Case, Heat};

use super::options::Options;
use crate::inputs::{Dense, Quantized};
use crate::layer::Packed;
use crate::timing::Timed;

/// Copies of cold data on the CPU together have at least this many bytes: far more than any cache.
const COLD_BYTES: f64 = 400e6;
/// Tiny data are in a cache whatever is done; this many copies are enough of them.
const MAX_COPIES: f64 = 1000.0;

/// A prepared case: data in place and kernels compiled.
pub(super) trait Job: Timed {
    /// Those rows of a result of the calls that are timed, little-endian.
    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        bail!("it computes nothing that could be compared, given rows {rows:?}")
    }
}

/// A job, and what a record says about it.
pub(super) struct Prepared {
    pub(super) job: Box<dyn Job>,
    pub(super) plan: Option<String>,
    /// The hash of each kernel that was compiled for it, or of the program, by the name of its part.
    pub(super) variants: BTreeMap<String, String>,
    pub(super) notes: Vec<String>,
}

/// What else a record says about how a case is computed.
pub(super) fn notes(numerics: Numerics, copies: usize) -> Vec<String> {
    vec![format!("rounds as {numerics}"), format!("{copies} copies in rotation")]
}

/// What a job is made from.
pub(crate) struct Order<'a> {
    pub(crate) case: &'a Case,
    pub(crate) options: Options,
    pub(crate) seed: u64,
    /// Copies of the data; by default as many as exceed the caches.
    pub(crate) copies: Option<usize>,
}

impl Order<'_> {
    /// The problem whose weights are held: of quantised weights that are decoded, that of elements.
    pub(super) fn held(&self) -> Option<Problem> {
        let quantized = |problem: &Problem| problem.quantized.filter(|_| !self.options.decode);
        self.case.problem().map(|problem| problem.with_quantized(quantized(&problem)))
    }

    /// As many copies of the case's layer, by the path that was asked for; quantised weights as they are, or
    /// decoded once.
    pub(super) fn layers<T: Element>(
        &self,
        device: &Device,
        count: usize,
    ) -> swiglu::Result<Vec<Packed>> {
        let (case, options) = (self.case, &self.options);
        let dense = match case.weights.map(|kind| Quantized::derive(case, kind, self.seed)) {
            Some(weights) if !options.decode => {
                let weights = weights?;
                let params = weights.params::<T>();
                return (0..count).map(|_| params.pack(device, None)).collect();
            }
            Some(weights) => weights?.decode::<T>(case)?,
            None => Dense::derive(case, self.seed)?,
        };
        let params = dense.params();
        (0..count).map(|_| params.pack(device, options.path)).collect()
    }

    /// Copies of the data on the CPU, of which a call touches this many bytes.
    pub(super) fn copies_of(&self, bytes: f64) -> usize {
        self.copies.unwrap_or(match self.case.heat {
            Heat::Hot => 1,
            Heat::Cold => (COLD_BYTES / bytes.max(1.0)).ceil().clamp(1.0, MAX_COPIES) as usize,
        })
    }
}

/// The elements of one row, little-endian.
pub(super) fn push_row<T: Element>(bytes: &mut Vec<u8>, row: &[T]) {
    for value in row {
        // Exact: these are values of T.
        let value = value.to_f32();
        match T::DTYPE {
            DType::F32 => bytes.extend(value.to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            _ => bytes.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }
}
