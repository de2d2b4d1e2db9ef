//! Quantised types against hand-made blocks, and against an independent decoder.

use crate::support::reference::{self, TYPES};
use crate::support::*;
use half::f16;
use std::path::Path;
use swiglu_core::{Arrangement, Orientation};
use swiglu_formats::gguf::quant::*;
use swiglu_formats::{Bytes, LayerWeights, LoadOptions, TensorNames, gguf, load_layer_from_bytes};

fn half(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

fn block<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    parts.concat().try_into().unwrap()
}

#[test]
fn small_blocks_by_hand() {
    // Byte j: low nibble j, high nibble 15 - j.
    let nibbles: Vec<u8> = (0..16).map(|j| j | (15 - j) << 4).collect();
    let want = |f: &dyn Fn(f32) -> f32| -> Vec<f32> {
        (0..16).chain((0..16).rev()).map(|q| f(q as f32)).collect()
    };
    let y = decode_q4_0(&block(&[&half(0.5), &nibbles]));
    assert_eq!(y.to_vec(), want(&|q| 0.5 * (q - 8.0)));
    let y = decode_q4_1(&block(&[&half(0.25), &half(-3.0), &nibbles]));
    assert_eq!(y.to_vec(), want(&|q| 0.25 * q - 3.0));

    // Fifth bit set for elements 0, 17 and 31.
    let bits = (1u32 | 1 << 17 | 1 << 31).to_le_bytes();
    let mut five = want(&|q| q);
    for i in [0, 17, 31] {
        five[i] += 16.0;
    }
    let y = decode_q5_0(&block(&[&half(2.0), &bits, &nibbles]));
    assert_eq!(y.to_vec(), five.iter().map(|q| 2.0 * (q - 16.0)).collect::<Vec<_>>());
    let y = decode_q5_1(&block(&[&half(2.0), &half(0.5), &bits, &nibbles]));
    assert_eq!(y.to_vec(), five.iter().map(|q| 2.0 * q + 0.5).collect::<Vec<_>>());

    let bytes: Vec<u8> = (0..32).map(|i| (i * 8 - 128i32).to_le_bytes()[0]).collect();
    let y = decode_q8_0(&block(&[&half(-0.125), &bytes]));
    assert_eq!(y[0], 16.0);
    assert_eq!(y[31], -0.125 * 120.0);
}

#[test]
fn k_blocks_by_hand() {
    // Scales 1, 2, 3, 63 | 17, 33, 49, 62 and minima 4, 5, 6, 7 | 20, 36, 52, 63: every bit field
    // of the packing is used.
    let sc = [1u8, 2, 3, 63, 17, 33, 49, 62];
    let mn = [4u8, 5, 6, 7, 20, 36, 52, 63];
    let mut scales = [0u8; 12];
    for j in 0..4 {
        scales[j] = sc[j] | (sc[j + 4] >> 4) << 6;
        scales[j + 4] = mn[j] | (mn[j + 4] >> 4) << 6;
        scales[j + 8] = sc[j + 4] & 15 | (mn[j + 4] & 15) << 4;
    }
    let q = |i: usize| (i * 7 % 16) as u8;
    let mut nibbles = [0u8; 128];
    for i in 0..256 {
        let (run, l) = (i / 64, i % 64);
        nibbles[run * 32 + l % 32] |= q(i) << (if l < 32 { 0 } else { 4 });
    }
    let y = decode_q4_k(&block(&[&half(0.5), &half(0.25), &scales, &nibbles]));
    for (i, v) in y.into_iter().enumerate() {
        let want = 0.5 * f32::from(sc[i / 32]) * f32::from(q(i)) - 0.25 * f32::from(mn[i / 32]);
        assert_eq!(v, want, "{i}");
    }
    let high = |i: usize| i.is_multiple_of(3);
    let mut bits = [0u8; 32];
    for i in (0..256).filter(|&i| high(i)) {
        bits[i % 32] |= 1 << (i / 32);
    }
    let y = decode_q5_k(&block(&[&half(0.5), &half(0.25), &scales, &bits, &nibbles]));
    for (i, v) in y.into_iter().enumerate() {
        let q = f32::from(q(i)) + if high(i) { 16.0 } else { 0.0 };
        let want = 0.5 * f32::from(sc[i / 32]) * q - 0.25 * f32::from(mn[i / 32]);
        assert_eq!(v, want, "{i}");
    }
    // One element at a time: value 33 (one above the bias) alone in a block of -32.
    for i in 0..256usize {
        let (n, run, l) = (i / 128, i % 128 / 32, i % 32);
        let mut b = [0u8; 210];
        b[n * 64 + (run % 2) * 32 + l] = 1 << (if run < 2 { 0 } else { 4 });
        b[128 + n * 32 + l] = 2 << (2 * run);
        for (s, scale) in b[192..208].iter_mut().enumerate() {
            *scale = (s as u8).wrapping_sub(8);
        }
        b[208..].copy_from_slice(&half(1.0));
        for (e, v) in decode_q6_k(&b).into_iter().enumerate() {
            let scale = (e / 16) as f32 - 8.0;
            assert_eq!(v, scale * if e == i { 1.0 } else { -32.0 }, "{i} {e}");
        }
    }
}

