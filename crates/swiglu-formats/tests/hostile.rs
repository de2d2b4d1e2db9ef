//! Files that are broken on purpose.

use crate::support::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use swiglu_core::BlockType;
use swiglu_formats::{
    Bytes, FileFormat, FormatError, LoadOptions, Model, gguf as gguf_format, load_layer,
    load_layer_from_bytes, matrix_from_npy_bytes, matrix_from_safetensors_bytes, read_matrix,
    safetensors as safetensors_format,
};

fn parse_st(bytes: Vec<u8>) -> Result<safetensors_format::SafeTensors, FormatError> {
    safetensors_format::parse(&Bytes::from(bytes), Path::new("f.safetensors"))
}

fn parse_gguf(bytes: Vec<u8>) -> Result<gguf_format::Gguf, FormatError> {
    gguf_format::parse(&Bytes::from(bytes), Path::new("f.gguf"))
}

/// The first thing that is wrong, with the file or with one of its tensors.
fn wrong(faults: Result<BTreeMap<String, FormatError>, FormatError>) -> String {
    faults.map_or_else(
        |e| e.to_string(),
        |faults| faults.values().next().map(ToString::to_string).unwrap_or_default(),
    )
}

fn wrong_st(bytes: Vec<u8>) -> String {
    wrong(parse_st(bytes).map(|f| f.faults))
}

fn wrong_gguf(bytes: Vec<u8>) -> String {
    wrong(parse_gguf(bytes).map(|f| f.faults))
}

fn layer_tensors() -> Vec<T> {
    vec![
        t("blk.0.ffn_gate.weight", "F32", &[3, 5], 1),
        t("blk.0.ffn_up.weight", "F16", &[3, 5], 2),
        t("blk.0.ffn_down.weight", "BF16", &[5, 3], 3),
    ]
}

fn metadata() -> Vec<Vec<u8>> {
    let strings = [
        8u32.to_le_bytes().to_vec(),
        2u64.to_le_bytes().to_vec(),
        gguf_string("a"),
        gguf_string("bc"),
    ]
    .concat();
    let nested = [
        9u32.to_le_bytes().to_vec(),
        1u64.to_le_bytes().to_vec(),
        5u32.to_le_bytes().to_vec(),
        2u64.to_le_bytes().to_vec(),
        vec![0; 8],
    ]
    .concat();
    vec![
        text("general.architecture", "llama"),
        uint("llama.embedding_length", 5),
        pair("a.i8", 1, &[0xff]),
        pair("a.bool", 7, &[1]),
        pair("a.f32", 6, &1.5f32.to_le_bytes()),
        pair("a.i64", 11, &(-7i64).to_le_bytes()),
        pair("a.f64", 12, &2.5f64.to_le_bytes()),
        pair("a.strings", 9, &strings),
        pair("a.nested", 9, &nested),
    ]
}

#[test]
fn gguf_metadata_of_every_kind_is_read() {
    use gguf_format::metadata::Value;
    for version in [2, 3] {
        let f = parse_gguf(gguf_with(version, 32, &layer_tensors(), &metadata())).unwrap();
        assert_eq!(f.version, version);
        assert_eq!(f.metadata["a.i8"], Value::Int(-1));
        assert_eq!(f.metadata["a.bool"], Value::Bool(true));
        assert_eq!(f.metadata["a.f32"], Value::Float(1.5));
        assert_eq!(f.metadata["a.i64"], Value::Int(-7));
        assert_eq!(f.metadata["a.f64"], Value::Float(2.5));
        assert_eq!(f.metadata["a.strings"], Value::Array { len: 2, items: None });
        assert_eq!(f.metadata["a.nested"], Value::Array { len: 1, items: None });
        assert_eq!(f.architecture_value("embedding_length"), Some(5));
        assert_eq!(f.tensors[0].shape, [3, 5]);
    }
}

#[test]
fn every_truncation_is_an_error() {
    let st = safetensors(&layer_tensors());
    for len in 0..st.len() {
        let e = wrong_st(st[..len].to_vec());
        assert!(e.contains("truncated"), "{len}: {e}");
        load_layer_from_bytes(st[..len].to_vec(), &LoadOptions::default()).unwrap_err();
    }
    let full = gguf(&layer_tensors(), &metadata());
    // The last tensor's padding is not part of its data.
    for len in 0..full.len() - 2 {
        let e = wrong_gguf(full[..len].to_vec());
        let padding = e.is_empty() && len + 32 > full.len();
        assert!(padding || e.contains("truncated"), "{len}: {e}");
    }
}

