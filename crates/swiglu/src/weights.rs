//! Weights on the host, not packed yet.

use std::marker::PhantomData;

use swiglu_core::{
    Activation, DType, Element, Error as CoreError, GateUpWeights, GatedLinearParams, Matrix,
    MatrixRef, MlpParams, Numerics, Op, Orientation, OwnedGateUp, QuantizedGatedLinearParams,
    QuantizedMlpParams, QuantizedRef, QuantizedTypes,
};
use swiglu_formats::{ActivationSource, FormatError, LayerWeights};

use crate::device::Device;
use crate::error::Result;
use crate::kind::{Kind, MlpKind};
use crate::layer::Layer;
use crate::with_dtype;

/// A layer as its file stores it, with choices to make before it is packed: use it as
/// [`GatedLinearWeights`](crate::GatedLinearWeights) or [`MlpWeights`](crate::MlpWeights).
#[derive(Debug, Clone)]
pub struct Weights<K> {
    stored: LayerWeights,
    dtype: Option<DType>,
    activation: Option<Activation>,
    numerics: Option<Numerics>,
    decode: bool,
    kind: PhantomData<fn() -> K>,
}

impl<K: Kind> Weights<K> {
    pub(crate) fn new(stored: LayerWeights) -> Self {
        let (dtype, activation, numerics) = (None, None, None);
        Self { stored, dtype, activation, numerics, decode: false, kind: PhantomData }
    }

    /// Takes inputs, gives outputs and, unless they are quantised, keeps weights in another element
    /// type than the stored one. Where weights are quantised or float64 it is `f32` if nothing else is
    /// asked for.
    #[must_use]
    pub fn dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Applies another activation than the one the file's model uses.
    #[must_use]
    pub fn activation(self, activation: Activation) -> Self {
        Self { activation: Some(activation), ..self }
    }

    /// Rounds otherwise than [`Numerics::default_for`] the element type.
    #[must_use]
    pub fn numerics(self, numerics: Numerics) -> Self {
        Self { numerics: Some(numerics), ..self }
    }

    /// Decodes quantised weights to the element type, also where the device could compute with them as
    /// they are: a call then reads two to seven times the bytes.
    #[must_use]
    pub fn decoded(self) -> Self {
        Self { decode: true, ..self }
    }

    /// What the file stores.
    pub fn stored(&self) -> &LayerWeights {
        &self.stored
    }

    /// The element type the layer will have.
    pub fn resolved_dtype(&self) -> DType {
        self.dtype.or_else(|| self.stored.stored_dtype().dtype()).unwrap_or(DType::F32)
    }

    /// The activation the layer will have: the one asked for, else what its model says
    /// ([`LayerWeights::activation`]).
    ///
    /// # Errors
    /// [`FormatError::UnknownActivation`], if the model names an activation
    /// that is not known here, or is none whose activation is, and none was asked for;
    /// [`CoreError::Unsupported`] for one that a smaller h changes.
    pub fn resolved_activation(&self) -> Result<Activation> {
        let activation = match self.activation {
            Some(activation) => activation,
            None => self.stored.activation()?.0,
        };
        // A clamp and an offset are of up as it is.
        if self.stored.rescale() != 0
            && (activation.limit().is_some() || activation.up_offset() != 0.0)
        {
            return Err(CoreError::Unsupported {
                what: format!("{activation} with h made smaller by a power of two"),
                why: "up is clamped or moved before it is multiplied; leave LoadOptions::with_rescale out".into(),
            }
            .into());
        }
        Ok(activation)
    }

    /// Where [`Self::resolved_activation`] was read; none where it was asked for, or is refused.
    pub fn activation_source(&self) -> Option<&ActivationSource> {
        match self.activation {
            Some(_) => None,
            None => self.stored.activation().ok().map(|(_, source)| source),
        }
    }

    /// The numerics the layer will have.
    pub fn resolved_numerics(&self) -> Numerics {
        self.numerics.unwrap_or_else(|| Numerics::default_for(self.resolved_dtype()))
    }