#[test]
fn every_type_matches_the_independent_decoder() {
    for kind in TYPES {
        let block: BlockType = kind.parse().unwrap();
        assert_eq!(block.bytes(), reference::block_bytes(kind));
        assert_eq!(block.elements(), reference::block_elements(kind));
        for seed in 0..40 {
            let bytes = random_blocks(kind, 5, seed);
            let mut ours = Vec::new();
            block.decode(&bytes, |v| ours.push(v));
            let theirs = reference::decode(kind, &bytes);
            assert_eq!(ours.len(), theirs.len());
            for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                // Rounded once: the nearest f32 of the exact value.
                assert_eq!(*a, *b as f32, "{kind} seed {seed} element {i}");
            }
        }
    }
}

/// Values of the Python package gguf, see `scripts/make_gguf_types.py`.
#[test]
fn every_type_decodes_as_the_gguf_package_does() {
    let dir = gguf_types();
    for block in BlockType::ALL {
        let file = std::fs::read(dir.join(format!("{block}.bin"))).unwrap();
        let blocks = file.len() / (block.bytes() + 4 * block.elements());
        let (bytes, values) = file.split_at(blocks * block.bytes());
        let mut values = values.as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v));
        let mut at = 0;
        block.decode(bytes, |ours| {
            let theirs = values.next().unwrap();
            let same = ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan();
            assert!(same, "{block}, element {at}: {ours:e}, not {theirs:e}");
            at += 1;
        });
        assert_eq!((at, blocks), (8 * block.elements(), 8), "{block}");
        assert!(values.next().is_none());
    }
}

/// As [`every_type_decodes_as_the_gguf_package_does`], for so many blocks that every code is met.
#[test]
fn digests_of_many_blocks_are_those_of_the_gguf_package() {
    use swiglu_core::random::bits;
    let text = std::fs::read_to_string(gguf_types().join("digests.txt")).unwrap();
    assert_eq!(text.lines().count(), BlockType::ALL.len());
    for (line, block) in text.lines().zip(BlockType::ALL) {
        let words = (2048 * block.bytes() / 8) as u64;
        let bytes: Vec<u8> =
            (0..words).flat_map(|i| bits(block.id().into(), i).to_le_bytes()).collect();
        let (mut digest, mut i) = (0u64, 0);
        block.decode(&bytes, |v| {
            let value = if v.is_nan() { 0x7FC0_0000 } else { v.to_bits() };
            digest = digest.wrapping_add(u64::from(value).wrapping_mul(bits(1, i) | 1));
            i += 1;
        });
        assert_eq!(line, format!("{block} {} {digest:#018x}", block.id()));
    }
}

