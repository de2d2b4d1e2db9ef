//! Weights of 4 and 8 bits and the scales beside them.
//!
//! The names: `weight_scale` of compressed-tensors and ModelOpt, one value, one for each output feature
//! or one for each block; `weight_scale_inv` of DeepSeek, one for each 128 × 128, which is multiplied in
//! spite of its name (the reference's `weight_dequant`); `scale_weight` of ComfyUI; `SCB` of bitsandbytes,
//! 127 times the scale of a row; `scale` and `scales` of others. Scales that are powers of two (E8M0, as
//! `F8_E8M0` or as U8) are one for each 32 inputs (MX), or as the others.
//!
//! Scales of the inputs, and their offsets, quantise activations, which is not done here: the weights are
//! what they are without. They are passed over. Whatever else lies beside a quantised weight is refused.

use std::sync::Arc;

use swiglu_core::QuantizedType;
use swiglu_core::quant::SCALE_BLOCK;

use super::beside::Beside;
use super::row_blocks::{Rows, stacked};
use super::{LoadOptions, foreign, mxfp4, select};
use crate::coded::{Coded, Codes, e8m0_to_f32};
use crate::comfy;
use crate::error::{FormatError, Result};
use crate::model::{FileFormat, Model};
use crate::stored::StoredType;
use crate::tensor::{StoredMatrix, Tensor};

/// What follows the weight's name without its `weight`, or the name of a stack of experts.
const SCALES: [&str; 7] =
    ["weight_scale", "weight_scale_inv", "scale_weight", "scale", "scales", "scale_inv", "SCB"];
/// Subtracted from the codes before they are scaled.
const OFFSETS: [&str; 3] = ["weight_offset", "weight_zero_point", "zero_point"];
/// Of the inputs, before they are multiplied (ModelOpt): a part of what the layer computes.
const OF_INPUTS: [&str; 1] = ["pre_quant_scale"];
/// The weight itself, and what does not change its values.
const HARMLESS: [&str; 15] = [
    "weight",
    "bias",
    "input_scale",
    "input_scales",
    "input_scale_inv",
    "input_scale_ub",
    "input_zero_point",
    "input_offset",
    "input_global_scale",
    "scale_input",
    "act_scale",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
];
/// Notes about the codes, whose content decides.
const FORMATS: [&str; 2] = ["weight_format", "comfy_quant"];
/// Inputs that share a scale in the MX formats.
const MX_GROUP: usize = 32;

/// A weight by name, of one expert where it is a stack, with all that lies beside it.
pub(super) fn weight(
    model: &Model,
    name: &str,
    rows: Rows,
    options: &LoadOptions,
) -> Result<StoredMatrix> {
    let tensor = stacked(model, model.tensor(name)?, rows)?;
    let beside = Beside::new(model, name);
    if let Some(error) = foreign::beside(model, &beside, &tensor) {
        return Err(error);
    }
    match tensor.stored {
        StoredType::U8 if mxfp4::is_blocks(&tensor) => {
            mxfp4::matrix(model, tensor, &beside, options.expert)
        }
        _ if is_coded(&tensor) => Weight { model, tensor, beside, options }.read(),
        _ => plain(model, tensor, &beside, options.expert),
    }
}

/// Whether a weight is codes, which mean nothing without what stands beside them.
pub(super) fn is_coded(weight: &Tensor) -> bool {
    use StoredType::{F8E4m3, F8E5m2, I8, U8};
    matches!(weight.stored, I8 | F8E4m3 | F8E5m2 | U8)
}

