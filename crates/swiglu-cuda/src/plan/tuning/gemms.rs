//! Which of cuBLASLt's proposals for a product is the fastest, as it was measured on a kind of device, with a version of cuBLASLt.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use swiglu_core::{DType, Op, Orientation, Problem};

use super::record::{device_of_kind, lines, unseal};
use super::{MAX_FILE_BYTES, NotKept, Outcome, Refusal, SCHEMA, file_name, read_sealed, rewrite};
use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;
use crate::device::lt::{Gemm, GemmAlgorithm, Measured};
use crate::plan::weights_lie;

/// A proposal that is not faster than the first by more than what times differ by from sitting to sitting is not taken.
const WORTHWHILE: f64 = 0.98;

/// The products by cuBLASLt of a training step with packed weights of 16 bits, each with its step: those behind h and behind the
/// gradients of gate and up, of gradients of weights also those that are added to sums in f32, and of gate's and up's also
/// each by itself. The down projection is taken to be given as gate and up are.
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
    let of_weight = |[out, inputs]: [usize; 2]| {
        let [rows, cols] = problem.layout.orientation.shape(out, inputs);
        product(rows, m, cols, true, in_out)
    };
    let mut of_weights = vec![];
    if problem.layout.orientation == Orientation::OutIn {
        // Both at once, where they lie one behind the other.
        of_weights.push((GATE_UP, of_weight([2 * h, k])));
        of_weights.push((GATE, of_weight([h, k])));
    } else {
        of_weights.push((GATE_UP, of_weight([h, k])));
    }
    // Backwards weights lie the other way round.
    let dx = match weights_lie(problem) {
        Orientation::OutIn => in_out,
        Orientation::InOut => out_in,
    };
    let mut all = vec![(DX, product(m, 2 * padded, k, false, dx))];
    if problem.op == Op::Mlp {
        all.push((Y, product(m, h, k, false, out_in)));
        of_weights.push((DOWN, of_weight([k, h])));
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

    fn file_name(&self) -> String {
        file_name(&self.device, self.arch, "gemms.json")
    }

    fn device(&self) -> String {
        device_of_kind(&self.device, self.arch, self.sm_count)
    }
}

/// A product, and what came of every algorithm that cuBLASLt proposes for it, in its order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmEntry {
    /// The version of cuBLASLt: major and minor.
    pub cublaslt: (usize, usize),
    /// What was computed.
    pub gemm: Gemm,
    /// The first is what cuBLASLt itself prefers.
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
    /// What came of every algorithm of a version of cuBLASLt. Times are rounded to nanoseconds.
    pub fn new(
        cublaslt: (usize, usize),
        gemm: Gemm,
        trials: impl IntoIterator<Item = (GemmAlgorithm, Outcome)>,
    ) -> Self {
        let trial = |(algorithm, mut outcome): (_, Outcome)| {
            outcome.round();
            GemmTrial { algorithm, outcome }
        };
        Self { cublaslt, gemm, trials: trials.into_iter().map(trial).collect() }
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
    pub(super) entries: Vec<GemmEntry>,
}

impl File {
    fn check(&self, here: &GemmSubject) -> Result<(), Refusal> {
        let (recorded, here) = (self.subject.device(), here.device());
        if recorded == here { Ok(()) } else { Err(Refusal::Device { recorded, here }) }
    }

    #[cfg(test)]
    pub(super) fn file_name(&self) -> String {
        self.subject.file_name()
    }

    /// The versions of cuBLASLt it has something of.
    fn versions(&self) -> BTreeSet<(usize, usize)> {
        self.entries.iter().map(|entry| entry.cublaslt).collect()
    }

    fn measured(&self, version: (usize, usize)) -> Measured {
        let fastest = |entry: &GemmEntry| {
            let (number, share) = entry.fastest()?;
            Some((entry.gemm, (entry.trials[number].algorithm, share)))
        };
        let of_this = self.entries.iter().filter(|entry| entry.cublaslt == version);
        Measured::new(version, of_this.filter_map(fastest))
    }

    pub(super) fn to_text(&self) -> serde_json::Result<String> {
        lines(&Self { entries: Vec::new(), ..self.clone() }, &self.entries)
    }
}

/// The user's measurements in `dir`, then those of what is shipped with this program that are of such a device; and what is
/// said of them.
pub(super) fn read(
    dir: Option<&Path>,
    shipped: &[(&str, &str)],
    here: &GemmSubject,
) -> (Vec<Arc<Measured>>, Vec<String>) {
    let users = dir.map(|dir| {
        let path = dir.join(here.file_name());
        (false, path.display().to_string(), read_sealed(&path, MAX_FILE_BYTES))
    });
    let shipped = shipped
        .iter()
        .map(|(file, text)| (true, format!("shipped {file}"), unseal(text).map(Some)));
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    for (is_shipped, what, file) in users.into_iter().chain(shipped) {
        let checked = |file: File| file.check(here).map(|()| file);
        match file.and_then(|file| file.map(checked).transpose()) {
            Ok(None) => {}
            Ok(Some(file)) => {
                for version in file.versions() {
                    let (major, minor) = version;
                    let measured = file.measured(version);
                    let count = measured.len();
                    let products = if count == 1 { "product" } else { "products" };
                    notes.push(format!(
                        "{what}: {count} {products} measured for cuBLASLt {major}.{minor}, and no other"
                    ));
                    all.push(Arc::new(measured));
                }
            }
            // One that is shipped for others is no news.
            Err(Refusal::Device { .. }) if is_shipped => {}
            Err(refusal) => notes.push(format!("{what}: not used: {refusal}")),
        }
    }
    (all, notes)
}

/// Adds entries to what `dir` has of this kind of device, in the place of those of the same products and versions of cuBLASLt. A
/// file that is refused is replaced.
///
/// # Errors
/// [`NotKept`]. The file is then as it was.
pub(crate) fn keep(
    dir: &Path,
    subject: GemmSubject,
    entries: Vec<GemmEntry>,
) -> Result<(PathBuf, Option<Refusal>), NotKept> {
    let path = dir.join(subject.file_name());
    let empty = File { schema: SCHEMA, subject: subject.clone(), entries: Vec::new() };
    let adds = !entries.is_empty();
    let add = |file: &mut File| {
        file.subject = subject.clone();
        for entry in entries {
            let same = |e: &&mut GemmEntry| (e.cublaslt, e.gemm) == (entry.cublaslt, entry.gemm);
            match file.entries.iter_mut().find(same) {
                Some(known) => *known = entry,
                None => file.entries.push(entry),
            }
        }
        file.to_text()
    };
    rewrite(dir, path, empty, |file: &File| file.check(&subject), adds.then_some(add))
}