    /// The weights as `T`: borrowed from the file where it stores `T`, else decoded.
    ///
    /// # Errors
    /// As [`Self::resolved_activation`]; [`FormatError`](crate::FormatError).
    pub fn host<T: Element>(&self) -> Result<HostWeights<'_, T>> {
        let gate_up = match self.stored.gate_up_view() {
            Some(view) => GateUp::Stored(view),
            None => GateUp::Decoded(self.stored.gate_up()?),
        };
        let down = match self.stored.down_view() {
            Some((view, orientation)) => Some((Down::Stored(view), orientation)),
            None => self.stored.down()?.map(|(m, orientation)| (Down::Decoded(m), orientation)),
        };
        let numerics = self.numerics.unwrap_or_else(|| Numerics::default_for(T::DTYPE));
        let activation = self.resolved_activation()?;
        Ok(HostWeights { stored: &self.stored, gate_up, down, activation, numerics })
    }

    /// The weights as the quantised blocks of the file, as a layer on `device` computes with them.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`], with the reason why [`Self::to`] decodes
    /// them: the file's types or layout, the device, or [`Self::decoded`]. Otherwise as [`Self::host`].
    pub fn quantized_on(&self, device: &Device) -> Result<QuantizedWeights<'_>> {
        self.quantized_as(K::OP, device)
    }

    fn quantized_as(&self, op: Op, device: &Device) -> Result<QuantizedWeights<'_>> {
        let [gate, up] = self.stored.quantized_gate_up()?;
        let down = match op {
            Op::Mlp => self.stored.quantized_down()?,
            _ => None,
        };
        for kind in [Some(gate.kind()), down.map(|d| d.kind())].into_iter().flatten() {
            if self.decode {
                let what = format!("computing with {kind} weights");
                let why = "decoding was asked for".into();
                return Err(CoreError::Unsupported { what, why }.into());
            }
            device.expect_quantized(op, self.resolved_dtype(), kind)?;
        }
        let (activation, numerics) = (self.resolved_activation()?, self.resolved_numerics());
        Ok(QuantizedWeights { stored: &self.stored, gate, up, down, activation, numerics })
    }

    /// Whether the file has quantised weights among those that `op` takes.
    pub fn is_quantized(&self, op: Op) -> bool {
        let down = self.stored.stored_down().filter(|_| op == Op::Mlp);
        self.stored.stored_gate_up().iter().chain(down).any(|m| m.stored.is_quantized())
    }

    /// Packs the weights for a device: once, when the layer is built. Quantised ones stay as they are
    /// where the device has kernels for them, else they are decoded, and [`Layer::explain`] says why.
    ///
    /// # Errors
    /// As [`Self::host`]; for an MLP, [`FormatError::IncompleteLayer`] without a down weight.
    pub fn to(&self, device: &Device) -> Result<Layer<K>> {
        let dtype = self.resolved_dtype();
        if !self.is_quantized(K::OP) {
            return with_dtype!(dtype, T => K::pack::<T>(device, &self.host()?));
        }
        let packed = self
            .quantized_on(device)
            .and_then(|weights| with_dtype!(dtype, T => K::pack_quantized::<T>(device, &weights)));
        match packed {
            Err(why) if matches!(why.core(), Some(CoreError::Unsupported { .. })) => {
                let layer = with_dtype!(dtype, T => K::pack::<T>(device, &self.host()?))?;
                Ok(layer.because_decoded(why))
            }
            packed => packed,
        }
    }
}

impl Weights<MlpKind> {
    /// As [`Self::quantized_on`] for the gated linear layer of the block alone, whatever its down weight is.
    ///
    /// # Errors
    /// As [`Self::quantized_on`].
    pub fn quantized_gated_linear_on(&self, device: &Device) -> Result<QuantizedWeights<'_>> {
        self.quantized_as(Op::GatedLinear, device)
    }
}

/// Refuses a layer that is none without its block.
fn expect_whole_block(stored: &LayerWeights) -> Result<()> {
    let steps = stored.row_params().steps.before_h();
    Ok(steps.expect_none("in a gated linear layer alone", "load the block (Mlp::load)")?)
}

