//! What is wrong far from a layer does not stop it; what is no model at all is named.

use crate::support::layer::{at, expect_triple, refused, triple};
use crate::support::*;
use swiglu_formats::{
    Bytes, FormatError, Model, load_layer, load_layer_from, load_layer_from_bytes,
    matrix_from_safetensors_bytes, read_matrix,
};

const K: usize = 5;
const H: usize = 3;

fn block() -> Vec<T> {
    triple(
        ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"],
        "F32",
        K,
        H,
        1,
    )
}

/// The layer is read in spite of the tensor `odd`, which is refused with `said`.
#[track_caller]
fn only_odd_is_refused(file: Vec<u8>, odd: &str, said: &str) {
    let model = Model::from_bytes(&Bytes::from(file)).unwrap();
    expect_triple(&load_layer_from(&model, &at(0)).unwrap(), K, H, 1);
    assert!(model.names().contains(&odd), "{:?}", model.names());
    let e = model.tensor(odd).and_then(|t| match t.stored.block() {
        Some(_) => Ok(()),
        None => Err(FormatError::UnsupportedDtype {
            path: "f".into(),
            tensor: odd.into(),
            dtype: t.stored.to_string(),
            supported: "",
        }),
    });
    let e = e.unwrap_err().to_string();
    assert!(e.contains(said), "{said}: {e}");
}

/// A GGUF file of the layer with one more entry, which is written as given.
fn gguf_with_entry(name: &str, ne: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut entry = gguf_string(name);
    entry.extend_from_slice(&(ne.len() as u32).to_le_bytes());
    ne.iter().for_each(|d| entry.extend_from_slice(&d.to_le_bytes()));
    entry.extend_from_slice(&kind.to_le_bytes());
    entry.extend_from_slice(&offset.to_le_bytes());
    // Behind the header and before the first tensor: of the same length as what it replaces.
    let plain = gguf(&block(), &[]);
    let headers: usize = block().iter().map(|t| 8 + t.name.len() + 4 + 16 + 4 + 8).sum();
    let (front, data) = (24 + headers, (24 + headers).next_multiple_of(32));
    let mut out = plain[..front].to_vec();
    out[8..16].copy_from_slice(&4u64.to_le_bytes());
    out.extend_from_slice(&entry);
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend_from_slice(&plain[data..]);
    out
}

