//! The model: what it expects grows with the work, and is near what was measured.

use super::*;
use crate::device::arch::Arch;
use crate::kernels::decode_mlp::Limits;
use crate::plan::machine::{CLOCK_SHARE, KEPT_BYTES, L2_BYTES, MEMORY_SHARE};
use swiglu_core::{Activation, Numerics, Orientation, WeightLayout};

fn unfused(stored: Stored, problem: &Problem, machine: &Machine) -> f64 {
    products(stored, problem, &model(*machine)) + elementwise(stored, problem, machine)
}

fn of_form(form: &Form, problem: &Problem, machine: &Machine) -> f64 {
    let bytes = problem.with_op(Op::GatedLinear).compulsory_bytes();
    of_tiles(form, problem, machine, Ends { cycles: ACTIVATION, bytes })
}

pub(super) fn model(machine: Machine) -> Model {
    let limits = Limits {
        multiprocessors: machine.multiprocessors as usize,
        shared: machine.shared,
        cooperative: true,
        programmatic: true,
        tma: true,
    };
    Model { machine, limits, tf32: false }
}

/// About an H200.
const HOPPER: Machine = Machine {
    multiprocessors: 132.0,
    clock: 1.7e9,
    memory: 4.3e12,
    cache: 50e6,
    tensor: 4096.0,
    mma_share: 0.62,
    shared: 228 << 10,
    l2: L2_BYTES,
    kept: KEPT_BYTES,
    launch: LAUNCH,
    barrier: BARRIER,
};

const SHAPE: Shape =
    Shape { tokens: 16, features: 14336, orientation: Orientation::OutIn, multiprocessors: 132 };

fn problem(m: usize, hidden: usize, intermediate: usize, dtype: DType) -> Problem {
    Problem::new(Op::GatedLinear, m, hidden, intermediate, dtype, Activation::SWIGLU)
        .with_numerics(Numerics::default_for(dtype))
        .with_layout(WeightLayout::HF)
}

/// Microseconds of an H200, bf16, with 1, 2, 4, 8 and 16 tokens: by `sm90_decode_mlp.cu` with 8 warps and
/// with 16, and by the fastest fused kernel before cuBLASLt.
const MEASURED: [([usize; 2], [[f64; 5]; 3]); 3] = [
    (
        [896, 4864],
        [
            [12.5, 13.7, 12.8, 13.8, 16.3],
            [12.8, 13.9, 13.8, 14.7, 17.1],
            [13.9, 13.9, 13.9, 14.2, 14.5],
        ],
    ),
    (
        [2048, 8192],
        [
            [29.9, 30.5, 30.6, 31.5, 34.9],
            [28.3, 29.7, 29.5, 30.6, 32.7],
            [31.0, 30.8, 31.4, 31.3, 32.0],
        ],
    ),
    (
        [4096, 14336],
        [
            [87.3, 90.2, 88.4, 94.9, 101.6],
            [85.4, 88.1, 88.0, 95.4, 114.0],
            [90.0, 90.7, 90.7, 91.3, 92.1],
        ],
    ),
];

/// What is expected of few tokens is true to what was measured, and so is the choice.
#[test]
fn few_tokens_cost_what_they_were_measured_at() {
    let machine = Machine { memory: 4.092e12, clock: 1.98e9 * CLOCK_SHARE, ..HOPPER };
    let model =
        Model { limits: Limits { shared: 232_448, ..model(machine).limits }, ..model(machine) };
    for (shape, measured) in MEASURED {
        for (i, m) in [1, 2, 4, 8, 16].into_iter().enumerate() {
            let [k, h] = shape;
            let p = problem(m, k, h, DType::Bf16).with_op(Op::Mlp);
            let bulk = |design| {
                let made = Decode::check_problem(design, &p, &model.limits).unwrap();
                super::decode(&made, &p, &model)
            };
            let algorithm = hopper_kernels()
                .filter(|kernel| kernel.cluster() == 1)
                .map(|kernel| fused(kernel, &p, &machine) + down(&p, &model))
                .fold(f64::INFINITY, f64::min);
            let designs = [Design::BulkOneLaunch, Design::BulkOneLaunchWide];
            let expected = [bulk(designs[0]), bulk(designs[1]), algorithm];
            let expected = expected.map(|seconds| seconds * 1e6);
            let measured = measured.map(|of| of[i]);
            for (expected, measured) in expected.into_iter().zip(measured) {
                let off = expected / measured - 1.0;
                assert!(off.abs() < 0.11, "{p}: {expected} for {measured}");
            }
            let least = |us: [f64; 3]| (0..3).min_by(|&a, &b| us[a].total_cmp(&us[b])).unwrap();
            let loss = measured[least(expected)] / measured[least(measured)];
            assert!(loss < 1.01, "{p}: {expected:?} for {measured:?}");
        }
    }
}

