//! What is run: an embedded layer or one from a file, its input and the expected result.

use std::ffi::OsStr;

use anyhow::{anyhow, bail};
use swiglu::{CoreError, LoadOptions, MlpWeights};
use swiglu_fixtures::{SMOLLM2, STORIES15M};
use swiglu_formats::{
    DynMatrix, LayerWeights, matrix_file, matrix_from_safetensors_bytes, read_matrix,
};
use swiglu_lab::CaseOp;

use super::{Fixture, RunArgs};
use crate::inputs;

/// A matrix and where it is from, for people.
pub(super) struct Sourced {
    pub(super) matrix: DynMatrix,
    pub(super) source: String,
}

impl Sourced {
    fn read(option: &str, spec: Option<&OsStr>) -> anyhow::Result<Option<Self>> {
        let Some(spec) = spec else { return Ok(None) };
        let (file, tensor) = matrix_file(spec);
        let why = match file {
            file if file.as_os_str().is_empty() => "names no file",
            file if file.is_dir() && tensor.is_none() => "is a directory",
            _ => "",
        };
        if !why.is_empty() {
            bail!("{option} {spec:?} {why}: expected FILE.npy or FILE.safetensors#TENSOR");
        }
        Ok(Some(Self { matrix: read_matrix(spec)?, source: spec.to_string_lossy().into_owned() }))
    }

    fn random(args: &RunArgs, hidden: usize) -> anyhow::Result<Self> {
        let (tokens, seed) = (args.tokens.unwrap_or(16), args.seed.unwrap_or(0));
        let matrix = DynMatrix::F32(inputs::normal(seed, tokens, hidden, 1.0)?);
        Ok(Self { matrix, source: format!("random, normal, seed {seed}") })
    }

    fn embedded(from: &swiglu_fixtures::Layer, tensor: &str, what: &str) -> anyhow::Result<Self> {
        let matrix = matrix_from_safetensors_bytes(from.activations, tensor)?;
        Ok(Self { matrix, source: format!("{what} (embedded)") })
    }
}

/// A layer, its input and the expected result.
pub(super) struct Subject {
    /// The layer, for people.
    pub(super) title: String,
    pub(super) weights: MlpWeights,
    pub(super) input: Sourced,
    /// The expected result; the oracle decides where there is none.
    pub(super) reference: Option<Sourced>,
}

impl Subject {
    pub(super) fn open(args: &RunArgs) -> anyhow::Result<Self> {
        let input = Sourced::read("--input", args.input.as_deref())?;
        let reference = Sourced::read("--reference", args.reference.as_deref())?;
        let subject = match args.weights.load()? {
            Some(weights) => {
                let hidden = weights.stored().hidden();
                let input = input.map_or_else(|| Sourced::random(args, hidden), Ok)?;
                Self { title: weights.stored().describe(), weights, input, reference }
            }
            None => Self::embedded(args, input, reference)?,
        };
        subject.validate(args)?;
        Ok(subject)
    }

    fn embedded(
        args: &RunArgs,
        input: Option<Sourced>,
        reference: Option<Sourced>,
    ) -> anyhow::Result<Self> {
        let from = match args.fixture.unwrap_or_default() {
            Fixture::Smollm2 => &SMOLLM2,
            Fixture::Stories15m => &STORIES15M,
        };
        let title = format!("{} (embedded)", from.title);
        let options = LoadOptions::new(from.layer);
        // Both embedded layers are of Llama models; one of their files does not say so.
        let weights = swiglu::Mlp::load_from_bytes(from.weights, &options)?;
        let weights = weights.activation(swiglu::Activation::SWIGLU);
        if let Some(input) = input {
            return Ok(Self { title, weights, input, reference });
        }
        let input = Sourced::embedded(from, from.input, "activations of a real text")?;
        // The reference is that of the whole block with the model's own activation.
        let activation = weights.resolved_activation()?;
        let same = args.op == CaseOp::Mlp && args.math.activation.is_none_or(|a| a == activation);
        let what = "a float64 result that came with them";
        let reference = same.then(|| Sourced::embedded(from, from.reference, what)).transpose()?;
        Ok(Self { title, weights, input, reference })
    }

    /// Shapes, and that every stored value is a number, before any work is done.
    fn validate(&self, args: &RunArgs) -> anyhow::Result<()> {
        let stored = self.weights.stored();
        let [tokens, width] = self.input.matrix.shape();
        if width != stored.hidden() {
            let what = format!("input ({})", self.input.source);
            return Err(CoreError::shape(what, [tokens, stored.hidden()], [tokens, width]).into());
        }
        let (out, finite): (_, fn(_) -> _) = match args.op {
            CaseOp::GatedLinear => (stored.intermediate(), LayerWeights::expect_finite_gated),
            _ => (stored.hidden(), LayerWeights::expect_finite),
        };
        if let Some(reference) = &self.reference {
            let shape = reference.matrix.shape();
            if shape != [tokens, out] {
                let what = format!("reference ({})", reference.source);
                return Err(CoreError::shape(what, [tokens, out], shape).into());
            }
        }
        if !args.allow_non_finite {
            finite(stored).map_err(|e| not_finite(e.into()))?;
            self.input.matrix.expect_finite("input").map_err(|e| not_finite(e.into()))?;
        }
        Ok(())
    }
}

/// What to do about a value that a file has.
fn not_finite(error: swiglu::Error) -> anyhow::Error {
    match error.core() {
        Some(CoreError::NonFinite { what, row, col, value }) => anyhow!(
            "{what}[{row}, {col}] is {value} in the file: expected finite numbers; \
             --allow-non-finite computes with others"
        ),
        _ => error.into(),
    }
}
