//! Which of cuBLASLt's proposals for a product is the fastest, as it was measured on a kind of device, with a version of cuBLASLt.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use swiglu_core::{DType, Op, Orientation, Problem};

use super::record::{lines, unseal};
use super::{MAX_FILE_BYTES, NotKept, Outcome, Refusal, SCHEMA, file_name, read_sealed, rewrite};
use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;
use crate::device::lt::{Gemm, GemmAlgorithm, Measured};

/// A proposal that is not faster than the first by more than what times differ by from sitting to sitting is not taken.
const WORTHWHILE: f64 = 0.98;

/// The products by cuBLASLt of a training step with dense matrices of 16 bits, each with its step: those behind h and behind the
/// gradients of gate and up, of gradients of weights also those that are added to sums in f32, and of gate's and up's also
/// each by itself.
pub fn gemms_of_step(problem: &Problem) -> Vec<(&'static str, Gemm)> {
    let (m, k, h) = (problem.m, problem.hidden, problem.intermediate);
    let padded = h.next_multiple_of(16 / problem.dtype.size());
    let product = |m, k, n, transposed, weights| Gemm {
        m,
        k,
        n,
        transposed,
        weights,
        accumulate: false,
        dtype: problem.dtype,
        out: problem.dtype,
    };
    let (out_in, in_out) = (Orientation::OutIn, Orientation::InOut);
    let mut of_weights = match problem.layout.orientation {
        Orientation::OutIn => vec![
            (GATE_UP, product(2 * h, m, k, true, in_out)),
            (GATE, product(h, m, k, true, in_out)),
        ],
        Orientation::InOut => vec![(GATE_UP, product(k, m, h, true, in_out))],
    };
    let mut all = vec![(DX, product(m, 2 * padded, k, false, in_out))];
    if problem.op == Op::Mlp {
        all.push((Y, product(m, h, k, false, out_in)));
        of_weights.push((DOWN, product(k, m, h, true, in_out)));
    }
    for (step, gemm) in of_weights {
        let added = Gemm { accumulate: true, out: DType::F32, ..gemm };
        all.extend([(step, gemm), (step, added)]);
    }
    all
}

/// The steps, as a plan of a backward pass names them.
pub(crate) const DX: &str = "dx";
pub(crate) const GATE_UP: &str = "dw_gate, dw_up";
const GATE: &str = "dw_gate";
pub(crate) const DOWN: &str = "dw_down";
const Y: &str = "y";

/// What such measurements depend on besides the product and the version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GemmSubject {
    device: String,
    arch: Arch,
    sm_count: u32,
    /// The CUDA version of the driver then.
    driver: (u32, u32),
}

impl GemmSubject {
    pub(crate) fn here(facts: &DeviceFacts, arch: Arch) -> Self {
        Self::new(&facts.name, arch, facts.sm_count, facts.driver_version)
    }

    pub(super) fn new(device: &str, arch: Arch, sm_count: u32, driver: (u32, u32)) -> Self {
        Self { device: device.to_owned(), arch, sm_count, driver }
    }

    fn device(&self) -> String {
        let Self { device, arch, sm_count, .. } = self;
        format!("{device} ({arch}, {sm_count} SMs)")
    }
}

/// A product, and what came of every algorithm that cuBLASLt proposes for it, in its order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmEntry {
    /// What was computed.
    pub gemm: Gemm,
    /// The first is what is taken where nothing was measured.
    pub trials: Vec<GemmTrial>,
}

