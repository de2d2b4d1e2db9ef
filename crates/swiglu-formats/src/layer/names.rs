//! Naming conventions: what a tensor's name says about its place.

/// What a tensor is in its layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Gate,
    Up,
    Down,
    GateUp,
}

/// Weight or bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Weight,
    Bias,
}

/// Who names tensors this way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Convention {
    /// `layers.{i}.mlp.gate_proj.weight`: torch linear layers.
    HuggingFace,
    /// `layers.{i}.mlp.experts.{e}.gate_proj.weight`.
    HuggingFaceExperts,
    /// `layers.{i}.mlp.experts.gate_up_proj`: one 3-D parameter for all experts.
    HuggingFaceStacked,
    /// `layers.{i}.mlp.experts.gate_up_proj_blocks`, and `_scales`; biases as [`Self::HuggingFaceStacked`].
    HuggingFaceMxfp4,
    /// `layers.{i}.block_sparse_moe.experts.{e}.w1.weight`.
    Mixtral,
    /// `blk.{i}.ffn_gate.weight`.
    LlamaCpp,
    /// `blk.{i}.ffn_gate.{e}.weight`.
    LlamaCppExperts,
    /// `blk.{i}.ffn_gate_exps.weight`: 3-D.
    LlamaCppStacked,
    /// `layers.{i}.feed_forward.w1.weight`.
    Meta,
    /// `layers.{i}.w1`: an export without a stated orientation.
    Plain,
}

/// All conventions, for errors.
pub(super) const TRIED: &str = "Hugging Face (layers.N.mlp.{gate,up,down,gate_up}_proj, \
     .experts.E.*_proj, block_sparse_moe.experts.E.w{1,2,3}), llama.cpp (blk.N.ffn_{gate,up,down}), \
     Meta (layers.N.feed_forward.w{1,2,3}) and layers.N.w{1,2,3}; give explicit tensor names for \
     anything else";

impl Convention {
    /// For descriptions.
    pub(super) fn name(self) -> &'static str {
        match self {
            Convention::HuggingFace => "Hugging Face names",
            Convention::HuggingFaceExperts => "Hugging Face expert names",
            Convention::HuggingFaceStacked => "Hugging Face stacked experts",
            Convention::HuggingFaceMxfp4 => "Hugging Face MXFP4 experts",
            Convention::Mixtral => "Mixtral names",
            Convention::LlamaCpp => "llama.cpp names",
            Convention::LlamaCppExperts => "llama.cpp expert names",
            Convention::LlamaCppStacked => "llama.cpp stacked experts",
            Convention::Meta => "Meta Llama names",
            Convention::Plain => "layers.N.w1 names",
        }
    }

    /// Whether the layer is one of several experts.
    pub(super) fn has_experts(self) -> bool {
        !matches!(
            self,
            Convention::HuggingFace | Convention::LlamaCpp | Convention::Meta | Convention::Plain
        )
    }
}

/// A tensor's place, read from its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place<'a> {
    pub(super) name: &'a str,
    /// What stands before the layer: several blocks of one model may count layers.
    pub(super) prefix: &'a str,
    pub(super) convention: Convention,
    pub(super) layer: usize,
    pub(super) expert: Option<usize>,
    pub(super) role: Role,
    pub(super) part: Part,
}

/// Prefixes of the language model, preferred over an encoder that also counts layers.
pub(super) const LANGUAGE_PREFIXES: [&str; 8] = [
    "",
    "model.",
    "model.language_model.",
    "model.language_model.model.",
    "language_model.",
    "language_model.model.",
    "transformer.",
    "transformer.encoder.",
];

/// Reads a name; `None` if it is no gated feed-forward tensor of a known convention.
pub(super) fn classify(name: &str) -> Option<Place<'_>> {
    let (prefix, layer, rest, blk) = match after_marker(name, "blk.") {
        Some((prefix, layer, rest)) => (prefix, layer, rest, true),
        None => {
            let (prefix, layer, rest) = after_marker(name, "layers.")?;
            (prefix, layer, rest, false)
        }
    };
    let (convention, expert, role, part) = if blk { llama_cpp(rest) } else { torch(rest) }?;
    Some(Place { name, prefix, convention, layer, expert, role, part })
}