#[test]
fn unknown_types_only_matter_when_read() {
    let header = r#"{"t":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]},"u":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#;
    let file = raw_safetensors(header, &[0; 6]);
    assert!(matrix_from_safetensors_bytes(file.clone(), "u").is_ok());
    let e = matrix_from_safetensors_bytes(file, "t").unwrap_err();
    assert!(matches!(&e, FormatError::UnsupportedDtype { dtype, .. } if dtype == "F8_E4M3"), "{e}");

    let other = T { name: "q".into(), dtype: "IQ4_XS", shape: vec![1, 256], bytes: vec![0; 136] };
    let f = gguf(&[other, t("f", "F32", &[1, 4], 1)], &[]);
    let model = Model::from_bytes(&Bytes::from(f)).unwrap();
    assert_eq!(model.names(), ["f", "q"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, gguf(&[t("f", "F32", &[1, 4], 1)], &[])).unwrap();
    assert_eq!(read_matrix(path.to_str().unwrap()).unwrap().shape(), [1, 4]);
}

#[test]
fn an_odd_tensor_of_gguf_stops_only_itself() {
    for (ne, kind, offset, said) in [
        (&[4u64][..], 999, 0, "number 999"),
        (&[4], 0, 7, "a multiple of 32"),
        (&[4], 0, 1 << 40, "truncated"),
        (&[4], 0, u64::MAX - 31, "within the file"),
        (&[1 << 40], 0, 0, "truncated"),
        (&[1 << 62], 0, 0, "2^64 bytes"),
        (&[1 << 32, 1 << 32], 0, 0, "2^64 elements"),
        (&[33], 2, 192, "whole Q4_0 blocks"),
        (&[], 0, 192, "1 to 4"),
        (&[1, 1, 1, 1, 1], 0, 192, "1 to 4"),
    ] {
        only_odd_is_refused(gguf_with_entry("odd", ne, kind, offset), "odd", said);
    }
    // A broken name, which nobody asks for.
    let mut file = gguf_with_entry("??", &[4], 999, 0);
    let name = file.windows(2).position(|w| w == b"??").unwrap();
    file[name] = 0xff;
    let model = Model::from_bytes(&Bytes::from(file)).unwrap();
    expect_triple(&load_layer_from(&model, &at(0)).unwrap(), K, H, 1);
}

#[test]
fn bytes_that_two_tensors_have_are_refused_in_both() {
    let file = gguf_with_entry("blk.1.ffn_up.weight", &[4], 0, 0);
    let model = Model::from_bytes(&Bytes::from(file)).unwrap();
    for name in ["blk.0.ffn_gate.weight", "blk.1.ffn_up.weight"] {
        assert!(model.tensor(name).unwrap_err().to_string().contains("bytes of its own"));
    }
    assert!(model.tensor("blk.0.ffn_up.weight").is_ok());
    refused(load_layer_from(&model, &at(0)), &["blk.0.ffn_gate.weight"]);
    let twice = gguf_with_entry("blk.0.ffn_up.weight", &[4], 999, 0);
    refused(load_layer_from_bytes(twice, &at(0)), &["each name once"]);
}

#[test]
fn an_odd_key_of_gguf_stops_nothing() {
    let keys = [
        pair("a.bool", 7, &[2]),
        text("tokenizer.chat", "a"),
        text("tokenizer.chat", "b"),
        uint("a.twice", 1),
        uint("a.twice", 1),
        [&3u64.to_le_bytes()[..], b"k\xff\xfe", &4u32.to_le_bytes(), &[0; 4]].concat(),
    ];
    let layer = load_layer_from_bytes(gguf(&block(), &keys), &at(0)).unwrap();
    expect_triple(&layer, K, H, 1);
}

#[test]
fn an_odd_entry_of_safetensors_stops_only_itself() {
    let size: usize = block().iter().map(|t| t.bytes.len()).sum();
    for (odd, more, said) in [
        (r#"{"dtype":"NEW","shape":[2],"data_offsets":[0,0]}"#.to_owned(), 0, "NEW"),
        (
            format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":[{size},{}]}}"#, size + 4),
            4,
            "8 bytes",
        ),
        (
            format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":[{size},{}]}}"#, size + 8),
            4,
            "truncated",
        ),
        (r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#.into(), 0, "[8, 0]"),
        (r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#.into(), 0, "JSON"),
        (r#"{"dtype":7,"shape":[2]}"#.into(), 0, "JSON"),
        ("null".into(), 0, "JSON"),
        ("[[[[]]]]".into(), 9, "JSON"),
    ] {
        let mut file = safetensors_with(
            &block(),
            &format!(r#""odd":{odd},"__metadata__":{{"n":1,"t":"x"}}"#),
            0,
        );
        file.resize(file.len() + more, 0);
        only_odd_is_refused(file, "odd", said);
    }
}

/// The other entry has a wrong offset, into the layer; which of them is wrong, the file does not say.
#[test]
fn shared_bytes_of_safetensors_are_refused_when_they_are_read() {
    let odd = r#""odd":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let model = Model::from_bytes(&Bytes::from(safetensors_with(&block(), odd, 0))).unwrap();
    for name in ["odd", "blk.0.ffn_gate.weight"] {
        assert!(model.tensor(name).unwrap_err().to_string().contains("bytes that"));
    }
    assert!(model.tensor("blk.0.ffn_down.weight").is_ok());
    refused(load_layer_from(&model, &at(0)), &["blk.0.ffn_gate.weight"]);
}

#[test]
fn a_file_that_was_cut_serves_the_layers_it_has() {
    let later = triple(
        ["blk.1.ffn_gate.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"],
        "F32",
        K,
        H,
        5,
    );
    let all = [block(), later].concat();
    for mut file in [gguf(&all, &[]), safetensors(&all)] {
        file.truncate(file.len() - 100);
        let layer = |n| load_layer_from_bytes(file.clone(), &at(n));
        expect_triple(&layer(0).unwrap(), K, H, 1);
        refused(layer(1), &["truncated", "blk.1.ffn"]);
    }
}

/// Under the name of each format, and as a shard.
#[test]
fn what_a_failed_download_leaves_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let lfs = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 988097824\n",
        "ab".repeat(32)
    );
    let zip =
        |name: &[u8]| [&b"PK\x03\x04"[..], &[0; 22], &[name.len() as u8, 0, 0, 0], name].concat();
    let mut tar = vec![b'a'; 512];
    tar[257..262].copy_from_slice(b"ustar");
    let index = r#"{"weight_map":{"model.layers.0.mlp.gate_proj.weight":"s.safetensors","model.layers.0.mlp.up_proj.weight":"s.safetensors"}}"#;
    for (bytes, parts) in [
        (lfs.as_bytes(), &["Git LFS pointer", "988097824 bytes", "git lfs pull"][..]),
        (b"../../.git/annex/objects/a/b/MD5E-s5--0", &["git-annex", "git annex get"]),
        (
            b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head>",
            &["HTML page", "Sign in", "download"],
        ),
        (b"\n <HTML><body>", &["HTML page"]),
        (b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", &["XML", "download"]),
        (br#"{"error":"Repository not found"}"#, &["Repository not found", "download"]),
        (b"Entry not found", &["Entry not found", "download"]),
        ("\u{feff}größer".as_bytes(), &["text", "größer"]),
        (&zip(b"archive/data.pkl"), &["torch.save", "save_file", "weights_only=True"]),
        (&zip(b"arr_0.npy"), &["npz", "save_file"]),
        (&zip(b"x.txt"), &["zip archive", "x.txt", "unpack"]),
        (b"\x80\x02}q\0X\x05\0\0\0alphaq\x01K\x01s.", &["pickle", "save_file"]),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", &["pickle", "save_file"]),
        (&[0; 4096], &["4096 zeros", "download"]),
        (&[0; 9999], &["the first 4096 bytes are zeros", "download"]),
        (b"", &["is empty", "download"]),
        (b"\x1f\x8b\x08\0rest", &["gzip", "gzip -dc"]),
        (b"\x28\xb5\x2f\xfdrest", &["zstd"]),
        (b"\x89HDF\r\n\x1a\nrest", &["HDF5", "safetensors"]),
        (b"\xff\xfeE\0r\0", &["UTF-16", "download"]),
        (b"tjgg\x03\0\0\0", &["before GGUF", "llama.cpp"]),
        (&tar, &["tar archive"]),
    ] {
        let at_path = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        std::fs::write(dir.path().join("i.json"), index).unwrap();
        let shard = dir.path().join("i.json");
        let given = [at_path("m.safetensors"), at_path("m.gguf"), at_path("m"), at_path("m.json")];
        at_path("s.safetensors");
        for path in given.iter().chain([&shard]) {
            let e = refused(load_layer(path, &at(0)), parts).to_string();
            let named = if *path == shard { "s.safetensors" } else { "m" };
            assert!(
                e.contains(&dir.path().join(named).display().to_string()) && e.len() < 700,
                "{e}"
            );
        }
    }
}

#[test]
fn versions_that_are_not_read_say_what_to_do() {
    for (version, parts) in [
        (1, &["2 or 3", "convert the model again"][..]),
        (4, &["2 or 3", "newer than this program"]),
        (4000, &["2 or 3", "damaged"]),
        (3u32.swap_bytes(), &["big-endian", "gguf-convert-endian"]),
        (2u32.swap_bytes(), &["big-endian"]),
    ] {
        let file = gguf_with(version, 32, &block(), &[]);
        refused(load_layer_from_bytes(file, &at(0)), parts);
    }
}
