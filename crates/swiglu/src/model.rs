//! A model's files, opened once.

use std::path::Path;
use std::sync::Arc;

use swiglu_formats::{Bytes, LoadOptions, load_layer_from};

use crate::error::Result;
use crate::weights::Weights;
use crate::{GatedLinearWeights, MlpWeights};

/// A safetensors or GGUF file, or a directory with a model in it, opened once for all of its layers and experts.
///
/// Files are mapped: nothing is decoded before [`Weights::to`]. Clones are the same model.
///
/// ```no_run
/// use swiglu::{Device, LoadOptions, Model};
///
/// let (model, device) = (Model::open("model.safetensors")?, Device::best()?);
/// let layers: Vec<_> = (0..28)
///     .map(|layer| model.mlp(&LoadOptions::new(layer))?.to(&device))
///     .collect::<swiglu::Result<_>>()?;
/// # Ok::<(), swiglu::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Model(Arc<swiglu_formats::Model>);

impl Model {
    /// Opens files.
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self(Arc::new(swiglu_formats::Model::open(path.as_ref())?)))
    }

    /// Reads a file that is already in memory.
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError).
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Self> {
        Ok(Self(Arc::new(swiglu_formats::Model::from_bytes(&bytes.into())?)))
    }

    /// Where the model lies.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> Vec<&str> {
        self.0.names()
    }

    /// A feed-forward block by its layer, and its expert where there are some.
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError).
    pub fn mlp(&self, options: &LoadOptions) -> Result<MlpWeights> {
        Ok(Weights::new(load_layer_from(&self.0, options)?))
    }

    /// The gated linear layer of a block.
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError).
    pub fn gated_linear(&self, options: &LoadOptions) -> Result<GatedLinearWeights> {
        Ok(Weights::new(load_layer_from(&self.0, options)?))
    }
}
