//! Numerics modes: where intermediate values are rounded, how the exponential is evaluated, and whether the
//! order of sums may follow the number of rows.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Where values are rounded to the element type T. Sums are accumulated in `f32` in every mode.
///
/// | mode | gate and up | activation | product |
/// |---|---|---|---|
/// | `fused` | stay `f32` | stays `f32` | → T |
/// | `pre_round` | → T | stays `f32` | → T |
/// | `eager` | → T | each PyTorch operation → T | → T |
///
/// For T = `f32` the three coincide. In the activation operation gate and up are already T, so
/// `fused` and `pre_round` coincide there. The MLP rounds h to T between its two linear maps in
/// every mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// Accumulators → activation → product → one rounding: the most accurate.
    #[default]
    Fused,
    /// The linear maps round, then activation and product in `f32`: `torch.compile`'s order.
    PreRound,
    /// PyTorch eager's order: every operation rounds its result.
    Eager,
}

impl Rounding {
    /// Every mode.
    pub const ALL: [Rounding; 3] = [Rounding::Fused, Rounding::PreRound, Rounding::Eager];

    /// `fused`, `pre_round` or `eager`.
    pub const fn name(self) -> &'static str {
        match self {
            Rounding::Fused => "fused",
            Rounding::PreRound => "pre_round",
            Rounding::Eager => "eager",
        }
    }
}

impl fmt::Display for Rounding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Rounding {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "fused" => Ok(Rounding::Fused),
            "pre_round" | "pre-round" => Ok(Rounding::PreRound),
            "eager" => Ok(Rounding::Eager),
            _ => Err(Error::UnknownName {
                what: "rounding",
                given: s.to_owned(),
                choices: "fused, pre_round, eager".into(),
            }),
        }
    }
}

/// How the logistic function is evaluated. Both are sequences of IEEE operations defined in
/// [`crate::gate`], so every CPU façade gives the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpMode {
    /// x / (1 + exp(−x)) with exp within 1 ulp and a correctly rounded division: PyTorch's formula.
    #[default]
    Precise,
    /// Relative error below 2⁻¹⁷ for arguments up to ±70 (absolute error below 2⁻¹⁰⁰ beyond), which
    /// is 1/64 of a rounding to `f16` and 1/512 of one to `bf16`.
    Fast,
}

impl ExpMode {
    /// Both modes.
    pub const ALL: [ExpMode; 2] = [ExpMode::Precise, ExpMode::Fast];

    /// `precise` or `fast`.
    pub const fn name(self) -> &'static str {
        match self {
            ExpMode::Precise => "precise",
            ExpMode::Fast => "fast",
        }
    }
}

impl fmt::Display for ExpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ExpMode {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "precise" => Ok(ExpMode::Precise),
            "fast" => Ok(ExpMode::Fast),
            _ => Err(Error::UnknownName {
                what: "exp mode",
                given: s.to_owned(),
                choices: "precise, fast".into(),
            }),
        }
    }
}

/// A rounding order, an evaluation of the exponential, and what the order of sums may depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Numerics {
    /// Where values are rounded.
    pub rounding: Rounding,
    /// How the exponential is evaluated.
    pub exp: ExpMode,
    /// Whether a row of the output has the same bits whatever M is, and wherever in the batch its row of
    /// the input stands: products are then summed in one order for every M. Otherwise kernels, and with
    /// them the order, follow M. The bits still depend on the instruction set and on whether weights are
    /// quantised or decoded. The activation operation is so in any case.
    #[serde(default, skip_serializing_if = "is_off")]
    pub batch_invariant: bool,
}

impl Numerics {
    /// As steps round that leave gate and up in memory as values of T: they cannot keep accumulators, so
    /// [`Rounding::Fused`] becomes [`Rounding::PreRound`].
    #[must_use]
    pub fn unfused(self) -> Self {
        match self.rounding {
            Rounding::Fused => Self { rounding: Rounding::PreRound, ..self },
            Rounding::PreRound | Rounding::Eager => self,
        }
    }
}

