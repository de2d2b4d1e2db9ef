//! A loaded layer.

use std::path::{Path, PathBuf};

use swiglu_core::{
    Activation, Arrangement, Element, Error as CoreError, GateUpWeights, Matrix, MatrixRef,
    Orientation, OwnedGateUp, QuantizedRef, RowParams, WeightLayout,
};

use super::EXPLICIT;
use super::rows::Rows;
use crate::error::{FormatError, Result};
use crate::family::{ActivationSource, Stated};
use crate::model::FileFormat;
use crate::stored::StoredType;
use crate::tensor::StoredMatrix;

/// A bias and the tensor it came from.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bias {
    pub(super) name: String,
    pub(super) values: Vec<f32>,
}

/// The weights and biases of one gated feed-forward layer, checked against each other.
///
/// Weights stay where the file has them (mapped, where it was opened by path) and are decoded on
/// request.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    pub(super) path: PathBuf,
    pub(super) format: FileFormat,
    pub(super) architecture: Option<String>,
    pub(super) family: Option<&'static str>,
    pub(super) activation: Stated,
    /// Where the model says what it is, for messages.
    pub(super) config: PathBuf,
    pub(super) convention: &'static str,
    pub(super) layer: usize,
    pub(super) expert: Option<usize>,
    pub(super) layout: WeightLayout,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    /// One packed, or gate and up.
    pub(super) gate_up: Vec<StoredMatrix>,
    pub(super) down: Option<StoredMatrix>,
    pub(super) down_orientation: Orientation,
    pub(super) gate_bias: Option<Bias>,
    pub(super) up_bias: Option<Bias>,
    pub(super) down_bias: Option<Bias>,
    pub(super) rows: Rows,
    pub(super) rescale: i32,
    pub(super) notes: Vec<String>,
}

impl LayerWeights {
    /// K, the hidden size.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// H, the intermediate size.
    pub fn intermediate(&self) -> usize {
        self.intermediate
    }

    /// How gate and up weights are stored.
    pub fn layout(&self) -> WeightLayout {
        self.layout
    }

    /// Gate and up weights as `T`, in the stored layout; each value is rounded at most once from
    /// what the file stores (quantised values from the `f32` they decode to).
    ///
    /// # Errors
    /// [`crate::FormatError::Core`] if the layout does not fit, which loading excludes.
    pub fn gate_up<T: Element>(&self) -> Result<OwnedGateUp<T>> {
        let tensors =
            self.gate_up.iter().map(StoredMatrix::to_matrix).collect::<Result<Vec<_>>>()?;
        Ok(OwnedGateUp::new(tensors, self.layout)?)
    }