/// Splits at the last whole-word `marker` followed by a number.
fn after_marker<'a>(name: &'a str, marker: &str) -> Option<(&'a str, usize, &'a str)> {
    let at = name.rfind(marker)?;
    let (prefix, rest) = name.split_at(at);
    if !(prefix.is_empty() || prefix.ends_with('.')) {
        return None;
    }
    let (number, rest) = rest[marker.len()..].split_once('.')?;
    Some((prefix, parse_index(number)?, rest))
}

/// A number as conventions write it: digits, no sign, no leading zero.
fn parse_index(text: &str) -> Option<usize> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

type Found = (Convention, Option<usize>, Role, Part);

fn torch(rest: &str) -> Option<Found> {
    if let Some(rest) = rest.strip_prefix("block_sparse_moe.experts.") {
        let (expert, rest) = rest.split_once('.')?;
        let (role, part) = numbered(rest)?;
        return Some((Convention::Mixtral, Some(parse_index(expert)?), role, part));
    }
    if let Some(rest) = rest.strip_prefix("mlp.").or_else(|| rest.strip_prefix("feed_forward.")) {
        if let Some(rest) = rest.strip_prefix("experts.") {
            return experts(rest);
        }
        if let Some((role, part)) = projection(rest) {
            return Some((Convention::HuggingFace, None, role, part));
        }
    }
    if let Some(rest) = rest.strip_prefix("feed_forward.") {
        let (role, part) = numbered(rest)?;
        return Some((Convention::Meta, None, role, part));
    }
    let (role, part) = numbered(rest).or_else(|| Some((numbered_role(rest)?, Part::Weight)))?;
    Some((Convention::Plain, None, role, part))
}

fn experts(rest: &str) -> Option<Found> {
    let stacked = |role, part| Some((Convention::HuggingFaceStacked, None, role, part));
    match rest {
        "gate_up_proj" => stacked(Role::GateUp, Part::Weight),
        "gate_up_proj_bias" => stacked(Role::GateUp, Part::Bias),
        "gate_proj" => stacked(Role::Gate, Part::Weight),
        "up_proj" => stacked(Role::Up, Part::Weight),
        "down_proj" => stacked(Role::Down, Part::Weight),
        "down_proj_bias" => stacked(Role::Down, Part::Bias),
        "gate_up_proj_blocks" => {
            Some((Convention::HuggingFaceMxfp4, None, Role::GateUp, Part::Weight))
        }
        "down_proj_blocks" => Some((Convention::HuggingFaceMxfp4, None, Role::Down, Part::Weight)),
        _ => {
            let (expert, rest) = rest.split_once('.')?;
            let expert = parse_index(expert)?;
            if let Some((role, part)) = projection(rest) {
                return Some((Convention::HuggingFaceExperts, Some(expert), role, part));
            }
            let (role, part) = numbered(rest)?;
            Some((Convention::Mixtral, Some(expert), role, part))
        }
    }
}

fn part(text: &str) -> Option<Part> {
    match text {
        "weight" => Some(Part::Weight),
        "bias" => Some(Part::Bias),
        _ => None,
    }
}

fn projection(rest: &str) -> Option<(Role, Part)> {
    let (role, rest) = rest.split_once('.')?;
    let role = match role {
        "gate_proj" => Role::Gate,
        "up_proj" => Role::Up,
        "down_proj" => Role::Down,
        "gate_up_proj" => Role::GateUp,
        _ => return None,
    };
    Some((role, part(rest)?))
}

/// w1 is the gate, w3 the up, w2 the down projection.
fn numbered_role(text: &str) -> Option<Role> {
    match text {
        "w1" => Some(Role::Gate),
        "w2" => Some(Role::Down),
        "w3" => Some(Role::Up),
        _ => None,
    }
}

fn numbered(rest: &str) -> Option<(Role, Part)> {
    let (role, rest) = rest.split_once('.')?;
    Some((numbered_role(role)?, part(rest)?))
}