/// A weight whose values are what is stored, times a factor that a GGUF file may have for it.
fn plain(
    model: &Model,
    tensor: Tensor,
    beside: &Beside<'_>,
    expert: Option<usize>,
) -> Result<StoredMatrix> {
    let gguf = model.format() == FileFormat::Gguf;
    let linear = tensor.name.ends_with("weight");
    let of_codes: &[&str] = if gguf { &["scale"] } else { &SCALES };
    let found = if linear { beside.tensors(of_codes)? } else { Vec::new() };
    let stack = stack_of(&tensor, expert);
    let matrix = select(model, tensor, 2, expert)?.into_matrix(model.path(), false)?;
    match found.into_iter().next() {
        None => Ok(matrix),
        Some(scale) if gguf => {
            let one = of_expert(model, scale, stack)?;
            match one.to_vec_f32(model.path())?[..] {
                [factor] => Ok(matrix.scaled_by(factor)),
                _ => {
                    let expected = "one factor, or one for each expert of a stack";
                    Err(FormatError::shape(model.path(), &one.name, expected, &one.shape))
                }
            }
        }
        Some(scale) => Err(FormatError::Quantization {
            path: model.path().to_owned(),
            tensor: matrix.name,
            dtype: matrix.stored.to_string(),
            why: format!("{} is a scale; expected it beside codes of 4 or 8 bits", scale.name),
        }),
    }
}

/// The expert and how many there are, where a weight is a stack.
fn stack_of(weight: &Tensor, expert: Option<usize>) -> Option<[usize; 2]> {
    let count = weight.shape.first().filter(|_| weight.shape.len() == 3);
    Some([expert?, *count?])
}

/// What a stack of scales has for an expert; one scale is for all.
fn of_expert(model: &Model, scale: Tensor, stack: Option<[usize; 2]>) -> Result<Tensor> {
    match stack {
        Some([expert, count]) if scale.shape.iter().any(|&n| n != 1) => {
            if scale.shape[0] != count {
                let expected = format!("one, or a stack for {count} experts");
                return Err(FormatError::shape(model.path(), &scale.name, expected, &scale.shape));
            }
            scale.entry(expert, model.path())
        }
        _ => Ok(scale),
    }
}

/// What a weight's module is in, whatever the numbers of its layer and expert.
#[derive(PartialEq, Eq)]
struct Container<'a>(Vec<Option<&'a str>>);

impl<'a> Container<'a> {
    fn of(module: &'a str) -> Self {
        let parts = module.rsplit('.').skip(1);
        let number = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        Self(parts.map(|part| if number(part) { None } else { Some(part) }).collect())
    }
}

/// Codes and what lies beside them.
struct Weight<'a> {
    model: &'a Model,
    tensor: Tensor,
    beside: Beside<'a>,
    options: &'a LoadOptions,
}