fn no_down(stored: &LayerWeights) -> crate::Error {
    FormatError::IncompleteLayer {
        path: stored.path().to_owned(),
        layer: stored.layer(),
        missing:
            "an MLP needs the down weight; name it (TensorNames::with_down), or load what is there \
                  (GatedLinear::load)"
                .into(),
        found: "gate and up".into(),
    }
    .into()
}

/// The weights of a layer as the quantised blocks of its file.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedWeights<'a> {
    stored: &'a LayerWeights,
    gate: QuantizedRef<'a>,
    up: QuantizedRef<'a>,
    down: Option<QuantizedRef<'a>>,
    activation: Activation,
    numerics: Numerics,
}

impl<'a> QuantizedWeights<'a> {
    /// The types of the weights.
    pub fn types(&self) -> QuantizedTypes {
        QuantizedTypes::new(self.gate.kind(), self.down.map(|d| d.kind()))
    }

    /// As parameters of a gated linear layer.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`] for one with a sparse gate, which only whole blocks have here.
    pub fn gated_linear(&self) -> Result<QuantizedGatedLinearParams<'a>> {
        expect_whole_block(self.stored)?;
        Ok(self.gated())
    }

    fn gated(&self) -> QuantizedGatedLinearParams<'a> {
        // The numerics that follow from a type are set aside.
        QuantizedGatedLinearParams::new(self.gate, self.up, self.activation, DType::F32)
            .with_gate_bias(self.stored.gate_bias())
            .with_up_bias(self.stored.up_bias())
            .with_numerics(self.numerics)
    }

    /// As parameters of a feed-forward block.
    ///
    /// # Errors
    /// [`FormatError::IncompleteLayer`] without a down weight.
    pub fn mlp(&self) -> Result<QuantizedMlpParams<'a>> {
        let down = self.down.ok_or_else(|| no_down(self.stored))?;
        let down_bias = self.stored.down_bias();
        let rows = self.stored.row_params();
        Ok(QuantizedMlpParams::new(self.gated(), down).with_down_bias(down_bias).with_rows(rows))
    }
}

#[derive(Debug)]
enum GateUp<'a, T> {
    Stored(GateUpWeights<'a, T>),
    Decoded(OwnedGateUp<T>),
}

#[derive(Debug)]
enum Down<'a, T> {
    Stored(MatrixRef<'a, T>),
    Decoded(Matrix<T>),
}

/// The weights of a layer as elements of type `T`, in the stored layout.
#[derive(Debug)]
pub struct HostWeights<'a, T> {
    stored: &'a LayerWeights,
    gate_up: GateUp<'a, T>,
    down: Option<(Down<'a, T>, Orientation)>,
    activation: Activation,
    numerics: Numerics,
}

impl<T: Element> HostWeights<'_, T> {
    /// As parameters of a gated linear layer.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`] for one with a sparse gate, which only whole blocks have here.
    pub fn gated_linear(&self) -> Result<GatedLinearParams<'_, T>> {
        expect_whole_block(self.stored)?;
        Ok(self.gated())
    }

    fn gated(&self) -> GatedLinearParams<'_, T> {
        GatedLinearParams::new(
            match &self.gate_up {
                GateUp::Stored(view) => *view,
                GateUp::Decoded(owned) => owned.view(),
            },
            self.activation,
        )
        .with_gate_bias(self.stored.gate_bias())
        .with_up_bias(self.stored.up_bias())
        .with_numerics(self.numerics)
    }

    /// As parameters of a feed-forward block.
    ///
    /// # Errors
    /// [`FormatError::IncompleteLayer`] without a down weight.
    pub fn mlp(&self) -> Result<MlpParams<'_, T>> {
        let Some((down, down_orientation)) = &self.down else {
            return Err(no_down(self.stored));
        };
        Ok(MlpParams::new(
            self.gated(),
            match down {
                Down::Stored(view) => *view,
                Down::Decoded(owned) => owned.view(),
            },
            *down_orientation,
        )
        .with_down_bias(self.stored.down_bias())
        .with_rows(self.stored.row_params()))
    }
}
