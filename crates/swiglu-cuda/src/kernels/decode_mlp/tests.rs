use swiglu_core::quant::{BlockType, QuantizedType, QuantizedTypes};
use swiglu_core::{Activation, Numerics, WeightLayout};

use super::*;

const H200: Limits = Limits {
    multiprocessors: 132,
    shared: 232_448,
    cooperative: true,
    programmatic: true,
    tma: true,
};
/// An RTX 4090.
const ADA: Limits = Limits {
    multiprocessors: 128,
    shared: 101_376,
    cooperative: true,
    programmatic: false,
    tma: false,
};

const SHAPES: [[usize; 2]; 4] = [[896, 4864], [2048, 8192], [4096, 14336], [8192, 28672]];

fn problem(m: usize, [hidden, intermediate]: [usize; 2], dtype: DType) -> Problem {
    Problem::new(Op::Mlp, m, hidden, intermediate, dtype, Activation::SWIGLU)
        .with_numerics(Numerics::default_for(dtype))
        .with_layout(WeightLayout::HF)
}

fn decode(design: Design, problem: &Problem, limits: &Limits) -> Result<Decode, Obstacle> {
    Decode::check_problem(design, problem, limits)
}

#[test]
fn what_models_have_fits_and_all_blocks_run_at_once() {
    for limits in [H200, ADA] {
        for shape in SHAPES {
            for m in 1..=16 {
                let problem = problem(m, shape, DType::Bf16);
                for design in Design::every() {
                    let made = match decode(design, &problem, &limits) {
                        Err(Obstacle::NoTma) if !limits.tma => continue,
                        Err(Obstacle::Elements) if design == Design::HeldLaunches => continue,
                        made => made.unwrap(),
                    };
                    for config in [Some(made.first), made.second].into_iter().flatten() {
                        assert!(config.shared <= limits.shared, "{problem}: {config:?}");
                    }
                    let at_once = made.first.grid == limits.multiprocessors;
                    assert!(design == Design::TwoLaunches || at_once, "{problem}: {made:?}");
                }
            }
        }
    }
}

/// 4.3 TB/s at 650 to 800 ns: see the head of the device file.
#[test]
fn enough_is_under_way_on_a_hopper() {
    for shape in &SHAPES[..3] {
        for m in 1..=16 {
            let problem = problem(m, *shape, DType::Bf16);
            let made = decode(Design::OneLaunch, &problem, &H200).unwrap();
            assert!(made.first.ring() >= 64 * 1024, "{problem}: {made:?}");
            assert!(made.first.stage_x, "{problem}: x would pass through L2 for every tile");
        }
    }
}

/// The ring holds what arrives in 2 µs and more; h comes at least a stage in advance.
#[test]
fn rings_of_the_tma() {
    for shape in &SHAPES[..3] {
        for m in 1..=16 {
            let problem = problem(m, *shape, DType::Bf16);
            for design in [Design::BulkOneLaunch, Design::BulkOneLaunchWide] {
                let one = decode(design, &problem, &H200).unwrap();
                assert!(one.first.ring() >= 60 * 1024, "{problem}: {one:?}");
                let (wide, long) = (design == Design::BulkOneLaunchWide, shape[0] == 4096);
                assert!(one.first.stage_x || (wide && long && m > 8), "{problem}: {one:?}");
            }
        }
    }
    // Pieces of 896 waste nothing, and nearly the whole of a block's weights is asked for at once.
    let small = decode(Design::BulkOneLaunch, &problem(1, SHAPES[0], DType::Bf16), &H200).unwrap();
    assert!(small.first.ring() >= 195 * 1024, "{small:?}");
}

const QUANTIZED: [QuantizedType; 5] = [
    QuantizedType::Block(BlockType::Q8_0),
    QuantizedType::Block(BlockType::Q4_0),
    QuantizedType::I8,
    QuantizedType::F8E4m3,
    QuantizedType::F8E4m3Blocks,
];