#[test]
fn safetensors_headers_are_checked() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    for (header, data, what) in [
        (entry("F32", "[2]", "[0,8]"), 7, "truncated"),
        (entry("F32", "[2]", "[0,8]"), 9, "malformed"),
        (entry("F32", "[3]", "[0,8]"), 8, "12 bytes"),
        (entry("F32", "[2]", "[4,12]"), 12, "[0, …]"),
        (entry("F32", "[2]", "[8,0]"), 8, "[8, 0]"),
        (entry("F32", "[2]", "[0,18446744073709551615]"), 8, "truncated"),
        (entry("U8", "[18446744073709551615]", "[0,18446744073709551615]"), 8, "truncated"),
        (entry("F32", "[4611686018427387905]", "[0,4]"), 4, "2^64 bytes"),
        (entry("F32", "[18446744073709551615,2]", "[0,8]"), 8, "2^64 elements"),
        (entry("F32", "[-2]", "[0,8]"), 8, "JSON"),
        (entry("F32", "[2]", "[0,8,9]"), 8, "JSON"),
        (entry("F32", "2", "[0,8]"), 8, "JSON"),
        (r#"{"t":{"dtype":"F32","shape":[2]}}"#.into(), 8, "JSON"),
        ("[]".into(), 0, "JSON"),
        ("{".into(), 0, "JSON"),
        ("".into(), 0, "JSON"),
        ("{}{}".into(), 0, "JSON"),
        (format!("{{\"t\":{}", "[".repeat(100_000)), 0, "JSON"),
    ] {
        let e = wrong_st(raw_safetensors(&header, &vec![0; data]));
        assert!(e.contains(what), "{}: {e}", &header[..header.len().min(80)]);
        assert!(e.len() < 600);
    }
    // Two tensors: overlapping, with a gap, of one name.
    let two = |a: &str, b: &str, second: &str| {
        raw_safetensors(
            &format!(
                r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{a}}},"{second}":{{"dtype":"F32","shape":[2],"data_offsets":{b}}}}}"#
            ),
            &[0; 16],
        )
    };
    assert_eq!(wrong_st(two("[0,8]", "[8,16]", "b")), "");
    assert_eq!(wrong_st(two("[8,16]", "[0,8]", "b")), "");
    for shared in [two("[0,8]", "[4,12]", "b"), two("[0,8]", "[0,8]", "b")] {
        assert!(parse_st(shared).is_err(), "bytes of no tensor are behind them");
    }
    assert!(wrong_st(two("[0,8]", "[8,16]", "a")).contains("each name once"));
    // A header length of no file.
    for len in [u64::MAX, 1 << 63, 100_000_001, 100_000_000] {
        let bytes = [&len.to_le_bytes()[..], b"{}"].concat();
        assert!(parse_st(bytes).is_err());
    }
}

/// A GGUF file from raw header fields.
fn raw_gguf(version: u32, tensors: u64, pairs: u64, rest: &[u8]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend_from_slice(&version.to_le_bytes());
    out.extend_from_slice(&tensors.to_le_bytes());
    out.extend_from_slice(&pairs.to_le_bytes());
    out.extend_from_slice(rest);
    out.resize(out.len().max(256), 0);
    out
}

fn raw_tensor(name: &str, ne: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = gguf_string(name);
    out.extend_from_slice(&(ne.len() as u32).to_le_bytes());
    ne.iter().for_each(|d| out.extend_from_slice(&d.to_le_bytes()));
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&offset.to_le_bytes());
    out
}

