//! Ceilings are measured, so only their being there can be tested.

use swiglu_core::{Activation, Numerics, bf16};
use swiglu_cpu::ceilings::{Reading, Traffic, activation, bandwidth, cached, compute};
use swiglu_cpu::{Cpu, CpuOptions, Isa};

#[test]
fn ceilings_are_finite_and_positive_on_every_facade() {
    for isa in Isa::available() {
        let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(2)).unwrap();
        let c = compute(&cpu);
        let of = |traffic| bandwidth(&cpu, traffic).unwrap();
        let memory = [Traffic::Read, Traffic::Copy, Traffic::Triad].map(of);
        for rate in [c.fma_f32, c.dot_bf16.unwrap_or(1.0)].into_iter().chain(memory) {
            assert!(rate.is_finite() && rate > 0.0, "{isa} {c:?} {memory:?}");
        }
    }
}

#[test]
fn caches_and_activations_have_rates_whatever_the_size() {
    for isa in Isa::available() {
        let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(2)).unwrap();
        for (bytes, writes) in [(0, true), (1, false), (100_000, true), (3 << 20, false)] {
            let rate = cached(&cpu, bytes, writes).unwrap();
            assert!(rate.is_finite() && rate > 0.0, "{isa} {bytes} {writes}: {rate}");
        }
        let numerics = Numerics::default();
        for rate in [
            activation::<f32>(&cpu, &Activation::SWIGLU, numerics).unwrap(),
            activation::<bf16>(&cpu, &Activation::SWIGLU, numerics).unwrap(),
        ] {
            assert!(rate.is_finite() && rate > 0.0, "{isa}: {rate}");
        }
    }
}

#[test]
fn any_number_of_bytes_is_read_on_every_facade() {
    for isa in Isa::available() {
        let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(2)).unwrap();
        for bytes in [0, 1, 100_000, 3 << 20] {
            let reading = Reading::new(&cpu, bytes).unwrap();
            assert!((bytes.max(1)..bytes + (16 << 10) + 1).contains(&reading.bytes()), "{bytes}");
            reading.pass(false);
            reading.pass(true);
        }
        let error = Reading::new(&cpu, usize::MAX).unwrap_err();
        assert!(error.to_string().contains("memory for a buffer"), "{error}");
    }
}