/// Quantised weights of models come through TMA for every M, with 20 KB under way and more.
#[test]
fn rings_of_quantised_weights() {
    for shape in SHAPES {
        for (m, kind) in (1..=16).flat_map(|m| QUANTIZED.map(|kind| (m, kind))) {
            let types = Some(QuantizedTypes::of(Op::Mlp, kind));
            let problem = problem(m, shape, DType::Bf16).with_quantized(types);
            let one = decode(Design::BulkOneLaunch, &problem, &H200).unwrap();
            assert!(one.first.shared <= H200.shared, "{problem}: {one:?}");
            assert!(one.first.ring() >= 34 * 1024, "{problem}: {one:?}");
            let wide = decode(Design::BulkOneLaunchWide, &problem, &H200);
            if m > 8 && kind == QuantizedType::Block(BlockType::Q4_0) {
                assert_eq!(wide, Err(Obstacle::Registers { given: m, most: 8 }), "{problem}");
                continue;
            }
            let wide = wide.unwrap();
            assert!(wide.first.shared <= H200.shared, "{problem}");
            assert_eq!(wide.first.warps, 16, "{problem}");
        }
    }
}

/// Small blocks have all quantised weights of an SM in its shared memory, those of both halves together; what
/// larger ones lack is said.
#[test]
fn quantised_weights_held() {
    for (m, kind) in (1..=16).flat_map(|m| QUANTIZED.map(|kind| (m, kind))) {
        let of = |shape| {
            let types = Some(QuantizedTypes::of(Op::Mlp, kind));
            let problem = problem(m, shape, DType::Bf16).with_quantized(types);
            decode(Design::HeldLaunches, &problem, &H200)
        };
        for shape in [SHAPES[0], [576, 1536], [8, 16], [1, 1], [1024, 2816]] {
            let made = of(shape).unwrap_or_else(|why| panic!("{m} {kind} {shape:?}: {why}"));
            let both = [made.first, made.second.unwrap()];
            assert!(both.iter().all(|half| (1..=132).contains(&half.grid)), "{both:?}");
            // Registers of a thread that those of an SM suffice for, and that the compiler has.
            let (warps, threads): (usize, usize) = if m > 8 { (24, 768) } else { (32, 1024) };
            assert!(
                both.iter().all(|half| half.warps > 0 && 32 * half.warps <= threads),
                "{both:?}"
            );
            assert!(both.iter().map(|half| half.warps).sum::<usize>() <= warps, "{both:?}");
            assert!(both.iter().map(|half| half.shared + 1024).sum::<usize>() <= 228 * 1024);
            assert_eq!(made.check_x(Tensor::new(2, 3), &problem(m, shape, DType::Bf16)), Ok(()));
        }
        // What the lab's records of quantised blocks are of.
        let measured = of(SHAPES[0]).unwrap();
        let warps = [measured.first.warps, measured.second.unwrap().warps];
        assert_eq!(warps, if m > 8 { [14, 10] } else { [21, 10] });
        assert!(matches!(of(SHAPES[2]), Err(Obstacle::SharedMemory { .. } | Obstacle::LongRows)));
    }
    let types = Some(QuantizedTypes::of(Op::Mlp, QuantizedType::I8));
    let refused = |shape| {
        let problem = problem(1, shape, DType::Bf16).with_quantized(types);
        decode(Design::HeldLaunches, &problem, &H200).unwrap_err().to_string()
    };
    assert!(refused(SHAPES[1]).contains("bytes of shared memory, a block has 232448"));
    assert!(refused([8, 1 << 20]).contains("rows so long"));
    let elements = problem(1, SHAPES[0], DType::Bf16);
    assert_eq!(decode(Design::HeldLaunches, &elements, &H200), Err(Obstacle::Elements));
    let ada = decode(Design::HeldLaunches, &elements, &ADA);
    assert_eq!(ada, Err(Obstacle::NoTma));
}

