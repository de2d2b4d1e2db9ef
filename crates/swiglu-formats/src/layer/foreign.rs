//! Quantisers whose files are recognised, so that they can be refused by name, with what to do instead.

use super::beside::{Beside, with_prefix};
use super::names::layer_of;
use crate::error::{FormatError, clip};
use crate::model::Model;
use crate::tensor::Tensor;

/// A way of writing weights that is not read here.
struct Foreign {
    name: &'static str,
    /// What follows a weight's prefix in the names of its tensors; all must be there. A name may go on
    /// after a dot. `weight is TYPE` is of a weight under its usual name.
    marks: &'static [&'static str],
    /// As `quant_method` of a configuration names it, where none of its forms is read.
    method: Option<&'static str>,
    advice: &'static str,
}

const ORIGINAL: &str = "load the checkpoint that it was made from, or a GGUF of the same model";
const BITSANDBYTES: &str = "in transformers AutoModelForCausalLM.from_pretrained(DIR).dequantize() and \
     .save_pretrained(OUT) write what can be read; or load the checkpoint that it was made from, or a GGUF";
const DECOMPRESS: &str = "transformers with CompressedTensorsConfig(run_compressed=False) decompresses \
     it; or load the checkpoint that it was made from, or a GGUF of the same model";
const BITNET: &str =
    "load the model's checkpoint in BF16 (bitnet-b1.58-2B-4T-bf16), or a GGUF of it";
const MLX: &str = "mlx_lm.convert --hf-path DIR --dequantize writes what can be read; or load the \
     checkpoint that it was made from, or a GGUF of the same model";
const MERGE: &str = "these are changes to the weights of another checkpoint: merge them first, in PEFT \
     with merge_and_unload() and save_pretrained(OUT), then load what it wrote";

const fn foreign(
    name: &'static str,
    marks: &'static [&'static str],
    method: Option<&'static str>,
    advice: &'static str,
) -> Foreign {
    Foreign { name, marks, method, advice }
}

/// The more marks, the earlier: the first whose marks are all there is it.
const KNOWN: &[Foreign] = &[
    foreign("GPTQ", &["qweight", "g_idx"], Some("gptq"), ORIGINAL),
    foreign("SVDQuant (Nunchaku)", &["qweight", "wscales"], Some("nunchaku"), ORIGINAL),
    foreign("FP-Quant", &["qweight", "forward_hadamard_matrix"], Some("fp_quant"), ORIGINAL),
    foreign("AWQ", &["qweight"], Some("awq"), ORIGINAL),
    foreign("GPTQ in Marlin's layout", &["B", "s"], Some("marlin"), ORIGINAL),
    foreign("AutoRound", &[], Some("auto-round"), ORIGINAL),
    foreign("bitsandbytes of 4 bits", &["weight.absmax"], None, BITSANDBYTES),
    foreign("bitsandbytes of 4 bits", &["weight.quant_state"], None, BITSANDBYTES),
    foreign("bitsandbytes of 4 bits", &["absmax", "quant_map"], None, BITSANDBYTES),
    foreign("MLX", &["weight is U32", "scales"], None, MLX),
    foreign(
        "NVFP4 (compressed-tensors)",
        &["weight_packed", "weight_global_scale"],
        None,
        DECOMPRESS,
    ),
    foreign("compressed-tensors, packed integers", &["weight_packed"], None, DECOMPRESS),
    foreign("compressed-tensors, sparse", &["weight.compressed"], None, DECOMPRESS),
    foreign("compressed-tensors, sparse", &["weight.bitmask"], None, DECOMPRESS),
    foreign("NVFP4 (ModelOpt)", &["weight_scale_2"], None, ORIGINAL),
    foreign("HQQ", &["W_q"], Some("hqq"), ORIGINAL),
    foreign("quanto", &["weight._data"], Some("quanto"), ORIGINAL),
    foreign("quanto", &["weight._scale"], None, ORIGINAL),
    foreign("torchao", &["_weight_qdata"], Some("torchao"), ORIGINAL),
    foreign("torchao", &["weight:qdata"], None, ORIGINAL),
    foreign("torchao", &["weight_qdata"], None, ORIGINAL),
    foreign("EETQ", &["weight_scales"], Some("eetq"), ORIGINAL),
    foreign("AQLM", &["codes", "codebooks"], Some("aqlm"), ORIGINAL),
    foreign("VPTQ", &["centroids"], Some("vptq"), ORIGINAL),
    foreign("VPTQ", &["indices", "res_centroids"], None, ORIGINAL),
    foreign("QuIP#", &["Qidxs"], Some("quip"), ORIGINAL),
    foreign("SpQR", &["dense_weights"], Some("spqr"), ORIGINAL),
    foreign("HIGGS", &["tables", "tables2"], Some("higgs"), ORIGINAL),
    foreign("ExLlamaV2", &["q_weight"], Some("exl2"), ORIGINAL),
    foreign("ExLlamaV3", &["trellis"], Some("exl3"), ORIGINAL),
    foreign("a LoRA adapter", &["lora_A"], None, MERGE),
    foreign("a LoRA adapter", &["lora_B"], None, MERGE),
    foreign("a LoRA adapter", &["weight.lora_a"], None, MERGE),
    foreign("a LoRA adapter", &["lora_a"], None, MERGE),
    foreign("a LoRA adapter", &["lora_down"], None, MERGE),
    foreign("a DoRA adapter", &["lora_magnitude_vector"], None, MERGE),
    foreign("an (IA)³ adapter", &["ia3_l"], None, MERGE),
    foreign("a LoHa adapter", &["hada_w1_a"], None, MERGE),
    foreign("a LoKr adapter", &["lokr_w1"], None, MERGE),
    foreign("an OFT adapter", &["oft_R"], None, MERGE),
];

