//! Models in several files, and directories as they are found.

use std::path::{Path, PathBuf};

use crate::support::layer::{at, expect_triple, triple};
use crate::support::*;
use swiglu_formats::{Bytes, FormatError, Model, load_layer, load_layer_from, read_matrix};

const K: usize = 5;
const H: usize = 3;

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// A layer under the names of GGUF; its values differ by layer.
fn block(layer: usize) -> Vec<T> {
    let names = ["gate", "up", "down"].map(|part| format!("blk.{layer}.ffn_{part}.weight"));
    triple(names.each_ref().map(String::as_str), "F32", K, H, 10 * layer)
}

/// A layer under the names of Hugging Face.
fn mlp(layer: usize) -> Vec<T> {
    let names = ["gate", "up", "down"].map(|p| format!("model.layers.{layer}.mlp.{p}_proj.weight"));
    triple(names.each_ref().map(String::as_str), "F32", K, H, 10 * layer)
}

#[track_caller]
fn expect(path: &Path, layer: usize) {
    expect_triple(&load_layer(path, &at(layer)).unwrap(), K, H, 10 * layer);
}

#[track_caller]
fn refused(path: &Path, layer: usize, parts: &[&str]) {
    layer::refused(load_layer(path, &at(layer)), parts);
}

fn split(no: u32, count: u32, tensors: u32) -> Vec<Vec<u8>> {
    let mut pairs = vec![
        uint("split.no", no),
        uint("split.count", count),
        uint("split.tensors.count", tensors),
    ];
    // Only the first part says what model it is.
    if no == 0 {
        pairs.extend([
            text("general.architecture", "llama"),
            uint("llama.embedding_length", K as u32),
        ]);
    }
    pairs
}

/// Tensors in as many parts as there are, and where they lie.
fn split_gguf(dir: &Dir, parts: &[Vec<T>]) -> Vec<PathBuf> {
    let (count, total) = (parts.len(), parts.iter().map(Vec::len).sum::<usize>());
    let write = |(i, part): (usize, &Vec<T>)| {
        let name = format!("m-{:05}-of-{count:05}.gguf", i + 1);
        dir.write(&name, gguf(part, &split(i as u32, count as u32, total as u32)))
    };
    parts.iter().enumerate().map(write).collect()
}

#[test]
fn a_split_gguf_is_read_whole_from_any_of_its_parts() {
    let dir = Dir::new();
    let [gate, up, down] = <[T; 3]>::try_from(block(0)).ok().unwrap();
    let parts = split_gguf(
        &dir,
        &[vec![t("token_embd.weight", "F32", &[2, K], 9), gate], vec![up], vec![down]],
    );
    for path in parts.iter().map(PathBuf::as_path).chain([dir.path()]) {
        expect(path, 0);
        assert_eq!(load_layer(path, &at(0)).unwrap().architecture(), Some("llama"));
    }
    let bytes: Vec<Bytes> = parts.iter().map(|p| Bytes::map(p).unwrap()).collect();
    let model = Model::from_gguf_parts(&bytes).unwrap();
    assert_eq!(load_layer_from(&model, &at(0)).unwrap().architecture(), Some("llama"));
    assert!(Model::from_gguf_parts(&bytes[1..]).is_err(), "the first says what model it is");
    assert!(Model::from_gguf_parts(&[]).is_err());
}

#[test]
fn a_part_that_is_not_there_matters_when_it_is_needed() {
    let dir = Dir::new();
    let parts = split_gguf(&dir, &[block(0), block(1), block(2)]);
    std::fs::remove_file(&parts[1]).unwrap();
    for path in [&parts[0], &parts[2]] {
        expect(path, 0);
        expect(path, 2);
        refused(path, 1, &["m-00002-of-00003.gguf", "not there", "partial download"]);
        let e = Model::open(path).unwrap().tensor("blk.1.ffn_up.weight").unwrap_err();
        assert!(matches!(&e, FormatError::MissingPart { path, .. } if *path == parts[1]), "{e}");
    }
    // A pointer in its place is named as what it is.
    dir.write("m-00002-of-00003.gguf", "version https://git-lfs.github.com/spec/v1\nsize 5\n");
    expect(&parts[0], 2);
    refused(&parts[0], 1, &["m-00002-of-00003.gguf", "Git LFS pointer", "of 5 bytes"]);
    // Of another model.
    dir.write("m-00002-of-00003.gguf", gguf(&block(1), &split(1, 3, 7)));
    expect(&parts[0], 2);
    refused(&parts[0], 1, &["m-00002-of-00003.gguf", "split.no"]);
    // Without the first nobody knows the model.
    std::fs::remove_file(&parts[0]).unwrap();
    refused(&parts[2], 2, &["m-00001-of-00003.gguf", "not there", "what model"]);
}

