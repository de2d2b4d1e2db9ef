//! Naming conventions: what a tensor's name says about its place. Half of the file is their table.

use swiglu_core::{Arrangement, Orientation};

/// What a tensor is in its layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Gate,
    Up,
    Down,
    GateUp,
}
use Role::{Down, Gate, GateUp, Up};

/// Weight or bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Weight,
    Bias,
}

/// Which of a layer's blocks a tensor is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// The layer's only one.
    Dense,
    /// One of several, in tensors of its own.
    Expert(usize),
    /// All experts, in one tensor.
    Stack,
    /// The one beside experts that every token passes.
    Shared,
}

/// How a tensor's role becomes its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Suffix {
    /// `gate_proj.weight`, `gate_proj.bias`; with an adapter's `gate_proj.base_layer.weight`.
    Module,
    /// `gate_up_proj`, `gate_up_proj_bias`.
    Parameter,
    /// `gate_up_proj_blocks`, `gate_up_proj_bias`.
    Blocks,
}

/// One way to name the tensors of a block.
#[derive(Debug)]
pub(super) struct Convention {
    /// For descriptions.
    pub(super) name: &'static str,
    /// What stands between the layer and the role; `{e}` is an expert's number.
    containers: &'static [(&'static str, Of)],
    roles: &'static [(&'static str, Role)],
    suffix: Suffix,
    /// Where the names fix them.
    pub(super) orientation: Option<Orientation>,
    pub(super) arrangement: Option<Arrangement>,
    /// Families that name a gated block so, where others name an ungated one alike; else empty.
    pub(super) families: &'static [&'static str],
    /// Whether a stack has the rows of one expert below those of another, `[E·H, K]` for each of the three: gate
    /// and up `[out, in]`, down `[in, out]`.
    pub(super) row_blocks: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Dense,
    Expert,
    Stack,
    Shared,
}

const LINEAR: Convention = Convention {
    name: "",
    containers: &[("mlp", Of::Dense)],
    roles: &[],
    suffix: Suffix::Module,
    orientation: Some(Orientation::OutIn),
    arrangement: None,
    families: &[],
    row_blocks: false,
};
const GATE_FIRST: Option<Arrangement> = Some(Arrangement::PackedGateFirst);
const UP_FIRST: Option<Arrangement> = Some(Arrangement::PackedUpFirst);
const PROJECTIONS: &[(&str, Role)] =
    &[("gate_proj", Gate), ("up_proj", Up), ("down_proj", Down), ("gate_up_proj", GateUp)];
const NUMBERED: &[(&str, Role)] = &[("w1", Gate), ("w3", Up), ("w2", Down)];

