//! Which activation a block has, and where that is said.

use std::fmt;

use serde_json::Value;
use swiglu_core::{Activation, GateFn};

use super::{Blocks, Effect, Family, Function};
use crate::config::{Scope, is_set, number};

/// Keys under which configurations name an activation, where their family has none of its own.
pub(super) const KEYS: [&str; 15] = [
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation_fn",
    "hidden_activation_fn",
    "mlp_hidden_act",
    "mlp_activation",
    "mlp_act",
    "ffn_activation",
    "ffn_act_fn.name",
    "ffn_act",
    "dense_act_fn",
    "act_fn",
    "activation_type",
    "activation",
];

/// Where a layer's activation was read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ActivationSource {
    /// A key of the configuration, with its value.
    Stated(String),
    /// The family of the model, by its name here: its published code applies it where no key says
    /// otherwise.
    Family(&'static str),
    /// Nothing: the file says nothing about its model, and most gated blocks apply SiLU.
    Assumed,
}

impl fmt::Display for ActivationSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ActivationSource::Stated(key) => f.write_str(key),
            ActivationSource::Family(name) => write!(f, "the {name} family's"),
            ActivationSource::Assumed => f.write_str("assumed: the file names none"),
        }
    }
}

/// What a model says of one block's activation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Stated {
    Known(Activation, ActivationSource),
    /// A key with a value that is not understood.
    Unknown(String),
    /// The model says something of itself, yet nothing that fixes an activation.
    Nothing,
}

/// The activation of a block: its function and, where the family has a limit, its clamp.
pub(crate) fn stated_activation(
    family: Option<&'static Family>,
    scope: &Scope<'_>,
    layer: usize,
    blocks: Blocks,
    anything: bool,
) -> Stated {
    let (name, source) = match function(family, scope) {
        Some(found) => found,
        None if !anything => ("silu".to_owned(), ActivationSource::Assumed),
        None => return Stated::Nothing,
    };
    let Some(plain) = activation_named(&name) else {
        let ActivationSource::Stated(key) = source else { return Stated::Nothing };
        return Stated::Unknown(key);
    };
    let (limit, behind) = match limit(family, scope, layer, blocks) {
        Ok(limit) => limit.unwrap_or((plain.limit(), false)),
        Err(key) => return Stated::Unknown(key),
    };
    let alphas = family.map_or(&[][..], |f| f.effects).iter().filter_map(|e| match *e {
        Effect::Alpha(key) => scope.get(key),
        _ => None,
    });
    let mut gate = plain.gate();
    for (key, value) in alphas {
        let Some(beta) = number(value) else {
            return Stated::Unknown(format!("{key} = {value}"));
        };
        gate = GateFn::Silu { beta: beta as f32 };
    }
    match Activation::new(gate, limit, plain.up_offset()) {
        Ok(activation) if behind => Stated::Known(activation.limited_behind(), source),
        Ok(activation) => Stated::Known(activation, source),
        Err(_) => Stated::Nothing,
    }
}

/// The name of the gate's function and who says it.
fn function(
    family: Option<&'static Family>,
    scope: &Scope<'_>,
) -> Option<(String, ActivationSource)> {
    let stated = |keys: &[&str]| {
        let (key, value) = keys.iter().find_map(|key| scope.get(key))?;
        let name = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Some((name, ActivationSource::Stated(format!("{key} = {value}"))))
    };
    let Some(family) = family else { return stated(&KEYS) };
    let of_family = |name: &str| Some((name.to_owned(), ActivationSource::Family(family.name)));
    match family.function {
        Function::Named([], default) => stated(&KEYS).or_else(|| of_family(default)),
        Function::Named(keys, default) => stated(keys).or_else(|| of_family(default)),
        Function::Fixed(name) => of_family(name),
        Function::Flags(flags, default) => {
            let set = |key: &str| scope.get(key).filter(|(_, v)| is_set(v));
            let found = flags.iter().find_map(|(key, name)| Some((set(key)?.0, *name)));
            match found {
                Some((key, name)) => Some((name.into(), ActivationSource::Stated(key))),
                None => of_family(default),
            }
        }
    }
}

/// The limit of the block in this layer: that of the first key that is stated, else the family's own;
/// none if it has none. With it, whether it is of the function's value. The key and its value if it is no
/// number.
fn limit(
    family: Option<&'static Family>,
    scope: &Scope<'_>,
    layer: usize,
    of: Blocks,
) -> Result<Option<(Option<f32>, bool)>, String> {
    let effects = family.map_or(&[][..], |f| f.effects);
    let clamps = effects.iter().filter_map(|effect| match *effect {
        Effect::Clamp(key, blocks, default) if blocks.has(of) => Some((key, default, false)),
        Effect::ClampBehind(key, blocks) if blocks.has(of) => Some((key, None, true)),
        _ => None,
    });
    for (key, default, behind) in clamps.clone() {
        let Some((path, value)) = scope.get(key) else { continue };
        let said = || format!("{path} = {value}");
        let value = match value {
            Value::Array(layers) => layers.get(layer).ok_or_else(said)?,
            value => value,
        };
        let limit = match number(value) {
            _ if value.is_null() => default,
            // So large that it clamps nothing.
            Some(limit) if limit == 0.0 || limit > f64::from(f32::MAX) => None,
            Some(limit) if limit > 0.0 => Some(limit as f32),
            _ => return Err(said()),
        };
        return Ok(Some((limit, behind)));
    }
    Ok(clamps.filter_map(|(_, default, behind)| Some((Some(default?), behind))).next())
}

/// The activation that a configuration's name for the gate's function, or for the whole, stands for.
fn activation_named(name: &str) -> Option<Activation> {
    let quick = GateFn::Silu { beta: 1.702 };
    let name = name.trim().to_ascii_lowercase().replace('-', "_");
    Some(match name.as_str() {
        "silu" | "swish" | "swiglu" | "swish_1" | "gated_silu" => Activation::SWIGLU,
        "gelu" | "gelu_python" | "gelu_erf" | "geglu" => Activation::GEGLU,
        "gelu_pytorch_tanh" | "gelu_tanh" | "gelu_new" | "gelu_fast" | "gelu_accurate"
        | "gelu_python_tanh" | "geglu_tanh" | "gelu_approx" | "gelu_approximate" | "gated_gelu" => {
            Activation::GEGLU_TANH
        }
        "quick_gelu" | "gelu_quick" | "quick_geglu" => Activation::new(quick, None, 0.0).ok()?,
        "relu" | "reglu" | "gated_relu" => Activation::REGLU,
        "relu2" | "relu_squared" | "relu_sqr" | "relu2_glu" | "reglu2" => Activation::REGLU2,
        "sigmoid" | "glu" => Activation::GLU,
        "linear" | "identity" | "bilinear" => Activation::BILINEAR,
        "clamped_swiglu" => Activation::CLAMPED_SWIGLU,
        _ => return None,
    })
}
