//! Which layer of a file is read, how, and what of it is refused.

use std::collections::HashMap;

use pyo3::prelude::*;
use swiglu::{CoreError, Element, HostWeights, LoadOptions, TensorNames};

/// Which layer of a file, and how to read it: Python's dictionary with these keys.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Reading {
    pub(crate) layer: usize,
    expert: Option<usize>,
    beside_experts: bool,
    names: HashMap<String, String>,
    orientation: Option<String>,
    arrangement: Option<String>,
    prefix: Option<String>,
    ignore: Vec<String>,
    config: bool,
    rescale: i32,
    plain_fp8: bool,
}

impl Reading {
    pub(crate) fn options(mut self) -> Result<LoadOptions, CoreError> {
        let mut name = |of| self.names.remove(of);
        let mut names = TensorNames::default();
        names.gate = name("gate");
        names.up = name("up");
        names.down = name("down");
        names.gate_up = name("gate_up");
        names.gate_bias = name("gate_bias");
        names.up_bias = name("up_bias");
        names.gate_up_bias = name("gate_up_bias");
        names.down_bias = name("down_bias");
        let mut options = LoadOptions::new(self.layer)
            .with_expert(self.expert)
            .with_names(names)
            .with_orientation(self.orientation.map(|name| name.parse()).transpose()?)
            .with_arrangement(self.arrangement.map(|name| name.parse()).transpose()?)
            .with_rescale(self.rescale);
        options.beside_experts = self.beside_experts;
        options.prefix = self.prefix;
        options.ignore = self.ignore;
        options.no_config = !self.config;
        options.plain_fp8 = self.plain_fp8;
        Ok(options)
    }
}

/// Refuses weights that are not finite once they are rounded to the layer's element type.
pub(crate) fn expect_finite<T: Element>(
    weights: &HostWeights<'_, T>,
    block: bool,
) -> swiglu::Result<()> {
    let rounded = |error| match error {
        CoreError::NonFinite { what, row, col, value } => {
            CoreError::NonFinite { what: format!("{what} as {}", T::DTYPE), row, col, value }
        }
        error => error,
    };
    let gated = match block {
        true => {
            let params = weights.mlp()?;
            params.down.expect_finite("down weight").map_err(rounded)?;
            params.gated
        }
        false => weights.gated_linear()?,
    };
    Ok(gated.weights.expect_finite().map_err(rounded)?)
}
