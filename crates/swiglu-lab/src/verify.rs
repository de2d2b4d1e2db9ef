//! Whether a peer's rows are the case's result: the float64 oracle over the rows that were asked
//! for, with error bounds derived from the roundings that the profile promises.

mod reference;
#[cfg(test)]
mod tests;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use swiglu_core::bounds::{BlockInputs, Judgement, Reference};
use swiglu_core::random::sample;
use swiglu_core::{DType, Element, Matrix, Numerics, bf16, f16};

use crate::case::{Case, CaseOp};
use crate::definition::{ProfileDef, Role};
use crate::error::Result;
use crate::peer::protocol::MAX_VERIFIED;
use crate::record::ErrorMetrics;
use crate::stats;
use crate::text::Named;

/// Multiply-adds that the oracle may take for one case: a few seconds.
const BUDGET: f64 = 6e8;
/// More rows than this show nothing new.
const MAX_ROWS: usize = 64;
/// What truncation to TF32 may change a factor by.
const TF32_ROUNDOFF: f64 = 1.0 / 1024.0;

/// The reference of one case, worked out once per promise of roundings.
#[derive(Debug)]
pub(crate) struct Oracle {
    case: Case,
    seed: u64,
    /// Those that peers are asked for.
    pub(crate) rows: Vec<usize>,
    known: Vec<(Promise, Vec<Reference>)>,
}

/// What a profile is judged by.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Promise {
    numerics: Numerics,
    /// What factors of products may be rounded by.
    roundoff: f64,
    /// How inputs of products with quantised weights are taken.
    inputs: BlockInputs,
}

impl Oracle {
    pub(crate) fn new(case: &Case, seed: u64) -> Self {
        Self { case: case.clone(), seed, rows: rows_of(case, seed), known: Vec::new() }
    }

    /// Judges the rows of a profile.
    ///
    /// # Errors
    /// The text says how the data differs from what was asked for, or why there is no reference.
    pub(crate) fn judge(
        &mut self,
        profile: &ProfileDef,
        (shape, dtype, rows): ([usize; 2], DType, &[usize]),
        data: &str,
    ) -> Result<Judgement, String> {
        let expected = self.case.output_shape();
        if shape != expected || dtype != self.case.dtype || rows != self.rows {
            return Err(format!(
                "the output is {dtype} {shape:?}, rows {rows:?}; expected {} {expected:?}, rows {:?}",
                self.case.dtype, self.rows
            ));
        }
        let bytes = STANDARD.decode(data).map_err(|e| format!("the rows are not base64: {e}"))?;
        let needed = rows.len() * expected[1] * dtype.size();
        if bytes.len() != needed {
            return Err(format!("the rows have {} bytes, expected {needed}", bytes.len()));
        }
        let references = self.references(profile).map_err(|e| e.to_string())?;
        match dtype {
            DType::F32 => judged(references, &bytes, f32::from_le_bytes),
            DType::F16 => judged(references, &bytes, f16::from_le_bytes),
            _ => judged(references, &bytes, bf16::from_le_bytes),
        }
    }

    fn references(&mut self, profile: &ProfileDef) -> Result<&[Reference]> {
        let promise = promise(profile, &self.case);
        let known = self.known.iter().position(|(known, _)| *known == promise);
        if known.is_none() {
            self.known.push((promise, self.reference(&promise)?));
        }
        Ok(&self.known[known.unwrap_or(self.known.len() - 1)].1)
    }
}

/// Judges elements as they travel, little endian, each part of the rows by its reference: what is the worst of all parts.
fn judged<T: Element, const N: usize>(
    references: &[Reference],
    bytes: &[u8],
    element: fn([u8; N]) -> T,
) -> Result<Judgement, String> {
    let mut values = bytes.as_chunks().0.iter().map(|bytes| element(*bytes));
    let (mut worst, mut first): (Option<Judgement>, usize) = (None, 0);
    for reference in references {
        let [rows, columns] = reference.value.shape();
        let out = Matrix::from_values(values.by_ref().take(rows * columns), rows, columns);
        let mut part =
            out.and_then(|out| reference.judge(out.view())).map_err(|e| e.to_string())?;
        part.worst_at.0 += first;
        first += rows;
        worst = Some(worst.map_or(part.clone(), |before| worse(before, part)));
    }
    worst.ok_or_else(|| "nothing was to be judged".into())
}