#[test]
fn a_layer_of_every_type_loads_and_keeps_its_blocks() {
    for block in BlockType::ALL {
        let kind = block.name();
        let (k, h) = (256usize, 512usize);
        let tensor = |name: &str, rows: usize, cols: usize, seed| T {
            name: name.into(),
            dtype: kind,
            shape: vec![rows, cols],
            bytes: random_blocks(kind, rows * cols / block.elements(), seed),
        };
        let tensors = [
            tensor("blk.3.ffn_gate.weight", h, k, 1),
            tensor("blk.3.ffn_up.weight", h, k, 2),
            tensor("blk.3.ffn_down.weight", k, h, 3),
        ];
        let file = gguf(&tensors, &[text("general.architecture", "llama")]);
        let options = LoadOptions::new(3);
        let layer = load_layer_from_bytes(file, &options).unwrap();
        assert_eq!((layer.hidden(), layer.intermediate()), (k, h));
        assert_eq!(layer.stored_dtype().to_string(), kind);
        assert_eq!(*layer.stored_gate_up()[1].data, tensors[1].bytes[..]);
        let gate_up = layer.gate_up::<f32>().unwrap();
        let mut want = Vec::new();
        block.decode(&tensors[1].bytes, |v| want.push(v));
        assert_eq!(gate_up.tensors()[1].as_slice(), want);
        layer.expect_finite().unwrap();

        let [gate, up] = layer.quantized_gate_up().unwrap();
        let down = layer.quantized_down().unwrap().unwrap();
        assert_eq!((gate.shape(), up.shape(), down.shape()), ([h, k], [h, k], [k, h]));
        assert_eq!(gate.kind().to_string(), kind);
        for (ours, stored) in [gate, up, down].iter().zip(&tensors) {
            assert_eq!(ours.bytes(), stored.bytes);
        }
        assert_eq!(up.to_matrix::<f32>().unwrap().as_slice(), want);
    }
}

#[test]
fn blocks_are_given_as_they_are_or_refused_with_a_reason() {
    let (k, h) = (32usize, 64usize);
    let block = |name: &str, kind: &'static str, rows: usize, cols: usize, seed| {
        let bytes = match kind {
            "F32" => vec![0; rows * cols * 4],
            _ => random_blocks(kind, rows * cols / 32, seed),
        };
        T { name: name.into(), dtype: kind, shape: vec![rows, cols], bytes }
    };
    let names = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"];
    let layer = |types: [&'static str; 3], options: &LoadOptions| {
        let [gate, up, down] = [
            block(names[0], types[0], h, k, 1),
            block(names[1], types[1], h, k, 2),
            block(names[2], types[2], k, h, 3),
        ];
        let architecture = text("general.architecture", "llama");
        load_layer_from_bytes(gguf(&[gate, up, down], &[architecture]), options).unwrap()
    };
    let plain = LoadOptions::default();
    let refused = |layer: LayerWeights, part: &str| {
        let e = layer.quantized_gate_up().unwrap_err().to_string();
        assert!(e.contains(part) && e.contains("decode"), "{e}");
    };
    refused(layer(["Q4_0", "Q8_0", "Q4_0"], &plain), "Q4_0 with");
    refused(layer(["Q4_0", "F32", "Q4_0"], &plain), "ffn_up.weight as F32");
    let mixed = layer(["Q4_0", "Q4_0", "F32"], &plain);
    assert!(mixed.quantized_gate_up().is_ok());
    assert!(mixed.quantized_down().unwrap_err().to_string().contains("ffn_down.weight as F32"));
    let headless = load_layer_from_bytes(
        gguf(&[block(names[0], "Q4_0", h, k, 1), block(names[1], "Q4_0", h, k, 2)], &[]),
        &plain,
    );
    assert!(headless.unwrap().quantized_down().unwrap().is_none());

    // One tensor of both: each half in one piece, or not.
    let both = block("both", "Q4_0", 2 * h, k, 4);
    let packed = |arrangement| {
        let names = TensorNames::default().with_gate_up("both");
        let (arrangement, orientation) = (Some(arrangement), Some(Orientation::OutIn));
        let options = LoadOptions::default()
            .with_names(names)
            .with_arrangement(arrangement)
            .with_orientation(orientation);
        load_layer_from_bytes(gguf(std::slice::from_ref(&both), &[]), &options).unwrap()
    };
    for (arrangement, gate_at) in
        [(Arrangement::PackedGateFirst, 0), (Arrangement::PackedUpFirst, h)]
    {
        let layer = packed(arrangement);
        let [gate, up] = layer.quantized_gate_up().unwrap();
        let row = |r: usize| &both.bytes[r * 18..][..18];
        assert_eq!((gate.row(3), up.row(3)), (row(gate_at + 3), row(h - gate_at + 3)));
    }
    let interleaved = packed(Arrangement::Interleaved { group: 1 });
    refused(interleaved, "interleaved");

    // Blocks along the outputs: the other orientation of a square layer.
    let square = |name: &str, seed| block(name, "Q4_0", 64, 64, seed);
    let file = gguf(&[square("g", 1), square("u", 2)], &[]);
    let names = TensorNames::default().with_gate("g").with_up("u");
    let options = LoadOptions::default().with_names(names).with_orientation(Orientation::InOut);
    let layer = load_layer_from_bytes(file, &options).unwrap();
    refused(layer, "orientation in-out");
}