/// All conventions; a name may fit several, of which the layer's other tensors leave one.
pub(super) static CONVENTIONS: [Convention; 28] = [
    Convention {
        name: "Hugging Face names",
        containers: &[("mlp", Of::Dense), ("feed_forward", Of::Dense), ("ffn", Of::Dense)],
        roles: PROJECTIONS,
        ..LINEAR
    },
    Convention {
        name: "Hugging Face expert names",
        containers: &[
            ("mlp.experts.{e}", Of::Expert),
            ("feed_forward.experts.{e}", Of::Expert),
            ("ffn.experts.{e}", Of::Expert),
            ("block_sparse_moe.experts.{e}", Of::Expert),
            ("moe.experts.{e}", Of::Expert),
            ("experts.{e}", Of::Expert),
        ],
        roles: PROJECTIONS,
        ..LINEAR
    },
    Convention {
        name: "Hugging Face shared expert names",
        containers: &[
            ("mlp.shared_expert", Of::Shared),
            ("mlp.shared_experts", Of::Shared),
            ("mlp.shared_mlp", Of::Shared),
            ("feed_forward.shared_expert", Of::Shared),
            ("feed_forward.shared_experts", Of::Shared),
            ("block_sparse_moe.shared_experts", Of::Shared),
            ("shared_expert", Of::Shared),
            ("share_expert", Of::Shared),
            ("shared_mlp", Of::Shared),
        ],
        roles: PROJECTIONS,
        ..LINEAR
    },
    Convention {
        name: "Hugging Face stacked experts",
        containers: &[
            ("mlp.experts", Of::Stack),
            ("feed_forward.experts", Of::Stack),
            ("block_sparse_moe.experts", Of::Stack),
            ("experts", Of::Stack),
        ],
        roles: PROJECTIONS,
        suffix: Suffix::Parameter,
        orientation: None,
        ..LINEAR
    },
    Convention {
        name: "Hugging Face MXFP4 experts",
        containers: &[("mlp.experts", Of::Stack)],
        roles: &[("gate_up_proj", GateUp), ("down_proj", Down)],
        suffix: Suffix::Blocks,
        ..LINEAR
    },
    Convention {
        name: "stacked linear experts",
        containers: &[
            ("mlp.switch_mlp", Of::Stack),
            ("block_sparse_moe.switch_mlp", Of::Stack),
            ("moe", Of::Stack),
        ],
        roles: PROJECTIONS,
        ..LINEAR
    },
    Convention {
        name: "Mixtral names",
        containers: &[
            ("block_sparse_moe.experts.{e}", Of::Expert),
            ("mlp.experts.{e}", Of::Expert),
            ("feed_forward.experts.{e}", Of::Expert),
            ("ffn.experts.{e}", Of::Expert),
            ("ffn.shared_experts", Of::Shared),
            ("feed_forward.shared_experts", Of::Shared),
        ],
        roles: NUMBERED,
        ..LINEAR
    },
    Convention {
        name: "Meta Llama names",
        containers: &[("feed_forward", Of::Dense), ("ffn", Of::Dense)],
        roles: NUMBERED,
        ..LINEAR
    },
    Convention {
        name: "layers.N.w1 names",
        containers: &[("", Of::Dense)],
        roles: NUMBERED,
        orientation: None,
        ..LINEAR
    },
    Convention {
        name: "layers.N.w1 names",
        containers: &[("", Of::Dense)],
        roles: NUMBERED,
        suffix: Suffix::Parameter,
        orientation: None,
        ..LINEAR
    },
    Convention {
        name: "Granite names",
        containers: &[("shared_mlp", Of::Shared), ("block_sparse_moe", Of::Stack)],
        roles: &[("input_linear", GateUp), ("output_linear", Down)],
        arrangement: GATE_FIRST,
        ..LINEAR
    },
    Convention {
        name: "ChatGLM names",
        roles: &[("dense_h_to_4h", GateUp), ("dense_4h_to_h", Down)],
        arrangement: GATE_FIRST,
        families: &["ChatGLM"],
        ..LINEAR
    },
    Convention {
        name: "Qwen 1 names",
        roles: &[("w2", Gate), ("w1", Up), ("c_proj", Down)],
        // Elsewhere w1 is the gate.
        families: &["Qwen 1"],
        ..LINEAR
    },
    Convention {
        name: "EXAONE 3 names",
        roles: &[("c_fc_0", Gate), ("c_fc_1", Up), ("c_proj", Down)],
        ..LINEAR
    },
    Convention {
        name: "SwiGLUFFN names",
        containers: &[("mlp", Of::Dense), ("ffn", Of::Dense)],
        roles: &[("w12", GateUp), ("w3", Down)],
        arrangement: GATE_FIRST,
        ..LINEAR
    },
    Convention {
        name: "DINOv2 names",
        roles: &[("weights_in", GateUp), ("weights_out", Down)],
        arrangement: GATE_FIRST,
        ..LINEAR
    },
    Convention {
        name: "EVA-02 names",
        roles: &[("fc1_g", Gate), ("fc1_x", Up), ("fc2", Down)],
        ..LINEAR
    },
    Convention {
        name: "Nomic BERT names",
        roles: &[("fc12", Gate), ("fc11", Up), ("fc2", Down)],
        ..LINEAR
    },
    Convention {
        name: "T5 names",
        containers: &[("layer.1.DenseReluDense", Of::Dense), ("layer.2.DenseReluDense", Of::Dense)],
        roles: &[("wi_0", Gate), ("wi_1", Up), ("wo", Down)],
        ..LINEAR
    },
    Convention {
        name: "ModernBERT names",
        roles: &[("Wi", GateUp), ("Wo", Down)],
        arrangement: GATE_FIRST,
        families: &["ModernBERT"],
        ..LINEAR
    },
    Convention {
        name: "Moonshine names",
        roles: &[("fc1", GateUp), ("fc2", Down)],
        arrangement: UP_FIRST,
        families: &["Moonshine"],
        ..LINEAR
    },
    Convention {
        name: "Lumina names",
        containers: &[("feed_forward", Of::Dense)],
        roles: &[("linear_1", Gate), ("linear_3", Up), ("linear_2", Down)],
        ..LINEAR
    },
    Convention {
        name: "up_gate_proj names",
        roles: &[("up_gate_proj", GateUp), ("down_proj", Down)],
        ..LINEAR
    },
    Convention {
        name: "Jina BERT names",
        roles: &[("gated_layers", GateUp), ("wo", Down)],
        arrangement: GATE_FIRST,
        families: &["Jina BERT", "Mosaic BERT"],
        ..LINEAR
    },
    Convention {
        name: "Grok 1 names",
        containers: &[("moe.{e}", Of::Expert)],
        roles: &[("linear_v", Up), ("linear_1", Down), ("linear", Gate)],
        ..LINEAR
    },
    Convention {
        name: "LLaDA names",
        containers: &[("", Of::Dense)],
        roles: &[("ff_proj", Gate), ("up_proj", Up), ("ff_out", Down)],
        families: &["LLaDA"],
        ..LINEAR
    },
    Convention {
        name: "diffusers names",
        containers: &[("ff", Of::Dense), ("ff_context", Of::Shared)],
        roles: &[("net.0.proj", GateUp), ("net.2", Down)],
        arrangement: UP_FIRST,
        families: &["diffusers GEGLU"],
        ..LINEAR
    },
    Convention {
        name: "DBRX experts in blocks of rows",
        containers: &[("ffn.experts.mlp", Of::Stack)],
        roles: &[("w1", Gate), ("v1", Up), ("w2", Down)],
        suffix: Suffix::Parameter,
        families: &["DBRX"],
        row_blocks: true,
        ..LINEAR
    },
];

