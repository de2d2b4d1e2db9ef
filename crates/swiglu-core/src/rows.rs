//! What a feed-forward block computes from whole rows between its products: a gate of which the largest
//! values stay, and a norm of h.
//!
//! Definitions: Gemma 3n's Gaussian top-k (population deviation, statistics in `f32` at least), RMS norm
//! (Zhang and Sennrich, arXiv:1910.07467) and layer norm (Ba et al., arXiv:1607.06450). A row that goes
//! through a step lies in memory as values of T before and behind it, in every numerics mode.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result, expect_len};
use crate::numerics::Rounding;

/// The gate keeps what is above mean + z·σ of its row, less that cutoff: max(gate − (mean + z·σ), 0).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "f32", try_from = "f32")]
pub struct Sparsity {
    deviations: f32,
}

impl Sparsity {
    /// The sparsity that sets this part of normally distributed values to 0: z = Φ⁻¹(fraction).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] unless 0 < fraction < 1.
    pub fn of(fraction: f32) -> Result<Self> {
        if !(fraction > 0.0 && fraction < 1.0) {
            return Err(Error::OutOfRange {
                what: "sparsity of the gate",
                given: fraction.to_string(),
                expected: "a number between 0 and 1".into(),
            });
        }
        Self::above(quantile(f64::from(fraction)) as f32)
    }

    /// The sparsity with this z.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if it is not finite.
    pub fn above(deviations: f32) -> Result<Self> {
        if !deviations.is_finite() {
            return Err(Error::OutOfRange {
                what: "standard deviations above the mean",
                given: deviations.to_string(),
                expected: "a finite number".into(),
            });
        }
        Ok(Self { deviations })
    }

    /// z.
    pub fn deviations(self) -> f32 {
        self.deviations
    }

    /// A row of the gate in float64.
    pub fn apply_f64(self, gate: &mut [f64]) {
        let (mean, deviation) = moments(gate, |v| v);
        let cutoff = mean + f64::from(self.deviations) * deviation;
        gate.iter_mut().for_each(|v| *v = above_zero(*v - cutoff));
    }

    /// A row of the gate in `f32` and, in [`Rounding::Eager`], with each of PyTorch's roundings.
    pub fn apply<T: Element>(self, rounding: Rounding, gate: &mut [T]) {
        let step = step::<T>(rounding);
        let (mean, deviation) = moments(gate, |v| v.to_f64());
        let above = step(step(deviation as f32) * step(self.deviations));
        let cutoff = step(step(mean as f32) + above);
        gate.iter_mut().for_each(|v| *v = T::from_f32(above_zero(v.to_f32() - cutoff)));
    }
}

impl From<Sparsity> for f32 {
    fn from(sparsity: Sparsity) -> f32 {
        sparsity.deviations
    }
}

impl TryFrom<f32> for Sparsity {
    type Error = Error;
    fn try_from(deviations: f32) -> Result<Self> {
        Self::above(deviations)
    }
}

/// What a [`Norm`] divides a row by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum NormKind {
    /// √(mean of h² + ε).
    Rms,
    /// √(variance + ε), after the mean is taken off.
    Layer,
}

/// A norm of each row of h, before the down projection.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Norm {
    kind: NormKind,
    epsilon: f32,
}

/// A [`Norm`] as a file may have it.
#[derive(Deserialize)]
struct Unchecked {
    kind: NormKind,
    epsilon: f32,
}

impl TryFrom<Unchecked> for Norm {
    type Error = Error;
    fn try_from(Unchecked { kind, epsilon }: Unchecked) -> Result<Self> {
        Self::new(kind, epsilon)
    }
}

impl Norm {
    /// A norm with its ε.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] unless ε is positive and finite: a row of zeros has no norm else.
    pub fn new(kind: NormKind, epsilon: f32) -> Result<Self> {
        if !(epsilon > 0.0 && epsilon.is_finite()) {
            return Err(Error::OutOfRange {
                what: "epsilon of the norm of h",
                given: epsilon.to_string(),
                expected: "a positive finite number".into(),
            });
        }
        Ok(Self { kind, epsilon })
    }

    /// What it divides by.
    pub fn kind(self) -> NormKind {
        self.kind
    }

    /// ε.
    pub fn epsilon(self) -> f32 {
        self.epsilon
    }

