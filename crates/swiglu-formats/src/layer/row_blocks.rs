//! Experts in blocks of rows, as DBRX has them: each weight of all of them is one matrix `[E·H, K]`.

use crate::config::Scope;
use crate::error::{FormatError, Result};
use crate::model::Model;
use crate::tensor::Tensor;

/// How many rows an expert has; none where a stack has an extent for its experts.
pub(super) type Rows = Option<usize>;

/// The rows of an expert, by its configuration: no shape says how many there are.
pub(super) fn rows(model: &Model, scope: &Scope<'_>, weight: &str) -> Result<Rows> {
    let rows = model.tensor(weight)?.shape.first().copied().unwrap_or_default();
    let stated = scope.size(&["ffn_config.ffn_hidden_size", "ffn_hidden_size"]);
    let experts = scope.size(&["ffn_config.moe_num_experts", "moe_num_experts"]);
    let of_count = experts.filter(|&n| n > 0 && rows % n == 0).map(|n| rows / n);
    match (stated, of_count) {
        (Some(a), Some(b)) if a != b => Err(FormatError::Contradiction {
            path: model.path().to_owned(),
            what: "experts in blocks of rows",
            why: format!(
                "{weight} has {rows} rows, of {experts:?} experts with ffn_hidden_size {a}"
            ),
        }),
        (Some(one), _) | (None, Some(one)) => Ok(Some(one)),
        (None, None) => Err(FormatError::Ambiguous {
            path: model.path().to_owned(),
            what: "the experts' rows",
            why: format!("{weight} has {rows} rows, and no configuration says of how many experts"),
            choices: "config.json with ffn_config.moe_num_experts or ffn_config.ffn_hidden_size"
                .into(),
        }),
    }
}

/// A stack of experts `[E, H, K]` of one in blocks of rows.
pub(super) fn stacked(model: &Model, mut tensor: Tensor, rows: Rows) -> Result<Tensor> {
    let Some(one) = rows else { return Ok(tensor) };
    match tensor.shape[..] {
        [all, cols] if one > 0 && all.is_multiple_of(one) => {
            tensor.shape = vec![all / one, one, cols];
            Ok(tensor)
        }
        _ => {
            let expected = format!("[a multiple of {one}, the rows of an expert, columns]");
            Err(FormatError::shape(model.path(), &tensor.name, expected, &tensor.shape))
        }
    }
}
