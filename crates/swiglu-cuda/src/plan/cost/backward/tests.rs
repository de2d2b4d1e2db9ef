use super::*;
use crate::kernels::sm90_dgated_gemm::Config;
use crate::plan::cost::tests::model;
use crate::plan::machine::{BARRIER, CLOCK_SHARE, KEPT_BYTES, L2_BYTES, LAUNCH, MEMORY_SHARE};
use swiglu_core::{Activation, DType, Numerics, WeightLayout};

fn block(m: usize, hidden: usize, intermediate: usize) -> Problem {
    Problem::new(Op::Mlp, m, hidden, intermediate, DType::Bf16, Activation::SWIGLU)
        .with_numerics(Numerics::default_for(DType::Bf16))
        .with_layout(WeightLayout::HF)
}

const H200: Machine = Machine {
    multiprocessors: 132.0,
    clock: 1.98e9 * CLOCK_SHARE,
    memory: 4.8e12 * MEMORY_SHARE,
    cache: 50e6,
    tensor: 4096.0,
    mma_share: 0.62,
    shared: 228 << 10,
    l2: L2_BYTES,
    kept: KEPT_BYTES,
    launch: LAUNCH,
    barrier: BARRIER,
};

/// Microseconds of an H200, of docs/kernels/training-h200.txt: gate and up fused and unfused, and whole backward passes of both.
const MEASURED: [([usize; 3], [f64; 4]); 5] = [
    ([8192, 4096, 14336], [1438.8, 1950.2, 8780.3, 9121.2]),
    ([8192, 2048, 8192], [480.9, 701.8, 2479.9, 2690.7]),
    ([8192, 896, 4864], [195.0, 288.9, 750.1, 840.9]),
    ([2048, 4096, 14336], [370.3, 475.4, 2207.8, 2332.1]),
    ([2048, 896, 4864], [54.1, 77.7, 194.3, 219.3]),
];

/// Within 5 % step by step and within 19 % fused, too short for small K; whole passes within 14 %, too long for small K.
#[test]
fn steps_cost_what_they_were_measured_at() {
    let model = model(H200);
    for ([m, k, h], measured) in MEASURED {
        let p = block(m, k, h);
        let fused = differentiated(Kernel::Sm90(Config::of(k, None)), &p, &H200);
        let unfused = step_by_step(&p, &model);
        let products = input(&p, &model) + gate_up_weights(&p, &model) + down_weight(&p, &model);
        let expected = [fused, unfused, fused + products, unfused + products];
        for ((seconds, us), most) in
            expected.into_iter().zip(measured).zip([0.19, 0.05, 0.14, 0.14])
        {
            let off = seconds * 1e6 / us - 1.0;
            assert!(off.abs() < most, "{p}: {} for {us}", seconds * 1e6);
        }
        assert!(fused < unfused, "{p}");
    }
}

/// The portable kernel is taken where a product with dh in memory takes longer, and that depends on the device.
#[test]
fn what_differentiates_follows_from_the_device() {
    let best = |p: &Problem, machine: &Machine| {
        Kernel::portable()
            .map(|kernel| differentiated(kernel, p, machine))
            .fold(f64::INFINITY, f64::min)
    };
    let is_faster = |[m, k, h]: [usize; 3], machine: Machine| {
        let p = block(m, k, h);
        best(&p, &machine) < step_by_step(&p, &model(machine))
    };
    let a100 = Machine {
        multiprocessors: 108.0,
        clock: 1.41e9 * CLOCK_SHARE,
        memory: 2.0e12 * MEMORY_SHARE,
        cache: 40e6,
        tensor: 2048.0,
        mma_share: 0.85,
        shared: 164 << 10,
        ..H200
    };
    let ada = Machine {
        multiprocessors: 128.0,
        clock: 2.52e9 * CLOCK_SHARE,
        memory: 1.0e12 * MEMORY_SHARE,
        cache: 72e6,
        tensor: 1024.0,
        mma_share: 0.85,
        shared: 100 << 10,
        ..H200
    };
    let blackwell = Machine { tensor: 8192.0, mma_share: 0.25, ..H200 };
    // Where the products are short beside what passes through memory, and where tensor cores have their rate by mma.sync.
    assert!(is_faster([8192, 896, 4864], a100) && !is_faster([8192, 896, 4864], blackwell));
    assert!(is_faster([8192, 4096, 14336], ada) && !is_faster([8192, 4096, 14336], H200));
    assert!(is_faster([300, 64, 96], blackwell));
}

#[test]
fn every_step_costs_more_with_more_to_do() {
    let model = model(H200);
    let small = block(64, 128, 256);
    for more in [small.with_m(8192), small.with_hidden(8192), small.with_intermediate(16384)] {
        let costs: [fn(&Problem, &Model) -> f64; 4] =
            [step_by_step, input, gate_up_weights, down_weight];
        for cost in costs {
            assert!(cost(&more, &model) > cost(&small, &model), "{more}");
        }
    }
    assert!(biases(&small, &H200) > 2.0 * LAUNCH && activation(&small, &H200) > LAUNCH);
}