/// Rows that are no whole blocks, and data that ends within them.
#[test]
fn ragged_rows_and_short_data_are_refused() {
    for block in BlockType::ALL {
        let refusal = |cols, bytes| {
            let bytes = vec![0; bytes];
            let t = T { name: "t".into(), dtype: block.name(), shape: vec![3, cols], bytes };
            let file = gguf(&[t], &[]);
            let file = gguf::parse(&Bytes::from(file), Path::new("f")).unwrap();
            file.faults["t"].to_string()
        };
        let (elements, bytes) = (block.elements(), block.bytes());
        let whole = format!("whole {block} blocks of {elements}");
        for cols in [1, elements / 2, elements - 1, elements + 1, 3 * elements / 2] {
            assert!(refusal(cols, 6 * bytes).contains(&whole), "{block} {cols}");
        }
        for missing in [bytes, 3 * bytes] {
            // The file is padded to 32 bytes.
            let e = refusal(elements * 8, 3 * 8 * bytes - missing - 32);
            assert!(e.contains("truncated") && e.contains("data of t"), "{block}: {e}");
        }
    }
}

/// Any bytes are weights, or refused for values that are not finite.
#[test]
fn blocks_of_any_bytes_decode() {
    for block in BlockType::ALL {
        for byte in [0x00, 0x7F, 0x80, 0xAA, 0xFF] {
            let bytes = vec![byte; 2 * block.bytes()];
            let mut values = 0;
            block.decode(&bytes[1..], |_| values += 1);
            assert_eq!(values, block.elements(), "{block}: the rest is no whole block");
            let w = QuantizedRef::new(block, &bytes, 2, block.elements()).unwrap();
            assert_eq!(w.to_matrix::<f32>().unwrap().shape(), [2, block.elements()]);
            let _ = w.expect_finite("w");
        }
    }
}

#[test]
fn a_non_finite_scale_is_found() {
    let mut bytes = random_blocks("Q8_0", 4, 9);
    bytes[34..36].copy_from_slice(&f16::NAN.to_le_bytes());
    let t = |name: &str, bytes: Vec<u8>| T {
        name: name.into(),
        dtype: "Q8_0",
        shape: vec![2, 64],
        bytes,
    };
    let file = gguf(
        &[t("blk.0.ffn_gate.weight", random_blocks("Q8_0", 4, 1)), t("blk.0.ffn_up.weight", bytes)],
        &[],
    );
    let e = load_layer_from_bytes(file, &LoadOptions::default()).unwrap().expect_finite();
    let e = e.unwrap_err().to_string();
    assert!(e.contains("blk.0.ffn_up.weight[0, 32]"), "{e}");
}
