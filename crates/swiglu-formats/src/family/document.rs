//! The table of families as a page.

use std::fmt::Write;

use swiglu_core::NormKind;

use super::{Blocks, Effect, FAMILIES, Family, Function};

const HEAD: &str = "# Families of models

Written by `cargo run -p swiglu-formats --example families > docs/families.md` from the table in
`crates/swiglu-formats/src/family/table.rs`; a test compares the two.

A layer is computed as its model defines it, or refused. The innermost `model_type` of the part of the
configuration that describes the block (or `general.architecture` of GGUF) decides the family. Whatever
else a configuration says under a key that sounds as if it changed the block (`mlp`, `ffn`, `feed_forward`,
`expert`, `act`, `gate`, `glu`, `clamp`, `limit`, `multiplier`, `sparsity`, `intermediate`, `scale`) is
refused by name unless it is in this table or known to be harmless; so is a tensor of the block that is not
used. `--ignore NAME` computes without it, `--no-config` does without the configuration.

";

/// The page of families, `docs/families.md`.
pub fn page() -> String {
    format!("{HEAD}{}", markdown())
}

/// The table: how each computes the block, what is computed of what is special,
/// and what is refused.
fn markdown() -> String {
    let mut out = String::from(
        "| family | model types and GGUF architectures | activation | gate and up in one tensor | \
         stacked experts | besides |\n|---|---|---|---|---|---|\n",
    );
    for family in FAMILIES {
        let packed = match (family.packed, family.gguf_packed) {
            (Some(order), true) => format!("{order}, also `ffn_up` of GGUF"),
            (Some(order), false) => order.to_string(),
            (None, _) => String::new(),
        };
        let stack = match family.stack {
            Some((orientation, order)) => format!("{orientation}, {order}"),
            None => String::new(),
        };
        let types = family.model_types.iter().chain(family.gguf);
        let types: Vec<String> = types.map(|name| format!("`{name}`")).collect();
        let besides: Vec<String> = family.effects.iter().map(effect).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| {} | {} | {} | {packed} | {stack} | {} |",
            family.name,
            types.join(" "),
            function(family),
            besides.join("; ")
        );
    }
    out
}

fn function(family: &Family) -> String {
    match family.function {
        Function::Named([], default) => format!("as stated, else {default}"),
        Function::Named(keys, default) => format!("`{}`, else {default}", keys.join("`, `")),
        Function::Fixed(name) => format!("{name}, whatever is stated"),
        Function::Flags(flags, default) => {
            let flags: Vec<String> =
                flags.iter().map(|(key, name)| format!("{name} by `{key}`")).collect();
            format!("{}, else {default}", flags.join(", "))
        }
    }
}

fn of(blocks: Blocks) -> &'static str {
    match blocks {
        Blocks::All => "",
        Blocks::Experts => " of experts",
        Blocks::Shared => " of the shared expert",
        Blocks::NotRouted => " of dense blocks and the shared expert",
    }
}

fn effect(effect: &Effect) -> String {
    match *effect {
        Effect::Clamp(key, blocks, default) => {
            let of = of(blocks);
            let default = default.map_or(String::new(), |l| format!(" ({l} without the key)"));
            format!("gate ≤ L and |up| ≤ L{of} by `{key}`{default}")
        }
        Effect::ClampBehind(key, blocks) => {
            format!("f(gate) ≤ L and |up| ≤ L{} by `{key}`", of(blocks))
        }
        Effect::Sparsity(fractions, deviations, (fraction, first)) => format!(
            "the gate keeps what is above mean + z·σ of its row, less that, by `{fractions}` or \
             `{deviations}` ({fraction} of the first {first} layers without them)"
        ),
        Effect::Norm(module, kind, epsilon) => {
            let (name, by) = match kind {
                NormKind::Rms => ("an RMS norm", "without `rms_norm_eps`"),
                _ => ("a layer norm", "always"),
            };
            format!("{name} of h where there is a `{module}` (ε {epsilon} {by})")
        }
        Effect::Alpha(key) => format!("α by `{key}`"),
        Effect::Multipliers(key) => format!("gate and down multiplied by `{key}`"),
        Effect::Refused(key, why) => format!("refused by `{key}`: {why}"),
    }
}