    /// What is taken off a row, and the square root that it is divided by.
    pub(crate) fn statistics<V: Copy>(self, row: &[V], value: impl Fn(V) -> f64) -> (f64, f64) {
        let epsilon = f64::from(self.epsilon);
        match self.kind {
            NormKind::Rms => {
                let squares = sum(row, |v| value(v).powi(2)) / row.len() as f64;
                (0.0, (squares + epsilon).sqrt())
            }
            NormKind::Layer => {
                let (mean, deviation) = moments(row, value);
                (mean, (deviation.powi(2) + epsilon).sqrt())
            }
        }
    }
}

/// Which row steps a block has. Most have none.
///
/// ```
/// use swiglu_core::{Norm, NormKind, RowSteps, Sparsity};
///
/// let bitnet = RowSteps::NONE.with_norm(Norm::new(NormKind::Rms, 1e-5)?);
/// let gemma = RowSteps::NONE.with_sparsity(Sparsity::of(0.95)?);
/// assert_eq!(bitnet.to_string(), "rms-norm(eps=0.00001)");
/// assert_eq!(gemma.to_string(), "sparse-gate(z=1.6448535)");
/// # Ok::<(), swiglu_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RowSteps {
    /// Between the gate's product and its function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sparsity: Option<Sparsity>,
    /// Between h and the down projection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm: Option<Norm>,
}

impl RowSteps {
    /// No row step.
    pub const NONE: RowSteps = RowSteps { sparsity: None, norm: None };

    /// The same with a sparse gate.
    #[must_use]
    pub fn with_sparsity(self, sparsity: Sparsity) -> Self {
        Self { sparsity: Some(sparsity), ..self }
    }

    /// The same with a norm of h.
    #[must_use]
    pub fn with_norm(self, norm: Norm) -> Self {
        Self { norm: Some(norm), ..self }
    }

    /// Those before h, which the gated linear layer of the block has.
    #[must_use]
    pub fn before_h(self) -> Self {
        Self { norm: None, ..self }
    }

    /// Those of h, which the block alone has.
    #[must_use]
    pub fn after_h(self) -> Self {
        Self { sparsity: None, ..self }
    }

    /// Whether there is none.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    /// Refuses row steps where there are none: `place` says where, `instead` what to do.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which names them.
    pub fn expect_none(&self, place: &str, instead: &str) -> Result<()> {
        if self.is_none() {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: format!("{self} {place}"),
            why: format!("whole rows are gone through within blocks on the CPU alone; {instead}"),
        })
    }
}

impl fmt::Display for RowSteps {
    /// `sparse-gate(z=1.6448535)+rms-norm(eps=0.00001)`, or `none`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sparsity = self.sparsity.map(|s| format!("sparse-gate(z={})", s.deviations));
        let norm = self.norm.map(|norm| {
            let name = match norm.kind {
                NormKind::Rms => "rms-norm",
                NormKind::Layer => "layer-norm",
            };
            format!("{name}(eps={})", norm.epsilon)
        });
        match [sparsity, norm].into_iter().flatten().collect::<Vec<_>>() {
            steps if steps.is_empty() => f.pad("none"),
            steps => f.pad(&steps.join("+")),
        }
    }
}

/// The row steps of a block with the values that its norm multiplies by and adds, borrowed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct RowParams<'a> {
    /// Which steps.
    pub steps: RowSteps,
    /// What the norm's result is multiplied by, H values; none is 1.
    pub norm_weight: Option<&'a [f32]>,
    /// What is then added, H values.
    pub norm_bias: Option<&'a [f32]>,
}

impl<'a> RowParams<'a> {
    /// No row step.
    pub const NONE: RowParams<'static> =
        RowParams { steps: RowSteps::NONE, norm_weight: None, norm_bias: None };

    /// Steps without weights.
    pub fn new(steps: RowSteps) -> Self {
        Self { steps, ..RowParams::NONE }
    }

    /// The same with a weight and a bias of the norm.
    #[must_use]
    pub fn with_norm_values(self, weight: Option<&'a [f32]>, bias: Option<&'a [f32]>) -> Self {
        Self { norm_weight: weight, norm_bias: bias, ..self }
    }

    /// Checks the norm's values against the intermediate size.
    ///
    /// # Errors
    /// [`Error::Shape`]; [`Error::Unsupported`] for values without a norm.
    pub fn validate(&self, intermediate: usize) -> Result<()> {
        if self.steps.norm.is_none() && (self.norm_weight.is_some() || self.norm_bias.is_some()) {
            return Err(Error::Unsupported {
                what: "a norm's weight or bias without a norm".into(),
                why: "give RowSteps the norm too, or leave its values out".into(),
            });
        }
        expect_len("norm weight", self.norm_weight, intermediate)?;
        expect_len("norm bias", self.norm_bias, intermediate)
    }

