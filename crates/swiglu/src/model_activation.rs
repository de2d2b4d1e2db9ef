//! Which activation a model uses, from what its file says about it.

use swiglu_core::{ACTIVATION_NAMES, Activation, Error, Result};
use swiglu_formats::LayerWeights;

/// Architectures that apply SiLU, under the names of Hugging Face and of GGUF.
const SILU: [&str; 24] = [
    "llama",
    "llama4",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen2moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3moe",
    "phi3",
    "deepseek",
    "deepseek2",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "glm",
    "glm4",
    "chatglm",
    "smollm3",
    "olmo2",
    "internlm2",
];

/// What a file says about its activation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stated<'a> {
    pub(crate) architecture: Option<&'a str>,
    pub(crate) hidden_act: Option<&'a str>,
    pub(crate) limit: Option<f32>,
}

impl<'a> Stated<'a> {
    pub(crate) fn of(layer: &'a LayerWeights) -> Self {
        Self {
            architecture: layer.architecture(),
            hidden_act: layer.hidden_act(),
            limit: layer.swiglu_limit(),
        }
    }

    /// Whether nothing the file says names the activation.
    pub(crate) fn nothing(self) -> bool {
        let known = |a: &str| a.starts_with("gemma") || is_gpt_oss(a) || SILU.contains(&a);
        self.hidden_act.is_none() && !self.architecture.is_some_and(known)
    }
}

fn is_gpt_oss(architecture: &str) -> bool {
    matches!(architecture, "gpt_oss" | "gpt-oss")
}

/// The activation of a model.
///
/// The architecture decides before the named activation: Gemma's configuration says `gelu` where
/// its published code applies the tanh form, and gpt-oss's says `silu` where it clamps. A name
/// that is not known is refused, because any guess would be a wrong number.
pub(crate) fn model_activation(stated: Stated<'_>) -> Result<Activation> {
    match stated.architecture {
        Some(a) if a.starts_with("gemma") => return Ok(Activation::GEGLU_TANH),
        Some(a) if is_gpt_oss(a) => {
            let published = Activation::CLAMPED_SWIGLU;
            let limit = stated.limit.or(published.limit());
            return Activation::new(published.gate(), limit, published.up_offset());
        }
        _ => {}
    }
    match stated.hidden_act {
        None | Some("silu" | "swish") => Ok(Activation::SWIGLU),
        Some("gelu") => Ok(Activation::GEGLU),
        Some("gelu_pytorch_tanh" | "gelu_tanh" | "gelu_new" | "gelu_fast") => {
            Ok(Activation::GEGLU_TANH)
        }
        Some("relu") => Ok(Activation::REGLU),
        Some("sigmoid") => Ok(Activation::GLU),
        Some("linear") => Ok(Activation::BILINEAR),
        Some(other) => Err(Error::UnknownName {
            what: "activation in the model's configuration",
            given: other.to_owned(),
            choices: format!("{ACTIVATION_NAMES}; set it yourself (--activation)"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_decides_before_the_name() {
        let cases = [
            (None, None, Activation::SWIGLU),
            (Some("llama"), Some("silu"), Activation::SWIGLU),
            (Some("gemma2"), None, Activation::GEGLU_TANH),
            (Some("gemma"), Some("gelu"), Activation::GEGLU_TANH),
            (Some("gpt_oss"), Some("silu"), Activation::CLAMPED_SWIGLU),
            (Some("gpt-oss"), None, Activation::CLAMPED_SWIGLU),
            (Some("other"), Some("gelu"), Activation::GEGLU),
            (None, Some("gelu_pytorch_tanh"), Activation::GEGLU_TANH),
        ];
        for (architecture, hidden_act, expected) in cases {
            let stated = Stated { architecture, hidden_act, limit: None };
            assert_eq!(model_activation(stated).unwrap(), expected);
        }
    }

    #[test]
    fn a_stated_limit_is_applied() {
        let stated = Stated { architecture: Some("gpt_oss"), limit: Some(0.5), hidden_act: None };
        let expected = Activation::clamped_swiglu(1.702, 1.0, 0.5).unwrap();
        assert_eq!(model_activation(stated).unwrap(), expected);
    }

    #[test]
    fn silence_is_told_from_knowledge() {
        let stated = |architecture, hidden_act| Stated { architecture, hidden_act, limit: None };
        assert!(stated(None, None).nothing() && stated(Some("weird"), None).nothing());
        assert!(!stated(Some("weird"), Some("silu")).nothing());
        assert!(!stated(Some("llama"), None).nothing() && !stated(Some("gemma2"), None).nothing());
    }

    #[test]
    fn unknown_names_are_not_guessed() {
        let error = model_activation(Stated {
            architecture: Some("llama"),
            hidden_act: Some("xielu"),
            limit: None,
        })
        .unwrap_err()
        .to_string();
        assert!(error.contains("xielu") && error.contains("swiglu"), "{error}");
    }
}