/// An algorithm for the product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GemmTrial {
    /// Which it is.
    pub algorithm: GemmAlgorithm,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl GemmEntry {
    /// What came of every algorithm. Times are rounded to nanoseconds.
    pub fn new(gemm: Gemm, trials: impl IntoIterator<Item = (GemmAlgorithm, Outcome)>) -> Self {
        let trial = |(algorithm, mut outcome): (_, Outcome)| {
            outcome.round();
            GemmTrial { algorithm, outcome }
        };
        Self { gemm, trials: trials.into_iter().map(trial).collect() }
    }

    /// The number of the algorithm that plans take from this, and the share that it takes of the time of the first: the
    /// fastest, unless that gains less than 2 %. None where the first was not timed.
    pub fn fastest(&self) -> Option<(usize, f64)> {
        let us = |trial: &GemmTrial| trial.outcome.median_us();
        let first = us(self.trials.first()?)?;
        let timed = self.trials.iter().enumerate().filter_map(|(i, t)| Some((i, us(t)? / first)));
        let fastest = timed.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        Some(if fastest.1 <= WORTHWHILE { fastest } else { (0, 1.0) })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    schema: u32,
    subject: GemmSubject,
    /// The version of cuBLASLt: major and minor.
    cublaslt: (usize, usize),
    pub(super) entries: Vec<GemmEntry>,
}

impl File {
    fn check(&self, here: &GemmSubject) -> Result<(), Refusal> {
        let (recorded, here) = (self.subject.device(), here.device());
        if recorded == here { Ok(()) } else { Err(Refusal::Device { recorded, here }) }
    }

    fn measured(&self) -> Measured {
        let fastest = |entry: &GemmEntry| {
            let (number, share) = entry.fastest()?;
            Some((entry.gemm, (entry.trials[number].algorithm, share)))
        };
        Measured::new(self.cublaslt, self.entries.iter().filter_map(fastest))
    }

    pub(super) fn to_text(&self) -> serde_json::Result<String> {
        lines(&Self { entries: Vec::new(), ..self.clone() }, &self.entries)
    }
}

fn path(dir: &Path, subject: &GemmSubject) -> PathBuf {
    dir.join(file_name(&subject.device, subject.arch, "gemms.json"))
}

/// The user's measurements in `dir`, then those of what is shipped with this program that are of such a device; and what is
/// said of them.
pub(super) fn read(
    dir: Option<&Path>,
    shipped: &[(&str, &str)],
    here: &GemmSubject,
) -> (Vec<Arc<Measured>>, Vec<String>) {
    let users = dir.map(|dir| {
        let path = path(dir, here);
        (path.display().to_string(), read_sealed(&path, MAX_FILE_BYTES))
    });
    let shipped =
        shipped.iter().map(|(file, text)| (format!("shipped {file}"), unseal(text).map(Some)));
    let is_users = users.is_some();
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    for (at, (what, file)) in users.into_iter().chain(shipped).enumerate() {
        let checked = |file: File| file.check(here).map(|()| file);
        match file.and_then(|file| file.map(checked).transpose()) {
            Ok(None) => {}
            Ok(Some(file)) => {
                let (major, minor) = file.cublaslt;
                let products = file.entries.len();
                notes.push(format!(
                    "{what}: {products} products measured, for cuBLASLt {major}.{minor}"
                ));
                all.push(Arc::new(file.measured()));
            }
            // One that is shipped for others is no news.
            Err(Refusal::Device { .. }) if at > 0 || !is_users => {}
            Err(refusal) => notes.push(format!("{what}: not used: {refusal}")),
        }
    }
    (all, notes)
}

/// Adds entries to what `dir` has of this kind of device, in the place of those of the same products. What is of another
/// version of cuBLASLt is replaced, and so is a file that is refused.
///
/// # Errors
/// [`NotKept`]. The file is then as it was.
pub(crate) fn keep(
    dir: &Path,
    subject: GemmSubject,
    cublaslt: (usize, usize),
    entries: Vec<GemmEntry>,
) -> Result<(PathBuf, Option<Refusal>), NotKept> {
    let path = path(dir, &subject);
    let empty = File { schema: SCHEMA, subject: subject.clone(), cublaslt, entries: Vec::new() };
    let check = |file: &File| {
        file.check(&subject)?;
        let version = |(major, minor)| format!("{major}.{minor}");
        let (recorded, here) = (version(file.cublaslt), version(cublaslt));
        if recorded == here { Ok(()) } else { Err(Refusal::Library { recorded, here }) }
    };
    rewrite(dir, path, empty, check, |file| {
        file.subject = subject.clone();
        for entry in entries {
            match file.entries.iter_mut().find(|known| known.gemm == entry.gemm) {
                Some(known) => *known = entry,
                None => file.entries.push(entry),
            }
        }
        file.to_text()
    })
}
