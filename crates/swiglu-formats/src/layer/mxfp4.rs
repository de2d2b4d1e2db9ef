//! Experts in MXFP4, as gpt-oss has them: bytes of two e2m1 values, the lower half first, 16 in a block
//! along the inputs, and one power of two for each block in a second tensor.

use std::sync::Arc;

use super::beside::Beside;
use super::select;
use crate::coded::{Coded, Codes, e8m0_to_f32};
use crate::error::{FormatError, Result};
use crate::model::Model;
use crate::stored::StoredType;
use crate::tensor::{StoredMatrix, Tensor};

/// Bytes of a block.
const BLOCK_BYTES: usize = 16;
/// Values of a block.
const BLOCK: usize = 32;

/// Whether a tensor has the name of blocks.
pub(super) fn is_blocks(tensor: &Tensor) -> bool {
    tensor.name.ends_with("blocks")
}

/// Blocks `[rows, blocks of a row, 16]`, or a stack of these, with their scales.
pub(super) fn matrix(
    model: &Model,
    tensor: Tensor,
    beside: &Beside<'_>,
    expert: Option<usize>,
) -> Result<StoredMatrix> {
    let path = model.path();
    let name = tensor.name.clone();
    let refused = |why: String| FormatError::Quantization {
        path: path.to_owned(),
        tensor: name.clone(),
        dtype: "MXFP4".into(),
        why,
    };
    let Some(scales) = beside.tensor("scales")? else {
        return Err(refused(
            "no scales; expected them under this name with `scales` at its end".into(),
        ));
    };
    if let Some(other) = beside.other_than(&[&["blocks", "scales", "bias"]]) {
        let why = format!("{other} beside it is not understood, and may change what it means");
        return Err(refused(why));
    }
    if !matches!(scales.stored, StoredType::U8 | StoredType::F8E8m0) {
        return Err(refused(format!("{} is {}; expected U8", scales.name, scales.stored)));
    }
    let wrong = |tensor: &Tensor, expected: &str| {
        FormatError::shape(path, &tensor.name, expected, &tensor.shape)
    };
    let rank = tensor.shape.len();
    if !(3..=4).contains(&rank) || tensor.shape[rank - 1] != BLOCK_BYTES {
        return Err(wrong(&tensor, "[rows, blocks, 16] or a stack of these"));
    }
    if scales.shape != tensor.shape[..rank - 1] {
        let expected = format!("{:?}, one for each block", &tensor.shape[..rank - 1]);
        return Err(wrong(&scales, &expected));
    }
    let tensor = select(model, tensor, 3, expert)?;
    let scales = if rank == 4 { select(model, scales, 2, expert)? } else { scales };
    let [rows, blocks, _] = tensor.shape[..] else {
        return Err(wrong(&tensor, "[rows, blocks, 16]"));
    };
    if rows == 0 || blocks == 0 {
        return Err(wrong(&tensor, "at least one block"));
    }
    let coded = Coded { codes: Codes::F4E2m1, group: [1, BLOCK], offsets: false };
    let powers: Vec<f32> = scales.data.iter().map(|&code| e8m0_to_f32(code)).collect();
    Ok(StoredMatrix {
        name,
        stored: StoredType::Coded(coded),
        rows,
        cols: blocks * BLOCK,
        data: tensor.data,
        scales: Arc::from(powers),
        offsets: Arc::new([]),
        factor: 1.0,
    })
}
