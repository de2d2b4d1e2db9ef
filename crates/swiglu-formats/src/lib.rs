//! A gated feed-forward layer from safetensors, GGUF and npy files.
//!
//! Every file is untrusted: counts, lengths, offsets and shapes are checked before they are used,
//! and whatever is wrong is a [`FormatError`] that carries the values.
//!
//! - [`load_layer`] finds a layer by its number, or by explicit names, and returns
//!   [`LayerWeights`]: gate and up weights with their [`WeightLayout`](swiglu_core::WeightLayout),
//!   the down weight and biases, all checked against each other. Files are mapped; weights are
//!   decoded when they are asked for.
//! - [`inspect`] says what a model holds and what would be refused, without computing.
//! - [`read_matrix`] reads an input or a reference: `x.npy`, `acts.safetensors#NAME`.
//! - [`npy::write`] writes a result, whole or not at all.
//! - [`Model`], [`gguf`], [`safetensors`] and [`npy`] give the tensors themselves.
//!
//! What a file does not say is never guessed: an orientation or an order of gate and up that
//! neither the naming convention, the architecture nor the shapes decide is refused as
//! [`FormatError::Ambiguous`], with the choices.
//!
//! ```
//! use std::path::Path;
//! use swiglu_formats::{LoadOptions, load_layer};
//!
//! let path = Path::new(swiglu_fixtures::SMOLLM2_FILE);
//! let layer = load_layer(path, &LoadOptions::new(28))?;
//! assert_eq!((layer.hidden(), layer.intermediate()), (576, 1536));
//! assert_eq!(layer.stored_dtype().to_string(), "Q4_1");
//! let gate_up = layer.gate_up::<half::bf16>()?;
//! assert_eq!(gate_up.view().hidden(), 576);
//! # Ok::<(), swiglu_formats::FormatError>(())
//! ```

mod bytes;
mod coded;
mod comfy;
mod config;
mod directory;
mod error;
pub mod family;
pub mod gguf;
mod layer;
mod matrix;
mod model;
pub mod npy;
mod parts;
mod recognise;
pub mod safetensors;
mod shards;
mod stored;
mod tensor;

pub use bytes::Bytes;
pub use coded::{Coded, Codes};
pub use error::{FormatError, Result};
pub use family::ActivationSource;
pub use layer::{
    Block, Contents, Inspection, LayerWeights, LoadOptions, TensorNames, inspect, load_layer,
    load_layer_from, load_layer_from_bytes,
};
pub use matrix::{
    DynMatrix, matrix_file, matrix_from_npy_bytes, matrix_from_safetensors_bytes, read_matrix,
};
pub use model::{FileFormat, Model};
pub use stored::StoredType;
pub use tensor::{StoredMatrix, Tensor};