    /// Gate and up weights without a copy, if they are stored as `T` and lie aligned.
    pub fn gate_up_view<T: Element>(&self) -> Option<GateUpWeights<'_, T>> {
        match self.gate_up.as_slice() {
            [one] => GateUpWeights::packed(one.view()?, self.layout).ok(),
            [gate, up] => {
                GateUpWeights::separate(gate.view()?, up.view()?, self.layout.orientation).ok()
            }
            _ => None,
        }
    }

    /// The down weight as `T` and its orientation, if the layer has one; rounding as in
    /// [`Self::gate_up`].
    ///
    /// # Errors
    /// As [`Self::gate_up`].
    pub fn down<T: Element>(&self) -> Result<Option<(Matrix<T>, Orientation)>> {
        match &self.down {
            Some(down) => Ok(Some((down.to_matrix()?, self.down_orientation))),
            None => Ok(None),
        }
    }

    /// The down weight without a copy, if it is stored as `T` and lies aligned.
    pub fn down_view<T: Element>(&self) -> Option<(MatrixRef<'_, T>, Orientation)> {
        Some((self.down.as_ref()?.view()?, self.down_orientation))
    }

    /// Gate and up weights as the file's blocks, `[H, K]` each, without a copy; halves of a packed
    /// tensor where each lies in one piece.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`] with the reason why they have to be decoded: they are not quantised,
    /// their types differ, blocks do not run along the inputs, or gate and up interleave.
    pub fn quantized_gate_up(&self) -> Result<[QuantizedRef<'_>; 2], CoreError> {
        let h = self.intermediate;
        let [gate, up] = match self.gate_up.as_slice() {
            [both] => {
                let both = self.blocks(both, self.layout.orientation)?;
                // Where a block of scales is of both halves.
                let shared = |why: CoreError| CoreError::Unsupported {
                    what: format!("packed gate and up weights as {} of {h} rows each", both.kind()),
                    why: format!("{why}; decode them"),
                };
                let half = |start| both.rows_range(start..start + h).map_err(shared);
                match self.layout.arrangement {
                    Arrangement::PackedGateFirst => [half(0)?, half(h)?],
                    Arrangement::PackedUpFirst => [half(h)?, half(0)?],
                    other => {
                        let what = format!("quantised gate and up weights arranged as {other}");
                        let why = "rows of gate and of up must each lie in one piece; decode them";
                        return Err(CoreError::Unsupported { what, why: why.into() });
                    }
                }
            }
            [gate, up] => {
                let blocks = |m| self.blocks(m, self.layout.orientation);
                [blocks(gate)?, blocks(up)?]
            }
            // Loading puts one or two tensors here.
            _ => return Err(CoreError::shape("gate and up weights", [h, self.hidden], [0, 0])),
        };
        if gate.kind() != up.kind() {
            return Err(CoreError::Unsupported {
                what: format!(
                    "a gate weight as {} with an up weight as {}",
                    gate.kind(),
                    up.kind()
                ),
                why: "quantised gate and up weights must be of one type; decode them".into(),
            });
        }
        Ok([gate, up])
    }

    /// The down weight as the file's blocks, `[K, H]`, without a copy; none if the layer has none.
    ///
    /// # Errors
    /// As [`Self::quantized_gate_up`].
    pub fn quantized_down(&self) -> Result<Option<QuantizedRef<'_>>, CoreError> {
        self.down.as_ref().map(|down| self.blocks(down, self.down_orientation)).transpose()
    }

    fn blocks<'a>(
        &self,
        m: &'a StoredMatrix,
        orientation: Orientation,
    ) -> Result<QuantizedRef<'a>, CoreError> {
        let Some(blocks) = m.quantized() else {
            let why = match (m.stored.is_quantized(), m.factor) {
                (true, 1.0) => "there are no kernels for this form; decode them",
                (true, _) => "the file multiplies them by a factor of the tensor; decode them",
                (false, _) => "all of them must be quantised; decode them",
            };
            return Err(CoreError::Unsupported {
                what: format!("{} as {} among quantised weights", m.name, m.stored),
                why: why.into(),
            });
        };
        match orientation {
            Orientation::OutIn => Ok(blocks),
            Orientation::InOut => Err(CoreError::Unsupported {
                what: format!("quantised {} in orientation {}", m.name, Orientation::InOut),
                why: "blocks must run along the inputs; decode it".into(),
            }),
        }
    }

    /// The stored gate and up tensors: one packed, or gate and up. Quantised ones keep their
    /// blocks here.
    pub fn stored_gate_up(&self) -> &[StoredMatrix] {
        &self.gate_up
    }

    /// The stored down tensor.
    pub fn stored_down(&self) -> Option<&StoredMatrix> {
        self.down.as_ref()
    }

    /// The gate's bias, H values in feature order, whatever the arrangement.
    pub fn gate_bias(&self) -> Option<&[f32]> {
        self.gate_bias.as_ref().map(|b| b.values.as_slice())
    }

    /// The up projection's bias, H values in feature order, whatever the arrangement.
    pub fn up_bias(&self) -> Option<&[f32]> {
        self.up_bias.as_ref().map(|b| b.values.as_slice())
    }

    /// The down projection's bias, K values.
    pub fn down_bias(&self) -> Option<&[f32]> {
        self.down_bias.as_ref().map(|b| b.values.as_slice())
    }

    /// What the block computes from whole rows between its products.
    pub fn row_params(&self) -> RowParams<'_> {
        self.rows.params.view()
    }

    /// How the gate weight is stored. The others may differ: quantisers mix types.
    pub fn stored_dtype(&self) -> &StoredType {
        // Loading puts one or two tensors here; the constant keeps this free of a panic.
        self.gate_up.first().map_or(&StoredType::F32, |m| &m.stored)
    }

    /// The format of the file.
    pub fn format(&self) -> FileFormat {
        self.format
    }

    /// The file, or `<memory>`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The layer's number as it was asked for.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The architecture as the model names it: `model_type` or `general.architecture`.
    pub fn architecture(&self) -> Option<&str> {
        self.architecture.as_deref()
    }

    /// Powers of two by which h is smaller than the model's, and the down weights larger: what
    /// [`LoadOptions::rescale`](crate::LoadOptions::rescale) asked for.
    pub fn rescale(&self) -> i32 {
        self.rescale
    }

    /// What is good to know of the layer: the part of the model that was taken where several have it, and what
    /// the model does to the block's result.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The family of models it is of, as the table of families here calls it; none if it is not known.
    pub fn family(&self) -> Option<&'static str> {
        self.family
    }

    /// The activation of the layer's model, and where that was read.
    ///
    /// # Errors
    /// [`FormatError::UnknownActivation`] if the model names one that is not known here, or says what it
    /// is and nothing that fixes one.
    pub fn activation(&self) -> Result<(Activation, &ActivationSource)> {
        let why = match &self.activation {
            Stated::Known(activation, source) => return Ok((*activation, source)),
            Stated::Unknown(key) => {
                format!("{} is not understood here", crate::error::clip(key, 200))
            }
            Stated::Nothing => match &self.architecture {
                Some(name) => {
                    let name = crate::error::clip(name, 100);
                    format!("names no activation, and that of `{name}` is not known here")
                }
                None => "names neither an activation nor a model that is known here".into(),
            },
        };
        Err(FormatError::UnknownActivation { path: self.config.clone(), why })
    }

    /// One line: where the layer came from, its size, layout and types.
    pub fn describe(&self) -> String {
        // The file need not have layers.
        let mut out = match self.convention {
            EXPLICIT => "tensors".to_owned(),
            _ => format!("layer {}", self.layer),
        };
        if let Some(expert) = self.expert {
            out += &format!(" expert {expert}");
        }
        out += &format!(" of {} ({}", self.path.display(), self.format);
        if let Some(architecture) = &self.architecture {
            out += &format!(", {}", crate::error::clip(architecture, 40));
        }
        let tail = if self.down.is_some() { self.hidden.to_string() } else { "no down".into() };
        out += &format!(
            "): {} → {} → {tail}, {}, {}:",
            self.hidden, self.intermediate, self.layout, self.convention
        );
        for (i, m) in self.gate_up.iter().chain(&self.down).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            out += &format!("{comma} {} {}", crate::error::clip(&m.name, 100), m.stored);
            if m.factor != 1.0 {
                out += &format!(" × {}", m.factor);
            }
        }
        for bias in [&self.gate_bias, &self.up_bias, &self.down_bias].into_iter().flatten() {
            out += &format!(", {}", crate::error::clip(&bias.name, 100));
        }
        if !self.row_params().steps.is_none() {
            out += &format!(", {}", self.row_params().steps);
        }
        for name in &self.rows.names {
            out += &format!(", {}", crate::error::clip(name, 100));
        }
        out
    }

    /// Refuses NaN and infinities in any weight or bias, naming tensor and position.
    ///
    /// # Errors
    /// [`swiglu_core::Error::NonFinite`], as [`crate::FormatError::Core`].
    pub fn expect_finite(&self) -> Result<()> {
        self.expect_finite_gated()?;
        let RowParams { norm_weight, norm_bias, .. } = self.row_params();
        for (name, values) in
            self.rows.names.iter().zip([norm_weight, norm_bias].into_iter().flatten())
        {
            MatrixRef::new(values, 1, values.len())?.expect_finite(name)?;
        }
        expect_finite(&self.down, [&self.down_bias])
    }

    /// As [`Self::expect_finite`] of the gated linear layer alone.
    ///
    /// # Errors
    /// As there.
    pub fn expect_finite_gated(&self) -> Result<()> {
        expect_finite(&self.gate_up, [&self.gate_bias, &self.up_bias])
    }
}

fn expect_finite<'a>(
    matrices: impl IntoIterator<Item = &'a StoredMatrix>,
    biases: impl IntoIterator<Item = &'a Option<Bias>>,
) -> Result<()> {
    for m in matrices {
        m.expect_finite()?;
    }
    for bias in biases.into_iter().flatten() {
        MatrixRef::new(&bias.values, 1, bias.values.len())?.expect_finite(&bias.name)?;
    }
    Ok(())
}