#[test]
fn gguf_headers_are_checked() {
    let array = |kind: u32, len: u64| [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let deep = array(9, 1).repeat(100);
    let long = (1u64 << 63).to_le_bytes();
    let f = |ne: &[u64], kind, offset| raw_gguf(3, 1, 0, &raw_tensor("t", ne, kind, offset));
    for (bytes, what) in [
        (raw_gguf(1, 0, 0, &[]), "2 or 3"),
        (raw_gguf(4, 0, 0, &[]), "2 or 3"),
        (raw_gguf(3u32.swap_bytes(), 0, 0, &[]), "big-endian"),
        (raw_gguf(3, u64::MAX, 0, &[]), "for which there is room"),
        (raw_gguf(3, 0, u64::MAX, &[]), "for which there is room"),
        (raw_gguf(3, 1 << 40, 0, &[]), "truncated"),
        (raw_gguf(3, 0, 1, &long), "truncated"),
        (raw_gguf(3, 0, 1, &pair("k", 8, &long)), "truncated"),
        (raw_gguf(3, 0, 1, &pair("k", 13, &[])), "0 to 12"),
        (raw_gguf(3, 0, 1, &pair("k", 9, &array(8, u64::MAX))), "for which there is room"),
        (raw_gguf(3, 0, 1, &pair("k", 9, &array(9, u64::MAX))), "for which there is room"),
        (raw_gguf(3, 0, 1, &pair("k", 9, &array(10, 1 << 61))), "for which there is room"),
        (raw_gguf(3, 0, 1, &pair("k", 9, &array(99, 1))), "0 to 12"),
        (raw_gguf(3, 0, 1, &pair("k", 9, &deep)), "levels of arrays"),
        (raw_gguf(3, 0, 2, &[uint("k", 1), uint("k", 2)].concat()), "each key once"),
        (raw_gguf(3, 0, 1, &uint("general.alignment", 0)), "power of two"),
        (raw_gguf(3, 0, 1, &uint("general.alignment", 48)), "power of two below 2^32, given 48"),
        (raw_gguf(3, 0, 1, &text("general.alignment", "32")), "power of two"),
        (
            raw_gguf(3, 0, 1, &pair("general.alignment", 10, &(1u64 << 63).to_le_bytes())),
            "power of two",
        ),
        (f(&[], 0, 0), "1 to 4"),
        (f(&[1, 1, 1, 1, 1], 0, 0), "1 to 4"),
        (f(&[1 << 32, 1 << 32], 0, 0), "2^64 elements"),
        (f(&[u64::MAX, 0, 7], 0, 0), "truncated"),
        (f(&[1 << 62], 0, 0), "2^64 bytes"),
        (f(&[1 << 61], 0, 0), "truncated"),
        (f(&[4], 0, 7), "multiple of 32"),
        (f(&[4], 0, u64::MAX - 31), "within the file's"),
        (f(&[4], 0, 4096), "truncated"),
        (
            raw_gguf(
                3,
                2,
                0,
                &[raw_tensor("a", &[16], 0, 0), raw_tensor("b", &[16], 0, 32)].concat(),
            ),
            "that b has too",
        ),
        (
            raw_gguf(
                3,
                2,
                0,
                &[raw_tensor("a", &[8], 0, 0), raw_tensor("a", &[8], 0, 32)].concat(),
            ),
            "each name once",
        ),
    ] {
        let e = wrong_gguf(bytes.clone());
        // No elements, so no data: legal, and refused as a matrix.
        let nothing = || parse_gguf(bytes).is_ok_and(|f| f.tensors[0].shape.contains(&0));
        assert!(e.contains(what) || (what == "truncated" && nothing()), "{what}: {e}");
    }
}

#[test]
fn things_that_are_no_model_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let o = LoadOptions::default();
    let at = |name: &str, bytes: &[u8]| {
        let p = dir.path().join(name);
        std::fs::write(&p, bytes).unwrap();
        p
    };
    let e = load_layer(dir.path(), &o).unwrap_err();
    assert!(matches!(&e, FormatError::NoModel { found, .. } if found == "nothing"), "{e}");
    let e = load_layer(&dir.path().join("absent.gguf"), &o).unwrap_err();
    assert!(matches!(&e, FormatError::Io { .. }) && e.to_string().contains("absent.gguf"), "{e}");
    let e = load_layer(&at("x.npy", &npy(1, "{}", &[])), &o).unwrap_err();
    assert!(e.to_string().contains("npy does not hold a model"), "{e}");
    // Content decides over the extension.
    let st = safetensors(&layer_tensors());
    assert!(load_layer(&at("model.gguf", &st), &o).is_ok());
    assert!(load_layer(dir.path(), &o).is_ok());
    let sub = dir.path().join("model.safetensors");
    std::fs::create_dir(&sub).unwrap();
    let e = Bytes::map(&sub).unwrap_err();
    assert!(matches!(&e, FormatError::NotAFile { .. }), "{e}");
    let e = read_matrix(sub.to_str().unwrap()).unwrap_err();
    assert!(matches!(&e, FormatError::NoModel { .. }), "{e}");
    #[cfg(unix)]
    assert!(matches!(load_layer(Path::new("/dev/zero"), &o), Err(FormatError::NotAFile { .. })));
}

