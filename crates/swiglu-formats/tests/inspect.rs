//! What inspecting says of a model: defects wherever they are, every expert, and what is outside a block.

use crate::support::layer::*;
use crate::support::*;
use swiglu_formats::{Inspection, LoadOptions, inspect, load_layer};

fn block(prefix: &str, seed: usize) -> Vec<T> {
    let names = ["gate_proj", "up_proj", "down_proj"].map(|role| format!("{prefix}{role}.weight"));
    triple([&names[0], &names[1], &names[2]], "F32", K, 8, seed)
}

fn inspected(tensors: &[T], config: &str) -> Inspection {
    let checkpoint = Checkpoint::new(tensors, config);
    inspect(checkpoint.dir.path(), &LoadOptions::default()).unwrap()
}

#[test]
fn a_broken_entry_of_an_index_is_told_and_stops_only_the_layer_that_needs_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = block("model.layers.0.mlp.", 1);
    tensors.extend(block("model.layers.1.mlp.", 2));
    std::fs::write(dir.path().join("a.safetensors"), safetensors(&tensors)).unwrap();
    let mut map: serde_json::Map<_, _> =
        tensors.iter().map(|t| (t.name.clone(), "a.safetensors".into())).collect();
    map.insert("model.layers.1.mlp.up_proj.weight".into(), 7.into());
    map.insert("model.layers.0.self_attn.q_proj.weight".into(), "../b.safetensors".into());
    map.insert("model.norm.weight".into(), "gone.safetensors".into());
    let index = dir.path().join("model.safetensors.index.json");
    std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    let found = inspect(&index, &LoadOptions::default()).unwrap();
    let refused: Vec<(&str, bool)> =
        found.blocks.iter().map(|b| (b.layers.as_str(), b.refused.is_some())).collect();
    assert_eq!(refused, [("0", false), ("1", true)]);
    for parts in [
        ["model.layers.1.mlp.up_proj.weight", "given 7"],
        ["q_proj.weight", "../b.safetensors"],
        ["gone.safetensors is not there", "model.norm.weight"],
    ] {
        let told = found.defects.iter().any(|d| parts.iter().all(|p| d.contains(p)));
        assert!(told, "{parts:?}: {:?}", found.defects);
    }
    assert_eq!(found.defects.len(), 3);
    expect_triple(&load_layer(&index, &at(0)).unwrap(), K, 8, 1);
    crate::support::layer::refused(load_layer(&index, &at(1)), &["weight_map", "given 7"]);
}

#[test]
fn every_expert_is_looked_at_and_one_unlike_the_others_is_named() {
    let mut tensors: Vec<T> = Vec::new();
    for layer in 0..2 {
        for expert in 0..6 {
            tensors.extend(block(&format!("model.layers.{layer}.mlp.experts.{expert}."), expert));
        }
    }
    let all = inspected(&tensors, &model_type("qwen3_moe"));
    let numbers = |found: &Inspection| -> Vec<(String, String, Option<usize>, bool)> {
        let of = |b: &swiglu_formats::Block| {
            (b.layers.clone(), b.numbers.clone().unwrap(), b.experts, b.refused.is_some())
        };
        found.blocks.iter().map(of).collect()
    };
    assert_eq!(numbers(&all), [("0 to 1".into(), "0 to 5".into(), Some(6), false)]);
    // One without an up weight, one of another type, one of another size.
    tensors.retain(|t| t.name != "model.layers.1.mlp.experts.4.up_proj.weight");
    for t in &mut tensors {
        if t.name.starts_with("model.layers.1.mlp.experts.2.") {
            let n: usize = t.shape.iter().product();
            *t = crate::support::t(&t.name, "BF16", &t.shape, n);
        }
        if t.name == "model.layers.1.mlp.experts.3.up_proj.weight" {
            *t = crate::support::t(&t.name, "F32", &[8, K + 1], 1);
        }
    }
    let odd = inspected(&tensors, &model_type("qwen3_moe"));
    let expected = [
        ("0", "0 to 5", 6, false),
        ("1", "0 to 1, 5", 3, false),
        ("1", "2", 1, false),
        ("1", "3", 1, true),
        ("1", "4", 1, true),
    ];
    let expected: Vec<_> = expected
        .into_iter()
        .map(|(l, n, count, refused)| (l.to_owned(), n.to_owned(), Some(count), refused))
        .collect();
    assert_eq!(numbers(&odd), expected);
    assert!(odd.blocks[4].refused.as_ref().unwrap().contains("no up weight"));
}

#[test]
fn experts_of_gguf_that_have_tensors_of_their_own_are_looked_at_too() {
    let mut tensors = Vec::new();
    for expert in 0..3 {
        let names = ["gate", "up", "down"].map(|role| format!("blk.0.ffn_{role}.{expert}.weight"));
        tensors.extend(triple([&names[0], &names[1], &names[2]], "F32", K, 8, expert));
    }
    tensors.remove(4);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, gguf(&tensors, &[text("general.architecture", "llama")])).unwrap();
    let found = inspect(&path, &LoadOptions::default()).unwrap();
    let numbers: Vec<_> =
        found.blocks.iter().map(|b| (b.numbers.as_deref().unwrap(), b.refused.is_some())).collect();
    assert_eq!(numbers, [("0, 2", false), ("1", true)]);
}

#[test]
fn the_gate_of_a_shared_expert_is_said_to_be_outside_the_block() {
    let mut tensors = block("model.layers.0.mlp.shared_expert.", 1);
    let config = model_type("qwen2_moe");
    let notes = |tensors: &[T]| {
        inspected(tensors, &config).blocks[0].contents.as_ref().unwrap().notes.clone()
    };
    assert!(notes(&tensors).is_empty());
    tensors.push(t("model.layers.0.mlp.shared_expert_gate.weight", "F32", &[1, K], 3));
    let told = notes(&tensors);
    assert!(
        told[0].starts_with("shared_expert_gate is outside the block and not applied"),
        "{told:?}"
    );
}

#[test]
fn the_part_that_was_taken_and_how_to_take_the_other_are_said() {
    let mut tensors = block("model.layers.0.mlp.", 1);
    tensors.extend(block("talker.model.layers.0.mlp.", 2));
    let checkpoint = Checkpoint::new(&tensors, "");
    let taken = checkpoint.load(&at(0)).unwrap();
    expect_triple(&taken, K, 8, 1);
    let [note] = taken.notes() else { panic!("{:?}", taken.notes()) };
    for part in ["part model;", "talker.model", "LoadOptions::with_prefix"] {
        assert!(note.contains(part), "`{part}` in {note}");
    }
    let asked = at(0).with_prefix("talker.model");
    let other = checkpoint.load(&asked).unwrap();
    expect_triple(&other, K, 8, 2);
    assert!(other.notes().is_empty());
}
