//! `swiglu inspect`: what a model holds, without computing.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use swiglu_formats::{Block, Inspection, LoadOptions};

use crate::table::{Table, or_dash};
use crate::terminal::{Terminal, Verdict, by_options};

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A safetensors or GGUF file, an index, or a directory with a model in it
    path: PathBuf,
    /// A key of the configuration or a tensor of the block to do without; may be repeated
    #[arg(long, value_name = "NAME")]
    ignore: Vec<String>,
    /// Do without the config.json beside the weights
    #[arg(long)]
    no_config: bool,
}

/// Ends with 0 where every block would be loaded and its activation is known, else with 1.
pub(crate) fn inspect(args: &InspectArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let mut options = LoadOptions::default();
    options.ignore.clone_from(&args.ignore);
    options.no_config = args.no_config;
    let mut found = swiglu_formats::inspect(&args.path, &options)?;
    let mut messages: Vec<&mut String> = found.refused.iter_mut().collect();
    for block in &mut found.blocks {
        messages.extend(&mut block.refused);
        if let Some(contents) = &mut block.contents {
            messages.push(&mut contents.activation_source);
            messages.extend(&mut contents.notes);
        }
    }
    messages.into_iter().for_each(|message| *message = by_options(message));
    terminal.print(&found, show)?;
    let is_known = |block: &Block| block.contents.as_ref().is_some_and(|c| c.activation.is_some());
    Ok(Verdict::from_passed(!found.blocks.is_empty() && found.blocks.iter().all(is_known)))
}

const SHOWN: usize = 8;

/// What a block is: the numbers of experts are said where they are not 0 and all that follow.
fn block(block: &Block) -> String {
    match (block.experts, &block.numbers) {
        (Some(1), Some(number)) => format!("expert {number}"),
        (Some(count), Some(numbers)) if *numbers != format!("0 to {}", count - 1) => {
            format!("experts {numbers}")
        }
        (Some(count), _) => format!("{count} experts"),
        (None, _) => block.kind.to_owned(),
    }
}

fn show(found: &Inspection, terminal: &mut Terminal) -> Result<()> {
    let said = match (&found.architecture, found.family) {
        (Some(name), Some(family)) => format!("`{name}`, of the family {family}"),
        (Some(name), None) => format!("`{name}`, of no family that is known here"),
        (None, _) => "not said".into(),
    };
    let by = found.configuration.as_ref().filter(|path| **path != found.path);
    let by = by.map_or(String::new(), |path| format!(", by {}", path.display()));
    let Inspection { path, format, tensors, .. } = found;
    writeln!(terminal, "file       {} ({format}, {tensors} tensors)", path.display())?;
    writeln!(terminal, "model      {said}{by}")?;
    for defect in found.defects.iter().take(SHOWN) {
        writeln!(terminal, "defect     {defect}")?;
    }
    if let Some(more) = found.defects.len().checked_sub(SHOWN).filter(|&more| more > 0) {
        writeln!(terminal, "           and {more} more")?;
    }
    if let Some(why) = &found.refused {
        return writeln!(terminal, "\nno layer can be loaded: {why}");
    }
    writeln!(terminal)?;
    let contents = |block: &Block| block.contents.clone();
    Table::of(&found.blocks)
        .text("prefix", |b| if b.prefix.is_empty() { "–".to_owned() } else { b.prefix.clone() })
        .text("layers", |b| b.layers.clone())
        .text("block", block)
        .text("size", |b| {
            or_dash(contents(b).map(|c| format!("{} → {}", c.hidden, c.intermediate)))
        })
        .text("types", |b| or_dash(contents(b).map(|c| c.types.join(", "))))
        .text("layout", |b| or_dash(contents(b).map(|c| c.layout)))
        .text("activation", |b| or_dash(contents(b).and_then(|c| c.activation)))
        .print(terminal)?;
    for block in &found.blocks {
        let source = block.contents.as_ref().map(|c| match &c.activation {
            Some(activation) => format!("{activation} ({})", c.activation_source),
            None => format!("the activation is not known: {}", c.activation_source),
        });
        let refused = block.refused.as_ref().map(|why| format!("refused: {why}"));
        let Some(line) = refused.or(source) else { continue };
        let kind = self::block(block);
        writeln!(terminal, "\n{}layers {}, {kind}: {line}", block.prefix, block.layers)?;
        let Some(contents) = &block.contents else { continue };
        if let Some(steps) = &contents.row_steps {
            writeln!(terminal, "  of whole rows: {steps}")?;
        }
        for line in contents.notes.iter().chain(&contents.factors) {
            writeln!(terminal, "  {line}")?;
        }
        if !contents.down {
            writeln!(terminal, "  no down weight: a gated linear layer (run --op gated-linear)")?;
        }
    }
    Ok(())
}