/// llama.cpp's own: `ffn_ROLE`, for experts `ffn_ROLE_exps` or `ffn_ROLE.{e}`, shared `ffn_ROLE_shexp`.
pub(super) static LLAMA_CPP: Convention = Convention {
    name: "llama.cpp names",
    containers: &[],
    roles: &[("gate", Gate), ("up", Up), ("down", Down), ("gate_up", GateUp)],
    // Of `ffn_gate_up_exps`; a packed `ffn_up` is its architecture's.
    arrangement: GATE_FIRST,
    ..LINEAR
};

/// All conventions, for errors.
pub(super) const TRIED: &str = "Hugging Face (layers.N.mlp.{gate,up,down,gate_up}_proj, \
     .experts.E.*_proj, block_sparse_moe.experts.E.w{1,2,3}), llama.cpp (blk.N.ffn_{gate,up,down}), \
     Meta (layers.N.feed_forward.w{1,2,3}), layers.N.w{1,2,3} and those of single families; for \
     anything else name the tensors (TensorNames::with_gate and TensorNames::with_up, or \
     TensorNames::with_gate_up; TensorNames::with_down)";

/// What stands before a layer's number.
const MARKERS: [&str; 10] = [
    "decoder_layer",
    "transformer_encoder",
    "layers",
    "blk",
    "blocks",
    "block",
    "h",
    "layer",
    "transformer_blocks",
    "resblocks",
];

/// A tensor's place, read from its name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) name: &'a str,
    /// What stands before the layer: several blocks of one model may count layers.
    pub(super) prefix: &'a str,
    /// What the names of all tensors of the block start with.
    pub(super) block: &'a str,
    pub(super) convention: &'static Convention,
    pub(super) layer: usize,
    pub(super) kind: Kind,
    pub(super) role: Role,
    pub(super) part: Part,
}

/// Prefixes of the language model, preferred over an encoder that also counts layers.
pub(super) const LANGUAGE_PREFIXES: [&str; 10] = [
    "",
    "model.",
    "model.language_model.",
    "model.language_model.model.",
    "language_model.",
    "language_model.model.",
    "transformer.",
    "transformer.encoder.",
    "thinker.model.",
    "model.text_model.",
];

/// Prefixes that programs put before a whole model's names.
const WRAPPERS: [&str; 3] = ["_orig_mod.", "module.", "base_model.model."];

/// A model's prefix without those of programs that wrapped it.
pub(super) fn unwrapped(prefix: &str) -> &str {
    WRAPPERS.iter().fold(prefix, |rest, wrapper| rest.strip_prefix(wrapper).unwrap_or(rest))
}

/// The places that a name may have; none if it is no gated feed-forward tensor of a known convention.
pub(super) fn classify(name: &str) -> Vec<Place<'_>> {
    let mut end = name.len();
    while let Some(at) = name[..end].rfind('.') {
        end = at;
        if let Some((prefix, layer, rest)) = numbered_layer(name, at) {
            let found = places(name, prefix, layer, rest);
            if !found.is_empty() {
                return found;
            }
        }
    }
    Vec::new()
}

/// The layer's number that the dot at `at` ends, what stands before its marker, and where the rest starts.
fn numbered_layer(name: &str, at: usize) -> Option<(&str, usize, usize)> {
    let (before, number) = name[..at].rsplit_once('.')?;
    let layer = parse_index(number)?;
    let (prefix, marker) = match before.rfind('.') {
        Some(dot) => before.split_at(dot + 1),
        None => ("", before),
    };
    MARKERS.contains(&marker).then_some((prefix, layer, at + 1))
}

/// The layer that a name of any convention, or of none, says it is of.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    let dots = name.char_indices().filter(|&(_, c)| c == '.').map(|(at, _)| at);
    dots.filter_map(|at| numbered_layer(name, at)).map(|(_, layer, _)| layer).next()
}