/// A bias in the part that is not there would change the result, and other layers show that there is one.
#[test]
fn a_layer_that_is_cut_by_a_missing_part_is_refused() {
    let dir = Dir::new();
    let bias = |n: usize| t(&format!("blk.{n}.ffn_down.bias"), "F32", &[K], n);
    let first = [block(0), vec![bias(0)], block(1)].concat();
    let parts = split_gguf(&dir, &[first, [vec![bias(1)], block(2)].concat()]);
    for layer in [0, 1] {
        let read = load_layer(&parts[0], &at(layer)).unwrap();
        assert_eq!(read.down_bias().unwrap(), ramp(K, layer));
    }
    std::fs::remove_file(&parts[1]).unwrap();
    assert!(load_layer(&parts[0], &at(0)).is_ok());
    refused(&parts[0], 1, &["m-00002-of-00002.gguf", "ffn_down.bias"]);
}

#[test]
fn the_down_weight_may_be_in_the_missing_part() {
    let dir = Dir::new();
    let [gate, up, down] = <[T; 3]>::try_from(block(0)).ok().unwrap();
    let parts = split_gguf(&dir, &[vec![gate, up], vec![down]]);
    std::fs::remove_file(&parts[1]).unwrap();
    refused(&parts[0], 0, &["m-00002-of-00002.gguf", "the down weight"]);
}

#[test]
fn a_name_in_two_parts_is_refused_when_it_is_read() {
    let dir = Dir::new();
    let parts = split_gguf(&dir, &[block(0), [block(1), vec![block(0).swap_remove(0)]].concat()]);
    expect(&parts[0], 1);
    refused(&parts[0], 0, &["blk.0.ffn_gate.weight", "each name in one part"]);
}

#[test]
fn a_part_under_another_name_says_which_it_is() {
    let dir = Dir::new();
    let second = dir.write("model.gguf", gguf(&block(1), &split(1, 3, 9)));
    refused(&second, 1, &["part 2 of 3 of a split GGUF", "NAME-00001-of-0000N.gguf"]);
    let first = dir.write("model.gguf", gguf(&block(0), &split(0, 3, 9)));
    expect(&first, 0);
    refused(&first, 1, &["part 1 of 3 of a split GGUF"]);
    // Numbers in the name of a file that is whole.
    let whole = dir.write("a-00001-of-00002.gguf", gguf(&block(4), &[]));
    expect(&whole, 4);
}

#[test]
fn a_part_says_which_it_is_in_any_integer() {
    let dir = Dir::new();
    let part = |no: Vec<u8>, count: Vec<u8>| dir.write("model.gguf", gguf(&block(0), &[no, count]));
    let number = |key: &str, (kind, bytes): (u32, usize), value: u64| {
        pair(key, kind, &value.to_le_bytes()[..bytes])
    };
    for kind in [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (10, 8), (11, 8)] {
        let path = part(number("split.no", kind, 1), number("split.count", kind, 3));
        refused(&path, 0, &["part 2 of 3 of a split GGUF"]);
    }
    // A part that does not say so is not read as a whole file.
    let float = |key: &str| pair(key, 6, &2f32.to_le_bytes());
    refused(&part(float("split.no"), uint("split.count", 3)), 0, &["split.no", "given 2"]);
    refused(&part(uint("split.no", 0), float("split.count")), 0, &["split.count", "given 2"]);
    refused(&part(text("other", "key"), uint("split.count", 3)), 0, &["split.no", "nothing"]);
}

#[test]
fn numbers_of_parts_that_make_no_sense_end_at_once() {
    let dir = Dir::new();
    for (no, count) in [(0, u32::MAX), (u32::MAX, 2), (7, 3), (0, 0), (0, 1)] {
        let path = dir.write("m-00001-of-00002.gguf", gguf(&block(0), &split(no, count, 3)));
        match load_layer(&path, &at(0)) {
            Ok(layer) => expect_triple(&layer, K, H, 0),
            Err(e) => assert!(no > 0 && e.to_string().contains("of a split GGUF"), "{e}"),
        }
    }
}

/// Two shards, and the index that joins them.
fn sharded(dir: &Dir, index: &str, mark: &str) -> [PathBuf; 2] {
    let [a, b] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let (first, second) =
        ([mlp(0), mlp(1)[..1].to_vec()].concat(), [mlp(1)[1..].to_vec(), mlp(2)].concat());
    let named = |tensors: &[T], file| {
        tensors.iter().map(|t| format!("{:?}: {file:?}", t.name)).collect::<Vec<_>>()
    };
    let map = [named(&first, a), named(&second, b)].concat().join(", ");
    if !index.is_empty() {
        dir.write(index, format!("{mark}{{\"weight_map\": {{{map}}}}}"));
    }
    [dir.write(a, safetensors(&first)), dir.write(b, safetensors(&second))]
}

#[test]
fn a_shard_is_read_with_the_others() {
    for (index, mark) in [
        ("model.safetensors.index.json", ""),
        ("model.safetensors.index.json", "\u{feff}"),
        ("other.safetensors.index.fp16.json", ""),
        // Without an index, by their numbers.
        ("", ""),
    ] {
        let dir = Dir::new();
        let [a, b] = sharded(&dir, index, mark);
        for path in [a.as_path(), &b, dir.path()] {
            (0..3).for_each(|layer| expect(path, layer));
        }
        std::fs::remove_file(&b).unwrap();
        for path in [a.as_path(), dir.path()] {
            expect(path, 0);
            refused(
                path,
                1,
                &["model-00002-of-00002.safetensors", "not there", "partial download"],
            );
        }
    }
}