impl Weight<'_> {
    fn refused(&self, why: String) -> FormatError {
        FormatError::Quantization {
            path: self.model.path().to_owned(),
            tensor: self.tensor.name.clone(),
            dtype: self.tensor.stored.to_string(),
            why,
        }
    }

    fn shape(&self, tensor: &Tensor, expected: &str) -> FormatError {
        FormatError::shape(self.model.path(), &tensor.name, expected, &tensor.shape)
    }

    fn read(self) -> Result<StoredMatrix> {
        self.refuse_others()?;
        let scale = self.scale()?;
        let rank = self.tensor.shape.len();
        if !(2..=3).contains(&rank) {
            return Err(self.shape(&self.tensor, "two extents, or a stack of experts"));
        }
        let expert = self.options.expert;
        let stack = stack_of(&self.tensor, expert);
        let tensor = select(self.model, self.tensor.clone(), 2, expert)?;
        let scale = scale.map(|scale| of_expert(self.model, scale, stack)).transpose()?;
        let [rows, width] = tensor.shape[..] else {
            return Err(self.shape(&tensor, "two extents"));
        };
        if rows == 0 || width == 0 {
            return Err(self.shape(&tensor, "at least one input and one output feature"));
        }
        let codes = self.codes([rows, width], scale.as_ref())?;
        let cols = width * codes.size().0;
        let (group, scales) = match &scale {
            Some(scale) => self.grouped(codes, [rows, cols], scale)?,
            // A plain cast.
            None => ([1, usize::MAX], vec![1.0; rows]),
        };
        let offsets = self.offsets(stack, scales.len())?;
        let coded = Coded { codes, group, offsets: !offsets.is_empty() };
        Ok(StoredMatrix {
            name: tensor.name,
            stored: kernel_type(coded).map_or(StoredType::Coded(coded), StoredType::Scaled),
            rows,
            cols,
            data: tensor.data,
            scales: Arc::from(scales),
            offsets: Arc::from(offsets),
            factor: 1.0,
        })
    }

    /// Refuses a tensor beside the weight that is not understood.
    fn refuse_others(&self) -> Result<()> {
        if let [inputs, ..] = self.beside.tensors(&OF_INPUTS)?.as_slice() {
            let why =
                format!("{} scales the inputs; expected scales of weights alone", inputs.name);
            return Err(self.refused(why));
        }
        if let Some(format) = self.beside.tensor("weight_format")?
            && format.data.iter().any(|&byte| byte != 0)
        {
            let why = format!("{} is not 0, that of rows; expected rows of codes", format.name);
            return Err(self.refused(why));
        }
        if let Some(format) = self.beside.tensor("comfy_quant")? {
            let stated: serde_json::Value =
                serde_json::from_slice(&format.data).unwrap_or_default();
            if let Some(why) = comfy::refusal(&stated) {
                return Err(self.refused(format!("{} {why}", format.name)));
            }
        } else {
            let scaled = self.beside.names(|rest| SCALES.contains(&rest)).next().is_some();
            let mut notes = self.model.notes(&self.tensor.name).iter();
            if let Some(why) = notes.find_map(|n| n.refusal(&self.tensor.name, scaled)) {
                return Err(self.refused(why));
            }
        }
        match self.beside.other_than(&[&SCALES, &OFFSETS, &HARMLESS, &FORMATS]) {
            None => Ok(()),
            Some(other) => {
                let why = format!(
                    "{} beside it is not understood, and may change what it means",
                    crate::error::clip(other, 200)
                );
                Err(self.refused(why))
            }
        }
    }

    /// The scales; none for a plain cast to 8 bits, where that is what the caller says.
    fn scale(&self) -> Result<Option<Tensor>> {
        let found = self.beside.tensors(&SCALES)?;
        let float = matches!(self.tensor.stored, StoredType::F8E4m3 | StoredType::F8E5m2);
        match found.as_slice() {
            [one] => Ok(Some(one.clone())),
            [] if let Some([missing, other]) = self.scale_of_another() => {
                let why = format!(
                    "its scale {missing} is missing, and {other} is there: the checkpoint is not \
                     whole, fetch or write it again"
                );
                Err(self.refused(why))
            }
            [] if float && self.options.plain_fp8 => Ok(None),
            [] => {
                let plain = if float {
                    "; if the codes are the values, a plain cast, say LoadOptions::with_plain_fp8"
                } else {
                    ""
                };
                let names = SCALES[..5].join(", ");
                let why = format!("no scales beside it, called one of {names}{plain}");
                Err(self.refused(why))
            }
            [one, other, ..] => {
                Err(self.refused(format!("scales in both {} and {}", one.name, other.name)))
            }
        }
    }

    /// What this weight's scale would be called, and that of another weight of this block, or of the block in
    /// other layers and experts.
    fn scale_of_another(&self) -> Option<[String; 2]> {
        let name = &self.tensor.name;
        let own = Container::of(name.strip_suffix(".weight").unwrap_or(name));
        // The nearest says most.
        let common =
            |other: &str| other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        let scales = self.model.names().into_iter().filter_map(|other| {
            let of = |scale: &&str| {
                let weight = other.strip_suffix(scale)?.strip_suffix(['.', '_'])?;
                (Container::of(weight) == own).then_some(())
            };
            SCALES.into_iter().find(|scale| of(scale).is_some()).map(|scale| (other, scale))
        });
        let (other, scale) = scales.max_by_key(|(other, _)| common(other))?;
        let missing = match name.strip_suffix("weight") {
            Some(base) => format!("{base}{scale}"),
            None => format!("{name}_{scale}"),
        };
        Some([missing, other.to_owned()].map(|name| crate::error::clip(&name, 200)))
    }

    /// What the bytes are: two codes of 4 bits where the scales, for each 32 of these, say so.
    fn codes(&self, [rows, width]: [usize; 2], scale: Option<&Tensor>) -> Result<Codes> {
        let halves = |scale: &Tensor| {
            let powers: &[StoredType] = match self.tensor.stored {
                StoredType::U8 => &[StoredType::F8E8m0, StoredType::U8],
                _ => &[StoredType::F8E8m0],
            };
            width.is_multiple_of(MX_GROUP / 2)
                && scale.shape == [rows, width / (MX_GROUP / 2)]
                && powers.contains(&scale.stored)
        };
        match (&self.tensor.stored, scale) {
            (StoredType::U8 | StoredType::I8, Some(scale)) if halves(scale) => Ok(Codes::F4E2m1),
            (StoredType::I8, _) => Ok(Codes::I8),
            (StoredType::F8E4m3, _) => Ok(Codes::F8E4m3),
            (StoredType::F8E5m2, _) => Ok(Codes::F8E5m2),
            (other, scale) => {
                let one = scale.is_some_and(|s| s.shape.iter().product::<usize>() == 1);
                let seen =
                    scale.map_or("no scales".into(), |s| format!("{} {:?}", s.name, s.shape));
                let (name, dtype) = (&self.tensor.name, other.to_string());
                Err(foreign::packed(self.model, name, &dtype, &seen, one))
            }
        }
    }

    /// The scales as numbers, and how many rows and columns share one.
    fn grouped(
        &self,
        codes: Codes,
        [rows, cols]: [usize; 2],
        scale: &Tensor,
    ) -> Result<([usize; 2], Vec<f32>)> {
        let mut values = self.numbers(scale)?;
        let stated = scale_block(self.model)?;
        let stated = stated.as_deref();
        let per_block = |[down, across]: [usize; 2]| {
            down > 0 && across > 0 && scale.shape == [rows.div_ceil(down), cols.div_ceil(across)]
        };
        let power = matches!(scale.stored, StoredType::U8 | StoredType::F8E8m0);
        let group = match scale.shape[..] {
            _ if values.len() == 1 => {
                // One for all: the same for every row.
                values = vec![values[0]; rows];
                [1, usize::MAX]
            }
            [n] | [n, 1] if n == rows => [1, usize::MAX],
            [_, _] if power && per_block([1, MX_GROUP]) && cols.is_multiple_of(MX_GROUP) => {
                [1, MX_GROUP]
            }
            [_, _] => {
                let block = match stated {
                    Some(&[down, across]) => {
                        [down, across].map(|n| usize::try_from(n).unwrap_or(0))
                    }
                    // Integers in blocks have no usual size.
                    None if codes != Codes::I8 => [SCALE_BLOCK; 2],
                    _ => [0; 2],
                };
                if !per_block(block) {
                    return Err(self.misfit(codes, [rows, cols], scale, stated));
                }
                block
            }
            _ => return Err(self.misfit(codes, [rows, cols], scale, stated)),
        };
        if scale.stored == StoredType::U8 && group[1] == usize::MAX {
            let why = format!("{} is U8; expected F32, F16, BF16 or F8_E8M0", scale.name);
            return Err(self.refused(why));
        }
        if scale.name.ends_with("SCB") {
            values.iter_mut().for_each(|v| *v = (f64::from(*v) / 127.0) as f32);
        }
        Ok((group, values))
    }

    fn numbers(&self, scale: &Tensor) -> Result<Vec<f32>> {
        match scale.stored {
            StoredType::U8 | StoredType::F8E8m0 => {
                Ok(scale.data.iter().map(|&code| e8m0_to_f32(code)).collect())
            }
            StoredType::F32 | StoredType::F16 | StoredType::Bf16 => {
                scale.to_vec_f32(self.model.path())
            }
            _ => {
                let (name, stored) = (&scale.name, &scale.stored);
                let why = format!("{name} is {stored}; expected F32, F16, BF16 or F8_E8M0");
                Err(self.refused(why))
            }
        }
    }

    fn misfit(
        &self,
        codes: Codes,
        [rows, cols]: [usize; 2],
        scale: &Tensor,
        stated: Option<&[u64]>,
    ) -> FormatError {
        let [down, across] = [rows.div_ceil(SCALE_BLOCK), cols.div_ceil(SCALE_BLOCK)];
        let blocks = match (codes, stated) {
            (_, Some(stated)) => format!(" or one for each block of {stated:?} (config.json)"),
            (Codes::I8, None) => String::new(),
            _ => format!(" or [{down}, {across}], for each {SCALE_BLOCK} × {SCALE_BLOCK}"),
        };
        let name = &self.tensor.name;
        let expected = format!("one scale, [{rows}, 1]{blocks}, of {name} [{rows}, {cols}]");
        self.shape(scale, &expected)
    }

    /// What is subtracted from the codes of each of `count` groups; nothing if it is zero everywhere.
    fn offsets(&self, stack: Option<[usize; 2]>, count: usize) -> Result<Vec<f32>> {
        let found = self.beside.tensors(&OFFSETS)?;
        let mut moved = found.iter().filter(|t| t.data.iter().any(|&byte| byte != 0));
        let Some(offset) = moved.next() else { return Ok(Vec::new()) };
        let refused = |why: &str| Err(self.refused(format!("{} moves zero; {why}", offset.name)));
        if self.tensor.stored != StoredType::I8 {
            return refused("expected that of I8 codes alone");
        }
        if let Some(other) = moved.next() {
            return refused(&format!("so does {}", other.name));
        }
        let offset = of_expert(self.model, offset.clone(), stack)?;
        let values: Vec<f32> = match offset.stored {
            StoredType::I8 => offset.data.iter().map(|b| f32::from(b.cast_signed())).collect(),
            StoredType::F32 | StoredType::F16 | StoredType::Bf16 => {
                offset.to_vec_f32(self.model.path())?
            }
            ref stored => {
                return refused(&format!("it is {stored}, expected I8, F32, F16 or BF16"));
            }
        };
        match values.len() {
            1 => Ok(vec![values[0]; count]),
            n if n == count => Ok(values),
            _ => Err(self.shape(&offset, &format!("one, or one for each of {count} scales"))),
        }
    }
}