    /// Weight and bias of feature `j`.
    pub(crate) fn norm_values(&self, j: usize) -> (f32, f32) {
        (self.norm_weight.map_or(1.0, |w| w[j]), self.norm_bias.map_or(0.0, |b| b[j]))
    }

    /// A row of h in float64; unchanged without a norm.
    pub fn normalise_f64(&self, h: &mut [f64]) {
        let Some(norm) = self.steps.norm else { return };
        let (mean, root) = norm.statistics(h, |v| v);
        for (j, v) in h.iter_mut().enumerate() {
            let (weight, bias) = self.norm_values(j);
            *v = (*v - mean) / root * f64::from(weight) + f64::from(bias);
        }
    }

    /// A row of h in `f32` and, in [`Rounding::Eager`], with each of PyTorch's roundings; unchanged
    /// without a norm.
    pub fn normalise<T: Element>(&self, rounding: Rounding, h: &mut [T]) {
        let Some(norm) = self.steps.norm else { return };
        // PyTorch has a layer norm as one operation; an RMS norm is several, of which the last
        // multiplies by the weight.
        let step = match norm.kind {
            NormKind::Rms => step::<T>(rounding),
            NormKind::Layer => |v| v,
        };
        let (mean, root) = norm.statistics(h, |v| v.to_f64());
        let (mean, inverse) = (mean as f32, (1.0 / root) as f32);
        for (j, v) in h.iter_mut().enumerate() {
            let (weight, bias) = self.norm_values(j);
            *v = T::from_f32(step((v.to_f32() - mean) * inverse) * weight + bias);
        }
    }
}

/// The same, owned.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OwnedRowParams {
    steps: RowSteps,
    norm_weight: Option<Vec<f32>>,
    norm_bias: Option<Vec<f32>>,
}

impl OwnedRowParams {
    /// Steps with a weight and a bias of the norm.
    pub fn new(
        steps: RowSteps,
        norm_weight: Option<Vec<f32>>,
        norm_bias: Option<Vec<f32>>,
    ) -> Self {
        Self { steps, norm_weight, norm_bias }
    }

    /// As parameters.
    pub fn view(&self) -> RowParams<'_> {
        RowParams {
            steps: self.steps,
            norm_weight: self.norm_weight.as_deref(),
            norm_bias: self.norm_bias.as_deref(),
        }
    }
}

impl From<RowParams<'_>> for OwnedRowParams {
    fn from(params: RowParams<'_>) -> Self {
        let owned = |values: Option<&[f32]>| values.map(<[f32]>::to_vec);
        Self::new(params.steps, owned(params.norm_weight), owned(params.norm_bias))
    }
}

/// What PyTorch does with the result of each operation: nothing, unless it rounds all of them.
fn step<T: Element>(rounding: Rounding) -> fn(f32) -> f32 {
    match rounding {
        Rounding::Eager if T::DTYPE != DType::F32 => |v| T::from_f32(v).to_f32(),
        _ => |v| v,
    }
}

/// max(v, 0); NaN stays.
fn above_zero<V: PartialOrd + Default>(v: V) -> V {
    if v < V::default() { V::default() } else { v }
}

/// The sum of a row, as eight partial sums in one order. In float64: squares of `f32` are exact and do not
/// overflow.
fn sum<V: Copy>(row: &[V], value: impl Fn(V) -> f64) -> f64 {
    let (eights, rest) = row.as_chunks::<8>();
    let mut sums = [0.0f64; 8];
    for eight in eights {
        sums.iter_mut().zip(eight).for_each(|(sum, &v)| *sum += value(v));
    }
    sums.iter_mut().zip(rest).for_each(|(sum, &v)| *sum += value(v));
    sums.iter().sum()
}

/// Mean and population deviation of a row.
pub(crate) fn moments<V: Copy>(row: &[V], value: impl Fn(V) -> f64) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = sum(row, &value) / n;
    (mean, (sum(row, |v| (value(v) - mean).powi(2)) / n).sqrt())
}

/// Φ⁻¹(p), by bisection of Φ(z) = ½erfc(−z/√2): once a layer.
fn quantile(p: f64) -> f64 {
    let below = |z: f64| 0.5 * libm::erfc(-z * std::f64::consts::FRAC_1_SQRT_2);
    let (mut low, mut high) = (-40.0, 40.0);
    // 80 · 2⁻⁶⁴ is far below the roundoff of z as `f32`.
    for _ in 0..64 {
        let middle = 0.5 * (low + high);
        if below(middle) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
