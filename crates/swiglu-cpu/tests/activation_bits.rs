//! The activation operation has the bits of the scalar definition on every façade: a numerics mode means the same
//! everywhere.

// A helper of a test may unwrap as a test does.

use swiglu_core::{Activation, Element, GateUpRef, Matrix, MatrixRef, Numerics, bf16, f16, random};
use swiglu_cpu::{Cpu, CpuOptions, Isa};

/// Ordinary values, every kind of special one, and random bit patterns.
fn values() -> Vec<f32> {
    let mut v = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        -f32::from_bits(0x7F_FFFF),
        f32::MAX,
        65504.0,
        65519.9,
        65520.0,
        1.0 + f32::EPSILON,
        3.389_531_4e38,
        6.0e-8,
        2.98e-8,
        -88.9,
        88.9,
    ];
    v.extend((0..4096).map(|i| f32::from_bits(random::bits(3, i) as u32)));
    v.extend((0..4096).map(|i| random::normal(4, i) * 8.0));
    v
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn check<T: Element>(isa: Isa) {
    let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(1)).unwrap();
    let v: Vec<T> = values().into_iter().map(T::from_f32).collect();
    let n = v.len() - 17;
    let (gate, up) =
        (MatrixRef::new(&v[..n], 1, n).unwrap(), MatrixRef::new(&v[17..], 1, n).unwrap());
    for act in Activation::family() {
        for numerics in Numerics::all() {
            let mut out = Matrix::<T>::zeros(1, n).unwrap();
            let inputs = GateUpRef::separate(gate, up).unwrap();
            cpu.activation(&act, numerics, inputs, out.view_mut()).unwrap();
            for (i, got) in out.as_slice().iter().enumerate() {
                let (g, u) = (v[i].to_f32(), v[i + 17].to_f32());
                let want = act.apply::<T>(numerics, g, u).to_f32();
                assert!(
                    same(got.to_f32(), want),
                    "{isa} {act} {numerics}({g:e}, {u:e}) = {got:?} not {want:e}"
                );
            }
        }
    }
}

#[test]
fn activations_have_the_defined_bits_on_every_facade() {
    for isa in Isa::available() {
        check::<f32>(isa);
        check::<f16>(isa);
        check::<bf16>(isa);
    }
}