fn hopper_kernels() -> impl Iterator<Item = Kernel> {
    let computes =
        |k: &Kernel| k.check_problem(Arch::Sm90a, &problem(1, 64, 64, DType::Bf16), false).is_ok();
    Kernel::all().filter(computes)
}

fn best(problem: &Problem) -> Kernel {
    let time = |k: &Kernel| fused(*k, problem, &HOPPER);
    hopper_kernels().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap()
}

#[test]
fn one_more_tile_than_a_wave_costs_a_wave() {
    // Fitted tiles are a wave whatever the features.
    let few = Shape { features: 64, ..SHAPE };
    for kernel in hopper_kernels().filter(|k| k.tile(SHAPE) == k.tile(few)) {
        let form = kernel.form(SHAPE);
        let [rows, columns] = form.tile;
        let clusters = 132 * form.blocks_per_sm / kernel.cluster();
        // As many rows as a wave of one column of tiles has, and one more. Much k, so that
        // arithmetic counts and not the fixed parts.
        let full = clusters * form.share * rows;
        let [one, two] = [full, full + 1]
            .map(|m| fused(kernel, &problem(m, 16384, columns, DType::Bf16), &HOPPER));
        assert!(two > 1.3 * one, "{kernel}: {one} {two}");
    }
}

#[test]
fn few_rows_prefer_small_tiles_and_many_large_ones() {
    let area = |kernel: Kernel| kernel.tile(SHAPE).into_iter().product::<usize>();
    let best = |m| area(best(&problem(m, 4096, 14336, DType::Bf16)));
    assert!(best(16) < best(4096), "{} {}", best(16), best(4096));
    assert_eq!(Some(best(8192)), hopper_kernels().map(area).max());
}

/// What was the fastest of the portable tiles on an H200, or within 5 % of it, and what would be where a
/// SM has room for one block of the large tile.
#[test]
fn portable_choices_follow_the_measurements() {
    let h200 = Machine { clock: 1.98e9 * CLOCK_SHARE, memory: 4.8e12 * MEMORY_SHARE, ..HOPPER };
    let ada = Machine { shared: 100 << 10, ..h200 };
    let best = |machine: &Machine, m, k, h| {
        let p = problem(m, k, h, DType::Bf16);
        let of = |kernel: &Kernel| fused(*kernel, &p, machine);
        let kernels = Kernel::all().filter(|k| matches!(k, Kernel::Mma(_)));
        kernels.min_by(|a, b| of(a).total_cmp(&of(b))).unwrap().to_string()
    };
    for (m, k, h, tile) in [
        (4096, 4096, 14336, "128x64"),
        (1024, 4096, 14336, "128x64"),
        (8192, 2048, 8192, "128x64"),
        (256, 4096, 14336, "128x64"),
        (512, 896, 4864, "64x64"),
        (64, 4096, 14336, "64x64"),
        (32, 2048, 8192, "16x32"),
        (16, 4096, 14336, "16x32"),
    ] {
        assert_eq!(best(&h200, m, k, h), format!("mma_gated_gemm {tile}"), "{m} {k} {h}");
    }
    assert_eq!(best(&ada, 4096, 4096, 14336), "mma_gated_gemm 256x64");
}

