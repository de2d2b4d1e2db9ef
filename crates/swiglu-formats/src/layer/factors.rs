//! What the products of a layer's weights are multiplied by: a configuration's multipliers, and powers of
//! two that make h smaller.

use swiglu_core::{Arrangement, Orientation};

use super::LayerWeights;
use crate::config::{Config, Scope, number};
use crate::error::{FormatError, Result, clip};
use crate::family::{Effect, Family};

/// Of an up weight, whose product may be made smaller by so many powers of two.
const MAX_RESCALE: u32 = 64;

/// The layer with the multipliers of its configuration, and with h made smaller by 2^`rescale`.
pub(super) fn apply(
    layer: LayerWeights,
    config: &Config,
    scope: &Scope<'_>,
    family: Option<&'static Family>,
    rescale: i32,
) -> Result<LayerWeights> {
    if rescale.unsigned_abs() > MAX_RESCALE {
        let why = format!("{rescale} given, expected at most {MAX_RESCALE} powers of two");
        return Err(refused(&layer, why));
    }
    if rescale != 0 && layer.row_params().steps.norm.is_some() {
        let why =
            "a norm of h makes a smaller h as large again; leave LoadOptions::with_rescale out";
        return Err(refused(&layer, why.into()));
    }
    let weights = layer.gate_up.iter().chain(&layer.down);
    let factor = weights.map(|w| w.factor()).find(|f| *f != 1.0);
    let biases = [&layer.gate_bias, &layer.up_bias, &layer.down_bias];
    if let (Some(factor), Some(bias)) = (factor, biases.into_iter().flatten().next()) {
        let why = format!(
            "a weight has the factor {factor}; whether {} has it too is not said",
            bias.name
        );
        return Err(refused(&layer, why));
    }
    let [of_gate, of_down] = multipliers(config, scope, family)?;
    let smaller = 2f32.powi(rescale);
    let mut layer = if of_gate == 1.0 && rescale == 0 { layer } else { apart(layer)? };
    layer.rescale = rescale;
    for (i, weight) in layer.gate_up.iter_mut().enumerate() {
        *weight = weight.clone().scaled_by(if i == 0 { of_gate } else { 1.0 / smaller });
    }
    layer.down = layer.down.map(|down| down.scaled_by(of_down * smaller));
    let multiply = |bias: &mut Option<super::Bias>, by: f32| {
        bias.iter_mut().flat_map(|b| &mut b.values).for_each(|v| *v *= by);
    };
    multiply(&mut layer.gate_bias, of_gate);
    multiply(&mut layer.up_bias, 1.0 / smaller);
    // The bias is of y, which is as large as before.
    multiply(&mut layer.down_bias, of_down);
    Ok(layer)
}

fn refused(layer: &LayerWeights, why: String) -> FormatError {
    FormatError::Contradiction { path: layer.path.clone(), what: "factors of the weights", why }
}

/// The layer with gate and up in two tensors.
fn apart(mut layer: LayerWeights) -> Result<LayerWeights> {
    let [both] = layer.gate_up.as_slice() else { return Ok(layer) };
    let halves = match (layer.layout.orientation, layer.layout.arrangement) {
        (Orientation::OutIn, Arrangement::PackedGateFirst) => both.row_halves(),
        (Orientation::OutIn, Arrangement::PackedUpFirst) => both.row_halves().map(|[u, g]| [g, u]),
        _ => None,
    };
    let Some(halves) = halves else {
        let why =
            format!("gate and up share {}, {}, and cannot be told apart", both.name, layer.layout);
        return Err(refused(&layer, why));
    };
    layer.gate_up = halves.into();
    layer.layout.arrangement = Arrangement::Separate;
    Ok(layer)
}

/// What the configuration multiplies the gate's and the down projection's products by.
fn multipliers(
    config: &Config,
    scope: &Scope<'_>,
    family: Option<&'static Family>,
) -> Result<[f32; 2]> {
    let keys = family.map_or(&[][..], |f| f.effects).iter().filter_map(|effect| match *effect {
        Effect::Multipliers(key) => scope.get(key),
        _ => None,
    });
    let mut out = [1.0; 2];
    for (key, value) in keys {
        let of = |at: usize| number(value.get(at)?).map(|m| m as f32).filter(|m| m.is_finite());
        let two = value.as_array().is_some_and(|list| list.len() == 2);
        let (true, Some(gate), Some(down)) = (two, of(0), of(1)) else {
            let path = config.path().to_owned();
            let why = format!("has `{key}` = {value}, expected two numbers, of gate and down");
            return Err(FormatError::Configuration { path, why: clip(&why, 200) });
        };
        out = [gate, down];
    }
    Ok(out)
}
