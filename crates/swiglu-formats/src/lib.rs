//! A gated feed-forward layer from safetensors, GGUF and npy files.
//!
//! Every file is untrusted: counts, lengths, offsets and shapes are checked before they are used,
//! and whatever is wrong is a [`FormatError`] that carries the values.
//!
//! The public names (settled; see each item for its text):
//!
//! ```text
//! load_layer(path: &Path, options: &LoadOptions) -> Result<LayerWeights, FormatError>
//! load_layer_from_bytes(bytes: impl Into<Bytes>, options: &LoadOptions) -> Result<LayerWeights, FormatError>
//!     Bytes: From<&'static [u8]> + From<Vec<u8>> + From<Arc<[u8]>>
//! LoadOptions { layer: usize, expert: Option<usize>, names: TensorNames,
//!               orientation: Option<Orientation>, arrangement: Option<Arrangement>,
//!               hidden: Option<usize> }                                   // Default, Clone
//! TensorNames { gate, up, down, gate_up, gate_bias, up_bias, gate_up_bias, down_bias: Option<String> }
//! LayerWeights::{
//!     hidden() -> usize, intermediate() -> usize, layout() -> WeightLayout,
//!     gate_up::<T: Element>() -> Result<OwnedGateUp<T>, FormatError>,
//!     gate_up_view::<T: Element>() -> Option<GateUpWeights<'_, T>>,   // zero-copy where possible
//!     down::<T: Element>() -> Result<Option<(Matrix<T>, Orientation)>, FormatError>,
//!     down_view::<T: Element>() -> Option<(MatrixRef<'_, T>, Orientation)>,
//!     gate_bias() / up_bias() / down_bias() -> Option<&[f32]>,
//!     stored_dtype() -> &StoredType, describe() -> String, format() -> FileFormat,
//!     architecture() -> Option<&str>, hidden_act() -> Option<&str>,
//!     expect_finite() -> Result<(), FormatError> }
//! read_matrix(spec: &str) -> Result<DynMatrix, FormatError>     // FILE.npy, FILE.safetensors#TENSOR
//! matrix_from_safetensors_bytes(bytes: impl Into<Bytes>, tensor: &str) -> Result<DynMatrix, FormatError>
//! DynMatrix::{F32, F16, Bf16, F64}, ::{shape(), to::<T: Element>() -> Matrix<T>, to_f64() -> Matrix<f64>}
//! npy::write<T: Element>(path: &Path, m: MatrixRef<'_, T>, overwrite: bool) -> Result<(), FormatError>
//! npy::write_f64(path: &Path, m: MatrixRef<'_, f64>, overwrite: bool) -> Result<(), FormatError>
//! ```

mod bytes;
mod config;
mod error;
pub mod gguf;
mod layer;
mod matrix;
mod model;
pub mod npy;
pub mod safetensors;
mod shards;
mod stored;
mod tensor;

pub use bytes::Bytes;
pub use error::{FormatError, Result};
pub use layer::{
    LayerWeights, LoadOptions, TensorNames, load_layer, load_layer_from, load_layer_from_bytes,
};
pub use matrix::{DynMatrix, matrix_from_npy_bytes, matrix_from_safetensors_bytes, read_matrix};
pub use model::{FileFormat, Model};
pub use stored::StoredType;
pub use tensor::{StoredMatrix, Tensor};