/// What stands before the first layer's number in a name: the part of the model that it is of.
pub(super) fn part_of(name: &str) -> Option<&str> {
    let dots = name.char_indices().filter(|&(_, c)| c == '.').map(|(at, _)| at);
    dots.filter_map(|at| numbered_layer(name, at)).map(|(prefix, ..)| prefix).next()
}

/// Whether a prefix ends with a layer's number: of a whole layer, not of its block.
pub(super) fn is_layer(prefix: &str) -> bool {
    prefix.strip_suffix('.').is_some_and(|p| numbered_layer(prefix, p.len()).is_some())
}

fn places<'a>(name: &'a str, prefix: &'a str, layer: usize, start: usize) -> Vec<Place<'a>> {
    let rest = &name[start..];
    let place = |convention, kind, role, part, block| Place {
        name,
        prefix,
        block: &name[..block],
        convention,
        layer,
        kind,
        role,
        part,
    };
    if let Some(found) = rest.strip_prefix("ffn_").and_then(llama_cpp) {
        let (kind, role, part) = found;
        return vec![place(&LLAMA_CPP, kind, role, part, start + "ffn_".len())];
    }
    let mut out = Vec::new();
    for convention in &CONVENTIONS {
        for &(container, of) in convention.containers {
            let Some((kind, rest)) = within(rest, container, of) else { continue };
            if let Some((role, part)) = convention.role(rest) {
                out.push(place(convention, kind, role, part, name.len() - rest.len()));
            }
        }
    }
    out
}

/// What follows a container, and which block it is.
fn within<'a>(rest: &'a str, container: &str, of: Of) -> Option<(Kind, &'a str)> {
    let Some(experts) = container.strip_suffix("{e}") else {
        let kind = match of {
            Of::Stack => Kind::Stack,
            Of::Shared => Kind::Shared,
            Of::Dense | Of::Expert => Kind::Dense,
        };
        let rest = match container {
            "" => rest,
            _ => rest.strip_prefix(container)?.strip_prefix('.')?,
        };
        return Some((kind, rest));
    };
    let (expert, rest) = rest.strip_prefix(experts)?.split_once('.')?;
    Some((Kind::Expert(parse_index(expert)?), rest))
}

impl Convention {
    fn role(&self, rest: &str) -> Option<(Role, Part)> {
        self.roles.iter().find_map(|&(word, role)| {
            let rest = rest.strip_prefix(word)?;
            let part = match (self.suffix, rest) {
                (Suffix::Module, ".weight" | ".base_layer.weight") => Part::Weight,
                (Suffix::Module, ".bias" | ".base_layer.bias") => Part::Bias,
                (Suffix::Parameter, "") | (Suffix::Blocks, "_blocks") => Part::Weight,
                (Suffix::Parameter | Suffix::Blocks, "_bias") => Part::Bias,
                _ => return None,
            };
            Some((role, part))
        })
    }
}

/// A number as conventions write it: digits, no sign, no leading zero.
fn parse_index(text: &str) -> Option<usize> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

fn llama_cpp(rest: &str) -> Option<(Kind, Role, Part)> {
    let (role, rest) = rest.split_once('.')?;
    let (role, kind) = match (role.strip_suffix("_exps"), role.strip_suffix("_shexp")) {
        (Some(role), _) => (role, Kind::Stack),
        (None, Some(role)) => (role, Kind::Shared),
        (None, None) => (role, Kind::Dense),
    };
    let &(_, role) = LLAMA_CPP.roles.iter().find(|(word, _)| *word == role)?;
    let part = |text| match text {
        "weight" => Some(Part::Weight),
        "bias" => Some(Part::Bias),
        _ => None,
    };
    match (part(rest), kind) {
        (Some(part), _) => Some((kind, role, part)),
        (None, Kind::Dense) => {
            let (expert, rest) = rest.split_once('.')?;
            Some((Kind::Expert(parse_index(expert)?), role, part(rest)?))
        }
        _ => None,
    }
}

/// Whether a weight's own name says that it is a torch linear layer, stored `[out, in]`.
pub(super) fn is_linear_weight(name: &str) -> bool {
    let Some(module) = name.strip_suffix(".weight") else { return false };
    let module = module.strip_suffix(".base_layer").unwrap_or(module);
    let word = module.rsplit('.').next();
    let linear = CONVENTIONS.iter().filter(|c| c.suffix == Suffix::Module);
    let mut words = linear.flat_map(|c| c.roles).map(|(word, _)| *word);
    word == Some("fc1") || words.any(|known| Some(known) == word || module.ends_with(known))
}

#[cfg(test)]
mod tests;