/// A mode that is off is left out of records, so that those from before it was there are the same.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
const fn is_off(mode: &bool) -> bool {
    !*mode
}

/// What [`Numerics::batch_invariant`] is called in names of numerics.
const BATCH_INVARIANT: &str = "batch-invariant";

impl Numerics {
    /// Every combination that changes what is rounded; none is batch-invariant.
    pub fn all() -> impl Iterator<Item = Numerics> {
        Rounding::ALL.into_iter().flat_map(|rounding| {
            ExpMode::ALL.into_iter().map(move |exp| Numerics {
                rounding,
                exp,
                batch_invariant: false,
            })
        })
    }

    /// The default of an element type: `fused`, with the fast exponential where its error vanishes
    /// in the rounding of the result (`f16`, `bf16`).
    pub const fn default_for(dtype: DType) -> Numerics {
        let exp = match dtype {
            DType::F32 => ExpMode::Precise,
            DType::F16 | DType::Bf16 => ExpMode::Fast,
        };
        Numerics { rounding: Rounding::Fused, exp, batch_invariant: false }
    }

    /// The given rounding with the precise exponential.
    pub const fn precise(rounding: Rounding) -> Numerics {
        Numerics { rounding, exp: ExpMode::Precise, batch_invariant: false }
    }

    crate::setters! {
        /// Rounds elsewhere.
        with_rounding(rounding: Rounding);
        /// Evaluates the exponential otherwise.
        with_exp(exp: ExpMode);
    }

    /// The same with one order of sums for every M, see [`Self::batch_invariant`].
    #[must_use]
    pub const fn with_batch_invariance(self) -> Numerics {
        Numerics { batch_invariant: true, ..self }
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounding, exp, batch_invariant } = self;
        match batch_invariant {
            false => f.pad(&format!("{rounding}+{exp}")),
            true => f.pad(&format!("{rounding}+{exp}+{BATCH_INVARIANT}")),
        }
    }
}

impl FromStr for Numerics {
    type Err = Error;
    /// `fused`, or `fused+fast`; the exponential is `precise` where it is not named. `+batch-invariant`
    /// may follow.
    fn from_str(s: &str) -> Result<Self> {
        let without = s.strip_suffix(BATCH_INVARIANT).and_then(|s| s.strip_suffix('+'));
        let modes = without.unwrap_or(s);
        let (rounding, exp) = modes.split_once('+').unwrap_or((modes, "precise"));
        Ok(Numerics {
            rounding: rounding.parse()?,
            exp: exp.parse()?,
            batch_invariant: without.is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        assert_eq!(Numerics::all().count(), 6);
        for n in Numerics::all() {
            for n in [n, n.with_batch_invariance()] {
                assert_eq!(n.to_string().parse::<Numerics>().unwrap(), n);
                let json = serde_json::to_string(&n).unwrap();
                assert_eq!(serde_json::from_str::<Numerics>(&json).unwrap(), n);
            }
        }
        for wrong in ["fused+quick", "batch-invariant", "fusedbatch-invariant", "fused+batch"] {
            assert!(wrong.parse::<Numerics>().is_err(), "{wrong}");
        }
    }

    /// Records and definitions from before the mode was there keep their form.
    #[test]
    fn a_mode_that_is_off_is_not_named() {
        let plain = Numerics::default_for(DType::Bf16);
        assert_eq!(plain.to_string(), "fused+fast");
        let json = r#"{"rounding":"fused","exp":"fast"}"#;
        assert_eq!(serde_json::to_string(&plain).unwrap(), json);
        assert_eq!(serde_json::from_str::<Numerics>(json).unwrap(), plain);
        let on = plain.with_batch_invariance();
        assert_eq!(on.to_string(), "fused+fast+batch-invariant");
        assert_eq!("fused+batch-invariant".parse::<Numerics>().unwrap().exp, ExpMode::Precise);
    }
}