/// What every entry point does with bytes that may be anything.
fn exercise(bytes: &[u8]) {
    let shared = Bytes::from(bytes.to_vec());
    if let Ok(f) = safetensors_format::parse(&shared, Path::new("f")) {
        f.tensors.iter().for_each(|t| drop(matrix_from_safetensors_bytes(shared.clone(), &t.name)));
    }
    let _ = FileFormat::detect(bytes, Path::new("f.npz"));
    for model in
        [Model::from_bytes(&shared), Model::from_gguf_parts(&[shared.clone(), shared.clone()])]
    {
        let Ok(model) = model else { continue };
        model.names().into_iter().for_each(|name| drop(model.tensor(name)));
    }
    if let Ok(m) = matrix_from_npy_bytes(shared.clone()) {
        m.to_f64().unwrap();
    }
    if let Ok(layer) = load_layer_from_bytes(shared, &LoadOptions::default()) {
        let _ = (layer.gate_up::<f32>(), layer.down::<f32>(), layer.expect_finite());
        layer.describe();
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let q = |name: &str, dtype: &'static str| T {
        name: name.into(),
        dtype,
        shape: vec![2, 256],
        bytes: random_blocks(dtype, 512 / dtype.parse::<BlockType>().unwrap().elements(), 5),
    };
    let blocks = |gate, up| {
        let tensors = [q("blk.0.ffn_gate.weight", gate), q("blk.0.ffn_up.weight", up)];
        gguf(&tensors, &metadata())
    };
    vec![
        safetensors(&layer_tensors()),
        gguf(&layer_tensors(), &metadata()),
        gguf(
            &layer_tensors(),
            &[uint("split.count", 2), uint("split.no", 0), uint("split.tensors.count", 6)],
        ),
        blocks("Q6_K", "Q4_1"),
        blocks("IQ1_M", "Q3_K"),
        blocks("NVFP4", "IQ3_S"),
        npy(1, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", &[0; 24]),
        npy(2, "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 1, 3), }", &[0; 12]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: swiglu_testing::cases(2000), failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn mutated_files_never_panic(
        which in 0..seeds().len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let mut bytes = seeds().swap_remove(which);
        for (at, value, how) in edits {
            // The interesting bytes are at the front.
            let at = at.index(bytes.len().min(700));
            match how {
                0 => bytes[at] = value,
                1 => bytes[at] ^= 1 << (value % 8),
                2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff, b'0', b'9', b'{'][usize::from(value % 8)],
                _ => bytes.insert(at, value),
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        exercise(&bytes);
    }

    /// What the reference reader accepts is accepted and read alike, and the other way round.
    #[test]
    fn safetensors_agree_with_the_reference_reader(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        pad in 0usize..9,
    ) {
        let mut bytes = safetensors_with(&layer_tensors(), "", pad);
        for (at, value) in edits {
            let at = at.index(bytes.len().min(300));
            bytes[at] = value;
        }
        let ours = parse_st(bytes.clone());
        match safetensors::SafeTensors::deserialize(&bytes) {
            Ok(reference) => {
                let ours = ours.map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert_eq!(ours.tensors.len(), reference.len());
                for t in &ours.tensors {
                    let r = reference.tensor(&t.name).unwrap();
                    prop_assert_eq!(&t.shape[..], r.shape());
                    prop_assert_eq!(&*t.data, r.data());
                }
            }
            Err(e) => {
                // Only a type name that it does not know may be let through, and a tensor that is refused.
                let unknown = |f: &safetensors_format::SafeTensors| {
                    !f.faults.is_empty() || f.tensors.iter().any(|t| t.stored.block().is_none())
                };
                prop_assert!(ours.is_err() || ours.is_ok_and(|f| unknown(&f)), "{}", e);
            }
        }
    }

    #[test]
    fn gguf_round_trips(
        rows in 1usize..5, cols in 1usize..9, version in 2u32..4, shift in 3u32..9, count in 0usize..5
    ) {
        let alignment = 1usize << shift;
        let tensors: Vec<T> = (0..count)
            .map(|i| t(&format!("t{i}"), ["F32", "F16", "BF16", "F64"][i % 4], &[rows, cols], i))
            .collect();
        let pairs = [uint("general.alignment", alignment as u32)];
        let f = parse_gguf(gguf_with(version, alignment, &tensors, &pairs)).unwrap();
        prop_assert_eq!(f.tensors.len(), count);
        for (a, b) in f.tensors.iter().zip(&tensors) {
            prop_assert_eq!(&a.name, &b.name);
            prop_assert_eq!(&a.shape, &b.shape);
            prop_assert_eq!(&*a.data, &b.bytes[..]);
        }
    }
}
