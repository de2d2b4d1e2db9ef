//! Weights of 8 bits and the scales beside them.
//!
//! The names: `weight_scale` of compressed-tensors and ModelOpt, one value, one for each output feature
//! or one for each block; `weight_scale_inv` of DeepSeek, one for each 128 × 128, which is multiplied in
//! spite of its name (the reference's `weight_dequant`); `scale` and `scales` of others.

use std::sync::Arc;

use swiglu_core::QuantizedType;
use swiglu_core::quant::SCALE_BLOCK;

use super::select;
use crate::error::{FormatError, Result};
use crate::model::Model;
use crate::stored::StoredType;
use crate::tensor::{StoredMatrix, Tensor};

/// What follows the weight's name without its `weight`.
const SCALES: [&str; 4] = ["weight_scale", "weight_scale_inv", "scale", "scales"];
const ZERO_POINTS: [&str; 2] = ["weight_zero_point", "zero_point"];
/// Of the inputs, before they are multiplied (ModelOpt): a part of what the layer computes.
const OF_INPUTS: [&str; 1] = ["pre_quant_scale"];

/// The codes in `tensor` as a matrix with their scales.
pub(super) fn with_scales(
    model: &Model,
    tensor: Tensor,
    expert: Option<usize>,
) -> Result<StoredMatrix> {
    let (name, dtype) = (tensor.name.clone(), tensor.stored.to_string());
    let refused = |why: String| FormatError::Quantization {
        path: model.path().to_owned(),
        tensor: name.clone(),
        dtype: dtype.clone(),
        why,
    };
    let Some(base) = name.strip_suffix("weight") else {
        return Err(refused("scales are found beside names that end in `weight`".into()));
    };
    let beside = |names: &[&str]| -> Result<Vec<Tensor>> {
        let all = model.names();
        let present = names.iter().map(|part| format!("{base}{part}"));
        present
            .filter(|n| all.binary_search(&n.as_str()).is_ok())
            .map(|n| model.tensor(&n))
            .collect()
    };
    let found = beside(&SCALES)?;
    let scale = match found.as_slice() {
        [one] => one.clone(),
        [] => {
            let names = SCALES.map(|part| format!("{base}{part}")).join(", ");
            return Err(refused(format!("no scales; expected one of {names}")));
        }
        [one, other, ..] => {
            return Err(refused(format!("scales in both {} and {}", one.name, other.name)));
        }
    };
    for zeros in beside(&ZERO_POINTS)? {
        let none = zeros.stored.size().is_some() && zeros.data.iter().all(|&byte| byte == 0);
        if !none {
            let why = format!("{} moves zero; expected symmetric codes, scale · code", zeros.name);
            return Err(refused(why));
        }
    }
    if let [inputs, ..] = beside(&OF_INPUTS)?.as_slice() {
        let why = format!("{} scales the inputs; expected scales of weights alone", inputs.name);
        return Err(refused(why));
    }
    let rank = tensor.shape.len();
    if rank != 2 && (rank != 3 || scale.shape.len() != 3) {
        let expected = "two extents, or a stack of experts beside a stack of scales";
        return Err(FormatError::shape(model.path(), &name, expected, &tensor.shape));
    }
    let stack = (rank == 3).then_some(expert).flatten();
    let tensor = if rank == 3 { select(model, tensor, 2, expert)? } else { tensor };
    let scale = match stack {
        Some(_) => select(model, scale, 2, stack)?,
        None => scale,
    };
    let [rows, cols] = tensor.shape[..] else {
        return Err(FormatError::shape(model.path(), &name, "two extents", &tensor.shape));
    };
    if rows == 0 || cols == 0 {
        let expected = "at least one input and one output feature";
        return Err(FormatError::shape(model.path(), &name, expected, &tensor.shape));
    }
    if !matches!(scale.stored, StoredType::F32 | StoredType::F16 | StoredType::Bf16) {
        let why = format!("{} is {}; expected F32, F16 or BF16", scale.name, scale.stored);
        return Err(refused(why));
    }
    let values = scale.to_vec_f32(model.path())?;
    let codes = tensor.stored.clone();
    let (kind, values) = match scale.shape[..] {
        // One for all: the same for every row.
        _ if values.len() == 1 => (rows_kind(&codes), vec![values[0]; rows]),
        [n] | [n, 1] if n == rows => (rows_kind(&codes), values),
        [down, across]
            if codes == StoredType::F8E4m3
                && [down, across] == QuantizedType::F8E4m3Blocks.scales(rows, cols) =>
        {
            let stated = scale_block(model);
            let ours = [SCALE_BLOCK as u64; 2];
            if let Some(stated) = stated.filter(|stated| *stated != ours) {
                let why = format!("blocks of {stated:?} share a scale; expected {ours:?}");
                return Err(refused(why));
            }
            (QuantizedType::F8E4m3Blocks, values)
        }
        _ => {
            let [down, across] = QuantizedType::F8E4m3Blocks.scales(rows, cols);
            let blocks = match codes {
                StoredType::F8E4m3 => {
                    format!(" or [{down}, {across}], for each {SCALE_BLOCK} × {SCALE_BLOCK}")
                }
                _ => String::new(),
            };
            let expected = format!("one scale, [{rows}, 1]{blocks}, of {name} [{rows}, {cols}]");
            return Err(FormatError::shape(model.path(), &scale.name, expected, &scale.shape));
        }
    };
    Ok(StoredMatrix {
        name,
        stored: StoredType::Scaled(kind),
        rows,
        cols,
        data: tensor.data,
        scales: Arc::from(values),
    })
}

/// `quantization_config.weight_block_size`: rows and columns of weights with one scale.
fn scale_block(model: &Model) -> Option<Vec<u64>> {
    // Where a configuration cannot be read, who loads the layer has been told or does without it.
    let config = model.config().ok()?;
    let sizes = config.root().get("quantization_config")?.get("weight_block_size")?.as_array()?;
    sizes.iter().map(serde_json::Value::as_u64).collect()
}

fn rows_kind(codes: &StoredType) -> QuantizedType {
    match codes {
        StoredType::I8 => QuantizedType::I8,
        _ => QuantizedType::F8E4m3,
    }
}
