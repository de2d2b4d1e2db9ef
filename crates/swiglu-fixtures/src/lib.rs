//! Small real feed-forward layers: weights of a published model, the input of that layer on a real text, and its output
//! computed in float64. They are embedded here and nowhere else. The licence and the origin of each lie beside its files,
//! `layers/*/{LICENSE,PROVENANCE.md}`.

#![forbid(unsafe_code)]

/// Where the files lie in this package's source on the machine that compiled it: for tests and examples.
pub const LAYERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/layers");
/// The weights of [`SMOLLM2`] as a file below [`LAYERS`].
pub const SMOLLM2_FILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/layers/smollm2-135m-blk28/ffn.q4_1.gguf");
/// The file of [`STORIES15M`] below [`LAYERS`].
pub const STORIES15M_FILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/layers/stories15m-layer0/layer.safetensors");

/// A layer of a published model, in memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct Layer {
    /// The model and the layer's place in it, for people.
    pub title: &'static str,
    /// The layer's index in the weights' names.
    pub layer: usize,
    /// A GGUF or safetensors file with the weights.
    pub weights: &'static [u8],
    /// A safetensors file with an input and the result.
    pub activations: &'static [u8],
    /// The tensor of `activations` that is the input, `[M, K]`.
    pub input: &'static str,
    /// The tensor of `activations` that is the block's output in float64, `[M, K]`.
    pub reference: &'static str,
}

/// Block 28 of SmolLM2-135M-Instruct in Q4_1: K = 576, H = 1536, 73 tokens. Apache-2.0.
pub static SMOLLM2: Layer = Layer {
    title: "SmolLM2-135M-Instruct block 28",
    layer: 28,
    weights: include_bytes!("../layers/smollm2-135m-blk28/ffn.q4_1.gguf"),
    activations: include_bytes!("../layers/smollm2-135m-blk28/acts.safetensors"),
    input: "acts.layers.28.mlp_in",
    reference: "acts.layers.28.mlp_out_f64ref",
};

/// Layer 0 of stories15M in f32: K = 288, H = 768, 96 tokens. MIT.
pub static STORIES15M: Layer = Layer {
    title: "stories15M layer 0",
    layer: 0,
    weights: include_bytes!("../layers/stories15m-layer0/layer.safetensors"),
    activations: include_bytes!("../layers/stories15m-layer0/layer.safetensors"),
    input: "acts.layers.0.mlp_in",
    reference: "acts.layers.0.mlp_out_f64ref",
};