/// One 4-bit weight is enough to lack registers for.
#[test]
fn sixteen_warps_refuse_many_tokens_with_4_bit_weights() {
    let [q4, q8] = [BlockType::Q4_0, BlockType::Q8_0];
    for (gate_up, down) in [(q4, q8), (q8, q4)] {
        let types = Some(QuantizedTypes::new(gate_up, Some(down)));
        let with = |m| problem(m, SHAPES[2], DType::F16).with_quantized(types);
        assert_eq!(decode(Design::BulkOneLaunch, &with(9), &H200).unwrap().first.warps, 8);
        assert_eq!(decode(Design::BulkOneLaunchWide, &with(8), &H200).unwrap().first.warps, 16);
        let why = decode(Design::BulkOneLaunchWide, &with(9), &H200).unwrap_err().to_string();
        assert!(why.contains("9 tokens with 4-bit weights") && why.contains("at most 8"), "{why}");
    }
}

/// Where units and scales lie in a row: apart, and without gaps.
#[test]
fn units_and_scales_fill_a_row() {
    for format in Format::QUANTIZED {
        for units in 1..20 {
            let mut used = vec![0; format.bytes_of(units)];
            let sharing = if format == Format::BlockE4m3 { 2 } else { 1 };
            for unit in 0..units {
                used[format.unit_at(unit)..][..64].iter_mut().for_each(|n| *n += 1);
                let scales = if unit % sharing == 0 { format.scale_bytes() } else { 0 };
                used[format.scales_at(unit)..][..scales].iter_mut().for_each(|n| *n += 1);
            }
            assert!(used.iter().all(|&n| n <= 1), "{format:?} {units}: {used:?}");
            let full = units.is_multiple_of(format.group_units());
            assert!(!full || used.iter().all(|&n| n == 1), "{format:?} {units}: {used:?}");
        }
    }
}

#[test]
fn obstacles_name_what_is_in_the_way() {
    let of = |problem: &Problem, limits: &Limits, design| {
        decode(design, problem, limits).unwrap_err().to_string()
    };
    let one = problem(1, [896, 4864], DType::Bf16);
    let alone = Limits { cooperative: false, ..H200 };
    assert!(of(&one, &alone, Design::OneLaunch).contains("no cooperative launch"));
    assert!(decode(Design::TwoLaunches, &one, &alone).is_ok());
    let gated = one.with_op(Op::GatedLinear);
    assert!(of(&gated, &H200, Design::TwoLaunches).contains("not gated-linear"));
    // A device of one small SM has no room for all partial sums at once; the blocks
    // of two launches may be more.
    let small = Limits { multiprocessors: 1, shared: 48 * 1024, ..ADA };
    assert!(of(&one, &small, Design::OneLaunch).contains("a block has 49152"));
    assert!(decode(Design::TwoLaunches, &one, &small).is_ok());
    let types = QuantizedTypes::new(BlockType::Q8_0, Some(BlockType::Q5_0));
    let mixed = one.with_quantized(types);
    assert!(of(&mixed, &H200, Design::BulkOneLaunch).contains("not Q5_0"));
    assert!(of(&one, &ADA, Design::BulkOneLaunchWide).contains("sm_90a"));
    let narrow = Limits { shared: 48 * 1024, ..H200 };
    assert!(of(&one, &narrow, Design::BulkOneLaunchWide).contains("a block has 49152"));
    assert!(of(&mixed, &H200, Design::OneLaunch).contains("not Q5_0"));
}

#[test]
fn x_is_read_in_place_only_in_whole_copies() {
    let wide = problem(16, [30_000, 64], DType::Bf16);
    let made = decode(Design::OneLaunch, &wide, &H200).unwrap();
    assert!(!made.first.stage_x);
    let takes = |data, stride| made.check_x(Tensor::new(data, stride), &wide);
    assert_eq!(takes(256, 30_000), Ok(()));
    assert_eq!(takes(258, 30_000), Err(Obstacle::Unaligned));
    assert_eq!(takes(256, 30_004), Err(Obstacle::Unaligned));
    let odd = wide.with_hidden(30_001);
    assert_eq!(made.check_x(Tensor::new(256, 30_008), &odd), Err(Obstacle::Unaligned));
}

#[test]
fn variants_differ() {
    for dtype in DType::ALL {
        let all: Vec<_> = variants(dtype).into_iter().chain(sm90_variants(dtype)).collect();
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| b.variant != a.variant), "{}", a.name);
        }
    }
}
