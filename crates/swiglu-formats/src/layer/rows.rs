//! What a block computes from whole rows between its products: from the configuration, and the tensors
//! of a norm inside the block.

use swiglu_core::{OwnedRowParams, RowSteps};

use super::block::Chosen;
use super::weights::Bias;
use super::{LoadOptions, beside};
use crate::config::{Config, Scope};
use crate::error::{FormatError, Result, clip};
use crate::family::{self, Family};
use crate::model::{FileFormat, Model};

/// The row steps of a block, with weight and bias of its norm.
pub(super) struct Found {
    steps: RowSteps,
    values: [Option<Bias>; 2],
}

/// The same of a loaded layer.
#[derive(Debug, Clone, Default)]
pub(super) struct Rows {
    /// The tensors of the norm.
    pub(super) names: Vec<String>,
    pub(super) params: OwnedRowParams,
}

/// The row steps of a block.
pub(super) fn find(
    model: &Model,
    config: &Config,
    (scope, family): (&Scope<'_>, Option<&'static Family>),
    (chosen, number): (&Chosen, usize),
    options: &LoadOptions,
) -> Result<Found> {
    let not_understood = |why: String| {
        let (path, why) = (config.path().to_owned(), clip(&why, 300));
        FormatError::Configuration { path, why }
    };
    let ignored = &options.ignore;
    let sparsity =
        family::stated_sparsity(family, scope, number, ignored).map_err(not_understood)?;
    let mut steps = sparsity.map_or(RowSteps::NONE, |s| RowSteps::NONE.with_sparsity(s));
    let mut values: [Option<Bias>; 2] = [None, None];
    for stated in family::stated_norms(family, scope).map_err(not_understood)? {
        let is_ignored = |name: &str| ignored.iter().any(|i| i == name);
        // What llama.cpp calls the block is the module's prefix.
        let within = match model.format() {
            FileFormat::Gguf => stated.module.strip_prefix("ffn_").unwrap_or(stated.module),
            _ => stated.module,
        };
        let names = model.names();
        let of_module = |name: &&str| {
            let module = name.strip_suffix(".weight");
            let module = module.and_then(|module| module.strip_suffix(stated.module));
            module.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let weight = format!("{}{within}.weight", chosen.block);
        if names.binary_search(&weight.as_str()).is_ok() {
            if is_ignored(&weight) {
                continue;
            }
            let bias = format!("{}{within}.bias", chosen.block);
            let bias = names.binary_search(&bias.as_str()).is_ok().then_some(bias);
            steps = steps.with_norm(stated.norm);
            values = [Some(read(model, weight)?), bias.map(|bias| read(model, bias)).transpose()?];
        } else if let Some(elsewhere) =
            beside::with_prefix(&names, &chosen.block).filter(of_module).find(|n| !is_ignored(n))
        {
            return Err(FormatError::Unused {
                path: model.path().to_owned(),
                tensor: clip(elsewhere, 200),
                why: "a norm inside a block, and which one cannot be told from the given names: \
                      name tensors that have their block's prefix",
            });
        }
    }
    Ok(Found { steps, values })
}

fn read(model: &Model, name: String) -> Result<Bias> {
    let tensor = model.tensor(&name)?;
    if tensor.shape.len() != 1 {
        return Err(FormatError::shape(model.path(), &name, "one extent", &tensor.shape));
    }
    Ok(Bias { values: tensor.to_vec_f32(model.path())?, name })
}

impl Found {
    /// The parameters, of which each has a value for every intermediate feature.
    pub(super) fn checked(self, model: &Model, intermediate: usize) -> Result<Rows> {
        for of in self.values.iter().flatten() {
            if of.values.len() != intermediate {
                let (given, expected) = ([of.values.len()], format!("[{intermediate}]"));
                return Err(FormatError::shape(model.path(), &of.name, expected, &given));
            }
        }
        let names = self.names().map(str::to_owned).collect();
        let [weight, bias] = self.values.map(|of| of.map(|of| of.values));
        Ok(Rows { names, params: OwnedRowParams::new(self.steps, weight, bias) })
    }

    /// The tensors of the norm.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.values.iter().flatten().map(|of| of.name.as_str())
    }
}
