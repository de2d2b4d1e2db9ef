//! Weights on the host, not packed yet.

use std::marker::PhantomData;

use swiglu_core::{
    Activation, DType, Element, GateUpWeights, GatedLinearParams, Matrix, MatrixRef, MlpParams,
    Numerics, Orientation, OwnedGateUp,
};
use swiglu_formats::{FormatError, LayerWeights};

use crate::device::Device;
use crate::error::Result;
use crate::kind::Kind;
use crate::layer::Layer;
use crate::model_activation::{Stated, model_activation};
use crate::with_dtype;

/// A layer as its file stores it, with choices to make before it is packed: use it as
/// [`GatedLinearWeights`](crate::GatedLinearWeights) or [`MlpWeights`](crate::MlpWeights).
#[derive(Debug, Clone)]
pub struct Weights<K> {
    stored: LayerWeights,
    dtype: Option<DType>,
    activation: Option<Activation>,
    numerics: Option<Numerics>,
    kind: PhantomData<fn() -> K>,
}

impl<K: Kind> Weights<K> {
    pub(crate) fn new(stored: LayerWeights) -> Self {
        Self { stored, dtype: None, activation: None, numerics: None, kind: PhantomData }
    }

    /// Computes in another element type than the stored one. Quantised and float64 weights are
    /// `f32` where nothing else is asked for.
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

    /// What the file stores.
    pub fn stored(&self) -> &LayerWeights {
        &self.stored
    }

    /// The element type the layer will have.
    pub fn resolved_dtype(&self) -> DType {
        self.dtype.or_else(|| self.stored.stored_dtype().dtype()).unwrap_or(DType::F32)
    }

    /// The activation the layer will have: the one asked for, else what the model is known to
    /// use, else [`Activation::SWIGLU`].
    ///
    /// # Errors
    /// [`swiglu_core::Error::UnknownName`] if the file names an activation that is not known
    /// here and none was asked for.
    pub fn resolved_activation(&self) -> Result<Activation> {
        match self.activation {
            Some(activation) => Ok(activation),
            None => Ok(model_activation(Stated::of(&self.stored))?),
        }
    }

    /// Whether [`Self::resolved_activation`] is an assumption: none was asked for, and the file says
    /// nothing that names one.
    pub fn activation_is_assumed(&self) -> bool {
        self.activation.is_none() && Stated::of(&self.stored).nothing()
    }

    /// The numerics the layer will have.
    pub fn resolved_numerics(&self) -> Numerics {
        self.numerics.unwrap_or_else(|| Numerics::default_for(self.resolved_dtype()))
    }

    /// The weights as `T`: borrowed from the file where it stores `T`, else decoded.
    ///
    /// # Errors
    /// As [`Self::resolved_activation`]; [`crate::Error::Format`].
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

    /// Packs the weights for a device: once, when the layer is built.
    ///
    /// # Errors
    /// As [`Self::host`]; for an MLP, [`FormatError::IncompleteLayer`] without a down weight.
    pub fn to(&self, device: &Device) -> Result<Layer<K>> {
        with_dtype!(self.resolved_dtype(), T => K::pack::<T>(device, &self.host()?))
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
    pub fn gated_linear(&self) -> GatedLinearParams<'_, T> {
        GatedLinearParams {
            weights: match &self.gate_up {
                GateUp::Stored(view) => *view,
                GateUp::Decoded(owned) => owned.view(),
            },
            gate_bias: self.stored.gate_bias(),
            up_bias: self.stored.up_bias(),
            activation: self.activation,
            numerics: self.numerics,
        }
    }

    /// As parameters of a feed-forward block.
    ///
    /// # Errors
    /// [`FormatError::IncompleteLayer`] without a down weight.
    pub fn mlp(&self) -> Result<MlpParams<'_, T>> {
        let Some((down, down_orientation)) = &self.down else {
            return Err(FormatError::IncompleteLayer {
                path: self.stored.path().to_owned(),
                layer: self.stored.layer(),
                missing: "an MLP needs the down weight; name it, or load a gated linear layer"
                    .into(),
                found: "gate and up".into(),
            }
            .into());
        };
        Ok(MlpParams {
            gated: self.gated_linear(),
            down: match down {
                Down::Stored(view) => *view,
                Down::Decoded(owned) => owned.view(),
            },
            down_orientation: *down_orientation,
            down_bias: self.stored.down_bias(),
        })
    }
}