/// What was the fastest of the forms without clusters on an H200, or within 6 % of it.
#[test]
fn choices_without_a_record_follow_the_measurements() {
    let machine = Machine { clock: 1.98e9 * CLOCK_SHARE, memory: 4.8e12 * MEMORY_SHARE, ..HOPPER };
    for (m, k, h, fastest) in [
        (16384, 2048, 4096, "sm90_gated_gemm 128x96 ping-pong"),
        (4096, 4096, 14336, "sm90_gated_gemm 128x96 ping-pong"),
        (8192, 4096, 4096, "sm90_gated_gemm 128x96 ping-pong"),
        (2048, 4096, 14336, "sm90_gated_gemm 128x96 ping-pong"),
        (1024, 1024, 4096, "sm90_gated_gemm 128x64 ping-pong"),
        (512, 4096, 14336, "sm90_gated_gemm 128x112"),
        (256, 4096, 14336, "sm90_gated_gemm 128x112"),
        (4096, 896, 4864, "sm90_gated_gemm 128x96 ping-pong"),
        (512, 896, 4864, "sm90_gated_gemm 128x96 ping-pong"),
        (256, 896, 4864, "sm90_skinny_gated_gemm 128xfitted by tokens"),
        (160, 4096, 14336, "sm90_skinny_gated_gemm fittedxfitted"),
        (128, 896, 4864, "sm90_skinny_gated_gemm 128xfitted by tokens"),
        (77, 2880, 2880, "sm90_skinny_gated_gemm 128xfitted by tokens"),
    ] {
        let p = problem(m, k, h, DType::Bf16);
        let time = |kernel: &Kernel| fused(*kernel, &p, &machine);
        let alone = |k: &Kernel| k.cluster() == 1;
        let chosen = hopper_kernels().filter(alone).min_by(|a, b| time(a).total_cmp(&time(b)));
        let name = chosen.map(|kernel| kernel.to_string());
        assert_eq!(name.as_deref(), Some(fastest), "{p}");
    }
}

#[test]
fn hiding_the_epilogue_is_worth_more_where_k_is_small() {
    let gain = |k| {
        let form = Kernel::all().next().unwrap().form(SHAPE);
        let time = |hides_epilogue| {
            let form = Form { hides_epilogue, ..form };
            of_form(&form, &problem(8192, k, 4096, DType::Bf16), &HOPPER)
        };
        time(false) / time(true)
    };
    assert!(gain(512) > gain(4096) && gain(4096) > 1.0, "{} {}", gain(512), gain(4096));
}

#[test]
fn sharing_weights_helps_where_the_cache_is_the_limit() {
    let form = Kernel::all().next().unwrap().form(SHAPE);
    let p = problem(8192, 4096, 4096, DType::Bf16);
    let time = |share| of_form(&Form { share, ..form }, &p, &HOPPER);
    assert!(time(2) < time(1));
}

#[test]
fn nothing_beats_memory_or_the_tensor_cores() {
    for m in [1, 16, 100, 512, 4096] {
        for [k, h] in [[896, 4864], [4096, 14336]] {
            let p = problem(m, k, h, DType::Bf16);
            let floor = (p.compulsory_bytes() / HOPPER.memory)
                .max(p.flops() / (HOPPER.multiprocessors * HOPPER.tensor * HOPPER.clock));
            for kernel in hopper_kernels() {
                assert!(fused(kernel, &p, &HOPPER) > floor, "{kernel} {p}");
            }
            for stored in [Stored::Elements, Stored::Sums] {
                assert!(unfused(stored, &p, &HOPPER) > floor, "{p}");
            }
        }
    }
}

#[test]
fn the_unfused_path_wins_where_arithmetic_is_without_tensor_cores() {
    let p = problem(4096, 4096, 14336, DType::F32);
    let unfused = unfused(Stored::Elements, &p, &HOPPER);
    assert!(unfused < fused(Kernel::Simt, &p, &HOPPER));
}

#[test]
fn with_tensor_cores_the_traffic_of_gate_and_up_decides() {
    for m in [64, 1024, 8192] {
        let p = problem(m, 1024, 4096, DType::Bf16);
        let [elements, sums] = [Stored::Elements, Stored::Sums].map(|s| unfused(s, &p, &HOPPER));
        assert!(fused(best(&p), &p, &HOPPER) < elements && elements < sums, "{p}");
    }
}

/// Fused kernels are faster even than the path that moves half of the bytes, as measured.
#[test]
fn sums_are_not_passed_on_where_a_fused_tile_fits() {
    let sums = |m, k, h| {
        let p = problem(m, k, h, DType::Bf16);
        unfused(Stored::Sums, &p, &HOPPER) < fused(best(&p), &p, &HOPPER)
    };
    for m in [1, 16, 64, 256, 1024, 4096] {
        assert!(!sums(m, 2048, 8192) && !sums(m, 4096, 14336), "{m}");
    }
    assert!(!sums(77, 2880, 2880) && !sums(200, 2880, 2880) && !sums(77, 1280, 3420));
}

#[test]
fn what_stays_in_the_cache_costs_less_than_what_does_not() {
    let p = problem(512, 1024, 4096, DType::Bf16);
    let time = |cache| unfused(Stored::Sums, &p, &Machine { cache, ..HOPPER });
    // Gate and up are 16.8 MB as f32.
    assert!(time(40e6) < 0.95 * time(30e6), "{} {}", time(40e6), time(30e6));
    assert_eq!(time(30e6), time(0.0));
}
