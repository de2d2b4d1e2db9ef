//! Which activation a model uses, from what its file says about it.

use swiglu_core::{ACTIVATION_NAMES, Activation, Error, Result};

/// The activation of a model.
///
/// The architecture decides before the named activation: Gemma's configuration says `gelu` where
/// its published code applies the tanh form, and gpt-oss's says `silu` where it clamps. A name
/// that is not known is refused, because any guess would be a wrong number.
pub(crate) fn model_activation(
    architecture: Option<&str>,
    hidden_act: Option<&str>,
) -> Result<Activation> {
    match architecture {
        Some(a) if a.starts_with("gemma") => return Ok(Activation::GEGLU_TANH),
        Some("gpt_oss" | "gpt-oss") => return Ok(Activation::CLAMPED_SWIGLU),
        _ => {}
    }
    match hidden_act {
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
            choices: format!("{ACTIVATION_NAMES} (set it explicitly)"),
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
        for (architecture, name, expected) in cases {
            assert_eq!(model_activation(architecture, name).unwrap(), expected);
        }
    }

    #[test]
    fn unknown_names_are_not_guessed() {
        let error = model_activation(Some("llama"), Some("xielu")).unwrap_err().to_string();
        assert!(error.contains("xielu") && error.contains("swiglu"), "{error}");
    }
}