fn llama_cpp(rest: &str) -> Option<Found> {
    let (role, rest) = rest.strip_prefix("ffn_")?.split_once('.')?;
    let (role, stacked) = match role.strip_suffix("_exps") {
        Some(role) => (role, true),
        None => (role, false),
    };
    let role = match role {
        "gate" => Role::Gate,
        "up" => Role::Up,
        "down" => Role::Down,
        _ => return None,
    };
    if let Some(part) = part(rest) {
        let convention = if stacked { Convention::LlamaCppStacked } else { Convention::LlamaCpp };
        return Some((convention, None, role, part));
    }
    let (expert, rest) = rest.split_once('.')?;
    Some((Convention::LlamaCppExperts, Some(parse_index(expert)?), role, part(rest)?))
}

/// Whether a weight's own name says that it is a torch linear layer, stored `[out, in]`.
pub(super) fn is_linear_weight(name: &str) -> bool {
    const LINEAR: [&str; 9] =
        ["gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2"];
    let mut parts = name.rsplit('.');
    parts.next() == Some("weight") && parts.next().is_some_and(|p| LINEAR.contains(&p))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str) -> Option<(Convention, usize, Option<usize>, Role, Part)> {
        classify(name).map(|p| (p.convention, p.layer, p.expert, p.role, p.part))
    }

    #[test]
    fn every_convention_is_read() {
        use Convention::*;
        use Part::*;
        use Role::*;
        for (name, want) in [
            ("model.layers.3.mlp.gate_proj.weight", (HuggingFace, 3, None, Gate, Weight)),
            ("layers.0.mlp.down_proj.bias", (HuggingFace, 0, None, Down, Bias)),
            ("m.layers.12.mlp.gate_up_proj.weight", (HuggingFace, 12, None, GateUp, Weight)),
            (
                "a.layers.1.mlp.experts.7.up_proj.weight",
                (HuggingFaceExperts, 1, Some(7), Up, Weight),
            ),
            ("a.layers.1.mlp.experts.gate_up_proj", (HuggingFaceStacked, 1, None, GateUp, Weight)),
            ("a.layers.1.mlp.experts.down_proj_bias", (HuggingFaceStacked, 1, None, Down, Bias)),
            (
                "a.layers.1.mlp.experts.gate_up_proj_blocks",
                (HuggingFaceMxfp4, 1, None, GateUp, Weight),
            ),
            ("a.layers.1.mlp.experts.down_proj_blocks", (HuggingFaceMxfp4, 1, None, Down, Weight)),
            ("layers.2.block_sparse_moe.experts.5.w3.weight", (Mixtral, 2, Some(5), Up, Weight)),
            ("blk.28.ffn_gate.weight", (LlamaCpp, 28, None, Gate, Weight)),
            ("blk.28.ffn_down.bias", (LlamaCpp, 28, None, Down, Bias)),
            ("blk.0.ffn_up_exps.weight", (LlamaCppStacked, 0, None, Up, Weight)),
            ("blk.0.ffn_up.4.weight", (LlamaCppExperts, 0, Some(4), Up, Weight)),
            ("layers.0.feed_forward.w2.weight", (Meta, 0, None, Down, Weight)),
            ("layers.9.w1", (Plain, 9, None, Gate, Weight)),
            ("layers.9.w2.weight", (Plain, 9, None, Down, Weight)),
        ] {
            assert_eq!(read(name), Some(want), "{name}");
        }
    }

    #[test]
    fn other_tensors_are_not_mistaken() {
        for name in [
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.shared_expert.gate_proj.weight",
            "model.layers.0.mlp.shared_experts.gate_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.block_sparse_moe.gate.weight",
            "model.layers.x.mlp.gate_proj.weight",
            "model.layers.00.mlp.gate_proj.weight",
            "model.layers.+1.mlp.gate_proj.weight",
            "model.layers.99999999999999999999.mlp.gate_proj.weight",
            "model.sublayers.0.mlp.gate_proj.weight",
            "blk.0.ffn_norm.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.0.ffn_gate_shexp.weight",
            "layers.",
            "blk.",
            "",
        ] {
            assert_eq!(read(name), None, "{name}");
        }
    }
}