#[test]
fn a_damaged_index_of_a_directory_is_an_error() {
    for index in ["model.safetensors.index.json", "other.safetensors.index.json"] {
        for text in ["", "{\"weight_map\"", "null", "{\"weight_map\": null}"] {
            let dir = Dir::new();
            dir.write("a.safetensors", safetensors(&mlp(0)));
            dir.write(index, text);
            refused(dir.path(), 0, &[index]);
        }
    }
}

#[test]
fn an_index_that_does_not_name_a_file_says_nothing_about_it() {
    let dir = Dir::new();
    sharded(&dir, "model.safetensors.index.json", "");
    let other = dir.write("other.safetensors", safetensors(&mlp(7)));
    expect(&other, 7);
    dir.write("x.safetensors.index.json", "{");
    expect(&other, 7);
}

#[test]
fn a_usable_file_wins_over_an_index_that_is_stale() {
    for index in [
        r#"{"weight_map": {}}"#,
        "",
        "{",
        r#"{"weight_map": {"a": "gone.safetensors"}}"#,
        r#"{"weight_map": {"a": "here.safetensors", "b": "gone.safetensors"}}"#,
    ] {
        let dir = Dir::new();
        dir.write("model.safetensors.index.json", index);
        dir.write("here.safetensors", safetensors(&[t("a", "F32", &[1], 1)]));
        dir.write("model.safetensors", safetensors(&mlp(0)));
        expect(dir.path(), 0);
    }
    // An index that is whole is the model.
    let dir = Dir::new();
    sharded(&dir, "model.safetensors.index.json", "");
    dir.write("model.safetensors", safetensors(&mlp(9)));
    expect(dir.path(), 2);
    // Nothing else is there: the index says what is missing.
    let dir = Dir::new();
    let [a, b] = sharded(&dir, "model.safetensors.index.json", "");
    [a, b].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    refused(dir.path(), 0, &["model-00001-of-00002.safetensors", "not there", "index.json"]);
}

#[test]
fn the_only_model_of_a_directory_is_taken() {
    let hf = safetensors(&mlp(0));
    let lone = [text("general.architecture", "llama")];
    for (name, bytes) in [
        ("model.safetensors", &hf),
        ("consolidated.safetensors", &hf),
        ("diffusion_pytorch_model.safetensors", &hf),
        ("diffusion_pytorch_model-00001-of-00001.fp16.safetensors", &hf),
        ("model-00001-of-00001.safetensors", &hf),
        ("pytorch_model.safetensors", &hf),
        ("model.fp16.safetensors", &hf),
        ("tiny-q4_0.gguf", &gguf(&block(0), &lone)),
    ] {
        let dir = Dir::new();
        for other in ["config.json", "tokenizer.json", "params.json"] {
            dir.write(other, "{}");
        }
        dir.write("README.md", "# A model");
        dir.write("pytorch_model.bin", b"PK\x03\x04");
        dir.write(name, bytes);
        expect(dir.path(), 0);
    }
}

#[test]
fn several_models_in_a_directory_are_listed() {
    let dir = Dir::new();
    dir.write("a.gguf", gguf(&block(0), &[]));
    dir.write("b.safetensors", safetensors(&mlp(0)));
    split_gguf(&dir, &[block(0), block(1)]);
    refused(dir.path(), 0, &["several files", "a.gguf, b.safetensors, m-00001-of-00002.gguf"]);
    // The usual name is the model all the same.
    dir.write("model.safetensors", safetensors(&mlp(3)));
    expect(dir.path(), 3);
}

#[test]
fn a_directory_without_a_model_says_what_to_do() {
    for (name, parts) in [
        ("pytorch_model.bin", &["save_file", "glob('pytorch_model*.bin')"][..]),
        ("pytorch_model-00001-of-00002.bin", &["glob('pytorch_model*.bin')"]),
        ("consolidated.00.pth", &["glob('consolidated*.pth')"]),
        ("it's.bin", &["glob('*.bin')"]),
        ("model.safetensors.incomplete", &["has not ended"]),
        ("notes.txt", &["no model here", "notes.txt"]),
    ] {
        let dir = Dir::new();
        dir.write(name, b"PK\x03\x04");
        refused(dir.path(), 0, parts);
    }
    let dir = Dir::new();
    std::fs::create_dir(dir.path().join("snapshots")).unwrap();
    refused(dir.path(), 0, &["Hugging Face cache", "snapshots"]);
}

/// Also of a tensor by its name, as activations are given.
#[test]
fn a_tensor_of_another_shard_is_found() {
    let dir = Dir::new();
    let [a, _] = sharded(&dir, "", "");
    let spec = format!("{}#model.layers.2.mlp.up_proj.weight", a.display());
    assert_eq!(read_matrix(&spec).unwrap().shape(), [H, K]);
}