/// The type that kernels know it as.
fn kernel_type(coded: Coded) -> Option<QuantizedType> {
    if coded.offsets {
        return None;
    }
    match (coded.codes, coded.group) {
        (Codes::I8, [1, usize::MAX]) => Some(QuantizedType::I8),
        (Codes::F8E4m3, [1, usize::MAX]) => Some(QuantizedType::F8E4m3),
        (Codes::F8E4m3, [SCALE_BLOCK, SCALE_BLOCK]) => Some(QuantizedType::F8E4m3Blocks),
        _ => None,
    }
}

/// `quantization_config.weight_block_size`: rows and columns of weights with one scale.
fn scale_block(model: &Model) -> Result<Option<Vec<u64>>> {
    // Where a configuration cannot be read, who loads the layer has been told or does without it.
    let Ok(config) = model.config() else { return Ok(None) };
    let stated = config.root().get("quantization_config").and_then(|q| q.get("weight_block_size"));
    let Some(value) = stated.filter(|value| !value.is_null()) else { return Ok(None) };
    let sizes = value.as_array().map(|sizes| sizes.iter().map(serde_json::Value::as_u64).collect());
    sizes.flatten().map(Some).ok_or_else(|| FormatError::Configuration {
        path: config.path().to_owned(),
        why: format!("has `weight_block_size` = {value}, expected a list of sizes"),
    })
}