/// Methods of which at least one form is read: a layer that was not found has another reason.
const READ: [&str; 9] = [
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "compressed_tensors",
    "modelopt",
    "mxfp4",
    "quark",
    "bitsandbytes",
    "bitnet",
];

impl Foreign {
    fn is(&self, rests: &[&str]) -> bool {
        let there = |mark: &&str| rests.iter().any(|rest| is_mark(rest, mark));
        !self.marks.is_empty() && self.marks.iter().all(there)
    }

    fn error(&self, model: &Model, tensor: &str) -> FormatError {
        refused(model, tensor, self.name, self.advice)
    }
}

fn is_mark(rest: &str, mark: &str) -> bool {
    rest.strip_prefix(mark).is_some_and(|tail| tail.is_empty() || tail.starts_with('.'))
}

fn refused(model: &Model, tensor: &str, dtype: &str, advice: &str) -> FormatError {
    FormatError::Quantization {
        path: model.path().to_owned(),
        tensor: clip(tensor, 200),
        dtype: dtype.to_owned(),
        why: format!("recognised, and not read here; {advice}"),
    }
}

/// The refusal of a weight whose neighbours are those of a quantiser or an adapter.
pub(super) fn beside(model: &Model, beside: &Beside<'_>, weight: &Tensor) -> Option<FormatError> {
    let (weight, dtype) = (&weight.name, format!("weight is {}", weight.stored));
    let known = |beside: &Beside<'_>| {
        let rests: Vec<&str> = beside.rests().chain([dtype.as_str()]).collect();
        KNOWN.iter().find(|known| known.is(&rests))
    };
    // PEFT moves the weight that an adapter is for one level down.
    let parent = || {
        let base = weight.strip_suffix("base_layer.weight")?;
        known(&Beside::new(model, &format!("{base}weight")))
    };
    known(beside).or_else(parent).map(|known| known.error(model, weight))
}

/// The refusal of bytes without a known form, with what they may be.
pub(super) fn packed(
    model: &Model,
    weight: &str,
    dtype: &str,
    scales: &str,
    one: bool,
) -> FormatError {
    if one {
        return refused(model, weight, "BitNet, packed", BITNET);
    }
    let known = match method(model) {
        Some(method) => format!("config.json names the quantiser `{}`", clip(&method, 40)),
        None => "no configuration beside it names the quantiser".into(),
    };
    FormatError::Quantization {
        path: model.path().to_owned(),
        tensor: clip(weight, 200),
        dtype: dtype.to_owned(),
        why: format!(
            "what is packed in its bytes is not known from {scales}, and {known}; {ORIGINAL}"
        ),
    }
}

/// The refusal of a layer that is not there under its usual names because a quantiser or an adapter has
/// others. With `layer`, of that layer alone, and by the names of tensors alone.
pub(super) fn instead_of_layer(model: &Model, layer: Option<usize>) -> Option<FormatError> {
    let all = model.names();
    let marked = |name: &&&str| mark_of(&all, name).is_some();
    let here = |name: &&&str| layer.is_none_or(|layer| layer_of(name) == Some(layer));
    let in_layer = || all.iter().filter(here);
    let mut found = in_layer().filter(|name| is_feed_forward(name)).find(marked);
    if layer.is_none() {
        found = found.or_else(|| in_layer().find(marked));
    }
    if let Some((name, known)) = found.and_then(|name| Some((name, mark_of(&all, name)?))) {
        return Some(known.error(model, name));
    }
    if layer.is_some() {
        return None;
    }
    let method = method(model).filter(|method| !READ.contains(&method.as_str()))?;
    let known = KNOWN.iter().find(|known| known.method == Some(method.as_str()));
    let (name, advice) = match known {
        Some(known) => (known.name, known.advice),
        None => (method.as_str(), ORIGINAL),
    };
    let quantiser = format!("{} (config.json: quant_method)", clip(name, 40));
    Some(refused(model, "the model", &quantiser, advice))
}

fn is_feed_forward(name: &str) -> bool {
    let parts =
        ["mlp", "ffn", "feed_forward", "moe", "expert", "gate", "up_proj", "down_proj", ".w"];
    !name.contains("attn") && !name.contains("attention") && parts.iter().any(|p| name.contains(p))
}

/// Whose mark a name has, if all the marks are beside it.
fn mark_of(all: &[&str], name: &str) -> Option<&'static Foreign> {
    KNOWN.iter().find(|known| {
        let Some(&mark) = known.marks.iter().find(|mark| **mark != "weight") else { return false };
        // The mark is a whole part of the name.
        let mut found = name.match_indices(mark).map(|(at, _)| name.split_at(at));
        let found = found
            .find(|(base, rest)| (base.is_empty() || base.ends_with('.')) && is_mark(rest, mark));
        found.is_some_and(|(base, _)| {
            let rests: Vec<&str> = with_prefix(all, base).map(|n| &n[base.len()..]).collect();
            known.is(&rests)
        })
    })
}

/// `quantization_config.quant_method` of the configuration, where there is one: it makes an error clearer,
/// and nothing else depends on it.
fn method(model: &Model) -> Option<String> {
    let root = model.config().ok()?.root();
    let inner = root.get("text_config").and_then(|c| c.get("quantization_config"));
    let quantization = root.get("quantization_config").or(inner)?;
    Some(quantization.get("quant_method")?.as_str()?.to_lowercase())
}
