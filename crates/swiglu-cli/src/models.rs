//! The feed-forward sizes of common models, and of those in files.

use std::path::Path;

use anyhow::bail;
use swiglu_formats::{Contents, LoadOptions};

use crate::terminal::by_options;

/// Names as they are given, with K and H.
pub(crate) const MODELS: [(&str, [usize; 2]); 5] = [
    ("qwen2.5-0.5b", [896, 4864]),
    ("llama-3.2-1b", [2048, 8192]),
    ("llama-3-8b", [4096, 14336]),
    ("qwen2.5-32b", [5120, 27648]),
    ("llama-3-70b", [8192, 28672]),
];

/// K and H of a model by its name, in whatever case.
pub(crate) fn named(name: &str) -> Option<[usize; 2]> {
    MODELS.into_iter().find_map(|(known, size)| known.eq_ignore_ascii_case(name).then_some(size))
}

/// What the feed-forward blocks of a file or directory are that can be computed, and why one of the others cannot.
pub(crate) fn blocks(model: &str) -> anyhow::Result<(Vec<Contents>, Option<String>)> {
    let path = Path::new(model);
    if !path.exists() {
        let names: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
        let names = names.join(", ");
        bail!("--for {model}: there is no such file or directory, nor is it one of {names}");
    }
    let found = swiglu_formats::inspect(path, &LoadOptions::default())?;
    let refusals =
        found.refused.iter().chain(found.blocks.iter().filter_map(|b| b.refused.as_ref()));
    let mut refusal = refusals.map(|text| by_options(text)).next();
    let mut all: Vec<Contents> = Vec::new();
    for contents in found.blocks.into_iter().filter_map(|block| block.contents) {
        match &contents.row_steps {
            Some(steps) => {
                refusal.get_or_insert_with(|| format!("no CUDA kernel computes {steps}"));
            }
            None => all.push(contents),
        }
    }
    Ok((all, refusal))
}

/// Each K and H of a model's blocks, once.
pub(crate) fn sizes(model: &str) -> anyhow::Result<Vec<[usize; 2]>> {
    if let Some(size) = named(model) {
        return Ok(vec![size]);
    }
    let (blocks, refusal) = blocks(model)?;
    let mut sizes: Vec<[usize; 2]> = blocks.iter().map(|b| [b.hidden, b.intermediate]).collect();
    sizes.sort_unstable();
    sizes.dedup();
    match refusal {
        _ if !sizes.is_empty() => Ok(sizes),
        Some(why) => bail!("--for {model}: {why}"),
        None => bail!("--for {model}: it has no feed-forward block"),
    }
}