/// Of two parts of a result, what is nearer to its limit or beyond.
fn worse(a: Judgement, b: Judgement) -> Judgement {
    let share = |j: &Judgement| j.relative_frobenius / j.frobenius_limit;
    // What is no number is the worst.
    let above = |a: f64, b: f64| a.total_cmp(&b).is_gt();
    let (mut worst, other) = if above(b.worst_ratio, a.worst_ratio) { (b, a) } else { (a, b) };
    if above(share(&other), share(&worst)) {
        (worst.relative_frobenius, worst.frobenius_limit) =
            (other.relative_frobenius, other.frobenius_limit);
    }
    worst
}

/// The roundings a profile is judged by. Its options say where it rounds factors of products: `tf32`,
/// and `activations = "q8"` for 8 bits in blocks beside quantised weights.
fn promise(profile: &ProfileDef, case: &Case) -> Promise {
    let eager = Numerics::precise(swiglu_core::Rounding::Eager);
    let weakest = eager.with_exp(swiglu_core::ExpMode::Fast);
    let default = if profile.role == Role::Ours { case.numerics } else { weakest };
    let tf32 = case.dtype == DType::F32
        && profile.options.get("tf32").and_then(serde_json::Value::as_bool) == Some(true);
    let inputs = match profile.options.get("activations").and_then(serde_json::Value::as_str) {
        Some("q8") => BlockInputs::EightBits,
        _ => BlockInputs::Exact,
    };
    let roundoff = if tf32 { TF32_ROUNDOFF } else { 0.0 };
    let numerics = profile.numerics.map_or(default, |Named(numerics)| numerics);
    Promise { numerics, roundoff, inputs }
}

/// Of a training step, tokens and intermediate features: the gradients of a feature take all tokens, and the reverse.
pub(crate) fn tokens_and_features(case: &Case, seed: u64) -> [Vec<usize>; 2] {
    // The chain of each, in float64 with its magnitudes and in the baseline's order.
    const PRODUCTS: f64 = 20.0;
    let per_reply = (MAX_VERIFIED / case.hidden.max(1) / 5).max(1);
    [(case.m, case.intermediate), (case.intermediate, case.m)].map(|(n, others)| {
        let macs = PRODUCTS * (case.hidden * others).max(1) as f64;
        // Two show what one by itself might not, whatever they take.
        let affordable = ((BUDGET / macs) as usize).max(2);
        sample(seed, n, affordable.min(per_reply).min(MAX_ROWS))
    })
}

/// The first row, the last and some between: as many as the oracle and one reply can take.
fn rows_of(case: &Case, seed: u64) -> Vec<usize> {
    let [m, columns] = case.output_shape();
    let macs = match case.op {
        CaseOp::Activation | CaseOp::ActivationBackward | CaseOp::Copy => 1.0,
        CaseOp::GatedLinear | CaseOp::Mlp => case.flops() / 2.0 / m.max(1) as f64,
        CaseOp::MlpTrain => {
            let ([tokens, features], h) = (tokens_and_features(case, seed), case.intermediate);
            let parts = [(&tokens, 0), (&tokens, case.m)];
            let weights = (0..3).map(|part| (&features, 2 * case.m + part * h));
            let parts = parts.into_iter().chain(weights);
            return parts.flat_map(|(rows, first)| rows.iter().map(move |r| first + r)).collect();
        }
    };
    let affordable = (BUDGET / macs.max(1.0)) as usize;
    let count = affordable.min(MAX_VERIFIED / columns.max(1)).clamp(1, MAX_ROWS);
    sample(seed, m, count)
}

/// As a record has it.
pub(crate) fn metrics(judgement: &Judgement) -> ErrorMetrics {
    let finite = |x: f64| x.is_finite().then(|| stats::rounded(x, 3));
    ErrorMetrics {
        relative_frobenius: finite(judgement.relative_frobenius),
        frobenius_limit: finite(judgement.frobenius_limit),
        worst_ratio: finite(judgement.worst_ratio),
    }
}

/// Why a judgement failed, in words.
pub fn complaint(judgement: &Judgement, rows: &[usize]) -> String {
    let (r, c) = judgement.worst_at;
    let row = rows.get(r).copied().unwrap_or(r);
    if judgement.worst_ratio > 1.0 {
        return format!(
            "the result is wrong: element [{row}, {c}] is off by {:.3e} times its bound",
            judgement.worst_ratio
        );
    }
    format!(
        "the result is not accurate enough: relative error {:.2e}, limit {:.2e}",
        judgement.relative_frobenius, judgement.frobenius_limit
    )
}
